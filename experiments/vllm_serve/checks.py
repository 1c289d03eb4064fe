"""vLLM's start-up checks, in vLLM's order and wording, with the computed numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from ...sim.spec.startup.launch import Launch
from ...sim.spec.startup.loading import require_divisible
from ...sim.spec.startup.non_torch import used_at_start
from ...sim.spec.startup.shards import broken_shard
from ...sim.types.errors import NotSimulated, SettingError
from .arguments import refused_argument, refused_scheduling
from .formats import refused_format, refused_kv_format, refused_model


@dataclass(frozen=True)
class Refusal:
    """A failed start-up check.

    Attributes:
        kind: "model", "argument", "format", "attention", "parallel", "batch", "length", "weights", "free memory", "KV groups", "profile", "no KV cache",
            "KV cache", "KV memory", "states", "warm-up", or "log" of an error in a log that no check has.
        text: vLLM's message, with the computed numbers.
    """

    kind: str
    text: str


def refusal(launch: Launch, any_length: bool = False, allow_long: bool = False) -> Refusal | None:
    """The first failed check of vLLM's start-up; None if it starts.

    Args:
        any_length: Whether the line takes the longest sequence that fits, even a single token.
        allow_long: Whether sequences longer than the model's limit are allowed (VLLM_ALLOW_LONG_MAX_MODEL_LEN=1).
    """
    found = _first(launch, any_length, allow_long)
    if found is None or found.kind != _TOO_LITTLE:
        return found
    # The search takes longer than all checks, so that only an answer has it.
    longest = longest_model_len(launch)
    estimate = f" Based on the available memory, the estimated maximum model length is {longest}." if longest else ""
    return replace(found, text=found.text + estimate)


def starts(launch: Launch, any_length: bool = False, allow_long: bool = False) -> bool:
    """Whether no check fails; the arguments are those of ``refusal``."""
    return _first(launch, any_length, allow_long) is None


def _first(launch: Launch, any_length: bool, allow_long: bool) -> Refusal | None:
    return next((found for found in _complaints(launch, any_length, allow_long) if found is not None), None)


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


def outcome(launch: Launch, any_length: bool = False, allow_long: bool = False) -> Outcome:
    """Whether the line starts with the least, the likely and the most memory that its KV cache may get."""

    def refused(each: Launch) -> Refusal | None:
        return _first(each, any_length, allow_long)

    likely = refusal(launch, any_length, allow_long)
    if undivided(launch) is not None:
        return Outcome(likely, True)
    stage = capacity(launch).stage
    worst, best = refused(replace(launch, outlook="low")), refused(replace(launch, outlook="high"))
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
        return refused(replace(sure, corrections=tuple(more.items()))) is None

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


def _complaints(launch: Launch, any_length: bool, allow_long: bool) -> Iterator[Refusal | None]:
    yield _no_model(launch)
    yield _no_argument(launch)
    yield _no_format(launch)
    yield _no_kernels(launch)
    yield undivided(launch)
    yield unbalanced(launch)
    yield _undivided_sequences(launch)
    yield misscheduled(launch, any_length)
    if not allow_long:
        yield _too_long(launch)
    yield _too_heavy(launch)
    yield _not_one_group(launch)
    yield _too_little_to_profile(launch)
    yield _too_little_left(launch, any_length)
    yield _too_large_cache(launch)
    yield too_few_states(launch)
    yield too_little_to_warm_up(launch)


#: What vLLM itself leaves free when it suggests a size, as its profile "may slightly underestimate" (``redundancy_buffer_memory`` of gpu_worker.py).
_BUFFER = 150 << 20
#: The kinds of the check of the longest sequence, and of those of memory that is not the KV cache's.
_TOO_LITTLE, _PROFILE, _WARM_UP = "KV cache", "profile", "warm-up"


def logged(judged: Outcome, failure: str) -> Outcome:
    """The outcome of a start that ended with an error: that of a check, in the words of the log where it is the same, or the error."""
    refused = judged.refusal
    if refused is not None and refused.kind != _WARM_UP:
        return judged
    return Outcome(Refusal("log" if refused is None else _WARM_UP, failure), True, kv_cache=judged.kv_cache)


#: Major compute capabilities without kernels for sparse attention.
_BEFORE_HOPPER = (7, 8)


def _no_model(launch: Launch) -> Refusal | None:
    text = refused_model(launch)
    return None if text is None else Refusal("model", text)


def _no_argument(launch: Launch) -> Refusal | None:
    """A value that the parser or the configuration refuses."""
    text = refused_argument(launch)
    return None if text is None else Refusal("argument", text)


def _no_format(launch: Launch) -> Refusal | None:
    """The failed check of the card's number formats."""
    text = refused_format(launch) or refused_kv_format(launch)
    return None if text is None else Refusal("format", text)


