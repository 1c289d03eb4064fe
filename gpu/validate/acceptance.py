"""Whether a prediction of step times is validated: null models, the noise of the machine, and the errors that would be noticed.

A null model knows nothing of operations: one time for every step, a line in the tokens that a step computes, or a plane in
sequences, context and prompt tokens, which is what one measures of a server without a simulator. All are fitted to the whole steps
of the calibration, from which the prediction comes, too; neither saw the runs. Where weights are most of what a step reads, all
steps take about the same time, and a null model is right within a few percent. So the prediction must be better in every run
that reads much KV, and not worse by more than the noise of the machine in the others.

A small error alone does not say that an error would be seen. So the verdict is taken again with errors planted into the prediction:
all steps longer and shorter by a factor, and their attention. The smallest planted error that gives a new reason against the
prediction, in both directions, is what the validation would have noticed. One that would overlook :data:`PLANTED` validates nothing.

The noise of the machine is the error of the best prediction there is: each repetition of a run, predicted by the median of
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...sim.recording.plans import Plan
from ...sim.spec import ModelSpec
from ..calibrate import points
from ..calibrate.fitting import least_absolute
from ..calibrate.points import Point
from .validate import batch_of

#: Share of the bytes that a run reads, from which on it has to be better than every null model.
LEAST_KV_SHARE = 1 / 3
#: Largest errors of a validated run: MAPE of steps, and error of the throughput; or so many times the noise.
MOST_STEP_ERROR, MOST_THROUGHPUT_ERROR, NOISES = 0.10, 0.05, 2
#: Errors that a validation has to notice: of the time of all steps, and of the time of attention.
PLANTED = {"time": 0.03, "attention": 0.10}
#: Planted errors that are tried, from the smallest on.
_TRIED = {"time": np.arange(1, 201) / 1000, "attention": np.arange(1, 101) / 200}


class Sizes(NamedTuple):
    """What a null model knows of steps.

    Attributes:
        sequences: int [steps], rows that decode, with those that are padding.
        context_tokens: int [steps], tokens of their contexts together.
        prompt_tokens: int [steps], tokens of prompts that the step computes.
    """

    sequences: np.ndarray
    context_tokens: np.ndarray
    prompt_tokens: np.ndarray


def _constant(sizes: Sizes) -> list[np.ndarray]:
    return [np.ones(len(sizes.sequences))]


def _tokens(sizes: Sizes) -> list[np.ndarray]:
    return [*_constant(sizes), sizes.sequences + sizes.prompt_tokens]


def _contexts(sizes: Sizes) -> list[np.ndarray]:
    return [*_constant(sizes), *sizes]


#: Terms of each null model.
NULLS: dict[str, Callable[[Sizes], list[np.ndarray]]] = {
    "constant": _constant,
    "tokens": _tokens,
    "contexts": _contexts,
}


def sizes_of(plan: Plan, steps: Sequence[int]) -> Sizes:
    """Sizes of steps of a plan."""
    found = []
    for batch in (batch_of(plan, step) for step in steps):
        decodes = batch.query_lens == 1
        found.append((decodes.sum(), batch.context_lens[decodes].sum(), batch.query_lens[~decodes].sum()))
    return Sizes(*np.array(found, np.int64).reshape(-1, 3).T)


def calibrated_steps(measured: Sequence[Point]) -> tuple[Sizes, np.ndarray]:
    """Sizes and microseconds of the whole steps of a calibration.

    Args:
        measured: Points of the file. Those from before 2026-11-29 lack the sizes of their steps, and give none.
    """
    steps = [point for point in measured if "decodes" in point]
    sizes = [(step["decodes"], step["context_tokens"], step.get("tokens", step["decodes"])) for step in steps]
    decodes, contexts, tokens = np.array(sizes, np.int64).reshape(-1, 3).T
    return Sizes(decodes, contexts, tokens - decodes), np.array([step["whole_us"] for step in steps])


def null_models(
    sizes: Sizes, fitted: Sizes, fitted_us: np.ndarray, weights: float = 1, kv: float = 1
) -> dict[str, np.ndarray]:
    """Microseconds of steps by each null model: the one with the smallest MAPE at the steps to which it is fitted.

    Args:
        sizes: Steps to predict.
        fitted, fitted_us: Steps to fit to, and their microseconds. Without any there are no null models.
        weights, kv: Bytes of weights, and of the KV of a token, over those of the model whose steps are fitted: what a planner would scale
            times of another model by.
    """
    if not len(fitted_us):
        return {}
    # The time of contexts goes by KV, all other time by weights.
    sizes = sizes._replace(context_tokens=sizes.context_tokens * (kv / weights))
    return {
        name: weights * np.column_stack(terms(sizes)) @ least_absolute(np.column_stack(terms(fitted)), fitted_us)
        for name, terms in NULLS.items()
    }


def mape(predicted_us: np.ndarray, measured_us: np.ndarray) -> float:
    """Mean absolute percentage error, as a share."""
    return float(np.mean(np.abs(predicted_us / measured_us - 1)))


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
    of_weights, of_token = elements(model)
    weights = len(steps) * of_weights * element_bytes
    slot_bytes = of_token * (kv_element_bytes or element_bytes)
    kv = sum(int(batch_of(plan, step).context_lens.sum()) for step in steps) * slot_bytes
    return {"weights": weights, "kv": kv, "kv_share": round(kv / (kv + weights), 4)}


def elements(model: ModelSpec) -> tuple[int, int]:
    """Elements of the weights that a step reads, and of the KV of a token, in all layers."""
    shapes = [*points.layer_gemms(model) * model.num_layers, points.head_gemm(model)]
    return sum(n * k for n, k in shapes), 2 * model.num_layers * model.num_kv_heads * model.head_dim


@dataclass(frozen=True)
class Run:
    """Predicted and measured steps of a run.

    Attributes:
        name: Of the run.
        predicted_us: float [steps].
        attention_us: float [steps], the part of the predicted time that is attention.
        samples_us: float [repetitions, steps].
        quantile: Of the repetitions, that is the measured time.
        nulls: Microseconds of each null model, float [steps].
        read: Of :func:`read_bytes`.
    """

    name: str
    predicted_us: np.ndarray
    attention_us: np.ndarray
    samples_us: np.ndarray
    quantile: float
    nulls: Mapping[str, np.ndarray]
    read: Mapping[str, float]

    @cached_property
    def measured_us(self) -> np.ndarray:
        """float [steps]."""
        return np.asarray(np.quantile(self.samples_us, self.quantile, axis=0))

    @cached_property
    def error(self) -> float:
        """MAPE of the steps, to the digits of the null models: a null model is not better than itself."""
        return round(mape(self.predicted_us, self.measured_us), 4)

    @cached_property
    def null_errors(self) -> dict[str, float]:
        """MAPE of each null model."""
        return {name: round(mape(us, self.measured_us), 4) for name, us in self.nulls.items()}

    @cached_property
    def noise(self) -> dict[str, float] | None:
        """See :func:`noise`."""
        return noise(self.samples_us)

    @property
    def throughput_error(self) -> float:
        """Predicted over measured throughput, less 1."""
        return round(float(self.measured_us.sum() / self.predicted_us.sum()) - 1, 4)

    @property
    def reads_kv(self) -> bool:
        """Whether the run reads much KV."""
        return self.read["kv_share"] >= LEAST_KV_SHARE

    def planted(self, what: str, error: float) -> Run:
        """The run with a wrong prediction: of ``time`` or ``attention``, too long by this share."""
        added_us = error * (self.predicted_us if what == "time" else self.attention_us)
        attention_us = (1 + error) * self.attention_us
        # Of the same measured times.
        found = replace(self, predicted_us=self.predicted_us + added_us, attention_us=attention_us)
        found.__dict__.update({name: getattr(self, name) for name in ("measured_us", "null_errors", "noise")})
        return found

    def as_dict(self) -> dict[str, Any]:
        """What a report says of a run beside its errors."""
        best = min(self.null_errors.values(), default=None)
        # How many times smaller our error is; a perfect prediction has no such number.
        times = round(best / self.error, 3) if best is not None and self.error else None
        return {
            "nulls": {name: {"mape": error} for name, error in self.null_errors.items()},
            "times_better": times,
            "beats_nulls": best is not None and self.error < best,
            "noise": self.noise,
            "read_bytes": dict(self.read),
        }


#: Identifies a reason: the check, and the run or the planted error.
Key = tuple[str, str]
Reasons = dict[Key, str]


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """Whether a prediction is validated, and each reason why not.

    Returns:
        ``validated``; ``reasons``; ``noticed``, the smallest planted error of each of :data:`PLANTED` that would have given another
        reason, None if the largest that was tried would not; ``limits``.
    """
    reasons = _reasons(runs)
    noticed = {what: _noticed(runs, what, reasons) for what in PLANTED}
    blunt = {
        ("blunt", what): _blunt(what, noticed[what]) for what, limit in PLANTED.items() if _over(noticed[what], limit)
    }
    limits = {
        "kv_share": round(LEAST_KV_SHARE, 4),
        "step_mape": MOST_STEP_ERROR,
        "throughput": MOST_THROUGHPUT_ERROR,
        "times_noise": NOISES,
        "planted": dict(PLANTED),
    }
    found = [*reasons.values(), *blunt.values()]
    return {"validated": not found, "reasons": found, "noticed": noticed, "limits": limits}


def _reasons(runs: Sequence[Run]) -> Reasons:
    return dict(reason for check in (_not_tested, _not_better, _too_far, _not_nearest) for reason in check(runs))


def _noticed(runs: Sequence[Run], what: str, reasons: Reasons) -> float | None:
    """The smallest planted error that gives a new reason, whether too long or too short."""
    for error in _TRIED[what].tolist():
        signed = ([run.planted(what, sign * error) for run in runs] for sign in (1, -1))
        if all(_reasons(planted).keys() - reasons.keys() for planted in signed):
            return float(error)
    return None


def _over(noticed: float | None, limit: float) -> bool:
    return noticed is None or noticed > limit


_PARTS = {"time": "the time of all steps", "attention": "the time of attention"}


def _blunt(what: str, noticed: float | None) -> str:
    least = f"only one of {noticed:.1%}" if noticed else "none that was tried"
    return f"an error of {PLANTED[what]:.0%} in {_PARTS[what]} would not have been noticed, {least}"


def _not_tested(runs: Sequence[Run]) -> Iterator[tuple[Key, str]]:
    if not any(run.reads_kv for run in runs):
        yield (
            ("untested", ""),
            "no run reads a third of its bytes from the KV cache, so none could tell a constant from a prediction",
        )
    if not all(run.nulls for run in runs):
        yield (
            ("untested", "nulls"),
            "the calibration lacks whole steps with their sizes, to which null models are fitted; calibrate again",
        )


#: What each null model knows, for a reason.
KNOWS = {
    "constant": "one constant",
    "tokens": "a line in tokens",
    "contexts": "a plane in sequences, context and prompt tokens",
}


def _not_better(runs: Sequence[Run]) -> Iterator[tuple[Key, str]]:
    for run in runs:
        if not run.nulls:
            continue
        name, error = min(run.null_errors.items(), key=lambda one: one[1])
        allowed = 0.0 if run.noise is None or run.reads_kv else run.noise["step_mape"]
        if run.error > error + allowed or (run.reads_kv and run.error == error):
            yield (
                ("null", run.name),
                f"{run.name}: a step is off by {run.error:.1%}, and by {error:.1%} with {KNOWS[name]}",
            )


def _too_far(runs: Sequence[Run]) -> Iterator[tuple[Key, str]]:
    for run in runs:
        sizes = (
            ("a step", run.error, MOST_STEP_ERROR, "step_mape"),
            ("the throughput", abs(run.throughput_error), MOST_THROUGHPUT_ERROR, "throughput"),
        )
        for what, error, limit, of_noise in sizes:
            repeated = NOISES * run.noise[of_noise] if run.noise else 0.0
            if error > max(limit, repeated):
                allowed = max(limit, repeated)
                yield (what, run.name), f"{run.name}: {what} is off by {error:.1%}, allowed are {allowed:.1%}"


def _not_nearest(runs: Sequence[Run]) -> Iterator[tuple[Key, str]]:
    """A planted error that brings the prediction nearer to the measurement is one that it has: steps of all runs, attention of those
    that read much KV."""
    for what, error in PLANTED.items():
        told = [run for run in runs if run.reads_kv or what == "time"]
        if not told:
            continue
        off = {sign: np.mean([_planted_error(run, what, sign * error) for run in told]) for sign in (0, -1, 1)}
        nearer = min(off, key=lambda sign: float(off[sign]))
        if nearer:
            way = "longer" if nearer > 0 else "shorter"
            text = f"with {_PARTS[what]} {error:.0%} {way} steps would be off by {off[nearer]:.1%}, and are by {off[0]:.1%}"
            yield ("nearest", f"{what} {way}"), text


def _planted_error(run: Run, what: str, error: float) -> float:
    part = run.predicted_us if what == "time" else run.attention_us
    return mape(run.predicted_us + error * part, run.measured_us)
