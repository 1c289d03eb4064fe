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
    """A reservation: requested tokens, reserved slots, padding among them, first block (None: no address)."""

    tokens: int
    slots: int
    padding: int
    start: int | None

    @property
    def place(self) -> int:
        """Its first block.

        Raises:
            SimulationFault: It has no address, as its slots are only counted.
        """
        if self.start is None:
            raise SimulationFault("a reservation that is only counted has no place")
        return self.start


class Sequence:
    """What the scheduler knows of one sequence, as vLLM's ``Request``: its lengths, what is computed, what it holds.

    Decoding is in lockstep: a running sequence gains one token per step. Counts of tokens are therefore not
    updated; they follow from the decode step (number of steps since the start of the run).

    Attributes:
        index: Row of the sequence in the workload.
        order: Place in the order of arrival; equal to ``index`` unless users send requests in a closed loop. A scheduler
            that admits sequences in another order renumbers them as it admits them.
        prompt_tokens, output_tokens, max_tokens: As in the workload.
        start_tokens: Tokens with KV after the first step of its next (or last) residency on the device: the
            prompt, and after a preemption also the generated tokens. A prefill computes all of them; a
            sequence that was swapped out already has all but the last.
        computed_tokens: Tokens of ``start_tokens`` with KV before its next prefill step: cached tokens and
            tokens of earlier chunks.
        lost_tokens: Tokens with KV that was computed and released. Computing one of them is recomputation.
        generated_tokens: Output tokens at its last admission.
        start_step: Decode step of the step in which its last prefill ended, or ``NOT_DECODING``.
        kind: Start of its next (or last) residency, by the ledger's name.
        lag: ``start_tokens - start_step``, and the drafts accepted since: ``decode_step + lag`` tokens are computed after
            ``decode_step``.
        finish_step: Decode step that generates its last token.
        grant: Slots reserved for it, in memories with reservations.
        group: The sequences of its request that share the prompt; None for a single sequence.
        ignores_eos: Whether its request asks for all of ``max_tokens``.
        urgency: Its request's priority, lower first, and its place in the order of arrival; only where requests have a priority.
    """

    __slots__ = (
        "computed_tokens", "finish_step", "generated_tokens", "grant", "group", "ignores_eos", "index", "kind", "lag",
        "lost_tokens", "max_tokens", "order", "output_tokens", "prompt_tokens", "start_step", "start_tokens", "urgency",
    )  # fmt: skip
    # Set at the start of a sequence, by the memory, and by the source.
    finish_step: int
    lag: int
    grant: Grant
    urgency: tuple[int, int]

    def __init__(self, index: int, prompt_tokens: int, output_tokens: int, max_tokens: int) -> None:
        self.index = self.order = index
        self.prompt_tokens = self.start_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.generated_tokens = self.computed_tokens = self.lost_tokens = 0
        self.start_step = NOT_DECODING
        self.ignores_eos = False
        self.kind = FRESH
        self.group: Group | None = None

    @property
    def target_tokens(self) -> int:
        """Tokens of prompt and true output together (F in the ledger's definitions)."""
        return self.prompt_tokens + self.output_tokens

    @property
    def prefill_end(self) -> int:
        """Tokens at which a prefill may end: the prompt, or after a preemption all of ``start_tokens`` but the last."""
        return max(self.prompt_tokens, self.start_tokens - 1)

    def held_tokens(self, decode_step: int) -> int:
        """Tokens with KV before ``decode_step``."""
        return decode_step - 1 + self.lag


#: (beam that dies, survivor that it becomes a copy of), in order, in one step.
Replaced = tuple[tuple[int, int], ...]


class Lineage(Protocol):
    """Decides which beams die, and which survivors they continue from."""

    def replaced(self, beams: int) -> Replaced:
        """Those of the next step; a request has as many beams in every step."""


class Group:
    """The sequences that one request asks for: one, ``n`` samples, or the beams of a beam search.

    Attributes:
        members: In order of their index; the first is the leader, which prefills for all.
        ancestry: Of beams, until they end; None for samples, which all run to the end.
        forked: Whether the siblings have started, or wait with the leader to be recomputed.
        spared_blocks: Blocks that they share beyond the full ones of the prompt, each counted once less
            than the tables that name it.
        due_copies: Of those, blocks that are copied in their next step, as more than one table would write to them.
    """

    __slots__ = ("ancestry", "due_copies", "forked", "members", "spared_blocks")

    def __init__(self, members: tuple[Sequence, ...], ancestry: Lineage | None = None) -> None:
        self.members = members
        self.ancestry = ancestry
        self.forked = False
        self.spared_blocks = self.due_copies = 0
        for member in members:
            member.group = self

    @property
    def leader(self) -> Sequence:
        """The sequence that prefills."""
        return self.members[0]

    @property
    def siblings(self) -> tuple[Sequence, ...]:
        """The others."""
        return self.members[1:]


def leads(sequence: Sequence) -> bool:
    """Whether it is not a sibling of another."""
    return sequence.group is None or sequence.group.leader is sequence


def present(sequence: Sequence) -> tuple[Sequence, ...]:
    """Sequences that wait, run or are swapped out together with a leader: its siblings from the fork on."""
    group = sequence.group
    return group.members if group is not None and group.forked else (sequence,)


def num_seqs_of(sequence: Sequence) -> int:
    """Sequences that its group has or will have."""
    return 1 if sequence.group is None else len(sequence.group.members)


class StepPlan(NamedTuple):
    """The decision for one step. Frozen: a policy makes it, memory and engine execute it.

    Attributes:
        admitted: Sequences that end their prefill in this step, from the head of the waiting queue or from
            chunked prefills.
        prefill_tokens: Tokens that all prefills of the step compute, including padding.
        preempted: Sequences that release their blocks and return to the waiting queue.
        swapped_out: Running sequences that move their blocks to host memory.
        swapped_in: Sequences that return from the head of the swapped queue and decode.
        padded_tokens: Length to which static batching pads every prompt; 0 without padding.
        valid_until_horizon: A promise. Up to the policy's horizon, ``schedule`` would move no sequence and compute no prompt in
            any of the following steps, so the engine need not ask. False requests a single step.
        stops_at_arrival: Whether these steps end where a request arrives, so that the policy is asked about it. False promises
            that no request that arrives meanwhile would be admitted.
        chunks: Prefills that continue after this step: the sequence, and the tokens that it computes in this
            step. A new one leaves the head of the waiting queue.
        stalls: Sequences that stall from this step on and keep their blocks, and sequences that resume; or empty.
        prefill_only: Whether the step computes prefills alone: the running sequences do not decode in it.
        order: The queue as the scheduler sorts it, with the admitted sequences first, and its victims; or empty.
        forked: Siblings of running sequences that decode from this step on, sharing the computed tokens.
        flush_ticks: Time before the step computes, in which blocks that it takes finish their copy to the host.
        drafts: Drafts that the step verifies, by sequence; None without speculative decoding.
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


#: All running sequences decode and none waits: the most frequent decision, created once.
CARRY_ON = StepPlan()
