"""The page of ``fragmeter explore``: sliders over a grid of finished runs, and the page around them.

The page computes nothing: a position of the sliders is the index of a run of each policy, whose numbers and pictures are in
the page as packed integers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from ...sim.memory import BUCKETS
from ...sim.metrics.registry import METRICS
from ...sim.metrics.views import SLOT_CATEGORIES, WASTE
from ...sim.policy.registry import policy
from ..blockmap.palette import KIND_LABELS, KINDS, palette, plain_palette
from ..page.page import Section, write_page
from ..style.packing import packed
from .axis import Axis, axes_data
from .moments import MOST_MOMENTS, WHOLE, Moments
from .questions import questions

#: Decimals of the numbers that the page has, by their paths in ``summary.json``.
DECIMALS = {
    path: METRICS[path].decimals
    for path in (
        "output_throughput",
        "mean_ttft_ms",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "request_throughput",
        "mean_batch",
        "preemptions.recompute",
        "preemptions.swap",
        "refused",
    )
}
#: Shares of the bars are stored in thousandths of a percent, so that sums of them round as the exact ones.
_PER_PERCENT = 1000
#: In place of a number that a run does not have.
_NONE = -1
#: What is written for policies that a reader meets first; the others have their system's name.
_POLICIES = {
    "static": (
        "Static batches",
        "A batch starts and ends together. Each request reserves the longest in it.",
    ),
    "orca": ("Orca", "Each request reserves, in one piece, its prompt and the longest answer it declares."),
    "orca-max": ("Orca (Max)", "Each request reserves, in one piece, the longest text that the model can take."),
    "orca-pow2": ("Orca (Pow2)", "Each request reserves, in one piece, its answer rounded up to a power of two."),
    "orca-oracle": ("Orca (Oracle)", "Each request reserves, in one piece, exactly its answer, as if that were known."),
    "vllm-sosp23": ("vLLM", "A request takes a block when its last is full, from anywhere. A full pool preempts one."),
    "vllm-v1": (
        "vLLM V1",
        "A request takes a block when its last is full. Blocks of finished ones serve as a prefix cache.",
    ),
}


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run of the grid.

    Attributes:
        policy: Its name.
        command, python: The lines that make the same run.
        numbers: Those of ``DECIMALS``; None for one that the run does not have.
        shares: Percent of the pool in each bucket, mean over iterations.
        moments: None if it could not be run.
        error: Why it could not.
    """

    policy: str
    command: str
    python: str
    numbers: tuple[float | None, ...] = ()
    shares: tuple[float, ...] = ()
    moments: Moments | None = None
    error: str = ""


@dataclass(frozen=True, eq=False)
class Explorer:
    """The widget of the page.

    Attributes:
        axes: The crossed ones first.
        names: Policies, side by side.
        states: For each state, the index of the run of each policy; ``experiments.explore.axes`` has their order.
        runs: All runs.
        max_model_len: Tokens of the longest request that the model accepts.
    """

    axes: Sequence[Axis]
    names: Sequence[str]
    states: Sequence[Sequence[int]]
    runs: Sequence[FinishedRun]
    max_model_len: int
    kind: ClassVar[str] = "explore"
    figures: ClassVar[Sequence[go.Figure]] = ()

    @property
    def sliders(self) -> list[Axis]:
        """The axes with a choice."""
        return [axis for axis in self.axes if len(axis.values) > 1]

    @property
    def policies(self) -> list[tuple[str, str]]:
        """Title and description of each policy."""
        return [_words(name) for name in self.names]

    @property
    def questions(self) -> list[Any]:
        """What to try first."""
        return questions(self.sliders, self.names, self.max_model_len)

    @property
    def definitions(self) -> list[tuple[str, str, str]]:
        """Bucket, label and definition of each colour that some run shows."""
        seen = np.zeros(len(BUCKETS), dtype=bool)
        for run in self.runs:
            if run.moments is not None:
                seen |= (np.asarray(run.shares) >= 100 / WHOLE) | (run.moments.shares > 0).any(axis=0)
        chosen = [bucket for bucket, is_seen in zip(BUCKETS, seen, strict=True) if is_seen]
        return [(bucket, SLOT_CATEGORIES[bucket].label, SLOT_CATEGORIES[bucket].definition) for bucket in chosen]

    @property
    def waste(self) -> str:
        """The definition of waste."""
        return WASTE.definition

    @property
    def data(self) -> Any:
        """All runs, for the script."""
        lines = "\n".join(line for run in self.runs for line in (run.command, run.python))
        return {
            "axes": axes_data(self.axes),
            "titles": [title for title, _ in self.policies],
            "questions": self.questions,
            "states": packed(np.array(self.states)),
            "numbers": packed(np.array([_scaled(run) for run in self.runs])),
            "shares": packed(np.array([_share_row(run) for run in self.runs])),
            "moments": {name: packed(values) for name, values in _stacked(self.runs).items()},
            "maps": [_map(run) for run in self.runs],
            "lines": packed(np.frombuffer(lines.encode(), dtype=np.uint8)),
            "errors": [run.error for run in self.runs] if any(run.error for run in self.runs) else [],
        }  # fmt: skip

    @property
    def constants(self) -> Mapping[str, Any]:
        """Colours in both schemes, names of numbers, and which buckets are waste."""
        colours = {"light": palette() + plain_palette(), "dark": palette(is_dark=True) + plain_palette(is_dark=True)}
        facts = {
            "colours": colours,
            "plain": len(palette()),
            "kinds": list(KINDS),
            "labels": KIND_LABELS,
            "buckets": list(BUCKETS),
            "waste": list(WASTE.buckets),
            "numbers": [[name, decimals] for name, decimals in DECIMALS.items()],
            "moments": MOST_MOMENTS,
            "none": _NONE,
            "per_percent": _PER_PERCENT,
        }
        return {
            "explore_columns": len(self.names),
            "explore_facts": json.dumps(facts),
            "explore_buckets": list(zip(KINDS, plain_palette(), plain_palette(is_dark=True), strict=True)),
        }


