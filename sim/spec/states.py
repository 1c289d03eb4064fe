"""Layers that keep a state of fixed size instead of K and V: one class for each kind.

A sequence of any length has one state in each of these layers. A state is two tensors: the last inputs of a short
convolution, and a matrix per head that each token updates; of a short convolution alone it is the first.

    Mamba       [inner, state]                    arXiv 2312.00752   Jamba
    Mamba2      [heads, head_dim, state]          arXiv 2405.21060   Nemotron-H, Granite 4, Bamba, Mamba-2
    GatedDelta  [value_heads, value_dim, key_dim] arXiv 2412.06464   Qwen3-Next, Qwen3.5
    KimiDelta   [heads, head_dim, head_dim]       arXiv 2510.26692   Kimi Linear
    ShortConv   none                              vLLM short_conv    LFM2

Shapes, number formats and the division among ranks are those of vLLM 0.33 (``MambaStateShapeCalculator`` and
``MambaStateDtypeCalculator`` in ``vllm/model_executor/layers/mamba/mamba_utils.py``, and the layers in that folder).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

from .deployment import dtype_bits
from .matrix import Matrix

#: Tokens of a chunk in the kernels of the delta rule, ``FLA_CHUNK_SIZE`` in vLLM.
DELTA_CHUNK_TOKENS = 64
#: Alignment of the states that FlashKDA's kernel for prefills exports.
_FLASH_KDA_TOKENS = 16
#: Major numbers of compute capabilities.
_HOPPER, _BLACKWELL = 9, (10, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixer(ABC):
    """Mixer of a layer without attention. Methods take the number of tensor-parallel ranks.

    Attributes:
        conv_kernel: Tokens in the window of the convolution; the state keeps all but the newest of them.
        state_dtype: Default number format of the matrices; "auto" is the format of the convolution's inputs.
        conv_dtype: Default number format of the convolution's inputs; "auto" is the model's.
    """

    conv_kernel: int
    state_dtype: str = "auto"
    conv_dtype: str = "auto"

    @property
    @abstractmethod
    def divisors(self) -> dict[str, int]:
        """Numbers that the number of ranks must divide, by name."""

    @abstractmethod
    def conv_channels(self, ranks: int = 1) -> int:
        """Channels of the convolution on each rank."""

    @abstractmethod
    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Shape of the recurrent state on each rank."""

    @abstractmethod
    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        """The matrices of the GEMMs on each rank; the output projection is the last."""

    @abstractmethod
    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        """Elements of vectors on each rank: biases, decays and norms."""

    @property
    @abstractmethod
    def chunk_tokens(self) -> int:
        """Tokens of a prompt that a kernel computes at once; 0 if the kernel keeps the state on the chip."""

    @abstractmethod
    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """Bytes of matrices written to and read from memory for each chunk, on each rank."""

    @abstractmethod
    def prefill_flops(self, ranks: int = 1) -> int:
        """Flops of the recurrence per token of a prompt on each rank, in chunks, without projections."""

    def export_tokens(self, major: int | None, minor: int) -> int:
        """Tokens of which blocks must be a multiple so that a prefill's kernel exports the state at an end of a block within its
        chunk, for prefix hits (``prefill_checkpoint_alignment`` of vLLM's ``MambaSpec``). 0 if it exports none.

        Args:
            major: Of the compute capability of the GPU (``GpuSpec.major``), which decides the kernel.
            minor: Minor version of vLLM, 0.``minor``.
        """
        return 0

    def conv_shape(self, ranks: int = 1, drafts: int = 0) -> tuple[int, int]:
        """Shape of the kept inputs of the convolution on each rank; of each draft of a step it keeps one more."""
        return self.conv_kernel - 1 + drafts, self.conv_channels(ranks)

    def state_shapes(self, ranks: int = 1, drafts: int = 0) -> tuple[tuple[int, ...], ...]:
        """The tensors of a state on each rank, with that many drafts in a step."""
        return self.conv_shape(ranks, drafts), self.recurrent_shape(ranks)

    def state_dtypes(self, dtype: str = "fp16", conv_dtype: str = "auto", state_dtype: str = "auto") -> tuple[str, ...]:
        """Number formats of the tensors.

        Args:
            dtype: Number format of the model.
            conv_dtype: ``--mamba-cache-dtype``.
            state_dtype: ``--mamba-ssm-cache-dtype``.
        """
        conv = _first(conv_dtype, self.conv_dtype, dtype)
        matrices = self.state_dtype if state_dtype == "auto" else state_dtype
        return conv, conv if matrices == "auto" else matrices

    def state_bytes(
        self, ranks: int = 1, dtype: str = "fp16", conv_dtype: str = "auto", state_dtype: str = "auto"
    ) -> int:
        """Bytes on each rank of the state of one sequence in one layer: ``MambaSpec.page_size_bytes`` of vLLM, unpadded.

        Args:
            dtype, conv_dtype, state_dtype: See ``state_dtypes``.
        """
        dtypes = self.state_dtypes(dtype, conv_dtype, state_dtype)
        pairs = zip(self.state_shapes(ranks), dtypes, strict=True)
        return sum(prod(shape) * dtype_bits(name) // 8 for shape, name in pairs)

    def matrices(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        """The projections and the convolution on each rank; the convolution is never quantised."""
        return (
            *(matrix._replace(part="mixer") for matrix in self.projections(hidden_size, ranks)),
            Matrix(self.conv_kernel, self.conv_channels(ranks), part="convolution"),
        )

    @abstractmethod
    def inner_size(self, ranks: int = 1) -> int:
        """Width on each rank of the recurrence's output, which the output projection reads."""

    @abstractmethod
    def gemm_elements(self, ranks: int = 1) -> int:
        """Elements that the GEMMs read and write per token on each rank, without hidden states."""

    def scan_elements(self, ranks: int = 1) -> int:
        """Elements that convolution and recurrence read and write per token: inputs and outputs of both."""
        return 3 * self.conv_channels(ranks) + self.inner_size(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(StateMixer):
    """Mamba as in Jamba: a state of ``state_size`` for each channel.

    Its second, small all-reduce (of step sizes, B and C) is not counted.

    Attributes:
        inner: Number of channels.
        state_size: Elements of a channel's state.
        dt_rank: Width of the vector from which all step sizes are computed. That vector, B and C are normalised.
        conv_bias, proj_bias: Whether the convolution and the projections have biases.
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
        """Width of step sizes, B and C of one token."""
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
        """9 per element of the state, the count of the authors (github.com/state-spaces/mamba, issue 110)."""
        return 9 * prod(self.recurrent_shape(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(StateMixer):
    """Mamba-2: each head has one decay; each group of heads has one B and one C.

    Attributes:
        heads, head_dim: Number of heads, and channels per head.
        groups: Number of groups. Ranks divide several groups; a single group is copied to every rank.
        state_size: Width of B and C.
        chunk: Tokens per chunk.
        conv_bias, proj_bias: Whether the convolution and the projections have biases.
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
        """Width of gate, inputs of the convolution and step sizes of one token."""
        return self.inner_size(ranks) + self.conv_channels(ranks) + self.heads // ranks

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        return Matrix(hidden_size, self._projected(ranks)), Matrix(self.inner_size(ranks), hidden_size)

    def gemm_elements(self, ranks: int = 1) -> int:
        return self._projected(ranks) + self.inner_size(ranks)

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        # A, D and step size bias of every head; the norm of the output.
        recurrence = 3 * self.heads // ranks + self.inner_size(ranks)
        biases = self.conv_bias * self.conv_channels(ranks)
        return recurrence + biases + self.proj_bias * (self._projected(ranks) + hidden_size)

    def export_tokens(self, major: int | None, minor: int) -> int:
        """See ``StateMixer``: on every GPU, at any token (pull request 57329)."""
        return int(minor >= 32)

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """Three kernels: one writes a chunk's contribution in fp32, one its running sum in the state's format, one reads it.

        They are those that ``_mamba_chunk_scan_combined_fwd`` of ``ssd_combined.py`` calls.
        """
        elements, bits = prod(self.recurrent_shape(ranks)), dtype_bits(self.state_dtypes(dtype)[1])
        return 2 * elements * (32 + bits) // 8

    def prefill_flops(self, ranks: int = 1) -> int:
        """Matrix products of ``ssd_bmm.py``, ``ssd_chunk_state.py`` and ``ssd_chunk_scan.py``: section 6 of the paper.

        Per token and group: the products of C with the chunk's B. Per token and head: these weights times the inputs,
        the contribution to the chunk's state, and the output from the state before the chunk.
        """
        within = 2 * self.chunk * (self._groups(ranks) * self.state_size + self.inner_size(ranks))
        return within + 4 * prod(self.recurrent_shape(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(StateMixer):
    """A gated short convolution as in LFM2: the state is its last inputs alone (``short_conv.py`` of vLLM).

    Attributes:
        inner: Number of channels.
        bias: Whether the convolution and the projections have biases.
    """

    inner: int
    bias: bool = False

    @property
    def divisors(self) -> dict[str, int]:
        return {"channels": self.inner}

    def conv_channels(self, ranks: int = 1) -> int:
        return self.inner // ranks

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        return (0,)

    def state_shapes(self, ranks: int = 1, drafts: int = 0) -> tuple[tuple[int, ...], ...]:
        return (self.conv_shape(ranks, drafts),)

    def state_dtypes(self, dtype: str = "fp16", conv_dtype: str = "auto", state_dtype: str = "auto") -> tuple[str, ...]:
        return (_first(conv_dtype, self.conv_dtype, dtype),)

    def inner_size(self, ranks: int = 1) -> int:
        return self.inner // ranks

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        inner = self.inner // ranks
        return Matrix(hidden_size, 3 * inner), Matrix(inner, hidden_size)

    def gemm_elements(self, ranks: int = 1) -> int:
        return 4 * self.inner // ranks

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        return self.bias * (4 * self.inner // ranks + hidden_size)

    @property
    def chunk_tokens(self) -> int:
        return 0

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        return 0

    def prefill_flops(self, ranks: int = 1) -> int:
        """None: there is no recurrence beside the convolution."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(StateMixer):
    """Gated delta net: linear attention. Each head's state decays at its own rate, and each token corrects it.

    Attributes:
        key_heads, value_heads: Heads of keys and queries, and of values and states. A key head serves several value
            heads.
        key_dim, value_dim: Width of a key head and of a value head.
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
        """Width of Q, K and V, the gate of the output, and the two gates of the state of one token."""
        return self.conv_channels(ranks) + self.inner_size(ranks) + 2 * self.value_heads // ranks

    def projections(self, hidden_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        return Matrix(hidden_size, self._projected(ranks)), Matrix(self.inner_size(ranks), hidden_size)

    def gemm_elements(self, ranks: int = 1) -> int:
        return self._projected(ranks) + self.inner_size(ranks)

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        # A and the bias of the step size of every head; the norm of a head.
        return 2 * self.value_heads // ranks + self.value_dim

    def export_tokens(self, major: int | None, minor: int) -> int:
        """See ``StateMixer``: FlashInfer's kernel does, which vLLM takes on Hopper, and on Blackwell for keys of width 128."""
        flashinfer = major == _HOPPER or (major in _BLACKWELL and self.key_dim == 128)
        return DELTA_CHUNK_TOKENS if flashinfer and minor >= 33 else 0

    @property
    def chunk_tokens(self) -> int:
        return DELTA_CHUNK_TOKENS

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """One kernel writes the state before each chunk (``chunk_delta_h.py``), one reads it (``chunk_o.py``).

        Both use the model's format.
        """
        return 2 * prod(self.recurrent_shape(ranks)) * dtype_bits(dtype) // 8

    def prefill_flops(self, ranks: int = 1) -> int:
        return _delta_rule_flops(self.value_heads // ranks, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(StateMixer):
    """Kimi delta attention: a gated delta net in which every channel decays at its own rate.

    Every rank holds the down projections of the gates.

    Attributes:
        heads, head_dim: Number and width of the heads of queries, keys and values.
        full_rank_gate: Whether one matrix computes the gate of the output, as in Kimi K3, instead of a matrix down and one up, which the
            gate of the decay has.
        bounded_gate: Whether the decay has a lower bound, as in Kimi K3.
    """

    heads: int
    head_dim: int
    full_rank_gate: bool = False
    bounded_gate: bool = False
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
        inner, gates = self.inner_size(ranks), 1 if self.full_rank_gate else 2
        return (
            Matrix(hidden_size, self.conv_channels(ranks) + self.heads // ranks + self.full_rank_gate * inner),
            Matrix(hidden_size, self.head_dim, copies=gates),
            Matrix(self.head_dim, inner, copies=gates),
            Matrix(inner, hidden_size),
        )

    def gemm_elements(self, ranks: int = 1) -> int:
        low_rank = 2 * self.head_dim * (1 if self.full_rank_gate else 2)
        return self.conv_channels(ranks) + self.heads // ranks + low_rank + 3 * self.inner_size(ranks)

    def vector_params(self, hidden_size: int, ranks: int = 1) -> int:
        # A of every head, the bias of every channel's step size; the norm of a head.
        return self.heads // ranks + self.inner_size(ranks) + self.head_dim

    def export_tokens(self, major: int | None, minor: int) -> int:
        """See ``StateMixer``: FlashKDA does, which vLLM takes for Kimi K3 from Hopper on (pull request 52789)."""
        flash = self.bounded_gate and self.head_dim == 128 and major in (_HOPPER, *_BLACKWELL)
        return _FLASH_KDA_TOKENS if flash and minor >= 29 else 0

    @property
    def chunk_tokens(self) -> int:
        return DELTA_CHUNK_TOKENS

    def chunk_bytes(self, ranks: int = 1, dtype: str = "fp16") -> int:
        """See ``GatedDelta``; vLLM runs the same kernel."""
        return 2 * prod(self.recurrent_shape(ranks)) * dtype_bits(dtype) // 8

    def prefill_flops(self, ranks: int = 1) -> int:
        return _delta_rule_flops(self.heads // ranks, self.head_dim, self.head_dim)


def _first(*dtypes: str) -> str:
    return next(dtype for dtype in dtypes if dtype != "auto")


def _delta_rule_flops(heads: int, key_dim: int, value_dim: int) -> int:
    """Flops of the chunkwise delta rule per token: 6 d^2 + 3 C d + C^2 per head, with chunks of C tokens.

    The formula is that of the Kimi Linear report (arXiv 2510.26692). If keys and values have different widths, two of
    the three products within a chunk have the width of keys.
    """
    chunk = DELTA_CHUNK_TOKENS
    return heads * (6 * key_dim * value_dim + chunk * (2 * key_dim + value_dim) + chunk * chunk)
