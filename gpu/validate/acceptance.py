"""What makes the errors of a run mean something: null models, the noise of the machine, the share of the KV cache.

A null model knows nothing of paging: the same time for every step ("constant"), or a line in the rows of a step ("line").
Where weights are most of what a step reads, all steps take about the same time, and a constant is right within a few
percent. An error of a few percent then shows nothing. So each null model is fitted to the measured times of the very run
that is judged, by the measure that judges it: no other constant, and no other line, has a smaller mean absolute
percentage error (MAPE) there. A prediction that saw none of these times has to beat them in every run that reads
enough KV.

The noise of the machine is the error of the best prediction there is: each repetition of a run, predicted by the median of
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...sim.recording.plans import Plan
from ...sim.spec import ModelSpec
from ..calibrate import points
from .validate import batch_of

#: Share of the bytes that a run reads, from which on its null models have to be beaten.
LEAST_KV_SHARE = 1 / 3
#: Largest errors of a validated run: MAPE of steps, and error of the throughput; or so many times the noise.
MOST_STEP_ERROR, MOST_THROUGHPUT_ERROR, NOISES = 0.10, 0.05, 2
#: Halvings of the search for the slope of a line: the last ones are below the resolution of a float.
_SEARCHES = 120


def mape(predicted_us: np.ndarray | float, measured_us: np.ndarray) -> float:
    """Mean absolute percentage error, as a share."""
    return float(np.mean(np.abs(predicted_us / measured_us - 1)))


def best_constant(measured_us: np.ndarray) -> float:
    """The constant with the smallest MAPE: the median, with each time's inverse as its weight."""
    order = np.argsort(measured_us, kind="stable")
    weights = np.cumsum(1 / measured_us[order])
    return float(measured_us[order][np.searchsorted(weights, weights[-1] / 2)])


def best_line(rows: np.ndarray, measured_us: np.ndarray) -> tuple[float, float]:
    """Time at no rows and time of each row of the line with the smallest MAPE.

    For a given slope the best level is a weighted median, as in :func:`best_constant`, and the error at the best level is a
    convex function of the slope.
    """
    weights = 1 / measured_us

    def level(each_us: float) -> tuple[float, float]:
        rest = measured_us - each_us * rows
        order = np.argsort(rest, kind="stable")
        summed = np.cumsum(weights[order])
        base_us = float(rest[order][np.searchsorted(summed, summed[-1] / 2)])
        return base_us, float(np.sum(weights * np.abs(rest - base_us)))

    # Rows differ by one at least, so a line through two points is not steeper than this.
    low, high = -float(np.ptp(measured_us)), float(np.ptp(measured_us))
    for _ in range(_SEARCHES):
        third = (high - low) / 3
        if level(low + third)[1] <= level(high - third)[1]:
            high -= third
        else:
            low += third
    each_us = (low + high) / 2 if np.ptp(rows) else 0.0
    return level(each_us)[0], each_us


def null_models(rows: np.ndarray, measured_us: np.ndarray) -> dict[str, dict[str, float]]:
    """Both null models, fitted to these steps, with their MAPE on them.

    Args:
        rows: int [steps], sequences of each step, with those that are padding.
        measured_us: float [steps].
    """
    constant_us = best_constant(measured_us)
    base_us, each_us = best_line(rows, measured_us)
    found = {
        "constant": {"us": constant_us, "mape": mape(constant_us, measured_us)},
        "line": {"base_us": base_us, "each_us": each_us, "mape": mape(base_us + each_us * rows, measured_us)},
    }
    return {name: {key: round(value, 4) for key, value in null.items()} for name, null in found.items()}


def noise(samples_us: np.ndarray) -> dict[str, float] | None:
    """Error of each repetition, predicted by the median of the others; None for a single repetition.

    Args:
        samples_us: float [repetitions, steps].

    Returns:
        ``step_mape`` and ``throughput``, the mean over the repetitions of the error of the sum.
    """
    if len(samples_us) < 2:
        return None
    others = [np.median(np.delete(samples_us, place, axis=0), axis=0) for place in range(len(samples_us))]
    pairs = list(zip(others, samples_us, strict=True))
    return {
        "step_mape": round(float(np.mean([mape(rest, one) for rest, one in pairs])), 4),
        "throughput": round(float(np.mean([abs(rest.sum() / one.sum() - 1) for rest, one in pairs])), 4),
    }


