"""A pasted command line on a GPU with vLLM's defaults filled in: every value that determines the size of the KV cache.

The model that a line names is a path, a preset, or a Hugging Face repository of which facts are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ...sim.config.settings import Settings, settings
from ...sim.engine.replica import build
from ...sim.spec import Deployment, GpuSpec, ModelSpec, gpu, model
from ...sim.spec.attention_backends import FLASHINFER
from ...sim.spec.context_parallel import broken_rule, has_windows, require_context_parallel
from ...sim.spec.deployment import NVFP4, require_counted
from ...sim.spec.gpu import GIB
from ...sim.spec.kernels import (
    EXPERTS_VARIABLES,
    FIRST_COMPARED,
    MOE_BACKEND,
    chosen_experts,
    experts_name,
    experts_need,
    form_text,
)
from ...sim.spec.releases import (
    FIRST_ORDERED,
    FIRST_V1,
    FIRST_WITHOUT_V0,
    FLASHINFER_SAMPLER_BYTES,
    LAST_ORDERED,
    LATEST,
    Release,
    release,
)
from ...sim.spec.speculative import UNKNOWN_RATES, SpeculativeConfig, parse_speculative
from ...sim.spec.startup.capacity import (
    Capacity,
    StageMemory,
    capacity,
    capture_blocks,
    longest_model_len,
    stage_memories,
    users,
)
from ...sim.spec.startup.dtypes import is_in_float32
from ...sim.spec.startup.launch import (
    BLOCK_SIZE,
    EPLB_WINDOW_SIZE,
    Eplb,
    Launch,
    batch_defaults,
    checked_block_size,
    resolved_kv_dtype,
)
from ...sim.spec.startup.lora import MAX_LORA_RANK, MAX_LORAS, Lora, are_known
from ...sim.spec.startup.shards import split_group
from ...sim.spec.tiers import parse_offloading
from ...sim.spec.weights import weights_format
from ...sim.types.errors import NotSimulated, SettingError
from .checks import Outcome, Refusal, first_broken, logged, outcome, refusal, undivided
from .encoders import uncounted_limits, without_encoder
from .graphs import graph_settings
from .line import ServeLine
from .log import StartupLog, corrected
from .positions import with_positions
from .remedies import remedies
from .states import caching, require_simulated, with_formats

_WEIGHTS = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "gpt_oss_mxfp4": "mxfp4", "modelopt": "fp8", "modelopt_fp4": "nvfp4",
    # AutoRound's 4-bit checkpoints have the groups of GPTQ, and its kernels.
    "auto_round": "gptq", "auto-round": "gptq", "inc": "gptq",
}  # fmt: skip
#: Methods that read the format from the checkpoint.
_OWN = ("compressed-tensors", "modelopt_mixed")
_KV_DTYPES = {"nvfp4_4over6": NVFP4, "float16": "fp16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
#: Bytes a logit of the second model runner's warm-up without FlashInfer: 2 of the model, 4 in fp32.
_PLAIN_WARM_UP = 6
#: The first release that can estimate the memory of CUDA graphs.
_FIRST_ESTIMATE = (0, 18)
#: The first release in which the default of the tokens of a step is no more than its sequences can have; 0.11.2 has it and 0.11.0 does not.
_FIRST_BOUNDED = (0, 12)
#: The release of which the blocks of compressed attention were compared.
_FIRST_KNOWN_BLOCKS = (0, 33)
_OLDER_BLOCKS = "the blocks of {} in {} (they are not known for this release; those of 0.33 are taken)"
#: The first release (0.22.1 was read) that raises that default to the tokens of the largest item of a model whose prompts attend to all of an item
#: (``_get_min_mm_batched_tokens`` of arg_utils.py), and those of Gemma 4: 32 frames of 70 tokens and 8 beside them (``gemma4_mm.py``).
_FIRST_WHOLE_VIDEO, _GEMMA4_VIDEO_TOKENS = (0, 22), 32 * (70 + 2 + 6)
_DIVIDED, _ONE_GROUP = "decode-context-parallel-size", "disable-hybrid-kv-cache-manager"
#: Layers of the pipeline stages.
_PARTITION = "VLLM_PP_LAYER_PARTITION"
#: Of gptq, which some kernels take so.
_SPLIT_GROUPS = "--tensor-parallel-size (splits groups of gptq, {} inputs of a rank in groups of {}: vLLM starts with Exllama's, Machete's or, since 0.23, Humming's kernels alone)"
#: Of a card that is not NVIDIA's: where the sizes are from that no formula gives.
_OTHER_VENDOR = (
    "{} (its memory outside of torch and its graphs are by logs of NVIDIA's cards, and its kernels are theirs)"
)
_EPLB, _THRESHOLD = "eplb-config", "long-prefill-token-threshold"
_OFFLOADING, _CONNECTOR, _BACKEND = "kv-offloading-size", "kv-transfer-config", "kv-offloading-backend"
#: Utilisation beyond the default: vLLM's own warning asks for more, and a GPU needs the rest.
_MOST_UTILIZATION = 0.95
#: MiB of a buffer of DeepEP, and GPUs of a node.
_TARGETS = "lora-target-modules"
_BUFFER, _NODE_GPUS = "VLLM_DEEPEP_BUFFER_SIZE_MB", 8
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_DTYPE_NAMES = {"half": "float16", "float": "float32"}


class OwnPool(NamedTuple):
    """The pool of layers with windows or states, where it is not that of the other layers.

    Attributes:
        kind: What its slots have.
        slots: Windows' tokens, or states.
        of_request: States for each request that may run; 0 of windows.
    """

    kind: Literal["windows", "states"]
    slots: int
    of_request: int = 0


@dataclass(frozen=True)
class Started:
    """A command line with every default that vLLM fills in.

    Attributes:
        line: The pasted line.
        launch: The values that determine the size of the KV cache; ``max_model_len`` is the model's if the line has
            none.
        replicas: Engines side by side (``--data-parallel-size``), each on GPUs of its own. They share the experts of a
            model that has some.
        uncounted: Why the launch has no drafter although the line has one; None where it has the line's.
        failure: The error with which the start of its log ended (``StartupLog``).
        without_effect: Flags that the engine has and that change nothing beside the others, each with the reason.
    """

    line: ServeLine
    launch: Launch
    replicas: int
    uncounted: NotSimulated | None = None
    failure: str | None = None
    without_effect: tuple[str, ...] = ()

    def refusal(self) -> Refusal | None:
        """vLLM's refusal to start with the likely memory; None if it starts."""
        if self.failure is not None:
            return self.outcome().refusal
        return refusal(self.launch)

    def outcome(self) -> Outcome:
        """Whether it starts, over the interval of its memory, and by its log."""
        judged = outcome(self.launch)
        return judged if self.failure is None else logged(judged, self.failure)

    def pool(self, outlook: Literal["low", "likely", "high"] = "likely") -> Capacity:
        """Capacity of its KV cache: the likely one, or an end of its interval."""
        return capacity(replace(self.launch, outlook=outlook))

    def stages(self) -> list[StageMemory]:
        """Memory of the GPUs of each pipeline stage."""
        return stage_memories(self.launch)

    @property
    def fewest_tokens(self) -> int:
        """The fewest tokens of a step with which it starts."""
        return self.launch.max_num_seqs

    def fitting(self, tokens: int, prompt: int) -> int:
        """Sequences of that final length, of which so many are prompt, that run at once in the KV cache (``startup.capacity.users``)."""
        return users(self.launch, self.pool().num_blocks, tokens, prompt)

    def most_seqs(self) -> int | None:
        """Most sequences at once for which it has states; None where these are no bound."""
        return capture_blocks(self.launch)

    def admits_all(self) -> bool:
        """Whether every request that fits its length is admitted at some time."""
        return True

    def own_pool(self) -> OwnPool | None:
        """The pool of windows or states beside the KV cache; None where all layers share one."""
        return None

    def larger_own_pools(self) -> Iterator[dict[str, str | bool | None]]:
        """Flags that give it a larger one, at the cost of the KV cache, the mildest first."""
        yield from ()

    def larger_pools(self) -> Iterator[dict[str, str | bool | None]]:
        """Flags that give it a larger KV cache on the same cards, the mildest first."""
        sizes = ("num-gpu-blocks-override", "kv-cache-memory-bytes")
        fixed: dict[str, str | bool | None] = {name: None for name in sizes if name in self.line.flags}
        if fixed:
            yield fixed
        for share in (self.launch.release.gpu_memory_utilization, _MOST_UTILIZATION):
            if share > self.launch.gpu_memory_utilization:
                yield {**fixed, "gpu-memory-utilization": f"{share:g}"}

    def remedy(self) -> str:
        """A single change with which a refused line starts; empty if there is none."""
        first = next(remedies(self.launch), None)
        return "" if first is None else f" With {first.flag} {first.value} it would."

    def changed(self, flags: Mapping[str, str | bool | None]) -> Started:
        """The line with other flags, of which None removes one, on the same cards, and with the same corrections of a log.

        Raises:
            SettingError: A value is invalid.
        """
        found = started(self.line.changed(flags), self.launch.gpu.setting, self.launch.model.name)
        corrections, used = self.launch.corrections, self.launch.used_at_start_bytes
        return replace(found, launch=replace(found.launch, corrections=corrections, used_at_start_bytes=used))

    def require_simulated(self) -> None:
        """Raise NotSimulated for states of which ``settings`` would have other blocks, different cards, and float32."""
        launch = self.launch
        if launch.gpus:
            reason = "are different cards, and steps are simulated on equal ones"
            raise NotSimulated("gpu", launch.gpu_text, reason, "name one GPU for all ranks")
        if launch.element_bytes == 4:
            raise NotSimulated("--dtype", "float32", "is counted, and its steps are not simulated", "take bfloat16")
        require_simulated(launch.model, model(launch.model.name), launch.state_chunk_tokens)

    def settings(self) -> Settings:
        """The line as settings of ``fragmeter simulate``, with the computed pool."""
        launch, deployment = self.launch, self.launch.deployment
        own = deployment.quantization == model(launch.model.name).quantization
        found = settings(
            policy="vllm-v1",
            model=launch.model.name,
            gpu=launch.gpu.setting,
            tensor_parallel_size=launch.tensor_parallel,
            pipeline_parallel_size=deployment.pipeline_parallel,
            data_parallel_size=deployment.data_parallel,
            enable_expert_parallel=deployment.expert_parallel,
            decode_context_parallel_size=deployment.decode_context_parallel,
            quantization=None if own else deployment.quantization,
            kv_cache_dtype=_kv_setting(launch),
            enforce_eager=not deployment.cuda_graphs,
            block_size=launch.block_size,
            num_gpu_blocks_override=capacity(launch).num_blocks,
            max_model_len=launch.max_model_len,
            max_num_seqs=launch.max_num_seqs,
            max_num_batched_tokens=launch.max_num_batched_tokens,
            disable_hybrid_kv_cache_manager=not (launch.hybrid or launch.model.mixer),
            enable_prefix_caching=None if launch.enable_prefix_caching else False,
            async_scheduling=launch.async_scheduling,
            attention_backend=deployment.attention_backend,
            moe_backend=deployment.moe_backend,
            watermark=self.line.text("watermark", "0"),
            **self._scheduling(),
        )
        # Blocks for states depend on the release.
        return with_release(found, self.line) if launch.model.mixer else found

    def _scheduling(self) -> dict[str, object]:
        """Options of the scheduler that the line names."""
        numbers = ("max-num-active-seqs", "prefill-schedule-interval", "prefix-cache-retention-interval")
        found: dict[str, object] = {name: self.line.whole(name) for name in numbers if name in self.line.flags}
        if threshold := _threshold(self.line):
            found[_THRESHOLD] = threshold
        if self.launch.speculative is not None and self.launch.speculative.acceptance_rates:
            found["speculative-config"] = self.line.text("speculative-config", "")
        for name in (_OFFLOADING, _CONNECTOR, _BACKEND):
            if name in self.line.flags:
                found[name] = self.line.text(name, "")
        for name, default in ((f"{_THRESHOLD}-adaptive", False), ("scheduler-reserve-full-isl", True)):
            found[name] = self.line.switch(name, default)
        return {name.replace("-", "_"): value for name, value in found.items()}


