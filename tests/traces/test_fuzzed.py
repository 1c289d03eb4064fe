"""Samples of every form, damaged at random: refused in one line that says where, or read without the bad rows."""

from __future__ import annotations

import gzip
import json
import pickle
import time
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types.errors import TraceError, UserError
from fragmeter.traces import Reading, read_with_content, write
from paths import SAMPLES

LINES = [
    "azure2023.csv", "azure2024.csv", "burstgpt.csv", "burstgpt_sessions.csv", "vidur_timed.csv", "splitwise.csv",
    "mooncake.jsonl", "timed_trace.jsonl", "bailian.jsonl", "ragpulse/0_trace.jsonl", "ours.jsonl",
    "aiperf.jsonl",
]  # fmt: skip
WHOLE = [
    "sharegpt.json",
    "bench_serve.json",
    "sglang_bench.jsonl",
    "guidellm.json",
    "inference_perf.json",
    "langfuse.json",
    "jaeger.json",
    "agents.jsonl",
]
JUNK = [
    "nan",
    "NaN",
    "-1",
    "inf",
    "1e999",
    "9" * 30,
    "",
    "\0",
    "null",
    "[",
    '"',
    "\ufffd",
    "2023-11-16",
    "true",
    "1.5",
    "{}",
]


def cells(draw, line: str) -> str:
    """A line with one of its values in the place of another, or junk in one's place."""
    mark = "," if not line.startswith("{") else ":"
    parts = line.split(mark)
    place = draw(st.integers(0, len(parts) - 1))
    parts[place] = draw(st.one_of(st.sampled_from(JUNK), st.sampled_from(parts), st.text(max_size=3)))
    return mark.join(parts)


