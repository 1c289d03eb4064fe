"""Runs that were simulated, on a device: what was predicted of their steps beside what they take.

Static batching, continuous batching that reserves the longest output, and paged memory serve the same requests, which
all wait from the start. The cost of their steps is that of a calibration, which saw neither these requests nor their
tables. Each run is recorded and replayed step by step through a skeleton of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

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

#: Passes items on and shows how far they have come: items, what they are, how many.
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]
POLICIES = ("static", "orca-max", "vllm-sosp23")
PAGED = "vllm-sosp23"
BLOCK_SIZE = 16
ATTENTION_ROUNDS = 9
#: Replays of a plan by itself.
ROUNDS = 3
_PER_US = PER_SECOND // 1_000_000


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run.

    Attributes:
        model: Preset of the skeleton.
        num_blocks: Blocks of the pool.
        max_model_len: Longest request, and what continuous batching reserves for each.
        requests: How many are served.
        rounds: Replays of each run.
        operation_steps: Steps of the paged run for which operations are measured.
        prompt_tokens, chunk_tokens: The long prompt that starts up, and how much of it a step takes.
        shapes: (sequences, tokens that each holds) of attention, paged against contiguous.
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
#: To try things with.
QUICK = Scale("toy-llama", 28, 64, 4, 2, 6, 256, 128, ((4, 64),))
#: The pool of the paper's OPT-13B; a 16K prompt; some 4,000 steps.
CUDA = Scale("llama-3.1-8b", 983, 1024, 60, 1, 48, 16384, 2048, validate_attention.SHAPES["cuda"])


def scale_of(device: Device, quick: bool) -> Scale:
    """What a device is asked for."""
    return QUICK if quick else CUDA if device.torch_device.type == "cuda" else CPU


class Validation:
    """One device, one calibration, one scale.

    Args:
        device: From ``devices.open``.
        calibration: The file that predicts.
        scale: How much is run.
        dtype: Of weights and KV; None is the calibration's.
        seed: Of the requests, their block tables and the weights.
        watch: Shows how far the work has come.

    Raises:
        UserError: The file is no calibration, or one of the same seed.
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
        """What each policy's run does."""
        common = {"num_gpu_blocks_override": self._scale.num_blocks, "max_model_len": self._scale.max_model_len}
        return {policy: self._recorded(self.workload, policy=policy, **common) for policy in POLICIES}

    @cached_property
    def long_prompt(self) -> Plan:
        """A prompt by itself, chunk by chunk."""
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
        """With a pool that every plan fits into."""
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
        """Only the machine that was calibrated can be compared with itself."""
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
        """Every step of every run so far."""
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
        steps = validate_operations.telling_steps(plan, scale.operation_steps)
        compared = validate_operations.operations_compared
        watch = self._watching("operations")
        return compared(self.skeleton, plan, self._calibration, steps, scale.rounds, watch)

    def _allocation(self) -> dict[str, Any]:
        """Steps of the paged run that only decode, with and without a block that is allocated."""
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
    """The steps of one plan: what it says that they take, and what they do."""
    # Contiguous pieces are copied slot by slot.
    block_size = plan.meta["block_size"] if plan.is_paged else 1
    blocks = -(-plan.meta["num_slots"] // block_size)
    skeleton = Skeleton(model, device, blocks, block_size, dtype, host_blocks=used_host_blocks(plan))
    predicted = plan.ticks / _PER_US
    measured = validate.step_us(skeleton, plan, ROUNDS, lambda items, total: watch(items, "steps", total))
    sums = {"predicted_ms": predicted.sum() / 1e3, "measured_ms": measured.sum() / 1e3}
    return {"step": validate.compared(predicted, measured)} | {name: round(float(ms), 3) for name, ms in sums.items()}
