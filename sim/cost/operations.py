"""The duration of one operation: a few coefficients, and a small table of residuals.

    t = ((t0^q + (flops / flops_per_s)^q + (bytes / bytes_per_s)^q)^(1/q) + each * pieces) * e^residual

``t0`` is the duration of the shortest call. ``q`` is the sharpness of the transition between the bounds: with 1 they
add up; the larger q, the closer t is to the largest of them. Residuals are logarithms of measured over modelled time
on a coarse grid, interpolated linearly in the logarithm of each axis and constant beyond the edges of the grid.

The function of an operation (``gemm``, ``decode_attention``, ...) computes flops and bytes of a call, so a model
fitted on some shapes predicts others. Arguments may be arrays. Elements have two bytes unless stated otherwise.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cached_property, lru_cache, partial
from math import fsum, log2, prod
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from ..spec.compressed import DENSE, HEAD_DIM, INDEX_DIM, KEY_BYTES, SPARSE, VECTOR_BYTES

ELEMENT_BYTES = 2
#: Of an element with its part of the scale of 16 elements.
NVFP4_BYTES = 4.5 / 8

Amount = int | float | np.ndarray
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A residual beyond 10x is no residual any more.
LogRatio = Annotated[float, Field(ge=-2.4, le=2.4, allow_inf_nan=False)]


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


#: Widths of DeepSeek-V3's latent attention, of which there are tables: the hidden size, and the fields of ``Latent``.
MLA_HIDDEN_SIZE, MLA_LATENT = 7168, (512, 64, 128, 128, 1536)
_KV_RANK, _ROPE, _NOPE, _V, _Q_RANK = MLA_LATENT


def _mla_projections(heads: Amount) -> Amount:
    """Parameters of the projections of one layer with ``heads`` heads."""
    latent = MLA_HIDDEN_SIZE * (_Q_RANK + _KV_RANK + _ROPE)
    return latent + heads * (_Q_RANK * (_NOPE + _ROPE) + _KV_RANK * (_NOPE + _V) + _V * MLA_HIDDEN_SIZE)


def mla_decode(batch: Amount, context_tokens: Amount, heads: Amount, element_bytes: float = ELEMENT_BYTES) -> Work:
    """Latent attention of ONE layer with its projections: one new token of each of ``batch`` sequences, which hold
    ``context_tokens`` together. Attention is on latent vectors; weights are of ``element_bytes``.

    Residuals go by sequences (``batch``), their mean ``length``, and ``heads``.
    """
    params, width = _mla_projections(heads), 2 * _KV_RANK + _ROPE
    flops = 2 * batch * params + 2 * context_tokens * heads * width
    moved = params * element_bytes + (context_tokens * (_KV_RANK + _ROPE) + batch * heads * width) * ELEMENT_BYTES
    return Work(flops, moved, at={"batch": batch, "length": context_tokens / batch, "heads": heads})


def mla_prefill(
    tokens: Amount, pairs: Amount, context_tokens: Amount, heads: Amount, element_bytes: float = ELEMENT_BYTES
) -> Work:
    """As ``mla_decode``, ``tokens`` queries over ``pairs`` causal (query, key) pairs, of ``context_tokens`` keys: keys and values
    of all heads are computed from the latent vectors, those before a chunk again.

    Residuals go by ``tokens``, the mean ``keys`` that a query sees of the new tokens, and ``heads``.
    """
    params, expanded = _mla_projections(heads), heads * (_NOPE + _V)
    flops = 2 * tokens * params + 2 * pairs * heads * (_NOPE + _ROPE + _V)
    flops = flops + 2 * (context_tokens - tokens) * _KV_RANK * expanded
    moved = params * element_bytes + (2 * context_tokens * expanded + 2 * tokens * MLA_HIDDEN_SIZE) * ELEMENT_BYTES
    at: dict[str, Amount] = {"tokens": tokens, "keys": np.minimum(pairs / tokens, (tokens + 1) / 2), "heads": heads}
    return Work(flops, moved, at=at)


def sparse_name(hidden_size: int, kv_dtype: str) -> str:
    """Name of the widths of a model with sparse attention, and of its KV cache: tables have a model for each."""
    return f"{hidden_size}-{'fp8' if kv_dtype.startswith('fp8') else 'auto'}"


class DsaWidths(NamedTuple):
    """Widths of a layer with sparse latent attention; the latent vector has 512 elements and 64 of rotary key, an index key 128."""

    hidden_size: int
    q_rank: int
    nope: int
    v: int
    index_heads: int


#: Of DeepSeek V3.2 and GLM 5, of which there are tables, by the hidden size; all attend to ``DSA_TOP_K`` tokens.
DSA_WIDTHS = {7168: DsaWidths(7168, 1536, 128, 128, 64), 6144: DsaWidths(6144, 2048, 192, 256, 32)}
DSA_TOP_K, _INDEX_DIM, _INDEX_BYTES = 2048, 128, 132


def _dsa_params(widths: DsaWidths, heads: Amount) -> tuple[Amount, int]:
    """Parameters of the projections of one layer with ``heads`` heads, and those of its indexer, which every rank holds."""
    each = widths.q_rank * (widths.nope + _ROPE) + _KV_RANK * (widths.nope + widths.v) + widths.v * widths.hidden_size
    indexer = widths.q_rank * widths.index_heads * _INDEX_DIM + widths.hidden_size * (_INDEX_DIM + widths.index_heads)
    return widths.hidden_size * (widths.q_rank + _KV_RANK + _ROPE) + heads * each, indexer


def dsa_decode(
    batch: Amount,
    context_tokens: Amount,
    heads: Amount,
    hidden_size: Amount = MLA_HIDDEN_SIZE,
    element_bytes: float = ELEMENT_BYTES,
) -> Work:
    """Sparse latent attention of ONE layer with its projections and indexer: one new token of each of ``batch`` sequences, which hold
    ``context_tokens`` together. Scores are of all tokens, attention is on the latent vectors of at most ``DSA_TOP_K`` of a sequence.

    Residuals go by sequences (``batch``), their mean ``length``, and ``heads``.
    """
    widths, width = DSA_WIDTHS[int(np.max(hidden_size))], 2 * _KV_RANK + _ROPE
    (params, indexer), attended = _dsa_params(widths, heads), np.minimum(context_tokens, DSA_TOP_K * np.asarray(batch))
    flops = 2 * batch * (params + indexer) + 2 * attended * heads * width
    flops = flops + 2 * context_tokens * widths.index_heads * _INDEX_DIM
    read = (attended * (_KV_RANK + _ROPE) + batch * heads * width) * ELEMENT_BYTES + context_tokens * _INDEX_BYTES
    at: dict[str, Amount] = {"batch": batch, "length": context_tokens / batch, "heads": heads}
    return Work(flops, (params + indexer) * element_bytes + read, at=at)


def dsa_prefill(
    tokens: Amount,
    pairs: Amount,
    context_tokens: Amount,
    heads: Amount,
    hidden_size: Amount = MLA_HIDDEN_SIZE,
    element_bytes: float = ELEMENT_BYTES,
) -> Work:
    """As ``dsa_decode``, ``tokens`` queries over ``pairs`` causal (query, key) pairs, of ``context_tokens`` keys.

    Residuals go by ``tokens``, the mean ``keys`` that a query sees of the new tokens, and ``heads``.
    """
    widths, width = DSA_WIDTHS[int(np.max(hidden_size))], 2 * _KV_RANK + _ROPE
    (params, indexer), attended = _dsa_params(widths, heads), np.minimum(pairs, DSA_TOP_K * np.asarray(tokens))
    flops = 2 * tokens * (params + indexer) + 2 * attended * heads * width
    flops = flops + 2 * pairs * widths.index_heads * _INDEX_DIM
    moved = (context_tokens * (_KV_RANK + _ROPE) + 2 * tokens * widths.hidden_size) * ELEMENT_BYTES
    at: dict[str, Amount] = {"tokens": tokens, "keys": np.minimum(pairs / tokens, (tokens + 1) / 2), "heads": heads}
    return Work(flops, (params + indexer) * element_bytes + moved, at=at)


class MsaWidths(NamedTuple):
    """Widths of a layer of MiniMax M3 with sparse attention; queries and keys of its indexer are as wide as those of attention.

    Attributes:
        group: Query heads of a KV head, each of which has an index head, too.
        top_k: Tokens of the chosen blocks.
    """

    hidden_size: int
    head_dim: int
    group: int
    top_k: int


MSA_WIDTHS = MsaWidths(6144, 128, 16, 2048)


def _msa(
    queries: Amount, pairs: Amount, read: tuple[Amount, Amount], heads: Amount, element_bytes: float
) -> tuple[Amount, Amount]:
    """Flops and bytes of one layer of MiniMax M3 over so many queries and (query, key) pairs; ``read`` are keys of attention and of the indexer."""
    hidden_size, head_dim, group, top_k = MSA_WIDTHS
    kv_heads = np.maximum(1, np.asarray(heads) / group)
    params = hidden_size * head_dim * (2 * heads + 3 * kv_heads + 1)
    attended = np.minimum(pairs, top_k * np.asarray(queries))
    flops = 2 * queries * params + 4 * attended * heads * head_dim + 2 * pairs * kv_heads * head_dim
    keys, index_keys = read
    moved = 2 * keys * kv_heads * head_dim + index_keys * head_dim + 2 * queries * (hidden_size + heads * head_dim)
    return flops, params * element_bytes + moved * ELEMENT_BYTES


def msa_decode(batch: Amount, context_tokens: Amount, heads: Amount, element_bytes: float = ELEMENT_BYTES) -> Work:
    """Sparse attention of ONE layer of MiniMax M3 with its projections and indexer: one new token of each of ``batch`` sequences, which hold
    ``context_tokens`` together. Scores are of all tokens; attention is on K and V of at most ``MsaWidths.top_k`` of a sequence.

    A rank has ``heads`` query heads, and the KV and index heads of these. Residuals go by sequences (``batch``), their mean ``length``,
    and ``heads``.
    """
    attended = np.minimum(context_tokens, MSA_WIDTHS.top_k * np.asarray(batch))
    flops, moved = _msa(batch, context_tokens, (attended, context_tokens), heads, element_bytes)
    return Work(flops, moved, at={"batch": batch, "length": context_tokens / batch, "heads": heads})


def msa_prefill(
    tokens: Amount, pairs: Amount, context_tokens: Amount, heads: Amount, element_bytes: float = ELEMENT_BYTES
) -> Work:
    """As ``msa_decode``, ``tokens`` queries over ``pairs`` causal (query, key) pairs, of ``context_tokens`` keys.

    Residuals go by ``tokens``, the mean ``keys`` that a query sees of the new tokens, and ``heads``.
    """
    flops, moved = _msa(tokens, pairs, (context_tokens, context_tokens), heads, element_bytes)
    at: dict[str, Amount] = {"tokens": tokens, "keys": np.minimum(pairs / tokens, (tokens + 1) / 2), "heads": heads}
    return Work(flops, moved, at=at)


class CompressedWidths(NamedTuple):
    """Widths of a layer of DeepSeek V4 (``spec.compressed.Compressed``), and the heads of all ranks."""

    hidden_size: int
    heads: int
    q_rank: int
    groups: int
    group_rank: int
    index_heads: int
    top_k: int


#: Of DeepSeek V4 Flash and Pro, of which there are tables, by the hidden size.
COMPRESSED_WIDTHS = {
    4096: CompressedWidths(4096, 64, 1024, 8, 1024, 64, 512),
    7168: CompressedWidths(7168, 128, 1536, 16, 1024, 64, 1024),
}
#: Tokens of the window of DeepSeek V4, which its tables have, too.
COMPRESSED_WINDOW = 128


def _compressed(
    queries: Amount,
    batch: Amount,
    pairs: Amount,
    context_tokens: Amount,
    heads: Amount,
    hidden_size: Amount,
    ratio: int,
) -> tuple[Amount, Amount]:
    """Flops and bytes of ONE layer: ``queries`` tokens of ``batch`` sequences, which see ``pairs`` (query, key) pairs of ``context_tokens`` keys.

    Projections and shared keys are in fp8; compressors are in 16 bits (``Compressed.matrices``).
    """
    widths = COMPRESSED_WIDTHS[int(np.max(hidden_size))]
    own = (
        HEAD_DIM * (widths.q_rank + widths.group_rank)
        + widths.groups * widths.group_rank // widths.heads * widths.hidden_size
    )
    params = widths.hidden_size * (widths.q_rank + HEAD_DIM) + heads * own
    overlap = 1 + (ratio == SPARSE)
    compressor = 2 * overlap * widths.hidden_size * HEAD_DIM
    vectors: Amount = pairs / ratio
    scored: Amount = 0.0
    if ratio == SPARSE:
        params = params + widths.q_rank * widths.index_heads * INDEX_DIM
        compressor += widths.hidden_size * (widths.index_heads + 2 * overlap * INDEX_DIM)
        vectors, scored = np.minimum(vectors, widths.top_k * np.asarray(queries)), pairs / ratio
    attended = np.minimum(pairs, COMPRESSED_WINDOW * np.asarray(queries)) + vectors
    flops = 2 * queries * (params + compressor) + 4 * attended * heads * HEAD_DIM
    flops = flops + 2 * scored * widths.index_heads * INDEX_DIM
    kept: Amount = np.minimum(context_tokens, COMPRESSED_WINDOW * np.asarray(batch) + queries)
    keys: Amount = 0.0
    if ratio == SPARSE:
        kept = kept + np.minimum(context_tokens / ratio, widths.top_k * np.asarray(queries))
        keys = context_tokens / ratio * KEY_BYTES
    else:
        kept = kept + context_tokens / ratio
    moved = params + compressor * ELEMENT_BYTES + kept * VECTOR_BYTES + keys
    return flops, moved + 2 * queries * (widths.hidden_size + heads * HEAD_DIM) * ELEMENT_BYTES


def csa_decode(
    batch: Amount, context_tokens: Amount, heads: Amount, hidden_size: Amount = 4096, ratio: int = SPARSE
) -> Work:
    """Compressed attention of ONE layer of DeepSeek V4 with its projections, compressor and indexer: one new token of each of
    ``batch`` sequences, which hold ``context_tokens`` together. A vector stands for ``ratio`` tokens: for 4, of which the indexer
    scores all and chooses ``top_k``, or for 128, all of which are attended to.

    Residuals go by sequences (``batch``), their mean ``length``, and ``heads``.
    """
    flops, moved = _compressed(batch, batch, context_tokens, context_tokens, heads, hidden_size, ratio)
    return Work(flops, moved, at={"batch": batch, "length": context_tokens / batch, "heads": heads})


def csa_prefill(
    tokens: Amount,
    pairs: Amount,
    context_tokens: Amount,
    heads: Amount,
    hidden_size: Amount = 4096,
    ratio: int = SPARSE,
) -> Work:
    """As ``csa_decode``, ``tokens`` queries over ``pairs`` causal (query, key) pairs, of ``context_tokens`` keys.

    Residuals go by ``tokens``, the mean keys that a query sees (``span``), and ``heads``.
    """
    flops, moved = _compressed(tokens, 1, pairs, context_tokens, heads, hidden_size, ratio)
    return Work(flops, moved, at={"tokens": tokens, "span": pairs / tokens, "heads": heads})


def hyper_connections(tokens: Amount, hidden_size: Amount) -> Work:
    """Both mixings of the four hidden states of a token in ONE layer of DeepSeek V4, before and behind attention and experts."""
    # Before: four states read, one written; behind: five read, four written; twice.
    return Work(bytes=28 * tokens * hidden_size * ELEMENT_BYTES, at={"tokens": tokens})


#: Width of keys and of values of the gated delta nets in the tables (Qwen3.5), taps of their convolution, tokens of a chunk.
GDN_DIM, GDN_TAPS, _CHUNK = 128, 4, 64


def gdn_decode(batch: Amount, key_heads: Amount, value_heads: Amount, state_bytes: float = 4) -> Work:
    """Convolution and recurrence of ONE layer of a gated delta net for one new token of each of ``batch`` sequences: their states of
    ``state_bytes`` an element are read and written.

    Residuals go by sequences times heads of values (``lanes``), and these heads (``heads``).
    """
    channels = (2 * key_heads + value_heads) * GDN_DIM
    state = 2 * value_heads * GDN_DIM * GDN_DIM * state_bytes
    moved = batch * (state + channels * (2 * GDN_TAPS + 1) * ELEMENT_BYTES)
    return Work(bytes=moved, at={"lanes": batch * value_heads, "heads": value_heads})


def gdn_prefill(tokens: Amount, length: Amount, key_heads: Amount, value_heads: Amount) -> Work:
    """The same for ``tokens`` tokens of prompts of ``length`` tokens each. Chunks of a prompt follow one another (``pieces``).

    Residuals go by ``tokens``, ``length``, and the heads of values (``heads``).
    """
    channels, width = (2 * key_heads + value_heads) * GDN_DIM, GDN_DIM
    flops = tokens * value_heads * (6 * width * width + 3 * _CHUNK * width + _CHUNK * _CHUNK)
    moved = tokens * (3 * channels + 2 * value_heads * width) * ELEMENT_BYTES
    at: dict[str, Amount] = {"tokens": tokens, "length": length, "heads": value_heads}
    return Work(flops, moved, pieces=length / _CHUNK, at=at)


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


#: A name in ``OPERATIONS``.
OpName = str
#: Knots of an axis of a fit's residuals: their spacing in doublings, or themselves; None where only a calibration has a table.
Knots = float | tuple[float, ...] | None


class Operation(NamedTuple):
    """An operation, declared once.

    Attributes:
        work: What a call takes as arguments, and the work that it is.
        knots: Axes that its residuals may have.
        columns: Arguments and axes whose values a fit holds out in turn.
        shape: The sizes that a model has and a load does not change.
        is_measured: Whether ``fragmeter calibrate`` measures it; others are only in profiles that are fitted to tables.
        is_optional: Whether a calibration may lack it: its place is then taken by others, with a stated factor, or by ``step``.
    """

    work: Callable[..., Work]
    knots: Mapping[str, Knots] = {}
    columns: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    is_measured: bool = True
    is_optional: bool = False

    def __call__(self, *arguments: Any, **named: Any) -> Work:
        """The work of a call."""
        return self.work(*arguments, **named)


def _gemm(element_bytes: float, is_measured: bool = False) -> Operation:
    knots = dict.fromkeys(("m", "n", "k"), 2)
    return Operation(partial(gemm, element_bytes=element_bytes), knots, ("m", "n"), ("n", "k"), is_measured)


def _experts(element_bytes: float) -> Operation:
    knots = dict.fromkeys(("rows", "reached", "width", "hidden"), 2)
    shape = ("held", "hidden_size", "width")
    return Operation(partial(moe, element_bytes=element_bytes), knots, ("tokens", "width"), shape, False)


def _decode(work: Callable[..., Work], batch: int = 2) -> Operation:
    """Decodes of one layer with its projections."""
    knots = {"batch": batch, "length": 2, "heads": 1}
    return Operation(work, knots, ("batch", "length", "heads"), ("heads",), False)


def _prefill(work: Callable[..., Work], seen: str = "keys", spacing: int = 2) -> Operation:
    """Prompts in one layer with its projections."""
    knots = {"tokens": 1, seen: spacing, "heads": 1}
    return Operation(work, knots, ("tokens", seen, "heads"), ("heads",), False)


_FP8: dict[str, Any] = {"element_bytes": 1}
_OF_HEADS = ("heads", "kv_heads", "head_dim")
#: Every operation. Weights and activations are in 16 bits, or in those of the name (``w8`` and ``w4`` are weights alone, unpacked to
#: 16 bits); quantising the activations, which come in 16 bits, is part of the call. Of ``mla``, ``dsa`` and ``msa`` fp8 means the
#: projections, with a scale for each block of 128 x 128.
OPERATIONS: dict[OpName, Operation] = {
    "gemm": _gemm(ELEMENT_BYTES, is_measured=True),
    "gemm_fp8": _gemm(1),
    "gemm_nvfp4": _gemm(NVFP4_BYTES),
    "gemm_w8": _gemm(1),
    "gemm_w4": _gemm(1 / 2),
    "moe": Operation(moe, *_experts(ELEMENT_BYTES)[1:]),
    "moe_fp8": _experts(1),
    "moe_nvfp4": _experts(NVFP4_BYTES),
    "moe_mxfp4": _experts(4.25 / 8),
    "moe_mxfp4_mxfp8": _experts(4.25 / 8),
    "moe_int4": _experts(4.15 / 8),
    # FlashAttention-2 never splits a context with one query head per KV head, so a group of 1 has a knot of its own.
    "decode_attention": Operation(
        decode_attention,
        {"lanes": 1, "length": 1, "group": (1, 2, 16), "block_size": 2},
        ("batch", "length"),
        _OF_HEADS,
    ),
    "contiguous_attention": Operation(
        contiguous_attention, {"lanes": 1, "length": 1}, ("batch", "length"), is_optional=True
    ),
    "prefill_attention": Operation(
        prefill_attention, {"rows": 2, "keys": 1, "head_dim": 1, "prefix": 2}, ("tokens", "keys"), _OF_HEADS
    ),
    "mixed_attention": Operation(
        mixed_attention,
        {"lanes": 1, "length": 1, "rows": 2, "span": 2},
        ("batch", "length", "tokens", "span"),
        ("heads",),
        is_optional=True,
    ),
    "mla_decode": _decode(mla_decode, batch=1),
    "mla_decode_fp8": _decode(partial(mla_decode, **_FP8), batch=1),
    "mla_prefill": _prefill(mla_prefill),
    "mla_prefill_fp8": _prefill(partial(mla_prefill, **_FP8)),
    # Four tables each, so with fewer knots.
    "dsa_decode": _decode(dsa_decode),
    "dsa_decode_fp8": _decode(partial(dsa_decode, **_FP8)),
    "dsa_prefill": _prefill(dsa_prefill, spacing=4),
    "dsa_prefill_fp8": _prefill(partial(dsa_prefill, **_FP8), spacing=4),
    "msa_decode": _decode(msa_decode),
    "msa_decode_fp8": _decode(partial(msa_decode, **_FP8)),
    "msa_prefill": _prefill(msa_prefill),
    "msa_prefill_fp8": _prefill(partial(msa_prefill, **_FP8)),
    "csa_decode": _decode(csa_decode, batch=1),
    "csa_prefill": _prefill(csa_prefill, "span"),
    "hca_decode": _decode(partial(csa_decode, ratio=DENSE), batch=1),
    "hca_prefill": _prefill(partial(csa_prefill, ratio=DENSE), "span"),
    "hyper_connections": Operation(hyper_connections, {"tokens": 2}, ("tokens",), ("hidden_size",), False),
    "gdn_decode": Operation(
        gdn_decode, {"lanes": 1, "heads": 2}, ("batch", "value_heads"), ("key_heads", "value_heads"), False
    ),
    "gdn_prefill": Operation(
        gdn_prefill,
        {"tokens": 2, "length": 2, "heads": 1},
        ("tokens", "length", "value_heads"),
        ("key_heads", "value_heads"),
        False,
    ),
    "small_kernel": Operation(small_kernel, is_measured=False),
    "kv_write": Operation(kv_write),
    "elementwise": Operation(elementwise, {"tokens": None}),
    "embedding": Operation(embedding),
    "block_copy": Operation(transfer),
    "swap_out": Operation(transfer),
    "swap_in": Operation(transfer),
    "all_reduce": Operation(all_reduce, {"message": 2, "ranks": 1}, ("message",), ("ranks",), False),
    "step": Operation(step),
    "prefill_step": Operation(prefill_step, is_optional=True),
    "launches": Operation(launches, is_optional=True),
}
FROM_TABLES = frozenset(name for name, each in OPERATIONS.items() if not each.is_measured)


def smallest_call(operation: OpName) -> Work:
    """The work of a call with every size equal to one: the kinds of work that the operation has."""
    sizes = inspect.signature(OPERATIONS[operation].work).parameters.values()
    return OPERATIONS[operation](*(1 for size in sizes if size.default is inspect.Parameter.empty))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Coefficients:
    """The coefficients of an operation.

    Attributes:
        t0_us: Duration of the shortest call.
        flops_per_s, bytes_per_s: Rates of long calls; None if the operation has no such work.
        each_us: Time of each of the call's ``pieces``.
        q: See the module.
    """

    t0_us: NotNegative = 0.0
    flops_per_s: Positive | None = None
    bytes_per_s: Positive | None = None
    each_us: NotNegative = 0.0
    q: Annotated[float, Field(ge=0.25, le=32, allow_inf_nan=False)] = 1.0

    def with_bytes(self, times: float) -> Coefficients:
        """Those of calls that move so many times as many bytes."""
        return self if self.bytes_per_s is None else replace(self, bytes_per_s=self.bytes_per_s / times)

    def scaled(self, factor: float) -> Coefficients:
        """Those of calls that take so many times as long."""
        rates = {name: rate / factor for name in ("flops_per_s", "bytes_per_s") if (rate := getattr(self, name))}
        return replace(self, t0_us=self.t0_us * factor, each_us=self.each_us * factor, **rates)

    def us(self, work: Work) -> np.ndarray:
        """Microseconds of every call, before residuals."""
        calls = np.broadcast_shapes(*map(np.shape, (work.flops, work.bytes, work.pieces)))
        terms = [np.full(calls, self.t0_us, float)]
        for amount, per_s in ((work.flops, self.flops_per_s), (work.bytes, self.bytes_per_s)):
            if per_s is not None:
                terms.append(np.asarray(amount, float) / per_s * 1e6)
        bounds = np.stack(np.broadcast_arrays(*terms))
        # Divided by the largest, so that no power overflows.
        largest = np.maximum(bounds.max(axis=0), 1e-12)
        smooth = largest * np.sum((bounds / largest) ** self.q, axis=0) ** (1 / self.q)
        return smooth + self.each_us * np.asarray(work.pieces, float)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Residuals:
    """A table over ``axes``.

    Attributes:
        axes: Names of ``Work.at``.
        knots: Of each axis, increasing, in its own unit.
        log_ratios: ln(measured / modelled) at every combination of knots, the last axis fastest.
    """

    axes: tuple[str, ...]
    knots: tuple[tuple[Positive, ...], ...]
    log_ratios: tuple[LogRatio, ...]

    @model_validator(mode="after")
    def _check(self) -> Residuals:
        if len(self.axes) != len(self.knots):
            raise ValueError(f"{len(self.axes)} axes need as many lists of knots, not {len(self.knots)}")
        for name, knots in zip(self.axes, self.knots, strict=True):
            if len(knots) < 2 or any(low >= high for low, high in zip(knots, knots[1:])):
                raise ValueError(f"knots of {name} must be two or more, increasing")
        size = prod(map(len, self.knots))
        if len(self.log_ratios) != size:
            raise ValueError(f"log_ratios must be {size}, one a combination of knots, not {len(self.log_ratios)}")
        return self

    def __call__(self, at: Mapping[str, Amount]) -> np.ndarray:
        """Logarithm of measured over modelled time at this position."""
        return sum(weight * self._table[index] for index, weight in corners(self.axes, self.knots, at))

    @cached_property
    def _table(self) -> np.ndarray:
        return np.asarray(self.log_ratios)

    def single(self, at: Mapping[str, Amount]) -> float:
        """The same at one position; without arrays, which take ten times as long for a single one."""
        found = [(0, 1.0)]
        for name, places in zip(self.axes, self._places, strict=True):
            where = min(max(log2(max(float(at[name]), 1e-9)), places[0]), places[-1])
            low = min(bisect_right(places, where) - 1, len(places) - 2)
            share = (where - places[low]) / (places[low + 1] - places[low])
            found = [
                (index * len(places) + low + side, weight * part)
                for index, weight in found
                for side, part in ((0, 1 - share), (1, share))
            ]
        return fsum(weight * self.log_ratios[index] for index, weight in found)

    @cached_property
    def _places(self) -> list[list[float]]:
        return [[log2(knot) for knot in knots] for knots in self.knots]


@lru_cache
def _log2(knots: tuple[float, ...]) -> np.ndarray:
    return np.log2(knots)


def corners(
    axes: tuple[str, ...], knots: tuple[tuple[float, ...], ...], at: Mapping[str, Amount]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Flat index and weight of each knot around ``at``: interpolation in the logarithm of every axis."""
    found = [(np.asarray(0), np.asarray(1.0))]
    for name, values in zip(axes, knots, strict=True):
        places = _log2(values)
        where = np.minimum(np.maximum(np.log2(np.maximum(at[name], values[0])), places[0]), places[-1])
        low = np.minimum(places.searchsorted(where, side="right") - 1, len(places) - 2)
        share = (where - places[low]) / (places[low + 1] - places[low])
        found = [
            (index * len(places) + low + side, weight * part)
            for index, weight in found
            for side, part in ((0, 1 - share), (1, share))
        ]
    return found


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OtherMemory:
    """Times of a card from those of another card with the same chip and other memory.

    A call is bound by its memory and by all else (launches, compute, requests in flight), which is the same on both:

        t_measured^2 = rest^2 + (bytes / measured)^2        t^2 = rest^2 + (bytes / own)^2

    The exponent is that of the one pair of cards with tables of both, H100 and H200: of 1 to 8 it gives the smallest errors of GEMMs,
    attention and experts together (``tests/sim/cost/test_other_memory.py``).

    Attributes:
        measured_bytes_per_s, bytes_per_s: What the memory of the measured and of this card delivers.
    """

    measured_bytes_per_s: Positive
    bytes_per_s: Positive

    def us(self, measured: np.ndarray, work: Work) -> np.ndarray:
        """Microseconds of calls that take ``measured`` on the other card."""
        moved = np.asarray(work.bytes, float) * 1e6
        rest = np.maximum(measured**2 - (moved / self.measured_bytes_per_s) ** 2, 0)
        return np.sqrt(rest + (moved / self.bytes_per_s) ** 2)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OpModel:
    """One operation on one device.

    Attributes:
        source: Source of the numbers, if other than that of the file.
        fit: Description and errors of the fit, for readers.
        shapes: Models of single shapes, by ``experts_name``; they hold for no other.
        query_group: Query heads of a KV head of the measured model, for which alone mixed attention holds; None for any.
        memory: Of a card that has the model of another card with the same chip; None where the model is of the card's own calls.
    """

    coefficients: Coefficients
    residuals: Residuals | None = None
    source: str | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, OpModel] = field(default_factory=dict)
    query_group: Annotated[int, Field(ge=1)] | None = None
    memory: OtherMemory | None = None

    def us(self, work: Work) -> np.ndarray:
        """Microseconds of a call, or of an array of calls."""
        modelled = self.coefficients.us(work)
        found = modelled if self.residuals is None else modelled * np.exp(self.residuals(work.at))
        return found if self.memory is None else self.memory.us(found, work)