def _no_kernels(launch: Launch) -> Refusal | None:
    """The failed choice of an attention backend; its message in vLLM lists every backend."""
    sparse = launch.model.has_vectors and (launch.model.indexer is not None or launch.model.compressed is not None)
    if not sparse or launch.gpu.major not in _BEFORE_HOPPER:
        return None
    needs = "sparse MLA has kernels for compute capabilities 9, 10 and 12"
    return Refusal("attention", f"No valid attention backend found for cuda: {needs}.")


def undivided(launch: Launch) -> Refusal | None:
    """The failed check of ranks or stages that do not divide the model.

    Raises:
        NotSimulated: The launch has what the memory is not known with, which says nothing of vLLM's start.
    """
    model, ranks = launch.model, launch.tensor_parallel
    if model.num_heads % ranks:
        heads = f"Total number of attention heads ({model.num_heads})"
        return Refusal("parallel", f"{heads} must be divisible by tensor parallel size ({ranks}).")
    if launch.layer_partition is not None:
        layers, stages = launch.layer_partition, launch.deployment.pipeline_parallel
        if len(layers) != stages:
            return Refusal("parallel", f"len(partitions)={len(layers)} does not match pp_size={stages}.")
        if sum(layers) != model.num_layers:
            sums = f"sum(partitions)={sum(layers)} does not match num_hidden_layers={model.num_layers}."
            return Refusal("parallel", sums)
    try:
        require_divisible(model, ranks)
        if (text := broken_shard(launch)) is not None:
            return Refusal("parallel", text)
        stage_memories(launch)
    except NotSimulated:
        raise
    except SettingError as error:
        return Refusal("parallel", str(error))
    return None


#: Kernels of experts that cannot be balanced, by number format, as 0.33 names them (``supports_eplb``).
_FIXED = {
    "awq": "AutoAWQMoEMethod", "gptq": "AutoGPTQMoEMethod",
    "w4a16": "CompressedTensorsWNA16MoEMethod", "w4a16-g32": "CompressedTensorsWNA16MoEMethod",
}  # fmt: skip


def unbalanced(launch: Launch) -> Refusal | None:
    """The failed check of ``--enable-eplb``: vLLM's ``ParallelConfig``, or a MoE layer that cannot be balanced, by its kernel or its number of experts."""
    eplb, experts, deployment = launch.eplb, launch.model.experts, launch.deployment
    if eplb is None or experts is None:
        return None
    number, engines = eplb.num_redundant_experts, deployment.data_parallel
    if not eplb.is_enabled:
        either = "Either enable EPLB or unset num_redundant_experts."
        return Refusal("parallel", f"num_redundant_experts is set to {number} but EPLB is not enabled. {either}")
    if launch.tensor_parallel * engines == 1:
        got = f"TP={launch.tensor_parallel}, PCP=1, DP={engines}"
        return Refusal("parallel", f"EPLB requires tensor, prefill-context, or data parallelism, but got {got}.")
    if not deployment.expert_parallel:
        return Refusal("parallel", "enable_expert_parallel must be True to use EPLB.")
    form = format_of(Matrix(1, 1, part="expert"), deployment.quantization)
    if form in _FIXED:
        return Refusal("parallel", f"EPLB is not supported {_FIXED[form]}.")
    copies, ranks = experts.count + number, launch.expert_ranks.holders
    if copies % ranks:
        got = f"Got {copies} experts and {ranks} EP ranks."
        text = f"EPLB currently only supports even distribution of experts across ranks. {got}"
        return Refusal("parallel", text)
    return None


def _undivided_sequences(launch: Launch) -> Refusal | None:
    """The failed check of ranks that cannot divide the tokens of a sequence."""
    ranks = launch.deployment.decode_context_parallel
    broken = broken_rule(launch.model, launch.tensor_parallel, ranks)
    if broken is not None:
        return Refusal("parallel", broken.text)
    if ranks > 1 and launch.hybrid and has_windows(launch.model):
        return Refusal("KV groups", "DCP not support sliding window.")
    return None


def misscheduled(launch: Launch, any_length: bool = False) -> Refusal | None:
    """The failed check of the scheduler's settings, such as a token budget below the number of sequences in a step.

    A length that vLLM chooses is the model's when it checks them.
    """
    text = refused_scheduling(launch, launch.model.max_model_len if any_length else launch.max_model_len)
    return None if text is None else Refusal("batch", text)