def with_release(found: Settings, line: ServeLine) -> Settings:
    """The settings with the release of a line that names one, if the order of that release's free queue is known."""
    if line.version is None or line.version[0] or not FIRST_ORDERED <= line.version[1] <= LAST_ORDERED:
        return found
    return settings(**found.as_dict() | {"vllm_release": f"0.{line.version[1]}"})


def started(
    line: ServeLine,
    gpu_name: str | GpuSpec | Sequence[str | GpuSpec],
    model_name: str | None = None,
    log: StartupLog | None = None,
) -> Started:
    """A command line with vLLM's defaults on that GPU.

    Args:
        gpu_name: One card, or that of each rank, stage by stage.
        model_name: Preset or ``config.json`` that gives the shape, in place of the model that the line names.
        log: The engine's own log; its KV cache size replaces the computed one. Its release is that of a line that names none.

    Raises:
        SettingError: A value is invalid or not understood.
    """
    if line.version is None and log is not None and log.version is not None:
        line = replace(line, version=log.version[:2], patch=log.version[2])
    vllm = _release(line)
    line, shape = with_positions(line, shape_of(line, model_name), vllm)
    shape = with_formats(line, shape, vllm)
    speculative, uncounted = _drafter(line, shape)
    card, *others = _cards(line, gpu_name)
    left_out = [*_not_simulated(line, speculative, uncounted)]
    drafts = [] if uncounted is None else left_out[-1:]
    limits = [text for text in (uncounted_limits(line, shape), _uncounted_targets(line, shape)) if text is not None]
    unknown = release_of_unknown_blocks(line, shape)
    older = [] if unknown is None else [_OLDER_BLOCKS.format(shape.name, unknown)]
    vendors = [] if card.compute_capability is not None else [_OTHER_VENDOR.format(card.name)]
    line = replace(
        line,
        not_simulated=[*line.not_simulated, *left_out, *limits, *older, *vendors],
        uncounted=[*drafts, *line.uncounted, *limits],
    )
    launch = _launch(line, shape, (card, *others), vllm, speculative, model_name)
    if log is not None and undivided(launch) is None:
        launch = corrected(launch, log)
    launch = _with_length(launch)
    if (split := split_group(launch)) is not None:
        line = replace(line, not_simulated=[*line.not_simulated, _SPLIT_GROUPS.format(*split)])
    return _with_offloading(
        Started(line, launch, line.whole("data-parallel-size", 1), uncounted, log.failure if log else None)
    )