@st.composite
def damaged(draw, text: str) -> bytes:
    """A file in which some lines, or some bytes, are not what they were."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["cells", "cut", "again", "away", "swapped", "joined"]))
        if how == "cells":
            lines[row] = cells(draw, lines[row])
        elif how == "cut":
            lines[row] = lines[row][: draw(st.integers(0, len(lines[row])))]
        elif how == "again":
            lines.insert(row, lines[row])
        elif how == "away" and len(lines) > 1:
            del lines[row]
        elif how == "swapped":
            lines.insert(0, lines.pop(row))
        elif how == "joined":
            lines[row : row + 2] = ["".join(lines[row : row + 2])]
    data = bytearray("\n".join(lines).encode())
    for _ in range(draw(st.integers(0, 2)) if draw(st.booleans()) else 0):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@pytest.mark.parametrize("name", LINES + WHOLE)
@settings(max_examples=20)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_read(tmp_path_factory, name, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed" / Path(name).name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data.draw(damaged((SAMPLES / name).read_text())))
    try:
        trace = read_with_content(path)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        trace = None
    try:
        left = read_with_content(path, Reading(skip_bad=True))
    except UserError as error:
        assert "\n" not in str(error) and trace is None, "what can be read can be read without its bad rows"
        return
    if trace is not None:
        assert (left.left_out.bad, left.prompt_tokens.tolist()) == (0, trace.prompt_tokens.tolist())
    else:
        assert left.left_out.bad and left.left_out.first_bad
    assert left.prompt_tokens.min() >= 1 and left.output_tokens.min() >= 1


def squeezed(data: bytes, kind: str) -> bytes:
    return gzip.compress(data, mtime=0) if kind == "gzip" else pa.compress(data, codec="zstd", asbytes=True)


def binary(kind: str, folder: Path) -> bytes:
    """A sample in a form that is no text."""
    if kind == "pickle":
        return pickle.dumps([(1, 2), (3, 4), (5, 70_000)])
    if kind == "parquet":
        write(read_with_content(SAMPLES / "ours.jsonl"), folder / "ours.parquet")
        return (folder / "ours.parquet").read_bytes()
    return squeezed((SAMPLES / "mooncake.jsonl").read_bytes(), kind)


@pytest.mark.parametrize("kind", ["parquet", "pickle", "gzip", "zstd"])
@settings(max_examples=100)
@given(edits=st.lists(st.tuples(st.integers(0), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=4))
def test_damaged_bytes_are_refused_in_one_line_or_read(tmp_path_factory, kind, edits):
    folder = tmp_path_factory.getbasetemp()
    data = bytearray(binary(kind, folder))
    for place, length, put in edits:
        place %= len(data)
        data[place : place + length] = put
    path = folder / f"damaged.{kind}"
    path.write_bytes(data)
    for reading in (Reading(), Reading(skip_bad=True, max_inflated_bytes=10**8)):
        try:
            read_with_content(path, reading)
        except UserError as error:
            assert "\n" not in str(error)


def test_a_parquet_file_with_column_names_that_are_no_text(tmp_path):
    path = tmp_path / "trace.parquet"
    path.write_bytes(binary("parquet", tmp_path).replace(b"output_tokens", b"output_\xe0okens"))
    with pytest.raises(TraceError, match="is not a readable Parquet file"):
        read_with_content(path)


BAD_LINES = {
    "azure2023.csv": [
        "2023-13-16 18:15:51,1,1",
        "2023-11-16 18:15:51,1",
        "now,5,6",
        "2023-11-16 18:15:51,nan,1",
        "\x00",
    ],
    "azure2024.csv": ["2024-05-10 00:00:00,1,1", "2024-05-10 00:00:00+00:00,1e30,1", "1.5,1,1"],
    "burstgpt.csv": ["60,GPT-4,-3,5,2,API log", "1e18,GPT-4,3,5,2,API log", "60,GPT-4,3", "GPT-4,60,3,5,8,API log"],
    "mooncake.jsonl": [
        '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": 6, "output_length": 1, "hash_ids": [1.5]}',
        '{"timestamp": 1, "input_length": 6, "output_length": 1}',
        '{"timestamp": 1, "input_length": 6, "out',
        '{"timestamp": NaN, "input_length": 6, "output_length": 1, "hash_ids": [1]}',
        "\ufffd\x01",
    ],
    "ragpulse/0_trace.jsonl": [
        '{"timestamp": "noon", "input_length": 6, "output_length": 1, "hash_ids": {}}',
        '{"timestamp": "1", "input_length": 6, "output_length": 1, "hash_ids": [1]}',
    ],
    "bailian.jsonl": ['{"chat_id": "x", "parent_chat_id": -1, "timestamp": 70, "input_length": 1, "output_length": 1}'],
    "ours.jsonl": ['{"arrival_s": 1, "prompt_tokens": 1e12, "output_tokens": 1, "hash_ids": [], "block_tokens": []}'],
}


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, lines in BAD_LINES.items() for bad in lines])
def test_a_bad_line_is_named_or_skipped(tmp_path, name, bad):
    good = (SAMPLES / name).read_text().splitlines()
    path = tmp_path / Path(name).name
    path.write_text("\n".join([*good[:2], bad, "", *good[2:]]))
    with pytest.raises(TraceError, match=", line 3: "):
        read_with_content(path)
    left = read_with_content(path, Reading(skip_bad=True))
    assert left.left_out.bad == 1 and ", line 3: " in left.left_out.first_bad
    path.write_text("\n".join(good))
    assert left.prompt_tokens.tolist() == read_with_content(path).prompt_tokens.tolist()


def test_binary_junk_between_lines(tmp_path):
    path = tmp_path / "burst.csv"
    good = (SAMPLES / "burstgpt.csv").read_bytes().splitlines()
    path.write_bytes(b"\n".join([*good[:2], b"\xff\xfe\x00\x80", *good[2:]]))
    with pytest.raises(TraceError, match="line 3: is not UTF-8 text"):
        read_with_content(path)
    assert len(read_with_content(path, Reading(skip_bad=True))) == 3


def test_a_conversation_that_is_none_is_skipped_and_one_that_breaks_off_is_named(tmp_path):
    path = tmp_path / "sharegpt.json"
    talk = json.dumps({"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Me."}]})
    path.write_text(f"[\n{talk},\n7,\n{talk}]")
    with pytest.raises(TraceError, match="line 3: conversation = 7: must have a list of conversations"):
        read_with_content(path)
    left = read_with_content(path, Reading(skip_bad=True))
    assert (len(left), left.left_out.bad) == (2, 1)
    path.write_text(f"[\n{talk},\n{talk[:30]}")
    for reading in (Reading(), Reading(skip_bad=True)):
        with pytest.raises(TraceError, match="line 3: ends within an element; fetch the file again"):
            read_with_content(path, reading)


@pytest.mark.slow
def test_where_most_rows_are_bad_it_is_not_the_rows(tmp_path):
    path = tmp_path / "far_apart.csv"
    rows = "".join(f"{row and 10**9 + row},1,2\n" for row in range(5000))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    with pytest.raises(
        TraceError, match="line 3: arrival_s = 1000000001: is more than 97 days after the first; cut the trace"
    ):
        read_with_content(path, Reading(skip_bad=True))


class TestBombs:
    LIMIT = Reading(max_inflated_bytes=10_000_000, skip_bad=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["gzip", "zstd"])
    @pytest.mark.parametrize(
        "data", [b"\0" * 20_000_000, b"input,output\n" + b"1,2\n" * 3_000_000], ids=["zeros", "rows"]
    )
    def test_a_small_file_may_not_inflate_without_end(self, tmp_path, data, kind):
        path = tmp_path / "bomb"
        path.write_bytes(squeezed(data, kind))
        assert path.stat().st_size < 300_000
        before = time.process_time()
        with pytest.raises(TraceError, match="inflates to more than 10,000,000 bytes; raise max_inflated_bytes"):
            read_with_content(path, self.LIMIT)
        assert time.process_time() - before < 60, "refused before it is inflated"
        with pytest.raises(UserError):
            read_with_content(path, Reading(max_inflated_bytes=1))

    @pytest.mark.slow
    def test_a_line_without_end(self, tmp_path):
        path = tmp_path / "bomb.gz"
        path.write_bytes(gzip.compress(b"\0" * 70_000_000))
        with pytest.raises(TraceError, match="line 1: is longer than 67,108,864 bytes; give one request a line"):
            read_with_content(path)

    def test_archives_and_damage(self, tmp_path):
        path = tmp_path / "trace"
        path.write_bytes(b"PK\x03\x04and so on")
        with pytest.raises(TraceError, match="is a zip archive, not a trace of requests; unpack it"):
            read_with_content(path)
        for kind in ("gzip", "zstd"):
            path.write_bytes(squeezed((SAMPLES / "azure2023.csv").read_bytes(), kind)[:-6])
            with pytest.raises(TraceError, match=f"is a damaged {kind} file; fetch it again"):
                read_with_content(path)


def test_the_program_refuses_or_skips(tmp_path, capsys):
    path = tmp_path / "bad.csv"
    rows = ["2023-11-16 18:15:46,100,5", "x,1,1", "2023-11-16 18:15:47,99999,5"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert status(["traces", "stats", str(path)]) == MISTAKE
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1 and "line 3: TIMESTAMP = 'x'" in refused
    assert status(["traces", "convert", str(path), str(tmp_path / "new.csv"), "--skip-bad"]) == DONE
    assert "Skipped: 1 bad rows. The first:" in capsys.readouterr().out
    assert status(["simulate", "--trace", str(path), "--skip-bad"]) == DONE
    assert "Skipped: 2 bad rows" in capsys.readouterr().out, "too long is bad, too"
