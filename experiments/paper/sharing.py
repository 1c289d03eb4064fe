"""Memory that the sequences of a request save by sharing blocks: the measurement of SOSP'23's Fig 15.

    saved = 1 - 1 / mean(logical / physical)

*Logical* blocks are the entries of all tables on the device, *physical* blocks are the distinct ones. The mean is
over iterations, as in Figs 2 and 13a. A mean over time would weight each step by its length, and the long steps, which
compute prompts and swap groups, start with the largest shared part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...sim.engine.run import simulate_window
from ...sim.runs.run_log import RunLog
from ...sim.workload.workload import Workload
from ..runs.output import track
from ..runs.parallel import in_parallel
from .paper import SERIES, Experiment, Source
from .settings import paper_settings

SAVED, CLOSED_FORM = "memory_saved_pct", "closed_form_pct"
#: Tokens a block, as in the paper.
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class SharingCase:
    """One run: a measurement in which every request has several sequences.

    Attributes:
        survival: Probability that a beam continues at a step; None for samples.
        step_scale: Factor on the paper's step time; None takes the one fitted on Fig 13a.
    """

    experiment: Experiment
    seed: int
    n: int
    survival: float | None = None
    step_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """Results of one run.

    Attributes:
        values: Saved memory as a mean over iterations, and the closed form for the requests that ran in the window, in
            percent of the logical blocks.
        over_time: Saved memory as a mean over time.
    """

    values: dict[str, float]
    over_time: dict[str, float]


def measure_sharing(
    cases: Sequence[SharingCase], sources: Mapping[Experiment, Source], subject: str
) -> dict[SharingCase, Saved]:
    """The results of the cases; ``subject`` is the text of the progress bar."""
    keys = dict.fromkeys((case.experiment, case.seed) for case in cases)
    workloads = {key: sources[key[0]].workload(*key) for key in keys}
    jobs = [(workloads[case.experiment, case.seed], case) for case in cases]
    return dict(zip(cases, track(in_parallel(measure, jobs), subject, len(jobs)), strict=True))


def measure(workload: Workload, case: SharingCase) -> Saved:
    """Serve a workload up to the end of the window, step by step, and average over the window's steps."""
    beams = {} if case.survival is None else {"use_beam_search": True, "beam_survival": case.survival}
    chosen = paper_settings(
        policy=SERIES["vLLM"],
        block_size=BLOCK_SIZE,
        leap=False,
        seed=case.seed,
        step_scale=case.step_scale,
        window=case.experiment.window_s,
        **beams,
    )
    log = simulate_window(chosen, replace(workload, n=np.full(len(workload), case.n))).log
    ratio, ticks = _sharing(log, *chosen.edges)
    ran = _requests_in(log, case.n, *chosen.edges)
    closed = closed_form_pct(workload.prompt_tokens[ran], workload.output_tokens[ran], case.n)
    return Saved({SAVED: _saved_pct(ratio), CLOSED_FORM: closed}, {SAVED: _saved_pct(ratio, ticks)})


def _sharing(log: RunLog, start_ticks: int, end_ticks: int) -> tuple[np.ndarray, np.ndarray]:
    """Logical over physical blocks of each step of a window with held blocks, and the duration of the step."""
    rows = log.rows
    steps = (
        (rows["start_ticks"] >= start_ticks) & (rows["start_ticks"] + rows["ticks"] < end_ticks) & (rows["held"] > 0)
    )
    held, saved = rows["held"][steps], rows["saved"][steps]
    return (held + saved) / held, rows["first_ticks"][steps]


def _saved_pct(ratio: np.ndarray, weights: np.ndarray | None = None) -> float:
    return float(100 * (1 - 1 / np.average(ratio, weights=weights)))


def _requests_in(log: RunLog, n: int, start_ticks: int, end_ticks: int) -> np.ndarray:
    """Requests with a sequence that became resident in a window."""
    begun = log.residencies["start_ticks"]
    return np.unique(log.residencies["index"][(begun >= start_ticks) & (begun < end_ticks)] // n)


def closed_form_pct(
    prompt_tokens: np.ndarray, output_tokens: np.ndarray, n: int, block_size: int = BLOCK_SIZE
) -> float:
    """Memory saved by n samples of each request, in percent, if they share only the full blocks of the prompt.

    A request of p prompt and o output tokens holds p + 1 to p + o - 1 tokens while it decodes. In each of these steps
    its n tables have n * ceil(tokens / block) entries, and (n - 1) * floor(p / block) of them name a shared block
    again. The result is the sum of the latter over all steps of all requests divided by the sum of the former, because
    a pool holds many requests at once.
    """
    prompt, last = np.asarray(prompt_tokens), prompt_tokens + output_tokens - 1
    saved = (n - 1) * (prompt // block_size) * (last - prompt)
    logical = n * (blocks_up_to(last, block_size) - blocks_up_to(prompt, block_size))
    return float(100 * saved.sum() / logical.sum())


def blocks_up_to(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks of 1, 2, ... ``tokens`` tokens, summed."""
    full, rest = np.divmod(tokens, block_size)
    return block_size * (full * (full + 1) // 2) + rest * (full + 1)
