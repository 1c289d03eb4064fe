"""The block map of a live server, from the file of ``fragmeter.probe``: a column for each step."""

from __future__ import annotations

from importlib.metadata import version
from os import PathLike
from typing import Any

import numpy as np

from fragmeter.sim.recording.blocks.occupancy import NO_SEQUENCE
from fragmeter.sim.recording.blocks.recorded import SCHEMA_VERSION, BlockMap
from fragmeter.sim.recording.blocks.recording import MOST_ROWS, Column, assembled, spread
from fragmeter.sim.recording.blocks.tables import Tables
from fragmeter.sim.recording.probe import ProbedRun, ProbedTables, read_probe
from fragmeter.sim.types.errors import UserError

_NOTHING = np.zeros(0, dtype=np.int64)
#: What a step shows: tables of the requests that hold blocks, and cached blocks.
_Seen = tuple[list[ProbedTables], list[int]]


def probed_blocks(path: str | PathLike[str], most_steps: int, most_rows: int = MOST_ROWS) -> BlockMap:
    """The map of the first steps in the file of a probe.

    A tick is a step that computes tokens, counted from 0; a sequence is a request. Blocks count from 0, as the simulator
    counts them: the server's null block is left out. Padding of a request beyond its output is ``block_tail``; of a
    request that does not finish in the file it is ``reserved``.

    Args:
        most_steps: Maximum number of steps, at least 1.
        most_rows: Maximum number of blocks.

    Raises:
        TraceError, UserError: As ``read_probe``; the model has several KV groups, or no step computes tokens.
    """
    seen: dict[int, _Seen] = {}

    def watch(step: int, held: list[ProbedTables], cached: list[int]) -> None:
        if step in seen or len(seen) < most_steps:
            seen[step] = held, cached

    probe = read_probe(path, watch=watch)
    if len(probe.header["groups"]) != 1:
        raise UserError(f"{path}: has {len(probe.header['groups'])} KV groups; a block map has one table a request")
    if not seen:
        raise UserError(f"{path}: no step computes tokens; record a server that serves requests")
    size, blocks = probe.block_size, probe.header["num_gpu_blocks"] - 1
    columns = [Column(_tables(size, blocks, *each)) for each in seen.values()]
    places = range(len(columns))
    preempted = [(tick, request) for tick, step in enumerate(seen) for request in probe.steps[step].preempted]
    ticks, requests = np.array(preempted, dtype=np.int64).reshape(-1, 2).T
    preemptions = ticks, requests, np.zeros_like(ticks)
    return assembled(columns, spread(blocks, most_rows), places, places, preemptions, _meta(probe, len(columns)))


def _tables(size: int, blocks: int, held: list[ProbedTables], cached: list[int]) -> Tables:
    tables = [np.array(each.groups[0], dtype=np.int64) - 1 for each in held]
    limits = []
    for each, table in zip(held, tables, strict=True):
        target = len(table) * size if each.target is None else each.target
        limits.append((each.computed, target, 0, 0))
    # A pool without requests has a table, too.
    return Tables(
        size,
        blocks,
        [*limits, (0, 0, 0, 0)],
        [*(each.request for each in held), NO_SEQUENCE],
        [*tables, _NOTHING],
        np.array(cached, dtype=np.int64) - 1,
    )


def _meta(probe: ProbedRun, steps: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "fragmeter": version("fragmeter"),
        "policy": f"vLLM {probe.header['vllm']}",
        "model": probe.header["model"],
        "layout": "paged",
        "block_size": probe.block_size,
        "num_blocks": probe.header["num_gpu_blocks"] - 1,
        "end_ticks": steps,
        "trace_sha256": "",
    }
