"""Validation of step times on a device: predicted and measured steps of simulated runs.

Three policies serve the same requests, which all wait from the start: static batching, continuous batching that
reserves the longest output, and paged memory. A calibration predicts their step times; it saw neither these requests
nor their block tables. Each run is recorded and replayed step by step through a skeleton of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from ...gpu.devices import timing
from ...gpu.devices.devices import Device
from ...gpu.model.executor import used_host_blocks
from ...gpu.model.skeleton import Skeleton
from ...gpu.validate import attention as validate_attention
from ...gpu.validate import operations as validate_operations
from ...gpu.validate import validate
from ...gpu.validate.drift import Drift
from ...sim import Settings, Workload
from ...sim.cost.calibration import read
from ...sim.recording.plans import Plan, record
from ...sim.spec import ModelSpec
from ...sim.spec import model as model_spec
from ...sim.types.errors import SettingError
from ...sim.types.ticks import PER_SECOND
from ...traces import synthetic_pairs
from ..runs.output import Report

Document = Mapping[str, Any]
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
    for table in (_runs(document["runs"]), _throughput(document["runs"]), _operations(document["operations"])):
        _print(table, report)
    drift = document["drift"]
    if drift["calls"]:
        again = f"{drift['calls']} calls of the calibration, measured again before and after each run"
        report.print_line()
        report.print_line(f"Machine: by how much it has become slower since it was calibrated; the median of {again}.")
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
    sums = (found["predicted_ms"], found["measured_ms"])
    report.print_line("All steps: predicted {:,.1f} ms, measured {:,.1f} ms.".format(*sums))


def _runs(runs: list[Document]) -> Table:
    """Errors of steps, and the slowdown of the machine between calibration and run."""
    table = _steps("machine")
    for run in runs:
        drift = "" if run["drift"] is None else f"{run['drift']:+.1%}"
        table.add_row(run["policy"], f"{run['step']['count']:,}", *_shares(run["step"]), drift)
    return table


def _steps(*more: str) -> Table:
    return _table("step time", "steps", "MAPE", "p95", "bias", "sum", *more)


def _operations(operations: Mapping[str, Document]) -> Table:
    table = _table("operation", "steps", "MAPE", "p95", "bias", "sum")
    for name, label in _OPERATIONS.items():
        if name in operations:
            table.add_row(label, f"{operations[name]['count']:,}", *_shares(operations[name]))
    return table


def _throughput(runs: list[Document]) -> Table:
    """Throughputs, and their ratios to that of the first run."""
    table = _table("output tokens/s", "predicted", "measured", "error", "times, predicted", "measured")
    for run in runs:
        sides = [(run[side], runs[0][side]) for side in ("predicted_tokens_per_s", "measured_tokens_per_s")]
        rates = [f"{rate:,.1f}" for rate, _ in sides]
        times = [f"{rate / first:.2f}" for rate, first in sides]
        table.add_row(run["policy"], *rates, f"{run['throughput_error']:+.1%}", *times)
    return table


def _allocation(allocation: Mapping[str, Document]) -> Table:
    table = _table("decode steps, ms", "steps", "p50", "p99", "predicted p50", "p99")
    for name, found in allocation.items():
        sides = [f"{found[side][rank]:,.2f}" for side in ("measured", "predicted") for rank in ("p50_ms", "p99_ms")]
        table.add_row(f"{name} a block allocated", f"{found['count']:,}", *sides)
    return table


def _attention(shapes: list[Document]) -> Table:
    table = _table("decode attention, us", "paged", "contiguous", "paged adds")
    for found in shapes:
        times = (f"{found['paged_us']:,.1f}", f"{found['contiguous_us']:,.1f}", f"{found['overhead']:+.1%}")
        table.add_row(f"{found['batch']} x {found['context']} tokens", *times)
    return table


def _shares(error: Document) -> tuple[str, ...]:
    signed = (f"{error[name]:+.1%}" for name in ("bias", "total_bias"))
    return (f"{error['mape']:.1%}", f"{error['p95']:.1%}", *signed)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def _print(table: Table, report: Report) -> None:
    report.print_line()
    report.console.print(table)


#: Progress display: takes the items, their description and their number.
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]
POLICIES = ("static", "orca-max", "vllm-sosp23")
PAGED = "vllm-sosp23"
BLOCK_SIZE = 16
ATTENTION_ROUNDS = 9
#: Replays of a single plan.
ROUNDS = 3
_PER_US = PER_SECOND // 1_000_000


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a validation.

    Attributes:
        model: Preset of the skeleton.
        num_blocks: Blocks of the pool.
        max_model_len: Longest request, and the reservation of continuous batching for each request.
        requests: Number of requests.
        rounds: Replays of each run.
        operation_steps: Steps of the paged run with measured operations.
        prompt_tokens, chunk_tokens: The long prompt that starts up, and the part of it that a step takes.
        shapes: (sequences, tokens of each sequence) of attention, paged and contiguous.
    """

    model: str
    num_blocks: int
    max_model_len: int
    requests: int
    rounds: int
    operation_steps: int
    prompt_tokens: int
    chunk_tokens: int
    shapes: tuple[tuple[int, int], ...]


