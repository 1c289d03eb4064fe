"""KV cache memory that vLLM computes at start-up: `determine_available_memory` of its `v1/worker/gpu_worker.py`.

    --gpu-memory-utilization of the GPU memory
    - weights                  as loaded, with the rotary table
    - activations              the peak of one dummy step: max_num_batched_tokens, then max_num_seqs samples
    - outside of torch         CUDA libraries, NCCL
    - CUDA graphs              since 0.20; before, they used the rest of the GPU memory
    = KV cache, in blocks of --block-size tokens of all layers (with KV groups: of the layers of a page)

Weights, blocks and the check follow vLLM's arithmetic. The other parts are estimates. docs/results/start-up-logs.md has their errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..gpu import GIB
from .activations import activation_bytes, warm_up_bytes
from .cuda_graphs import captured_bytes
from .estimate import Estimate, exactly, rest
from .launch import Launch
from .launched_graphs import captures_of, cuda_graph_bytes, shape_of
from .loading import loaded_bytes, reordering_fragments
from .non_torch import non_torch_bytes, used_at_start

#: GLM-5.3-Flash is in the releases from 0.30 on. Builds before (vllm-project/recipes#906, where the pool has 3,081 blocks) made the check
#: of ``capture_blocks`` while they profiled, in a pool with as many blocks as the largest graph has tokens; no release does.
_GLM5_NEXT, _FIRST_GLM5_NEXT = "glm5_next", (0, 30)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each GPU of a pipeline stage.

    Attributes:
        gpu_name: The card.
        total_bytes, requested_bytes: Of the GPU, and the share that vLLM requests.
        weights, activations, non_torch, cuda_graphs: Parts of the request that are not KV cache.
        kv_cache: What they leave; a size that a log or the user gives is exact.
        kv_cache_bytes: The end of that interval, or the likely size, that the launch asks for (``Launch.outlook``).
        block_bytes: Bytes of a block.
    """

    gpu_name: str
    total_bytes: int
    requested_bytes: int
    weights: Estimate
    activations: Estimate
    non_torch: Estimate
    cuda_graphs: Estimate
    kv_cache: Estimate
    kv_cache_bytes: int
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        return max(0, self.kv_cache_bytes // self.block_bytes)

    def parts(self) -> dict[str, Estimate]:
        """The parts of the request beside the KV cache."""
        return {name: getattr(self, name) for name in PARTS}


#: Parts of the requested memory beside the KV cache.
PARTS = ("weights", "activations", "non_torch", "cuda_graphs")
#: The name of what they leave, in ``Launch.corrections``.
KV_CACHE = "kv_cache"
#: There, what a server that ran out of memory after it allocated the KV cache lacked at least, beside what is computed.
WARM_UP = "warm_up"


def stage_memories(launch: Launch) -> list[StageMemory]:
    """Memory of the GPUs of every pipeline stage; of different cards, of that with the least KV cache.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    return [*_stage_memories(launch)]


@lru_cache(maxsize=256)
def _stage_memories(launch: Launch) -> tuple[StageMemory, ...]:
    """Cached, because every check of a start, and every remedy that is tried, asks for the same."""
    stages, found = launch.stages, []
    weights = {gpu: _weights(replace(launch, gpu=gpu, max_model_len=0)) for gpu in (launch.gpu, *launch.gpus)}
    for number, layers in enumerate(stages):
        memories = [
            _stage(replace(launch, gpu=gpu), layers, weights[gpu][number], last=layers is stages[-1])
            for gpu in launch.stage_gpus(number)
        ]
        found.append(min(memories, key=lambda memory: memory.kv_cache_bytes))
    return tuple(found)


@lru_cache(maxsize=256)
def _weights(launch: Launch) -> tuple[Estimate, ...]:
    """Cached by a launch without a length: a search for the longest one that fits tries twenty, and weights are the same for all."""
    return tuple(loaded_bytes(launch))


def _parts(launch: Launch, layers: range, weights: Estimate, last: bool) -> dict[str, Estimate]:
    parts = {
        "weights": weights,
        "activations": activation_bytes(launch, layers, last),
        "non_torch": non_torch_bytes(launch, layers, last),
        "cuda_graphs": cuda_graph_bytes(launch, layers),
    }
    more = dict(launch.corrections)
    return {name: exactly(part.likely + more[name]) if name in more else part for name, part in parts.items()}


def _stage(launch: Launch, layers: range, weights: Estimate, last: bool) -> StageMemory:
    requested = int(launch.gpu.memory_bytes * launch.gpu_memory_utilization)
    more, parts = dict(launch.corrections), _parts(launch, layers, weights, last)
    kv_cache = rest(requested, [*parts.values()])
    if launch.is_compiled is None and not {"activations", "non_torch"} & more.keys():
        # One cause for what two parts may have; a log of one of them has decided it.
        cold, warm = (
            rest(requested, [*_parts(replace(launch, is_compiled=each), layers, weights, last).values()])
            for each in (False, True)
        )
        kv_cache = Estimate(min(cold.low, kv_cache.likely), kv_cache.likely, max(warm.high, kv_cache.likely))
    if launch.kv_cache_memory_bytes is not None:
        kv_cache = exactly(launch.kv_cache_memory_bytes)
    if KV_CACHE in more:
        kv_cache = exactly(kv_cache.likely + more[KV_CACHE])
    return StageMemory(
        gpu_name=launch.gpu.name,
        total_bytes=launch.gpu.memory_bytes,
        requested_bytes=requested,
        **parts,
        kv_cache=kv_cache,
        kv_cache_bytes=getattr(kv_cache, launch.outlook),
        block_bytes=_block_bytes(launch, layers),
    )


def _block_bytes(launch: Launch, layers: range) -> int:
    layout = launch.layout
    if layout and layout.config:
        return layout.block_bytes(launch.model, layers)
    groups = (layout.largest(layers),) if layout else launch.model.kv_groups(layers)
    dtype, ranks = launch.deployment.kv_dtype, launch.tensor_parallel
    kept = sum(launch.model.group_slot_bytes(group, dtype, ranks) for group in groups)
    if launch.speculative is not None and launch.model.num_layers - 1 in layers:
        kept += launch.speculative.drafter_slot_bytes(launch.model, ranks, launch.deployment)
    return launch.block_size * kept


@dataclass(frozen=True, slots=True)
class Profile:
    """Memory of a GPU at the peak of the profiled step, before the KV cache is allocated; a size of it that is given changes nothing.

    Attributes:
        gpu_name: The card.
        free: What is not in use when the worker starts.
        peak: Weights, memory outside of torch and activations.
        room: What is left then; an estimate below 0 is out of memory.
    """

    gpu_name: str
    free: Estimate
    peak: Estimate
    room: Estimate


def profile(launch: Launch) -> Profile:
    """Of the stage with the least room.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    used, found = used_at_start(launch), []
    for stage in stage_memories(launch):
        parts = [stage.weights, stage.non_torch, stage.activations]
        taken = rest(0, parts)
        peak = Estimate(-taken.high, -taken.likely, -taken.low)
        free, room = rest(stage.total_bytes, [used]), rest(stage.total_bytes, [used, *parts])
        found.append(Profile(stage.gpu_name, free, peak, room))
    return min(found, key=lambda each: each.room.likely)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Memory of a GPU when vLLM warms up, after it allocated the KV cache: it captures CUDA graphs and samples (``compile_or_warm_up_model``
    of its gpu_worker.py). The first model runner, and up to 0.29 the second one, samples beside the graphs; since 0.30 it samples before.

    Attributes:
        gpu_name: The card.
        left: What is free: neither in use by others nor weights, memory outside of torch and KV cache. The profiled step's tensors are gone.
        graphs: What capture takes.
        sampler: Bytes of the tensors of the sampler.
        room: What is left then, less what torch cannot use of its segments; an estimate below 0 is out of memory.
        samples_first: Whether it samples before it captures, and not beside the graphs.
    """

    gpu_name: str
    left: Estimate
    graphs: Estimate
    sampler: int
    room: Estimate
    samples_first: bool = False

    @property
    def taken(self) -> Estimate:
        """What both take at once."""
        return Estimate(
            *(max(size, self.sampler) if self.samples_first else size + self.sampler for size in self.graphs)
        )


#: What torch keeps of the segments of the profiled step and cannot use, as shares of that step's tensors, and the most in GiB. Logs of servers that
#: ran out of memory name it ("reserved by PyTorch but unallocated"): 0.05 of 0.5 GiB (TheBuccaneer/vllm-offload-profiles), 0.91 of 1.5
#: (vllm-project/vllm#33920), 0.19 of 5.9 (#15105), 0.33 of 7.3 (#27508).
_FRAGMENTS, _MOST_FRAGMENTS = (0.03, 0.05, 0.6), 0.91


def _fragments(activations: Estimate) -> Estimate:
    most = _MOST_FRAGMENTS * GIB
    return Estimate(*(round(min(share * activations.likely, most)) for share in _FRAGMENTS))


def warm_up(launch: Launch) -> WarmUp:
    """Of the stage with the least room.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    used, memories, stages = used_at_start(launch), stage_memories(launch), launch.stages
    # All stages have as many blocks as the smallest.
    fewest = min(max(0, stage.kv_cache.likely) // stage.block_bytes for stage in memories)
    blocks = launch.num_gpu_blocks_override or fewest
    more = dict(launch.corrections)
    samples_first = launch.second_runner and launch.release.v2_warms_up_first
    is_given = bool(launch.num_gpu_blocks_override) or launch.kv_cache_memory_bytes is not None
    found = []
    for own, stage in zip(stages, memories, strict=True):
        # A pool that vLLM computes is as much smaller as these are larger.
        beside = [stage.weights, stage.non_torch]
        parts = [
            used,
            _fragments(stage.activations),
            reordering_fragments(launch, own),
            *(beside if is_given else [exactly(part.likely) for part in beside]),
        ]
        left = stage.total_bytes - blocks * stage.block_bytes
        graphs = captured_bytes(captures_of(launch), shape_of(launch, own))
        sampler = warm_up_bytes(launch) if own is stages[-1] else 0
        room = rest(left - sampler, [*parts, graphs])
        if samples_first:
            room = min(rest(left - sampler, parts), rest(left, [*parts, graphs]), key=lambda each: each.likely)
        if WARM_UP in more:
            # It lacked that much or more.
            room = Estimate(room.low - more[WARM_UP], *[room.likely - more[WARM_UP]] * 2)
        found.append(WarmUp(stage.gpu_name, rest(left, parts), graphs, sampler, room, samples_first))
    return min(found, key=lambda each: each.room.likely)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of the KV cache.

    Attributes:
        stage: The stage with the fewest blocks, which limits the pool.
        num_blocks: Blocks of the pool, including the null block, which holds no tokens.
        max_concurrency: Concurrent sequences of max_model_len, as vLLM logs it.
        num_tokens: max_concurrency * max_model_len, as vLLM logs it.
    """

    stage: StageMemory
    num_blocks: int
    max_concurrency: float
    num_tokens: int


def capacity(launch: Launch) -> Capacity:
    """Capacity of the KV cache of a launch.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    stage = min(stage_memories(launch), key=lambda memory: memory.num_blocks)
    blocks = launch.num_gpu_blocks_override or stage.num_blocks
    needed = launch.sequence_blocks(launch.max_model_len)
    return Capacity(stage, blocks, blocks / needed, blocks * launch.max_model_len // needed)


def users(launch: Launch, num_blocks: int, tokens: int, prompt: int | None = None) -> int:
    """Sequences of ``tokens``, of which half or ``prompt`` are prompt, that run at once in the pool without preemption, whatever max_num_seqs is.

    They are sent at once, and two limits hold. All may be at their full length; of those with states so many pass the end of a
    block in the same step as can end their prompt in the same one. And the last one is admitted beside the others, which decode:
    where windows keep more of a prompt than of a sequence that decodes, few long sequences are limited by that.
    """
    usable, prompt = max(0, num_blocks - 1), prompt or max(1, tokens // 2)
    entering = usable - launch.prompt_blocks(prompt)
    admitted = 1 + entering // _kept_blocks(launch, prompt + 1) if entering >= 0 else 0
    peak, together = launch.decode_blocks(tokens), min(_passing(launch, prompt), usable // launch.prompt_blocks(prompt))
    running = usable // peak
    if running > together:
        running = (usable - together * launch.boundary_blocks(tokens)) // _kept_blocks(launch, tokens)
    return min(running, admitted)


def _kept_blocks(launch: Launch, tokens: int) -> int:
    """Blocks of a sequence in most steps."""
    return launch.decode_blocks(tokens) - launch.boundary_blocks(tokens)


def _passing(launch: Launch, prompt: int) -> int:
    """Most sequences that hold the states of two blocks at once: those of a step, or of two if states are released a step later.

    A prompt is computed up to its last end of a block, and then the rest.
    """
    chunk = prompt // launch.block_tokens * launch.block_tokens or prompt
    return (1 + launch.async_scheduling) * -(-launch.max_num_batched_tokens // chunk)


class LengthCheck(NamedTuple):
    """What vLLM compares before it serves sequences of max_model_len, in bytes of a GPU."""

    available: int
    needed: int

    @property
    def passes(self) -> bool:
        return self.available > 0 and self.available >= self.needed > 0


def length_check(launch: Launch) -> LengthCheck:
    """vLLM's ``check_enough_kv_cache_memory`` on the GPU with the least room.

    Since 0.29 the null block is not available, and since 0.20.1 ``--num-gpu-blocks-override`` counts in place of the memory. From 0.14 to
    0.16 a sequence needs its bytes of all pipeline stages on each of them.
    """
    blocks, override = launch.sequence_blocks(launch.max_model_len), launch.num_gpu_blocks_override
    memories = stage_memories(launch)
    whole = _block_bytes(launch, range(launch.model.num_layers)) if launch.release.checks_all_stages else 0
    checks = []
    for memory in memories:
        counts = override is not None and launch.release.checks_override
        available = override * memory.block_bytes if override and counts else memory.kv_cache_bytes
        available -= launch.release.reserves_null_block * memory.block_bytes
        checks.append(LengthCheck(available, blocks * (whole or memory.block_bytes)))
    return min(checks, key=lambda check: check.available - check.needed)


def fits(launch: Launch) -> bool:
    """Whether every GPU has room for one sequence of max_model_len."""
    return length_check(launch).passes


def capture_blocks(launch: Launch) -> int | None:
    """Blocks that max_num_seqs must not exceed: each sequence of a captured decode step needs one for its states.

    vLLM compares it with ``KVCacheConfig.num_blocks``: all blocks of the pool, whatever the number of groups, and the null block too
    (``resolve_cudagraph_mode_and_sizes`` of its ``config/compilation.py``).

    Returns:
        None where nothing is compared: without states, without graphs of whole decode steps, and before 0.20.
    """
    if not (launch.model.state_layers and launch.release.checks_states and captures_of(launch).decodes_full):
        return None
    blocks = capacity(launch).num_blocks
    if launch.model.model_type == _GLM5_NEXT and launch.release.since < _FIRST_GLM5_NEXT:
        return min(blocks, captures_of(launch).largest)
    return blocks


def longest_model_len(launch: Launch) -> int:
    """The longest max_model_len that fits, up to the launch's; 0 if none fits (``estimate_max_model_len``)."""
    if fits(launch):
        # Most launches have room for the model's own limit, and the search would try twenty lengths.
        return launch.max_model_len
    return least(lambda tokens: not fits(replace(launch, max_model_len=tokens + 1)), 0, launch.max_model_len)


def least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number from ``low`` for which ``holds`` is true, or ``high``; it is true from some number on."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
