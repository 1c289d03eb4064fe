"""The runs of a validation: what is served, under which policy, over which pool.

Three policies serve the same requests: the comparison of static, continuous and paged batching. Five more runs make paging
matter, each in one way: much KV a step, prompts that arrive over time, a pool that is too small, prompts with a common prefix,
and samples that share their prompt. On a GPU the pools are as large as the weights, so that several runs read as much KV as
weights (:func:`gpu_scale`); on a CPU only the long contexts do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...gpu.devices.devices import Device, memory_bytes, usual_dtype, usual_model
from ...gpu.validate import attention as validate_attention
from ...sim import Workload
from ...sim.cost.base import StepCost
from ...sim.spec import model as model_spec
from ...sim.spec.gpu import GIB
from ...sim.workload.content import PromptContent
from ...traces import stream, synthetic_pairs

BLOCK_SIZE = 16
PAGED = "vllm-sosp23"
#: Policies that serve the same requests.
SAME_REQUESTS = ("static", "orca-max", PAGED)
#: Of the time in which prompts arrive, the share that their prefills take alone.
LOAD = 0.8
#: Of the free memory beside the weights, the share for the KV of long contexts: graphs hold results, too.
KV_SHARE_OF_MEMORY = 0.6
PREFIXES, SAMPLES = 4, 4


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a validation.

    Attributes:
        model: Preset of the skeleton.
        num_blocks: Blocks of the pool of the three policies.
        max_model_len: Longest request there, and the reservation of continuous batching for each request.
        requests: Number of requests there.
        long_sequences, long_tokens: Sequences that decode together, and the longest context of one.
        requests_each: Number of requests of each of the other runs.
        prompt_tokens, output_tokens: Longest prompt and output of those.
        tight_tokens, prefix_tokens: Longest prompt of the requests for the tight pool, and common prefix of those that have one.
        budget_tokens: Tokens of a step with chunked prefills.
        rounds: Repetitions of each run.
        timed_steps: Steps of a run that are timed, evenly spread over it.
        operation_steps: Steps of the paged run with measured operations.
        long_prompt, chunk_tokens: The long prompt that starts up, and the part of it that a step takes.
        shapes: (sequences, tokens of each sequence) of attention, paged and contiguous.
    """

    model: str
    num_blocks: int
    max_model_len: int
    requests: int
    long_sequences: int
    long_tokens: int
    requests_each: int
    prompt_tokens: int
    output_tokens: int
    tight_tokens: int
    prefix_tokens: int
    budget_tokens: int
    rounds: int
    timed_steps: int
    operation_steps: int
    long_prompt: int
    chunk_tokens: int
    shapes: tuple[tuple[int, int], ...]


_CPU_SHAPES, _CUDA_SHAPES = (validate_attention.SHAPES[name] for name in ("cpu", "cuda"))
CPU = Scale("toy-llama", 112, 256, 21, 48, 1536, 24, 256, 64, 64, 128, 256, 3, 90, 20, 2048, 256, _CPU_SHAPES)
#: A short validation, for trials.
QUICK = Scale("toy-llama", 28, 64, 4, 6, 96, 6, 40, 12, 10, 16, 64, 2, 12, 6, 256, 128, ((4, 64),))


