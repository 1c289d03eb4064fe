"""Requests as tools log them, and files with columns that the user names."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import Reading, read, read_with_content

#: Requests of 100 + 7 and 30 + 9 tokens, as each tool logs them.
LOGS = {
    "OpenAI": [{"prompt_tokens": 100, "completion_tokens": 7}, {"prompt_tokens": 30, "completion_tokens": 9}],
    "OpenAI's usage": [
        {"id": "a", "usage": {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}},
        {"id": "b", "usage": {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39}},
    ],
    "OpenAI's responses": [
        {"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 7}},
        {"usage": {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 9}},
    ],
    "Anthropic": [
        {"usage": {"input_tokens": 20, "cache_read_input_tokens": 70, "cache_creation_input_tokens": 10, "output_tokens": 7}},
        {"usage": {"input_tokens": 30, "cache_read_input_tokens": None, "cache_creation_input_tokens": 0, "output_tokens": 9}},
    ],
    "OpenTelemetry": [
        {"name": "chat", "attributes": {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 7}},
        {"name": "chat", "attributes": {"gen_ai.usage.input_tokens": 30, "gen_ai.usage.output_tokens": 9}},
    ],
}  # fmt: skip


def lengths(trace) -> list[list[int]]:
    return [trace.prompt_tokens.tolist(), trace.output_tokens.tolist()]


@pytest.mark.parametrize("tool", LOGS)
def test_requests_as_tools_log_them(tool, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, LOGS[tool])))
    named = None
    if tool == "OpenTelemetry":
        named = "prompt=attributes.gen_ai.usage.input_tokens,output=attributes.gen_ai.usage.output_tokens"
    assert lengths(read(path, Reading(columns=named))) == [[100, 30], [7, 9]]


def test_flat_spans_and_exports_of_tables(tmp_path):
    flat = pd.DataFrame({"gen_ai.usage.input_tokens": [100, 30], "gen_ai.usage.output_tokens": [7, 9]})
    flat.to_csv(tmp_path / "spans.csv", index=False)
    flat.to_parquet(tmp_path / "spans.parquet")
    for name in ("spans.csv", "spans.parquet"):
        assert lengths(read(tmp_path / name)) == [[100, 30], [7, 9]]


ROWS = pd.DataFrame(
    {
        "when": ["2026-11-28T08:00:00Z", "2026-11-28T08:00:04Z"],
        "in": [100, 30],
        "out": [7, 9],
        "user": ["x", "y"],
        "limit": [50, 60],
    }
)
NAMED = "arrival=when,prompt=in,output=out,session=user,max_tokens=limit"


@pytest.mark.parametrize("ending", ["csv", "jsonl", "json", "parquet", "csv.gz"])
def test_named_columns_in_every_format(ending, tmp_path):
    path = tmp_path / f"log.{ending}"
    if ending == "parquet":
        ROWS.to_parquet(path)
    else:
        text = ROWS.to_csv(index=False) if "csv" in ending else ROWS.to_json(orient="records", lines=ending == "jsonl")
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    trace = read_with_content(path, Reading(columns=NAMED))
    assert lengths(trace) == [[100, 30], [7, 9]] and trace.max_tokens.tolist() == [50, 60]
    assert np.diff(trace.arrival_ticks).tolist() == [4 * ticks.PER_SECOND]
    assert len(set(trace.content.session_id.tolist())) == 2


def test_they_come_before_columns_of_a_known_format(tmp_path):
    """A file of Azure's with another length beside."""
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens,Mine\n2023-11-16 18:15:46.6805900,374,44,9\n"
    )
    assert lengths(read(tmp_path / "azure.csv", Reading(columns="prompt=Mine,output=GeneratedTokens"))) == [[9], [44]]


@pytest.mark.parametrize(
    "columns",
    [
        "prompt=in",
        "prompt=in,output",
        "prompt=in,output=out,nothing=x",
        "prompt=a,prompt=b,output=c",
        "",
        "prompt=,output=x",
    ],
)
def test_what_is_no_list_of_columns_is_refused(columns):
    with pytest.raises(SettingError) as error:
        Reading(columns=columns)
    assert error.value.field == "columns"


def test_a_column_that_is_not_there(tmp_path):
    ROWS.to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(TraceError, match="no column output_tokens; name it gone"):
        read(tmp_path / "log.csv", Reading(columns="prompt=in,output=gone"))


def test_the_command(tmp_path, capsys):
    ROWS.to_csv(tmp_path / "log.csv", index=False)
    assert (
        status(["simulate", "--trace", str(tmp_path / "log.csv"), "--columns", "arrival=when,prompt=in,output=out"])
        == DONE
    )
    assert status(["simulate", "--trace", str(tmp_path / "log.csv")]) == MISTAKE
    assert "say by --columns" in capsys.readouterr().err
    assert status(["simulate", "--columns", "prompt=in,output=out"]) == MISTAKE
