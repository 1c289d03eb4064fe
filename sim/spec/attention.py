"""What attention keeps of a sequence, and what its kernels move: one class for each kind.

Two questions are independent of each other. *What* a layer keeps of one token: K and V of every KV
head (multi-head, grouped-query, multi-query), or one latent vector for all heads (MLA). *Of which
tokens* it keeps that: of all, of the last ones (a sliding window), or of those in the chunk that is
being written (Llama 4). Layers that agree on the second are one KV group:

    full       |xxxxxxxxxxxxxxxxxxxxxx>      n
    sliding    |           xxxxxxxxxxx>      min(n, window)
    chunked    |       :       :  xxxx>      (n - 1) mod chunk + 1: empties at every chunk's end
    state      |                      S>      0: one state of fixed size (``states.py``), however many tokens
    none       |                       >      0: an MLP and nothing else

Heads are divided among tensor-parallel ranks, a latent vector is not: every rank holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .matrix import Matrix


@dataclass(frozen=True, slots=True)
class Span:
    """Of which tokens of a sequence a layer keeps what it keeps.

    Attributes:
        kind: "full", "sliding" or "chunked" of attention, "state" of a layer with a state of fixed size, "none".
        tokens: Length of the window or chunk; 0 in all others.
    """

    kind: str = "full"
    tokens: int = 0

    @property
    def keeps_tokens(self) -> bool:
        """Whether the layer is attention."""
        return self.kind not in ("state", "none")

    def held_tokens(self, tokens: int) -> int:
        """Tokens that the newest of ``tokens`` attends to, itself included: those that are kept."""
        if self.kind == "sliding":
            return min(tokens, self.tokens)
        if self.kind == "chunked" and tokens:
            return (tokens - 1) % self.tokens + 1
        return tokens if self.keeps_tokens else 0


FULL, STATE, NONE = Span(), Span("state"), Span("none")


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that keep the same tokens of a sequence; each group has a ledger of its own.

    Attributes:
        span: Which tokens these are.
        layers: Numbers of the layers, from 0.
    """

    span: Span
    layers: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


class HeadAttention(NamedTuple):
    """Multi-head, grouped-query or multi-query attention of one layer, as one rank computes it.

    Attributes:
        gated: The query projection makes a gate of the output, too.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False

    @property
    def _gate(self) -> int:
        return self.gated * self.heads * self.head_dim

    @property
    def kv_tensors(self) -> int:
        """Tensors that are copied one by one: K and V."""
        return 2

    @property
    def slot_elements(self) -> int:
        """Elements kept of one token: K and V of the rank's KV heads."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Q, K, V and the output projection."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Matrix(self.hidden_size, query + self._gate),
            Matrix(self.hidden_size, kv, copies=2),
            Matrix(query, self.hidden_size),
        )

    @property
    def projected(self) -> int:
        """Elements that the projections make of one token."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim + self._gate

    @property
    def gemm_elements(self) -> int:
        """Elements of one token that the GEMMs read and write, hidden states aside: Q, K, V, the output."""
        return 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim + self._gate

    @property
    def decode_elements(self) -> int:
        """Elements that a decoding token's attention reads and writes beside K and V: query and output."""
        return 2 * self.heads * self.head_dim

    @property
    def decode_flops(self) -> int:
        """Flops of one new token for each token that it attends to."""
        return 4 * self.heads * self.head_dim

    @property
    def prefill_flops(self) -> int:
        """Flops of one (query, key) pair of a prompt."""
        return 4 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as ``config.json`` gives it.

    Attributes:
        kv_rank: Width of the latent vector that K and V of all heads come from.
        rope_dim: Width of the one rotary key that all heads share; kept beside the latent vector.
        nope_dim, v_dim: Width of a head's K without rotary part, and of its V.
        q_rank: Width of the latent vector that queries come from; 0 where they are projected directly.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int = 0


class LatentAttention(NamedTuple):
    """Multi-head latent attention of one layer, as one rank computes it.

    Prompts are expanded to full heads; decodes work on the latent vectors with the expansion absorbed
    into queries and output, as vLLM's MLA backends do.
    """

    hidden_size: int
    heads: int
    latent: Latent

    @property
    def kv_tensors(self) -> int:
        """See ``HeadAttention``; here K and V are one."""
        return 1

    @property
    def slot_elements(self) -> int:
        """Elements kept of one token, on every rank: the latent vector and the rotary key."""
        return self.latent.kv_rank + self.latent.rope_dim

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Query (through its latent vector, if any), the way down to the latent vector, up again, output."""
        shape, heads = self.latent, self.heads
        query = heads * (shape.nope_dim + shape.rope_dim)
        queries = [Matrix(self.hidden_size, query)]
        if shape.q_rank:
            queries = [Matrix(self.hidden_size, shape.q_rank), Matrix(shape.q_rank, query)]
        return (
            *queries,
            Matrix(self.hidden_size, self.slot_elements),
            Matrix(shape.kv_rank, heads * (shape.nope_dim + shape.v_dim)),
            Matrix(heads * shape.v_dim, self.hidden_size),
        )

    @property
    def projected(self) -> int:
        """Elements that the projections make of one token."""
        shape = self.latent
        expanded = self.heads * (2 * shape.nope_dim + shape.rope_dim + shape.v_dim)
        return shape.q_rank + self.slot_elements + expanded

    @property
    def gemm_elements(self) -> int:
        """Elements of one token that the GEMMs read and write, hidden states aside."""
        shape = self.latent
        heads = self.heads * (shape.nope_dim + shape.rope_dim + shape.v_dim)
        return 2 * shape.q_rank + self.slot_elements + heads

    @property
    def decode_elements(self) -> int:
        """Elements that a decoding token's attention reads and writes: absorbed query and output."""
        return self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)

    @property
    def decode_flops(self) -> int:
        """Flops of one new token for each token that it attends to, on latent vectors."""
        return 2 * self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)

    @property
    def prefill_flops(self) -> int:
        """Flops of one (query, key) pair of a prompt, on expanded heads."""
        shape = self.latent
        return 2 * self.heads * (shape.nope_dim + shape.rope_dim + shape.v_dim)
