"""The interface of cost models, and a wrapper that scales step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Protocol, runtime_checkable

from ..spec.deployment import MAX_CAPTURED, padded_batch


@runtime_checkable
class StepCost(Protocol):
    """Step times of a server. The engine calls these methods; every duration is an integer of ticks (picoseconds).

    Coefficients are rounded to ticks once, on construction, so that sums over steps are exact.

    Attributes:
        name: Name in ``run.json`` and on the command line.
    """

    name: str

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """Duration of one step in ticks, without swaps.

        Args:
            decodes: Sequences that decode one token each.
            decode_context: Sum of the context lengths of these sequences in tokens, including the new tokens.
            prefill_tokens: Prompt tokens computed in this step, including padding.
            prefill_pairs: Causal (query, key) pairs of these prompt tokens: p * (p + 1) / 2 for a whole prompt of p
                tokens.
        """

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """The time of a decode-only step as a line over its context: ``(base_ticks, ticks_per_token, until)``.

        For every total context c with ``context <= c < until`` (None: no upper end), ``step_ticks(decodes, c, 0, 0) ==
        base_ticks + ticks_per_token * c``, and ``decode_line(decodes, c)`` returns the same tuple. The engine sums a
        leap by it.
        """

    def swap_out_ticks(self, blocks: int) -> int:
        """Ticks to copy ``blocks`` blocks from the device to the host."""

    def swap_in_ticks(self, blocks: int) -> int:
        """Ticks to copy ``blocks`` blocks from the host to the device."""

    def copy_ticks(self, slots: int) -> int:
        """Ticks to copy the KV of ``slots`` tokens within device memory."""

    def describe(self) -> dict[str, object]:
        """Every coefficient as ``{"value", "unit", "source"}``, for ``run.json``."""


#: Query rows of a block of the longest prompt (``StepParts.per_block``).
BLOCK_ROWS = 64


class StepParts(NamedTuple):
    """The time of a step with prompts as a sum of tabulated parts, so that the compiled core needs no call into Python:

        step_ticks(decodes, context, tokens, pairs)
            = max(least, of_tokens(decodes + tokens) + of_rows(decodes) + attention + more)

    Without decodes, attention is that of the prompts. With decodes it is
    ``mixed_decode + prefill + per_block * decodes * blocks - shared``, and at least ``mixed_decode`` and ``prefill``.
    ``blocks`` is ``prompt_blocks(tokens, pairs)``.

    Attributes:
        of_tokens: Ticks as a function of the tokens of the step.
        of_rows: Ticks as a function of the sequences that decode.
        mixed_decode: Decode attention in a step with prompts; a line as of ``StepCost.decode_line``.
        prefill_node: Prefill attention at the nodes of a ``Surface`` over tokens and pairs; None for the line below.
        per_token: Ticks per prompt token, of the line.
        per_pair: ``(window, ticks per pair)`` of each kind of layer. A window of W tokens bounds the pairs to W *
            tokens; 0 is no window.
        per_block: Ticks for each decode and block of query rows of the longest prompt.
        shared: Ticks saved by repeated reads of the same blocks.
        more: Ticks of every step.
        least: Lower bound of the step in ticks.
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
    """Blocks of 64 query rows of the longest prompt of a step, estimated from its totals.

    The length of the longest prompt is taken as ``2 * pairs / tokens``: the mean prompt length weighted by tokens, for
    whole prompts. It is at most ``tokens``.

    Args:
        tokens: Prompt tokens of the step, at least 1.
        pairs: Causal (query, key) pairs of these tokens.
    """
    return -(-min(tokens, max(1, 2 * pairs // tokens)) // BLOCK_ROWS)


def among(cost: StepCost, tokens: Sequence[int]) -> StepCost:
    """The cost of this engine's steps while other engines that share its experts compute theirs.

    Args:
        cost: A cost model; one that does not model shared experts is returned unchanged.
        tokens: Tokens of the current step of each engine, this one included.
    """
    found: Callable[[Sequence[int]], StepCost] | None = getattr(cost, "among", None)
    return cost if found is None else found(tokens)


class Peers(NamedTuple):
    """The joint work of engines that share experts (data parallelism) in one step, in tokens.

    Attributes:
        rows: Tokens of all engines that are sent to experts.
        received: Most tokens that any engine receives from the others.
        padded: Tokens that every engine computes after padding; None without padding.
    """

    rows: int
    received: int
    padded: int | None

    @classmethod
    def of(cls, tokens: Sequence[int], cuda_graphs: bool) -> Peers:
        """The joint work of one step, padded as by vLLM's ``coordinate_batch_across_dp``.

        All engines pad to the largest step if a CUDA graph was captured for its size. If one engine must run without a
        graph, all do, without padding.

        Args:
            tokens: Tokens of the step of each engine.
            cuda_graphs: Whether the engines captured CUDA graphs.
        """
        most = max(tokens)
        if not cuda_graphs or most > MAX_CAPTURED:
            return cls(sum(tokens), sum(tokens) - min(tokens), None)
        padded = padded_batch(most)
        return cls(padded * len(tokens), padded * (len(tokens) - 1), padded)


def outside_ticks(cost: StepCost) -> int | None:
    """Ticks that a request spends outside the engine (HTTP, tokenizer); None if the cost model knows no server."""
    found: int | None = getattr(cost, "outside_ticks", None)
    return found


def effective_context(cost: StepCost) -> Callable[[int, int], int] | None:
    """The cost model's correction of the decode context for blocks that several block tables share; None if it has
    none.

    A cost model without the correction prices every slot as read from memory, once for each block table that names it.
    The function takes the sum of the contexts, and the slots among them that are repeated reads
    (``Memory.repeated_slots``). It returns the context to price. The difference depends on the repeated slots alone,
    so it is constant within a leap.
    """
    found: Callable[[int, int], int] | None = getattr(cost, "effective_context", None)
    return found


#: Resolution of the time of a repeated read over that of a first one.
_READ_PARTS = 1000


def context_of_reads(repeated_reads: float) -> Callable[[int, int], int] | None:
    """``effective_context`` where a repeated read takes ``repeated_reads`` of the time of a first one; None where it takes as long.

    Layers with a window are priced with the same context, though they may not reach the slots that are read again.
    """
    free = _READ_PARTS - round(repeated_reads * _READ_PARTS)
    if not free:
        return None
    return lambda context, repeated: context - repeated * free // _READ_PARTS


def saved_ticks(cost: StepCost) -> Callable[[int, int, int], int] | None:
    """By how much a mixed step is shorter where its decodes read the same blocks, which are then in the GPU's cache.

    None if the cost model has no such saving.

    The function takes the number of decodes, the sum of their contexts, and the slots among them that are repeated
    reads (``Memory.repeated_slots``). It returns the ticks by which a step with prompts is shorter.
    """
    found: Callable[[int, int, int], int] | None = getattr(cost, "saved_ticks", None)
    return found


def draft_ticks(cost: StepCost, rows: tuple[int, int, int, int], sampled: tuple[int, int]) -> int:
    """Ticks that the drafter takes after a step; 0 for a cost model without a drafter.

    Args:
        rows: The work of the step: the arguments of ``StepCost.step_ticks``.
        sampled: Number of sequences that sample a token in the step and then get drafts, and the sum of their
            contexts.
    """
    found: Callable[[tuple[int, int, int, int], tuple[int, int]], int] | None = getattr(cost, "draft_ticks", None)
    return 0 if found is None else found(rows, sampled)


def coefficient(value: float, unit: str, source: str) -> dict[str, object]:
    """One entry of ``describe``."""
    return {"value": value, "unit": unit, "source": source}


_PARTS = 1_000_000


class ScaledCost:
    """Multiplies step times by ``scale``. Swaps and copies, which are bound by links, are not scaled.

    Base and slope of a decode line are each scaled and rounded to ticks, so that line and step agree exactly.

    Args:
        inner: The cost model to scale.
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
        """See ``StepCost``; the lines end at the same contexts."""
        base, slope, until = self.inner.decode_line(decodes, context)
        return self._scaled(base), self._scaled(slope), until

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; the coefficients are before scaling."""
        source = "setting; multiplies the steps, not the swaps"
        return {**self.inner.describe(), "scale": coefficient(self.scale, "1", source)}
