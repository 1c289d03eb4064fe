"""Whether a line starts: vLLM's start-up checks, in vLLM's order and wording, with the computed numbers.

Each check is a function of the launch: vLLM's message, or None if it passes. ``_CHECKS`` has their order. Values that vLLM's parser and
configuration refuse, whatever the memory, by the wheels of 0.10 to 0.33, come with the nearest changes that these take:

    LoRA        ranks of ``MaxLoRARanks``, and at least as many adapters on the host as on a GPU (``LoRAConfig``)
    blocks      the sizes of ``BlockSize`` up to 0.17; then, and of these, multiples of 16, which all backends of softmax attention ask for on NVIDIA's
                cards (``supports_block_size``)
    graphs      sizes of CUDA graphs that do not end at their given maximum (``_set_cudagraph_sizes``)
    scheduler   ``SchedulerConfig.verify_max_model_len``: a token budget below the longest sequence without chunked prefill, or below
                max_num_seqs, active sequences since 0.31, the threshold of long prompts since 0.27 (before, only beside partial prefills)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...sim.spec.context_parallel import broken_rule, has_windows
from ...sim.spec.gpu import GIB
from ...sim.spec.matrix import Matrix, format_of
from ...sim.spec.startup.capacity import (
    KV_CACHE,
    WARM_UP,
    Profile,
    StageMemory,
    WarmUp,
    capacity,
    capture_blocks,
    least,
    length_check,
    longest_model_len,
    profile,
    stage_memories,
    warm_up,
)
from ...sim.spec.startup.estimate import Estimate
from ...sim.spec.startup.launch import BLOCK_SIZE, Launch
from ...sim.spec.startup.launched_graphs import captures_of
from ...sim.spec.startup.loading import require_divisible
from ...sim.spec.startup.non_torch import used_at_start
from ...sim.spec.startup.shards import broken_shard
from ...sim.types.errors import NotSimulated, SettingError
from .formats import refused_format, refused_kv_format, refused_model


@dataclass(frozen=True)
class Change:
    """A launch with another value of one flag or variable."""

    flag: str
    value: str
    launch: Launch


class Broken(NamedTuple):
    """vLLM's message, and the nearest changes with which it is not said."""

    text: str
    changes: tuple[Change, ...]


#: Ranks of adapters; the first releases with a rank of 1, with blocks of 256 tokens, and without a list of blocks.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_FIRST_OF_ONE, _FIRST_OF_256, _FIRST_UNLISTED = 12, 12, 18
_BLOCKS = (1, 8, 16, 32, 64, 128, 256)
_MULTIPLE = 16
_FIRST_THRESHOLD = 27


def _refused_adapters(launch: Launch) -> Broken | None:
    lora, ranks = launch.lora, _RANKS[launch.release.since[1] < _FIRST_OF_ONE :]
    if lora is None:
        return None
    if lora.max_lora_rank not in ranks:
        text = f"argument --max-lora-rank: invalid choice: {lora.max_lora_rank} (choose from {_listed(ranks)})"
        rank = next((rank for rank in ranks if rank >= lora.max_lora_rank), ranks[-1])
        changed = replace(launch, lora=lora._replace(max_lora_rank=rank))
        return Broken(text, (Change("--max-lora-rank", str(rank), changed),))
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        text = f"max_cpu_loras ({lora.max_cpu_loras}) must be >= max_loras ({lora.max_loras})."
        changed = replace(launch, lora=lora._replace(max_cpu_loras=lora.max_loras))
        return Broken(text, (Change("--max-cpu-loras", str(lora.max_loras), changed),))
    return None


def _refused_listed_block(launch: Launch) -> Broken | None:
    minor, size = launch.release.since[1], launch.block_size
    blocks = _BLOCKS if minor >= _FIRST_OF_256 else _BLOCKS[:-1]
    if minor >= _FIRST_UNLISTED or size in blocks:
        return None
    return _of_block(launch, f"argument --block-size: invalid choice: {size} (choose from {_listed(blocks)})")


