"""The time ledger: a replica's time, and the tokens that it computed, by purpose.

Every token is useful, recomputed (lost to a preemption and computed again), padding (in a static batch: padded
prompts, and rows computed after their sequence finished) or, where steps verify drafts, rejected. Every tick is idle, swapping or computing; the computing
time of a step is divided among its tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..runs.run_log import RunLog
from ..types.columns import slices
from ..types.once import once
from ..types.sums import total


@dataclass(frozen=True)
class Work:
    """Computed tokens and ticks by purpose; each adds up to the total of the run."""

    tokens: dict[str, int]
    ticks: dict[str, int]


@once
def work(run_log: RunLog) -> Work:
    """The time ledger of a run."""
    drafted, kept = _drafts(run_log)
    recomputed, padding = _prefill_extras(run_log)
    sums: Counter[str] = Counter()
    ended: Counter[tuple[int, int]] = Counter()
    for part in slices(len(run_log.row_step)):
        rows = {name: column[part] for name, column in run_log.rows.items()}
        extras = recomputed[part], padding[part], drafted[part], kept[part]
        sums.update(_sums(rows, *extras, ended))
    tokens = {name: sums[f"{name} tokens"] for name in ("recomputed", "padding")}
    if run_log.drafts is not None:
        tokens["rejected"] = sums["rejected tokens"]
    tokens["useful"] = sums["computed tokens"] - sum(tokens.values())
    # Rounded once for each share: independent of the division of steps into rows.
    batches = sum(ticks * share // batch_size for (share, batch_size), ticks in ended.items())
    copying = total(run_log.copies["ticks"])
    ticks = {
        "recomputed": sums["recomputed ticks"],
        "padding": sums["padding ticks"] + batches,
        "swapping": sums["swap ticks"] - copying,
        "copying": copying,
        "idle": run_log.end_ticks - sums["busy ticks"],
    }
    if run_log.drafts is not None:
        ticks["rejected"] = sums["rejected ticks"]
    ticks["useful"] = run_log.end_ticks - sum(ticks.values())
    return Work(tokens, ticks)


def _sums(
    rows: dict[str, np.ndarray],
    recomputed: np.ndarray,
    padding: np.ndarray,
    drafted: np.ndarray,
    kept: np.ndarray,
    ended_ticks: Counter[tuple[int, int]],
) -> dict[str, int]:
    """Tokens and ticks of some rows.

    Args:
        recomputed, padding, drafted, kept: As of ``_prefill_extras`` and ``_drafts``, of these rows.
        ended_ticks: Takes the ticks of steps that compute ended sequences, by how many these are and of how many.
    """
    prefills = rows["prefill_tokens"] > 0
    tokens_then = rows["decodes"] + rows["prefill_tokens"] + drafted
    compute = rows["first_ticks"] - rows["swap_ticks"]
    # A static batch computes a row for every sequence until the last is done.
    ended = rows["batch_size"] - rows["growing"]
    steps = rows["iterations"] - prefills
    decoding = rows["ticks"] - rows["swap_ticks"] - np.where(prefills, compute, 0)
    _add_by_share(ended_ticks, decoding, ended, rows["batch_size"])
    # Not rows in which nothing is computed nor moved: blocks are only held.
    busy = (rows["iterations"] > 0) | (rows["swap_ticks"] > 0)
    batch = np.where(prefills, tokens_then, rows["batch_size"] + drafted)
    return {
        "recomputed tokens": total(recomputed),
        "padding tokens": total(padding) + total(ended * steps),
        "rejected tokens": total(drafted) - total(kept),
        "computed tokens": total(tokens_then[prefills]) + total(rows["batch_size"] * steps) + total(drafted[~prefills]),
        "recomputed ticks": total(_share(compute, recomputed, tokens_then)),
        "padding ticks": total(_share(compute, padding, tokens_then)),
        "rejected ticks": total(_share(compute, drafted - kept, batch)),
        "swap ticks": total(rows["swap_ticks"]),
        "busy ticks": total(rows["ticks"][busy]),
    }


def _prefill_extras(run_log: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Tokens recomputed, and padding of prompts, in the prefill of every row."""
    residencies, rows = run_log.residencies, run_log.rows
    recomputed = np.zeros(len(run_log.row_step), dtype=np.int64)
    _add_at_rows(recomputed, run_log.residency_row, residencies["recomputed_tokens"])
    np.add.at(recomputed, run_log.row_at(run_log.chunks["start_ticks"]), run_log.chunks["recomputed_tokens"])
    if not run_log.together:
        return recomputed, np.broadcast_to(0, len(recomputed))
    prompts = np.zeros_like(recomputed)
    _add_at_rows(prompts, run_log.residency_row, residencies["tokens"])
    return recomputed, rows["prefill_tokens"] - prompts


def _add_at_rows(sums: np.ndarray, row: np.ndarray, values: np.ndarray) -> None:
    for part in slices(len(row)):
        np.add.at(sums, row[part], values[part])


def _drafts(run_log: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Drafts that each row verifies, and those that outputs keep, int64 [rows]; every row is a step, or has no drafts."""
    if run_log.drafts is None:
        return (np.broadcast_to(0, len(run_log.row_step)),) * 2
    drafted, kept = np.zeros((2, len(run_log.row_step)), dtype=np.int64)
    row = np.searchsorted(run_log.row_step, run_log.drafts["decode_step"], side="right") - 1
    np.add.at(drafted, row, run_log.drafts["drafts"])
    np.add.at(kept, row, run_log.drafts["kept"])
    return drafted, kept


def _share(ticks: np.ndarray, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Whole ticks of ``ticks * part / whole``, without leaving int64."""
    quotient, rest = np.divmod(ticks, np.maximum(whole, 1))
    return quotient * part + rest * part // np.maximum(whole, 1)


def _add_by_share(sums: Counter[tuple[int, int]], ticks: np.ndarray, part: np.ndarray, whole: np.ndarray) -> None:
    """Add the ticks of rows with a part to the sums by (part, whole)."""
    some = (part > 0) & (ticks > 0)
    if not some.any():
        return
    pairs, place = np.unique(np.stack([part[some], whole[some]]), axis=1, return_inverse=True)
    for number, (share, batch_size) in enumerate(pairs.T.tolist()):
        sums[share, batch_size] += total(ticks[some][place.ravel() == number])
