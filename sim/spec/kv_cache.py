"""KV cache groups, block sizes and pages of any model, as vLLM 0.33 forms them when it starts.

One pool of equal blocks serves all layers. A *group* is a set of layers with one block table; a block belongs to one
group at a time and has a *page* for each of the group's layers. Blocks of all groups must have the same bytes, so all
pages get the same size and all groups about the same number of layers. Qwen3-Next, 36 gated delta nets and 12 full layers:

    layers in model order   D D D F  D D D F ...
    1. align                attention blocks grow from 16 to 544 tokens: a page >= a state (576 where kernels export states)
    2. unify                every page 1,114,112 bytes; a state's page ends in 16,384 bytes of padding
    3. group                12 layers per group: D.0  D.1  D.2  F
    4. size                 block = 12 pages; num_blocks = available bytes // bytes of a block, the null block included

vLLM's functions for these steps:

    1. ``Platform._align_hybrid_block_size``, and ``Attention.get_kv_cache_spec`` for the blocks of windows
    2. ``unify_kv_cache_spec_page_size``, or ``unify_hybrid_kv_cache_specs`` where the hybrid manager is disabled
    3. ``get_kv_cache_groups``, ``_get_kv_cache_groups_uniform_page_size``
    4. ``get_kv_cache_configs``, ``resolve_kv_cache_block_sizes``

The keys of an indexer (DeepSeek V3.2, GLM 5, MiniMax M3) are layers of their own, in one group with the latent vectors or with K and V;
these backends need blocks of a multiple of 64 tokens (MiniMax M3, GLM-5.3-Flash: 128), so that pages have no padding. Beside states
(GLM-5.3-Flash) they make pages of several sizes, which are not unified but packed (``packed_groups``), as are those of ``compressed``
attention (DeepSeek V4).

Not modelled: other backends that interleave the layers of a block ("packed" groups) or
prefer other blocks (give ``block_size``), quantized caches with unquantized layers, and cross attention. Layers of a drafter come after
those of the model. Ranks that divide the tokens of a sequence are in ``context_parallel``. Layers of encoder attention keep no KV cache: leave them out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from ..types.errors import SettingError
from .attention import FULL, Span
from .compressed import PAGE_ALIGNMENT
from .gpu import GIB
from .kv_layers import AttentionLayer, Layer, RingLayer, StateLayer, VectorLayer, require_positive
from .packed_groups import packed_groups

BLOCK_SIZE = 16
#: In models with states, FlashInfer's MLA kernels need blocks of a multiple of this number of tokens.
_MLA_ALIGNMENT_TOKENS = 128
#: Keys that the kernels of an indexer read at once, at the most.
_MOST_KERNEL_KEYS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """vLLM's settings that decide the layout of its KV cache, under vLLM's names where it has one.

    Attributes:
        max_model_len: The longest sequence, in tokens.
        max_num_batched_tokens: Maximum number of tokens in a step.
        block_size: Tokens per attention block, before it is raised for states; None is 16.
        enable_prefix_caching: Also sets ``mamba_cache_mode``.
        state_chunk_tokens: Of which blocks are a multiple where states at all ends of blocks are kept (``mamba_cache_mode`` all of 0.12 to 0.31); None
            keeps some.
        max_concurrent_batches: Steps in flight: 2 with async scheduling, 1 without; with pipeline stages the number
            of stages, one more with async scheduling.
        disable_hybrid_kv_cache_manager: Keep all tokens in layers with windows and chunks. vLLM sets it for models with
            chunks (Llama 4), and refuses it for models with states.
        num_gpu_blocks_override: Blocks of the pool, independent of the memory.
        num_speculative_blocks: States that a sequence keeps beside its own: one for each draft of a step.
        kernel_block_size: Blocks of windows, and blocks raised for states, are multiples of this number of tokens: 16
            for FlashAttention, FlashInfer and Triton.
    """

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int | None = None
    enable_prefix_caching: bool = True
    state_chunk_tokens: int | None = None
    max_concurrent_batches: int = 2
    disable_hybrid_kv_cache_manager: bool = False
    num_gpu_blocks_override: int | None = None
    num_speculative_blocks: int = 0
    kernel_block_size: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "max_model_len", "max_num_batched_tokens", "max_concurrent_batches")
        require_positive(self, "block_size", "num_gpu_blocks_override", "kernel_block_size")

    @property
    def max_in_flight_tokens(self) -> int:
        """Maximum of tokens scheduled and not yet computed. Windows and chunks free no blocks for these."""
        return self.max_concurrent_batches * self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """A layer's pages: vLLM's ``KVCacheSpec``.

    Attributes:
        layer: The layer.
        block_size: Tokens per block.
        page_size_padded: Bytes of a padded page; None without padding.
        keeps_all: Whether a layer with a window or chunk keeps all tokens: allocated like full attention, computed with
            its window or chunk.
    """

    layer: Layer
    block_size: int
    page_size_padded: int | None = None
    keeps_all: bool = False

    @property
    def kind(self) -> str:
        """One of "full", "sliding", "chunked", "mla", "state" and "ring"; "full" if all tokens are kept."""
        return "full" if self.keeps_all else self.layer.kind

    @property
    def span(self) -> Span:
        """The tokens that are kept; FULL for a state, which represents all tokens, and for a ring."""
        return self.layer.span if isinstance(self.layer, AttentionLayer | VectorLayer) and not self.keeps_all else FULL

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
        spec: Spec of the first layer. All layers have the same kind, span and block size. Page sizes may differ if the
            group is the only one, or groups are packed (vLLM's ``UniformTypeKVCacheSpecs``).
        layers: Indices of the layers, in order; empty on a pipeline stage without any of them.
        specs: Spec of each layer.
    """

    spec: KvCacheSpec
    layers: tuple[int, ...]
    specs: tuple[KvCacheSpec, ...]

    @property
    def kind(self) -> str:
        """Kind of its layers; "full" for a group with both latent vectors and K and V."""
        kinds = {spec.kind for spec in self.specs} or {self.spec.kind}
        return kinds.pop() if len(kinds) == 1 else "full"

    @property
    def span(self) -> Span:
        """The tokens that its layers keep."""
        return self.spec.span

    @property
    def block_size(self) -> int:
        """Tokens per block. For states: tokens between two states kept for prefix hits, or ``max_model_len``."""
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
        settings: Settings of the server.
        groups: In vLLM's order: kinds by their first layer. Groups of one kind take its layers in turns.
        block_size: Tokens per block of full attention before pages are unified: the setting, or raised for states.
        mamba_block_size: Tokens per block of states; None for a model without states.
        alignment_bytes: Blocks are a multiple of so many bytes: more than 1 where groups are packed.
    """

    settings: CacheSettings
    groups: tuple[KvCacheGroup, ...]
    block_size: int
    mamba_block_size: int | None = None
    alignment_bytes: int = 1

    @property
    def mamba_cache_mode(self) -> str:
        """States that are kept: "none", only the current one; "align", also some at the ends of blocks, for prefix hits.

        Follows ``enable_prefix_caching``. "all" is a mode of earlier releases, in which a sequence may need a state for each of its blocks.
        """
        if not self.settings.enable_prefix_caching or self.mamba_block_size is None:
            return "none"
        return "align" if self.settings.state_chunk_tokens is None else "all"

    @property
    def export_tokens(self) -> int:
        """See ``StateLayer``; 0 for a model without states."""
        layers = (spec.layer for group in self.groups for spec in group.specs)
        return max((layer.export_tokens for layer in layers if isinstance(layer, StateLayer)), default=0)

    @property
    def last_group(self) -> int:
        """The group of the last layer that look-ups ask for, which is a drafter's where there is one."""
        looked_up = [place for place, group in enumerate(self.groups) if group.kind != "ring"]
        return max(looked_up, key=lambda place: max(self.groups[place].layers))

    @property
    def exports_states(self) -> bool:
        """Whether prefills export states for prefix hits from within their last chunk."""
        return self.mamba_cache_mode == "align" and self.export_tokens > 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the pool: the bytes of the largest group, aligned; 0 for a model without a cache."""
        largest = max((group.page_size_bytes for group in self.groups), default=0)
        return -(-largest // self.alignment_bytes) * self.alignment_bytes

    def padding_bytes(self, group: KvCacheGroup) -> int:
        """Bytes of a block that a group cannot use: padding of its pages, and pages of missing layers."""
        return self.bytes_per_block - group.unpadded_page_size_bytes

    @property
    def scheduler_block_size(self) -> int:
        """Least common multiple of the block sizes of all groups, in tokens."""
        return lcm(*self._block_sizes)

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash of a request's contents, without ``prefix_match_unit``."""
        return gcd(*self._block_sizes) if self.settings.enable_prefix_caching else self.scheduler_block_size

    @property
    def _block_sizes(self) -> list[int]:
        # A ring is in no look-up, and its tokens divide those of the other blocks.
        return [group.block_size for group in self.groups if group.kind != "ring"] or [self.block_size]

    def sequence_blocks(self, tokens: int) -> int:
        """Maximum of blocks that a sequence of ``tokens`` takes, over all groups (vLLM's ``max_memory_usage_bytes``)."""
        return sum(self._group_blocks(group, tokens) for group in self.groups)

    def _group_blocks(self, group: KvCacheGroup, tokens: int) -> int:
        window, in_flight = group.span.tokens, self.settings.max_in_flight_tokens
        if group.kind == "state":
            if self.mamba_cache_mode == "all":
                return -(-tokens // group.block_size) + self.settings.num_speculative_blocks
            own = 2 + self.exports_states if self.mamba_cache_mode == "align" else 1
            return own + self.settings.num_speculative_blocks
        if group.kind == "ring":
            return 1
        if group.kind == "sliding":
            # The start of a window may lie within a block.
            return -(-min(window - 1 + in_flight, tokens) // group.block_size) + 1
        if group.kind == "chunked":
            return -(-min(window + in_flight, tokens) // group.block_size)
        return -(-tokens // group.block_size)

    def decode_blocks(self, tokens: int) -> int:
        """Most blocks that a sequence ever holds in a step that decodes, up to ``tokens`` computed tokens, over all groups.

        A step in which a state at the end of a block is kept holds that of the block before, too.
        """
        return sum(self._decode_blocks(group, tokens) for group in self.groups)

    def _decode_blocks(self, group: KvCacheGroup, tokens: int) -> int:
        if group.kind == "ring":
            return 1
        if group.kind == "state":
            return 1 + self._kept_before(group, tokens) + self.settings.num_speculative_blocks
        return window_blocks(tokens, group.span.tokens, group.block_size)

    def boundary_blocks(self, tokens: int) -> int:
        """Those of ``decode_blocks`` that are only held in a step in which a state at the end of a block is kept."""
        return sum(self._kept_before(group, tokens) for group in self.groups if group.kind == "state")

    def _kept_before(self, group: KvCacheGroup, tokens: int) -> int:
        """States of the block before, in the step that enters another one."""
        return int(self.mamba_cache_mode != "none" and tokens > group.block_size)

    def prompt_blocks(self, tokens: int) -> int:
        """Blocks that the admission of a prompt of ``tokens`` asks for, over all groups.

        Those of all its tokens that it may hold at once: in a window also the tokens of the steps in flight.
        """
        return sum(self._prompt_blocks(group, tokens) for group in self.groups)

    def _prompt_blocks(self, group: KvCacheGroup, tokens: int) -> int:
        if group.kind == "state":
            own = -(-tokens // group.block_size)
            if self.mamba_cache_mode != "all":
                own = min(1 + self.exports_states, own)
            return own + self.settings.num_speculative_blocks
        return min(self._group_blocks(group, self.settings.max_model_len), -(-tokens // group.block_size))

    def sequence_bytes(self, tokens: int) -> int:
        """Maximum of bytes of the pool that a sequence of ``tokens`` takes."""
        return self.sequence_blocks(tokens) * self.bytes_per_block

    def num_blocks(self, available_bytes: int) -> int:
        """Blocks of the pool, the null block included.

        Args:
            available_bytes: Memory for the KV cache on each rank. With pipeline stages, call this for ``on_stage`` of each
                stage and take the minimum.

        Raises:
            SettingError: One sequence of ``max_model_len`` and the null block do not fit.
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
        """The same groups with only the ``layers`` of a pipeline stage.

        vLLM forms the groups of the whole model first, so that all stages have the same block tables.
        """
        return replace(self, groups=tuple(_project(group, layers) for group in self.groups))


def window_blocks(tokens: int, window_tokens: int, block_size: int) -> int:
    """Most blocks that a group of layers ever keeps for a sequence that decodes, up to ``tokens`` computed tokens.

    Args:
        window_tokens: 0 keeps every token. A window may begin with the last token of a block.
    """
    kept = min(tokens, window_tokens + block_size - 2) if window_tokens else tokens
    return -(-kept // block_size)


def _project(group: KvCacheGroup, layers: Container[int]) -> KvCacheGroup:
    kept = [(layer, spec) for layer, spec in zip(group.layers, group.specs, strict=True) if layer in layers]
    return KvCacheGroup(group.spec, tuple(layer for layer, _ in kept), tuple(spec for _, spec in kept))


def form_kv_cache(layers: Sequence[Layer], settings: CacheSettings) -> KvCacheConfig:
    """Form the KV cache groups of a whole model, with their block and page sizes.

    Args:
        layers: The layers of all pipeline stages in model order, each as on one tensor-parallel rank.

    Raises:
        SettingError: vLLM would not start: pages of latent vectors cannot be unified, or
            ``disable_hybrid_kv_cache_manager`` is set and the layers cannot form one group.
    """
    blocks = _align(layers, settings)
    specs = [blocks.spec(layer) for layer in layers]
    if settings.disable_hybrid_kv_cache_manager:
        specs = _keep_all(specs)
    mamba_block_size = blocks.mamba_block_size if any(spec.kind == "state" for spec in specs) else None
    alignment = _alignment_bytes(specs) if _is_packed(specs) else 1
    return KvCacheConfig(settings, tuple(_groups(specs)), blocks.block_size, mamba_block_size, alignment)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Block sizes before pages are unified.

    Attributes:
        block_size, mamba_block_size: Tokens per block of attention and of states.
        mamba_page_bytes: Bytes that a state's page is padded to; None in a model without attention.
        kernel_block_size: See ``CacheSettings``.
    """

    block_size: int
    mamba_block_size: int
    mamba_page_bytes: int | None
    kernel_block_size: int

    def spec(self, layer: Layer) -> KvCacheSpec:
        """The pages of a layer."""
        if isinstance(layer, StateLayer):
            return KvCacheSpec(layer, self.mamba_block_size, self.mamba_page_bytes)
        if isinstance(layer, RingLayer):
            return KvCacheSpec(layer, layer.tokens)
        if isinstance(layer, VectorLayer):
            block_size = layer.cache.block_size
            return KvCacheSpec(layer, block_size, -(-layer.page_bytes(block_size) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT)
        if layer.kind == "sliding":
            # The largest multiple of the kernel block size up to the block size, and at least one.
            return KvCacheSpec(layer, max(self.kernel_block_size, _round_down(self.block_size, self.kernel_block_size)))
        return KvCacheSpec(layer, self.block_size)


def _align(layers: Sequence[Layer], settings: CacheSettings) -> _Blocks:
    """Raise the attention block size until a page is at least as large as a state.

    vLLM computes the bytes of a token from the model's configuration; here they are those of the first attention layer.
    """
    block_size, kernel = settings.block_size or BLOCK_SIZE, settings.kernel_block_size
    states = [layer for layer in layers if isinstance(layer, StateLayer)]
    state_bytes = max((layer.state_bytes for layer in states), default=0)
    first = next((layer for layer in layers if isinstance(layer, AttentionLayer)), None)
    padded = None
    if state_bytes and first:
        token_bytes = replace(first, head_size_v=None).page_bytes(1)
        step = max(kernel, block_size, _MLA_ALIGNMENT_TOKENS if first.latent else 0)
        if settings.enable_prefix_caching:
            # Exported states are those at ends of blocks.
            step = lcm(step, settings.state_chunk_tokens or 1, *(layer.export_tokens or 1 for layer in states))
        raised = step * -(-state_bytes // (step * token_bytes))
        block_size = max(block_size, _round_down(raised + kernel - 1, kernel))
        padded = block_size * token_bytes
    mamba_block_size = block_size if settings.enable_prefix_caching else settings.max_model_len
    return _Blocks(block_size, mamba_block_size, padded, kernel)


def _round_down(tokens: int, multiple: int) -> int:
    return tokens // multiple * multiple


def _groups(specs: list[KvCacheSpec]) -> list[KvCacheGroup]:
    """The groups of layers with these specs (vLLM's ``get_kv_cache_groups``)."""
    if not specs:
        return []
    everything = tuple(range(len(specs)))
    if _is_uniform_type(specs):
        return [_members(specs, everything)]
    if _is_packed(specs):
        kinds = [_uniform_type(spec) for spec in specs]
        fixed = [spec.kind in ("state", "ring") for spec in specs]
        packed = packed_groups(kinds, [spec.page_size_bytes for spec in specs], fixed)
        return [_members(specs, layers) for layers in packed]
    unified = _unify_pages(specs)
    if unified is None:
        return [_members(_keep_all(specs), everything)]
    buckets: dict[KvCacheSpec, list[int]] = {}
    for layer, spec in enumerate(unified):
        buckets.setdefault(spec, []).append(layer)
    size = _group_size([len(bucket) for bucket in buckets.values()])
    return [_members(unified, layers) for bucket in buckets.values() for layers in _split(bucket, size)]


def _alignment_bytes(specs: list[KvCacheSpec]) -> int:
    """Bytes of which packed blocks are a multiple (``get_block_stride_alignment``).

    Kernels read the latent vectors as rows. Those of the indexer read up to 64 keys at once, as many as divide a block; a block that they read at
    once has no alignment of its own (``KVCacheSpec.get_block_stride_alignment``).
    """
    ring = next((spec.layer for spec in specs if isinstance(spec.layer, RingLayer)), None)
    if ring is None:
        return 1
    row, key = sorted({spec.layer.page_bytes(1) for spec in specs if spec.kind == "mla"}, reverse=True)
    block_size = next(spec.block_size for spec in specs if spec.kind == "mla")
    read = gcd(_MOST_KERNEL_KEYS * ring.key_tokens, block_size)
    return row if read == block_size else lcm(row, key * read)


def _members(specs: list[KvCacheSpec], layers: tuple[int, ...]) -> KvCacheGroup:
    return KvCacheGroup(specs[layers[0]], layers, tuple(specs[layer] for layer in layers))


def _is_uniform_type(specs: list[KvCacheSpec]) -> bool:
    """Whether all layers have the same block size and span, so that they form one group; page sizes may differ.

    States are equal if their pages have the same size. Latent vectors are equal to K and V of all tokens.
    """
    return len({_uniform_type(spec) for spec in specs}) == 1


def _uniform_type(spec: KvCacheSpec) -> tuple[object, ...]:
    return spec.block_size, spec.span, spec.kind in ("state", "ring") and spec.page_size_bytes


def _is_packed(specs: list[KvCacheSpec]) -> bool:
    """Whether pages of several sizes are packed: those of sparse latent attention beside states, or of compressed attention."""
    return {"state", "ring"} <= {spec.kind for spec in specs} or any(
        isinstance(spec.layer, VectorLayer) for spec in specs
    )


def _unify_pages(specs: list[KvCacheSpec]) -> list[KvCacheSpec] | None:
    """Make every page as large as the largest.

    If the largest page is a multiple of a page, its blocks get more tokens; otherwise it is padded. States are always
    padded. Latent vectors cannot be padded: None if layers with windows must keep all tokens instead.
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
    """Keep all tokens in layers with windows and chunks, in blocks of the full layers, so that all form one group."""
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
    """Raise SettingError if layers that keep all tokens have windows, or chunks, of several lengths; not with MLA."""
    if any(spec.kind == "mla" for spec in specs):
        return
    noted = {spec.layer.span for spec in specs if isinstance(spec.layer, AttentionLayer) and spec.keeps_all}
    if len(noted) > len({span.kind for span in noted}):
        remedy = "cannot make one group of windows of several lengths; leave it out"
        raise SettingError("disable_hybrid_kv_cache_manager", True, remedy)


def _group_size(counts: list[int]) -> int:
    """Layers per group: the count of the rarest kind, or of the most common kind if that is less than 1.5 times as high."""
    fewest, most = min(counts), max(counts)
    return most if 2 * most < 3 * fewest else fewest


def _split(bucket: list[int], size: int) -> list[tuple[int, ...]]:
    """Groups of at most ``size`` layers of one kind; they take its layers in turns."""
    number = -(-len(bucket) // size)
    return [tuple(bucket[place::number]) for place in range(number)]