def _of_block(launch: Launch, text: str) -> Broken:
    return Broken(text, (Change("--block-size", str(BLOCK_SIZE), replace(launch, block_size=BLOCK_SIZE)),))


def _refused_graphs(launch: Launch) -> Broken | None:
    try:
        captures_of(launch)
    except SettingError as error:
        graphs, tokens = launch.graphs, launch.max_num_batched_tokens
        end = max((size for size in graphs.sizes or () if size <= tokens), default=None)
        if end is None:
            return Broken(error.remedy, ())
        changed = replace(launch, graphs=replace(graphs, largest=end))
        return Broken(error.remedy, (Change("--max-cudagraph-capture-size", str(end), changed),))
    return None


def _refused_block(launch: Launch) -> Broken | None:
    """The failed choice of a backend for the size of the blocks."""
    is_softmax = launch.model.latent is None and launch.model.attention_layers and launch.gpu.compute_capability
    if not is_softmax or not launch.block_size % _MULTIPLE:
        return None
    text = f"No valid attention backend found for cuda with block_size={launch.block_size}. Reasons: block_size not supported."
    return _of_block(launch, text)


#: Major compute capabilities without kernels for sparse attention.
_BEFORE_HOPPER = (7, 8)


def _no_kernels(launch: Launch) -> str | None:
    """The failed choice of an attention backend; its message in vLLM lists every backend."""
    sparse = launch.model.has_vectors and (launch.model.indexer is not None or launch.model.compressed is not None)
    if not sparse or launch.gpu.major not in _BEFORE_HOPPER:
        return None
    needs = "sparse MLA has kernels for compute capabilities 9, 10 and 12"
    return f"No valid attention backend found for cuda: {needs}."


def undivided(launch: Launch) -> str | None:
    """The failed check of ranks or stages that do not divide the model.

    Raises:
        NotSimulated: The launch has what the memory is not known with, which says nothing of vLLM's start.
    """
    model, ranks = launch.model, launch.tensor_parallel
    if model.num_heads % ranks:
        heads = f"Total number of attention heads ({model.num_heads})"
        return f"{heads} must be divisible by tensor parallel size ({ranks})."
    if launch.layer_partition is not None:
        layers, stages = launch.layer_partition, launch.deployment.pipeline_parallel
        if len(layers) != stages:
            return f"len(partitions)={len(layers)} does not match pp_size={stages}."
        if sum(layers) != model.num_layers:
            return f"sum(partitions)={sum(layers)} does not match num_hidden_layers={model.num_layers}."
    try:
        require_divisible(model, ranks)
        if (text := broken_shard(launch)) is not None:
            return text
        stage_memories(launch)
    except NotSimulated:
        raise
    except SettingError as error:
        return str(error)
    return None


#: Kernels of experts that cannot be balanced, by number format, as 0.33 names them (``supports_eplb``).
_FIXED = {
    "awq": "AutoAWQMoEMethod", "gptq": "AutoGPTQMoEMethod",
    "w4a16": "CompressedTensorsWNA16MoEMethod", "w4a16-g32": "CompressedTensorsWNA16MoEMethod",
}  # fmt: skip


