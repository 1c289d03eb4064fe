"""What a scheduler asks of SGLang's radix tree within one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...types.sequence import LayeredLoad, Sequence
from ...workload.content import Run
from ..prefix import Place
from .radix_holdings import Holding, Windows

if TYPE_CHECKING:
    from .radix_memory import RadixMemory

#: ``SGLANG_SWA_EVICTION_INTERVAL``: tokens before its window that a decoding sequence gives back at once.
EVICTION_INTERVAL = 128
#: ``SGLANG_RETRACT_DECODE_STEPS``: slots made free, and reserved, for each sequence left after a retraction.
RETRACT_STEPS = 20


class RadixTransaction:
    """The calls of a scheduler to a radix tree within one step.

    Look-ups, which update the order of eviction, locks, evictions and retractions take effect at once, because they
    decide what the next sequence finds.

    Attributes:
        decode_step: The step that is decided.
    """

    __slots__ = ("_found", "decode_step", "memory")
    memory: RadixMemory
    decode_step: int
    _found: Holding

    def __init__(self, memory: RadixMemory) -> None:
        self.memory = memory

    @property
    def room(self) -> int:
        """Slots that are free or evictable."""
        return self.memory.room

    @property
    def windows(self) -> Windows | None:
        """See ``RadixMemory``."""
        return self.memory.windows

    @property
    def window_room(self) -> int:
        """As ``room``, in the pool of windows."""
        return self.memory.window_room

    def max_output_tokens(self, sequence: Sequence) -> int:
        """See ``RadixMemory``."""
        return self.memory.max_output_tokens(sequence)

    def begun(self, batch: Iterable[Sequence] | None = None) -> int:
        """Slots of the pages that running sequences begin in the step: of all, or of these."""
        size, step = self.memory.block_size, self.decode_step
        if batch is None:
            return size * self.memory.phases.counts[step % size]
        return sum(size for sequence in batch if not sequence.held_tokens(step) % size)

    def make_free(self, slots: int) -> bool:
        """Evict until so many slots are free; whether they are."""
        memory = self.memory
        memory.make_free(memory.pages_of(slots))
        free = memory.free if memory.windows is None else min(memory.free, memory.window_free)
        return free * memory.block_size >= slots

    def can_decode(self) -> bool:
        """Whether the running sequences find the pages that they begin."""
        if self.memory.windows is not None:
            return self.make_free(self.begun())
        return self.room >= self.begun()

    def slide(self, sequence: Sequence, tokens: int) -> None:
        """Give back windows of a sequence that decodes, once enough of its ``tokens`` lie before the window."""
        windows = self.memory.windows
        assert windows is not None
        if tokens - windows.tokens >= self.memory.holdings[sequence].freed * self.memory.block_size + EVICTION_INTERVAL:
            self.memory.slide(sequence, tokens)

    @property
    def departures(self) -> int:
        """Sequences that finished so far."""
        return self.memory.departures

    @property
    def decodes(self) -> int:
        """Steps that decoded so far, those in vain included."""
        return self.decode_step + self.memory.steps_in_vain

    def process_results(self) -> None:
        """See ``RadixMemory``."""
        self.memory.process_results()

    @property
    def keeps(self) -> bool:
        """Whether the tree keeps nodes that no sequence locks."""
        return self.memory.keeps

    def batch(self) -> list[Sequence]:
        """Sequences that hold slots, in the order of SGLang's batch."""
        return [*self.memory.holdings]

    def reorder(self, batch: Iterable[Sequence]) -> None:
        """Set the order of the batch, for the sequences that a retraction left."""
        for sequence in batch:
            self.memory.holdings[sequence] = self.memory.holdings.pop(sequence)

    def known(self, sequence: Sequence) -> tuple[Run, ...]:
        """A sequence's known tokens."""
        return self.memory.known(sequence)

    def match(self, sequence: Sequence) -> tuple[int, int]:
        """Number of a sequence's known tokens that are in the tree, and of those of them that are on the device."""
        known = self.memory.known_of(sequence)
        known.place = self.memory.tree.follow(known.pages, known.place)
        tokens = known.place.tokens * self.memory.block_size
        return tokens, tokens

    def look_up(self, sequence: Sequence) -> int:
        """Number of a sequence's known tokens that need not be computed; the last token always is."""
        known = self.memory.known_of(sequence)
        known.found = found = self.memory.tree.follow(known.before_last, known.found)
        self._found = self._resume(found)
        return self._found.computed

    def _resume(self, found: Place) -> Holding:
        """What a sequence has that goes on from where the tree ends its string."""
        branch, states = self.memory.branch(found.tokens), self.memory.copy_state(found.node)
        return Holding(found.node, found.tokens, found.tokens * self.memory.block_size, branch=branch, states=states)

    @property
    def on_host(self) -> int:
        """Tokens after those that were looked up last that a load is asked for."""
        return 0

    @property
    def windows_on_host(self) -> int:
        """Slots of windows that it would take."""
        return 0

    def load(self) -> int:
        """Load these for the sequence that was locked last. Returns by how many tokens its prefix is longer then; 0 if there is no room."""
        return 0

    def start_loading(self) -> LayeredLoad | None:
        """Begin the loads of the decision; None without any."""
        return self.memory.start_loading()

    def lock(self, sequence: Sequence) -> None:
        """Lock the prefix that was looked up last for a sequence."""
        self.memory.holdings[sequence] = self._found
        self._found.bound = self.memory.tree.lock(self._found.node)

    def enter(self, sequence: Sequence) -> None:
        """Set ``computed_tokens`` of a sequence to its locked prefix."""
        sequence.computed_tokens = found = self._found.computed
        self.memory.log.look_up(sequence.index, sequence.start_tokens, found)

    def unlock(self, sequence: Sequence) -> None:
        """Unlock the prefix of a sequence that is not admitted after all, and free the copy of its state."""
        holding = self.memory.holdings.pop(sequence)
        self.memory.give_back_states(holding)
        self.memory.tree.unlock(holding.node, holding.bound)

    def retract(self, sequence: Sequence, left: int) -> None:
        """Free a running sequence's own pages and its locks, and some slots for each of so many that are left."""
        memory = self.memory
        memory.drop(sequence, self.decode_step)
        memory.make_free(memory.pages_of(RETRACT_STEPS * left))
