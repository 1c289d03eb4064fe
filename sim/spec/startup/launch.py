"""The settings of vLLM that decide the size of an engine's KV cache, with the defaults that depend on the GPU and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...types.errors import SettingError
from .. import compressed
from ..attention import FP8_DS_MLA
from ..deployment import DTYPE_BITS, Deployment, ExpertRanks, stages
from ..gpu import GIB, GpuSpec
from ..hybrid import HybridLayout, formed_layout, hybrid_layout
from ..kernels import deployed_experts, experts_need
from ..kv_cache import CacheSettings
from ..releases import LATEST, Release
from ..shape import ModelSpec
from ..speculative import SpeculativeConfig
from .cuda_graphs import GraphSettings
from .dtypes import is_in_float32
from .lora import Lora

BLOCK_SIZE = 16
#: Formats that vLLM makes of a checkpoint in 16 bits.
_ONLINE = ("fp8",)
#: From vLLM's `get_batch_defaults` for a server: (max_num_batched_tokens, max_num_seqs).
_LARGEST, _LARGE, _OTHER = (16_384, 1024), (8192, 1024), (2048, 256)
_LARGEST_BYTES, _LARGE_BYTES = 160 * GIB, 70 * GIB


def checked_block_size(model: ModelSpec, given: int | None) -> int | None:
    """Tokens per block, before blocks are raised for states; None if neither the user nor the model decides.

    Raises:
        SettingError: The kernels of an indexer do not run such blocks.
    """
    if model.compressed:
        if given not in (None, compressed.BLOCK_SIZE):
            raise SettingError("block_size", given, f"must be {compressed.BLOCK_SIZE} tokens for {model.name}")
        return compressed.BLOCK_SIZE
    if model.indexer is None:
        return given
    multiple = model.indexer.kernel_block_size
    size = given or multiple
    if size % multiple:
        remedy = f"must be a multiple of {multiple} tokens for the indexer of {model.name}"
        raise SettingError("block_size", size, remedy)
    return size


def resolved_kv_dtype(model: ModelSpec, gpu: GpuSpec, given: str, own: str = "fp16") -> str:
    """Number format of the KV cache that vLLM takes.

    "auto" is the format that the checkpoint asks for, or fp8 for GLM on B200 and B300, else the model's. With sparse attention fp8 is
    FlashMLA's format, but on B200 and B300, where vLLM prefers FlashInfer.

    Args:
        given: ``--kv-cache-dtype`` by fragmeter's name, or "auto".
        own: The model's format.

    Raises:
        SettingError: The checkpoint asks for a format that is not simulated.
    """
    if model.compressed:
        if given not in ("auto", "fp8", FP8_DS_MLA):
            raise SettingError("kv_cache_dtype", given, f"must be fp8 or auto for {model.name}, as in vLLM")
        return FP8_DS_MLA
    indexer = model.indexer
    if given == "auto":
        by_default = indexer is not None and indexer.fp8_on_b200 and gpu.is_blackwell
        given = model.kv_dtype or ("fp8" if by_default else own)
        if given not in DTYPE_BITS:
            remedy = f"which the checkpoint of {model.name} asks for, is not simulated; give another --kv-cache-dtype"
            raise SettingError("kv_cache_dtype", given, remedy)
    if model.latent and indexer and not gpu.is_blackwell and (given == "fp8" or gpu.major == 12):
        return FP8_DS_MLA
    return given


def no_single_group(model: ModelSpec) -> SettingError:
    """The refusal of a KV cache of one group for compressed attention: vLLM 0.33 fails on its windows."""
    remedy = f"vLLM cannot keep the windows of {model.name} whole; leave it out"
    return SettingError("disable_hybrid_kv_cache_manager", True, remedy)


def batch_defaults(gpu: GpuSpec, release: Release = LATEST) -> tuple[int, int]:
    """Defaults of max_num_batched_tokens and max_num_seqs of a server: by the memory, and as vLLM has it by whether "a100" is in the name."""
    if gpu.memory_bytes >= _LARGEST_BYTES and release.largest_batch:
        return _LARGEST
    is_small = gpu.memory_bytes < _LARGE_BYTES or ("a100" in gpu.name.lower() and not release.large_a100)
    return _OTHER if is_small else _LARGE


#: vLLM's default.
EPLB_WINDOW_SIZE = 1000


class Eplb(NamedTuple):
    """Settings of expert-parallel load balancing (``eplb``).

    Attributes:
        num_redundant_experts: Copies of experts of a layer, over all ranks.
        window_size: Steps of which the load is kept.
        communicator: What moves experts; None is vLLM's choice.
        is_enabled: Whether experts are balanced; vLLM refuses copies without that.
    """

    num_redundant_experts: int = 0
    window_size: int = EPLB_WINDOW_SIZE
    communicator: str | None = None
    is_enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings that decide the size of an engine's KV cache.

    Attributes:
        deployment: Pipeline stages, number formats, CUDA graphs.
        block_size: Tokens per block on a rank, before they are raised for states.
        hybrid: Whether layers with a window keep only the tokens within it.
        graphs: What the line says of CUDA graphs, where ``deployment`` has them.
        enable_prefix_caching: Whether states at ends of blocks are kept; of no effect on models without states.
        state_chunk_tokens: See ``CacheSettings``.
        release: Release of vLLM.
        export_tokens: Of the layers with a state (``StateMixer.export_tokens``); None is that of the GPU and the release.
        kv_cache_memory_bytes: KV cache of a GPU, set by the user; None computes it.
        corrections: Bytes to add to what is computed, from an engine's log, as pairs of a name and a number: of parts of the memory
            (``capacity.PARTS``), of "kv_cache", or of what the "warm_up" of a server that died takes. What is corrected has no interval.
        is_compiled: Whether vLLM finds a compile cache of an earlier start; None is not known.
        is_taken: Whether the model stands for another checkpoint of its shape, which may keep other layers in 16 bits.
        used_at_start_bytes: In use on a GPU when a worker starts, from an engine's log; None is what other servers have.
        outlook: Which size of the KV cache is taken: the likely one, or an end of its interval.
        num_gpu_blocks_override: Number of blocks, independent of the memory.
        speculative: The drafter, if any: its weights take memory, and its layers are in the blocks.
        async_scheduling: Whether a step is decided while the step before it runs; both have drafts.
        cpu_offload_bytes: Weights that each rank keeps in memory of the host (``--cpu-offload-gb``).
        lora: LoRA adapters, if any.
        eplb: Balancing of experts, if any.
        all_to_all_bytes: Buffers of kernels that exchange tokens of experts, outside of torch.
        gpus: Cards of the ranks in their order, stage by stage, where they are not all ``gpu``. The first one decides the defaults.
        chunked_prefill: Whether a prompt may take several steps.
        max_num_active_seqs: Sequences that may hold blocks; None does not bound them.
        long_prefill_token_threshold: Tokens from which a prompt is long; 0 is none.
        dtype: ``--dtype``: "auto", "float16", "bfloat16" or "float32".
        quantization_method: ``--quantization`` as vLLM names it; None is the checkpoint's.
        layer_partition: Layers of each pipeline stage (``VLLM_PP_LAYER_PARTITION``); None divides them as vLLM does.
        fits_length: Whether ``--max-model-len auto`` takes the longest sequence that fits, even a single token.
        allows_long: Whether sequences may be longer than the model's limit (VLLM_ALLOW_LONG_MAX_MODEL_LEN=1).
    """

    model: ModelSpec
    gpu: GpuSpec
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel: int = 1
    deployment: Deployment = Deployment(cuda_graphs=True)
    gpu_memory_utilization: float = LATEST.gpu_memory_utilization
    block_size: int = BLOCK_SIZE
    hybrid: bool = True
    graphs: GraphSettings = GraphSettings()
    enable_prefix_caching: bool = True
    state_chunk_tokens: int | None = None
    release: Release = LATEST
    export_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    corrections: tuple[tuple[str, int], ...] = ()
    is_compiled: bool | None = None
    is_taken: bool = False
    used_at_start_bytes: int | None = None
    outlook: Literal["low", "likely", "high"] = "likely"
    num_gpu_blocks_override: int | None = None
    speculative: SpeculativeConfig | None = None
    async_scheduling: bool = True
    cpu_offload_bytes: int = 0
    lora: Lora | None = None
    eplb: Eplb | None = None
    all_to_all_bytes: int = 0
    layer_partition: tuple[int, ...] | None = None
    gpus: tuple[GpuSpec, ...] = ()
    chunked_prefill: bool = True
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    dtype: str = "auto"
    quantization_method: str | None = None
    fits_length: bool = False
    allows_long: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.deployment.pipeline_parallel

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that is not quantised: of a weight, of an activation."""
        return 4 if is_in_float32(self.model, self.gpus or (self.gpu,), self.dtype) else 2

    @property
    def expert_ranks(self) -> ExpertRanks:
        """The division of the experts among the GPUs of a stage, copies included."""
        ranks = self.deployment.expert_ranks(self.tensor_parallel)
        return ranks if self.eplb is None else ranks._replace(redundant=self.eplb.num_redundant_experts)

    @property
    def experts_kernel(self) -> str | None:
        """The kernels of the experts (``kernels``); None on other vendors' cards and without experts."""
        need = experts_need(self.model, self.gpu, self.deployment.quantization, self.expert_ranks)
        return None if need is None else deployed_experts(need, self.deployment, self.release.since[1])

    @property
    def stages(self) -> list[range]:
        """The layers of each pipeline stage.

        Raises:
            SettingError: They cannot be divided so.
        """
        return stages(self.model.num_layers, self.deployment.pipeline_parallel, self.layer_partition)

    @property
    def gpu_text(self) -> str:
        """The cards as text: ``2 x rtx-3090``, or their names."""
        names = [card.name for card in self.gpus]
        return ", ".join(names) if names else f"{self.num_gpus} x {self.gpu.name}"

    def stage_gpus(self, number: int) -> tuple[GpuSpec, ...]:
        """The different cards of a pipeline stage."""
        first = number * self.tensor_parallel
        return tuple(dict.fromkeys(self.gpus[first : first + self.tensor_parallel] or (self.gpu,)))

    @property
    def second_runner(self) -> bool:
        """Whether vLLM's second model runner runs this model."""
        return self.release.second_runner(self.model, self._has_quantized_checkpoint, self._drafts)

    @property
    def profiling(self) -> Release:
        """The release as it profiles this model; the model runner that it takes decides."""
        return self.release.profiling(self.model, self._has_quantized_checkpoint, self._drafts)

    @property
    def _has_quantized_checkpoint(self) -> bool:
        """Whether the checkpoint is quantized, and not only what vLLM makes of one in 16 bits; of one that is taken, its format says so."""
        if self.deployment.quantization is None:
            return False
        return self.is_taken or self.model.quantization is not None or self.deployment.quantization not in _ONLINE

    @property
    def _drafts(self) -> str | None:
        return None if self.speculative is None else self.speculative.method

    @property
    def concurrent_batches(self) -> int:
        """Steps of which a window keeps the tokens beside its own (``max_in_flight_tokens`` of vLLM's ``VllmConfig``); up to 0.25 one."""
        if not self.release.keeps_in_flight:
            return 1
        ranks = self.deployment.pipeline_parallel
        # The second model runner schedules ahead in pipeline stages, too (``max_concurrent_batches``).
        return ranks + (self.async_scheduling and (ranks == 1 or self.second_runner))

    @property
    def layout(self) -> HybridLayout | None:
        """The KV groups that share the pool; None if all layers keep every token."""
        drafter = None if self.speculative is None else self.speculative.drafter(self.model)
        drafts_windows = drafter is not None and hybrid_layout(self.model, self.max_model_len) is not None
        if self.model.compressed and not self.hybrid:
            raise no_single_group(self.model)
        if self.model.mixer or (self.hybrid and (self.model.has_page_sizes or drafts_windows)):
            settings = CacheSettings(
                max_model_len=self.max_model_len,
                max_num_batched_tokens=self.max_num_batched_tokens,
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
                state_chunk_tokens=self.state_chunk_tokens,
                max_concurrent_batches=self.concurrent_batches,
                num_speculative_blocks=0 if self.speculative is None else self.speculative.num_speculative_tokens,
            )
            exports, mixer = self.export_tokens or 0, self.model.mixer
            if mixer and self.export_tokens is None:
                exports = mixer.export_tokens(self.gpu.major, self.release.since[1])
            kv_dtype, ranks = self.deployment.kv_dtype, self.tensor_parallel
            return formed_layout(self.model, settings, kv_dtype, ranks, exports, drafter)
        return hybrid_layout(self.model, self.max_model_len) if self.hybrid else None

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the pool: on one rank, or on all that divide the tokens of a sequence."""
        return self.rank_block_tokens * self.deployment.decode_context_parallel

    @property
    def rank_block_tokens(self) -> int:
        """Tokens per block on one rank: ``block_size``, or more in a model with states."""
        layout = self.layout
        return layout.config.block_size if layout and layout.config else self.block_size

    def sequence_blocks(self, tokens: int) -> int:
        """Maximum of blocks that a sequence of ``tokens`` needs, over all KV groups.

        A group with a window also needs blocks for the tokens of the steps in flight, and one more block because the window may
        start within a block (``max_memory_usage_bytes`` of vLLM's ``SlidingWindowSpec``).
        """
        layout = self.layout
        if layout is None:
            return -(-tokens // self.block_tokens)
        if layout.config:
            return layout.config.sequence_blocks(tokens)
        return layout.full_blocks(tokens, self.block_size) + layout.num_sliding * self._window_blocks(layout, tokens)

    def _window_blocks(self, layout: HybridLayout, tokens: int) -> int:
        in_flight = self.concurrent_batches * self.max_num_batched_tokens
        return -(-min(layout.window_tokens - 1 + in_flight, tokens) // self.block_size) + 1

    def decode_blocks(self, tokens: int) -> int:
        """Most blocks that a sequence with ``tokens`` of prompt and output holds in a step that decodes, over all KV groups."""
        layout, stored = self.layout, self._stored(tokens)
        return -(-stored // self.block_tokens) if layout is None else layout.decode_blocks(stored, self.block_size)

    def boundary_blocks(self, tokens: int) -> int:
        """Those of ``decode_blocks`` that are only held in a step that enters another block, of states."""
        config = None if self.layout is None else self.layout.config
        return 0 if config is None else config.boundary_blocks(self._stored(tokens))

    def _stored(self, tokens: int) -> int:
        """Tokens in blocks: not the last one, but drafts of the steps in flight, with what a drafter looks ahead."""
        stored = max(1, tokens - 1)
        if self.speculative is not None:
            ahead = (1 + self.async_scheduling) * self.speculative.num_speculative_tokens
            stored = min(stored + ahead + self.speculative.lookahead_tokens, self.max_model_len)
        return stored

    def prompt_blocks(self, tokens: int) -> int:
        """Blocks that the admission of a prompt of ``tokens`` asks for, over all KV groups.

        A window keeps the tokens of the steps in flight, so that these may be more than the sequence holds once it decodes.
        """
        layout = self.layout
        if layout is None:
            return -(-tokens // self.block_tokens)
        if layout.config:
            return layout.config.prompt_blocks(tokens)
        blocks = min(-(-tokens // self.block_size), self._window_blocks(layout, self.max_model_len))
        return layout.full_blocks(tokens, self.block_size) + layout.num_sliding * blocks