def _launch(
    line: ServeLine,
    shape: ModelSpec,
    cards: tuple[GpuSpec, ...],
    vllm: Release,
    speculative: SpeculativeConfig | None,
    model_name: str | None,
) -> Launch:
    """The launch that the words of a line ask for, with the release's defaults."""
    card, *others = cards
    caches, state_chunk_tokens = caching(line, shape, vllm, line.switch("enable-prefix-caching", _caches(shape, vllm)))
    length = line.text("max-model-len", "")
    fits_length = length in ("auto", "-1")
    longest = shape.max_model_len if fits_length else line.whole("max-model-len", shape.max_model_len)
    tokens, seqs = _batch(line, shape, card, vllm, longest)
    _require_divided(line, shape)
    return Launch(
        model=shape,
        gpu=card,
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        tensor_parallel=line.whole("tensor-parallel-size", 1),
        deployment=_deployment(line, shape, (card, *others)),
        gpu_memory_utilization=line.share("gpu-memory-utilization", vllm.gpu_memory_utilization),
        block_size=checked_block_size(shape, line.whole("block-size")) or BLOCK_SIZE,
        hybrid=not line.switch(_ONE_GROUP),
        graphs=graph_settings(line, vllm),
        enable_prefix_caching=caches,
        state_chunk_tokens=state_chunk_tokens,
        release=vllm,
        is_taken=_is_taken(line, model_name),
        kv_cache_memory_bytes=line.whole("kv-cache-memory-bytes"),
        num_gpu_blocks_override=line.whole("num-gpu-blocks-override"),
        speculative=speculative,
        async_scheduling=line.switch("async-scheduling", vllm.async_scheduling),
        cpu_offload_bytes=line.gib_as_bytes("cpu-offload-gb"),
        lora=_lora(line, shape),
        all_to_all_bytes=_all_to_all_bytes(line),
        eplb=_eplb(line) if shape.experts else None,
        layer_partition=_partition(line),
        gpus=(card, *others) if others else (),
        chunked_prefill=line.switch("enable-chunked-prefill", True),
        max_num_active_seqs=line.whole("max-num-active-seqs"),
        long_prefill_token_threshold=_threshold(line),
        dtype=_dtype(line),
        quantization_method=line.text("quantization", "") or None,
        fits_length=fits_length,
        allows_long=line.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1",
    )


