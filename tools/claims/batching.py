"""Claims about the scheduling of static and of continuous batches.

Stories are runs of a few requests in which every step takes one second.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fragmeter.sim import Run
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces import stream

from .claim import Code, Judged, Part, Values
from .runs import Trial, few, story

_DRAWS, _BATCH = 20, 4


def _three_sources(trial: Trial) -> Values:
    """A (prompt 7, output 3, max_tokens 2,041) and B (3, 2, 509) run; C, as long as A, finds no 2,048 free slots."""
    work = few([7, 3, 7], [3, 2, 1], [2041, 509, 2041], [0, 0, 1])
    run = story("orca", work, block_size=1, num_gpu_blocks_override=2048 + 512 + 1024)
    second = {bucket: int(slots[1]) for bucket, slots in run.accounts.at_rows().items()}
    return {
        "reserved": second["reserved"],
        "over_estimate": second["over_estimate"],
        "free_and_too_small": second["stranded"] + second["free"],
        "waiting": int(run.log.rows["waiting"][1]),
    }


def judge_three_sources(values: Mapping[str, float]) -> Judged:
    """Each kind of waste has at least one slot, and a third request waits."""
    blocked = values["free_and_too_small"] if values["waiting"] else 0
    return Judged(
        (
            Part("slots reserved for tokens to come", values["reserved"], 1),
            Part("slots for an output that never comes", values["over_estimate"], 1),
            Part("free slots, too few for the waiting request", blocked, 1),
        ),
        f"reserved {values['reserved']:.0f} (2 + 1), never used {values['over_estimate']:.0f} (2,038 + 507 in the"
        f" paper's Fig 3), free and too few for a third request {blocked:.0f}",
        "A contiguous piece of the longest length must be had at once, and is empty but for the tokens so far.",
    )


def _seven(policy: str) -> Run:
    """S1 to S7 of the story ``static-vs-continuous``, four at a time."""
    arrivals_s, prompts, outputs = [0, 0, 0, 0, 0.5, 1.5, 2.5], [3, 2, 4, 2, 3, 2, 4], [4, 6, 2, 5, 4, 3, 2]
    sizes = {"max_num_seqs": 4, "num_gpu_blocks_override": 10, "block_size": 4, "max_model_len": 16}
    return story(policy, few(prompts, outputs, [6] * 7, arrivals_s), **sizes)


def _static_of_four(trial: Trial) -> Values:
    log = _seven("static").log
    first = {int(index): residency for residency, index in enumerate(log.residencies["index"])}
    idle = (log.residency_release - log.residency_end)[[first[index] for index in (0, 2, 3)]]
    last = log.residency_end - log.residencies["start_step"]
    return {
        "s3_ends_after": int(last[first[2]]),
        "s2_ends_after": int(last[first[1]]),
        "idle_iterations": int(idle.sum()),
    }


def judge_static_of_four(values: Mapping[str, float]) -> Judged:
    """S3 ends after two iterations, S2 after six, and places in the batch stay idle in between."""
    third, second, idle = (values[name] for name in ("s3_ends_after", "s2_ends_after", "idle_iterations"))
    return Judged(
        (
            Part("S3, which ends after two iterations", third, 2, 2),
            Part("S2, which ends after six", second, 6, 6),
            Part("idle places in the batch", idle, 1),
        ),
        f"S3 ends after {third:.0f} iterations, S2 after {second:.0f}; places in the batch are idle for {idle:.0f} iterations in all",
        "No request starts and no slot is freed before the last request of a batch has finished.",
    )


def _equal_lengths(trial: Trial) -> Values:
    random = stream(trial.seed, "claims equal lengths")
    unequal = [_finished_hold(random.integers(1, 20, 2 * _BATCH)) for _ in range(_DRAWS)]
    equal = [_finished_hold(np.full(2 * _BATCH, length)) for length in random.integers(1, 20, _DRAWS)]
    return {"most_equal": max(equal), "least_unequal": min(unequal)}


def _finished_hold(outputs: np.ndarray) -> int:
    work = few([4] * len(outputs), outputs.tolist(), [20] * len(outputs))
    run = story("static", work, max_num_seqs=_BATCH, max_model_len=64)
    return run.window.slot_steps["finished_hold"]


def judge_equal_lengths(values: Mapping[str, float]) -> Judged:
    """Finished sequences hold no slot where all lengths are equal, and some in every draw of unequal lengths."""
    equal, unequal = values["most_equal"], values["least_unequal"]
    return Judged(
        (
            Part("equal lengths, which lose nothing", equal, most=0),
            Part("unequal ones, which lose something", unequal, 1),
        ),
        f"slots of finished sequences, summed over iterations: at most {equal:.0f} in {_DRAWS} draws of equal"
        f" lengths, at least {unequal:.0f} in {_DRAWS} of unequal ones",
        "A batch runs until its longest output is finished; with equal lengths no slot is held by a finished sequence.",
    )


def _seven_in_turn(trial: Trial) -> Values:
    log = _seven("orca").log
    place = {int(index): residency for residency, index in enumerate(log.residencies["index"])}
    pairs = {"s5_after_s3": (2, 4), "s6_after_s1": (0, 5), "s7_after_s4": (3, 6)}
    starts, ends = log.residencies["start_step"], log.residency_end
    return {name: int(starts[place[new]] - ends[place[old]] + 1) for name, (old, new) in pairs.items()}


def judge_seven_in_turn(values: Mapping[str, float]) -> Judged:
    """Each sequence starts one iteration after the sequence that it replaces ends."""
    names = {"s5_after_s3": "S5 for S3", "s6_after_s1": "S6 for S1", "s7_after_s4": "S7 for S4"}
    return Judged(
        tuple(Part(text, values[name], 1, 1) for name, text in names.items()),
        "iterations between the end of one and the start of the next: "
        + ", ".join(f"{text} {values[name]:.0f}" for name, text in names.items()),
        "The scheduler admits requests in every iteration.",
    )


#: Waiting requests on ten running ones at which TGI's rule and the claim's differ.
_RUNNING, _RATIO, _WAITING = 10, 1.3, (12, 13, 14)


def _pauses(trial: Trial) -> Values:
    found = {f"pauses_at_{waiting}": float(_paused_after(waiting) <= 2) for waiting in _WAITING}
    return found | {"steps_until_one_is_taken": float(_paused_after(1))}


def _paused_after(waiting: int) -> int:
    """Steps from the arrival of so many requests until decoding pauses for them; ten run, of which none ends."""
    long, arrival_s = 100, 4.5
    prompts, outputs = [4] * (_RUNNING + waiting), [long] * (_RUNNING + waiting)
    work = few(prompts, outputs, outputs, [0.0] * _RUNNING + [arrival_s] * waiting)
    run = story("tgi", work, waiting_served_ratio=_RATIO, max_num_seqs=64)
    started = int(run.log.residencies["start_ticks"][_RUNNING])
    return -(-started // PER_SECOND) - int(arrival_s)


def judge_pauses(values: Mapping[str, float]) -> Judged:
    """Decoding pauses where the claim says so, and only there."""
    parts = [
        Part(
            f"{waiting} waiting on {_RUNNING}",
            values[f"pauses_at_{waiting}"],
            *[float(waiting / _RUNNING > _RATIO)] * 2,
        )
        for waiting in _WAITING
    ]
    taken = values["steps_until_one_is_taken"]
    return Judged(
        (*parts, Part("one waiting, however long", taken, least=50)),
        ", ".join(
            f"{waiting} on {_RUNNING}: {'pauses' if values[f'pauses_at_{waiting}'] else 'continues'}"
            for waiting in _WAITING
        )
        + f"; one waiting is taken after {taken:.0f} steps",
        f"TGI waits for floor({_RUNNING} * {_RATIO:g}) = {int(_RUNNING * _RATIO)} requests that"
        " fit, and after 20 decode steps for none.",
    )


PROBES: Code = {
    2: (_three_sources, judge_three_sources),
    15: (_static_of_four, judge_static_of_four),
    16: (_equal_lengths, judge_equal_lengths),
    17: (_seven_in_turn, judge_seven_in_turn),
    19: (_pauses, judge_pauses),
}
