"""The pool over time by what its cached blocks were worth, and what a run says of them in one sentence."""

from __future__ import annotations

from typing import Any

from ...sim.memory import BUCKETS
from ...sim.memory.accounting.worths import WORTH_COLUMNS
from ...sim.output import frames as pd
from ...sim.types.ticks import PER_SECOND
from .results import Result

#: A run with a larger share of undecided slots among the cached ones says too little of the others.
MOST_UNDECIDED_PCT = 20
#: Below this share of the pool a time to live is not named.
_LEAST_FREED_PCT = 1


def worth_over_time(result: Result) -> pd.DataFrame | None:
    """``start_s``, slots that are held, of each worth, and free, a row per leap; None of a run without the columns.

    No row shows what changes while nothing runs.
    """
    memory = result.memory
    if (
        result.num_replicas > 1
        or "cache_worth" not in result.summary
        or not all(column in memory for column in WORTH_COLUMNS.values())
    ):
        return None
    held = sum(memory[bucket] for bucket in BUCKETS if bucket not in ("cached", "free"))
    columns = {"start_s": memory["start_ticks"] / PER_SECOND, "held": held}
    return pd.DataFrame(
        columns | {worth: memory[name] for worth, name in WORTH_COLUMNS.items()} | {"free": memory["free"]}
    )


def _undecided_pct(found: dict[str, Any]) -> float | None:
    """Share of the cached slots that are undecided; None where nothing is cached, or looked up."""
    pct = found["pool_pct"]
    cached = sum(pct.values())
    return 100 * pct["undecided"] / cached if cached and found.get("asked_blocks", 1) else None


def says_worth(found: dict[str, Any]) -> bool:
    """Whether enough is decided to say what the cached blocks were worth."""
    undecided = _undecided_pct(found)
    return undecided is not None and undecided <= MOST_UNDECIDED_PCT


def worth_sentence(found: dict[str, Any]) -> str:
    """What a run says of its cached blocks, from ``cache_worth`` of its summary."""
    pct = found["pool_pct"]
    undecided = _undecided_pct(found)
    if undecided is None:
        return "Nothing is cached, or looked up."
    if undecided > MOST_UNDECIDED_PCT:
        return f"The run ends too early to say: {undecided:.0f} % of the cached slot-hours are undecided. Serve a longer record."
    return (
        f"{pct['never'] + pct['too_late']:.0f} % of the pool's slot-hours hold blocks that are evicted without another hit"
        f" ({pct['too_late']:.0f} % are looked for again, too late), and {pct['hit_later']:.0f} % blocks that are hit"
        f"{_bounds(found)}{_host(found)}{_duplicates(found)}"
    )


def _bounds(found: dict[str, Any]) -> str:
    """The end of the sentence, of a run with bounds."""
    if "asked_blocks" not in found:
        return "."
    rates = (100 * found[f"{name}hit_blocks"] / found["asked_blocks"] for name in ("", "fixed_schedule_", "infinite_"))
    actual, fixed, infinite = (f"{rate:.1f} %" for rate in rates)
    # Of several KV groups the bound is no less than what the best order hits, and no pool is known to suffice.
    most, closing = "at most ", ""
    if "closing_blocks" in found:
        most, closing = "", f", for which {found['closing_blocks']:,} blocks suffice"
    return (
        f"; of the blocks that requests ask for {actual} are hit, where the best order of eviction would have hit {most}{fixed} and a"
        f" cache without end {infinite}, on the same schedule{closing}.{_time_to_live(found)}"
    )


def _host(found: dict[str, Any]) -> str:
    """What it says of the host, where there is one."""
    if "host" not in found:
        return ""
    pct = found["host"]["pool_pct"]
    return (
        f" Of the host's slot-hours {pct['duplicate']:.0f} % hold copies of blocks that the GPU has, {pct['hit_later']:.0f} % blocks that"
        f" are loaded later, {pct['never'] + pct['too_late']:.0f} % blocks that are evicted without that, and {pct['undecided']:.0f} %"
        " blocks that are there at the end."
    )


def _duplicates(found: dict[str, Any]) -> str:
    """What it says of the copies of a fleet."""
    if "duplicates" not in found:
        return ""
    pct = found["duplicates"]["pool_pct"]
    return f" {pct:.1f} % of the slot-hours hold copies of what another replica caches, which a router by prefix saves."


def _time_to_live(found: dict[str, Any]) -> str:
    """One time to live, of one replica."""
    if "time_to_live" not in found:
        return ""
    kept = found["time_to_live"]
    if kept["freed_pct"] < _LEAST_FREED_PCT:
        return " No time to live frees 1 % of the pool at a loss of at most one point of hit rate."
    lost = 100 * kept["lost_blocks"] / found["asked_blocks"]
    return (
        f" A time to live of {kept['seconds']:,} s frees {kept['freed_pct']:.0f} % of the pool's slot-hours at a loss of at most"
        f" {lost:.1f} points of hit rate."
    )