def _with_offloading(found: Started) -> Started:
    """The line without a connector or a backend of offloading that is not simulated, or not with the rest of the line, which is then named."""
    line = found.line
    asked = [name for name in (_CONNECTOR, _BACKEND) if line.text(name, "native") != "native"]
    if not asked:
        return found
    try:
        parse_offloading(*_offloading(line))
        if found.refusal() is None:
            build(found.settings())
        return found
    except SettingError as error:
        if not error.field.startswith(("kv_transfer", "kv_offloading")):
            return found
        if not isinstance(error, NotSimulated):
            raise
        names = [f"--{name} {line.text(name, '')}" if name == _BACKEND else f"--{name}" for name in asked]
    left_out = [f"{name} (a KV cache that is moved or kept elsewhere)" for name in names]
    flags = {name: value for name, value in line.flags.items() if name not in (_CONNECTOR, _BACKEND, _OFFLOADING)}
    if _BACKEND not in asked and _OFFLOADING in line.flags:
        flags[_OFFLOADING] = line.flags[_OFFLOADING]
    line = replace(
        line, flags=flags, not_simulated=[*line.not_simulated, *left_out], uncounted=[*line.uncounted, *left_out]
    )
    return replace(found, line=line)


def _offloading(line: ServeLine) -> tuple[str | None, float, str]:
    """What the line says of it, as ``parse_offloading`` takes it."""
    text = line.text(_CONNECTOR, "") or None
    return text, line.gib_as_bytes(_OFFLOADING) / GIB, line.text(_BACKEND, "native")