def _unbalanced(launch: Launch) -> str | None:
    """The failed check of ``--enable-eplb``: vLLM's ``ParallelConfig``, or a MoE layer that cannot be balanced, by its kernel or its number of experts."""
    eplb, experts, deployment = launch.eplb, launch.model.experts, launch.deployment
    if eplb is None or experts is None:
        return None
    number, engines = eplb.num_redundant_experts, deployment.data_parallel
    if not eplb.is_enabled:
        either = "Either enable EPLB or unset num_redundant_experts."
        return f"num_redundant_experts is set to {number} but EPLB is not enabled. {either}"
    if launch.tensor_parallel * engines == 1:
        got = f"TP={launch.tensor_parallel}, PCP=1, DP={engines}"
        return f"EPLB requires tensor, prefill-context, or data parallelism, but got {got}."
    if not deployment.expert_parallel:
        return "enable_expert_parallel must be True to use EPLB."
    form = format_of(Matrix(1, 1, part="expert"), deployment.quantization)
    if form in _FIXED:
        return f"EPLB is not supported {_FIXED[form]}."
    copies, ranks = experts.count + number, launch.expert_ranks.holders
    if copies % ranks:
        got = f"Got {copies} experts and {ranks} EP ranks."
        return f"EPLB currently only supports even distribution of experts across ranks. {got}"
    return None


def _undivided_sequences(launch: Launch) -> str | None:
    """The failed check of ranks that cannot divide the tokens of a sequence."""
    broken = broken_rule(launch.model, launch.tensor_parallel, launch.deployment.decode_context_parallel)
    return None if broken is None else broken.text


def _divided_windows(launch: Launch) -> str | None:
    divides = launch.deployment.decode_context_parallel > 1 and launch.hybrid
    return "DCP not support sliding window." if divides and has_windows(launch.model) else None


def _misscheduled(launch: Launch) -> Broken | None:
    """``verify_max_model_len``: a length that vLLM chooses is the model's when it checks them."""
    longest = launch.model.max_model_len if launch.fits_length else launch.max_model_len
    tokens, seqs, active = launch.max_num_batched_tokens, launch.max_num_seqs, launch.max_num_active_seqs
    needed = seqs if launch.chunked_prefill else max(seqs, launch.max_model_len)
    raised = Change("--max-num-batched-tokens", str(needed), replace(launch, max_num_batched_tokens=needed))
    if tokens < longest and not launch.chunked_prefill:
        text = (
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({longest}). This effectively limits the maximum sequence length to"
            " max_num_batched_tokens and makes vLLM reject longer sequences. Please increase max_num_batched_tokens or decrease max_model_len."
        )
        return Broken(text, (raised, Change("--enable-chunked-prefill", "", replace(launch, chunked_prefill=True))))
    if tokens < seqs:
        text = f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
        return Broken(text, (raised,))
    if active is not None and active > seqs:
        text = f"max_num_active_seqs ({active}) cannot be greater than max_num_seqs ({seqs})."
        return Broken(text, (Change("--max-num-active-seqs", str(seqs), replace(launch, max_num_active_seqs=seqs)),))
    threshold, length = launch.long_prefill_token_threshold, launch.max_model_len
    if threshold > longest and launch.release.since[1] >= _FIRST_THRESHOLD:
        text = f"long_prefill_token_threshold ({threshold}) cannot be greater than the max_model_len ({longest})."
        changed = replace(launch, long_prefill_token_threshold=length)
        return Broken(text, (Change("--long-prefill-token-threshold", str(length), changed),))
    return None


def _too_long(launch: Launch) -> str | None:
    own = launch.model.max_model_len
    if launch.allows_long or launch.max_model_len <= own:
        return None
    message = f"User-specified max_model_len ({launch.max_model_len}) is greater than the derived max_model_len"
    return f"{message} (max_position_embeddings={own})."


def _tightest(launch: Launch) -> StageMemory:
    """The GPU on which the weights, or what is requested, leave the least; of equal ones that with the heaviest weights."""

    def over(memory: StageMemory) -> tuple[int, int]:
        weights = memory.weights.likely
        return max(weights, memory.requested_bytes) - memory.total_bytes, weights

    return max(stage_memories(launch), key=over)


def _free(launch: Launch, memory: StageMemory) -> int:
    """Free bytes of a GPU at the start; the least memory of the KV cache goes with the most that is in use before."""
    used = used_at_start(launch)
    return memory.total_bytes - {"low": used.high, "likely": used.likely, "high": used.low}[launch.outlook]


