"""The paper's step time with a term for the length of the sequences, which Fig 1 does not vary.

Fig 1 gives a step 25.7 ms and 0.42 ms a sequence, and does not give the length of the sequences. Part of the 0.42 ms is
the reading of each sequence's keys and values, which grows with its context. Here that part is the reading time of the
GPU's memory, by its data sheet, at the assumed length of Fig 1's sequences (half way through ShareGPT's mean request).
The rest is constant:

    scale * (25.7 + (0.42 - reading(330)) * decodes + reading(all contexts) + 0.047 * prefill tokens) ms

All figures with a step time of the paper take this one; Fig 13b states what ``PaperCost`` would give beside it. Only
``scale`` is fitted. ``extra_ms`` per context token models a kernel that reads small blocks inefficiently.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...sim.cost import PaperCost
from ...sim.cost.base import coefficient
from ...sim.cost.paper import MS_PER_DECODE, MS_PER_PREFILL_TOKEN, STEP_MS
from ...sim.spec import block_bytes, gpu, model
from ...sim.types.ticks import from_ms
from .published import usual_length


@dataclass(frozen=True)
class Server:
    """A model on its GPUs; the default is the one with measured steps."""

    model: str = "opt-13b"
    gpu: str = "a100-40gb"
    tensor_parallel: int = 1

    def block_bytes(self, block_size: int = 16) -> int:
        """Bytes of a block of this many tokens on each GPU."""
        return block_bytes(model(self.model), self.tensor_parallel, block_size)

    def reading_ms(self) -> float:
        """ms in which a GPU's memory reads its part of the keys and values of one token."""
        return 1000 * self.block_bytes(1) / gpu(self.gpu).memory_bytes_per_s


def reading_ms() -> float:
    """ms in which the A100's memory reads the keys and values of one token of OPT-13B."""
    return Server().reading_ms()


class ContextCost(PaperCost):
    """``PaperCost`` with a term for reading the KV cache of the running sequences, in proportion to their context tokens.

    Args:
        scale: Factor on the whole step.
        block_size: Tokens of a block, for swaps and copies.
        extra_ms: Kernel time beyond the reading, per token of context.
        server: The model and the GPUs that read its keys and values.
        step_ms, ms_per_decode, ms_per_prefill_token: As for ``PaperCost``; ``ms_per_decode`` at Fig 1's length.
        sequence_slope: Share of ``ms_per_decode``, without the reading, that a sequence takes.
    """

    name = "paper, by context"

    def __init__(
        self,
        scale: float = 1.0,
        block_size: int = 16,
        extra_ms: float = 0.0,
        server: Server = Server(),
        step_ms: float = STEP_MS,
        ms_per_decode: float = MS_PER_DECODE,
        ms_per_prefill_token: float = MS_PER_PREFILL_TOKEN,
        sequence_slope: float = 1.0,
    ) -> None:
        super().__init__(
            scale,
            server.block_bytes(block_size),
            block_size=block_size,
            step_ms=step_ms,
            ms_per_decode=ms_per_decode,
            ms_per_prefill_token=ms_per_prefill_token,
        )
        per_token_ms = server.reading_ms()
        self._per_decode = from_ms(scale * sequence_slope * (ms_per_decode - per_token_ms * usual_length()))
        self._per_context_token = from_ms(scale * (per_token_ms + extra_ms))

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``; attention pairs have no effect."""
        ticks = super().step_ticks(decodes, decode_context, prefill_tokens, prefill_pairs)
        return ticks + self._per_context_token * decode_context

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; one line covers all contexts."""
        base, _, until = super().decode_line(decodes, context)
        return base, self._per_context_token, until

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        source = "data sheet of the GPU, and what a kernel takes beyond"
        return super().describe() | {"per_context_token": coefficient(self._per_context_token, "ticks", source)}