def release_of_unknown_blocks(line: ServeLine, shape: ModelSpec) -> str | None:
    """The release of a line whose blocks of compressed attention are not known; None where they are.

    Up to 0.23 a block of compressed attention had as many pages of each size as the largest group has of one (a log of 0.22); since 0.24
    they are packed (pull request 44577), and later more densely (48993).
    """
    if shape.compressed is None or line.version is None or line.version >= _FIRST_KNOWN_BLOCKS:
        return None
    return ".".join(map(str, line.version))


def _with_length(launch: Launch) -> Launch:
    """The launch with the longest sequence that fits, where vLLM chooses it."""
    if not launch.fits_length or first_broken(launch) is not None:
        return launch
    return replace(launch, max_model_len=longest_model_len(launch))


def _cards(line: ServeLine, given: str | GpuSpec | Sequence[str | GpuSpec]) -> list[GpuSpec]:
    """The card of all ranks, or of each where they differ."""
    names = [given] if isinstance(given, str | GpuSpec) else given
    found = [gpu(each) if isinstance(each, str) else each for each in names]
    if len(set(found)) == 1:
        return found[:1]
    ranks = line.whole("tensor-parallel-size", 1) * line.whole("pipeline-parallel-size", 1)
    if len(found) != ranks or line.whole("data-parallel-size", 1) > 1:
        remedy = f"must be one GPU, or that of each of the {ranks} ranks of one engine"
        raise SettingError("gpu", ",".join(each.name for each in found), remedy)
    return found


def _require_divided(line: ServeLine, shape: ModelSpec) -> None:
    """Raise SettingError for ranks that divide the tokens of a sequence, and with which the memory is not known.

    Where vLLM refuses them, that is the answer (``checks``).
    """
    ranks, parallel = line.whole(_DIVIDED, 1), line.whole("tensor-parallel-size", 1)
    refused = broken_rule(shape, parallel, ranks) or (has_windows(shape) and not line.switch(_ONE_GROUP))
    if ranks == 1 or refused:
        return
    require_context_parallel(shape, parallel, ranks, one_group=True)
    if "speculative-config" in line.flags:
        raise NotSimulated(
            f"--{_DIVIDED}", ranks, "is not simulated with --speculative-config", "leave out one of them"
        )