def _too_long(launch: Launch) -> Refusal | None:
    own = launch.model.max_model_len
    if launch.max_model_len <= own:
        return None
    message = f"User-specified max_model_len ({launch.max_model_len}) is greater than the derived max_model_len"
    return Refusal("length", f"{message} (max_position_embeddings={own}).")


def _tightest(launch: Launch) -> StageMemory:
    """The GPU on which the weights, or what is requested, leave the least; of equal ones that with the heaviest weights."""

    def over(memory: StageMemory) -> tuple[int, int]:
        weights = memory.weights.likely
        return max(weights, memory.requested_bytes) - memory.total_bytes, weights

    return max(stage_memories(launch), key=over)


def _too_heavy(launch: Launch) -> Refusal | None:
    memory = _tightest(launch)
    # The least memory of the KV cache goes with the most that is in use before.
    used = used_at_start(launch)
    free = memory.total_bytes - {"low": used.high, "likely": used.likely, "high": used.low}[launch.outlook]
    if memory.weights.likely > free:
        of_gpu = f"GiB of {_one_of(launch, memory.gpu_name)} and {gib(free)} GiB are free"
        weights = f"the weights take {gib(memory.weights.likely)} {of_gpu}"
        return Refusal("weights", f"torch.OutOfMemoryError: CUDA out of memory; {weights}.")
    if memory.requested_bytes > free:
        share = f"{launch.gpu_memory_utilization}, {gib(memory.requested_bytes)} GiB"
        on_device = f"Free memory on device cuda:0 ({gib(free)}/{gib(memory.total_bytes)} GiB) on startup"
        return Refusal("free memory", f"{on_device} is less than desired GPU memory utilization ({share}).")
    return None


def _too_large_cache(launch: Launch) -> Refusal | None:
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
    return Refusal("KV memory", f"torch.OutOfMemoryError: CUDA out of memory; {text}.")


def _not_one_group(launch: Launch) -> Refusal | None:
    if launch.hybrid or not (launch.model.state_layers and launch.model.attention_layers):
        return None
    return Refusal("KV groups", "Failed to promote local KV cache specs to one unified type.")


def _too_little_to_profile(launch: Launch) -> Refusal | None:
    """Out of memory in the profiled step, which precedes the KV cache whatever its size is; not where a log has that size."""
    if KV_CACHE in dict(launch.corrections):
        return None
    found = profile(launch)
    if getattr(found.room, launch.outlook) >= 0:
        return None
    of_gpu = f"GiB of {_one_of(launch, found.gpu_name)} and {gib(found.free.likely)} GiB are free"
    text = f"the profiled step takes {gib(found.peak.likely)} {of_gpu}"
    return Refusal(_PROFILE, f"torch.OutOfMemoryError: CUDA out of memory; {text}.")


def _too_little_left(launch: Launch, any_length: bool) -> Refusal | None:
    check = length_check(replace(launch, max_model_len=1) if any_length else launch)
    if check.passes:
        return None
    left = check.available
    if left <= 0 or any_length:
        return Refusal(
            "no KV cache",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the"
            f" engine. (Available KV cache memory: {gib(left)} GiB)",
        )
    return Refusal(
        _TOO_LITTLE,
        f"To serve at least one request with the model's max seq len ({launch.max_model_len}), ({gib(check.needed)} GiB KV"
        f" cache is needed, which is larger than the available KV cache memory ({gib(left)} GiB).",
    )


def too_few_states(launch: Launch) -> Refusal | None:
    """The failed check of more sequences than the pool has blocks for their states, before vLLM captures CUDA graphs."""
    blocks, seqs = capture_blocks(launch), launch.max_num_seqs
    if blocks is None or seqs <= blocks:
        return None
    return Refusal(
        "states",
        f"max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({blocks}). Each decode sequence requires one Mamba cache block, so"
        f" CUDA graph capture cannot proceed. Please lower max_num_seqs to at most {blocks} or increase gpu_memory_utilization.",
    )


def too_little_to_warm_up(launch: Launch) -> Refusal | None:
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
    return Refusal(_WARM_UP, f"torch.OutOfMemoryError: CUDA out of memory; {taken}.")


def _one_of(launch: Launch, gpu_name: str) -> str:
    """The GPU of a message, by its name where the cards differ."""
    return f"the {gpu_name}" if launch.gpus else "each GPU"


def gib(count_bytes: int) -> str:
    """Bytes in GiB, as vLLM logs them."""
    return f"{count_bytes / GIB:.2f}"
