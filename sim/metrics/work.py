"""The time ledger: a replica's time, and the tokens that it computed, by purpose.

Every token is useful, recomputed (lost to a preemption and computed again), padding (in a static batch: padded
prompts, and rows computed after their sequence finished) or, where steps verify drafts, rejected. Every tick is idle, swapping or computing; the computing
time of a step is divided among its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory.accounting.run_log import RunLog
from ..types.sums import total


@dataclass(frozen=True)
class Work:
    """Computed tokens and ticks by purpose; each adds up to the total of the run."""

    tokens: dict[str, int]
    ticks: dict[str, int]


def work(run_log: RunLog) -> Work:
    """The time ledger of a run."""
    rows = run_log.rows
    recomputed, padding = _prefill_extras(run_log)
    prefills = rows["prefill_tokens"] > 0
    drafted, kept = _drafts(run_log)
    tokens_then = rows["decodes"] + rows["prefill_tokens"] + drafted
    compute = rows["first_ticks"] - rows["swap_ticks"]
    # A static batch computes a row for every sequence until the last is done.
    ended = rows["batch_size"] - rows["growing"]
    steps = rows["iterations"] - prefills
    tokens = {"recomputed": total(recomputed), "padding": total(padding) + total(ended * steps)}
    if run_log.drafts is not None:
        tokens["rejected"] = total(drafted) - total(kept)
    computed = total(tokens_then[prefills]) + total(rows["batch_size"] * steps) + total(drafted[~prefills])
    tokens["useful"] = computed - sum(tokens.values())
    decoding = rows["ticks"] - rows["swap_ticks"] - np.where(prefills, compute, 0)
    ticks = {
        "recomputed": total(_share(compute, recomputed, tokens_then)),
        "padding": total(_share(compute, padding, tokens_then)) + _share_of_sums(decoding, ended, rows["batch_size"]),
        "swapping": total(rows["swap_ticks"]) - total(run_log.copies["ticks"]),
        "copying": total(run_log.copies["ticks"]),
        # Also rows in which nothing is computed nor moved: blocks are only held.
        "idle": run_log.end_ticks - total(rows["ticks"][(rows["iterations"] > 0) | (rows["swap_ticks"] > 0)]),
    }
    if run_log.drafts is not None:
        batch = np.where(prefills, tokens_then, rows["batch_size"] + drafted)
        ticks["rejected"] = total(_share(compute, drafted - kept, batch))
    ticks["useful"] = run_log.end_ticks - sum(ticks.values())
    return Work(tokens, ticks)


def _prefill_extras(run_log: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Tokens recomputed, and padding of prompts, in the prefill of every row."""
    residencies, rows = run_log.residencies, run_log.rows
    recomputed = np.zeros(len(run_log.row_step), dtype=np.int64)
    np.add.at(recomputed, run_log.residency_row, residencies["recomputed_tokens"])
    np.add.at(recomputed, run_log.row_at(run_log.chunks["start_ticks"]), run_log.chunks["recomputed_tokens"])
    padding = np.zeros_like(recomputed)
    if run_log.together:
        prompts = np.zeros_like(recomputed)
        np.add.at(prompts, run_log.residency_row, residencies["tokens"])
        padding = rows["prefill_tokens"] - prompts
    return recomputed, padding


def _drafts(run_log: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Drafts that each row verifies, and those that outputs keep, int64 [rows]; every row is a step, or has no drafts."""
    drafted, kept = np.zeros((2, len(run_log.row_step)), dtype=np.int64)
    if run_log.drafts is not None:
        row = np.searchsorted(run_log.row_step, run_log.drafts["decode_step"], side="right") - 1
        np.add.at(drafted, row, run_log.drafts["drafts"])
        np.add.at(kept, row, run_log.drafts["kept"])
    return drafted, kept


def _share(ticks: np.ndarray, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Whole ticks of ``ticks * part / whole``, without leaving int64."""
    quotient, rest = np.divmod(ticks, np.maximum(whole, 1))
    return quotient * part + rest * part // np.maximum(whole, 1)


def _share_of_sums(ticks: np.ndarray, part: np.ndarray, whole: np.ndarray) -> int:
    """The sum of ``_share``, rounded once for each (part, whole): independent of the division of steps into rows."""
    some = (part > 0) & (ticks > 0)
    if not some.any():
        return 0
    pairs, place = np.unique(np.stack([part[some], whole[some]]), axis=1, return_inverse=True)
    sums = [total(ticks[some][place.ravel() == number]) for number in range(pairs.shape[1])]
    return sum(ticks * int(share) // int(batch_size) for ticks, (share, batch_size) in zip(sums, pairs.T, strict=True))
