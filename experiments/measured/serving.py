"""Requests served on a device's own clock, predicted before.

1. The calibration predicts each policy at each load: requests/s, time per output token, time to first token, preemptions. The curves
   are a file before the device runs a step, and the report has its hash.
2. The engine serves the same requests with a step cost that runs the steps on the device (``gpu.validate.serving``): requests arrive,
   steps take what they take, and decisions follow.
3. A figure may be off by its limit, or by twice the spread from repetition to repetition, whichever is more.
4. Null models, fitted to the whole steps of the same calibration, serve the same requests as step costs. In a run that reads much KV the
   prediction must be nearer than the best of them, and in the others not further off by more than the spread; errors are in units of their limits,
   and the mean of the figures counts.
5. Errors are planted into the calibration, in the time of all steps and of attention. The smallest that gives a run another reason,
   whether too long or too short, is what that run would have noticed.

The loads are shares of the rate that the paged policy is predicted to reach with all requests waiting: one below it, and one
above it, at which the ratios of the policies' throughputs are those of saturated servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...gpu.devices import timing
from ...gpu.devices.devices import Device, usual_dtype
from ...gpu.model.skeleton import Skeleton
from ...gpu.validate import acceptance
from ...gpu.validate.drift import Drift
from ...gpu.validate.serving import DeviceCost
from ...gpu.validate.validate import Size
from ...reports.page.table import Table
from ...sim import Settings, Workload
from ...sim.cost.base import ScaledCost, StepCost
from ...sim.cost.calibration import Calibration, read
from ...sim.engine.run import simulate
from ...sim.metrics.requests import request_times
from ...sim.output.files import as_json, write_whole
from ...sim.runs.run import Run
from ...sim.spec import model as model_spec
from ...sim.spec.deployment import dtype_bits
from ...sim.types.errors import SettingError
from ...sim.types.ticks import PER_SECOND, PER_US
from ...traces import stream, synthetic_pairs
from ..runs.output import Report
from .validation import ATTENTION, Watch, cost_of, over_calibrated
from .validation_runs import BLOCK_SIZE, PAGED, SAME_REQUESTS, Scale

#: Shares of the paged policy's predicted rate at which requests arrive.
LOADS = (0.75, 1.25)
#: Largest errors of a figure, as shares.
LIMITS = {"requests_per_s": 0.03, "tpot_ms": 0.03, "ttft_ms": 0.10}
#: Largest error of the ratio of two policies' requests/s.
RATIO_LIMIT = 0.03
#: Share of the paged runs with exactly as many preemptions as predicted.
SAME_PREEMPTIONS = 0.9
#: Predicted time on a GPU of all runs and repetitions, at most; with more there are fewer requests.
MOST_SECONDS = 60.0
#: Planted errors that are tried, from the smallest on.
TRIED = [number / 100 for number in range(1, 31)]
_LABELS = {"requests_per_s": "requests/s", "tpot_ms": "TPOT, ms", "ttft_ms": "TTFT, ms"}

Figures = Mapping[str, float]
Document = Mapping[str, Any]


class Served(NamedTuple):
    """A policy and a load."""

    policy: str
    load: float

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.policy} at {self.load:g}"


RUNS = tuple(Served(policy, load) for load in LOADS for policy in SAME_REQUESTS)


def figures_of(run: Run) -> dict[str, float]:
    """Requests/s to the last answer, means of time per output token and time to first token, and the number of preemptions."""
    times = request_times(run)
    return {
        "requests_per_s": len(times.index) * PER_SECOND / int(times.finish_ticks.max()),
        "tpot_ms": float(times.tpot_ms.mean()),
        "ttft_ms": float(times.ttft_ms.mean()),
        "preemptions": int(times.recomputed.sum() + times.swapped.sum()),
    }


class NullCost:
    """A null model as a ``StepCost``: microseconds of a step, and of each sequence, context token and prompt token."""

    def __init__(self, name: str, us: Iterable[float]) -> None:
        self.name = name
        self._terms = [round(one * PER_US) for one in us]

    @classmethod
    def fitted(cls, calibrated: Document, over: tuple[float, float]) -> list[NullCost]:
        """All null models of a calibration file.

        Args:
            over: See ``validation.over_calibrated``.
        """
        sizes = acceptance.Sizes(*np.eye(4, 3, -1, dtype=np.int64).T)
        found = acceptance.null_models(sizes, *acceptance.calibrated_steps(calibrated.get("points", ())), *over)
        return [cls(name, (us[0], *(us[1:] - us[0]))) for name, us in found.items()]

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``; at least a tick."""
        base, sequence, context, prompt = self._terms
        return max(1, base + sequence * decodes + context * decode_context + prompt * prefill_tokens)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``."""
        return self.step_ticks(decodes, context, 0, 0), 0, context + 1

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``; a null model knows no moves."""
        return 0

    swap_in_ticks = copy_ticks = swap_out_ticks

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        return {}


