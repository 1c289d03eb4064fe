"""Validation of step times on a device: predicted and measured steps of simulated runs.

A calibration predicts the step times of each run (``validation_runs``); it saw neither the requests nor their block tables.
Each run is recorded and replayed step by step through a skeleton of the model, and its errors are reported beside those of
null models and the noise of the machine (``gpu.validate.acceptance``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...gpu.calibrate import points
from ...gpu.devices import timing
from ...gpu.devices.devices import Device, usual_dtype
from ...gpu.model.executor import used_host_blocks
from ...gpu.model.skeleton import DTYPES, Skeleton
from ...gpu.validate import acceptance, validate
from ...gpu.validate import attention as validate_attention
from ...gpu.validate import operations as validate_operations
from ...gpu.validate.drift import Drift
from ...reports.page.table import Table
from ...sim import Settings, Workload
from ...sim.cost.base import StepCost
from ...sim.cost.calibrated import CalibratedCost
from ...sim.cost.calibration import Calibration, read
from ...sim.recording.plans import Plan
from ...sim.spec import ModelSpec, gpu
from ...sim.spec import model as model_spec
from ...sim.spec.deployment import Deployment, dtype_bits
from ...sim.types.errors import SettingError
from ...sim.types.ticks import PER_SECOND
from ..runs.output import Report
from .repriced import PricedPlan, priced
from .validation_runs import BLOCK_SIZE, PAGED, RUNS, SAME_REQUESTS, Loads, Scale, Served, room_tokens

Document = Mapping[str, Any]
_NULLS = ("mean step error", "ours", *acceptance.NULLS, "better", "noise", "KV read", "beaten")
#: Factor by which attention is longer in the prediction that tells its part of the time.
_LONGER = 1.1
_OPERATIONS = {
    "gemm": "GEMMs",
    "decode_attention": "decode attention",
    "prefill_attention": "prefill attention",
    "kv_write": "KV write",
    "elementwise": "norms, rotary, activation",
    "embedding": "embedding",
    "step": "host's work",
    "beside": "these four together",
    "block_copy": "block copies",
    "swap_out": "swaps to the host",
    "swap_in": "swaps from the host",
}


def print_document(document: Document, report: Report) -> None:
    """Print all measurements as tables."""
    calibration = document["calibration"]
    report.print_line(f"{document['model']} on {document['device']['name']}", style="bold")
    report.print_line(f"Predicted by: {calibration['source']}, {calibration['device']}. It saw none of these runs.")
    if calibration.get("model", document["model"]) != document["model"]:
        text = (
            f"It is of {calibration['model']}, another model: null models are scaled by the bytes of weights and of KV."
        )
        report.print_line(text)
    if "dtype" in calibration:
        report.print_line(
            f"It is in {calibration['dtype']} with a KV cache in {calibration['kv_cache_dtype']}, other number formats: both its operations and its null"
            " models are scaled by their bytes."
        )
    if "step_drifts" in calibration:
        drifts = ", ".join(f"{drift:+.1%}" for drift in calibration["step_drifts"])
        report.print_line(
            f"Its whole steps were measured again before, between and after the passes: {drifts} of their time."
        )
    if calibration["parts"] > 1:
        report.print_line(f"It was measured in {calibration['parts']} parts, before, between and after the passes.")
    runs = document["runs"]
    for table in (_runs(runs), _nulls(runs), _throughput(runs), _operations(document["operations"])):
        _print(table, report)
    _print_acceptance(document["acceptance"], report)
    drift = document["drift"]
    if drift["calls"]:
        again = f"{drift['calls']} calls of the calibration, measured again before and after each run of each pass"
        report.print_line()
        report.print_line(f"Machine: by how much it was slower than when it was calibrated; the median of {again}.")
    _print(_allocation(document["allocation"]), report)
    start_up = document["start_up"]
    report.print_line()
    report.print_line(
        f"A prompt of {start_up['prompt_tokens']:,} tokens in {start_up['chunks']} chunks starts up in "
        f"{start_up['measured_ms']:,.1f} ms; predicted {start_up['predicted_ms']:,.1f} ms ({start_up['error']:+.1%})."
    )
    _print(_attention(document["attention"]), report)


def print_plan(name: str, found: Document, report: Report) -> None:
    """Print the steps of one plan."""
    report.print_line(name, style="bold")
    table = _steps()
    table.add_row("", f"{found['step']['count']:,}", *_shares(found["step"]))
    _print(table, report)
    nulls = Table(*_NULLS)
    nulls.add_row("", *_beside_nulls(found))
    _print(nulls, report)
    sums = (found["predicted_ms"], found["measured_ms"])
    report.print_line("All steps: predicted {:,.1f} ms, measured {:,.1f} ms.".format(*sums))


def _runs(runs: list[Document]) -> Table:
    """Errors of steps, and the slowdown of the machine between calibration and run."""
    table = _steps("machine")
    for run in runs:
        drift = "" if run["drift"] is None else f"{run['drift']:+.1%}"
        table.add_row(run["run"], f"{run['step']['count']:,}", *_shares(run["step"]), drift)
    return table


def _nulls(runs: list[Document]) -> Table:
    """Errors of steps beside those of the null models and of a repetition, and the share of KV in the bytes read."""
    table = Table(*_NULLS)
    for run in runs:
        table.add_row(run["run"], *_beside_nulls(run))
    return table


def _beside_nulls(run: Document) -> tuple[str, ...]:
    errors = {name: f"{null['mape']:.1%}" for name, null in run["nulls"].items()}
    nulls = (errors.get(name, "-") for name in acceptance.NULLS)
    better, noise, share = run["times_better"], run["noise"], run["read_bytes"]["kv_share"]
    return (
        f"{run['step']['mape']:.1%}",
        *nulls,
        "-" if better is None else f"{better:.2f}x",
        "-" if noise is None else f"{noise['step_mape']:.1%}",
        f"{share:.0%}",
        ("yes" if run["beats_nulls"] else "NOT MET") if share >= acceptance.LEAST_KV_SHARE else "-",
    )


def _print_acceptance(found: Document, report: Report) -> None:
    report.print_line()
    report.print_line(f"Validated: {'yes' if found['validated'] else 'no'}.", style="bold")
    for reason in found["reasons"]:
        report.print_line(f"  {reason}")
    report.print_line(noticed_text(found["noticed"]))
    report.print_line(
        "Null models, fitted to the steps of the calibration: one time; a line in tokens; sequences, context and prompt tokens."
    )
    report.print_line(
        "They must be beaten where at least a third of the bytes that a run reads is KV, and elsewhere but for the noise."
    )


def noticed_text(noticed: Mapping[str, float | None]) -> str:
    """A sentence: the smallest errors of the prediction that a validation would have noticed."""
    parts = {"time": "all steps", "attention": "attention"}
    found = {what: "no error" if least is None else f"{least:.1%}" for what, least in noticed.items()}
    return f"It would have noticed {' and '.join(f'{found[what]} of {part}' for what, part in parts.items())}."


def _steps(*more: str) -> Table:
    return Table("step time", "steps", "MAPE", "p95", "bias", "sum", *more)


def _operations(operations: Mapping[str, Document]) -> Table:
    table = Table("operation", "steps", "MAPE", "p95", "bias", "sum")
    for name, label in _OPERATIONS.items():
        if name in operations:
            table.add_row(label, f"{operations[name]['count']:,}", *_shares(operations[name]))
    return table


def _throughput(runs: list[Document]) -> Table:
    """Throughputs, and their ratios to that of the first run, for the policies that serve the same requests."""
    table = Table("output tokens/s", "predicted", "measured", "error", "noise", "of static", "measured")
    for run in runs:
        sides = [(run[side], runs[0][side]) for side in ("predicted_tokens_per_s", "measured_tokens_per_s")]
        rates = [f"{rate:,.1f}" for rate, _ in sides]
        times = [f"{rate / first:.2f}" for rate, first in sides]
        noise = f"{run['noise']['throughput']:.1%}" if run["noise"] else "-"
        # Runs of other requests have no ratio to the first.
        shown = times if run["run"] in SAME_REQUESTS else ["", ""]
        table.add_row(run["run"], *rates, f"{run['throughput_error']:+.1%}", noise, *shown)
    return table


def _allocation(allocation: Mapping[str, Document]) -> Table:
    table = Table("decode steps, ms", "steps", "p50", "p99", "predicted p50", "p99")
    for name, found in allocation.items():
        sides = [f"{found[side][rank]:,.2f}" for side in ("measured", "predicted") for rank in ("p50_ms", "p99_ms")]
        table.add_row(f"{name} a block allocated", f"{found['count']:,}", *sides)
    return table


def _attention(shapes: list[Document]) -> Table:
    table = Table("decode attention, us", "paged", "contiguous", "paged adds")
    for found in shapes:
        times = (f"{found['paged_us']:,.1f}", f"{found['contiguous_us']:,.1f}", f"{found['overhead']:+.1%}")
        table.add_row(f"{found['batch']} x {found['context']} tokens", *times)
    return table


def _shares(error: Document) -> tuple[str, ...]:
    signed = (f"{error[name]:+.1%}" for name in ("bias", "total_bias"))
    return (f"{error['mape']:.1%}", f"{error['p95']:.1%}", *signed)


def _print(table: Table, report: Report) -> None:
    report.print_line()
    report.console.print(table)


#: Progress display: takes the items, their description and their number.
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]
ATTENTION_ROUNDS = 9
#: Replays of a single plan.
ROUNDS = 3
_PER_US = PER_SECOND // 1_000_000
#: The operations of a calibration that read KV.
ATTENTION = ("decode_attention", "contiguous_attention", "prefill_attention")


class Replay(NamedTuple):
    """Steps of a simulated run that a device executed: predicted and measured times.

    Attributes:
        steps: int [steps], their numbers in the run, from 0.
        predicted_us: float [steps], by the calibration.
        attention_us: float [steps], the part of it that is attention.
        samples_us: float [repetitions, steps].
        measured_us: float [steps], the stopwatch's quantile of the repetitions.
    """

    steps: np.ndarray
    predicted_us: np.ndarray
    attention_us: np.ndarray
    samples_us: np.ndarray
    measured_us: np.ndarray


class Validation:
    """Validation of one device with one calibration at one scale.

    Args:
        device: From ``devices.open``.
        calibration: The calibration file.
        scale: The size of the validation.
        dtype: Number format of weights and KV; None takes the calibration's.
        seed: Seed of the requests, their block tables and the weights.
        watch: Progress display.
        again: Measures one more part of the calibration, or its steps again on the skeleton of the runs, and returns the file of
            all parts so far, or None where there is nothing to measure; None if the calibration is taken as it is.
        kv_cache_dtype: Number format of the KV cache, auto or fp8; None takes the calibration's.

    Raises:
        UserError: The file is not a calibration, or has the same seed.
    """

    def __init__(
        self,
        device: Device,
        calibration: Path,
        scale: Scale,
        dtype: str | None,
        seed: int,
        watch: Watch,
        again: Callable[[Skeleton], Path | None] | None = None,
        kv_cache_dtype: str | None = None,
    ) -> None:
        self._device, self._scale, self._seed, self._watch, self._again = device, scale, seed, watch, again
        fit = read(calibration)
        self._dtype = dtype or fit.dtype or usual_dtype(device)
        self._kv_cache_dtype = kv_cache_dtype or fit.kv_cache_dtype
        self._read(calibration)
        self._is_again = False
        if seed == self._calibrated.get("seed"):
            raise SettingError("seed", seed, "is the calibration's, which must not know what is tested: take another")
        #: The timed steps of each run.
        self.replays: dict[str, Replay] = {}

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Name and content of each part of the report, as soon as it is measured."""
        yield "device", self._device.describe()
        yield "measured_by", timing.stopwatch(self._device).how
        yield "calibration", self._calibration_data()
        drift = self._drift()
        for runs in self._passes(drift):
            # Of the passes so far; a validation that is stopped has those.
            yield "calibration", self._calibration_data()
            yield "runs", runs
        yield "acceptance", acceptance.acceptance([self._judged(name) for name in self.replays])
        yield "drift", drift.as_dict()
        yield "operations", self._operations()
        yield "allocation", self._allocation()
        yield "start_up", self._start_up()
        scale = self._scale
        attention = validate_attention.paged_against_contiguous
        yield "attention", attention(self.skeleton, scale.shapes, ATTENTION_ROUNDS, self._seed)
        # Deprecated: readers get what they got where it was not installed.
        yield "transformers", {"reason": "it is not measured any more"}

    def _read(self, calibration: Path) -> None:
        self._cost = str(calibration)
        self._calibration = read(calibration).in_format(self._dtype, self._kv_cache_dtype)
        self._calibrated = json.loads(calibration.read_bytes())
        self._costs: dict[tuple[bool, float], StepCost] = {}

    def _passes(self, drift: Drift) -> Iterator[list[dict[str, Any]]]:
        """Replay all runs once, and then all again: the repetitions of a run contain the drift of the machine. After each
        pass comes another part of the calibration, if it is measured in parts. On a GPU one comes before the warm-up, too: it captures
        graphs, which releases the memory that torch has cached, and the next step would wait for memory.

        Yields:
            The runs, from the passes so far.
        """
        timed = {name: chosen_steps(plan, self._scale.timed_steps) for name, plan in self.plans.items()}
        samples_us: dict[str, list[np.ndarray]] = {name: [] for name in timed}
        if self.skeleton.captures:
            self._next_part(drift)
        validate.warm_up(self.skeleton, ((self.plans[name], steps.tolist()) for name, steps in timed.items()))
        for number in range(1, self._scale.rounds + 1):
            drift.look()
            for name, steps in timed.items():
                watch = self._watching(f"{name}, pass {number}")
                samples_us[name].append(validate.pass_us(self.skeleton, self.plans[name], steps.tolist(), watch))
                drift.look()
            self._next_part(drift)
            looks = np.reshape(drift.looks, (number, -1))
            runs = []
            for place, (name, steps) in enumerate(timed.items()):
                self.replays[name] = self._replay(self._priced[name], steps, np.array(samples_us[name]))
                around = looks[:, place : place + 2]
                runs.append(self._run(name) | {"drift": round(float(around.mean()), 4) if around.size else None})
            yield runs

    def _next_part(self, drift: Drift) -> None:
        """Measure another part of the calibration, and predict by all parts."""
        path = None if self._again is None else self._again(self.skeleton)
        if path is not None:
            self._read(path)
            self._is_again = True
            drift.compare(self._calibrated.get("points", ()))

    @property
    def cost(self) -> StepCost:
        """The calibration as step times of the model over paged memory."""
        return self._cost_of(paged=True)

    def _cost_of(self, paged: bool, attention: float = 1) -> StepCost:
        """The same, or over memory in which each sequence lies in one piece, and with attention that takes so many times as long."""
        if (paged, attention) not in self._costs:
            on_gpu = self._device.torch_device.type == "cuda"
            fit = self._calibration if attention == 1 else self._calibration.scaled(ATTENTION, attention)
            self._costs[paged, attention] = cost_of(fit, self._scale.model, self._kv_cache_dtype, on_gpu, paged)
        return self._costs[paged, attention]

    @cached_property
    def served(self) -> dict[str, Served]:
        """What each run serves."""
        kept = self._kv_cache_dtype
        room = room_tokens(self._device, self._scale.model, self._dtype, kept)
        loads = Loads(self._scale, self._seed, self.cost, room, points.KV_DTYPES[kept])
        return {name: loads.served(name) for name in RUNS}

    @cached_property
    def _priced(self) -> dict[str, PricedPlan]:
        return {
            name: self._recorded(served.workload, served.shuffle_ids, **served.settings)
            for name, served in self.served.items()
        }

    @property
    def plans(self) -> dict[str, Plan]:
        """The step plans of each run."""
        return {name: one.plan for name, one in self._priced.items()}

    @cached_property
    def long_prompt(self) -> PricedPlan:
        """A single prompt, chunk by chunk."""
        scale = self._scale
        arrivals, prompts, outputs = (np.array([one]) for one in (0, self._prompt_tokens, 1))
        workload = Workload("One prompt", arrivals, prompts, outputs)
        blocks = -(-self._prompt_tokens // BLOCK_SIZE) + 2
        limits = {"max_num_batched_tokens": scale.chunk_tokens, "max_num_seqs": 1}
        return self._recorded(workload, False, policy="vllm-v1", num_gpu_blocks_override=blocks, **limits)

    @property
    def _prompt_tokens(self) -> int:
        return min(self._scale.long_prompt, model_spec(self._scale.model).max_model_len - 1)

    def _recorded(self, workload: Workload, shuffle_ids: bool, **fields: Any) -> PricedPlan:
        common: dict[str, Any] = {
            "model": self._scale.model,
            "cost": self._cost,
            "seed": self._seed,
            "block_size": BLOCK_SIZE,
            "kv_cache_dtype": self._kv_cache_dtype,
            # The skeleton pads batches where it captures them, and only there.
            "enforce_eager": self._device.torch_device.type != "cuda",
        }
        # The skeleton computes step after step: no host work is hidden behind the step before it. Requests of contiguous memory
        # all wait from the start, so that their steps do not depend on their times.
        return priced(Settings(**common, **fields), workload, shuffle_ids, self.cost)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The skeleton, with a pool that is large enough for every plan."""
        plans = [*self.plans.values(), self.long_prompt.plan]
        blocks = -(-max(plan.meta["num_slots"] for plan in plans) // BLOCK_SIZE)
        host_blocks = max(used_host_blocks(plan) for plan in plans)
        spec = model_spec(self._scale.model)
        sizes, kept = (blocks, BLOCK_SIZE, self._dtype, self._seed, host_blocks), self._kv_cache_dtype
        return Skeleton(spec, self._device, *sizes, kv_cache_dtype=kept)

    def _calibration_data(self) -> dict[str, Any]:
        found = self._calibration
        data = {"kind": found.kind, "source": found.source, "sha256": found.sha256}
        if "model" in self._calibrated:
            data["model"] = self._calibrated["model"]
        formats = formats_of(self._calibrated)
        if formats != (self._dtype, self._kv_cache_dtype):
            data |= dict(zip(("dtype", "kv_cache_dtype"), formats, strict=True))
        drifts = self._calibrated.get("step_drifts") if self._is_again else None
        more = {} if drifts is None else {"step_drifts": drifts}
        return data | {"device": found.device.get("name"), "parts": self._calibrated.get("parts", 1), **more}

    def _drift(self) -> Drift:
        """The drift of the machine since the calibration; it has no points on any other machine."""
        then, now = self._calibration, self._device.describe()["name"]
        if then.kind != "calibration" or then.device.get("name") != now:
            return Drift(self.skeleton, (), 0)
        return Drift(self.skeleton, self._calibrated.get("points", ()), self._calibrated.get("seed", 0))

    def _run(self, name: str) -> dict[str, Any]:
        plan, served = self.plans[name], self.served[name]
        replay = self.replays[name]
        predicted, measured = replay.predicted_us, replay.measured_us
        workload = served.workload.sequences
        # As if the timed steps stood for all.
        tokens = int(workload.output_tokens.sum()) * len(replay.steps) / plan.num_steps
        predicted_rate, measured_rate = (tokens / us.sum() * 1e6 for us in (predicted, measured))
        return {
            "run": name,
            "policy": plan.meta["policy"],
            "requests": len(served.workload),
            "output_tokens": int(workload.output_tokens.sum()),
            "steps": plan.num_steps,
            "moves": {kind: len(getattr(plan, kind)) for kind in ("swap_outs", "swap_ins", "copies")},
            "step": validate.compared(predicted, measured),
            "predicted_tokens_per_s": round(predicted_rate, 2),
            "measured_tokens_per_s": round(measured_rate, 2),
            "throughput_error": round(predicted_rate / measured_rate - 1, 4),
            **self._judged(name).as_dict(),
        }

    def _judged(self, name: str) -> acceptance.Run:
        measured = acceptance.calibrated_steps(self._calibrated.get("points", ()))
        return judged(
            name,
            self.skeleton,
            self.plans[name],
            self.replays[name],
            measured,
            over_calibrated(self.skeleton.model, self._dtype, self._kv_cache_dtype, self._calibrated),
        )

    def _replay(self, one: PricedPlan, steps: np.ndarray, samples_us: np.ndarray) -> Replay:
        """Timed steps of a plan, with their times by the calibration as it is now."""
        ticks, longer = (one.ticks(self._cost_of(one.plan.is_paged, times)) for times in (1, _LONGER))
        return replay_of(self.skeleton, steps, ticks, (longer - ticks) / (_LONGER - 1), samples_us)

    def _watching(self, subject: str) -> Callable[..., Any]:
        return lambda items, total: self._watch(items, subject, total)

    def steps_csv(self) -> str:
        """Every timed step of every run as CSV, with each repetition."""
        passes = max((len(replay.samples_us) for replay in self.replays.values()), default=0)
        rounds = [f"repetition_{number}_us" for number in range(1, passes + 1)]
        lines = [
            ",".join(
                [
                    *("run", "step", "rows", "new_tokens", "context_tokens"),
                    "predicted_us",
                    "attention_us",
                    "measured_us",
                    *rounds,
                ]
            )
        ]
        for name, replay in self.replays.items():
            for place, step in enumerate(replay.steps.tolist()):
                found = self.plans[name].step(step)
                sizes = (len(found.sequence), found.query_tokens.sum(), found.context_lens.sum())
                predicted = (replay.predicted_us[place], replay.attention_us[place])
                times = (*predicted, replay.measured_us[place], *replay.samples_us[:, place])
                lines.append(",".join([name, str(step), *map(str, sizes), *(f"{us:.3f}" for us in times)]))
        return "\n".join(lines) + "\n"

    def _operations(self) -> dict[str, Any]:
        plan, scale = self.plans[PAGED], self._scale
        steps = validate_operations.selected_steps(plan, scale.operation_steps)
        compared = validate_operations.operations_compared
        watch = self._watching("operations")
        return compared(self.skeleton, plan, self._calibration, steps, scale.rounds, watch)

    def _allocation(self) -> dict[str, Any]:
        """Decode-only steps of the paged run, with and without a block allocation."""
        plan, replay = self.plans[PAGED], self.replays[PAGED]
        decoding, allocating = (plan.prefill_tokens == 0)[replay.steps], validate.allocates(plan)[replay.steps]
        found = {}
        for name, which in (("with", decoding & allocating), ("without", decoding & ~allocating)):
            if which.any():
                sides = {"predicted": replay.predicted_us[which], "measured": replay.measured_us[which]}
                found[name] = {"count": int(which.sum())} | {
                    side: validate.quantiles_ms(us) for side, us in sides.items()
                }
        return found

    def _start_up(self) -> dict[str, Any]:
        one, steps = self.long_prompt, np.arange(self.long_prompt.plan.num_steps)
        rounds, watch = self._scale.rounds, self._watching("long prompt")
        replay = self._replay(one, steps, samples_us(self.skeleton, one.plan, rounds, watch))
        predicted, measured = replay.predicted_us.sum(), replay.measured_us.sum()
        return {
            "prompt_tokens": self._prompt_tokens,
            "chunk_tokens": self._scale.chunk_tokens,
            "chunks": len(replay.steps),
            "predicted_ms": round(float(predicted) / 1e3, 3),
            "measured_ms": round(float(measured) / 1e3, 3),
            "error": round(float(predicted / measured - 1), 4),
        }


def chosen_steps(plan: Plan, most: int) -> np.ndarray:
    """Places of so many steps of a plan, evenly spread; all if it has no more."""
    if most >= plan.num_steps:
        return np.arange(plan.num_steps)
    return np.linspace(0, plan.num_steps - 1, most).round().astype(int)


def samples_us(skeleton: Skeleton, plan: Plan, rounds: int, watch: Callable[..., Any]) -> np.ndarray:
    """Microseconds of all steps of one plan, float [rounds, steps]: all one after the other, and then all again."""
    steps = range(plan.num_steps)
    validate.warm_up(skeleton, [(plan, steps)])
    return np.array([validate.pass_us(skeleton, plan, steps, watch) for _ in range(rounds)])


def over_calibrated(spec: ModelSpec, dtype: str, kv_cache_dtype: str, calibrated: Document) -> tuple[float, float]:
    """Bytes of a model's weights and KV in its number formats over those of the model of a calibration file in its own."""
    named = calibrated.get("model")
    of_model = spec if named in (None, spec.name) else model_spec(named)
    sides = ((spec, dtype, kv_cache_dtype), (of_model, *formats_of(calibrated)))
    (weights, kv), (of_weights, of_kv) = (
        np.array(acceptance.elements(one))
        * (dtype_bits(of_weights), dtype_bits(of_weights if kept == "auto" else kept))
        for one, of_weights, kept in sides
    )
    return float(weights / of_weights), float(kv / of_kv)


def formats_of(calibrated: Document) -> tuple[str, str]:
    """Number formats of a calibration file: of weights and KV, and of the KV cache where that is another."""
    return calibrated.get("dtype", "fp16"), calibrated.get("kv_cache_dtype", "auto")


def cost_of(fit: Calibration, model: str, kv_cache_dtype: str, captures: bool, paged: bool) -> StepCost:
    """Step times of a skeleton by a calibration.

    Args:
        captures: Whether steps that only decode are captured, and so padded.
        paged: Whether decodes read KV by block tables.
    """
    deployment = Deployment(kv_dtype=points.KV_DTYPES[kv_cache_dtype], cuda_graphs=captures)
    # No link and no speedup of a GPU enters: one GPU, 16 bits.
    return CalibratedCost(fit, model_spec(model), gpu("a100-80gb"), 1, BLOCK_SIZE, deployment, paged, 0)


def replay_of(
    skeleton: Skeleton, steps: np.ndarray, ticks: np.ndarray, attention_ticks: np.ndarray, samples_us: np.ndarray
) -> Replay:
    """Timed steps of a plan.

    Args:
        steps: Their places in the plan.
        ticks, attention_ticks: Durations of all steps of the plan, and of their attention.
        samples_us: float [repetitions, steps].
    """
    measured = np.quantile(samples_us, timing.stopwatch(skeleton.device).quantile, axis=0)
    predicted, attention = (of_all[steps] / _PER_US for of_all in (ticks, attention_ticks))
    return Replay(steps, predicted, attention, samples_us, measured)


def judged(
    name: str,
    skeleton: Skeleton,
    plan: Plan,
    replay: Replay,
    measured: tuple[acceptance.Sizes, np.ndarray] | None,
    over_measured: tuple[float, float] = (1, 1),
) -> acceptance.Run:
    """A replay with its null models and the bytes that it read.

    Args:
        name: Of the run.
        measured: Sizes and microseconds of the steps to which null models are fitted; None: the steps of the replay itself.
        over_measured: Bytes of weights and of KV over those of the model of these steps.
    """
    steps = replay.steps.tolist()
    sizes = acceptance.sizes_of(plan, steps)
    nulls = acceptance.null_models(sizes, *(measured or (sizes, replay.measured_us)), *over_measured)
    element_bytes, kv_element_bytes = DTYPES[skeleton.dtype].itemsize, skeleton.pool.keys[0].itemsize
    read_bytes = acceptance.read_bytes(plan, skeleton.model, element_bytes, steps, kv_element_bytes)
    quantile = timing.stopwatch(skeleton.device).quantile
    times = (replay.predicted_us, replay.attention_us, replay.samples_us, quantile)
    return acceptance.Run(name, *times, nulls, read_bytes)


def plan_timed(
    plan: Plan, model: ModelSpec, device: Device, dtype: str, watch: Watch, kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """Predicted and measured step times of one plan, beside its null models."""
    # Contiguous pieces are copied slot by slot.
    block_size = plan.meta["block_size"] if plan.is_paged else 1
    blocks = -(-plan.meta["num_slots"] // block_size)
    host_blocks = used_host_blocks(plan)
    skeleton = Skeleton(
        model, device, blocks, block_size, dtype, host_blocks=host_blocks, kv_cache_dtype=kv_cache_dtype
    )
    samples = samples_us(skeleton, plan, ROUNDS, lambda items, total: watch(items, "steps", total))
    # Of a recorded plan the prediction is one time a step, and its attention is not known.
    unknown = np.zeros(plan.num_steps)
    replay = replay_of(skeleton, np.arange(plan.num_steps), plan.ticks, unknown, samples)
    predicted, measured = replay.predicted_us, replay.measured_us
    sums = {"predicted_ms": predicted.sum() / 1e3, "measured_ms": measured.sum() / 1e3}
    return {
        "step": validate.compared(predicted, measured),
        **{name: round(float(ms), 3) for name, ms in sums.items()},
        **judged("", skeleton, plan, replay, None).as_dict(),
    }
