"""What the layers of a model keep; knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """What one layer keeps, on one rank.

    Attributes:
        kind: "full", "sliding", "chunked", "mla" or "state"; of sparse attention beside states "rows" for the latent vector, "key" for
            the keys of the indexer, and "ring" for its buffer; of compressed attention "window", "vectors", "keys", and "inputs" of a
            compressor.
        tokens: Of the window or chunk, of a key or vector, of the ring, or of the vector that inputs make; 0 for other kinds.
        kv_heads, head_size: Of K and V; of ``mla`` the width of the latent vector with its rotary key, one head; of ``key`` and ``keys`` the
            bytes of a key, of ``ring`` the width of two, and of ``inputs`` the width of the vector that they make.
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


def compressed_layers(ratios: list[int], window: int = 128, key_bytes: int = 132) -> tuple[Layer, ...]:
    """The caches of DeepSeek V4 with such ratios of compression, in the order in which ``DeepseekV4Attention`` registers them."""
    found: list[Layer] = []
    for ratio in ratios:
        if ratio == 4:
            found += [Layer("keys", ratio, head_size=key_bytes), Layer("inputs", ratio, head_size=128)]
        found.append(Layer("window", window))
        if ratio:
            found += [Layer("vectors", ratio), Layer("inputs", ratio, head_size=512)]
    return tuple(found)


def drafter_layers(layers: Iterable[Layer], method: str) -> tuple[Layer, ...]:
    """What a drafter keeps: EAGLE's and MTP's layer is like one of the target; a draft model has its own."""
    if method == "ngram":
        return ()
    if method == "draft_model":
        return (Layer(),)
    alike = {layer.kind: layer for layer in layers}
    if "ring" in alike:
        return alike["rows"], alike["key"], alike["ring"]
    return (alike.get("full") or alike.get("window") or Layer(),)
