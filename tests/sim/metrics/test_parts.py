"""Columns of long runs are read in parts: parts of a few rows give what one part gives."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.prefix import residency
from fragmeter.sim.metrics import gaps, prefix_cache, result
from fragmeter.sim.metrics.result import TABLES, table_of, write
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs import growth, integrals, run_log
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types import columns
from fragmeter.traces import synthetic_pairs, workload

#: Every limit of rows that are read at a time.
LIMITS = (
    (residency, "_CHUNK"), (integrals, "_CHUNK_ROWS"), (integrals, "_CHUNK_CHANGES"), (gaps, "_CHUNK_ROWS"),
    (gaps, "_CHUNK_OBJECTS"), (gaps, "_SORTED_ROWS"), (columns, "CHUNK"), (columns, "_SHORT"), (result, "ROW_GROUP"),
    (prefix_cache, "_MOST_KEPT"), (run_log, "_MOST_TABLE_STEPS"), (growth, "_CHUNK_STEPS"),
)  # fmt: skip

#: Rows of a part, of tables of hundreds of rows.
PART = 17


def served(policy: str, **switches: bool) -> Run:
    """Requests that arrive faster than they are served: some are preempted, and their blocks hit."""
    work = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 150, 0, 2048), 8)
    return simulate(settings(policy=policy, num_gpu_blocks_override=300, **switches), work)


@pytest.mark.slow
@pytest.mark.parametrize("spilled", [True, False])
@pytest.mark.parametrize(
    ("policy", "core"),
    [("vllm-v1", True), ("vllm-v1", False), ("vllm-sosp23", True), ("vllm-sosp23", False), ("static", True)],
)
def test_parts_of_a_few_rows_give_what_one_part_gives(policy, core, spilled, tmp_path, monkeypatch):
    """Of the compiled core's passes, and of those in numpy."""
    whole = served(policy)
    found, tables = summary(whole), {name: table_of(whole, name) for name in TABLES}
    assert policy == "static" or sum(found["preemptions"].values())
    for module, name in LIMITS:
        assert getattr(module, name) > len(whole.log.rows["steps"])
        monkeypatch.setattr(module, name, PART)
    with columns.spilling(tmp_path / "to" / "come" if spilled else None):
        parts = served(policy, core=core)
        assert isinstance(parts.log.rows["live"].base, memoryview) == spilled
        assert summary(parts) == found
        for name, table in tables.items():
            assert table.equals(table_of(parts, name)), name
        folder = write(parts, tmp_path / "result", {}, content=found)
    for name, table in tables.items():
        table.to_parquet(tmp_path / "whole.parquet", index=False)
        written = pq.ParquetFile(folder / f"{name}.parquet")
        assert written.num_row_groups == max(1, -(-len(table) // PART))
        assert written.schema_arrow.equals(pq.read_schema(tmp_path / "whole.parquet"), check_metadata=True)
        assert written.read().equals(pq.read_table(tmp_path / "whole.parquet"))
    assert {path.name for path in tmp_path.iterdir()} == {"result", "whole.parquet"}


@pytest.mark.parametrize("policy", ["vllm-sosp23", "static"])
def test_a_log_is_copied_and_pickled(policy):
    """The copy has no compiled core."""
    run = served(policy)
    for log in (pickle.loads(pickle.dumps(run.log)), deepcopy(run.log)):
        assert log.compiled is None
        assert summary(replace(run, log=log)) == summary(run)


@pytest.mark.parametrize("policy", ["vllm-v1", "static"])
def test_what_a_log_forgets_is_computed_again(policy):
    run = served(policy)
    before = {name: table_of(run, name) for name in TABLES}
    derived = set(vars(run.log))
    run.log.forget()
    assert {"row_step", "residency_end", "tails"} <= derived - set(vars(run.log))
    assert {field for field in vars(run.log) if isinstance(vars(run.log)[field], np.ndarray)} == {
        "leader", "output_tokens", "prompt_tokens",
    }  # fmt: skip
    assert all(table.equals(table_of(run, name)) for name, table in before.items())


@pytest.mark.parametrize("steps", [[3, 0, 0, 2, 1, 0], [0, 4, 1], [0, 0], [5]])
def test_a_table_of_steps_finds_the_rows_that_a_search_finds(steps):
    whole = served("vllm-sosp23").log
    for rows in (whole.rows, {"steps": np.array(steps)}):
        log = replace(whole, rows=rows)
        # Up to two steps after the last one, where the last row counts, whether it has steps or none.
        every = np.arange(-1, rows["steps"].sum() + 3)
        assert log._row_table is not None
        assert log._row_of(every).tolist() == (np.searchsorted(log.row_step, every, side="right") - 1).tolist()