def _drafter(line: ServeLine, shape: ModelSpec) -> tuple[SpeculativeConfig | None, NotSimulated | None]:
    """The line's drafter, or why it is not counted. The KV cache does not depend on how many drafts are accepted."""
    text = line.text("speculative-config", "")
    if not text:
        return None, None
    config = parse_speculative(text, needs_rates=False)
    try:
        config.drafter(shape)
    except NotSimulated as error:
        return None, error
    return config, None


def _not_simulated(
    line: ServeLine, speculative: SpeculativeConfig | None, uncounted: NotSimulated | None
) -> Iterator[str]:
    """Name the engine of releases before V1, and drafts that are not simulated; where the line does not say how many are accepted they
    count for the memory alone."""
    chosen = line.environment.get("VLLM_USE_V1")
    before = {"0": FIRST_WITHOUT_V0, "1": None}.get(chosen or "", FIRST_V1)
    if line.version is not None and before is not None and line.version < before:
        major, minor = line.version
        yield f"the V0 engine of vLLM {major}.{minor} (defaults, memory and scheduler are V1's; --policy vllm-v0 has V0's scheduler)"
    if line.switch("enable-lora"):
        yield "--enable-lora (adapters take time; their memory is counted)"
    if line.switch("enable-eplb"):
        yield "--enable-eplb (experts are as busy as without copies, and none moves; its memory is counted)"
    if line.gib_as_bytes("cpu-offload-gb"):
        yield "--cpu-offload-gb (steps read weights from the host; the memory that it frees is counted)"
    if line.whole("pipeline-parallel-size", 1) > 1 and _PARTITION in line.environment:
        yield f"{_PARTITION} (steps take the time of vLLM's own division; its memory is counted)"
    if uncounted is not None:
        yield f"--speculative-config ({uncounted.value} {uncounted.reason}; its memory is not counted)"
    elif speculative is not None and not speculative.acceptance_rates:
        yield f"--speculative-config ({UNKNOWN_RATES}; its memory is counted)"


def _lora(line: ServeLine, shape: ModelSpec) -> Lora | None:
    """The adapters of a line that enables them; of target modules that are not known, those of all modules."""
    if not line.switch("enable-lora"):
        return None
    rank, targets = line.whole("max-lora-rank", MAX_LORA_RANK), _targets(line)
    known = targets if targets and are_known(shape, targets) else None
    return Lora(line.whole("max-loras", MAX_LORAS), rank, line.whole("max-cpu-loras"), known)


def _targets(line: ServeLine) -> frozenset[str]:
    return frozenset(line.text(_TARGETS, "").split()) if line.switch("enable-lora") else frozenset()


def _uncounted_targets(line: ServeLine, shape: ModelSpec) -> str | None:
    """The flag of target modules of which the matrices are not known."""
    targets = _targets(line)
    return None if not targets or are_known(shape, targets) else f"--{_TARGETS} (all modules are counted)"


def _all_to_all_bytes(line: ServeLine) -> int:
    """Buffers of DeepEP's kernels for many tokens: one for GPUs with NVLink and one for other nodes (``DeepEPHTAll2AllManager``)."""
    engines, ranks = line.whole("data-parallel-size", 1), line.whole("tensor-parallel-size", 1)
    backend = line.text("all2all-backend", line.environment.get("VLLM_ALL2ALL_BACKEND", ""))
    if backend != "deepep_high_throughput" or engines == 1 or not line.switch("enable-expert-parallel"):
        return 0
    size = line.environment.get(_BUFFER, "1024")
    if not size.isdecimal():
        raise SettingError(_BUFFER, size, "must be a whole number of MiB")
    return (1 + (engines * ranks > _NODE_GPUS)) * int(size) << 20


def _eplb(line: ServeLine) -> Eplb | None:
    """The balancing of experts. Up to 0.11 its settings are flags, later keys of an object."""
    config = line.json_of(_EPLB)
    if not isinstance(config, dict):
        raise SettingError(f"--{_EPLB}", line.text(_EPLB, "")[:60], "must be a JSON object")

    def number(key: str, flag: str, default: int) -> int:
        given = str(config.get(key, line.text(flag, str(default))))
        if not given.isdecimal():
            raise SettingError(f"--{_EPLB}.{key}", given, "must be a whole number")
        return int(given)

    found = Eplb(
        number("num_redundant_experts", "num-redundant-experts", 0),
        number("window_size", "eplb-window-size", EPLB_WINDOW_SIZE),
        config.get("communicator"),
        line.switch("enable-eplb"),
    )
    return found if found.is_enabled or found.num_redundant_experts else None


