"""What the layers of a model keep; knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """What one layer keeps, on one rank.

    Attributes:
        kind: "full", "sliding", "chunked", "mla" or "state"; of sparse attention beside states "rows" for the latent vector, "key" for
            the keys of the indexer, and "ring" for its buffer.
        tokens: Of the window or chunk, of a key, or of the buffer; 0 for other kinds.
        kv_heads, head_size: Of K and V; of ``mla`` the width of the latent vector with its rotary key, one head; of ``key`` the bytes of
            a key, and of ``ring`` the width of two.
        state_shapes, state_dtypes: Tensors of a fixed-size state (Mamba, gated delta net).
        dtype: Of K and V, or of the latent vector.
        export_tokens: Alignment of states that a prefill exports: 0 for none, 1 of Mamba-2, 64 of gated delta nets.
    """

    kind: str = "full"
    tokens: int = 0
    kv_heads: int = 2
    head_size: int = 16
    state_shapes: tuple[tuple[int, ...], ...] = ()
    state_dtypes: tuple[str, ...] = ()
    dtype: str = "float16"
    export_tokens: int = 0
