"""KV cache groups, block sizes and pages of any model, as vLLM 0.33 forms them when it starts.

One pool of equal blocks serves all layers. A *group* is a set of layers with one block table; a block belongs to one
group at a time and has a *page* for each of the group's layers. Blocks of all groups must have the same bytes, so pages
are made equal and groups get about equally many layers. Qwen3-Next, 36 gated delta nets and 12 full layers:

    layers in model order   D D D F  D D D F ...
    1. align                attention blocks grow from 16 to 544 tokens: a page >= a state
    2. unify                every page 1,114,112 bytes; a state's page ends in 16,384 bytes of padding
    3. group                12 layers each: D.0  D.1  D.2  F
    4. size                 block = 12 pages; num_blocks = available bytes // bytes of a block, the null block included

The steps are these functions of vLLM:

    1. ``Platform._align_hybrid_block_size``, and ``Attention.get_kv_cache_spec`` for the blocks of windows
    2. ``unify_kv_cache_spec_page_size``, or ``unify_hybrid_kv_cache_specs`` where the hybrid manager is disabled
    3. ``get_kv_cache_groups``, ``_get_kv_cache_groups_uniform_page_size``
    4. ``get_kv_cache_configs``, ``resolve_kv_cache_block_sizes``

Not modelled: backends that interleave the layers of a block (the sparse indexer of DeepSeek V3.2, "packed" groups) or
prefer blocks other than 16 tokens (give ``block_size``), quantized caches with unquantized layers, cross attention, context
parallelism, and speculative decoding. A layer of attention inside the encoder keeps nothing: leave it out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm, prod

from ..types.errors import SettingError
from .attention import FULL, Span
from .dtypes import dtype_bits
from .shape import ModelSpec, refuse_states

BLOCK_SIZE = 16
#: MLA kernels of FlashInfer need a multiple of so many tokens in models that also have states.
_MLA_ALIGNMENT_TOKENS = 128
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What one attention layer keeps of each token, on one tensor-parallel rank.

    Attributes:
        num_kv_heads: KV heads of the rank; 1 for a latent vector.
        head_size: Elements of K a head; of a latent vector all of them, the rotary key included.
        span: Which tokens are kept.
        head_size_v: Elements of V a head, if they are not as many.
        dtype: Of the cache.
        latent: Whether it is one latent vector (MLA) in place of K and V.
    """

    num_kv_heads: int
    head_size: int
    span: Span = FULL
    head_size_v: int | None = None
    dtype: str = "fp16"
    latent: bool = False

    def __post_init__(self) -> None:
        dtype_bits(self.dtype)
        if self.latent and self.span != FULL:
            raise SettingError("span", self.span.kind, "is not simulated for latent vectors; they keep every token")
        _require_positive(self, "num_kv_heads", "head_size")
        if self.span != FULL and self.span.tokens < 1:
            raise SettingError("span", self.span.tokens, "must be at least 1 token")

    @property
    def kind(self) -> str:
        """One of "full", "sliding", "chunked" and "mla"."""
        return "mla" if self.latent else self.span.kind

    def page_bytes(self, block_size: int) -> int:
        """Bytes of ``block_size`` tokens (``real_page_size_bytes`` of vLLM's ``AttentionSpec``)."""
        value = 0 if self.latent else self.head_size if self.head_size_v is None else self.head_size_v
        return block_size * self.num_kv_heads * (self.head_size + value) * dtype_bits(self.dtype) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """What one layer with a fixed-size state keeps of a sequence, however long, on one tensor-parallel rank.

    Mamba 1 and 2, gated delta net, KDA, linear attention, short convolutions: a convolution's last inputs, a recurrent
    state, or both. ``mamba_utils.py`` of vLLM (``MambaStateShapeCalculator``) has the shapes.

    Attributes:
        shapes: Of the tensors.
        dtypes: Of each tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise SettingError("dtypes", self.dtypes, f"must name the dtype of each of {len(self.shapes)} tensors")
        if self.state_bytes < 1:
            raise SettingError("shapes", self.shapes, "must have at least one element")

    @property
    def kind(self) -> str:
        """Always "state"."""
        return "state"

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * dtype_bits(dtype) // 8 for shape, dtype in pairs)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one state, whatever the block size."""
        return self.state_bytes


