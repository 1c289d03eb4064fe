"""A sequence on its way through the server, and the plan of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..memory.contiguous.contiguous import Grant
    from ..workload.groups import Group

#: What a residency on the device starts with: a first prefill, one that computes again what was lost, a
#: return from the host, or a fork of a sibling that has been prefilled.
FRESH, RECOMPUTED, SWAPPED_IN, FORKED = 0, 1, 2, 3
#: In place of a step: before all, the one before the first included.
NOT_DECODING = -2


class Sequence:
    """One sequence of a request: what is asked, and where it stands.

    Decoding is lockstep: while a sequence runs it gains one token a step. So nothing is counted
    up here; all follows from the decode step (steps begun since the run started).

    Attributes:
        index: Row of the sequence in the workload.
        order: Its place in the order of arrival: the same number, unless users decide when requests are sent.
        prompt_tokens, output_tokens, max_tokens: As in the workload.
        start_tokens: Tokens with KV after the first step of its next (or last) residency on the device: the
            prompt, and after a preemption also what had been generated. A prefill computes them all;
            a sequence that was swapped out brings all but the last one with it.
        computed_tokens: Of those, the ones with KV before its next prefill step: cached ones, and those of
            earlier chunks.
        lost_tokens: Tokens with KV that was computed and given up: to compute one of them is to do it again.
        generated_tokens: Output tokens that existed when it was last admitted.
        start_step: Decode step of the step in which its last prefill ended, or ``NOT_DECODING``.
        kind: What its next (or last) residency starts with, as the ledger names it.
        lag: ``start_tokens - start_step``, so that the tokens computed, with those of ``decode_step``,
            are ``decode_step + lag``.
        finish_step: Decode step at which its last token is out.
        grant: What a memory of reservations gave it; other memories set none.
        group: The sequences of one request that share its prompt, where there are several, else None.
    """

    __slots__ = (
        "computed_tokens", "finish_step", "generated_tokens", "grant", "group", "index", "kind", "lag",
        "lost_tokens", "max_tokens", "order", "output_tokens", "prompt_tokens", "start_step", "start_tokens",
    )  # fmt: skip
    # Set when it starts, and by the memory.
    finish_step: int
    lag: int
    grant: Grant

    def __init__(self, index: int, prompt_tokens: int, output_tokens: int, max_tokens: int) -> None:
        self.index = self.order = index
        self.prompt_tokens = self.start_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.generated_tokens = self.computed_tokens = self.lost_tokens = 0
        self.start_step = NOT_DECODING
        self.kind = FRESH
        self.group: Group | None = None

    @property
    def target_tokens(self) -> int:
        """Prompt and true output together (F in the ledger's definitions)."""
        return self.prompt_tokens + self.output_tokens

    def held_tokens(self, decode_step: int) -> int:
        """Tokens with KV before ``decode_step`` computes its own."""
        return decode_step - 1 + self.lag


class StepPlan(NamedTuple):
    """What one step does. Frozen: a policy decides it, memory and engine carry it out.

    Attributes:
        admitted: Sequences that end their prefill in this step: from the head of the waiting queue, or of
            those in a chunked prefill.
        prefill_tokens: Tokens that all prefills of the step compute, padding included.
        preempted: Sequences that give up their blocks and go back to waiting.
        swapped_out: Running sequences that move their blocks to host memory.
        swapped_in: Sequences that come back from the head of the swapped queue and decode.
        padded_tokens: Length that static batching pads every prompt to; 0 where nothing is padded.
        steady: Whether the same decision holds in the steps that follow, as far as the policy's
            horizon says; False asks for one real step.
        wakes: Whether a request that arrives could be admitted, so that a leap stops for it.
        chunks: Prefills that go on after this step: the sequence, and the tokens that it computes now.
            A new one leaves the head of the waiting queue.
        stalls: The sequences that stand still from this step on and keep their blocks, and those that go on; or empty.
        pauses: Whether the running sequences stand still in this step, which only prefills.
        order: The queue as the scheduler sorts it, with the admitted sequences first, and its victims; or empty.
        forked: Siblings of running sequences that decode from this step on, from what those have computed.
    """

    admitted: tuple[Sequence, ...] = ()
    prefill_tokens: int = 0
    preempted: tuple[Sequence, ...] = ()
    swapped_out: tuple[Sequence, ...] = ()
    swapped_in: tuple[Sequence, ...] = ()
    padded_tokens: int = 0
    steady: bool = True
    wakes: bool = True
    chunks: tuple[tuple[Sequence, int], ...] = ()
    pauses: bool = False
    stalls: tuple[tuple[Sequence, ...], tuple[Sequence, ...]] | tuple[()] = ()
    order: tuple[Sequence, ...] = ()
    forked: tuple[Sequence, ...] = ()


#: All running sequences go on and none waits: the commonest decision, made once.
CARRY_ON = StepPlan()
