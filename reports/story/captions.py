"""What happens in a step, in sentences: the changes between two recorded steps, and the plan of the second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ...sim.recording.steps import Computed, Held, Step
from .cast import Cast, counted, listed

#: With more sequences that decode in a step, one sentence names all of them.
_MOST_DECODES = 3


def state(step: Step, sequence: int) -> str:
    """What a sequence does in a step; see ``SequenceView``."""
    if sequence in step.waiting:
        return "waiting"
    if sequence in step.swapped:
        return "swapped"
    if any(each.sequence == sequence and each.has_ended for each in step.held):
        return "finished"
    decodes = {each.sequence: each.decodes for each in step.computed}
    return ("decode" if decodes[sequence] else "prefill") if sequence in decodes else "paused"


def present(step: Step) -> set[int]:
    """Sequences that have arrived and are not done."""
    return {*step.waiting, *step.swapped, *(each.sequence for each in step.held)}


class Caption:
    """The sentences of a step.

    Args:
        cast: Names.
        last: The step before; None for the first.
        step: The step.
        texts: Words of each sequence as they are when a sentence is made.
        seen, started: Sequences that were present, and that computed a token, in the steps before.
    """

    def __init__(
        self,
        cast: Cast,
        last: Step | None,
        step: Step,
        texts: Sequence[Sequence[str]],
        seen: Iterable[int],
        started: Iterable[int],
    ) -> None:
        self._cast, self._step, self._texts = cast, step, texts
        self._seen, self._started = frozenset(seen), frozenset(started)
        self._held = {each.sequence: each for each in step.held}
        self._before = {each.sequence: each for each in last.held} if last else {}
        self._paged = bool(step.references)

    def whole(self) -> list[str]:
        """All of a step without copies of blocks."""
        return [*self._until_copies(), *self._copies(), *self._writes()] or [self._nothing()]

    def before_copies(self) -> list[str]:
        """The part of a step before it copies blocks."""
        shared = dict.fromkeys(source for source, *_ in self._step.copies)
        due = f"The step writes to {counted(shared, 'block')}, which more than one table names."
        return [*self._until_copies(), due]

    def after_copies(self) -> list[str]:
        """The rest of it."""
        return [*self._copies(), *self._writes()]

    def _nothing(self) -> str:
        if present(self._step):
            return "No token is computed."
        kept = self._step.buckets.count("cached")
        free = "every block is free" if self._paged else "every slot is free"
        return f"All requests are done: {free}{f', and {kept} slots are cached' if kept else ''}."

    def _until_copies(self) -> Iterator[str]:
        yield from self._finishes()
        yield from self._arrivals()
        yield from self._preemptions()
        yield from self._beams()
        yield from self._forks()
        yield from self._admissions()

    def _finishes(self) -> Iterator[str]:
        gone: dict[str, list[Held]] = {}
        for sequence, held in self._before.items():
            if sequence not in present(self._step):
                gone.setdefault(self._cast.request_names[self._cast.requests[sequence]], []).append(held)
            elif sequence in self._held and self._held[sequence].has_ended and not held.has_ended:
                yield f"{self._name(sequence)} has its last token. Its slots are held until the batch ends."
        if gone:
            verbs = ("is", "releases") if len(gone) == 1 else ("are", "release")
            what = self._what([held for members in gone.values() for held in members])
            yield f"{listed(gone)} {verbs[0]} done and {verbs[1]} {what}."

    def _arrivals(self) -> Iterator[str]:
        requests = self._cast.requests
        old, waiting = ({requests[each] for each in found} for found in (self._seen, self._step.waiting))
        new = dict.fromkeys(requests[each] for each in sorted(present(self._step)) if requests[each] not in old)
        for waits in (False, True):
            names = [self._cast.request_names[each] for each in new if (each in waiting) == waits]
            ending = "s" if len(names) == 1 else ""
            if names:
                yield f"{listed(names)} arrive{ending}{f' and wait{ending}' if waits else ''}."

    def _preemptions(self) -> Iterator[str]:
        step = self._step
        for sequence in step.preempted:
            if sequence in self._before:
                what = self._what([self._before[sequence]])
                if sequence in present(step):
                    yield f"{self._name(sequence)} is preempted and loses {what}. Its tokens are computed again later."
                else:
                    yield f"{self._name(sequence)} is preempted after its last token, so nothing is computed again."
        if step.swap_outs:
            sources, targets = zip(*step.swap_outs)
            where = f"{counted(sources, 'block')} to {counted(targets, 'host block')}"
            yield f"{self._names(step.swapped_out)} {_is(step.swapped_out)} swapped out: {where}."
        if step.swap_ins:
            sources, targets = zip(*step.swap_ins)
            where = f"{counted(sources, 'host block')} to {counted(targets, 'block')}"
            yield f"{self._names(step.swapped_in)} {_is(step.swapped_in)} swapped in: {where}."

    def _beams(self) -> Iterator[str]:
        for dead, parent in self._step.replaced:
            yield (
                f"Beam {self._name(dead)} dies and continues as a copy of {self._name(parent)}:"
                f" its table names the blocks of {self._name(parent)}."
            )

    def _forks(self) -> Iterator[str]:
        leaders: dict[int, list[int]] = {}
        for sibling in self._step.forked:
            leaders.setdefault(self._leader(sibling), []).append(sibling)
        for leader, siblings in leaders.items():
            verb = "forks" if len(siblings) == 1 else "fork"
            shares = f": the tables name the blocks of {self._name(leader)}" if self._paged else ""
            yield f"{self._names(siblings)} {verb} from {self._name(leader)}{shares}."

    def _admissions(self) -> Iterator[str]:
        for each in self._step.computed:
            if each.decodes:
                continue
            held, before = self._held[each.sequence], self._before.get(each.sequence)
            tokens = each.stop - each.first
            work = f"{tokens} {'token' if tokens == 1 else 'tokens'}"
            if before is not None:
                yield f"{self._name(each.sequence)} prefills {work} more."
                continue
            found = self._found(each)
            again = " again" if each.sequence in self._started else ""
            verb = "names" if found else "takes" if self._paged else "reserves"
            yield f"{self._name(each.sequence)} is admitted{again}: it {found}{verb} {self._what([held])} and prefills {work}."

    def _found(self, each: Computed) -> str:
        """Where the tokens are from that a prefill does not compute: a sibling's leader has them, or a cache."""
        leader = self._leader(each.sequence)
        if not each.first or not self._paged:
            return ""
        if each.sequence != leader:
            return f"shares {each.first} tokens with {self._name(leader)}, "
        return f"finds {each.first} tokens in the cache, "

    def _leader(self, sequence: int) -> int:
        """The first sequence of its request."""
        return self._cast.requests.index(self._cast.requests[sequence])

    def _copies(self) -> Iterator[str]:
        left = Counter(source for source, *_ in self._step.copies)
        for source, target, slots in self._step.copies:
            if not self._paged:
                yield f"{slots} slots from slot {source} on are copied to slot {target} on."
                continue
            users = [self._name(each.sequence) for each in self._step.held if target in each.table]
            after = self._step.references[source] + left[source] - 1
            left[source] -= 1
            yield (
                f"Copy on write: {listed(users)} takes block {target}, a copy of block {source}."
                f" References of block {source}: {after + 1} before, {after} after."
            )

    def _writes(self) -> Iterator[str]:
        decodes = [each for each in self._step.computed if each.decodes]
        if len(decodes) > _MOST_DECODES:
            yield f"{self._names(each.sequence for each in decodes)} write a token each."
            decodes = []
        for each in decodes:
            yield f"{self._name(each.sequence)} writes “{self._texts[each.sequence][each.first]}” to {self._place(each)}."

    def _place(self, each: Computed) -> str:
        held = self._held[each.sequence]
        if not self._paged:
            return f"slot {held.slots[each.first]}"
        size = len(held.slots) // len(held.table)
        place = each.first // size
        before = self._before.get(each.sequence)
        is_new = each.first % size == 0 and (before is None or len(before.table) <= place)
        return f"{'a new block, ' if is_new else 'block '}{held.table[place]}"

    def _what(self, members: Sequence[Held]) -> str:
        """Blocks that sequences hold, each once; or slots."""
        blocks = dict.fromkeys(block for each in members for block in each.table)
        return counted(blocks, "block") if blocks else f"{sum(len(each.slots) for each in members)} slots"

    def _name(self, sequence: int) -> str:
        return self._cast.names[sequence]

    def _names(self, sequences: Iterable[int]) -> str:
        return listed(self._name(each) for each in sequences)


def _is(sequences: Sequence[int]) -> str:
    return "is" if len(sequences) == 1 else "are"
