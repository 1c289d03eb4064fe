"""Prefix caches, one request at a time: an independent simulator's hits beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from os import PathLike
from typing import Any

from rich import box
from rich.table import Table

from ...sim.output.files import as_json
from ...sim.output.folders import OutputFolder
from ...sim.types.errors import SettingError
from ...traces import HashedTrace, read_hashed
from ..paper.comparison import Payload
from ..paper.rows import Row, as_finding
from ..runs.output import Report, track
from .prefix_cache_replay import INFINITE, POLICIES, PrefixTrace, hit_tokens, prefix_trace
from .telling import finding_lines

FIGURE = "prefix-cache"
#: Capacities for a trace that the oracle does not know.
CAPACITY_BLOCKS = (100, 300, 1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
_MEASURED, _ALL = "hit_tokens", "all_requests_hit_tokens"


@cache
def oracle() -> Mapping[str, Any]:
    """The whole of ``facts/prefix_cache.json``."""
    return json.loads(resources.files(__package__).joinpath("facts/prefix_cache.json").read_text("utf-8"))


def reproduce_prefix_cache(
    path: str | PathLike[str] | None, seeds: int | None, report: Report, folder: OutputFolder | None
) -> None:
    """Replay a trace's block hashes under every policy and report it; into the folder goes the document.

    Raises:
        UserError: No trace is given, or one without block hashes; seeds are given; the folder cannot be written.
    """
    if path is None:
        raise SettingError("trace", None, f"{FIGURE} replays block hashes; give a trace in JSON lines with hash_ids")
    if seeds is not None:
        raise SettingError("seeds", seeds, f"{FIGURE} replays a trace as it is; leave the seeds out")
    payload = compare_prefix_caches(read_hashed(path))
    tell_prefix_caches(payload, report)
    if folder is not None:
        folder.write(f"{FIGURE}.json", as_json(payload))
    report.data(payload)


def compare_prefix_caches(hashed: HashedTrace) -> Payload:
    """The hits of every policy at every capacity beside the oracle's, where it knows the trace."""
    trace = prefix_trace(hashed)
    counts = fingerprint(hashed, trace)
    name = recognised(counts)
    rows = list(_rows(trace, {} if name is None else oracle()["traces"][name]))
    return {
        "figure": FIGURE,
        "workload": (
            f"{hashed.trace.name}: {counts['requests']:,} requests, {counts['blocks']:,} blocks,"
            f" {counts['tokens']:,} tokens"
        ),
        "recognised": name,
        "fingerprint": counts,
        "rows": rows,
        "findings": _findings(rows),
        "basis": list(_basis(name)),
        "remarks": list(_remarks(name, rows)),
        "semantics": oracle()["semantics"],
    }


def fingerprint(hashed: HashedTrace, trace: PrefixTrace) -> dict[str, int]:
    """The counts by which a trace is known, whatever its file is called."""
    return {
        "requests": len(hashed),
        "blocks": len(hashed.hash_ids),
        "block_ids": len(set(hashed.hash_ids.tolist())),
        "prefixes": trace.num_prefixes,
        "tokens": int(hashed.block_tokens.sum()),
    }


def recognised(counts: Mapping[str, int]) -> str | None:
    """What the oracle calls the trace with these counts, or None."""
    return next((name for name, facts in oracle()["traces"].items() if facts["fingerprint"] == counts), None)


def _rows(trace: PrefixTrace, facts: Mapping[str, Any]) -> Iterator[Row]:
    totals = {_ALL: sum(map(sum, trace.tokens)), _MEASURED: sum(map(sum, _last_half(trace.tokens)))}
    capacities = facts.get("capacity_blocks", CAPACITY_BLOCKS)
    published = {policy: facts.get(policy, [None] * len(capacities)) for policy in POLICIES}
    runs = [(policy, *at) for policy in POLICIES for at in zip(capacities, published[policy], strict=True)]
    for policy, capacity, value in track(runs, FIGURE, len(runs)):
        yield _row(policy, _MEASURED, capacity, value, hit_tokens(trace, policy, capacity), totals)
    hits = hit_tokens(trace, INFINITE)
    for metric in (_MEASURED, _ALL):
        yield _row(INFINITE, metric, None, facts.get(INFINITE, {}).get(metric), hits, totals)


def _last_half(by_request: list[Any]) -> list[Any]:
    return by_request[len(by_request) // 2 :]


def _row(
    policy: str, metric: str, capacity: int | None, published: int | None, hits: list[int], totals: dict[str, int]
) -> Row:
    """One value beside the oracle's, in design.md's form, with the share of the tokens asked for."""
    simulated = sum(hits if metric == _ALL else _last_half(hits))
    return {
        "series": policy,
        "metric": metric,
        "x": capacity,
        "published": published,
        "how": None if published is None else "oracle",
        "simulated": simulated,
        "error": None if published is None else simulated - published,
        "kind": "predicted",
        "hit_rate_pct": round(100 * simulated / totals[metric], 3) if totals[metric] else 0.0,
    }


def _findings(rows: list[Row]) -> list[dict[str, Any]]:
    errors = [row["error"] for row in rows if row["error"] is not None]
    if not errors:
        return []
    text = f"{errors.count(0)} of {len(errors)} values equal the oracle's, to the token."
    return [as_finding(text, not any(errors))]


def _basis(name: str | None) -> Iterator[str]:
    if name is None:
        known = ", ".join(oracle()["traces"])
        yield f"Not recognised: the oracle was run on {known} (known by their counts), so there is nothing to compare."
    else:
        facts = oracle()["traces"][name]
        yield f"Recognised by its counts: {name} ({facts['origin']}; {facts['licence']}). Blocks: {facts['blocks']}."
    yield f"Oracle: {oracle()['source']}. Licence: {oracle()['licence']}."


def _remarks(name: str | None, rows: list[Row]) -> Iterator[str]:
    yield "Requests are served one at a time; hits count over the last half of them, where not said otherwise."
    if name is not None and any(row["published"] is None for row in rows):
        yield "The oracle gives no value where a cache is not full when that half begins."


def tell_prefix_caches(payload: Payload, report: Report) -> None:
    """The table, whether all is equal, and what it rests on."""
    report.say(f"{FIGURE}: tokens hit in a cache of so many blocks, the oracle's and ours", style="bold")
    report.say(payload["workload"])
    report.console.print(_table(payload["rows"]))
    report.say()
    for text in [*finding_lines(payload), *payload["basis"], *payload["remarks"]]:
        report.say(text)


def _table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in ("blocks", "oracle", "ours", "difference", "hit rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is not None and following["series"] != row["series"]
        table.add_row(f"{row['series']}{', all' * (row['metric'] == _ALL)}", *_cells(row), end_section=last)
    return table


def _cells(row: Row) -> Iterator[str]:
    yield "-" if row["x"] is None else f"{row['x']:,}"
    yield "-" if row["published"] is None else f"{row['published']:,}"
    yield f"{row['simulated']:,}"
    yield "-" if row["error"] is None else f"{row['error']:+,}" if row["error"] else "0"
    yield f"{row['hit_rate_pct']:.1f} %"
