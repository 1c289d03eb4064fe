"""Step times that SOSP'23 measured: OPT-13B on one A100-40GB."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from ..types.errors import SettingError
from ..types.ticks import PER_SECOND, from_ms
from .base import coefficient

STEP_MS = 25.7
MS_PER_DECODE = 0.42
MS_PER_PREFILL_TOKEN = 0.047
# Fig 19a shows one prompt of 256 tokens: what lies beyond is extrapolated.
PREFILL_KNEE_TOKENS = 256
OPT_13B_BLOCK_BYTES = 16 * 819_200

# Least squares of ms = bytes / bandwidth + blocks * ms_per_block over Fig 19a's nine block sizes:
# 256 tokens of OPT-13B, 209,715,200 bytes, in 256 / block_size blocks.
# Residuals stay below 0.11 ms for swap-out; for swap-in, with a curve that bends, below 3.1 ms.
SWAP_OUT_BYTES_PER_S = 12.92e9
SWAP_OUT_MS_PER_BLOCK = 0.1537
SWAP_IN_BYTES_PER_S = 11.786e9
SWAP_IN_MS_PER_BLOCK = 0.2576
#: Of an A100-40GB, by its data sheet; a copy reads and writes.
MEMORY_BYTES_PER_S = 1_555e9


class StepTerms(NamedTuple):
    """``PaperCost.step_ticks`` in numbers.

    Attributes:
        step, per_decode, per_token: Ticks of a step, of a decode and of a prefill token.
        steeper: Ticks that each prefill token past ``knee`` costs more.
        knee: Tokens.
    """

    step: int
    per_decode: int
    per_token: int
    steeper: int
    knee: int


class PaperCost:
    """``scale * (25.7 + 0.42 * decodes + 0.047 * prefill_tokens)`` ms, whatever the context.

    The first two coefficients are read off the paper's Fig 1 (right), the third off Fig 19a. Swaps
    are fitted to Fig 19a too and are not scaled.

    Args:
        scale: Factor on the whole step, rounded into each coefficient.
        block_bytes: Bytes of one KV block, which a swap moves.
        block_size: Tokens per block.
        ms_per_prefill_token_beyond: Slope past the 256th prompt token of a step. None goes on
            as before; DistServe's fit for this model and card is about 0.14.
        step_ms, ms_per_decode, ms_per_prefill_token: In place of the three coefficients, for a step that is not
            OPT-13B's.
    """

    name = "paper"

    def __init__(
        self,
        scale: float = 1.0,
        block_bytes: int = OPT_13B_BLOCK_BYTES,
        ms_per_prefill_token_beyond: float | None = None,
        block_size: int = 16,
        step_ms: float = STEP_MS,
        ms_per_decode: float = MS_PER_DECODE,
        ms_per_prefill_token: float = MS_PER_PREFILL_TOKEN,
    ) -> None:
        if ms_per_prefill_token_beyond is None:
            ms_per_prefill_token_beyond = ms_per_prefill_token
        _require_positive("scale", scale)
        _require_positive("block_bytes", block_bytes)
        _require_positive("ms_per_prefill_token_beyond", ms_per_prefill_token_beyond)
        self.scale = scale
        self._step = from_ms(scale * step_ms)
        self._per_decode = from_ms(scale * ms_per_decode)
        self._per_prefill_token = from_ms(scale * ms_per_prefill_token)
        self._per_prefill_token_beyond = from_ms(scale * ms_per_prefill_token_beyond)
        self._steeper = self._per_prefill_token_beyond - self._per_prefill_token
        self._per_block_out = _block_ticks(block_bytes, SWAP_OUT_BYTES_PER_S, SWAP_OUT_MS_PER_BLOCK)
        self._per_block_in = _block_ticks(block_bytes, SWAP_IN_BYTES_PER_S, SWAP_IN_MS_PER_BLOCK)
        self._per_slot_copied = round(2 * block_bytes / block_size / MEMORY_BYTES_PER_S * PER_SECOND)
        self._lines: dict[int, tuple[int, int, int | None]] = {}

    @staticmethod
    def fits(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int) -> bool:
        """Whether the measurements apply: the layers and width of OPT-13B on one A100-40GB."""
        return (model.num_layers, model.hidden_size, gpu.name, tensor_parallel) == (40, 5120, "a100-40gb", 1)

    @property
    def terms(self) -> StepTerms:
        """The coefficients of ``step_ticks`` as integers."""
        return StepTerms(self._step, self._per_decode, self._per_prefill_token, self._steeper, PREFILL_KNEE_TOKENS)

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``; independent of context and pairs."""
        ticks = self._step + self._per_decode * decodes + self._per_prefill_token * prefill_tokens
        beyond = prefill_tokens - PREFILL_KNEE_TOKENS
        return ticks + self._steeper * beyond if beyond > 0 else ticks

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; one line for all contexts."""
        line = self._lines.get(decodes)
        if line is None:
            line = self._lines[decodes] = (self._step + self._per_decode * decodes, 0, None)
        return line

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return blocks * self._per_block_out

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return blocks * self._per_block_in

    def copy_ticks(self, slots: int) -> int:
        """See ``StepCost``."""
        return slots * self._per_slot_copied

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        fig1, fig19 = "SOSP'23 Fig 1 right, digitised", "SOSP'23 Fig 19a, digitised"
        return {
            "name": self.name,
            "scale": coefficient(self.scale, "1", "setting; multiplies the steps, not the swaps"),
            "step": coefficient(self._step, "ticks", fig1),
            "per_decode": coefficient(self._per_decode, "ticks", fig1),
            "per_prefill_token": coefficient(self._per_prefill_token, "ticks", fig19),
            "per_prefill_token_beyond_256": coefficient(
                self._per_prefill_token_beyond, "ticks", "setting; by default the slope below 256 tokens"
            ),
            "per_block_swapped_out": coefficient(self._per_block_out, "ticks", f"{fig19}, least squares"),
            "per_block_swapped_in": coefficient(self._per_block_in, "ticks", f"{fig19}, least squares"),
            "per_slot_copied": coefficient(self._per_slot_copied, "ticks", "data sheet of the A100-40GB"),
        }


def _block_ticks(block_bytes: int, bytes_per_s: float, ms_per_block: float) -> int:
    return round(block_bytes / bytes_per_s * PER_SECOND + from_ms(ms_per_block))


def _require_positive(field: str, value: float) -> None:
    if not isfinite(value) or value <= 0:
        raise SettingError(field, value, "must be a positive number")
