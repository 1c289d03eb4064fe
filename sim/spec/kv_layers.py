"""What the layers of a model keep on one tensor-parallel rank: the layers that ``kv_cache`` forms groups of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..types.errors import NotSimulated, SettingError
from .attention import FP8_DS_MLA, FP8_DS_MLA_BYTES, FULL, NONE, Span
from .compressed import Cache
from .deployment import dtype_bits, stored_bytes
from .shape import ModelSpec, refuse_states


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """KV cache of one attention layer on one tensor-parallel rank.

    Attributes:
        num_kv_heads: KV heads on the rank; 1 for a latent vector.
        head_size: Elements of K per head; for a latent vector all elements, including the rotary key.
        span: The tokens that are kept.
        head_size_v: Elements of V per head; None is ``head_size``.
        dtype: Number format of the cache.
        latent: Whether the layer keeps one latent vector (MLA) instead of K and V.
    """

    num_kv_heads: int
    head_size: int
    span: Span = FULL
    head_size_v: int | None = None
    dtype: str = "fp16"
    latent: bool = False

    def __post_init__(self) -> None:
        dtype_bits(self.dtype)
        if self.head_size_v == self.head_size:
            # So that equal layers are, as vLLM's specs.
            object.__setattr__(self, "head_size_v", None)
        if self.latent and self.span != FULL:
            raise NotSimulated("span", self.span.kind, "is not simulated for latent vectors", "they keep every token")
        require_positive(self, "num_kv_heads", "head_size")
        if self.span != FULL and self.span.tokens < 1:
            raise SettingError("span", self.span.tokens, "must be at least 1 token")

    @property
    def kind(self) -> str:
        """One of "full", "sliding", "chunked" and "mla"."""
        return "mla" if self.latent else self.span.kind

    def page_bytes(self, block_size: int) -> int:
        """Bytes of ``block_size`` tokens (``real_page_size_bytes`` of vLLM's ``AttentionSpec``)."""
        if self.dtype == FP8_DS_MLA:
            return block_size * FP8_DS_MLA_BYTES
        value = 0 if self.latent else self.head_size if self.head_size_v is None else self.head_size_v
        return stored_bytes(block_size * self.num_kv_heads * (self.head_size + value), self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """State of one layer with a fixed-size state, for one sequence of any length, on one tensor-parallel rank.

    Mamba 1 and 2, gated delta net, KDA, linear attention and short convolutions keep the last inputs of a convolution,
    a recurrent state, or both. The shapes are in vLLM's ``mamba_utils.py`` (``MambaStateShapeCalculator``).

    Attributes:
        shapes: Shapes of the tensors.
        dtypes: Number format of each tensor.
        export_tokens: Tokens of which blocks are a multiple so that a prefill's kernel exports states from within its chunk; 0
            if it exports none (``StateMixer.export_tokens``).
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    export_tokens: int = 0

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
        """Bytes of one state, independent of the block size."""
        return self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayer:
    """Buffer of an indexer of which a key is of several tokens: what the tokens without a key have, in 16 bits.

    A sequence has one, of ``tokens`` tokens, from its first chunk on (``Glm5NextTailCache`` of vLLM).

    Attributes:
        key_tokens: Tokens of a key.
        width: Elements of a token: its key and its gates.
        drafts: Drafts of a step, which are written before it is known whether they are accepted.
    """

    key_tokens: int
    width: int
    drafts: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that it has room for: keys of tokens and drafts, their number raised to a power of two."""
        keys = -(-(self.key_tokens + self.drafts) // self.key_tokens)
        return self.key_tokens << (keys - 1).bit_length()

    @property
    def kind(self) -> str:
        """Always "ring"."""
        return "ring"

    def page_bytes(self, block_size: int) -> int:
        """Bytes of the buffer, independent of the block size."""
        return 2 * self.tokens * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorLayer:
    """A cache of a layer of compressed attention, in blocks of a size of its own (``compressed``).

    Attributes:
        cache: What it keeps.
    """

    cache: Cache

    @property
    def kind(self) -> str:
        """ "mla" where all vectors are kept, else "sliding"."""
        return "mla" if self.span == FULL else self.span.kind

    @property
    def span(self) -> Span:
        """The tokens that are kept."""
        return self.cache.span

    def page_bytes(self, block_size: int) -> int:
        """Bytes of the vectors of ``block_size`` tokens, without padding."""
        return block_size // self.cache.tokens * self.cache.vector_bytes


Layer = AttentionLayer | StateLayer | RingLayer | VectorLayer


def attention_layers(model: ModelSpec, kv_dtype: str = "fp16", tensor_parallel: int = 1) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model, on one of ``tensor_parallel`` ranks; the keys of an indexer follow those of its layer.

    Raises:
        SettingError: The ranks cannot divide the heads, the dtype is unknown, or some layers keep a state of fixed size.
    """
    refuse_states(model, "not all of its layers are attention")
    layers = model.attention_layers
    return tuple(kept for layer in layers for kept in _kept_by(model, layer, kv_dtype, tensor_parallel))


def owners(model: ModelSpec) -> tuple[int, ...]:
    """For each of ``cache_layers`` the layer of the model."""
    found: list[int] = []
    for layer in range(model.num_layers):
        if model.compressed:
            found += [layer] * len(model.compressed.caches(layer))
        elif model.span(layer) != NONE:
            indexer = model.indexer if model.indexer and layer in model.indexer.layers else None
            found += [layer] * (1 + (indexer is not None) + (indexer is not None and indexer.pool_tokens > 1))
    return tuple(found)


def _kept_by(model: ModelSpec, layer: int, kv_dtype: str, tensor_parallel: int) -> tuple[AttentionLayer, ...]:
    if model.latent:
        width = model.latent.kv_rank + model.latent.rope_dim
        kept = AttentionLayer(num_kv_heads=1, head_size=width, dtype=kv_dtype, latent=True)
    else:
        span = model.span(layer)
        heads = model.heads(span)
        kept = AttentionLayer(
            num_kv_heads=model.kv_heads_per_rank(tensor_parallel, span),
            head_size=heads.head_dim,
            span=span,
            head_size_v=heads.v_dim or None,
            dtype=kv_dtype,
        )
    if model.indexer is None or layer not in model.indexer.layers:
        return (kept,)
    # A key is one vector, as latent vectors are; its bytes do not depend on the format of the KV cache.
    return kept, AttentionLayer(num_kv_heads=1, head_size=model.indexer.slot_bytes, dtype="fp8", latent=True)


def cache_layers(
    model: ModelSpec,
    kv_dtype: str = "fp16",
    tensor_parallel: int = 1,
    dtype: str = "fp16",
    export_tokens: int = 0,
    drafts: int = 0,
) -> tuple[Layer, ...]:
    """The layers of a model with a KV cache or a state, in model order, on one of ``tensor_parallel`` ranks.

    Groups formed of them refer to layers by index in this tuple, not in the model: Nemotron-H also has layers with only
    an MLP.

    Args:
        dtype: Number format of the model and its states; the KV cache may have another.
        export_tokens: See ``StateLayer``.
        drafts: Drafts that a step verifies of a sequence.

    Raises:
        SettingError: The ranks cannot divide the heads of attention or state, or a dtype is unknown.
    """
    if model.compressed:
        model.heads_per_rank(tensor_parallel)
        caches = (cache for layer in range(model.num_layers) for cache in model.compressed.caches(layer))
        return tuple(VectorLayer(cache=cache) for cache in caches)
    mixer = model.state_mixer(tensor_parallel)
    state = None
    if mixer is not None:
        shapes, dtypes = mixer.state_shapes(tensor_parallel, drafts), mixer.state_dtypes(dtype)
        state = StateLayer(shapes=shapes, dtypes=dtypes, export_tokens=export_tokens)
    found: list[Layer] = []
    for layer in range(model.num_layers):
        if model.span(layer).keeps_tokens:
            found += _kept_by(model, layer, kv_dtype, tensor_parallel)
            indexer = model.indexer
            if indexer and layer in indexer.layers and indexer.pool_tokens > 1:
                found.append(RingLayer(key_tokens=indexer.pool_tokens, width=2 * indexer.head_dim, drafts=drafts))
        elif state is not None and model.span(layer).kind == "state":
            found.append(state)
    return tuple(found)


def require_positive(settings: object, *names: str) -> None:
    """Raise ``SettingError`` for the first of the named settings that is a number below 1; None means that it is not given."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise SettingError(name, value, "must be at least 1")