def _too_heavy(launch: Launch) -> str | None:
    memory = _tightest(launch)
    free = _free(launch, memory)
    if memory.weights.likely <= free:
        return None
    of_gpu = f"GiB of {_one_of(launch, memory.gpu_name)} and {gib(free)} GiB are free"
    return f"torch.OutOfMemoryError: CUDA out of memory; the weights take {gib(memory.weights.likely)} {of_gpu}."


def _too_much_requested(launch: Launch) -> str | None:
    memory = _tightest(launch)
    free = _free(launch, memory)
    if memory.requested_bytes <= free:
        return None
    share = f"{launch.gpu_memory_utilization}, {gib(memory.requested_bytes)} GiB"
    on_device = f"Free memory on device cuda:0 ({gib(free)}/{gib(memory.total_bytes)} GiB) on startup"
    return f"{on_device} is less than desired GPU memory utilization ({share})."


def _not_one_group(launch: Launch) -> str | None:
    if launch.hybrid or not (launch.model.state_layers and launch.model.attention_layers):
        return None
    return "Failed to promote local KV cache specs to one unified type."


def _too_little_to_profile(launch: Launch) -> str | None:
    """Out of memory in the step that vLLM profiles before it allocates the KV cache.

    A start-up log with a size of the KV cache shows that this step fitted.
    """
    if KV_CACHE in dict(launch.corrections):
        return None
    found = profile(launch)
    if getattr(found.room, launch.outlook) >= 0:
        return None
    of_gpu = f"GiB of {_one_of(launch, found.gpu_name)} and {gib(found.free.likely)} GiB are free"
    text = f"the profiled step takes {gib(found.peak.likely)} {of_gpu}"
    return f"torch.OutOfMemoryError: CUDA out of memory; {text}."


def _no_cache_left(launch: Launch) -> str | None:
    """No room for a block, or of a line that takes the longest length that fits, for one token."""
    check = length_check(replace(launch, max_model_len=1) if launch.fits_length else launch)
    if check.passes or (check.available > 0 and not launch.fits_length):
        return None
    return (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the"
        f" engine. (Available KV cache memory: {gib(check.available)} GiB)"
    )


def _too_little_left(launch: Launch) -> str | None:
    check = length_check(launch)
    if launch.fits_length or check.passes:
        return None
    return (
        f"To serve at least one request with the model's max seq len ({launch.max_model_len}), ({gib(check.needed)} GiB KV"
        f" cache is needed, which is larger than the available KV cache memory ({gib(check.available)} GiB)."
    )


def _too_large_cache(launch: Launch) -> str | None:
    """Out of memory where the user's KV cache is allocated, in bytes or blocks, which vLLM does not check. Only what is sure is counted
    beside it."""
    override, used = launch.num_gpu_blocks_override, used_at_start(launch).low
    if KV_CACHE in dict(launch.corrections):
        return None
    given = launch.kv_cache_memory_bytes or 0
    sizes = (
        (override * stage.block_bytes if override else given, stage.total_bytes - used - stage.weights.low, stage)
        for stage in stage_memories(launch)
    )
    asked, left, stage = max(sizes, key=lambda each: each[0] - each[1])
    if not asked or asked <= left:
        return None
    text = f"the KV cache takes {gib(asked)} GiB of {_one_of(launch, stage.gpu_name)} and the weights leave {gib(left)} GiB"
    return f"torch.OutOfMemoryError: CUDA out of memory; {text}."


#: What vLLM itself leaves free when it suggests a size, as its profile "may slightly underestimate" (``redundancy_buffer_memory`` of gpu_worker.py).
_BUFFER = 150 << 20


def too_few_states(launch: Launch) -> str | None:
    """The failed check of more sequences than the pool has blocks for their states, before vLLM captures CUDA graphs."""
    blocks, seqs = capture_blocks(launch), launch.max_num_seqs
    if blocks is None or seqs <= blocks:
        return None
    return (
        f"max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({blocks}). Each decode sequence requires one Mamba cache block, so"
        f" CUDA graph capture cannot proceed. Please lower max_num_seqs to at most {blocks} or increase gpu_memory_utilization."
    )


