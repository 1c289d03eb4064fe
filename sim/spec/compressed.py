"""Attention of DeepSeek V4: a window of vectors, and beside it vectors that stand for several tokens.

Every layer keeps one vector a token for its window, which is K and V of all heads. By its *ratio* a layer also keeps one compressed vector for
4 or 128 tokens, of all tokens; a layer of ratio 4 chooses among these with an indexer, which has keys of the same ratio. A compressor
makes a vector of 2 x 4 tokens, which overlap, or of 128, and keeps their inputs and scores in fp32 until then: a window of its own.
What vLLM 0.33 keeps of a layer, in the order in which it registers the caches:

    cache            layers         a block              of a token        kept
    keys             ratio 4        256 tokens           132 / 4 bytes     all
    inputs of keys   ratio 4          4                  2,048             8 tokens
    window           all             64                  584               128
    vectors          ratio 4, 128   256                  584 / ratio       all
    inputs           ratio 4          4                  8,192             8
    inputs           ratio 128        8                  4,096             128

Every page is rounded up to a multiple of 576 bytes; ranks hold all of it. A vector is 448 elements in fp8, 64 rotary ones in 16 bits and 8
bytes of scales (``fp8_ds_mla``). Pages are not unified but packed (``packed_groups``): layers with the same tokens in a block and the same
window are a bucket. V4-Flash has 5 groups, and blocks of 1,002,240 bytes, those of all keys and vectors together.

Sources: ``vllm/models/deepseek_v4/attention.py`` and ``compressor.py``, and ``v1/attention/backends/mla/sparse_swa.py``, of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .attention import FP8_DS_MLA, FULL, Span
from .deployment import stored_bytes
from .matrix import Matrix

#: Tokens of a block, the only number that the kernels run.
BLOCK_SIZE = 256
#: Widths that vLLM's kernels are written for: of a vector, of its rotary part, and of an indexer's key.
HEAD_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128
#: Bytes of a vector and of a key in fp8 with their scales, and those of which a page is a multiple.
VECTOR_BYTES, KEY_BYTES, PAGE_ALIGNMENT = 584, 132, 576
#: Ratios of compression, and tokens of a block of the inputs of a compressor.
SPARSE, DENSE = 4, 128
_INPUT_BLOCKS = {SPARSE: 4, DENSE: 8}
_WINDOW_BLOCK = 64
_FP32 = 4
#: Sequences of which prefills gather vectors at once, and the number of which the chosen places of a token are a multiple.
_PREFILLS, _PLACES_MULTIPLE = 4, 128


class Cache(NamedTuple):
    """A cache of a layer.

    Attributes:
        vector_bytes: Bytes of a vector, or of the inputs of a token.
        tokens: Tokens that a vector stands for.
        block_size: Tokens of a block.
        span: The tokens that are kept.
    """

    vector_bytes: int
    tokens: int
    block_size: int
    span: Span = FULL


class Read(NamedTuple):
    """What a new token reads of its sequence.

    Attributes:
        window: Tokens up to which it reads; 0 is all.
        layers: Layers in which it does.
        tokens: Tokens of a vector.
        vector_bytes: Bytes of a vector that it reads, and of a score that it writes and reads.
        flops: Flops of a vector.
    """

    window: int
    layers: int
    tokens: int
    vector_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """The widths of ``config.json``.

    Attributes:
        q_rank: Width of the latent vector from which queries are computed.
        groups, group_rank: Groups of heads, each of which projects its output down, and to which width.
        window: Tokens of the window.
        ratios: Of each layer; 0 without compressed vectors.
        index_heads: Query heads of the indexers.
        top_k: Compressed vectors that an indexer chooses.
    """

    q_rank: int
    groups: int
    group_rank: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    top_k: int

    def count(self, ratio: int) -> int:
        """Layers of a ratio."""
        return self.ratios.count(ratio)

    def caches(self, layer: int) -> tuple[Cache, ...]:
        """The caches of a layer, in vLLM's order."""
        ratio = self.ratios[layer]
        window = Cache(VECTOR_BYTES, 1, _WINDOW_BLOCK, Span("sliding", self.window))
        if not ratio:
            return (window,)
        found: tuple[Cache, ...] = (window, Cache(VECTOR_BYTES, ratio, BLOCK_SIZE), _inputs(ratio, HEAD_DIM))
        if ratio == SPARSE:
            found = (Cache(KEY_BYTES, ratio, BLOCK_SIZE), _inputs(ratio, INDEX_DIM), *found)
        return found

    def slot_bytes(self, layers: Iterable[int]) -> int:
        """Bytes that layers keep more for each token past the windows, rounded up; without padding of pages."""
        ratios = [self.ratios[layer] for layer in layers]
        sparse, dense = ratios.count(SPARSE), ratios.count(DENSE)
        return -(-(sparse * (VECTOR_BYTES + KEY_BYTES) * DENSE + dense * VECTOR_BYTES * SPARSE) // (SPARSE * DENSE))

    def matrices(self, layer: int, hidden_size: int) -> tuple[Matrix, ...]:
        """Of the compressors, which vLLM loads in 16 bits, and of the indexer; every rank holds them."""
        ratio = self.ratios[layer]
        if not ratio:
            return ()
        overlap = 1 + (ratio == SPARSE)
        found: tuple[Matrix, ...] = (Matrix(hidden_size, 2 * overlap * HEAD_DIM, part="indexer"),)
        if ratio == SPARSE:
            found += (
                Matrix(self.q_rank, self.index_heads * INDEX_DIM, part="mixer"),
                Matrix(hidden_size, self.index_heads + 2 * overlap * INDEX_DIM, part="indexer"),
            )
        return found

    def vector_params(self, layer: int, heads: int) -> int:
        """Norms, sinks of the heads and positions within a compressed vector, which are in fp32 and count as two elements in 16 bits."""
        ratio, overlap = self.ratios[layer], 1 + (self.ratios[layer] == SPARSE)
        widths = (HEAD_DIM, INDEX_DIM) if ratio == SPARSE else (HEAD_DIM,) if ratio else ()
        return self.q_rank + HEAD_DIM + heads + sum(width * (1 + ratio * overlap) for width in widths)

    def prefill_bytes(self, tokens: int, max_model_len: int) -> int:
        """Workspace in which prefills of ``tokens`` gather vectors in 16 bits, of a few sequences at once, and the places of those that they
        attend to (``DeepseekV4FlashMLAAttention.forward`` without metadata)."""
        gathered = -(-max_model_len // SPARSE) + self.window + tokens
        places = -(-(self.top_k + self.window) // _PLACES_MULTIPLE) * _PLACES_MULTIPLE + 1
        return 2 * _PREFILLS * gathered * HEAD_DIM + 4 * tokens * places

    def reads(self, heads: int) -> tuple[Read, ...]:
        """What a token reads with so many heads: windows, the vectors that indexers choose, those of layers that read all, and keys."""
        sparse, flops = self.count(SPARSE), 4 * heads * HEAD_DIM
        return (
            Read(self.window, len(self.ratios), 1, VECTOR_BYTES, flops),
            Read(self.top_k * SPARSE, sparse, SPARSE, VECTOR_BYTES, flops),
            Read(0, self.count(DENSE), DENSE, VECTOR_BYTES, flops),
            Read(0, sparse, SPARSE, KEY_BYTES + 2 * _FP32, 2 * self.index_heads * INDEX_DIM),
        )


def _inputs(ratio: int, width: int) -> Cache:
    """The inputs of a compressor of vectors of a width, each with its score: of two vectors where these overlap."""
    overlap = 1 + (ratio == SPARSE)
    return Cache(2 * overlap * width * _FP32, 1, _INPUT_BLOCKS[ratio], Span("sliding", overlap * ratio))


class CompressedAttention(NamedTuple):
    """Attention of one layer as one rank computes it, without compressor and indexer; the members are those of ``LatentAttention``."""

    hidden_size: int
    heads: int
    ranks: int
    compressed: Compressed

    @property
    def kv_tensors(self) -> int:
        """Tensors of a block that are copied separately."""
        return 1

    @property
    def slot_elements(self) -> int:
        """Elements of a token in the window, on every rank."""
        return HEAD_DIM

    def slot_bytes(self, layers: int, dtype: str) -> int:
        """Bytes of a token in the windows of ``layers`` layers."""
        return layers * VECTOR_BYTES if dtype == FP8_DS_MLA else stored_bytes(layers * HEAD_DIM, dtype)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Queries through their latent vector, the vector of a token, and the output by groups of heads."""
        shape, width = self.compressed, self.heads * HEAD_DIM
        rank = shape.groups * shape.group_rank // self.ranks
        sizes = (
            (self.hidden_size, shape.q_rank + HEAD_DIM),
            (shape.q_rank, width),
            (self.heads * self.ranks * HEAD_DIM // shape.groups, rank),
            (rank, self.hidden_size),
        )
        return tuple(Matrix(inputs, outputs, part="mixer") for inputs, outputs in sizes)

    @property
    def gemm_elements(self) -> int:
        """Elements that the GEMMs read and write per token, without hidden states."""
        shape = self.compressed
        rank = shape.groups * shape.group_rank // self.ranks
        return 2 * shape.q_rank + HEAD_DIM + 2 * self.heads * HEAD_DIM + 2 * rank

    @property
    def projected(self) -> int:
        """Elements that the projections compute per token."""
        shape = self.compressed
        return shape.q_rank + HEAD_DIM * (1 + self.heads) + shape.groups * shape.group_rank // self.ranks

    @property
    def decode_elements(self) -> int:
        """Elements that the attention of a decoding token reads and writes: query and output."""
        return 2 * self.heads * HEAD_DIM

    @property
    def decode_flops(self) -> int:
        """Flops of a decoding token per vector that it attends to."""
        return 4 * self.heads * HEAD_DIM

    @property
    def prefill_flops(self) -> int:
        """Flops of a (query, vector) pair of a prompt."""
        return self.decode_flops