Layer = AttentionLayer | StateLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """What a server's settings decide of its KV cache; the names are vLLM's.

    Attributes:
        max_model_len: The longest sequence, in tokens.
        max_num_batched_tokens: Most tokens of a step.
        block_size: Tokens of a block of attention, before it is raised for states; None takes 16.
        enable_prefix_caching: Also decides ``mamba_cache_mode``.
        max_concurrent_batches: Steps in flight: 2 with async scheduling, 1 without; with pipeline stages the number
            of stages, one more with async scheduling.
        disable_hybrid_kv_cache_manager: Windows and chunks are kept whole. vLLM disables it itself for models with chunks
            (Llama 4), and refuses to do so for models with states.
        num_gpu_blocks_override: Blocks of the pool, whatever memory there is.
        kernel_block_size: Blocks of windows are multiples of so many tokens, and blocks raised for states, too: 16 for
            FlashAttention, FlashInfer and Triton.
    """

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int | None = None
    enable_prefix_caching: bool = True
    max_concurrent_batches: int = 2
    disable_hybrid_kv_cache_manager: bool = False
    num_gpu_blocks_override: int | None = None
    kernel_block_size: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, "max_model_len", "max_num_batched_tokens", "max_concurrent_batches")
        _require_positive(self, "block_size", "num_gpu_blocks_override", "kernel_block_size")

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that are scheduled and not yet computed, at most: windows and chunks free nothing before that."""
        return self.max_concurrent_batches * self.max_num_batched_tokens


def _require_positive(settings: object, *names: str) -> None:
    """Raise SettingError for a number that is given and below 1."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise SettingError(name, value, "must be at least 1")


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """A layer's pages: vLLM's ``KVCacheSpec``.

    Attributes:
        layer: What is kept.
        block_size: Tokens of a block.
        page_size_padded: Bytes of a page, where they are more than its contents.
        keeps_all: Whether a window or chunk is kept whole: allocated like full attention, computed as before.
    """

    layer: Layer
    block_size: int
    page_size_padded: int | None = None
    keeps_all: bool = False

    @property
    def kind(self) -> str:
        """One of "full", "sliding", "chunked", "mla" and "state"; "full" for what is kept whole."""
        return "full" if self.keeps_all else self.layer.kind

    @property
    def span(self) -> Span:
        """Which tokens are kept; of a state FULL, as it stands for all of them."""
        return FULL if self.keeps_all or isinstance(self.layer, StateLayer) else self.layer.span

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page that the layer uses."""
        return self.layer.page_bytes(self.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded


@dataclass(frozen=True, slots=True)
class KvCacheGroup:
    """Layers that share a block table: vLLM's ``KVCacheGroupSpec``.

    Attributes:
        spec: Of its first layer. Kind, span and block size are the same in all; pages may differ in a group that is
            the only one (vLLM's ``UniformTypeKVCacheSpecs``).
        layers: Their numbers, in order. None on a pipeline stage that has none of them.
        specs: Of each layer.
    """

    spec: KvCacheSpec
    layers: tuple[int, ...]
    specs: tuple[KvCacheSpec, ...]

    @property
    def kind(self) -> str:
        """As of its layers; "full" for latent vectors beside K and V."""
        kinds = {spec.kind for spec in self.specs} or {self.spec.kind}
        return kinds.pop() if len(kinds) == 1 else "full"

    @property
    def span(self) -> Span:
        """Which tokens its layers keep."""
        return self.spec.span

    @property
    def block_size(self) -> int:
        """Tokens of a block. Of states: tokens between two states that are kept for prefix hits, or ``max_model_len``."""
        return self.spec.block_size

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a block that its layers use: the tokens of a full block, or the states."""
        return sum(spec.unpadded_page_size_bytes for spec in self.specs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a block that its layers occupy: their pages, padding included."""
        return sum(spec.page_size_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """The KV cache of a model on one rank; made by ``form_kv_cache``.

    Attributes:
        settings: Of the server.
        groups: In vLLM's order: that of the first layer of each kind; groups of one kind take its layers in turns.
        block_size: Tokens of a block of full attention before pages are unified: as asked for, or raised for states.
        mamba_block_size: Tokens of a block of states; None in a model without them.
    """

    settings: CacheSettings
    groups: tuple[KvCacheGroup, ...]
    block_size: int
    mamba_block_size: int | None = None

    @property
    def mamba_cache_mode(self) -> str:
        """Which states are kept: "none", the current one; "align", also some at the ends of blocks, for prefix hits.

        Follows ``enable_prefix_caching``. The third mode of earlier releases, "all", does not exist in 0.33.
        """
        aligned = self.settings.enable_prefix_caching and self.mamba_block_size is not None
        return "align" if aligned else "none"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the pool: those of the group with most; 0 for a model that keeps nothing."""
        return max((group.page_size_bytes for group in self.groups), default=0)

    def padding_bytes(self, group: KvCacheGroup) -> int:
        """Bytes of a block that a group cannot use: the ends of its pages, and the pages of layers that it lacks."""
        return self.bytes_per_block - group.unpadded_page_size_bytes

    @property
    def scheduler_block_size(self) -> int:
        """Tokens of which every group has whole blocks: their least common multiple."""
        return lcm(*self._block_sizes)

    @property
    def hash_block_size(self) -> int:
        """Tokens of one hash of a request's contents, without ``prefix_match_unit``."""
        return gcd(*self._block_sizes) if self.settings.enable_prefix_caching else self.scheduler_block_size

    @property
    def _block_sizes(self) -> list[int]:
        return [group.block_size for group in self.groups] or [self.block_size]

    def sequence_blocks(self, tokens: int) -> int:
        """Blocks that a sequence of ``tokens`` takes at most, over all groups (``max_memory_usage_bytes`` in vLLM)."""
        return sum(self._group_blocks(group, tokens) for group in self.groups)

    def _group_blocks(self, group: KvCacheGroup, tokens: int) -> int:
        window, in_flight = group.span.tokens, self.settings.max_in_flight_tokens
        if group.kind == "state":
            return 2 if self.mamba_cache_mode == "align" else 1
        if group.kind == "sliding":
            # A window need not begin with a block.
            return -(-min(window - 1 + in_flight, tokens) // group.block_size) + 1
        if group.kind == "chunked":
            return -(-min(window + in_flight, tokens) // group.block_size)
        return -(-tokens // group.block_size)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the pool that a sequence of ``tokens`` takes at most."""
        return self.sequence_blocks(tokens) * self.bytes_per_block

    def num_blocks(self, available_bytes: int) -> int:
        """Blocks of the pool, the null block included.

        Args:
            available_bytes: Memory for the KV cache on each rank. Of several pipeline stages, each with its own
                ``on_stage``, the fewest blocks count.

        Raises:
            SettingError: Beside the null block there is no room for one sequence of ``max_model_len``.
        """
        if not self.groups:
            return 1
        blocks = self.settings.num_gpu_blocks_override
        if blocks is None:
            blocks = available_bytes // self.bytes_per_block
        else:
            available_bytes = blocks * self.bytes_per_block
        longest, usable = self.settings.max_model_len, available_bytes - self.bytes_per_block
        if self.sequence_bytes(longest) > usable:
            raise self._too_small(longest, usable)
        return blocks

    def _too_small(self, longest: int, usable: int) -> SettingError:
        fitting = bisect_right(range(1, longest + 1), usable, key=self.sequence_bytes)
        needed = f"needs {self.sequence_bytes(longest) / GIB:,.2f} GiB of KV cache and has {max(0, usable) / GIB:,.2f}"
        remedy = f"at most {fitting} tokens fit" if fitting else "no sequence fits"
        return SettingError("max_model_len", longest, f"{needed} beside the null block; {remedy}, or give more memory")

    def on_stage(self, layers: Container[int]) -> KvCacheConfig:
        """The same groups with only some ``layers``: those of a pipeline stage.

        vLLM forms groups of the whole model first, so that every stage has the same block tables.
        """
        return replace(self, groups=tuple(_project(group, layers) for group in self.groups))


def _project(group: KvCacheGroup, layers: Container[int]) -> KvCacheGroup:
    kept = [(layer, spec) for layer, spec in zip(group.layers, group.specs, strict=True) if layer in layers]
    return KvCacheGroup(group.spec, tuple(layer for layer, _ in kept), tuple(spec for _, spec in kept))


def attention_layers(model: ModelSpec, kv_dtype: str = "fp16", tensor_parallel: int = 1) -> tuple[AttentionLayer, ...]:
    """The layers of a model, on one of ``tensor_parallel`` ranks.

    Raises:
        SettingError: The heads cannot be divided so, the dtype is not known, or some layers keep a state of fixed size.
    """
    refuse_states(model, "not all of its layers are attention")
    spans = model.spans or (FULL,) * model.num_layers
    return tuple(_attention_layer(model, span, kv_dtype, tensor_parallel) for span in spans)


def _attention_layer(model: ModelSpec, span: Span, kv_dtype: str, tensor_parallel: int) -> AttentionLayer:
    if model.latent:
        width = model.latent.kv_rank + model.latent.rope_dim
        return AttentionLayer(num_kv_heads=1, head_size=width, dtype=kv_dtype, latent=True)
    heads = model.kv_heads_per_rank(tensor_parallel)
    return AttentionLayer(num_kv_heads=heads, head_size=model.head_dim, span=span, dtype=kv_dtype)


def cache_layers(
    model: ModelSpec, kv_dtype: str = "fp16", tensor_parallel: int = 1, dtype: str = "fp16"
) -> tuple[Layer, ...]:
    """The layers of a model that keep something, in its order, on one of ``tensor_parallel`` ranks.

    The numbers of layers in groups formed of these are places among them: Nemotron-H has MLPs between them, which
    keep nothing.

    Args:
        dtype: Of the model, which states follow and the KV cache need not.

    Raises:
        SettingError: The heads of attention or state cannot be divided so, or a dtype is not known.
    """
    mixer = model.state_mixer(tensor_parallel)
    if mixer is None:
        return attention_layers(model, kv_dtype, tensor_parallel)
    state = StateLayer(shapes=mixer.state_shapes(tensor_parallel), dtypes=mixer.state_dtypes(dtype))
    kinds = [model.span(layer) for layer in range(model.num_layers)]
    return tuple(
        _attention_layer(model, span, kv_dtype, tensor_parallel) if span.keeps_tokens else state
        for span in kinds
        if span.kind != "none"
    )


def form_kv_cache(layers: Sequence[Layer], settings: CacheSettings) -> KvCacheConfig:
    """Put the layers of a whole model into groups, and size their blocks and pages.

    Args:
        layers: In model order, of all pipeline stages, each as one tensor-parallel rank has it.

    Raises:
        SettingError: vLLM does not start with it: pages of latent vectors that cannot be unified, or layers that
            cannot be kept whole although ``disable_hybrid_kv_cache_manager`` asks for it.
    """
    blocks = _align(layers, settings)
    specs = [blocks.spec(layer) for layer in layers]
    if settings.disable_hybrid_kv_cache_manager:
        specs = _keep_all(specs)
    mamba_block_size = blocks.mamba_block_size if any(spec.kind == "state" for spec in specs) else None
    return KvCacheConfig(settings, tuple(_groups(specs)), blocks.block_size, mamba_block_size)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks before pages are unified.

    Attributes:
        block_size, mamba_block_size: Tokens of a block of attention, and of states.
        mamba_page_bytes: What the page of a state is padded to; None where no attention is beside it.
        kernel_block_size: As in the settings.
    """

    block_size: int
    mamba_block_size: int
    mamba_page_bytes: int | None
    kernel_block_size: int

    def spec(self, layer: Layer) -> KvCacheSpec:
        """The pages of a layer."""
        if isinstance(layer, StateLayer):
            return KvCacheSpec(layer, self.mamba_block_size, self.mamba_page_bytes)
        if layer.kind == "sliding":
            # The largest block that a kernel can run, up to the block size; the smallest where none is.
            return KvCacheSpec(layer, max(self.kernel_block_size, _round_down(self.block_size, self.kernel_block_size)))
        return KvCacheSpec(layer, self.block_size)


def _align(layers: Sequence[Layer], settings: CacheSettings) -> _Blocks:
    """Raise the attention block size until a page is at least as large as a state.

    vLLM reads the bytes of a token from the model's configuration; here they are those of its first attention layer.
    """
    block_size, kernel = settings.block_size or BLOCK_SIZE, settings.kernel_block_size
    state_bytes = max((layer.state_bytes for layer in layers if isinstance(layer, StateLayer)), default=0)
    first = next((layer for layer in layers if isinstance(layer, AttentionLayer)), None)
    padded = None
    if state_bytes and first:
        token_bytes = replace(first, head_size_v=None).page_bytes(1)
        step = max(kernel, block_size, _MLA_ALIGNMENT_TOKENS if first.latent else 0)
        raised = step * -(-state_bytes // (step * token_bytes))
        block_size = max(block_size, _round_down(raised + kernel - 1, kernel))
        padded = block_size * token_bytes
    mamba_block_size = block_size if settings.enable_prefix_caching else settings.max_model_len
    return _Blocks(block_size, mamba_block_size, padded, kernel)


def _round_down(tokens: int, multiple: int) -> int:
    return tokens // multiple * multiple


def _groups(specs: list[KvCacheSpec]) -> list[KvCacheGroup]:
    """The groups of layers with these pages; vLLM's ``get_kv_cache_groups``."""
    if not specs:
        return []
    everything = tuple(range(len(specs)))
    if _is_uniform_type(specs):
        return [_members(specs, everything)]
    unified = _unify_pages(specs)
    if unified is None:
        return [_members(_keep_all(specs), everything)]
    buckets: dict[KvCacheSpec, list[int]] = {}
    for layer, spec in enumerate(unified):
        buckets.setdefault(spec, []).append(layer)
    size = _group_size([len(bucket) for bucket in buckets.values()])
    return [_members(unified, layers) for bucket in buckets.values() for layers in _split(bucket, size)]


def _members(specs: list[KvCacheSpec], layers: tuple[int, ...]) -> KvCacheGroup:
    return KvCacheGroup(specs[layers[0]], layers, tuple(specs[layer] for layer in layers))


def _is_uniform_type(specs: list[KvCacheSpec]) -> bool:
    """Whether all layers need blocks for the same tokens, whatever the bytes: they are one group.

    States count as equal if their pages are, and latent vectors beside K and V that are kept whole.
    """
    return len({_uniform_type(spec) for spec in specs}) == 1


def _uniform_type(spec: KvCacheSpec) -> tuple[object, ...]:
    return spec.block_size, spec.span, spec.kind == "state" and spec.page_size_bytes


def _unify_pages(specs: list[KvCacheSpec]) -> list[KvCacheSpec] | None:
    """Make every page as large as the largest.

    Blocks get more tokens where that comes out even, else pages are padded; states are always padded. Latent vectors cannot
    be padded: None where windows beside them have to be kept whole instead.
    """
    largest = max(spec.page_size_bytes for spec in specs)
    unified = []
    for spec in specs:
        ratio, rest = divmod(largest, spec.page_size_bytes)
        if ratio == 1 and not rest:
            unified.append(spec)
        elif spec.kind != "state" and not rest:
            unified.append(replace(spec, block_size=spec.block_size * ratio))
        elif spec.kind != "mla":
            unified.append(replace(spec, page_size_padded=largest))
        elif {spec.kind for spec in specs} <= {"full", "mla", "sliding"} and any(s.kind == "sliding" for s in specs):
            return None
        else:
            remedy = f"of latent vectors do not divide the largest page, {largest:,} bytes; give another block_size"
            raise SettingError("page_size_bytes", spec.page_size_bytes, remedy)
    return unified


def _keep_all(specs: list[KvCacheSpec]) -> list[KvCacheSpec]:
    """Keep windows and chunks whole, in blocks of the full layers, so that all layers are one group."""
    if not specs or _is_uniform_type(specs):
        return specs
    block_sizes = [spec.block_size for spec in specs if spec.kind in ("full", "mla")]
    kept = [
        replace(spec, block_size=block_sizes[0], keeps_all=True)
        if block_sizes and spec.kind in ("sliding", "chunked")
        else spec
        for spec in specs
    ]
    if not _is_uniform_type(kept):
        remedy = "cannot make one group of these layers: they have states, or no full attention; leave it out"
        raise SettingError("disable_hybrid_kv_cache_manager", True, remedy)
    _require_one_window(kept)
    return kept


def _require_one_window(specs: list[KvCacheSpec]) -> None:
    """Raise SettingError where layers of K and V that are kept whole have windows, or chunks, of several lengths."""
    if any(spec.kind == "mla" for spec in specs):
        return
    noted = {spec.layer.span for spec in specs if isinstance(spec.layer, AttentionLayer) and spec.keeps_all}
    if len(noted) > len({span.kind for span in noted}):
        remedy = "cannot make one group of windows of several lengths; leave it out"
        raise SettingError("disable_hybrid_kv_cache_manager", True, remedy)


def _group_size(counts: list[int]) -> int:
    """Layers of a group: those of the rarest kind, or of the commonest where these are fewer than 1.5 times as many."""
    fewest, most = min(counts), max(counts)
    return most if 2 * most < 3 * fewest else fewest


def _split(bucket: list[int], size: int) -> list[tuple[int, ...]]:
    """Groups of at most ``size`` layers of one kind, which take its layers in turns."""
    number = -(-len(bucket) // size)
    return [tuple(bucket[place::number]) for place in range(number)]
