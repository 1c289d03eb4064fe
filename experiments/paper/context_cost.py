"""The paper's step time with terms for what Fig 1 does not vary: the length of the sequences, and larger batches.

Fig 1 gives a step 25.7 ms and 0.42 ms a sequence, and does not give the length of the sequences. Part of the 0.42 ms is
the reading of each sequence's keys and values, which grows with its context. Here that part is the reading time of the
GPU's memory, by its data sheet, at the assumed length of Fig 1's sequences (half way through ShareGPT's mean request).
The rest is constant:

    scale * (25.7 + (0.42 - reading(330)) * decodes + reading(all contexts) + 0.047 * prefill tokens) ms

Fig 1 ends at 40 sequences, where reading the weights decides. In larger batches their multiplications do. DistServe
measured decode steps of vLLM on an A100 and fitted two lines to them, one up to 95 sequences and one beyond. With
``large_batches`` a step of more than 95 sequences takes longer by the difference of the two lines, which is not fitted here.

All figures with a step time of the paper take this one, without large batches. ``figures.step_costs`` compares the
terms (``Terms``). Only ``scale`` is fitted. ``extra_ms`` per context token models a kernel that reads small blocks inefficiently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from ...sim.cost import PaperCost
from ...sim.cost.base import coefficient
from ...sim.cost.paper import MS_PER_DECODE, MS_PER_PREFILL_TOKEN, STEP_MS
from ...sim.spec import block_bytes, gpu, model
from ...sim.types.ticks import PER_MS, from_ms
from .published import usual_length


class Terms(StrEnum):
    """What a step time depends on, beside its sequences and prompt tokens."""

    NEITHER = "constant"
    CONTEXT = "by context"
    CONTEXT_AND_BATCH = "by context and batch"


#: The terms of all figures (``figures.step_costs``).
ADOPTED = Terms.CONTEXT


@cache
def published_step_times() -> dict[str, Any]:
    """Step times of OPT that others measured (``facts/step_times.json``)."""
    return json.loads(resources.files(__package__).joinpath("facts/step_times.json").read_text("utf-8"))


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

    def large_batch_ms(self) -> tuple[float, float]:
        """ms that a step of more than ``beyond_sequences`` takes longer: a constant, and a part for each sequence.

        DistServe measured OPT-13B on one GPU and OPT-66B on four. Another model takes the time of the one that is
        nearer in weights on a GPU, times the ratio of these weights: they are multiplied with every sequence.
        """
        measured = published_step_times()["large_batches"]["models"]
        share = model(self.model).num_params / self.tensor_parallel
        shares = {name: model(name).num_params / fact["gpus"] for name, fact in measured.items()}
        nearest = min(shares, key=lambda name: abs(shares[name] - share))
        up_to, beyond = (measured[nearest][line] for line in ("up_to", "beyond"))
        ratio = 1.0 if self.model in measured else share / shares[nearest]
        ms, ms_per_sequence = (ratio * (beyond[part] - up_to[part]) for part in ("ms", "ms_per_sequence"))
        return ms, ms_per_sequence


def reading_ms() -> float:
    """ms in which the A100's memory reads the keys and values of one token of OPT-13B."""
    return Server().reading_ms()


class ContextCost(PaperCost):
    """``PaperCost`` with a step time that depends on the context.

    Args:
        scale: Factor on the whole step.
        block_size: Tokens of a block, for swaps and copies.
        extra_ms: Kernel time beyond the reading, per token of context.
        server: The model and the GPUs that read its keys and values.
        step_ms, ms_per_decode, ms_per_prefill_token: As for ``PaperCost``; ``ms_per_decode`` at Fig 1's length.
        sequence_slope: Share of ``ms_per_decode``, without the reading, that a sequence takes.
        large_batches: Whether batches beyond Fig 1's take DistServe's longer steps.
        copy_slowdown: How many times as long copies take as the data sheet's bandwidth allows.
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
        large_batches: bool = False,
        copy_slowdown: float = 1.0,
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
        self._per_slot_copied = round(self._per_slot_copied * copy_slowdown)
        self._most_small = published_step_times()["large_batches"]["beyond_sequences"]
        longer_ms, per_sequence_ms = server.large_batch_ms() if large_batches else (0.0, 0.0)
        self._large_step, self._per_decode_of_large = (
            round(scale * ms * PER_MS) for ms in (longer_ms, per_sequence_ms)
        )

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``; attention pairs have no effect."""
        ticks = super().step_ticks(decodes, decode_context, prefill_tokens, prefill_pairs)
        return ticks + self._per_context_token * decode_context + self._beyond_small(decodes)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; one line covers all contexts."""
        base, _, until = super().decode_line(decodes, context)
        return base + self._beyond_small(decodes), self._per_context_token, until

    def _beyond_small(self, decodes: int) -> int:
        """Ticks that a step of so many sequences takes longer than Fig 1's line."""
        return self._large_step + self._per_decode_of_large * decodes if decodes > self._most_small else 0

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        source = "data sheet of the GPU, and what a kernel takes beyond"
        described = super().describe() | {"per_context_token": coefficient(self._per_context_token, "ticks", source)}
        if not self._per_decode_of_large:
            return described
        distserve = f"DistServe's decode steps of more than {self._most_small} sequences, less those of fewer"
        return described | {
            "step_of_a_large_batch": coefficient(self._large_step, "ticks", distserve),
            "per_decode_of_a_large_batch": coefficient(self._per_decode_of_large, "ticks", distserve),
        }


def step_cost(terms: Terms, scale: float) -> PaperCost:
    """The step time of OPT-13B with these terms."""
    if terms is Terms.NEITHER:
        return PaperCost(scale)
    return ContextCost(scale, large_batches=terms is Terms.CONTEXT_AND_BATCH)