def too_little_to_warm_up(launch: Launch) -> str | None:
    """Out of memory while CUDA graphs are captured or the sampler runs, beside the KV cache; not where a log has the KV cache of a server
    that started."""
    more = dict(launch.corrections)
    if KV_CACHE in more and WARM_UP not in more:
        return None
    found = warm_up(launch)
    if getattr(found.room, launch.outlook) >= (_BUFFER if launch.outlook == "low" else 0):
        return None
    taken = (
        f"CUDA graphs take {gib(found.graphs.likely)} GiB of {_one_of(launch, found.gpu_name)}, warming up the sampler with {launch.max_num_seqs} dummy requests"
        f" {gib(found.sampler)} GiB, and the KV cache leaves {gib(found.left.likely)} GiB"
    )
    return f"torch.OutOfMemoryError: CUDA out of memory; {taken}."


#: The kinds of the check of the longest sequence, and of those of memory that is not the KV cache's.
_TOO_LITTLE, _PROFILE, _WARM_UP = "KV cache", "profile", "warm-up"
#: Kinds and checks in vLLM's order.
_CHECKS: tuple[tuple[str, Callable[[Launch], str | Broken | None]], ...] = (
    ("model", refused_model),
    ("argument", _refused_adapters),
    ("argument", _refused_listed_block),
    ("argument", _refused_graphs),
    ("argument", _refused_block),
    ("format", refused_format),
    ("format", refused_kv_format),
    ("attention", _no_kernels),
    ("parallel", undivided),
    ("parallel", _unbalanced),
    ("parallel", _undivided_sequences),
    ("KV groups", _divided_windows),
    ("batch", _misscheduled),
    ("length", _too_long),
    ("weights", _too_heavy),
    ("free memory", _too_much_requested),
    ("KV groups", _not_one_group),
    (_PROFILE, _too_little_to_profile),
    ("no KV cache", _no_cache_left),
    (_TOO_LITTLE, _too_little_left),
    ("KV memory", _too_large_cache),
    ("states", too_few_states),
    (_WARM_UP, too_little_to_warm_up),
)
#: Of an error in a log that no check has.
_LOG = "log"


@dataclass(frozen=True)
class Refusal:
    """A failed start-up check.

    Attributes:
        kind: As of ``_CHECKS``, or "log" of an error in a log that no check has.
        text: vLLM's message, with the computed numbers.
    """

    kind: str
    text: str


def first_broken(launch: Launch) -> tuple[str, str | Broken] | None:
    """Kind and message of the first failed check of vLLM's start-up; None if it starts."""
    found = ((kind, broken) for kind, check in _CHECKS if (broken := check(launch)) is not None)
    return next(found, None)


def refusal(launch: Launch) -> Refusal | None:
    """The first failed check, with the longest sequence that fits where that is what it lacks; None if it starts."""
    found = _refused(launch)
    if found is None or found.kind != _TOO_LITTLE:
        return found
    # The search takes longer than all checks, so that only an answer has it.
    longest = longest_model_len(launch)
    estimate = f" Based on the available memory, the estimated maximum model length is {longest}." if longest else ""
    return replace(found, text=found.text + estimate)


def _refused(launch: Launch) -> Refusal | None:
    found = first_broken(launch)
    if found is None:
        return None
    kind, broken = found
    return Refusal(kind, broken.text if isinstance(broken, Broken) else broken)


