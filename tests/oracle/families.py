"""Requests of several sequences, and requests that go on from others: what goes in, what comes out, and the clock.

Here a *family* is one request with its sequences (``members``), the first of which prefills for all. They are
admitted and leave together, and gain a token each in every step that computes them.

A *decode step* moves the decode step on; a step that only prefills while running sequences stand still (vllm-v0), or in
which blocks are only swapped out, does not. A residency is a sequence on the device, from a step on; an eviction ends
one early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FRESH, RECOMPUTED, SWAPPED_IN, FORKED = 0, 1, 2, 3
#: What dies and what it becomes a copy of, one list a step.
Draws = Iterator[list[tuple[int, int]]]


@dataclass(frozen=True)
class FamilyRequest:
    """One request for ``n`` sequences; or one that begins with ``parent_tokens`` tokens of an earlier one."""

    arrival_ticks: int
    prompt_tokens: int
    output_tokens: int
    n: int = 1
    parent: int | None = None
    parent_tokens: int = 0
    rolls_back: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True)
class Costs:
    """Ticks of a step that computes, of blocks moved to the host and back, of slots copied on the device."""

    step: Callable[[int, int, int, int], int]
    swap_out: Callable[[int], int]
    swap_in: Callable[[int], int]
    copy: Callable[[int], int]


@dataclass(frozen=True)
class FamilyStep:
    """One step. ``decode_step`` is its place among the decode steps, None where it stands still; ``batch_size`` counts
    sequences that compute; ``move_ticks`` is the part of ``ticks`` that swaps and copies take. Then slots."""

    start_ticks: int
    ticks: int
    decode_step: int | None
    batch_size: int
    prefill_tokens: int
    move_ticks: int
    live: int
    held: int
    saved: int
    cached: int
    host_held: int


@dataclass(frozen=True)
class FamilyOutcome:
    """What a simulation leaves.

    ``residencies`` are (start step, sequence, tokens with those of its first step, tokens generated before it, kind),
    and ``evictions`` (decode step, sequence, whether swapped out); ``times`` (first scheduled, first token, finish,
    recomputed, swapped) by request, of those not refused.
    """

    steps: list[FamilyStep] = field(default_factory=list)
    residencies: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    evictions: list[tuple[int, int, int]] = field(default_factory=list)
    times: dict[int, tuple[int, int, int, int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Member:
    """A sequence: its row, and the tokens of it that have keys and values, with those of this step."""

    index: int
    computed_tokens: int = 0


@dataclass(eq=False)
class Family:
    """A request on its way. ``forked``: all its members have begun, not the leader alone."""

    index: int
    request: FamilyRequest
    members: list[Member]
    generated: int = 0
    forked: bool = False
    kind: int = FRESH
    first_scheduled_ticks: int | None = None
    first_token_ticks: int | None = None
    finish_ticks: int | None = None
    recomputed: int = 0
    swapped: int = 0

    @property
    def n(self) -> int:
        return len(self.members)

    @property
    def leader(self) -> Member:
        return self.members[0]

    @property
    def present(self) -> list[Member]:
        """Members that have begun."""
        return self.members if self.forked else self.members[:1]

    @property
    def known_tokens(self) -> int:
        return self.request.prompt_tokens + self.generated

    @property
    def done(self) -> bool:
        return self.generated == self.request.output_tokens


@dataclass
class Decided:
    """What one schedule did. ``prefilled``: member, tokens that were there, tokens with KV afterwards. ``began``:
    member, tokens generated before, kind. ``pauses``: the sequences that ran before stand still."""

    prefilled: list[tuple[Member, int, int]] = field(default_factory=list)
    decoded: list[Member] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    began: list[tuple[Member, int, int]] = field(default_factory=list)
    recomputed: list[Member] = field(default_factory=list)
    swapped_out: list[Member] = field(default_factory=list)
    victims: list[Family] = field(default_factory=list)
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    copied_slots: int = 0
    pauses: bool = False


class FamilySystem:
    """A policy with its memory."""

    def __init__(self) -> None:
        self.waiting: list[Family] = []
        self.running: list[Family] = []
        self.swapped: list[Family] = []
        self.decided = Decided()

    def refuses(self, request: FamilyRequest) -> bool:
        """Whether the pool can never hold the request."""
        raise NotImplementedError

    def decide(self) -> None:
        """Fill ``decided`` for the next step, and take its memory."""
        raise NotImplementedError

    def census(self) -> tuple[int, int, int, int, int]:
        """Slots live, held, saved and cached, and those held on the host."""
        raise NotImplementedError

    def step_over(self, family: Family) -> None:
        """A family has computed its tokens of a step and goes on."""

    def release(self, family: Family) -> None:
        """A family is done."""
        raise NotImplementedError

    def num_seqs(self) -> int:
        """Sequences that run, or will before long."""
        return sum(family.n for family in self.running)


def serve(system: FamilySystem, requests: list[FamilyRequest], costs: Costs) -> FamilyOutcome:
    """Decide, log, wait, complete, until no request is left."""
    families, first = [], 0
    for index, request in enumerate(requests):
        families.append(Family(index, request, [Member(first + place) for place in range(request.n)]))
        first += request.n
    served = [family for family in families if not system.refuses(family.request)]
    coming, outcome, now, decode_step = list(served), FamilyOutcome(), 0, 0
    while coming or system.waiting or system.running or system.swapped:
        if not (system.waiting or system.running or system.swapped):
            now = max(now, coming[0].request.arrival_ticks)
        while coming and coming[0].request.arrival_ticks <= now:
            system.waiting.append(coming.pop(0))
        system.decided = decided = Decided()
        system.decide()
        if not (decided.families or decided.victims):
            raise AssertionError(f"at tick {now} no sequence runs, is admitted or gives way, and one waits")
        step = _logged(system, costs, now, decode_step)
        outcome.steps.append(step)
        _note(outcome, decided, decode_step)
        for family in decided.families:
            if family.first_scheduled_ticks is None:
                family.first_scheduled_ticks = now
        now, decode_step = now + step.ticks, decode_step + (step.decode_step is not None)
        _complete(system, now)
    outcome.residencies.sort()
    outcome.evictions.sort()
    for family in served:
        outcome.times[family.index] = (
            family.first_scheduled_ticks, family.first_token_ticks, family.finish_ticks, family.recomputed,
            family.swapped,
        )  # fmt: skip
    return outcome


def _logged(system: FamilySystem, costs: Costs, now: int, decode_step: int) -> FamilyStep:
    decided = system.decided
    moves = costs.copy(decided.copied_slots) if decided.copied_slots else 0
    moves += costs.swap_out(decided.swapped_out_blocks) if decided.swapped_out_blocks else 0
    moves += costs.swap_in(decided.swapped_in_blocks) if decided.swapped_in_blocks else 0
    prefill = sum(after - before for _, before, after in decided.prefilled)
    pairs = sum(after * (after + 1) // 2 - before * (before + 1) // 2 for _, before, after in decided.prefilled)
    context = sum(member.computed_tokens for member in decided.decoded)
    computing = costs.step(len(decided.decoded), context, prefill, pairs) if decided.families else 0
    return FamilyStep(
        now,
        moves + computing,
        decode_step if decided.families and not decided.pauses else None,
        len(decided.decoded) + len(decided.prefilled),
        prefill,
        moves,
        *system.census(),
    )


def _note(outcome: FamilyOutcome, decided: Decided, decode_step: int) -> None:
    """Residencies and evictions. A prefill in a pause counts as done in the decode step before it."""
    for swapped, members in enumerate((decided.recomputed, decided.swapped_out)):
        outcome.evictions.extend((decode_step, member.index, swapped) for member in members)
    start = decode_step - decided.pauses
    outcome.residencies.extend((start, m.index, m.computed_tokens, before, kind) for m, before, kind in decided.began)


def _complete(system: FamilySystem, now: int) -> None:
    """A token for each sequence; finished ones leave."""
    for family in sorted(system.decided.families, key=lambda family: family.index):
        family.generated += 1
        if family.first_token_ticks is None:
            family.first_token_ticks = now
        if family.done:
            family.finish_ticks = now
            system.running.remove(family)
            system.release(family)
        else:
            system.step_over(family)
