"""Seconds and milliseconds beside the ticks of a result's tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cli_runs import run_here
from fragmeter.reports.data.declared import TABLES
from fragmeter.reports.data.results import read_result
from fragmeter.sim.metrics.result import served_times
from paths import ROOT

PAGE = (ROOT / "docs" / "outputs.md").read_text()
#: Per table, what each column of ticks is called in its unit.
BESIDE = {
    "requests": {
        "arrival_ticks": "arrival_s",
        "first_scheduled_ticks": "first_scheduled_s",
        "first_token_ticks": "first_token_s",
        "finish_ticks": "finish_s",
    },
    "residencies": {"start_ticks": "start_s", "first_token_ticks": "first_token_s", "end_ticks": "end_s"},
    "preemptions": {"ticks": "time_s"},
    "steps": {
        "start_ticks": "start_s",
        "ticks": "duration_ms",
        "first_ticks": "first_ms",
        "next_ticks": "next_ms",
        "slope_ticks": "slope_ms",
        "swap_ticks": "swap_ms",
    },
    "memory": {"start_ticks": "start_s"},
    "gaps": {"first_ticks": "first_ms", "slope_ticks": "slope_ms"},
}
UNITS = {"s": 1e12, "ms": 1e9}
CASES = {
    "swapping": ["--policy", "vllm-v0", "--preemption-mode", "swap", "--num-gpu-blocks-override", 130],
    "refusing": ["--policy", "vllm-sosp23", "--num-gpu-blocks-override", 40],
    "cluster": ["--policy", "vllm-v1", "--prefill-replicas", 1, "--decode-replicas", 2],
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def result(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results") / "run"
    trace = out.parent / "trace.csv"
    # The last request is longer than the pool of "refusing".
    rows = [(place / 20, 20 + 13 * place % 90, 1 + 31 * place % 300) for place in range(40)] + [(2.5, 700, 40)]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{text}\n")
    done = run_here("simulate", "--trace", trace, *request.param, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.mark.parametrize("name", BESIDE)
def test_every_column_of_ticks_has_its_time_behind_it(name, result):
    table = pd.read_parquet(result / f"{name}.parquet")
    names = list(table)
    ticks = {column for column in names if column == "ticks" or column.endswith("_ticks")}
    assert ticks - {"transfer_ticks"} == BESIDE[name].keys()
    for column, beside in BESIDE[name].items():
        assert names[names.index(column) + 1] == beside and f"`{beside}`" in PAGE
        expected = table[column].to_numpy(np.float64, na_value=np.nan) / UNITS[beside.rpartition("_")[2]]
        np.testing.assert_array_equal(table[beside].to_numpy(np.float64), expected)
        assert table[beside].isna().equals(table[column].isna())


def test_latencies_are_those_of_the_run(result):
    requests = pd.read_parquet(result / "requests.parquet")
    times, served = served_times(requests), requests["finish_ticks"].notna().to_numpy()
    assert served.any()
    for name in ("ttft_ms", "e2el_ms"):
        np.testing.assert_array_equal(requests[name][served], getattr(times, name))
    np.testing.assert_array_equal(requests["tpot_ms"][served & (requests["output_tokens"] > 1)], times.tpot_ms)
    assert requests["tpot_ms"][requests["output_tokens"] == 1].isna().all()
    queued = (times.first_scheduled_ticks - times.arrival_ticks) / 1e9
    np.testing.assert_array_equal(requests["queue_time_ms"][served], queued)
    assert requests.loc[~served, ["queue_time_ms", "ttft_ms", "tpot_ms", "e2el_ms"]].isna().all(axis=None)


def test_the_cases_have_what_they_are_for(result, request):
    case = request.node.callspec.id
    requests = pd.read_parquet(result / "requests.parquet")
    if case == "cluster":
        moved = requests["transfer_ticks"].notna()
        assert moved.any() and not moved.all()
        assert (requests["transfer_ms"][moved] == requests["transfer_ticks"][moved].astype("float64") / 1e9).all()
    if case == "swapping":
        assert requests["swapped"].sum() > 0 and len(pd.read_parquet(result / "preemptions.parquet"))
    assert requests["refused"].any() == (case == "refusing")


def test_a_folder_without_these_columns_reads_the_same(result, tmp_path):
    """As earlier versions wrote it: readers take times from the ticks."""
    for path in result.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = read_result(result)
    for name in TABLES:
        table = pd.read_parquet(result / f"{name}.parquet")
        table.drop(columns=[column for column in table if column.endswith(("_s", "_ms"))]).to_parquet(
            tmp_path / f"{name}.parquet", index=False
        )
    after = read_result(tmp_path)
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(after, name), getattr(before, name))
