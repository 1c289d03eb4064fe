"""The interface of a cost model, as the engine calls it, and cost models that change another one: a factor, and batches in
flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Protocol, runtime_checkable

from ..spec.deployment import MAX_CAPTURED, padded_batch


@runtime_checkable
class StepCost(Protocol):
    """Durations in ticks. Coefficients are rounded to ticks once, on construction; the rest is exact.

    Attributes:
        name: Name in ``run.json`` and on the command line.
    """

    name: str

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """Duration of one iteration without swaps.

        Args:
            decodes: Sequences that decode one token each.
            decode_context: Sum of the context lengths of these sequences, new tokens included.
            prefill_tokens: Prompt tokens computed in this step, padding included.
            prefill_pairs: Causal (query, key) pairs of these prompts: p * (p + 1) / 2 for a whole prompt of p tokens.
        """

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """``(base_ticks, ticks_per_context_token, until_context)`` of a step that only decodes.

        For every context from ``context`` to before ``until_context`` (None: without end),
        ``step_ticks(decodes, context, 0, 0) == base_ticks + ticks_per_context_token * context``, and the answer is the same.
        """

    def swap_out_ticks(self, blocks: int) -> int:
        """Time to copy ``blocks`` blocks to the host."""

    def swap_in_ticks(self, blocks: int) -> int:
        """Time to copy ``blocks`` blocks back from the host."""

    def copy_ticks(self, slots: int) -> int:
        """Time to copy the keys and values of ``slots`` tokens within the device's memory."""

    def describe(self) -> dict[str, object]:
        """Every coefficient as ``{"value", "unit", "source"}``, for ``run.json``."""


#: Query rows of a block of the longest prompt (``StepParts.per_block``).
BLOCK_ROWS = 64


class StepParts(NamedTuple):
    """A step with prompts as a sum of parts, each over one or two counts, so that the compiled core computes it without a call:

        step_ticks(decodes, context, tokens, pairs)
            = max(least, of_tokens(decodes + tokens) + of_rows(decodes) + attention + more)

    Where sequences decode too, attention is ``mixed_decode + prefill + per_block * decodes * blocks - shared``, and no less than either of
    the first two; ``blocks`` are those of the longest prompt (``prompt_blocks``).

    Attributes:
        of_tokens, of_rows: Ticks by a count.
        mixed_decode: Attention of the decodes in a step with prompts, as ``decode_line`` gives it.
        prefill_node: Attention of the prompts as the nodes of a ``Surface`` over tokens and pairs; None for a line.
        per_token, per_pair: The line: ticks of a token; and of a pair, for each window of layers (0: none), which bounds the
            pairs to the window times the tokens.
        per_block, shared, more, least: See above.
    """

    of_tokens: Callable[[int], int]
    of_rows: Callable[[int], int]
    mixed_decode: Callable[[int, int], tuple[int, int, int | None]]
    prefill_node: Callable[[int, int], int] | None = None
    per_token: int = 0
    per_pair: tuple[tuple[int, int], ...] = ()
    per_block: int = 0
    shared: int = 0
    more: int = 0
    least: int = 0


