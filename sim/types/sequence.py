"""A sequence in the server, the group of its request, and the plan of one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from .errors import SimulationFault

#: The start of a residency on the device: a first prefill, a prefill that recomputes lost tokens, a swap-in from
#: the host, or a fork of a prefilled sibling.
FRESH, RECOMPUTED, SWAPPED_IN, FORKED = 0, 1, 2, 3
#: Instead of a step: earlier than all steps, including the one before the first.
NOT_DECODING = -2


class Grant(NamedTuple):
    """A reservation of slots for one sequence.

    Attributes:
        tokens: Tokens that were asked for.
        slots: Reserved slots.
        padding: Slots among them that are added by rounding up.
        start: First block, or first slot of memory without blocks; None if slots are only counted.
    """

    tokens: int
    slots: int
    padding: int
    start: int | None

    @property
    def place(self) -> int:
        """``start``, for a reservation that has an address.

        Raises:
            SimulationFault: Its slots are only counted.
        """
        if self.start is None:
            raise SimulationFault("a reservation that is only counted has no place")
        return self.start


class Sequence:
    """The scheduler's state of one sequence, as vLLM's ``Request``: lengths, computed tokens, reservation.

    All running sequences decode in lockstep, one token per step. Token counts of a running sequence are therefore not
    updated. They follow from the decode step (the number of decode steps since the start of the run): ``decode_step +
    lag`` tokens are computed after ``decode_step``.

    Attributes:
        index: Row of the sequence in the workload.
        order: Position in the order of arrival; equal to ``index`` unless users send requests in a closed loop. A
            scheduler that admits sequences in another order renumbers them.
        prompt_tokens, output_tokens, max_tokens: As in the workload.
        start_tokens: Tokens with KV after the first step of its next (or last) residency on the device: the prompt,
            and after a preemption also the generated tokens. A prefill computes all of them. A swapped-out sequence
            has all but the last already.
        computed_tokens: Tokens of ``start_tokens`` with KV before its next prefill step: cached tokens and earlier
            chunks.
        lost_tokens: Tokens whose KV was computed and then dropped. Computing them again counts as recomputation.
        generated_tokens: Output tokens at its last admission.
        start_step: Decode step in which its last prefill ended, or ``NOT_DECODING``.
        kind: How its next (or last) residency starts: ``FRESH``, ``RECOMPUTED``, ``SWAPPED_IN`` or ``FORKED``.
        lag: ``start_tokens - start_step``, plus the drafts accepted since.
        finish_step: Decode step that generates its last token.
        grant: Its reserved slots, in memories with reservations.
        group: The sequences of its request, which share the prompt; None for a single sequence.
        ignores_eos: Whether it generates all of ``max_tokens``.
        next_decode_eligible_step: Call of ``schedule`` from which on it may decode again, where stages work on batches of their own.
        urgency: Priority of its request (lower first, 0 without one) and position in the order of arrival.
    """

    __slots__ = (
        "computed_tokens", "finish_step", "generated_tokens", "grant", "group", "ignores_eos", "index", "kind", "lag",
        "lost_tokens", "max_tokens", "next_decode_eligible_step", "order", "output_tokens", "prompt_tokens", "start_step", "start_tokens", "urgency",
    )  # fmt: skip
    # Set at the start of a sequence, by the memory, and by the source.
    finish_step: int
    lag: int
    grant: Grant

    def __init__(self, index: int, prompt_tokens: int, output_tokens: int, max_tokens: int) -> None:
        self.index = self.order = index
        self.urgency = 0, index
        self.prompt_tokens = self.start_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.generated_tokens = self.computed_tokens = self.lost_tokens = self.next_decode_eligible_step = 0
        self.start_step = NOT_DECODING
        self.ignores_eos = False
        self.kind = FRESH
        self.group: Group | None = None

    @property
    def target_tokens(self) -> int:
        """Prompt tokens plus output tokens (F in the ledger's definitions)."""
        return self.prompt_tokens + self.output_tokens

    @property
    def prefill_end(self) -> int:
        """Tokens at which a prefill may end: the prompt, or after a preemption ``start_tokens - 1``."""
        return max(self.prompt_tokens, self.start_tokens - 1)

    def held_tokens(self, decode_step: int) -> int:
        """Number of its tokens with KV before ``decode_step``."""
        return decode_step - 1 + self.lag


#: (beam that dies, survivor that it becomes a copy of), in order, in one step.
Replaced = tuple[tuple[int, int], ...]


class Lineage(Protocol):
    """Decides which beams of a beam search die, and which survivors replace them."""

    def replaced(self, beams: int) -> Replaced:
        """The beams that die in the next step, each with the survivor that it becomes a copy of.

        Args:
            beams: Number of beams, the same in every step.
        """


class Group:
    """The sequences of one request: a single one, ``n`` samples, or the beams of a beam search.

    Attributes:
        members: In order of ``index``. The first one is the leader, which prefills for all.
        ancestry: Draws which beams die; None for samples and after the end of a beam search.
        forked: Whether the siblings have started, or wait with the leader for recomputation.
        saved_blocks: Blocks that sharing saves, beyond the full blocks of the prompt: table entries less distinct
            blocks.
        pending_copies: Shared blocks that are copied in their next step, because several sequences would write to them.
    """

    __slots__ = ("ancestry", "pending_copies", "forked", "members", "saved_blocks")

    def __init__(self, members: tuple[Sequence, ...], ancestry: Lineage | None = None) -> None:
        self.members = members
        self.ancestry = ancestry
        self.forked = False
        self.saved_blocks = self.pending_copies = 0
        for member in members:
            member.group = self

    @property
    def leader(self) -> Sequence:
        """The sequence that prefills for the group."""
        return self.members[0]

    @property
    def siblings(self) -> tuple[Sequence, ...]:
        """The sequences other than the leader."""
        return self.members[1:]


def leads(sequence: Sequence) -> bool:
    """Whether a sequence is the leader of its group, or has no group."""
    return sequence.group is None or sequence.group.leader is sequence


def present(sequence: Sequence) -> tuple[Sequence, ...]:
    """The sequences that are queued, run or are swapped out with a leader: from the fork on, the whole group."""
    group = sequence.group
    return group.members if group is not None and group.forked else (sequence,)


def num_seqs_of(sequence: Sequence) -> int:
    """Sequences of the request (``n``) that a leader stands for, whether they have forked yet or not; 1 without a group."""
    return 1 if sequence.group is None else len(sequence.group.members)


class LayeredLoad(NamedTuple):
    """A copy to the device that is over layer by layer; a layer of a step is computed once its part is there.

    Attributes:
        ticks: Of the copy, which begins with the step.
        layers: Layers of the model, which take alike.
    """

    ticks: int
    layers: int

    def wait(self, step_ticks: int) -> int:
        """Ticks by which it prolongs a step: the first layer waits for its part, the last one for all, whichever ends later."""
        first, last = -(-self.ticks // self.layers) + step_ticks, self.ticks + -(-step_ticks // self.layers)
        return max(first, last) - step_ticks


class StepPlan(NamedTuple):
    """The decision for one step, frozen. A policy makes it; engine and memory carry it out.

    Attributes:
        admitted: Sequences whose prefill ends in this step, from the head of the waiting queue or from chunked
            prefills.
        prefill_tokens: Tokens that all prefills of the step compute, including padding.
        preempted: Sequences that release their blocks and return to the waiting queue.
        swapped_out: Running sequences whose blocks move to the host.
        swapped_in: Sequences that return from the head of the swapped queue and decode.
        padded_tokens: Length to which static batching pads every prompt; 0 without padding.
        valid_until_horizon: A promise: in every following step up to ``Policy.horizon``, ``schedule`` would move no
            sequence and compute no prompt. The engine then takes these steps as one leap. False requests a single
            step.
        stops_at_arrival: Whether the leap ends when a request arrives. False promises that no request arriving within
            the leap would be admitted.
        chunks: Prefills that continue after this step: each sequence and the tokens that it computes in this step. A
            new one leaves the head of the waiting queue.
        stalls: Sequences that stop decoding from this step on and keep their blocks, and sequences that resume; or
            empty.
        prefill_only: Whether the running sequences do not decode in this step.
        order: The waiting queue in the scheduler's own order, beginning with the admitted sequences and including its
            victims; empty keeps the queue.
        forked: Siblings of running sequences that decode from this step on and share the computed tokens.
        flush_ticks: Ticks that the step waits for copies to the host of blocks that it overwrites.
        drafts: Draft tokens that the step verifies, by sequence; None without speculative decoding.
        taken_back: Asynchronous scheduling: sequences of ``preempted`` that lose the token of the step in flight. They generate it anew,
            even if it is their last one.
        load: What its prefills load from the host; None without any.
    """

    admitted: tuple[Sequence, ...] = ()
    prefill_tokens: int = 0
    preempted: tuple[Sequence, ...] = ()
    swapped_out: tuple[Sequence, ...] = ()
    swapped_in: tuple[Sequence, ...] = ()
    padded_tokens: int = 0
    valid_until_horizon: bool = True
    stops_at_arrival: bool = True
    chunks: tuple[tuple[Sequence, int], ...] = ()
    prefill_only: bool = False
    stalls: tuple[tuple[Sequence, ...], tuple[Sequence, ...]] | tuple[()] = ()
    order: tuple[Sequence, ...] = ()
    forked: tuple[Sequence, ...] = ()
    flush_ticks: int = 0
    drafts: Mapping[Sequence, int] | None = None
    taken_back: tuple[Sequence, ...] = ()
    load: LayeredLoad | None = None


#: All running sequences decode and none waits: the most frequent decision, created once.
CARRY_ON = StepPlan()