def write_explorer(path: str | os.PathLike[str], lead: str, explorer: Explorer, about: str) -> Path:
    """Write the page to ``path``, and return the path; it appears whole or not at all.

    Args:
        lead: What the page is about.
        about: How its runs were made.

    Raises:
        UserError: It cannot be written.
    """
    rows = [_row(explorer.runs[run]) for run in explorer.states[start_state(explorer.axes)]]
    sections = [
        Section("Move a slider", widgets=[explorer], key="sliders"),
        Section("Where the numbers come from", about, rows=rows, key="about"),
    ]
    return write_page(path, "Where does the KV cache go?", lead, sections)


def start_state(axes: Sequence[Axis]) -> int:
    """Number of the state in which every slider is at its start."""
    number = 0
    for axis in axes:
        if axis.is_crossed:
            number = number * len(axis.values) + axis.start
    return number * (1 + sum(len(axis.values) - 1 for axis in axes if not axis.is_crossed))


def _words(name: str) -> tuple[str, str]:
    return _POLICIES.get(name) or (name, f"{policy(name).system}.")


def _row(run: FinishedRun) -> dict[str, Any]:
    """A run as a row of a table, for a page without scripts."""
    numbers = {METRICS[path].heading: value for path, value in zip(DECIMALS, run.numbers, strict=False)}
    shares = dict(zip(BUCKETS, run.shares, strict=False))
    waste = {"waste, %": sum(shares[bucket] for bucket in WASTE.buckets)} if shares else {}
    return {"policy": _words(run.policy)[0]} | waste | numbers | ({"not run": run.error} if run.error else {})


def _scaled(run: FinishedRun) -> list[int]:
    if not run.numbers:
        return [_NONE] * len(DECIMALS)
    return [
        _NONE if value is None or not isfinite(value) else round(value * 10**decimals)
        for value, decimals in zip(run.numbers, DECIMALS.values(), strict=True)
    ]


def _share_row(run: FinishedRun) -> list[int]:
    return [round(share * _PER_PERCENT) for share in run.shares] or [0] * len(BUCKETS)


def _stacked(runs: Sequence[FinishedRun]) -> dict[str, np.ndarray]:
    """The moments of all runs, those of a shorter one filled up with its last."""
    lengths = [0 if run.moments is None else len(run.moments.at_ms) for run in runs]

    def rows(name: str, *shape: int) -> np.ndarray:
        filled = np.zeros((len(runs), MOST_MOMENTS, *shape), dtype=np.int64)
        for row, run, count in zip(filled, runs, lengths, strict=True):
            if run.moments is not None:
                row[:count] = getattr(run.moments, name)
                row[count:] = row[count - 1]
        return filled

    names = ("at_ms", "running", "waiting", "preempted")
    return {name: rows(name) for name in names} | {
        "shares": rows("shares", len(BUCKETS)),
        "count": np.array(lengths),
        "end_ms": np.array([0 if run.moments is None else run.moments.end_ms for run in runs]),
    }


def _map(run: FinishedRun) -> Any:
    """The block map: its pixels, the blocks that it shows and those of the pool, and whether it has addresses."""
    if run.moments is None:
        return None
    found = run.moments
    return [packed(found.pixels.T), found.pixels.shape[1], found.num_blocks, int(found.is_counted)]
