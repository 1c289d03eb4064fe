"""Claims that nothing here can decide, with the experiment that would."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .claim import NOT_TESTABLE, Judged, Probe, Values
from .runs import Trial

NOT_HERE = "not measured"


def nothing(trial: Trial) -> Values:
    """No numbers."""
    return {}


def _because(gives: str, why: str) -> Callable[[Mapping[str, float]], Judged]:
    def judge(values: Mapping[str, float]) -> Judged:
        return Judged((), gives, why)

    return judge


PROBES = (
    Probe(
        29,
        NOT_HERE,
        "needs training",
        nothing,
        _because(
            "a serving step keeps no activations for gradients, of which checkpointing could drop any",
            "Gradient checkpointing belongs to training, a KV cache to inference.",
        ),
        needs=("training",),
        experiment="peak memory of a training step with and without checkpointing, on one GPU",
        expected=NOT_TESTABLE,
    ),
    Probe(
        34,
        NOT_HERE,
        "needs a GPU",
        nothing,
        _because(
            "the simulator charges no time for allocation",
            "Jitter is a property of a device and its host; it must be measured there.",
        ),
        needs=("simulation", "a GPU"),
        experiment="times of steps with and without a new block, p50 and p99: `fragmeter validate --device cuda`"
        " writes each step's time beside what it did",
    ),
    Probe(
        35,
        NOT_HERE,
        "needs 768 GPUs",
        nothing,
        _because(
            "no model of 768 GPUs is fitted to anything", "Strong scaling depends on a cluster's network and software."
        ),
        needs=("768 GPUs",),
        experiment="one model on 96 to 768 GPUs, the same requests: tokens/s over that of 96, times 96 / GPUs",
        expected=NOT_TESTABLE,
    ),
)