def prompt_blocks(tokens: int, pairs: int) -> int:
    """Blocks of 64 query rows of the longest prompt of a step with so many prompt tokens, one or more, and pairs: of the mean length of
    whole prompts, weighted by their tokens, or of the chunk."""
    return -(-min(tokens, max(1, 2 * pairs // tokens)) // BLOCK_ROWS)


def among(cost: StepCost, tokens: Sequence[int]) -> StepCost:
    """The cost of an engine's steps while the engines that share its experts compute steps of so many tokens, one number for
    each engine, its own included. A cost that does not know other engines keeps its times."""
    found: Callable[[Sequence[int]], StepCost] | None = getattr(cost, "among", None)
    return cost if found is None else found(tokens)


class Peers(NamedTuple):
    """What the engines that share experts compute together in a step.

    Attributes:
        rows: Tokens that go to the experts, of all engines.
        received: Most of them that an engine receives from others.
        padded: Tokens that every engine computes; None where each computes its own and no padding.
    """

    rows: int
    received: int
    padded: int | None

    @classmethod
    def of(cls, tokens: Sequence[int], cuda_graphs: bool) -> Peers:
        """Of steps of so many tokens, as vLLM's ``coordinate_batch_across_dp`` pads them: all engines to the largest, if
        that is small enough for a graph; if one engine runs without a graph, so do all."""
        most = max(tokens)
        if not cuda_graphs or most > MAX_CAPTURED:
            return cls(sum(tokens), sum(tokens) - min(tokens), None)
        padded = padded_batch(most)
        return cls(padded * len(tokens), padded * (len(tokens) - 1), padded)


def outside_ticks(cost: StepCost) -> int | None:
    """Time that a request spends outside of the engine on the server of this cost model; None of most models, which know no
    server."""
    found: int | None = getattr(cost, "outside_ticks", None)
    return found


def effective_context(cost: StepCost) -> Callable[[int, int], int] | None:
    """The function of a cost model that says which context the decodes of a step are priced with; None of most models, which
    take every slot to be read from memory as often as a block table names it.

    Its arguments are the sum of the contexts, and of them the slots that are read again: those in a block that the table of
    another decoding sequence names too, beyond the first of these tables (``Memory.repeated_slots``). The difference of its value
    and the context depends on these slots alone, so that the steps of a leap have it in common.
    """
    found: Callable[[int, int], int] | None = getattr(cost, "effective_context", None)
    return found


def saved_ticks(cost: StepCost) -> Callable[[int, int, int], int] | None:
    """The function of a cost model that says by how much a step that decodes and prefills is shorter because its decodes name the same
    blocks, which a cache then holds: of the decodes, the sum of their contexts, and the slots of it that are read again
    (``Memory.repeated_slots``). None of most models."""
    found: Callable[[int, int, int], int] | None = getattr(cost, "saved_ticks", None)
    return found


def draft_ticks(cost: StepCost, rows: tuple[int, int, int, int], sampled: tuple[int, int]) -> int:
    """Time of the drafts of a step, of a cost that knows a drafter; else 0.

    Args:
        rows: What the step computes; the arguments of ``StepCost.step_ticks``.
        sampled: Sequences that a token is sampled for, which drafts follow, and the sum of their contexts.
    """
    found: Callable[[tuple[int, int, int, int], tuple[int, int]], int] | None = getattr(cost, "draft_ticks", None)
    return 0 if found is None else found(rows, sampled)


def coefficient(value: float, unit: str, source: str) -> dict[str, object]:
    """One entry of ``describe``."""
    return {"value": value, "unit": unit, "source": source}


class PipelinedCost:
    """Steps of a server that keeps a batch in each pipeline stage, as vLLM V1 does.

    The sequences that decode are divided into as many batches as there are stages. A step of the engine is one round: every
    batch passes every stage once, one behind the other, which takes as long as one batch takes to pass all stages:

        stages * (time of a batch in a stage) = time of a batch in the whole model

    A prefill is one batch's: the others wait for it in every stage (a bubble). That prefills of several batches overlap is not
    credited. Stages are taken to be equally long. Which sequences of a batch share blocks is unknown, so repeated reads cost as much
    as first ones.

    Args:
        inner: The cost of one batch through the whole model.
        stages: Pipeline stages, two or more.
    """

    def __init__(self, inner: StepCost, stages: int) -> None:
        self.inner, self.stages, self.name = inner, stages, inner.name
        self.swap_out_ticks, self.swap_in_ticks = inner.swap_out_ticks, inner.swap_in_ticks
        self.copy_ticks, self.outside_ticks = inner.copy_ticks, outside_ticks(inner)

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``; of the largest batch."""
        base, slope, _ = self.decode_line(decodes, decode_context)
        line = base + slope * decode_context
        if not prefill_tokens:
            return line
        few, context = -(-decodes // self.stages), decode_context // self.stages
        return max(line, self.inner.step_ticks(few, context, prefill_tokens, prefill_pairs))

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; a token of context is one of a batch's for every stage."""
        base, slope, until = self.inner.decode_line(-(-decodes // self.stages), context // self.stages)
        return base, slope // self.stages, None if until is None else until * self.stages

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; the coefficients are those of one batch."""
        source = "one for each pipeline stage, as vLLM V1 keeps them"
        return {**self.inner.describe(), "batches_in_flight": coefficient(self.stages, "1", source)}


_PARTS = 1_000_000


class ScaledCost:
    """Multiplies step times by ``scale``. Swaps and copies, which links bound, keep their times.

    A decode step is scaled as its line, intercept and slope each rounded to ticks, so line and step agree exactly.

    Args:
        scale: Factor, rounded to a millionth.
    """

    def __init__(self, inner: StepCost, scale: float) -> None:
        self.inner, self.scale, self.name = inner, scale, inner.name
        self._factor = round(scale * _PARTS)
        self.swap_out_ticks, self.swap_in_ticks = inner.swap_out_ticks, inner.swap_in_ticks
        self.copy_ticks, self.outside_ticks = inner.copy_ticks, outside_ticks(inner)
        self.effective_context = effective_context(inner)
        saved = saved_ticks(inner)
        self.saved_ticks = None if saved is None else lambda *work: self._scaled(saved(*work))

    def among(self, tokens: Sequence[int]) -> StepCost:
        """See ``among``."""
        found = copy(self)
        found.inner = among(self.inner, tokens)
        return found

    def _scaled(self, ticks: int) -> int:
        return (ticks * self._factor + _PARTS // 2) // _PARTS

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        base, slope, _ = self.decode_line(decodes, decode_context)
        line = base + slope * decode_context
        if not prefill_tokens:
            return line
        inner = self.inner.step_ticks
        # What the prefill adds, so that a step with one is never shorter than without by rounding.
        more = inner(decodes, decode_context, prefill_tokens, prefill_pairs) - inner(decodes, decode_context, 0, 0)
        return line + self._scaled(more)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; knots stay where they are."""
        base, slope, until = self.inner.decode_line(decodes, context)
        return self._scaled(base), self._scaled(slope), until

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; the coefficients are those before scaling."""
        source = "setting; multiplies the steps, not the swaps"
        return {**self.inner.describe(), "scale": coefficient(self.scale, "1", source)}
