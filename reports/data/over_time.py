"""Batch and throughput of a run over time, in equal spans, from its tables.

Each quantity is the difference of a cumulative function at the spans' edges, so the spans add up to the run: no token
and no second is counted twice or left out. In a row of ``steps.parquet``, a leap, ``growing`` sequences gain a token a
step. After x picoseconds j steps are done, with

    x = first * j                                               for j below 1
    x = first + next * m + slope * m * (m - 1) / 2,  m = j - 1  above

This is exact at the ends of steps and linear between them. Two kinds of tokens belong to no row: the tokens of prompts
that end while others pause come at the end of the row, and the first token of a forked sequence comes with that of its
request. A sequence runs during its residencies (``residencies.parquet``). A request waits between its arrival and its
end whenever none of its sequences runs.
"""

from __future__ import annotations

import numpy as np

from ...sim.output import frames as pd
from ...sim.types.ticks import PER_SECOND

MOST_SPANS = 400
COLUMNS = ("start_s", "end_s", "running", "waiting", "output_tokens", "prompt_tokens")


def over_time(requests: pd.DataFrame, residencies: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row for each of ``MOST_SPANS`` equal spans of a run, from its tables.

    Columns: ``start_s`` and ``end_s``; ``running``, the number of computing sequences, and ``waiting``, the number of
    requests without a computing sequence, both as means over the span; ``output_tokens`` and ``prompt_tokens``,
    computed in the span, with recomputed prompts and padding included. A run without steps has no rows.
    """
    end_ticks = int((steps["start_ticks"] + steps["ticks"]).max()) if len(steps) else 0
    if not end_ticks:
        return pd.DataFrame(columns=list(COLUMNS), dtype=float)
    edges = np.linspace(0, end_ticks, MOST_SPANS + 1).round().astype(np.int64)
    served = requests[requests["finish_ticks"].notna()]
    under_way_s = _covered_s(served["arrival_ticks"], served["finish_ticks"], edges)
    span_s = np.diff(edges) / PER_SECOND
    outputs, prompts = np.zeros(len(edges)), np.zeros(len(edges))
    for rows, own in _replicas(steps, residencies):
        outputs += _steps_tokens(rows, edges) + np.searchsorted(_lone_tokens(rows, own, requests), edges, side="right")
        prompts += _prompt_tokens(rows, edges)
    columns = (
        edges[:-1] / PER_SECOND,
        edges[1:] / PER_SECOND,
        _covered_s(residencies["start_ticks"], residencies["end_ticks"], edges) / span_s,
        # Rounding can leave a small negative rest.
        np.maximum(under_way_s - _covered_s(*_apart(residencies), edges), 0) / span_s,
        np.diff(outputs),
        np.diff(prompts),
    )
    return pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))


def _covered_s(starts: pd.Series, ends: pd.Series, edges: np.ndarray) -> np.ndarray:
    """Seconds between the starts and the ends, summed over all intervals, between each edge and the next."""
    return np.diff(_past_s(starts, edges) - _past_s(ends, edges))


def _past_s(times: pd.Series, edges: np.ndarray) -> np.ndarray:
    """Seconds since each past time, summed, at each edge."""
    ordered_s, edges_s = np.sort(times.to_numpy(np.int64)) / PER_SECOND, edges / PER_SECOND
    count = np.searchsorted(ordered_s, edges_s, side="right")
    return count * edges_s - np.concatenate([[0.0], np.cumsum(ordered_s)])[count]


def _apart(residencies: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Starts and ends of the residencies, with the overlaps within one request merged."""
    ordered = residencies.sort_values(["request", "start_ticks"], kind="stable")
    latest = ordered.groupby("request")["end_ticks"].cummax()
    before = latest.groupby(ordered["request"]).shift(fill_value=0)
    starts = np.maximum(ordered["start_ticks"], before)
    return starts, np.maximum(ordered["end_ticks"], starts)


def _replicas(steps: pd.DataFrame, residencies: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Steps and residencies of each replica; a run of one replica has no replica numbers."""
    if "replica" not in steps:
        return [(steps, residencies)]
    return [(rows, residencies[residencies["replica"] == number]) for number, rows in steps.groupby("replica")]


def _steps_tokens(rows: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    """Output tokens of the steps up to each edge."""
    tokens = (rows["growing"] * rows["steps"]).to_numpy()
    row, into = _place(rows, edges)
    first, later, slope, steps, growing = (
        rows[name].to_numpy()[row] for name in ("first_ticks", "next_ticks", "slope_ticks", "steps", "growing")
    )
    after = np.maximum(into - first, 0).astype(np.float64)
    pace = later - slope / 2
    root = np.sqrt(pace**2 + 2 * slope * after)
    done = np.where(into < first, into / np.maximum(first, 1), 1 + 2 * after / np.maximum(pace + root, 1))
    return _before(tokens)[row] + growing * np.minimum(done, steps)


def _prompt_tokens(rows: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    """Prompt tokens up to each edge; all tokens of a row are in its first step."""
    tokens = rows["prefill_tokens"].to_numpy()
    row, into = _place(rows, edges)
    share = np.minimum(into / np.maximum(rows["first_ticks"].to_numpy()[row], 1), 1.0)
    return _before(tokens)[row] + tokens[row] * share


def _place(rows: pd.DataFrame, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The current row at each edge, and the ticks since its start, at most its duration."""
    starts, taken = rows["start_ticks"].to_numpy(), rows["ticks"].to_numpy()
    row = np.maximum(np.searchsorted(starts, edges, side="right") - 1, 0)
    return row, np.clip(edges - starts[row], 0, taken[row])


def _before(tokens: np.ndarray) -> np.ndarray:
    return np.cumsum(tokens) - tokens


def _lone_tokens(rows: pd.DataFrame, residencies: pd.DataFrame, requests: pd.DataFrame) -> np.ndarray:
    """Times of the tokens that no row counts, int64, ascending."""
    firsts = residencies["first_token_ticks"].to_numpy()
    row = np.searchsorted(rows["start_ticks"].to_numpy(), firsts, side="left") - 1
    paused = firsts[rows["steps"].to_numpy()[row] == 0]
    forked = residencies["request"][residencies["begun"] == "forked"]
    return np.sort(np.concatenate([paused, requests["first_token_ticks"][forked].to_numpy(np.int64)]))