def gpu_scale(model: str, room_tokens: int) -> Scale:
    """The scale for a GPU.

    Args:
        model: Preset, or whatever ``spec.model`` takes.
        room_tokens: Tokens of KV that fit beside the weights.
    """
    spec = model_spec(model)
    # As many bytes of KV as of weights.
    tokens = min(spec.weight_bytes("fp16") // spec.slot_bytes("fp16"), room_tokens)
    blocks = tokens // BLOCK_SIZE
    # A quarter of 80 requests are 20 sequences: three quarters of the longest prompt and 320 outputs each.
    each, outputs = 80, 256
    tight = max(outputs, (tokens // (each // 4) - 5 * outputs // 4) * 4 // 3)
    prefix = max(BLOCK_SIZE, tokens // 40)
    sizes = (blocks, 1024, 400, 256, 2000, each, 2048, outputs, tight, prefix)
    return Scale(model, *sizes, 2048, 3, 100, 48, 16384, 2048, _CUDA_SHAPES)


def scale_of(device: Device, quick: bool, model: str | None = None) -> Scale:
    """The scale for a device.

    Args:
        model: What ``spec.model`` takes; None is the device's usual one.
    """
    memory = memory_bytes(device)
    if quick or memory is None:
        scale = QUICK if quick else CPU
        return replace(scale, model=model or scale.model)
    named = model or usual_model(memory)
    return gpu_scale(named, room_tokens(device, named, usual_dtype(device)))


@dataclass(frozen=True, slots=True)
class Served:
    """What a run serves: requests, and settings beside those that all runs share."""

    workload: Workload
    settings: Mapping[str, Any] = field(default_factory=dict)
    shuffle_ids: bool = True


@dataclass(frozen=True, slots=True)
class Loads:
    """Makes the requests of each run.

    Attributes:
        scale: The size of the validation.
        seed: Each run has a random stream of its own.
        cost: Predicts how long a prompt takes, which sets the rate at which prompts arrive.
        room_tokens: Tokens of KV that fit on the device beside the weights.
        kv_dtype: Number format of the KV cache.
    """

    scale: Scale
    seed: int
    cost: StepCost
    room_tokens: int
    kv_dtype: str = "fp16"

    def served(self, run: str) -> Served:
        """What a run of :data:`RUNS` serves."""
        return RUNS[run](self, run)

    def same_requests(self, policy: str) -> Served:
        """Requests that all wait from the start, without max_tokens; each policy has the same."""
        scale = self.scale
        pairs = synthetic_pairs("vllm_sosp23_sharegpt_opt", scale.requests, self.seed, scale.max_model_len)
        workload = _at_once("Synthetic sharegpt", pairs.prompt_tokens, pairs.output_tokens)
        pool = {"num_gpu_blocks_override": scale.num_blocks, "max_model_len": scale.max_model_len}
        return Served(workload, {"policy": policy, **pool}, shuffle_ids=policy == PAGED)

    def long_contexts(self, run: str) -> Served:
        """Sequences that start with short prompts and decode together for long, so that contexts grow as the batch does
        not: no constant and no line in the batch size fits. As many as the device has room for."""
        scale, rng = self.scale, stream(self.seed, run)
        longest = scale.long_tokens
        sequences = max(1, min(scale.long_sequences, self.room_tokens // (longest + BLOCK_SIZE)))
        prompts = rng.integers(longest // 16, longest // 4, sequences)
        outputs = rng.integers(longest // 4, 3 * longest // 4, sequences)
        return Served(_at_once(run, prompts, outputs), self._chunked(prompts, outputs))

    def arriving_prompts(self, run: str) -> Served:
        """Prompts with few outputs, that arrive over time and are computed in chunks beside decodes."""
        scale, rng = self.scale, stream(self.seed, run)
        prompts = rng.integers(scale.prompt_tokens // 8, scale.prompt_tokens, scale.requests_each)
        outputs = rng.integers(1, scale.output_tokens // 4 + 1, scale.requests_each)
        mean = int(prompts.mean())
        gap_ticks = self.cost.step_ticks(0, 0, mean, mean * (mean + 1) // 2) / LOAD
        arrivals = np.cumsum(rng.exponential(gap_ticks, scale.requests_each)).astype(np.int64)
        return Served(Workload(run, arrivals, prompts, outputs), self._chunked(prompts, outputs))

    def tight_pool(self, run: str) -> Served:
        """A pool with room for a quarter of the requests at their longest: sequences are preempted and swapped."""
        scale, rng = self.scale, stream(self.seed, run)
        prompts = rng.integers(scale.tight_tokens // 2, scale.tight_tokens, scale.requests_each)
        outputs = rng.integers(scale.output_tokens // 2, 2 * scale.output_tokens, scale.requests_each)
        blocks = max(-(-int((prompts + outputs).sum()) // BLOCK_SIZE) // 4, self._blocks(prompts, outputs, 1))
        # Ids of host blocks are shuffled, too, so that all of the host pool is allocated.
        host_gib = blocks // 2 * BLOCK_SIZE * model_spec(scale.model).slot_bytes(self.kv_dtype) / GIB
        swap = {"preemption_mode": "swap", "swap_space": host_gib}
        return Served(_at_once(run, prompts, outputs), {"policy": "vllm-v0", "num_gpu_blocks_override": blocks, **swap})

    def shared_prefixes(self, run: str) -> Served:
        """Prompts that begin with one of a few common prefixes, most of which are in the cache."""
        scale, rng = self.scale, stream(self.seed, run)
        each, prefix = scale.requests_each, scale.prefix_tokens // BLOCK_SIZE * BLOCK_SIZE
        own = rng.integers(1, scale.prefix_tokens, each)
        outputs = rng.integers(scale.output_tokens // 4, scale.output_tokens, each)
        pieces = PromptContent(np.arange(each + 1), rng.integers(0, PREFIXES, each), np.full(each, prefix))
        arrivals = np.arange(each) * self.cost.step_ticks(0, 0, prefix, prefix * (prefix + 1) // 2)
        workload = Workload(run, arrivals, prefix + own, outputs, content=pieces)
        return Served(workload, self._chunked(workload.prompt_tokens, outputs))

    def shared_samples(self, run: str) -> Served:
        """Several samples of each prompt: they share its blocks, and copy the last one when they first write to it."""
        scale, rng = self.scale, stream(self.seed, run)
        requests = max(2, scale.requests_each // SAMPLES)
        prompts = rng.integers(scale.prompt_tokens // 4, scale.prompt_tokens // 2, requests)
        outputs = rng.integers(scale.output_tokens // 2, scale.output_tokens, requests)
        samples = np.full(requests, SAMPLES)
        blocks = self._blocks(prompts, outputs, SAMPLES * requests)
        workload = Workload(run, np.zeros(requests, np.int64), prompts, outputs, n=samples)
        return Served(workload, {"policy": "vllm-v0", "num_gpu_blocks_override": blocks})

    def _chunked(self, prompts: np.ndarray, outputs: np.ndarray) -> dict[str, Any]:
        """vllm-v1 over a pool with room for all requests at once, or as many as the device holds."""
        longest = self._blocks(prompts, outputs, 1)
        blocks = max(longest, min(self._blocks(prompts, outputs, len(prompts)), self.room_tokens // BLOCK_SIZE))
        limits = {"max_num_batched_tokens": self.scale.budget_tokens, "max_num_seqs": len(prompts)}
        return {"policy": "vllm-v1", "num_gpu_blocks_override": blocks, **limits}

    @staticmethod
    def _blocks(prompts: np.ndarray, outputs: np.ndarray, sequences: int) -> int:
        """Blocks for so many of the longest sequences, and a few more than the watermarks of policies."""
        return sequences * -(-int((prompts + outputs).max()) // BLOCK_SIZE) * 21 // 20 + 4


#: Runs by name, in the order of the report.
RUNS: dict[str, Callable[[Loads, str], Served]] = {
    **dict.fromkeys(SAME_REQUESTS, Loads.same_requests),
    "long contexts": Loads.long_contexts,
    "arriving prompts": Loads.arriving_prompts,
    "tight pool": Loads.tight_pool,
    "shared prefixes": Loads.shared_prefixes,
    "shared samples": Loads.shared_samples,
}


def room_tokens(device: Device, model: str, dtype: str, kv_cache_dtype: str = "auto") -> int:
    """Tokens of KV that fit on the device beside a model's weights and what a replay needs."""
    return room_of(device.free_bytes(), model, dtype, kv_cache_dtype)


def room_of(free_bytes: int, model: str, dtype: str, kv_cache_dtype: str = "auto") -> int:
    """The same, on a device with so much free memory."""
    spec = model_spec(model)
    room = int(KV_SHARE_OF_MEMORY * (free_bytes - spec.weight_bytes(dtype)))
    return max(0, room) // spec.slot_bytes(dtype if kv_cache_dtype == "auto" else kv_cache_dtype)


def _at_once(name: str, prompts: np.ndarray, outputs: np.ndarray) -> Workload:
    return Workload(name, np.zeros(len(prompts), np.int64), prompts, outputs)