@dataclass(frozen=True)
class Outcome:
    """Whether a line starts, over the interval of its KV cache memory.

    Attributes:
        refusal: vLLM's refusal with the likely memory; None if it starts with that.
        is_sure: Whether the answer is the same at both ends of the interval.
        needed_bytes: The least KV cache memory of a GPU with which it starts; None if the answer does not depend on it.
        needed_free_bytes: What must be free on a GPU at the start; None if the answer does not depend on it alone.
        free: The interval of what is free then.
        profile: The memory of the profiled step; None if the answer does not depend on it alone.
        warm_up: The memory when vLLM warms up; None if the answer does not depend on it alone.
        kv_cache: The interval of that memory, on the GPU with the least room; None if ranks do not divide the model.
        open_part: The part of the memory with the widest interval: its name, and that interval.
        later: The likely KV cache memory of a start that finds the compile cache of an earlier one; None where it is not larger, and if the answer
            does not depend on that memory.
    """

    refusal: Refusal | None
    is_sure: bool
    needed_bytes: int | None = None
    needed_free_bytes: int | None = None
    free: Estimate | None = None
    profile: Profile | None = None
    warm_up: WarmUp | None = None
    kv_cache: Estimate | None = None
    open_part: tuple[str, Estimate] | None = None
    later: int | None = None

    @property
    def kind(self) -> str:
        """ "starts", "does not start" or "depends"."""
        if not self.is_sure:
            return "depends"
        return "starts" if self.refusal is None else "does not start"


def outcome(launch: Launch) -> Outcome:
    """Whether the line starts with the least, the likely and the most memory that its KV cache may get."""

    likely = refusal(launch)
    if undivided(launch) is not None:
        return Outcome(likely, True)
    stage = capacity(launch).stage
    worst, best = _refused(replace(launch, outlook="low")), _refused(replace(launch, outlook="high"))
    if (worst is None) == (best is None):
        return Outcome(likely, True, kv_cache=stage.kv_cache)
    kv_cache = stage.kv_cache
    if worst is not None and worst.kind == _PROFILE:
        return Outcome(likely, False, profile=profile(launch), kv_cache=kv_cache)
    if worst is not None and worst.kind == _WARM_UP:
        return Outcome(likely, False, warm_up=warm_up(launch), kv_cache=kv_cache)

    def starts_with(size: int) -> bool:
        more = dict(launch.corrections)
        more[KV_CACHE] = more.get(KV_CACHE, 0) + size - kv_cache.likely
        return first_broken(replace(sure, corrections=tuple(more.items()))) is None

    # The doubt of what is free is that of its own check.
    sure = replace(launch, used_at_start_bytes=0)
    if starts_with(kv_cache.low):
        memory = _tightest(launch)
        used = used_at_start(launch)
        free = Estimate(*(memory.total_bytes - size for size in (used.high, used.likely, used.low)))
        needed_free = max(memory.weights.likely, memory.requested_bytes)
        return Outcome(likely, False, needed_free_bytes=needed_free, free=free, kv_cache=kv_cache)
    needed = least(starts_with, kv_cache.low, kv_cache.high)
    name, part = max(stage.parts().items(), key=lambda item: item[1].high - item[1].low)
    later = capacity(replace(launch, is_compiled=True)).stage.kv_cache.likely
    compiled = later if later > kv_cache.likely else None
    return Outcome(likely, False, needed, kv_cache=kv_cache, open_part=(name, part), later=compiled)


def logged(judged: Outcome, failure: str) -> Outcome:
    """The outcome of a start that ended with an error: that of a check, in the words of the log where it is the same, or the error."""
    refused = judged.refusal
    if refused is not None and refused.kind != _WARM_UP:
        return judged
    return Outcome(Refusal(_LOG if refused is None else _WARM_UP, failure), True, kv_cache=judged.kv_cache)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _one_of(launch: Launch, gpu_name: str) -> str:
    """The GPU of a message, by its name where the cards differ."""
    return f"the {gpu_name}" if launch.gpus else "each GPU"


def gib(count_bytes: int) -> str:
    """Bytes in GiB, as vLLM logs them."""
    return f"{count_bytes / GIB:.2f}"
