"""The work of one call of an operation: flops, bytes and pieces.

A function of an operation (``gemm``, ``decode_attention``, ...) computes these from the sizes of a call, so a model fitted on some shapes
predicts others. Arguments may be arrays. Elements have two bytes unless stated otherwise. Attention with its projections, as tables of whole
layers have it, is in ``layer_work``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

ELEMENT_BYTES = 2
#: Of an element with its part of the scale of 16 elements.
NVFP4_BYTES = 4.5 / 8

Amount = int | float | np.ndarray


class Work(NamedTuple):
    """The work of one call.

    Attributes:
        flops, bytes: Multiplications and additions, and bytes moved.
        pieces: Blocks, copies or rows that each add a fixed time.
        at: Position of the call on the axes of the residuals.
    """

    flops: Amount = 0
    bytes: Amount = 0
    pieces: Amount = 0
    at: Mapping[str, Amount] = {}


def gemm(m: Amount, n: int, k: int, weight_bytes: float | None = None, element_bytes: float = ELEMENT_BYTES) -> Work:
    """``m`` rows of ``k`` elements by a matrix of ``k`` x ``n``, of ``weight_bytes``, or ``element_bytes`` an element."""
    weights = n * k * element_bytes if weight_bytes is None else weight_bytes
    return Work(2 * m * n * k, weights + m * (n + k) * ELEMENT_BYTES, at={"m": m, "n": n, "k": k})


def moe(
    tokens: Amount,
    used: int,
    count: int,
    held: int,
    hidden_size: int,
    width: int,
    element_bytes: float = ELEMENT_BYTES,
    matrices: int = 3,
) -> Work:
    """The experts of ONE layer on one GPU, in one call: ``held`` of ``count`` experts, ``matrices`` of ``hidden_size`` x
    ``width`` each, for ``tokens`` tokens that go to ``used`` experts each, evenly and by themselves.

    Experts that no token reaches are not read. Residuals go by the rows of an expert that is reached (``rows``), the number
    of these experts (``reached``), and the two sizes (``width``, ``hidden``).
    """
    share = used / count
    reached = held * (1 - (1 - share) ** np.asarray(tokens, float))
    rows = tokens * share * held
    weights = reached * matrices * hidden_size * width * element_bytes
    moved = rows * (2 * hidden_size + matrices * width) * ELEMENT_BYTES
    at: dict[str, Amount] = {
        "rows": rows / reached,
        "reached": np.maximum(reached, 1),
        "width": width,
        "hidden": hidden_size,
    }
    return Work(2 * rows * matrices * hidden_size * width, weights + moved, at=at)


def experts_name(count: int, used: int, hidden_size: int, intermediate_size: int) -> str:
    """Name of a model's experts: kernels of experts are tuned shape by shape, so that a table has a model for each."""
    return f"{count}x{used}x{hidden_size}x{intermediate_size}"


def decode_attention(
    batch: int,
    context_tokens: Amount,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    kv_element_bytes: float = ELEMENT_BYTES,
) -> Work:
    """One new token of each of ``batch`` sequences, which hold ``context_tokens`` together.

    Residuals go by sequences times KV heads (``lanes``), the mean ``length`` of a sequence, and the query heads of
    a KV head (``group``).
    """
    read = 2 * context_tokens * kv_heads * head_dim * kv_element_bytes
    written = 2 * batch * heads * head_dim * ELEMENT_BYTES
    at = {
        "lanes": batch * kv_heads,
        "length": context_tokens / batch,
        "group": heads / kv_heads,
        "block_size": block_size,
    }
    return Work(4 * context_tokens * heads * head_dim, read + written, at=at)


def contiguous_attention(
    batch: int,
    context_tokens: Amount,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_element_bytes: float = ELEMENT_BYTES,
) -> Work:
    """``decode_attention`` over sequences that each lie in one piece, without block tables. Residuals go by ``lanes`` and
    ``length``."""
    return decode_attention(batch, context_tokens, heads, kv_heads, head_dim, kv_element_bytes=kv_element_bytes)