def _partition(line: ServeLine) -> tuple[int, ...] | None:
    """Layers of the pipeline stages, where a variable in front of the line divides them."""
    text = line.environment.get(_PARTITION)
    if text is None:
        return None
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise SettingError(_PARTITION, text, "must be the number of layers of each stage, as 20,12")
    return tuple(map(int, sizes))


def _kv_setting(launch: Launch) -> str:
    """The value of fragmeter's ``--kv-cache-dtype`` that stands for the number format of the launch's KV cache."""
    kv_dtype = launch.deployment.kv_dtype
    # Steps in float32 are not simulated (``Started.require_simulated``).
    if kv_dtype in ("fp32", resolved_kv_dtype(launch.model, launch.gpu, "auto", "bf16")):
        return "auto"
    return kv_dtype.removesuffix("_ds_mla")


def _release(line: ServeLine) -> Release:
    found = LATEST if line.version is None else release(line.version, line.patch)
    flashinfer = line.environment.get("VLLM_USE_FLASHINFER_SAMPLER")
    if flashinfer is not None:
        a_logit = found.sampler_bytes if flashinfer == "0" else FLASHINFER_SAMPLER_BYTES
        warm = _PLAIN_WARM_UP if flashinfer == "0" else found.v2_warm_up_bytes
        found = replace(found, sampler_bytes=a_logit, fewest_sampler_bytes=a_logit, v2_warm_up_bytes=warm)
    runner = line.environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if runner in ("0", "1"):
        none: frozenset[str] = frozenset()
        found = replace(found, v2_all=runner == "1", v2_model_types=none, v2_dense=False, first_runner_drafts=none)
    counts = line.environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    if counts is None:
        return found
    asked = counts != "0" and found.since >= _FIRST_ESTIMATE
    return replace(found, counts_graphs=asked, v2_counts_graphs=asked and found.v2_counts_graphs)


def shape_of(line: ServeLine, model_name: str | None) -> ModelSpec:
    """The model of a line, or of the name in its place, without an encoder that the line leaves out.

    Raises:
        SettingError: It is not known.
    """
    name = model_name or line.text("hf-config-path", line.model)
    shape = without_encoder(line, model(name))
    return replace(shape, name=name) if Path(name).exists() else shape


def _is_taken(line: ServeLine, model_name: str | None) -> bool:
    """Whether the shape is of another model than the line names; a folder is taken for the checkpoint itself."""
    if model_name is None or Path(model_name).exists():
        return False
    given, named = model_name.lower(), line.model.lower().rstrip("/")
    have_owners = "/" in given and "/" in named and not named.startswith(("/", ".", "~"))
    return given != named if have_owners else given.rsplit("/", 1)[-1] != named.rsplit("/", 1)[-1]


def _caches(shape: ModelSpec, vllm: Release) -> bool:
    """Whether vLLM caches prefixes by default: not of models without attention, nor at first of those with states beside it."""
    return bool(shape.attention_layers) and (not shape.state_layers or vllm.caches_states)


def _batch(line: ServeLine, shape: ModelSpec, card: GpuSpec, vllm: Release, longest: int) -> tuple[int, int]:
    """Tokens and sequences of a step (``_set_default_max_num_seqs_and_batched_tokens_args``).

    Args:
        longest: The longest sequence, in tokens.
    """
    tokens, seqs = batch_defaults(card, vllm)
    if line.text("performance-mode", "") == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    given = line.whole("max-num-seqs", seqs)
    is_bounded = vllm.since >= _FIRST_BOUNDED
    if not line.switch("enable-chunked-prefill", True):
        tokens = max(tokens, longest) if is_bounded else longest
    if vllm.since >= _FIRST_WHOLE_VIDEO and shape.model_type == "gemma4" and shape.encoder is not None:
        tokens = max(tokens, _GEMMA4_VIDEO_TOKENS)
    tokens = line.whole("max-num-batched-tokens", min(tokens, given * longest) if is_bounded else tokens)
    return tokens, given if "max-num-seqs" in line.flags else min(given, tokens)


