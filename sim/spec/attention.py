"""KV cache contents and kernel traffic of attention: one class for each kind of attention.

A layer has two independent properties. The *content* kept for one token: K and V of every KV head
(multi-head, grouped-query, multi-query), or one latent vector for all heads (MLA). The *span* of tokens
kept: all tokens, the last tokens (a sliding window), or the tokens of the current chunk (Llama 4).
Layers with the same span form one KV group. Tokens kept of a sequence of n tokens:

    full       |xxxxxxxxxxxxxxxxxxxxxx>      n
    sliding    |           xxxxxxxxxxx>      min(n, window)
    chunked    |       :       :  xxxx>      (n - 1) mod chunk + 1: empties at every chunk's end
    state      |                      S>      0: one state of fixed size (``states.py``) for any number of tokens
    ring       |                      R>      0: a buffer of a few tokens, overwritten in turn
    none       |                       >      0: a layer with only an MLP

Tensor-parallel ranks divide the heads. Every rank holds the whole latent vector.

Sparse attention (DeepSeek V3.2, GLM 5) attends to at most ``top_k`` tokens, all of which are kept. An indexer scores the tokens of
the context and chooses these; it has a cache of its own, one fp8 key a token with an fp32 scale. MiniMax M3 has it beside K and V: one
16-bit key a token, and the indexer chooses whole blocks. GLM-5.3-Flash keeps one key for every 4 tokens, and beside it the keys and
gates of the tokens that have none yet, in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .deployment import stored_bytes
from .matrix import Matrix

#: The KV cache format of vLLM's FlashMLA kernels for sparse attention: 512 bytes of fp8, 16 of scales and 64 rotary elements in 16 bits.
FP8_DS_MLA, FP8_DS_MLA_BYTES = "fp8_ds_mla", 656
#: Elements of an indexer's key with one scale, and bytes of a scale.
_INDEX_GROUP, _INDEX_SCALE_BYTES = 128, 4
#: Keys in a block of the kernels of an indexer that chooses tokens (``DeepseekV32IndexerBackend``), the least where a key is of
#: several tokens (``Glm5NextIndexerBackend``, but on compute capability 12), and bytes of a score.
_INDEX_KERNEL_KEYS, _POOLED_KERNEL_KEYS, _SCORE_BYTES = 64, 32, 4


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a sequence that a layer keeps.

    Attributes:
        kind: "full", "sliding" or "chunked" for attention, "state" for a layer with a state of fixed size, "ring" for the buffer of an
            indexer, or "none".
        tokens: Length of the window or chunk; 0 for other kinds.
    """

    kind: str = "full"
    tokens: int = 0

    @property
    def keeps_tokens(self) -> bool:
        """Whether the layer is attention."""
        return self.kind not in ("state", "ring", "none")

    def held_tokens(self, tokens: int) -> int:
        """Tokens kept of a sequence of ``tokens``: the tokens that its newest token attends to, itself included."""
        if self.kind == "sliding":
            return min(tokens, self.tokens)
        if self.kind == "chunked" and tokens:
            return (tokens - 1) % self.tokens + 1
        return tokens if self.keeps_tokens else 0