def read_bytes(
    plan: Plan, model: ModelSpec, element_bytes: int, steps: Sequence[int], kv_element_bytes: int | None = None
) -> dict[str, float]:
    """Bytes that the steps read: ``weights`` of all layers and the head once a step, ``kv`` of all rows, and ``kv_share``.

    Args:
        element_bytes: Of a weight.
        steps: Places of the steps in the plan.
        kv_element_bytes: Of a KV element; None is that of a weight.
    """
    shapes = [*points.layer_gemms(model) * model.num_layers, points.head_gemm(model)]
    weights = len(steps) * sum(n * k for n, k in shapes) * element_bytes
    slot_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * (kv_element_bytes or element_bytes)
    kv = sum(int(batch_of(plan, step).context_lens.sum()) for step in steps) * slot_bytes
    return {"weights": weights, "kv": kv, "kv_share": round(kv / (kv + weights), 4)}


def judged(
    predicted_us: np.ndarray, samples_us: np.ndarray, quantile: float, rows: np.ndarray, read: Mapping[str, float]
) -> dict[str, Any]:
    """What a report says of a run beside its errors: its null models, the noise, and what it read.

    Args:
        predicted_us: float [steps].
        samples_us: float [repetitions, steps].
        quantile: Of the repetitions, that is the measured time.
        rows: int [steps], sequences of each step.
        read: Of :func:`read_bytes`.
    """
    measured_us = np.quantile(samples_us, quantile, axis=0)
    nulls = null_models(rows, measured_us)
    # To the digits of the null models: the best constant is not better than itself.
    ours, best = round(mape(predicted_us, measured_us), 4), min(null["mape"] for null in nulls.values())
    return {
        "nulls": nulls,
        # How many times smaller our error is; a perfect prediction has no such number.
        "times_better": round(best / ours, 3) if ours else None,
        "beats_nulls": ours < best,
        "noise": noise(samples_us),
        "read_bytes": dict(read),
    }


def acceptance(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether a prediction is validated, and each reason why not.

    Args:
        runs: The runs of a validation: ``run`` (its name), ``step``, ``throughput_error``, and the entries of :func:`judged`.
    """
    reasons = [reason for check in (_not_tested, _not_better, _too_far) for reason in check(runs)]
    limits = {
        "kv_share": round(LEAST_KV_SHARE, 4),
        "step_mape": MOST_STEP_ERROR,
        "throughput": MOST_THROUGHPUT_ERROR,
        "times_noise": NOISES,
    }
    return {"validated": not reasons, "reasons": reasons, "limits": limits}


Runs = Sequence[Mapping[str, Any]]
Check = Callable[[Runs], Iterator[str]]


def _reads_kv(run: Mapping[str, Any]) -> bool:
    return bool(run["read_bytes"]["kv_share"] >= LEAST_KV_SHARE)


def _not_tested(runs: Runs) -> Iterator[str]:
    if not any(map(_reads_kv, runs)):
        yield "no run reads a third of its bytes from the KV cache, so none could tell a constant from a prediction"


def _not_better(runs: Runs) -> Iterator[str]:
    for run in filter(_reads_kv, runs):
        if not run["beats_nulls"]:
            name, null = min(run["nulls"].items(), key=lambda one: one[1]["mape"])
            what = {"constant": "one constant", "line": "a line in the batch size"}[name]
            yield f"{run['run']}: a step is off by {run['step']['mape']:.1%}, and by {null['mape']:.1%} with {what}"


def _too_far(runs: Runs) -> Iterator[str]:
    for run in runs:
        sizes = (
            ("a step", run["step"]["mape"], MOST_STEP_ERROR, "step_mape"),
            ("the throughput", abs(run["throughput_error"]), MOST_THROUGHPUT_ERROR, "throughput"),
        )
        for what, error, limit, of_noise in sizes:
            repeated = NOISES * run["noise"][of_noise] if run["noise"] else 0.0
            if error > max(limit, repeated):
                yield f"{run['run']}: {what} is off by {error:.1%}, allowed are {max(limit, repeated):.1%}"