def _weights(line: ServeLine, shape: ModelSpec) -> str | None:
    """Number format of the weights; None is 16 bit."""
    given = line.text("quantization", "")
    own = weights_format(shape) if given in ("", "none") else shape.quantization
    form = _WEIGHTS.get(given, given)
    if not form or own and (form in _OWN or form == own.split("[")[0]):
        return own
    if form not in ("none", "awq", "gptq", "fp8", "int8", "mxfp4", "nvfp4"):
        remedy = "is not supported; awq, gptq, fp8, int8 (of weights), modelopt_fp4 or the checkpoint's own"
        raise SettingError("--quantization", form, remedy)
    return None if form == "none" else form


def _threshold(line: ServeLine) -> int:
    return 0 if line.text(_THRESHOLD, "0") == "0" else line.whole(_THRESHOLD, 0)


def _dtype(line: ServeLine) -> str:
    found = line.text("dtype", "auto")
    if found not in _DTYPES:
        raise SettingError("--dtype", found, f"is not supported; one of {', '.join(_DTYPES)}")
    return _DTYPE_NAMES.get(found, found)


def _deployment(line: ServeLine, shape: ModelSpec, cards: Sequence[GpuSpec]) -> Deployment:
    card, own = cards[0], "fp32" if is_in_float32(shape, cards, _dtype(line)) else "bf16"
    kv = line.text("kv-cache-dtype", "auto")
    kv = _KV_DTYPES.get(kv, kv)
    require_counted("--kv-cache-dtype", kv)
    if kv == "auto" and shape.kv_dtype == NVFP4:
        kv = NVFP4
    if kv not in ("auto", "fp16", "bf16", "fp8", NVFP4):
        raise SettingError("--kv-cache-dtype", kv, "is no format of vLLM's; give auto, bfloat16 or fp8")
    weights = _weights(line, shape)
    engines, ranks = line.whole("data-parallel-size", 1), line.whole("tensor-parallel-size", 1)
    found = Deployment(
        pipeline_parallel=line.whole("pipeline-parallel-size", 1),
        # Without experts, and on a single GPU, vLLM ignores them.
        data_parallel=engines if shape.experts else 1,
        expert_parallel=bool(shape.experts) and engines * ranks > 1 and line.switch("enable-expert-parallel"),
        kv_dtype=resolved_kv_dtype(shape, card, kv, own),
        quantization=weights,
        cuda_graphs=not line.switch("enforce-eager"),
        decode_context_parallel=line.whole(_DIVIDED, 1),
        # No other backend has it.
        attention_backend=line.text("attention-backend", "") or (FLASHINFER if kv == NVFP4 else None),
    )
    return replace(found, moe_backend=_moe_backend(line, shape, card, found))


def _moe_backend(line: ServeLine, shape: ModelSpec, card: GpuSpec, deployment: Deployment) -> str | None:
    """The kernels of experts that a flag or environment variables ask for, as the flag names them; None for vLLM's choice.

    Raises:
        SettingError: The release has none for these experts, so that no server starts.
    """
    asked = {name: line.environment[name] for name in EXPERTS_VARIABLES if name in line.environment}
    if "moe-backend" in line.flags:
        asked[MOE_BACKEND] = line.text("moe-backend", "")
    ranks = deployment.expert_ranks(line.whole("tensor-parallel-size", 1))
    need = experts_need(shape, card, deployment.quantization, ranks)
    if need is None or not asked:
        return None
    minor = LATEST.since[1] if line.version is None else line.version[1]
    kernel, default = chosen_experts(need, minor, asked), chosen_experts(need, minor)
    if kernel is None:
        # Rules of earlier releases were not compared.
        if minor < FIRST_COMPARED:
            return None
        name = next(name for name in (MOE_BACKEND, *EXPERTS_VARIABLES) if name in asked)
        where = f"experts in {form_text(need)} on {card.name}"
        remedy = f"vLLM 0.{minor} has no such kernels for {where}, and does not start; leave it out"
        raise SettingError(f"--{name}" if name == MOE_BACKEND else name, asked[name], remedy)
    return None if kernel == default else experts_name(kernel)
