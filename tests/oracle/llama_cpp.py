"""llama.cpp's server with a KV cache that is split per slot, and with a unified one.

``slots`` is the server's array: the sequence in each. ``last_used`` orders their releases. In the split cache a slot owns its
blocks from the start; in the unified one ``cells`` has the slot of the token in each cell, or None.
"""

from __future__ import annotations

from .iteration import IterationSystem, known
from .model import Limits, Pool, Sequence
from .slots import CACHED, FREE, LIVE, census


class ContextExceededError(Exception):
    """A batch lacks cells, and no idle slot has any: the tokens of the batch, and how many lack a cell."""


class LlamaCpp(IterationSystem):
    """Walks over the slots, as the server does, once for decodes and once for prompts."""

    def __init__(self, pool: Pool, limits: Limits, caching: bool = False) -> None:
        super().__init__(pool, limits)
        self.caching = caching
        if limits.max_num_seqs is None:
            self.max_num_seqs = max(1, pool.num_blocks // self.blocks_for(limits.max_model_len))
        each = pool.num_blocks // self.max_num_seqs
        self.owned = [list(range(slot * each, (slot + 1) * each)) for slot in range(self.max_num_seqs)]
        self.slots: list[Sequence | None] = [None] * self.max_num_seqs
        self.last_used = [-1] * self.max_num_seqs
        #: The tokens of which each slot has keys and values, where those of one request are of use to another.
        self.texts: list[list[object]] = [[] for _ in self.slots]
        self.clock = 0
        #: The server's queue of tasks, those for which it had no slot, and all that were ever in the queue.
        self.tasks: list[Sequence] = []
        self.deferred: list[Sequence] = []
        self.seen: set[Sequence] = set()

    def largest_tokens(self, sequence: Sequence) -> int:
        return sequence.final_tokens

    def refusal(self, sequence: Sequence) -> str | None:
        cells = len(self.owned[0]) * self.pool.block_size
        if self.largest_tokens(sequence) > cells:
            return f"needs {self.largest_tokens(sequence)} cells of a slot of {cells}"
        return None

    def requested_tokens(self, sequence: Sequence) -> int:
        return len(self.owned[0]) * self.pool.block_size

    def decide(self) -> None:
        self._process_tasks()
        budget = self.limits.max_num_batched_tokens
        for sequence in self.slots:
            if sequence in self.decoding:
                self.computes[sequence] = 1
                budget -= 1
        for slot, sequence in enumerate(self.slots):
            if sequence is not None and sequence not in self.decoding and budget > 0:
                if sequence in self.waiting:
                    self._begin(slot, sequence)
                    self.free = [block for block in self.free if block not in self.owned[slot]]
                self.computes[sequence] = min(known(sequence) - self.computed[sequence], budget)
                budget -= self.computes[sequence]

    def _process_tasks(self) -> None:
        """New requests join the end of the queue. Each task in it takes a slot or is deferred."""
        self.tasks += [sequence for sequence in self.waiting if sequence not in self.seen]
        self.seen.update(self.tasks)
        while self.tasks:
            sequence = self.tasks.pop(0)
            self._select_slot(sequence)
            if sequence in self.slots:
                self._launch()
            else:
                self.deferred.append(sequence)

    def _launch(self) -> None:
        """A request was given a slot."""

    def _select_slot(self, sequence: Sequence) -> None:
        """The server's loops: for the longest common prefix, then for the least recently used: the last of those equally old."""
        best, most = None, len(prompt_of(sequence)) / 10
        for slot, inside in enumerate(self.slots):
            if inside is None and self._common(slot, sequence) > most:
                best, most = slot, self._common(slot, sequence)
        if best is not None:
            self.slots[best] = sequence
            return
        for slot, inside in enumerate(self.slots):
            if inside is None and (best is None or self.last_used[slot] <= self.last_used[best]):
                best = slot
        if best is not None:
            self.slots[best] = sequence

    def _begin(self, slot: int, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.tables[sequence] = self.owned[slot]
        self.computed[sequence] = min(self._common(slot, sequence), len(prompt_of(sequence)) - 1)

    def _common(self, slot: int, sequence: Sequence) -> int:
        """Tokens with which both the slot's and the prompt begin."""
        prompt, tokens = prompt_of(sequence), 0
        while tokens < min(len(prompt), len(self.texts[slot])) and prompt[tokens] == self.texts[slot][tokens]:
            tokens += 1
        return tokens

    def complete(self, now_ticks: int) -> None:
        super().complete(now_ticks)
        for slot, sequence in enumerate(self.slots):
            if sequence is not None and sequence.done:
                self.clock += 1
                self.slots[slot], self.last_used[slot] = None, self.clock
                self.texts[slot] = computed_of(sequence) if self.caching else []
                if self.deferred:
                    self.tasks.insert(0, self.deferred.pop(0))

    def buckets(self) -> dict[str, int]:
        """Tokens are cached in slots without a sequence, and in those of sequences that have not begun."""
        found = super().buckets()
        kept = sum(len(text) for text, inside in zip(self.texts, self.slots) if inside not in self.running)
        return found | {CACHED: kept, FREE: found[FREE] - kept}


def computed_of(sequence: Sequence) -> list[object]:
    """Its prompt and its output without the last token."""
    request = sequence.request
    output = request.output_ids or tuple((sequence.index, "out", place) for place in range(request.output_tokens))
    return [*prompt_of(sequence), *output][:-1]


def prompt_of(sequence: Sequence) -> tuple[object, ...]:
    """Its tokens; without contents no other has one of them."""
    request = sequence.request
    return request.prompt_ids or tuple((sequence.index, place) for place in range(request.prompt_tokens))


class UnifiedLlamaCpp(LlamaCpp):
    """Every token of a batch takes the next free cell, and slots are purged one by one where there are too few."""

    def __init__(self, pool: Pool, limits: Limits, caching: bool = False) -> None:
        super().__init__(pool, limits, caching)
        self.cells: list[int | None] = [None] * pool.slots

    def refusal(self, sequence: Sequence) -> str | None:
        tokens = self.largest_tokens(sequence)
        return None if tokens <= len(self.cells) else f"needs {tokens} cells of {len(self.cells)}"

    def decide(self) -> None:
        self._process_tasks()
        batch = [slot for slot, sequence in enumerate(self.slots) if sequence in self.decoding]
        for slot, sequence in enumerate(self.slots):
            if sequence is None or sequence in self.decoding or len(batch) >= self.limits.max_num_batched_tokens:
                continue
            if sequence in self.waiting:
                self._begin(slot, sequence)
                self._clear(slot, self.computed[sequence])
            for _ in range(self.computed[sequence], known(sequence)):
                if len(batch) < self.limits.max_num_batched_tokens:
                    batch.append(slot)
        self._place(batch)
        for slot in batch:
            sequence = self.slots[slot]
            self.computes[sequence] = self.computes.get(sequence, 0) + 1

    def _launch(self) -> None:
        for slot in range(len(self.slots)):
            if self.slots[slot] is None and not self.caching:
                self._clear(slot)

    def _begin(self, slot: int, sequence: Sequence) -> None:
        super()._begin(slot, sequence)
        self.tables[sequence] = []

    def _place(self, batch: list[int]) -> None:
        while self.cells.count(None) < len(batch):
            idle = [slot for slot, sequence in enumerate(self.slots) if sequence is None and slot in self.cells]
            if not idle:
                raise ContextExceededError(len(batch), len(batch) - self.cells.count(None))
            self._clear(idle[0])
        for slot in batch:
            self.cells[self.cells.index(None)] = slot

    def _clear(self, slot: int, but: int = 0) -> None:
        """Free all cells of a slot but so many."""
        mine = [cell for cell, inside in enumerate(self.cells) if inside == slot]
        for cell in mine[but:]:
            self.cells[cell] = None
        self.texts[slot] = self.texts[slot][:but]

    def buckets(self) -> dict[str, int]:
        """A cell is live if the sequence in its slot has begun, and so has removed what was there before."""
        for sequence in self.running:
            if self.cells.count(self.slots.index(sequence)) != self.computed_now(sequence):
                raise AssertionError(f"{sequence.index} does not have a cell for each token")
        live = {slot for slot, sequence in enumerate(self.slots) if sequence in self.running}
        return census(FREE if slot is None else LIVE if slot in live else CACHED for slot in self.cells)
