"""Layers that keep a state of fixed size in place of K and V: one class for each kind.

A sequence has one state in each of these layers, however long it is. A state is two tensors: the last inputs of a
short convolution, and a matrix a head that each token updates.

    Mamba       [inner, state]                    arXiv 2312.00752   Jamba
    Mamba2      [heads, head_dim, state]          arXiv 2405.21060   Nemotron-H, Granite 4, Bamba, Mamba-2
    GatedDelta  [value_heads, value_dim, key_dim] arXiv 2412.06464   Qwen3-Next, Qwen3.5
    KimiDelta   [heads, head_dim, head_dim]       arXiv 2510.26692   Kimi Linear

Shapes, number formats and what ranks hold are those of vLLM 0.33 (``MambaStateShapeCalculator`` and
``MambaStateDtypeCalculator`` in ``vllm/model_executor/layers/mamba/mamba_utils.py``, the layers beside it), without
speculative decoding, which keeps more of the convolution's inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

from .dtypes import dtype_bits
from .matrix import Matrix

#: Tokens of a chunk in the kernels of the delta rule, ``FLA_CHUNK_SIZE`` in vLLM.
DELTA_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixer(ABC):
    """What a layer has in place of attention. Methods take the number of tensor-parallel ranks.

    Attributes:
        conv_kernel: Tokens that the convolution looks at; it keeps all but the newest.
        state_dtype: Of the matrices, where the server sets none; "auto" is that of the convolution.
    """

    conv_kernel: int
    state_dtype: str = "auto"

    @property
    @abstractmethod
    def divisors(self) -> dict[str, int]:
        """What the ranks must divide, by name."""

    @abstractmethod
    def conv_channels(self, ranks: int = 1) -> int:
        """Channels of the convolution on each rank."""

    @abstractmethod
    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Shape, on each rank, of what the tokens update."""

    @abstractmethod
    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        """The matrices of the GEMMs on each rank, the last of which is the output projection."""

    @abstractmethod
    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        """Elements on each rank of everything that is multiplied one by one: biases, decays, norms."""

    @property
    @abstractmethod
    def chunk_tokens(self) -> int:
        """Tokens of a prompt that a kernel computes at once; 0 where the state stays on the chip."""

    @abstractmethod
    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """Bytes on each rank that a chunk's matrices take through memory, written and read."""

    @abstractmethod
    def prefill_flops(self, ranks: int = 1) -> int:
        """Flops of the recurrence for one token of a prompt on each rank, in chunks, projections aside."""

    def conv_shape(self, ranks: int = 1) -> tuple[int, int]:
        """Shape of the convolution's inputs that are kept on each rank."""
        return self.conv_kernel - 1, self.conv_channels(ranks)

    def state_shapes(self, ranks: int = 1) -> tuple[tuple[int, ...], ...]:
        """Both tensors of a state on each rank."""
        return self.conv_shape(ranks), self.recurrent_shape(ranks)

    def state_dtypes(self, dtype: str = "fp16", conv_dtype: str = "auto", state_dtype: str = "auto") -> tuple[str, str]:
        """Number formats of both tensors.

        Args:
            dtype: Of the model.
            conv_dtype: ``--mamba-cache-dtype``.
            state_dtype: ``--mamba-ssm-cache-dtype``.
        """
        conv = dtype if conv_dtype == "auto" else conv_dtype
        matrices = self.state_dtype if state_dtype == "auto" else state_dtype
        return conv, conv if matrices == "auto" else matrices

    def state_bytes(
        self, ranks: int = 1, dtype: str = "fp16", conv_dtype: str = "auto", state_dtype: str = "auto"
    ) -> int:
        """Bytes on each rank of the state of one sequence in one layer: ``MambaSpec.page_size_bytes`` of vLLM, unpadded.

        Args:
            dtype, conv_dtype, state_dtype: As ``state_dtypes`` takes them.
        """
        dtypes = self.state_dtypes(dtype, conv_dtype, state_dtype)
        pairs = zip(self.state_shapes(ranks), dtypes, strict=True)
        return sum(prod(shape) * dtype_bits(name) // 8 for shape, name in pairs)

    def matrices(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        """The projections and the convolution on each rank; the convolution is never quantised."""
        return (
            *self.projections(hidden_size, ranks),
            Matrix(self.conv_kernel, self.conv_channels(ranks), part="convolution"),
        )

    @abstractmethod
    def inner_size(self, ranks: int = 1) -> int:
        """Width on each rank of what the recurrence makes of a token, which the output projection reads."""

    @abstractmethod
    def gemm_elements(self, ranks: int = 1) -> int:
        """Elements of one token that the GEMMs read and write on each rank, hidden states aside."""

    def scan_elements(self, ranks: int = 1) -> int:
        """Elements of one token that convolution and recurrence read and write: the inputs and outputs of both."""
        return 3 * self.conv_channels(ranks) + self.inner_size(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(StateMixer):
    """Mamba as Jamba has it: a state of ``state_size`` for each channel.

    A second, small all-reduce of its step sizes, B and C is not counted.

    Attributes:
        inner: Channels.
        state_size: Elements of a channel's state.
        dt_rank: Width that the step sizes of all channels come from; it, B and C are normalised.
        conv_bias, proj_bias: Which of convolution and projections have biases.
    """

    inner: int
    state_size: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def divisors(self) -> dict[str, int]:
        return {"channels": self.inner}

    def conv_channels(self, ranks: int = 1) -> int:
        return self.inner // ranks

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        return self.inner // ranks, self.state_size

    def inner_size(self, ranks: int = 1) -> int:
        return self.inner // ranks

    @property
    def _selected(self) -> int:
        """Step sizes, B and C of one token."""
        return self.dt_rank + 2 * self.state_size

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        inner = self.inner // ranks
        return (
            Matrix(hidden_size, 2 * inner),
            Matrix(inner, self._selected),
            Matrix(self.dt_rank, inner),
            Matrix(inner, hidden_size),
        )

    def gemm_elements(self, ranks: int = 1) -> int:
        return 5 * self.inner // ranks + self._selected + self.dt_rank

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        inner = self.inner // ranks
        # A of every channel, D, and the bias of the step sizes.
        recurrence = inner * (self.state_size + 2)
        return recurrence + self._selected + self.conv_bias * inner + self.proj_bias * (2 * inner + hidden_size)

    @property
    def chunk_tokens(self) -> int:
        return 0

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        return 0

    def prefill_flops(self, ranks: int = 1) -> int:
        """9 for each element of the state, as the authors count (github.com/state-spaces/mamba, issue 110)."""
        return 9 * prod(self.recurrent_shape(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(StateMixer):
    """Mamba-2: heads with one decay each, and B and C for a group of heads.

    Attributes:
        heads, head_dim: Heads, and channels of one.
        groups: Pairs of B and C. One is copied to every rank, several are divided.
        state_size: Width of B and C.
        chunk: Tokens of a chunk.
        conv_bias, proj_bias: Which of convolution and projections have biases.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    chunk: int = 256
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def divisors(self) -> dict[str, int]:
        return {"heads": self.heads} | ({"groups": self.groups} if self.groups > 1 else {})

    def _groups(self, ranks: int) -> int:
        return max(1, self.groups // ranks)

    def inner_size(self, ranks: int = 1) -> int:
        return self.heads * self.head_dim // ranks

    def conv_channels(self, ranks: int = 1) -> int:
        return self.inner_size(ranks) + 2 * self._groups(ranks) * self.state_size

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        return self.heads // ranks, self.head_dim, self.state_size

    def _projected(self, ranks: int) -> int:
        """Gate, convolution's inputs and step sizes of one token."""
        return self.inner_size(ranks) + self.conv_channels(ranks) + self.heads // ranks

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        return Matrix(hidden_size, self._projected(ranks)), Matrix(self.inner_size(ranks), hidden_size)

    def gemm_elements(self, ranks: int = 1) -> int:
        return self._projected(ranks) + self.inner_size(ranks)

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        # A, D and the bias of the step size of every head; the norm of the output.
        recurrence = 3 * self.heads // ranks + self.inner_size(ranks)
        biases = self.conv_bias * self.conv_channels(ranks)
        return recurrence + biases + self.proj_bias * (self._projected(ranks) + hidden_size)

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """A kernel writes what a chunk adds, in fp32; one sums that up, in the state's format; one reads the sums.

        As ``_mamba_chunk_scan_combined_fwd`` of ``ssd_combined.py`` calls them.
        """
        elements, bits = prod(self.recurrent_shape(ranks)), dtype_bits(self.state_dtypes(dtype)[1])
        return 2 * elements * (32 + bits) // 8

    def prefill_flops(self, ranks: int = 1) -> int:
        """Matrix products of ``ssd_bmm.py``, ``ssd_chunk_state.py`` and ``ssd_chunk_scan.py``: section 6 of the paper.

        For each token: its products with the chunk's B, a group; then a head those weights by the inputs, its
        share of the chunk's state, and what it reads of the state before.
        """
        within = 2 * self.chunk * (self._groups(ranks) * self.state_size + self.inner_size(ranks))
        return within + 4 * prod(self.recurrent_shape(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(StateMixer):
    """Gated delta net: linear attention. Its state decays, each head at its own rate, and each token corrects it.

    Attributes:
        key_heads, value_heads: Of keys (and queries), each shared by as many of values (and states).
        key_dim, value_dim: Widths of one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def divisors(self) -> dict[str, int]:
        return {"key heads": self.key_heads, "value heads": self.value_heads}

    def inner_size(self, ranks: int = 1) -> int:
        return self.value_heads * self.value_dim // ranks

    def conv_channels(self, ranks: int = 1) -> int:
        return 2 * self.key_heads * self.key_dim // ranks + self.inner_size(ranks)

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        return self.value_heads // ranks, self.value_dim, self.key_dim

    def _projected(self, ranks: int) -> int:
        """Q, K and V, the output's gate, and the two gates of the state, of one token."""
        return self.conv_channels(ranks) + self.inner_size(ranks) + 2 * self.value_heads // ranks

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        return Matrix(hidden_size, self._projected(ranks)), Matrix(self.inner_size(ranks), hidden_size)

    def gemm_elements(self, ranks: int = 1) -> int:
        return self._projected(ranks) + self.inner_size(ranks)

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        # A and the bias of the step size of every head; the norm of a head.
        return 2 * self.value_heads // ranks + self.value_dim

    @property
    def chunk_tokens(self) -> int:
        return DELTA_CHUNK_TOKENS

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """A kernel writes the state before every chunk (``chunk_delta_h.py``), one reads it (``chunk_o.py``), in the model's format."""
        return 2 * prod(self.recurrent_shape(ranks)) * dtype_bits(dtype) // 8

    def prefill_flops(self, ranks: int = 1) -> int:
        return _delta_rule_flops(self.value_heads // ranks, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(StateMixer):
    """Kimi delta attention: a gated delta net in which every channel decays at its own rate.

    The ways down to both gates, of output and decay, are held by every rank.

    Attributes:
        heads, head_dim: Of queries, keys and values alike.
    """

    heads: int
    head_dim: int
    state_dtype: str = "fp32"

    @property
    def divisors(self) -> dict[str, int]:
        return {"heads of Kimi delta attention": self.heads}

    def inner_size(self, ranks: int = 1) -> int:
        return self.heads * self.head_dim // ranks

    def conv_channels(self, ranks: int = 1) -> int:
        return 3 * self.inner_size(ranks)

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        return self.heads // ranks, self.head_dim, self.head_dim

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        inner = self.inner_size(ranks)
        return (
            Matrix(hidden_size, self.conv_channels(ranks) + self.heads // ranks),
            Matrix(hidden_size, self.head_dim, copies=2),
            Matrix(self.head_dim, inner, copies=2),
            Matrix(inner, hidden_size),
        )

    def gemm_elements(self, ranks: int = 1) -> int:
        return self.conv_channels(ranks) + self.heads // ranks + 4 * self.head_dim + 3 * self.inner_size(ranks)

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        # A of every head, the bias of every channel's step size; the norm of a head.
        return self.heads // ranks + self.inner_size(ranks) + self.head_dim

    @property
    def chunk_tokens(self) -> int:
        return DELTA_CHUNK_TOKENS

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """See ``GatedDelta``; vLLM runs the same kernel."""
        return 2 * prod(self.recurrent_shape(ranks)) * dtype_bits(dtype) // 8

    def prefill_flops(self, ranks: int = 1) -> int:
        return _delta_rule_flops(self.heads // ranks, self.head_dim, self.head_dim)


def _delta_rule_flops(heads: int, key_dim: int, value_dim: int) -> int:
    """Flops of the chunkwise delta rule for one token: 6 d^2 + 3 C d + C^2 a head, C the chunk.

    As the Kimi Linear report (arXiv 2510.26692) counts it; where keys and values differ in width, two of the
    three products within a chunk are those of keys.
    """
    chunk = DELTA_CHUNK_TOKENS
    return heads * (6 * key_dim * value_dim + chunk * (2 * key_dim + value_dim) + chunk * chunk)
