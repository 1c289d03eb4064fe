"""The work of the attention of one layer with its projections, as tables of whole layers have it: latent (DeepSeek V3), sparse (DeepSeek V3.2,
GLM 5, MiniMax M3) and compressed attention (DeepSeek V4), and gated delta nets (Qwen3.5)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..spec.compressed import HEAD_DIM, INDEX_DIM, KEY_BYTES, SPARSE, VECTOR_BYTES
from .op_work import ELEMENT_BYTES, Amount, Work

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