CPU = Scale("toy-llama", 112, 256, 21, 3, 20, 2048, 256, validate_attention.SHAPES["cpu"])
#: A short validation, for trials.
QUICK = Scale("toy-llama", 28, 64, 4, 2, 6, 256, 128, ((4, 64),))
#: The pool of the paper's OPT-13B; a 16K prompt; some 4,000 steps.
CUDA = Scale("llama-3.1-8b", 983, 1024, 60, 1, 48, 16384, 2048, validate_attention.SHAPES["cuda"])


def scale_of(device: Device, quick: bool) -> Scale:
    """The scale for a device."""
    return QUICK if quick else CUDA if device.torch_device.type == "cuda" else CPU


class Validation:
    """Validation of one device with one calibration at one scale.

    Args:
        device: From ``devices.open``.
        calibration: The calibration file.
        scale: The size of the validation.
        dtype: Number format of weights and KV; None takes the calibration's.
        seed: Seed of the requests, their block tables and the weights.
        watch: Progress display.

    Raises:
        UserError: The file is not a calibration, or has the same seed.
    """

    def __init__(
        self, device: Device, calibration: Path, scale: Scale, dtype: str | None, seed: int, watch: Watch
    ) -> None:
        self._device, self._scale, self._seed, self._watch = device, scale, seed, watch
        self._calibration, self._cost = read(calibration), str(calibration)
        self._dtype = dtype or self._calibration.dtype
        self._calibrated = json.loads(calibration.read_bytes())
        if seed == self._calibrated.get("seed"):
            raise SettingError("seed", seed, "is the calibration's, which must not know what is tested: take another")
        #: Predicted and measured microseconds of the steps of each policy's run.
        self.steps_us: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Name and content of each part of the report, as soon as it is measured."""
        yield "device", self._device.describe()
        yield "measured_by", timing.stopwatch(self._device).how
        yield "calibration", self._calibration_data()
        drift, runs = self._drift(), []
        drift.look()
        for policy in POLICIES:
            runs.append(self._run(policy))
            drift.look()
            runs[-1]["drift"] = drift.between
            yield "runs", runs
        yield "drift", drift.as_dict()
        yield "operations", self._operations()
        yield "allocation", self._allocation()
        yield "start_up", self._start_up()
        scale = self._scale
        attention = validate_attention.paged_against_contiguous
        yield "attention", attention(self.skeleton, scale.shapes, ATTENTION_ROUNDS, self._seed)

    @cached_property
    def workload(self) -> Workload:
        """Requests that all wait from the start, without max_tokens."""
        scale = self._scale
        pairs = synthetic_pairs("vllm_sosp23_sharegpt_opt", scale.requests, self._seed, scale.max_model_len)
        arrivals = np.zeros(scale.requests, np.int64)
        return Workload("Synthetic sharegpt", arrivals, pairs.prompt_tokens, pairs.output_tokens)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The step plans of each policy's run."""
        common = {"num_gpu_blocks_override": self._scale.num_blocks, "max_model_len": self._scale.max_model_len}
        return {policy: self._recorded(self.workload, policy=policy, **common) for policy in POLICIES}

    @cached_property
    def long_prompt(self) -> Plan:
        """A single prompt, chunk by chunk."""
        scale = self._scale
        arrivals, prompts, outputs = (np.array([one]) for one in (0, self._prompt_tokens, 1))
        workload = Workload("One prompt", arrivals, prompts, outputs)
        blocks = -(-self._prompt_tokens // BLOCK_SIZE) + 2
        limits = {"max_num_batched_tokens": scale.chunk_tokens, "max_num_seqs": 1}
        return self._recorded(workload, policy="vllm-v1", num_gpu_blocks_override=blocks, **limits)

    @property
    def _prompt_tokens(self) -> int:
        return min(self._scale.prompt_tokens, model_spec(self._scale.model).max_model_len - 1)

    def _recorded(self, workload: Workload, **fields: Any) -> Plan:
        common: dict[str, Any] = {
            "model": self._scale.model,
            "cost": self._cost,
            "seed": self._seed,
            "block_size": BLOCK_SIZE,
        }
        return record(Settings(**common, **fields), workload, shuffle_ids=fields["policy"] == PAGED)[1]

    @cached_property
    def skeleton(self) -> Skeleton:
        """The skeleton, with a pool that is large enough for every plan."""
        plans = [*self.plans.values(), self.long_prompt]
        blocks = -(-max(plan.meta["num_slots"] for plan in plans) // BLOCK_SIZE)
        host_blocks = max(used_host_blocks(plan) for plan in plans)
        spec = model_spec(self._scale.model)
        return Skeleton(spec, self._device, blocks, BLOCK_SIZE, self._dtype, self._seed, host_blocks)

    def _calibration_data(self) -> dict[str, Any]:
        found = self._calibration
        data = {"kind": found.kind, "source": found.source, "sha256": found.sha256}
        return data | {"device": found.device.get("name")}

    def _drift(self) -> Drift:
        """The drift of the machine since the calibration; it has no points on any other machine."""
        then, now = self._calibration, self._device.describe()["name"]
        if then.kind != "calibration" or then.device.get("name") != now:
            return Drift(self.skeleton, (), 0)
        return Drift(self.skeleton, self._calibrated.get("points", ()), self._calibrated.get("seed", 0))

    def _run(self, policy: str) -> dict[str, Any]:
        predicted, measured = self.steps_us[policy] = self._times(self.plans[policy], policy)
        tokens = int(self.workload.output_tokens.sum())
        predicted_rate, measured_rate = (tokens / us.sum() * 1e6 for us in (predicted, measured))
        return {
            "policy": policy,
            "requests": len(self.workload),
            "output_tokens": tokens,
            "step": validate.compared(predicted, measured),
            "predicted_tokens_per_s": round(predicted_rate, 2),
            "measured_tokens_per_s": round(measured_rate, 2),
            "throughput_error": round(predicted_rate / measured_rate - 1, 4),
        }

    def _times(self, plan: Plan, subject: str) -> tuple[np.ndarray, np.ndarray]:
        """Predicted and measured microseconds of every step."""
        measured = validate.step_us(self.skeleton, plan, self._scale.rounds, self._watching(subject))
        return plan.ticks / _PER_US, measured

    def _watching(self, subject: str) -> Callable[..., Any]:
        return lambda items, total: self._watch(items, subject, total)

    def steps_csv(self) -> str:
        """Every measured step of every run as CSV."""
        lines = ["policy,step,new_tokens,context_tokens,predicted_us,measured_us"]
        for policy, sides in self.steps_us.items():
            plan = self.plans[policy]
            for step, (predicted, measured) in enumerate(zip(*sides, strict=True)):
                found = plan.step(step)
                tokens = f"{found.query_tokens.sum()},{found.context_lens.sum()}"
                lines.append(f"{policy},{step},{tokens},{predicted:.3f},{measured:.3f}")
        return "\n".join(lines) + "\n"

    def _operations(self) -> dict[str, Any]:
        plan, scale = self.plans[PAGED], self._scale
        steps = validate_operations.selected_steps(plan, scale.operation_steps)
        compared = validate_operations.operations_compared
        watch = self._watching("operations")
        return compared(self.skeleton, plan, self._calibration, steps, scale.rounds, watch)

    def _allocation(self) -> dict[str, Any]:
        """Decode-only steps of the paged run, with and without a block allocation."""
        plan, (predicted, measured) = self.plans[PAGED], self.steps_us[PAGED]
        decoding, allocating = plan.prefill_tokens == 0, validate.allocates(plan)
        found = {}
        for name, which in (("with", decoding & allocating), ("without", decoding & ~allocating)):
            if which.any():
                sides = {"predicted": predicted[which], "measured": measured[which]}
                found[name] = {"count": int(which.sum())} | {
                    side: validate.quantiles_ms(us) for side, us in sides.items()
                }
        return found

    def _start_up(self) -> dict[str, Any]:
        predicted, measured = self._times(self.long_prompt, "long prompt")
        return {
            "prompt_tokens": self._prompt_tokens,
            "chunk_tokens": self._scale.chunk_tokens,
            "chunks": len(measured),
            "predicted_ms": round(float(predicted.sum()) / 1e3, 3),
            "measured_ms": round(float(measured.sum()) / 1e3, 3),
            "error": round(float(predicted.sum() / measured.sum() - 1), 4),
        }


def plan_timed(plan: Plan, model: ModelSpec, device: Device, dtype: str, watch: Watch) -> dict[str, Any]:
    """Predicted and measured step times of one plan."""
    # Contiguous pieces are copied slot by slot.
    block_size = plan.meta["block_size"] if plan.is_paged else 1
    blocks = -(-plan.meta["num_slots"] // block_size)
    skeleton = Skeleton(model, device, blocks, block_size, dtype, host_blocks=used_host_blocks(plan))
    predicted = plan.ticks / _PER_US
    measured = validate.step_us(skeleton, plan, ROUNDS, lambda items, total: watch(items, "steps", total))
    sums = {"predicted_ms": predicted.sum() / 1e3, "measured_ms": measured.sum() / 1e3}
    return {"step": validate.compared(predicted, measured)} | {name: round(float(ms), 3) for name, ms in sums.items()}