def prefill_attention(
    tokens: Amount,
    pairs: Amount,
    context_tokens: Amount,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_element_bytes: float = ELEMENT_BYTES,
) -> Work:
    """``tokens`` queries over ``pairs`` causal (query, key) pairs, of ``context_tokens`` keys that are read.

    Residuals go by tokens times heads (``rows``), the mean ``keys`` that a query sees of the new tokens,
    ``head_dim``, and how many times the new tokens the keys are (``prefix``; 1: whole prompts).
    """
    read = 2 * context_tokens * kv_heads * head_dim * kv_element_bytes
    written = 2 * tokens * heads * head_dim * ELEMENT_BYTES
    at = {
        "rows": tokens * heads,
        "keys": np.minimum(pairs / tokens, (tokens + 1) / 2),
        "head_dim": head_dim,
        "prefix": context_tokens / tokens,
    }
    return Work(4 * pairs * heads * head_dim, read + written, at=at)


def mixed_attention(
    apart_us: Amount, batch: Amount, context_tokens: Amount, tokens: Amount, pairs: Amount, heads: Amount
) -> Work:
    """``decode_attention`` and ``prefill_attention`` in one call, which take ``apart_us`` microseconds as two calls.

    One call runs all sequences through one kernel, which is not the best one for decodes; so the coefficient ``each_us``
    is a factor on the time apart. Residuals go by decoding sequences times heads (``lanes``), their mean ``length``, new
    prompt tokens times heads (``rows``), and the mean keys that a new token sees, those before its chunk included
    (``span``).
    """
    at = {"lanes": batch * heads, "length": context_tokens / batch, "rows": tokens * heads, "span": pairs / tokens}
    return Work(pieces=apart_us, at=at)


def small_kernel() -> Work:
    """A kernel that takes no longer than its launch."""
    return Work()


def kv_write(tokens: Amount, kv_heads: int, head_dim: int, kv_element_bytes: float = ELEMENT_BYTES) -> Work:
    """K and V of ``tokens`` tokens into the slots of one layer, read first."""
    return Work(bytes=2 * tokens * kv_heads * head_dim * (ELEMENT_BYTES + kv_element_bytes))


def elementwise(tokens: Amount, hidden_size: int, intermediate_size: int, norms: bool = True) -> Work:
    """Two normalisations with their residuals, rotary positions and the activation of ONE layer.

    10 hidden states and 3 widths of the MLP a token: a norm reads and writes state and residual, rotary
    reads and writes about one state, a gated activation reads two widths and writes one.
    """
    states = 10 if norms else 2
    return Work(bytes=tokens * (states * hidden_size + 3 * intermediate_size) * ELEMENT_BYTES, at={"tokens": tokens})


def embedding(tokens: Amount, hidden_size: int) -> Work:
    """Look-up of ``tokens`` rows: read and written."""
    return Work(bytes=2 * tokens * hidden_size * ELEMENT_BYTES)


def transfer(bytes: Amount, blocks: Amount = 1) -> Work:
    """``bytes`` to another place of the device, to the host or from it.

    ``blocks`` counts the pieces that are copied: a block of one layer's K, or V, each.
    """
    return Work(bytes=bytes, pieces=blocks)


def all_reduce(message_bytes: Amount, ranks: Amount) -> Work:
    """A message of ``message_bytes`` on each of ``ranks`` GPUs is added up: the bytes that each sends in a ring.

    Residuals go by the size of the message (``message``) and the number of GPUs (``ranks``).
    """
    sent = 2 * (ranks - 1) / ranks * message_bytes
    return Work(bytes=sent, at={"message": message_bytes, "ranks": ranks})


#: Rows at which half of the time to read evicted weights hides behind the arithmetic of GEMMs. Whole steps of calibrations of one CPU are
#: modelled best with 16 to 32; its GEMMs alone say 48 to 64.
HIDING_ROWS = 32


def step(rows: Amount, kv_bytes: Amount = 0) -> Work:
    """What a step over ``rows`` sequences takes that no other operation includes: host work, launches; and the time by which its
    GEMMs are longer because its attention reads ``kv_bytes`` of KV, in all layers, which evict weights from the caches of a CPU.
    """
    return Work(bytes=kv_bytes / (1 + rows / HIDING_ROWS), pieces=rows)


#: Inputs of a token that a step copies to the device: its id, its position and its slot, of 8 bytes each.
INPUT_BYTES = 24


def prefill_step(rows: Amount, tokens: Amount) -> Work:
    """The same of a step with prompts, which no graph captures, over ``rows`` sequences with ``tokens`` new tokens."""
    return Work(bytes=INPUT_BYTES * tokens, pieces=rows)


def launches() -> Work:
    """The host's launches of a step with prompts: its operations together take no less time, since a GPU waits for its host."""
    return Work()
