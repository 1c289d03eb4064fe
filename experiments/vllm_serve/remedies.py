"""Remedies for a command line that does not start: single changes, checked in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from ...sim.spec import dtype_bits
from ...sim.spec.context_parallel import is_simulated
from ...sim.spec.deployment import NVFP4
from ...sim.spec.gpu import GIB
from ...sim.spec.startup.capacity import capture_blocks, longest_model_len, stage_memories
from ...sim.spec.startup.dtypes import is_in_float32
from ...sim.spec.startup.launch import Launch, resolved_kv_dtype
from ...sim.types.optional import not_none
from .checks import Broken, Change, first_broken, too_few_states, too_little_to_warm_up, undivided

#: Largest number of ranks tried.
_MOST_RANKS = 64
#: Fewest tokens of a step that are tried.
_FEWEST_TOKENS = 512
Candidates = Iterator[tuple[object, Launch]]


def starts(launch: Launch) -> bool:
    """Whether no check fails."""
    return first_broken(launch) is None


def _ranks(launch: Launch) -> Candidates:
    """Numbers of ranks above the given one, ascending; from one if the given ranks do not divide the model. None where cards differ."""
    if launch.gpus:
        return
    least = 1 if undivided(launch) else launch.tensor_parallel + 1
    for ranks in range(least, _MOST_RANKS + 1):
        yield ranks, replace(launch, tensor_parallel=ranks)


def _copies(launch: Launch) -> Candidates:
    """Other numbers of redundant experts that ranks divide evenly, the nearest first."""
    eplb, experts = launch.eplb, launch.model.experts
    if eplb is None or experts is None:
        return
    given = eplb.num_redundant_experts
    for number in sorted(range(given + launch.expert_ranks.holders), key=lambda number: abs(number - given)):
        if number != given:
            yield number, replace(launch, eplb=eplb._replace(num_redundant_experts=number))


def _context_ranks(launch: Launch) -> Candidates:
    """Other numbers of ranks that divide sequences: fewer, the most first, and then more, where that is simulated."""
    given, parallel = launch.deployment.decode_context_parallel, launch.tensor_parallel
    simulated = launch.speculative is None and launch.layout is None
    more = range(given + 1, parallel + 1) if simulated else range(0)
    for ranks in (*range(min(given - 1, parallel), 0, -1), *more):
        if ranks == 1 or is_simulated(launch.model, parallel, ranks):
            yield ranks, replace(launch, deployment=replace(launch.deployment, decode_context_parallel=ranks))


def _lengths(launch: Launch) -> Candidates:
    if undivided(launch) is None:
        capped = replace(launch, max_model_len=min(launch.max_model_len, launch.model.max_model_len))
        longest = longest_model_len(capped)
        if not launch.chunked_prefill:
            longest = min(longest, launch.max_num_batched_tokens)
        if 0 < longest < launch.max_model_len:
            yield longest, replace(launch, max_model_len=longest)


def _fp8_kv(launch: Launch) -> Candidates:
    if dtype_bits(launch.deployment.kv_dtype) == 16:
        kv_dtype = resolved_kv_dtype(launch.model, launch.gpu, "fp8")
        yield "fp8", replace(launch, deployment=replace(launch.deployment, kv_dtype=kv_dtype))


def _fp8_for_nvfp4(launch: Launch) -> Candidates:
    if launch.deployment.kv_dtype == NVFP4:
        kv_dtype = resolved_kv_dtype(launch.model, launch.gpu, "fp8")
        yield "fp8", replace(launch, deployment=replace(launch.deployment, kv_dtype=kv_dtype))


def _own_dtype(launch: Launch) -> Candidates:
    """``--dtype auto`` in place of a given dtype, unless vLLM then takes float32."""
    if launch.dtype != "auto" and not is_in_float32(launch.model, launch.gpus or (launch.gpu,), "auto"):
        # A KV cache in fp32 is that of the dtype: no flag names it.
        own = launch.deployment.kv_dtype
        if launch.element_bytes != 2:
            own = resolved_kv_dtype(launch.model, launch.gpu, "auto")
        yield "auto", replace(launch, dtype="auto", deployment=replace(launch.deployment, kv_dtype=own))


def _fp8_weights(launch: Launch) -> Candidates:
    if launch.deployment.quantization is None:
        yield "fp8", replace(launch, deployment=replace(launch.deployment, quantization="fp8"))


def _partitions(launch: Launch) -> Candidates:
    """Layers of the pipeline stages: as vLLM divides them, then one after another moved from the stage with the least KV cache memory
    to that with the most."""
    own = replace(launch, layer_partition=None)
    if (launch.layer_partition is None and len(own.stages) == 1) or undivided(own) is not None:
        return
    sizes = [len(stage) for stage in own.stages]
    given = launch.layer_partition or tuple(sizes)
    for _ in range(launch.model.num_layers):
        moved = replace(launch, layer_partition=tuple(sizes))
        if moved.layer_partition != given:
            yield ",".join(map(str, sizes)), moved
        left = [stage.kv_cache_bytes for stage in stage_memories(moved)]
        least = left.index(min(left))
        if sizes[least] == 1:
            return
        sizes[least] -= 1
        sizes[left.index(max(left))] += 1


def _utilizations(launch: Launch) -> Candidates:
    """Utilizations in hundredths, nearest to the given one first."""
    requested = launch.gpu_memory_utilization
    for share in sorted((percent / 100 for percent in range(1, 100)), key=lambda share: abs(share - requested)):
        if share != requested:
            yield share, replace(launch, gpu_memory_utilization=share)


def _own_bytes(launch: Launch) -> Candidates:
    """Whole GiB in place of the user's KV cache, nearest to it first. Of unified memory it is sure where a share is not: the most that is likely."""
    given = launch.kv_cache_memory_bytes
    if given is None:
        if launch.gpu.unified_memory and undivided(launch) is None:
            most = min(stage.kv_cache.likely for stage in stage_memories(launch)) // GIB
            yield from ((f"{size}G", replace(launch, kv_cache_memory_bytes=size * GIB)) for size in range(most, 0, -1))
        return
    sizes = (size for size in range(1, launch.gpu.memory_bytes // GIB) if size * GIB != given)
    for size in sorted(sizes, key=lambda size: abs(size * GIB - given)):
        yield f"{size}G", replace(launch, kv_cache_memory_bytes=size * GIB)


def _own_blocks(launch: Launch) -> Candidates:
    """Blocks in place of the user's: as few more as the longest sequence and the states need, or sixteenths fewer."""
    given = launch.num_gpu_blocks_override
    if given is None or undivided(launch) is not None:
        return
    needed = launch.sequence_blocks(launch.max_model_len) + launch.release.reserves_null_block
    more = sorted({needed, max(needed, launch.max_num_seqs)})
    for blocks in (*(each for each in more if each > given), *(given * share // 16 for share in range(15, 0, -1))):
        if blocks:
            yield blocks, replace(launch, num_gpu_blocks_override=blocks)


def _tokens(launch: Launch) -> Candidates:
    """Halves of the given tokens."""
    given, seqs = launch.max_num_batched_tokens, launch.max_num_seqs
    while (given := given // 2) >= max(seqs, _FEWEST_TOKENS):
        yield given, replace(launch, max_num_batched_tokens=given)


def _lacks_states(launch: Launch) -> bool:
    return undivided(launch) is None and too_few_states(launch) is not None


def _lacks_room_for_graphs(launch: Launch) -> bool:
    return _lacks_states(launch) or (undivided(launch) is None and too_little_to_warm_up(launch) is not None)


def _sequences(launch: Launch) -> Candidates:
    """As many sequences as vLLM's message names, or halves of the given ones."""
    if _lacks_states(launch):
        blocks = not_none(capture_blocks(launch))
        if blocks:
            yield blocks, replace(launch, max_num_seqs=blocks)
    given = launch.max_num_seqs
    while given := given // 2:
        yield given, replace(launch, max_num_seqs=given)


def _graphs(launch: Launch) -> Candidates:
    if _lacks_room_for_graphs(launch):
        yield "PIECEWISE", replace(launch, graphs=replace(launch.graphs, mode="PIECEWISE"))


def _no_graphs(launch: Launch) -> Candidates:
    if launch.deployment.cuda_graphs:
        yield "", replace(launch, deployment=replace(launch.deployment, cuda_graphs=False))


#: Flags and variables with the values that are tried, in the order in which they are named.
_CHANGES: tuple[tuple[str, Callable[[Launch], Candidates]], ...] = (
    ("--kv-cache-dtype", _fp8_for_nvfp4),
    ("--dtype", _own_dtype),
    ("--max-num-seqs", _sequences),
    ("--kv-cache-memory-bytes", _own_bytes),
    ("--num-gpu-blocks-override", _own_blocks),
    ("--tensor-parallel-size", _ranks),
    ("--eplb-config.num_redundant_experts", _copies),
    ("--decode-context-parallel-size", _context_ranks),
    ("--max-model-len", _lengths),
    ("--kv-cache-dtype", _fp8_kv),
    ("--quantization", _fp8_weights),
    ("VLLM_PP_LAYER_PARTITION", _partitions),
    ("--gpu-memory-utilization", _utilizations),
    ("--max-num-batched-tokens", _tokens),
    ("-cc.cudagraph_mode", _graphs),
    ("--enforce-eager", _no_graphs),
)


def remedies(launch: Launch) -> Iterator[Change]:
    """Changes of a single flag or variable with which the line starts; each is judged as a line of its own.

    Those that the failed check asks for come first.
    """
    broken = first_broken(launch)
    asked = broken[1].changes if broken is not None and isinstance(broken[1], Broken) else ()
    yield from (each for each in asked if starts(each.launch))
    for flag, candidates in _CHANGES:
        changes = (Change(flag, str(value), each) for value, each in candidates(launch))
        yield from islice((each for each in changes if starts(each.launch)), 1)