class Predicting:
    """Predictions of all runs by one calibration.

    Args:
        calibration: The calibration file.
        scale: Size of pool and requests.
        dtype: Number format of weights and KV.
        kv_cache_dtype: Of the KV cache, auto or fp8.
        on_gpu: Whether steps that only decode are captured.
        seed: Seed of the requests; not the calibration's.

    Raises:
        UserError: The file is not a calibration, or has the same seed.
    """

    def __init__(
        self, calibration: Path, scale: Scale, dtype: str, kv_cache_dtype: str | None, on_gpu: bool, seed: int
    ) -> None:
        fit, self._calibrated = read(calibration), json.loads(calibration.read_bytes())
        self._path, self._scale, self._on_gpu, self.seed = calibration, scale, on_gpu, seed
        self.dtype, self.kv_cache_dtype = dtype, kv_cache_dtype or fit.kv_cache_dtype
        self.calibration = fit.in_format(self.dtype, self.kv_cache_dtype)
        if seed == self._calibrated.get("seed"):
            raise SettingError("seed", seed, "is the calibration's, which must not know what is tested: take another")

    def settings(self, policy: str) -> Settings:
        """The settings of a policy's runs."""
        scale = self._scale
        fields: dict[str, Any] = {
            "model": scale.model,
            "cost": str(self._path),
            "seed": self.seed,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": scale.num_blocks,
            "max_model_len": scale.max_model_len,
            "kv_cache_dtype": self.kv_cache_dtype,
            # The skeleton pads batches where it captures them, and only there.
            "enforce_eager": not self._on_gpu,
        }
        return Settings(policy=policy, **fields)

    def workload(self, load: float) -> Workload:
        """The requests at a load: the same for all policies, and at all loads but for when they arrive."""
        return self._requests(self.count, 1 / (load * self.saturated_rate))

    def predicted(self, run: Served, cost: StepCost | None = None) -> dict[str, float]:
        """Figures of a run by the calibration, or by another step cost."""
        return figures_of(self._simulated(run, cost or self.cost(run.policy)))

    def kv_share(self, run: Served) -> float:
        """Predicted share of KV in the bytes that the steps of a run read; padding reads nothing."""
        served = self._simulated(run, self.cost(run.policy))
        rows, pairs = served.log.rows, served.workload.sequences
        steps = int(rows["steps"][(rows["batch_size"] > 0) | (rows["prefill_tokens"] > 0)].sum())
        prompts, outputs = pairs.prompt_tokens, pairs.output_tokens
        read_tokens = int((outputs * prompts + outputs * (outputs - 1) // 2).sum())
        weights, of_token = acceptance.elements(model_spec(self._scale.model))
        of_kv = dtype_bits(self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)
        sizes = read_tokens * of_token * of_kv, steps * weights * dtype_bits(self.dtype)
        return round(sizes[0] / sum(sizes), 4)

    def _simulated(self, run: Served, cost: StepCost) -> Run:
        return simulate(self.settings(run.policy), self.workload(run.load), cost)

    def cost(self, policy: str, attention: float = 1) -> StepCost:
        """The calibration as step times, with attention that takes so many times as long."""
        fit: Calibration = self.calibration
        if attention != 1:
            fit = fit.scaled(ATTENTION, attention)
        return cost_of(fit, self._scale.model, self.kv_cache_dtype, self._on_gpu, policy == PAGED)

    def drift(self, skeleton: Skeleton) -> Drift:
        """The drift of the machine since the calibration; it has no points on any other machine, or of another model."""
        then, now = self.calibration, skeleton.device.describe()["name"]
        same = (then.device.get("name"), self._calibrated.get("model")) == (now, skeleton.model.name)
        measured = self._calibrated.get("points", ()) if then.kind == "calibration" and same else ()
        return Drift(skeleton, measured, self._calibrated.get("seed", 0))

    @cached_property
    def nulls(self) -> list[NullCost]:
        """The null models of the calibration."""
        return NullCost.fitted(
            self._calibrated,
            over_calibrated(model_spec(self._scale.model), self.dtype, self.kv_cache_dtype, self._calibrated),
        )

    @cached_property
    def count(self) -> int:
        """Number of requests: of the scale, or on a GPU as many as are served in time."""
        count = self._scale.requests
        while self._on_gpu and count > 1 and self._seconds(count) * len(LOADS) * self._scale.rounds > MOST_SECONDS:
            count //= 2
        return count

    @cached_property
    def saturated_rate(self) -> float:
        """Requests/s that the paged policy is predicted to reach with all requests waiting."""
        return self._saturated(PAGED, self.count)

    def _seconds(self, count: int) -> float:
        return sum(count / self._saturated(policy, count) for policy in SAME_REQUESTS)

    def _saturated(self, policy: str, count: int) -> float:
        run = simulate(self.settings(policy), self._requests(count, 0), self.cost(policy))
        return figures_of(run)["requests_per_s"]

    def _requests(self, count: int, mean_gap: float) -> Workload:
        """Requests that arrive at random.

        Args:
            mean_gap: Seconds between two arrivals in the mean; 0: all at once.
        """
        pairs = synthetic_pairs("vllm_sosp23_sharegpt_opt", count, self.seed, self._scale.max_model_len)
        gaps = stream(self.seed, "arrivals on a device").exponential(1, count)
        arrivals = np.round(np.cumsum(gaps) * mean_gap * PER_SECOND).astype(np.int64)
        return Workload("Synthetic sharegpt", arrivals, pairs.prompt_tokens, pairs.output_tokens)

    def document(self) -> dict[str, Any]:
        """All predictions, as the file has them that is written before the device runs."""
        runs = []
        for run in RUNS:
            nulls = {null.name: self.predicted(run, null) for null in self.nulls}
            found = {"request_rate": run.load * self.saturated_rate, "kv_share": self.kv_share(run)}
            runs.append({**run._asdict(), **found, "predicted": self.predicted(run), "nulls": nulls})
        return {
            "schema_version": 1,
            "model": self._scale.model,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "seed": self.seed,
            "requests": self.count,
            "num_blocks": self._scale.num_blocks,
            "max_model_len": self._scale.max_model_len,
            "calibration": {"sha256": self.calibration.sha256, "model": self._calibrated.get("model")},
            "limits": {**LIMITS, "times_spread": acceptance.NOISES, "same_preemptions": SAME_PREEMPTIONS},
            "runs": runs,
        }


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure, predicted and measured.

    Attributes:
        predicted: Its prediction.
        samples: Its value in each repetition.
        limit: Its largest error; twice the spread where that is more.
    """

    predicted: float
    samples: tuple[float, ...]
    limit: float

    @property
    def measured(self) -> float:
        """Median of the repetitions."""
        return float(np.median(self.samples))

    @property
    def spread(self) -> float | None:
        """Error of each repetition, predicted by the median of the others; None for a single one."""
        noise = acceptance.noise(np.array(self.samples)[:, None])
        return None if noise is None else noise["throughput"]

    @property
    def allowed(self) -> float:
        """The largest error that passes."""
        return max(self.limit, acceptance.NOISES * (self.spread or 0.0))

    def error(self, predicted: float | None = None) -> float:
        """Of the prediction, or of another one."""
        return (self.predicted if predicted is None else predicted) / self.measured - 1

    def passes(self, predicted: float | None = None) -> bool:
        """Whether the error is allowed."""
        return abs(self.error(predicted)) <= self.allowed

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "predicted": self.predicted,
            "measured": self.measured,
            "samples": list(self.samples),
            "error": round(self.error(), 4),
            "spread": self.spread,
            "allowed": round(self.allowed, 4),
            "passes": self.passes(),
        }


def served_on(device: Device, predicting: Predicting, scale: Scale, prediction: Path, watch: Watch) -> dict[str, Any]:
    """Write the prediction, serve all runs on the device, and compare.

    Args:
        prediction: The file for the predictions; nothing runs on the device before it is written.

    Returns:
        The document of the report.
    """
    predicted = predicting.document()
    write_whole(prediction, as_json(predicted))
    digest = sha256(prediction.read_bytes()).hexdigest()
    skeleton = Skeleton(
        model_spec(scale.model),
        device,
        scale.num_blocks,
        BLOCK_SIZE,
        predicting.dtype,
        predicting.seed,
        kv_cache_dtype=predicting.kv_cache_dtype,
    )
    drift = predicting.drift(skeleton)
    measured = _measured(skeleton, predicting, scale.rounds, watch, drift)
    return {
        **predicted,
        "prediction": {"file": prediction.name, "sha256": digest},
        "device": device.describe(),
        "measured_by": timing.stopwatch(device).how,
        "drift": drift.as_dict(),
        **compared(predicted, measured, predicting),
    }


def _measured(
    skeleton: Skeleton, predicting: Predicting, rounds: int, watch: Watch, drift: Drift
) -> dict[Served, list[Figures]]:
    """Figures of each run, one for each repetition: all runs, and then all again. Before each run the drift of the machine."""
    found: dict[Served, list[Figures]] = {run: [] for run in RUNS}
    warm: set[Size] = set()
    for run in watch([run for _ in range(rounds) for run in RUNS], "Serving", rounds * len(RUNS)):
        drift.look()
        workload, settings = predicting.workload(run.load), replace(predicting.settings(run.policy), ids=True)
        cost = DeviceCost(skeleton, settings, workload, warm)
        found[run].append(figures_of(simulate(settings, workload, cost, observers=(cost,))))
    return found


def compared(predicted: Document, measured: Mapping[Served, list[Figures]], predicting: Predicting) -> dict[str, Any]:
    """What was measured beside the predictions.

    Args:
        predicted: Of ``Predicting.document``.
        measured: Figures of each run and repetition.
    """
    runs, reasons, same, paged = [], [], 0, 0
    for entry in predicted["runs"]:
        run = Served(entry["policy"], entry["load"])
        judged = JudgedRun(_judged(entry["predicted"], measured[run]), entry["nulls"], entry["kv_share"])
        reasons += [f"{run.name}: {text}" for text in judged.reasons().values()]
        counts = [int(one["preemptions"]) for one in measured[run]]
        if run.policy == PAGED:
            same += counts.count(int(entry["predicted"]["preemptions"]))
            paged += len(counts)
        off = {
            name: {figure: round(judged.figures[figure].error(null[figure]), 4) for figure in LIMITS}
            for name, null in entry["nulls"].items()
        }
        runs.append(
            {
                **{name: entry[name] for name in ("policy", "load", "request_rate", "kv_share")},
                **{figure: one.as_dict() for figure, one in judged.figures.items()},
                "preemptions": {"predicted": entry["predicted"]["preemptions"], "samples": counts},
                "nulls": off,
                "of_limits": judged.of_limits(),
                "noticed": {what: _noticed(run, what, judged, predicting) for what in acceptance.PLANTED},
            }
        )
    ratios = [*_ratios(predicted["runs"], measured)]
    reasons += [
        f"{one['policy']} over {one['than']} at {one['load']:g}: is off by {one['error']:+.1%}, allowed are {one['allowed']:.1%}"
        for one in ratios
        if not one["passes"]
    ]
    if not predicting.nulls:
        reasons.append(
            "the calibration lacks whole steps with their sizes, to which null models are fitted; calibrate again"
        )
    if same < SAME_PREEMPTIONS * paged:
        reasons.append(f"as many preemptions as predicted in {same} of {paged} runs of {PAGED}")
    return {
        "runs": runs,
        "ratios": ratios,
        "same_preemptions": {"runs": paged, "same": same},
        "acceptance": {"passes": not reasons, "reasons": reasons},
    }


def _judged(predicted: Figures, measured: list[Figures]) -> dict[str, Judged]:
    return {
        name: Judged(predicted[name], tuple(one[name] for one in measured), limit) for name, limit in LIMITS.items()
    }


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run, predicted and measured, beside its null models.

    Attributes:
        figures: By name.
        nulls: Figures of each null model.
        kv_share: Predicted share of KV in the bytes that it reads.
    """

    figures: Mapping[str, Judged]
    nulls: Mapping[str, Figures]
    kv_share: float

    def off(self, predicted: Figures | None = None) -> float:
        """Mean error of the figures of the prediction, or of another one, each in units of its limit."""
        of = predicted or {name: one.predicted for name, one in self.figures.items()}
        return float(np.mean([abs(one.error(of[name])) / one.limit for name, one in self.figures.items()]))

    @property
    def spread(self) -> float:
        """The same of the spread."""
        return float(np.mean([(one.spread or 0.0) / one.limit for one in self.figures.values()]))

    def of_limits(self) -> dict[str, float]:
        """For a report: the error of the prediction and of each null model, and the spread, in units of the limits."""
        nulls = {name: self.off(figures) for name, figures in self.nulls.items()}
        return {name: round(one, 3) for name, one in {"ours": self.off(), **nulls, "spread": self.spread}.items()}

    def reasons(self, predicted: Figures | None = None) -> dict[str, str]:
        """What is off by too much, by name, of the prediction or of another one."""
        of = predicted or {name: one.predicted for name, one in self.figures.items()}
        found = {
            name: f"{_LABELS[name]} is off by {one.error(of[name]):+.1%}, allowed are {one.allowed:.1%}"
            for name, one in self.figures.items()
            if not one.passes(of[name])
        }
        if self.nulls:
            best, least = min(((name, self.off(null)) for name, null in self.nulls.items()), key=lambda one: one[1])
            own, reads_kv = self.off(of), self.kv_share >= acceptance.LEAST_KV_SHARE
            if own > least + (0 if reads_kv else self.spread) or (reads_kv and own == least):
                knows = acceptance.KNOWS[best]
                found["nulls"] = (
                    f"its figures are off by {own:.2f} of their limits in the mean, and by {least:.2f} with {knows}"
                )
        return found


def _noticed(run: Served, what: str, judged: JudgedRun, predicting: Predicting) -> float | None:
    """The smallest planted error that gives the run another reason, whether too long or too short; None if none of those tried does."""
    known = judged.reasons().keys()
    for error in TRIED:
        factors = (1 + error, 1 - error)
        costs = (
            ScaledCost(predicting.cost(run.policy), factor)
            if what == "time"
            else predicting.cost(run.policy, attention=factor)
            for factor in factors
        )
        if all(judged.reasons(predicting.predicted(run, cost)).keys() - known for cost in costs):
            return error
    return None


def _ratios(runs: Iterable[Document], measured: Mapping[Served, list[Figures]]) -> Iterator[dict[str, Any]]:
    """Requests/s of the paged policy over those of the others, at each load."""
    predicted = {Served(run["policy"], run["load"]): run["predicted"]["requests_per_s"] for run in runs}
    for load in LOADS:
        paged = Served(PAGED, load)
        for policy in SAME_REQUESTS:
            if policy == PAGED:
                continue
            other = Served(policy, load)
            pairs = zip(measured[paged], measured[other], strict=True)
            samples = tuple(one["requests_per_s"] / two["requests_per_s"] for one, two in pairs)
            ratio = Judged(predicted[paged] / predicted[other], samples, RATIO_LIMIT)
            yield {"policy": PAGED, "than": policy, "load": load, **ratio.as_dict()}


def print_served(document: Document, report: Report) -> None:
    """Print the comparison as tables."""
    report.print_line(f"{document['model']} on {document['device']['name']}, on its own clock", style="bold")
    given = document["prediction"]
    report.print_line(f"Predicted before: {given['file']}, sha256 {given['sha256']}.")
    for figure in LIMITS:
        nulls = list(document["runs"][0]["nulls"])
        table = Table(_LABELS[figure], "predicted", "measured", "error", "spread", "allowed", *nulls)
        for run in document["runs"]:
            one = run[figure]
            spread = "-" if one["spread"] is None else f"{one['spread']:.1%}"
            sizes = (f"{one['predicted']:,.3f}", f"{one['measured']:,.3f}", f"{one['error']:+.1%}", spread)
            off = (f"{run['nulls'][null][figure]:+.1%}" for null in nulls)
            table.add_row(f"{run['policy']} at {run['load']:g}", *sizes, f"{one['allowed']:.1%}", *off)
        report.print_line()
        report.console.print(table)
    table = Table("of limits", "KV read", "ours", *document["runs"][0]["nulls"], "spread")
    for run in document["runs"]:
        times = (f"{one:.2f}" for one in run["of_limits"].values())
        table.add_row(f"{run['policy']} at {run['load']:g}", f"{run['kv_share']:.0%}", *times)
    report.print_line()
    report.console.print(table)
    table = Table("ratio", "predicted", "measured", "error", "spread", "allowed")
    for one in document["ratios"]:
        spread = "-" if one["spread"] is None else f"{one['spread']:.1%}"
        sizes = (f"{one['predicted']:.3f}", f"{one['measured']:.3f}", f"{one['error']:+.1%}", spread)
        table.add_row(f"{one['policy']} over {one['than']} at {one['load']:g}", *sizes, f"{one['allowed']:.1%}")
    report.print_line()
    report.console.print(table)
    table = Table("run", "preemptions", "measured", "notices: time", "attention")
    for run in document["runs"]:
        counts = run["preemptions"]
        noticed = ("none" if one is None else f"{one:.0%}" for one in run["noticed"].values())
        measured = ", ".join(map(str, counts["samples"]))
        table.add_row(f"{run['policy']} at {run['load']:g}", str(counts["predicted"]), measured, *noticed)
    report.print_line()
    report.console.print(table)
    looks, found = document["drift"]["looks"], document["acceptance"]
    report.print_line()
    if looks:
        text = f"{min(looks):+.1%} to {max(looks):+.1%}, median {document['drift']['median']:+.1%}"
        report.print_line(f"Calls of the calibration, measured again before each run, took longer by {text}.")
    report.print_line(f"Within its limits: {'yes' if found['passes'] else 'no'}.", style="bold")
    for reason in found["reasons"]:
        report.print_line(f"  {reason}")


def predicting_on(
    device: Device, calibration: Path, scale: Scale, dtype: str | None, kv_cache_dtype: str | None, seed: int
) -> Predicting:
    """The predictions for a device.

    Args:
        dtype: None takes the calibration's.
    """
    fit = read(calibration)
    on_gpu = device.torch_device.type == "cuda"
    return Predicting(calibration, scale, dtype or fit.dtype or usual_dtype(device), kv_cache_dtype, on_gpu, seed)