FULL, STATE, NONE = Span(), Span("state"), Span("none")


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with the same span. Each group has its own ledger.

    Attributes:
        span: The tokens that the layers keep.
        layers: Indices of the layers, from 0.
    """

    span: Span
    layers: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of attention: of queries, and of K and V; ``v_dim`` is the width of V where it is not that of K, else 0."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int = 0


class HeadAttention(NamedTuple):
    """Multi-head, grouped-query or multi-query attention of one layer, as one rank computes it.

    Attributes:
        gated: Whether the query projection also computes a gate for the output.
        v_dim: Width of a head of V.
        input_size: Width of the input of Q, K and V; 0 is ``hidden_size``.
        head_gates: Whether a projection computes a gate for the output of each head.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    v_dim: int
    input_size: int = 0
    head_gates: bool = False

    @property
    def _gate(self) -> int:
        return self.gated * self.heads * self.head_dim

    @property
    def kv_tensors(self) -> int:
        """Tensors per block that are copied separately: K and V."""
        return 2

    @property
    def slot_elements(self) -> int:
        """Elements kept per token: K and V of the rank's KV heads."""
        return self.kv_heads * (self.head_dim + self.v_dim)

    def slot_bytes(self, layers: int, dtype: str) -> int:
        """Bytes kept per token in ``layers`` layers."""
        return stored_bytes(layers * self.slot_elements, dtype)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Q, K, V and the output projection; K and V are one entry if they have the same width."""
        query, key, value = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.v_dim
        kept = [(key, 2)] if key == value else [(key, 1), (value, 1)]
        inputs = self.input_size or self.hidden_size
        return (
            Matrix(inputs, query + self._gate, part="mixer"),
            *(Matrix(inputs, width, copies=copies, part="mixer") for width, copies in kept),
            Matrix(self.heads * self.v_dim, self.hidden_size, part="mixer"),
            *((Matrix(self.hidden_size, self.heads, part="mixer"),) if self.head_gates else ()),
        )

    @property
    def projected(self) -> int:
        """Elements that the projections compute per token."""
        return self.heads * (self.head_dim + self.head_gates) + self.slot_elements + self._gate

    @property
    def gemm_elements(self) -> int:
        """Elements that the GEMMs read and write per token, without hidden states: Q, K, V and the output."""
        return self.projected + self.heads * self.v_dim

    @property
    def decode_elements(self) -> int:
        """Elements besides K and V that the attention of one decoding token reads and writes: query and output."""
        return self.heads * (self.head_dim + self.v_dim)

    @property
    def decode_flops(self) -> int:
        """Flops of a decoding token per token that it attends to."""
        return 2 * self.heads * (self.head_dim + self.v_dim)

    @property
    def prefill_flops(self) -> int:
        """Flops of one (query, key) pair of a prompt."""
        return self.decode_flops


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with the widths of ``config.json``.

    Attributes:
        kv_rank: Width of the latent vector from which K and V of all heads are computed.
        rope_dim: Width of the rotary key that all heads share; cached together with the latent vector.
        nope_dim, v_dim: Width of K of a head without its rotary part, and of V.
        q_rank: Width of the latent vector from which queries are computed; 0 if they are projected directly.
        gated: Whether a projection of the hidden state computes a gate for the output, as wide as V of all heads (Kimi K3).
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int = 0
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer that chooses tokens (DeepSeek-V3.2, arXiv 2512.02556; ``Indexer`` in vLLM's ``deepseek_v2.py``) or blocks (MiniMax M3;
    ``vllm/models/minimax_m3``).

    One that chooses tokens is held whole by every rank. Of one that chooses blocks ranks divide the query heads, as they divide the KV
    heads: each KV head has blocks of its own choice.

    Attributes:
        heads, head_dim: Number and width of its query heads. There is one key a token.
        top_k: Tokens that attention reads of each sequence, at most.
        layers: Layers with an indexer. Of latent attention the other layers attend to the tokens that the last indexer before them has
            chosen, else to all tokens.
        fp8_on_b200: Whether vLLM's KV cache is fp8 by default on B200 and B300 (GLM).
        block_tokens: Tokens of the blocks that are chosen; 0 chooses single tokens.
        pool_tokens: Tokens of a key: its mean by gates (GLM-5.3-Flash). A ring then keeps the keys and gates of as many tokens.
    """

    heads: int
    head_dim: int
    top_k: int
    layers: tuple[int, ...]
    fp8_on_b200: bool = False
    block_tokens: int = 0
    pool_tokens: int = 1

    @property
    def slot_bytes(self) -> int:
        """Bytes kept per token in each of the layers: the key in fp8 and its scales, or in 16 bits where blocks are chosen."""
        if self.block_tokens:
            return 2 * self.head_dim
        return (self.head_dim + self.head_dim // _INDEX_GROUP * _INDEX_SCALE_BYTES) // self.pool_tokens

    @property
    def kernel_block_size(self) -> int:
        """Blocks of the KV cache are multiples of this number of tokens (``get_supported_kernel_block_sizes`` of vLLM's backends)."""
        if self.pool_tokens > 1:
            return _POOLED_KERNEL_KEYS * self.pool_tokens
        return self.block_tokens or _INDEX_KERNEL_KEYS

    def heads_on_rank(self, ranks: int = 1) -> int:
        """Query heads on each rank."""
        return max(1, self.heads // ranks) if self.block_tokens else self.heads

    def matrices(self, hidden_size: int, q_rank: int, ranks: int = 1) -> tuple[Matrix, ...]:
        """Queries, from the latent vector of queries; key and weights of the heads, which vLLM loads in 16 bits. Where blocks are chosen,
        queries and key are of the hidden state, and multiplied with those of attention."""
        if self.block_tokens:
            width = self.heads_on_rank(ranks) * self.head_dim
            return tuple(Matrix(hidden_size, each, part="mixer") for each in (width, self.head_dim))
        return (
            Matrix(q_rank, self.heads * self.head_dim, part="mixer"),
            Matrix(hidden_size, self.head_dim + self.heads, part="indexer"),
            *((Matrix(hidden_size, self.head_dim, part="indexer"),) if self.pool_tokens > 1 else ()),
        )

    def gemm_elements(self, ranks: int = 1) -> int:
        """Elements that the GEMMs read and write per token, without hidden states."""
        gates = self.head_dim if self.pool_tokens > 1 else 0
        return (self.heads_on_rank(ranks) + 1) * self.head_dim + (0 if self.block_tokens else self.heads) + gates

    def flops(self, ranks: int = 1) -> int:
        """Flops of one (query, key) pair, in fp8 where single tokens are chosen."""
        return 2 * self.heads_on_rank(ranks) * self.head_dim // self.pool_tokens

    def score_bytes(self, ranks: int = 1) -> float:
        """Bytes of a token's score, written and read: one for all heads, or of each head one for a block."""
        scores = self.heads_on_rank(ranks) / self.block_tokens if self.block_tokens else 1 / self.pool_tokens
        return 2 * _SCORE_BYTES * scores


class LatentAttention(NamedTuple):
    """Multi-head latent attention of one layer, as one rank computes it.

    Prefills expand the latent vectors to full heads. Decodes read the latent vectors directly, with the
    expansion absorbed into queries and output, as in vLLM's MLA backends.
    """

    hidden_size: int
    heads: int
    latent: Latent

    @property
    def kv_tensors(self) -> int:
        """See ``HeadAttention``; K and V are one tensor."""
        return 1

    @property
    def slot_elements(self) -> int:
        """Elements kept per token, on every rank: the latent vector and the rotary key."""
        return self.latent.kv_rank + self.latent.rope_dim

    def slot_bytes(self, layers: int, dtype: str) -> int:
        """Bytes kept per token in ``layers`` layers, without the keys of indexers."""
        if dtype == FP8_DS_MLA:
            return layers * FP8_DS_MLA_BYTES
        return stored_bytes(layers * self.slot_elements, dtype)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Query projection (through its latent vector, if any), down projection, up projection, output projection."""
        shape, heads = self.latent, self.heads
        query = heads * (shape.nope_dim + shape.rope_dim)
        sizes = [(self.hidden_size, query)]
        if shape.q_rank:
            sizes = [(self.hidden_size, shape.q_rank), (shape.q_rank, query)]
        sizes += [
            (self.hidden_size, self.slot_elements),
            (shape.kv_rank, heads * (shape.nope_dim + shape.v_dim)),
            (heads * shape.v_dim, self.hidden_size),
        ]
        if shape.gated:
            sizes.append((self.hidden_size, heads * shape.v_dim))
        return tuple(Matrix(inputs, outputs, part="mixer") for inputs, outputs in sizes)

    @property
    def projected(self) -> int:
        """Elements that the projections compute per token."""
        shape = self.latent
        expanded = self.heads * (2 * shape.nope_dim + shape.rope_dim + (1 + shape.gated) * shape.v_dim)
        return shape.q_rank + self.slot_elements + expanded

    @property
    def gemm_elements(self) -> int:
        """Elements that the GEMMs read and write per token, without hidden states."""
        shape = self.latent
        heads = self.heads * (shape.nope_dim + shape.rope_dim + (1 + shape.gated) * shape.v_dim)
        return 2 * shape.q_rank + self.slot_elements + heads

    @property
    def decode_elements(self) -> int:
        """Elements that the attention of one decoding token reads and writes: absorbed query and output."""
        return self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)

    @property
    def decode_flops(self) -> int:
        """Flops of a decoding token per token that it attends to, on latent vectors."""
        return 2 * self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)

    @property
    def prefill_flops(self) -> int:
        """Flops of one (query, key) pair of a prompt, on expanded heads."""
        shape = self.latent
        return 2 * self.heads * (shape.nope_dim + shape.rope_dim + shape.v_dim)
