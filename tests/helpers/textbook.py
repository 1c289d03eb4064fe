"""The textbook stories: a handful of sequences on a pool small enough to follow every slot.

Each story is a run of the simulator. Its picture (sequences by iterations) and its log come from the run log. Batches
have four sequences, as in the popular explanations of continuous batching: S3 ends after two iterations, and S2, the
last, after six.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim import Run, Settings, Workload, simulate
from fragmeter.sim.runs.run_log import RunLog
from fragmeter.sim.types.sequence import SWAPPED_IN
from fragmeter.sim.types.ticks import from_seconds

#: Activities of a sequence in an iteration, in the order of a log line, and their words in the log.
_VERBS = {"prefill": "prefill", "decode": "decode", "finished_hold": "hold", "paused": "pause", "waiting": "wait"}


@dataclass(frozen=True)
class Scene:
    """The input of a story: ``settings`` and ``workload``. Request i is named S(i + 1)."""

    title: str
    text: str
    settings: Settings
    workload: Workload


@dataclass(frozen=True)
class Story:
    """A run, iteration by iteration.

    Attributes:
        title, text: The subject, and the behaviour to observe.
        rows: ``{"sequence": "S1", "iteration": 3, "state": ...}``, sequence by sequence, iterations from 1; the state
            is "prefill", "decode", "finished_hold" (ended, its slots still held) or "waiting" (arrived, not on the
            device). Other iterations of a sequence have no row.
        log: One line per iteration: the sequences that are preempted, prefill (with the number of their own tokens
            computed), decode, hold, wait; then the slots of every bucket that is not empty.
    """

    title: str
    text: str
    rows: tuple[dict[str, Any], ...]
    log: tuple[str, ...]


def all_stories() -> list[Story]:
    """Every story, simulated afresh."""
    return [run_scene(scene) for scene in scenes()]


def scenes() -> tuple[Scene, ...]:
    """The scenes of the stories, in reading order."""
    return _static_batch(), _continuous_batch(), _equal_lengths(), _paging()


def run_scene(scene: Scene) -> Story:
    """Simulate a scene step by step, with steps of one second, and return its log and picture.

    Raises:
        UserError: The scene's workload does not fit its settings.
    """
    # The ledger is read in the first step of every leap, so every leap must be one step.
    run = simulate(replace(scene.settings, leap=False), scene.workload, OneSecondStep())
    states = _states(run)
    rows = tuple(
        {"sequence": _name(index), "iteration": step + 1, "state": state}
        for (index, step), state in sorted(states.items())
    )
    return Story(scene.title, scene.text, rows, _log(run, states))


def _states(run: Run) -> dict[tuple[int, int], str]:
    """The state of each request in each of its iterations, by (request, iteration)."""
    run_log = run.log
    states: dict[tuple[int, int], str] = {}
    last_leave: defaultdict[int, int] = defaultdict(int)
    idle = "finished_hold" if run_log.together else "paused"
    last = run_log.iteration_of(run_log.residency_release - 1) + 1 if run_log.together else run_log.release_iteration
    for residency, (index, leave) in enumerate(zip(run_log.residencies["index"].tolist(), last.tolist(), strict=True)):
        begin = int(run_log.row_iteration[run_log.residency_row[residency]])
        states |= {(index, iteration): idle for iteration in range(begin, leave)}
        decodes = run_log.iteration_of(
            np.arange(run_log.residencies["start_step"][residency] + 1, run_log.residency_end[residency])
        )
        states |= {(index, iteration): "decode" for iteration in decodes.tolist()}
        states[index, begin] = "decode" if run_log.residencies["kind"][residency] == SWAPPED_IN else "prefill"
        last_leave[index] = max(last_leave[index], leave)
    states |= dict.fromkeys(_chunks(run_log), "prefill")
    starts = run_log.rows["start_ticks"][run_log.rows["iterations"] > 0]
    for index, leave in last_leave.items():
        arrived = int(np.searchsorted(starts, run.workload.arrival_ticks[index]))
        states = {(index, iteration): "waiting" for iteration in range(arrived, leave)} | states
    return states


def _chunks(run_log: RunLog) -> dict[tuple[int, int], int]:
    """Tokens of every chunk of a prefill, by (request, iteration)."""
    iterations = run_log.row_iteration[run_log.row_at(run_log.chunks["start_ticks"])]
    keys = zip(run_log.chunks["index"].tolist(), iterations.tolist(), strict=True)
    return dict(zip(keys, run_log.chunks["tokens"].tolist(), strict=True))


def _prefills(run_log: RunLog) -> dict[tuple[int, int], int]:
    """Tokens computed by each prefill in an iteration, by (request, iteration)."""
    tokens = _chunks(run_log)
    done: defaultdict[int, int] = defaultdict(int)
    for (index, _), chunk in tokens.items():
        done[index] += chunk
    for residency, row in enumerate(run_log.residency_row.tolist()):
        index = int(run_log.residencies["index"][residency])
        tokens[index, int(run_log.row_iteration[row])] = int(run_log.residencies["tokens"][residency]) - done.pop(
            index, 0
        )
    return tokens


def _log(run: Run, states: dict[tuple[int, int], str]) -> tuple[str, ...]:
    sequences, preempted, prefilled = defaultdict(list), _preempted(run.log), _prefills(run.log)
    for (index, iteration), state in sorted(states.items()):
        tokens = f":{prefilled[index, iteration]}" if state == "prefill" else ""
        sequences[iteration, state].append(_name(index) + tokens)
    # A row without an iteration: every sequence was preempted.
    ran = run.log.rows["iterations"] > 0
    buckets = {name: column[ran] for name, column in run.accounts.at_rows().items()}
    lines = []
    for iteration in range(run.log.num_steps):
        parts = [_part("preempt", preempted[iteration])]
        parts += [_part(verb, sequences[iteration, state]) for state, verb in _VERBS.items()]
        parts += [" ".join(f"{name} {slots[iteration]}" for name, slots in buckets.items() if slots[iteration])]
        lines.append(f"{iteration + 1}: " + " | ".join(filter(None, parts)))
    return tuple(lines)


def _preempted(run_log: RunLog) -> dict[int, list[str]]:
    """Names of the sequences that are preempted when an iteration is scheduled."""
    names = defaultdict(list)
    iterations = run_log.first_iteration_from(run_log.evictions["ticks"])
    for index, iteration in zip(run_log.evictions["index"].tolist(), iterations.tolist(), strict=True):
        names[iteration].append(_name(index))
    return names


def _part(verb: str, names: list[str]) -> str:
    return " ".join([verb, *names]) if names else ""


def _name(index: int) -> str:
    return f"S{index + 1}"


def _static_batch() -> Scene:
    return Scene(
        "Static batching",
        "A batch of four. S3 ends after two iterations, S1 after four, S4 after five; their slots stand idle until"
        " S2 ends after six, and only then do S5, S6 and S7 start.",
        paper_settings(policy="static", **_four_sequences(num_blocks=10)),
        _seven_sequences(),
    )


def _continuous_batch() -> Scene:
    return Scene(
        "Continuous batching",
        "The same seven sequences, scheduled anew in every iteration: S5 takes the place of S3 in the iteration after"
        " S3 has ended, S6 that of S1, S7 that of S4.",
        paper_settings(policy="orca", **_four_sequences(num_blocks=10)),
        _seven_sequences(),
    )


def _equal_lengths() -> Scene:
    return Scene(
        "Static batching, equal lengths",
        "Eight sequences of the same prompt and the same output length, known beforehand: all four of a batch end"
        " together, no slot is held by one that has ended, and static batching loses nothing to continuous batching.",
        paper_settings(policy="static", **_four_sequences(num_blocks=7)),
        _requests("equal lengths", [0] * 8, prompts=[3] * 8, outputs=[4] * 8, max_tokens=[4] * 8),
    )


def _paging() -> Scene:
    return Scene(
        "Paging in a pool too small",
        "Slots are given block by block, as they are needed. In the third iteration S2 needs a block and none is"
        " free: S3, the last to arrive, loses its blocks. It comes back when S2 has ended, and its prompt and the"
        " token that it had generated are computed again.",
        paper_settings(policy="vllm-sosp23", **_four_sequences(num_blocks=6)),
        _requests("three that grow", [0, 0, 0.5], prompts=[5, 7, 5], outputs=[8, 4, 4], max_tokens=[8, 8, 8]),
    )


def _four_sequences(num_blocks: int) -> dict[str, int]:
    return {"max_num_seqs": 4, "num_gpu_blocks_override": num_blocks, "block_size": 4, "max_model_len": 16}


def _seven_sequences() -> Workload:
    """S1 to S4 arrive at the start, S5 to S7 one by one; clients declare max_tokens of six."""
    return _requests(
        "S1 to S7",
        [0, 0, 0, 0, 0.5, 1.5, 2.5],
        prompts=[3, 2, 4, 2, 3, 2, 4],
        outputs=[4, 6, 2, 5, 4, 3, 2],
        max_tokens=[6] * 7,
    )


def _requests(
    name: str, arrivals_s: Iterable[float], prompts: list[int], outputs: list[int], max_tokens: list[int]
) -> Workload:
    arrival_ticks = np.array([from_seconds(at) for at in arrivals_s])
    return Workload(name, arrival_ticks, np.array(prompts), np.array(outputs), np.array(max_tokens))
