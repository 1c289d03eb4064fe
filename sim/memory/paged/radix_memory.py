"""Slots of single tokens, or pages of several, of which a radix tree keeps what was computed.

A sequence locks the path to what it has in the tree; what it computes beyond that is its own:

    root === a b c === d e     S1: prompt a b c d e, locked to there; x y, which it generated, are its own
               |
               +===== f g      S2: prompt a b c f g; what it shares with S1 is there once
             --- h i j         unlocked: evictable

    slots = free + own + locked + evictable         live: own and locked; cached: evictable

With pages of more than one token (``--page-size``) all of this is counted in pages. The tree has full pages only: the last tokens of a
sequence lie in a page of its own. SGLang asks for more than it takes, a page for each sequence of a step, and evicts for that.

Only look-ups, prefills that end and sequences that leave change the tree, and evictions: decodes take free slots, and
where too few are left, leaves are evicted first, also in the middle of a leap. The log has the step of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from ...spec.startup.sglang_unified import SharedBuffer
from ...types.errors import Overdrawn
from ...types.sequence import LayeredLoad, Sequence
from ...types.state import State
from ...workload.content import Run, Tokens
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..accounting.moments import after_row, at_row, in_step
from ..prefix import Pages, RadixNode, Rest, all_but_last, first_tokens
from ..prefix.component_tree import ComponentTree
from .phases import Phases
from .radix_holdings import Holding, Known, States, Windows
from .radix_pools import RadixPools
from .radix_transaction import RadixTransaction


class RadixMemory(RadixPools):
    """A pool of pages with a radix tree over it, as SGLang's.

    Args:
        num_blocks, block_size, windows, states: See ``RadixPools``.
        runs: Tokens of every request; None if no two requests share any.
        keeps: Whether the tree keeps nodes that no sequence locks.
        ahead: Whether the results of a step are processed after the next one was decided (overlap schedule).

    Attributes:
        holdings: For each sequence that runs or prefills, its part of the tree; those that run in the order of SGLang's batch.
        decoding: Sequences that decode in the next step that does, in the order in which their prefills ended.
        phases: In which steps these begin a page.
        departures: Finished sequences so far.
        keeps: As given.
        log: Look-ups, and changes of the cached slots.
        cache_log: ``log`` if ``keeps``, else None.
        steps_in_vain: Steps that computed nothing but tokens behind an end of text.
    """

    steps_in_vain = 0

    def __init__(
        self,
        num_blocks: int,
        runs: Tokens | None = None,
        keeps: bool = True,
        block_size: int = 1,
        ahead: bool = False,
        windows: Windows | None = None,
        states: States | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, windows, states)
        self._runs, self.keeps, self.ahead = runs, keeps, ahead
        self.log = CacheLog(unit_slots=block_size)
        self.cache_log = self.cached_level = self.log if keeps else None
        self.tree = self._plant()
        self._pages, self.phases = Pages(block_size), Phases(block_size)
        self.holdings: dict[Sequence, Holding] = {}
        self.departures = 0
        # Sequences that prefill in this step, in order, and the tokens that are computed of each when it is over.
        self._batch: list[tuple[Sequence, int]] = []
        self.decoding: dict[Sequence, None] = {}
        # Results of the last step that are not processed yet, in the order of its batch: the tokens of prefills that ended; and the tokens
        # with KV of finished sequences.
        self._results: dict[Sequence, int] = {}
        self._leaving: dict[Sequence, int] = {}
        self._known: dict[Sequence, Known] = {}
        self._transaction = RadixTransaction(self)

    def branch(self, pages: int) -> int:
        """Pages of the last look-up, which found ``pages``, if there were more; else 0. With states those on their grid."""
        walked = self.tree.hit if isinstance(self.tree, ComponentTree) else 0
        if self.states is not None:
            walked -= walked % self.pages_of(self.states.grid)
        return walked if walked > pages else 0

    def copy_state(self, node: RadixNode) -> int:
        """Copy the state of a node for a sequence that goes on from there, and the number of its states then."""
        if self.states is None or node is self.tree.root:
            return 0
        if self.states.ahead:
            self.states.ahead -= 1
            self.states.own += 1
            return 1
        bound = self.tree.lock(node)
        self._take_states(1)
        self.tree.unlock(node, bound)
        return 1

    def take_ahead(self, number: int) -> None:
        """In one buffer, take a state for each of so many waiting requests whose state may be copied, if there are so many
        (``alloc_group_begin``); 0 gives back what is left of them. The room of the KV cache lacks them meanwhile."""
        if self.buffer is not None and self.states is not None:
            self.states.ahead = number if number <= self.state_free else 0

    def _take_states(self, number: int) -> None:
        """Take so many states, after others were evicted where too few are free."""
        assert self.states is not None
        self.make_free(0, number)
        self.states.own += number
        if self.state_free < 0:
            raise Overdrawn(f"{-self.state_free} more states are taken than there are")

    def give_back_states(self, holding: Holding) -> None:
        """A sequence's own states are free."""
        if self.states is not None:
            self.states.own -= holding.states
            holding.states = 0

    def slide(self, sequence: Sequence, tokens: int) -> None:
        """Give back a sequence's own windows before that of its last ``tokens`` (``free_swa_out_of_window_slots``)."""
        windows, holding, size = self.windows, self.holdings[sequence], self.block_size
        assert windows is not None
        if tokens - windows.tokens <= holding.freed * size:
            return
        # What joins the tree has a whole window in full pages; without a tree the tokens are enough.
        kept = max(1, self.pages_of(windows.tokens)) * size if self.keeps else windows.tokens
        first = holding.first
        holding.freed = max(first, (tokens - kept) // size)
        windows.own -= holding.freed - first

    def max_output_tokens(self, sequence: Sequence) -> int:
        """The declared longest output, capped by what the pool can hold."""
        prompt = self.pages_of(sequence.prompt_tokens) * self.block_size
        if self.buffer is not None and self.windows is not None:
            return self._most_output_tokens(sequence, self.windows, self.buffer)
        return min(sequence.max_tokens, self.most_tokens - prompt - self.block_size - 1)

    def _most_output_tokens(self, sequence: Sequence, windows: Windows, buffer: SharedBuffer) -> int:
        """As ``max_output_tokens`` where slots and windows share a buffer (``max_new_tokens_for_memory``)."""
        prompt, page = sequence.prompt_tokens, self.block_size

        def lacks(output: int) -> bool:
            return not buffer.holds(prompt + output + page, windows.needed(prompt, output, page), page)

        declared = max(0, min(sequence.max_tokens, buffer.most_tokens - prompt - 2))
        return bisect_left(range(1, declared + 1), True, key=lacks)

    def known(self, sequence: Sequence) -> tuple[Run, ...]:
        """The tokens that a sequence's next (or last) prefill covers: its prompt and the tokens it has generated."""
        return self.known_of(sequence).string

    def known_of(self, sequence: Sequence) -> Known:
        """As ``known``, with the place in the tree where they were found."""
        known, tokens = self._known.get(sequence), sequence.start_tokens
        if known is None or known.tokens != tokens:
            string, start, pages = first_tokens(self._runs_of(sequence), tokens), self.tree.start, self._pages.of
            known = Known(tokens, string, pages(string), pages(all_but_last(string)), start, start)
            self._known[sequence] = known
        return known

    def _runs_of(self, sequence: Sequence) -> tuple[Run, ...]:
        """A sequence's prompt and output."""
        index, runs = sequence.index, self._runs
        if runs is None:
            return ((index, 0, sequence.target_tokens),)
        return (*runs.runs(index), *runs.output_runs(index))

    @property
    def is_settled(self) -> bool:
        """Whether no copy between device and host changes the tree within a leap."""
        return True

    def start_loading(self) -> LayeredLoad | None:
        """Begin the loads of a decision; None without any."""
        return None

    def transaction(self, decode_step: int) -> RadixTransaction:
        """The calls of ``decode_step``."""
        self._transaction.decode_step = decode_step
        return self._transaction

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """Compute the tokens of a sequence beyond the prefix that it has locked."""
        self._batch.append((sequence, sequence.start_tokens))

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """As ``admit``, up to the end of a chunk."""
        self._batch.append((sequence, sequence.computed_tokens))

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """Nothing: the transaction has retracted them."""

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """Free a running sequence's own pages and its locks before ``decode_step``; the tree keeps the rest."""
        holding, pages = self.holdings.pop(sequence), self.pages_of(sequence.held_tokens(decode_step))
        self._stop(sequence)
        # The overlap schedule drops the result of one that is retracted.
        self._results.pop(sequence, None)
        self.free += pages - holding.pages
        if self.windows is not None:
            self.windows.own -= pages - holding.first
        self.give_back_states(holding)
        self.tree.unlock(holding.node, holding.bound)

    def _phase(self, sequence: Sequence) -> int:
        """The steps in which a running sequence begins a page, modulo the page size."""
        return (1 - sequence.lag) % self.block_size

    def _stop(self, sequence: Sequence) -> None:
        """A sequence decodes no more."""
        if sequence in self.decoding:
            del self.decoding[sequence]
            self.phases.add(self._phase(sequence), -1)

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``; only of sequences that have finished."""
        self._stop(sequence)

    def room_after(self, state: State, steps: int) -> int:
        """Slots that are free or evictable after the running sequences have grown by ``steps`` tokens each."""
        growth = self.phases.total(state.decode_step, steps)
        if self.buffer is None:
            return self.room - growth * self.block_size
        assert isinstance(self.tree, ComponentTree)
        evicted = growth - self.tree.unlocked_tokens, -self.tree.component_evictable
        left = self._left(self.buffer, *evicted)
        return left // self.buffer.page_bytes * self.block_size

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``. SGLang's steps prefill or decode, so that all tables decode where some do."""
        pages = sum(holding.pages for holding in self.holdings.values()) - self.tree.protected_tokens
        return pages * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """Grow the running sequences through the steps of a leap, or end a step that only prefills.

        Returns:
            Live and held slots in the first step, and ``block_tail`` of the prefills in progress; then of a second pool live and held slots of
            windows, or held states.
        """
        levels = self._begin_row(state, steps)
        if steps:
            self._grow(state.batch_size, state.decode_step + 1, state.decode_step + steps)
        else:
            self._end_prefills(state.decode_step)
        return levels

    def _begin_row(self, state: State, steps: int) -> Meter:
        """Take the pages of a leap's first step, or of a step that only prefills. Returns the slots of that row by bucket."""
        row = self.log.row
        self.log.row += 1
        if self._batch:
            self._take_for_prefills()
        elif steps or (self._leaving and not state.batch_size):
            self._take_for_decode(state.decode_step)
            self.steps_in_vain += not steps
        if self._results:
            self.process_results(at_row(row))
        self._settle(at_row(row))
        held = self.capacity_slots - (self.free + self.tree.unlocked_tokens) * self.block_size
        live, tail = (held, 0) if self.block_size == 1 else self._filled(state, steps)
        if self.windows is not None:
            # The pages that are not full are last ones, which both pools have.
            assert isinstance(self.tree, ComponentTree)
            in_windows = (self.windows.own + self.tree.components - self.tree.component_unlocked) * self.block_size
            return live, held, tail, in_windows - (held - live), in_windows
        if self.states is not None:
            assert isinstance(self.tree, ComponentTree)
            return live, held, tail, self.states.own + self.tree.component_protected
        return live, held, tail

    def _filled(self, state: State, steps: int) -> tuple[int, int]:
        """Slots with tokens in the first step, and ``block_tail`` of the prefills in progress."""
        live = state.batch_size * (state.decode_step - (not steps)) + state.lag_sum - self.repeated_slots()
        tail = 0
        # Some prefills may wait, with what they have.
        chunks = {sequence: sequence.computed_tokens for sequence in state.prefilling} | dict(self._batch)
        for sequence, tokens in chunks.items():
            if tokens < sequence.start_tokens:
                live += tokens
                tail += max(0, self.pages_of(tokens) * self.block_size - sequence.target_tokens)
        return live, tail

    def _take_for_prefills(self) -> None:
        """The pages of the prefills of a step; with pages of several tokens SGLang asks for one more a sequence."""
        own = [(tokens, self.holdings[sequence].computed) for sequence, tokens in self._batch]
        if self.states is not None:
            self._take_states_of_prefills(self.states.tracked + 1)
        if self.windows is not None and not self.keeps:
            self._slide_prefills()
        pages = sum(self.pages_of(tokens) - self.pages_of(computed) for tokens, computed in own)
        spare = len(own) * self.block_size * (self.block_size > 1)
        exact = self.windows is not None and self.buffer is not None
        self._take(pages, pages if exact else self.pages_of(sum(tokens - computed for tokens, computed in own) + spare))

    def _take_states_of_prefills(self, each: int) -> None:
        """Each of the batch has so many states then, of which it may have some already."""
        holdings = [self.holdings[sequence] for sequence, _ in self._batch]
        self._take_states(sum(each - holding.states for holding in holdings))
        for holding in holdings:
            holding.states = each

    def _take_for_decode(self, decode_step: int) -> None:
        """The pages of a step that decodes; those that have finished without its knowing it compute a token, too."""
        self._take(self.phases.counts[decode_step % self.block_size], len(self.decoding))
        for sequence in self._leaving:
            self._leaving[sequence] += sequence in self.decoding

    def _take(self, pages: int, asked: int) -> None:
        """Take so many pages, after those that are asked for were made free."""
        self.make_free(asked)
        self.free -= pages
        left = self.available
        if self.windows is not None:
            self.windows.own += pages
            left = min(left, self.window_free)
        if left < 0:
            raise Overdrawn(f"{-left * self.block_size} more slots are taken than there are")

    def _grow(self, batch_size: int, decode_step: int, end: int) -> None:
        """The pages of each step from ``decode_step`` to before ``end``, at once up to the next that must evict."""
        while decode_step < end:
            steps = self._steps_without_eviction(batch_size, decode_step, end)
            if steps:
                self._take(self.phases.total(decode_step, steps), 0)
            else:
                steps = 1
                self._take(self.phases.counts[decode_step % self.block_size], batch_size)
                self._settle(in_step(decode_step))
            decode_step += steps

    def _steps_without_eviction(self, batch_size: int, decode_step: int, end: int) -> int:
        """How many steps from ``decode_step`` to before ``end`` find a free page for each sequence, or nothing to evict."""
        if not self.tree.evictable_tokens:
            return end - decode_step
        if (available := self.available) < batch_size:
            return 0
        return min(1 + self.phases.steps_within(decode_step, available - batch_size), end - decode_step)

    def _end_prefills(self, decode_step: int) -> None:
        """A step that only prefills is over: chunks join the tree, and the results of the other prefills are there."""
        chunks = []
        for sequence, tokens in self._batch:
            if tokens < sequence.start_tokens:
                chunks.append((sequence, tokens))
                continue
            self._results[sequence] = tokens
            # It joins the batch now, behind others that may have started later.
            self.holdings[sequence] = self.holdings.pop(sequence)
            self.decoding[sequence] = None
            self.phases.add(self._phase(sequence), 1)
            if not self.ahead and sequence.finish_step <= decode_step:
                self._leaving[sequence] = tokens
        self._batch.clear()
        if not self.ahead:
            self.process_results()
        self._keep_chunks(chunks)

    def _keep_chunks(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        """Chunks join the tree, with which the next decision begins: it is the first to see results without the overlap schedule."""
        for sequence, tokens in chunks:
            self._keep(sequence, tokens)
        self._settle(after_row(self.log.row - 1))

    def process_results(self, moment: int | None = None) -> None:
        """Prefills that ended join the tree; so do finished sequences, which leave.

        Args:
            moment: When; None is after the last row.
        """
        for sequence, tokens in self._results.items():
            if sequence in self._leaving:
                self._leave(sequence, self._leaving[sequence], tokens)
            else:
                self._keep(sequence, tokens)
        self._results.clear()
        self._leaving.clear()
        self._settle(after_row(self.log.row - 1) if moment is None else moment)

    def _settle(self, moment: int) -> None:
        """What is no longer locked is cached."""
        self.log.settle(self.tree.unlocked_tokens, moment)
        if self.second_pool is not None:
            assert isinstance(self.tree, ComponentTree)
            self.second_pool.cached_level.settle(self.tree.component_unlocked, moment)

    def _keep(self, sequence: Sequence, tokens: int) -> None:
        """What a prefill computed joins the tree, and the sequence's lock moves there."""
        holding = self.holdings[sequence]
        cached, holding.computed = self._cached(holding, tokens), tokens
        if not self.keeps or not cached:
            return
        if self.states is not None:
            # In place of the state that joins the tree.
            self._take_states(1)
        if self.windows is not None:
            self.slide(sequence, cached - 1)
        first, node = holding.first, self._insert(sequence, cached)
        self._part(sequence, tokens)
        # Before the other is unlocked, so that the path to both stays locked.
        bound = self.tree.lock(node)
        self.tree.unlock(holding.node, holding.bound)
        holding.node, holding.bound, holding.pages = node, bound, cached // self.block_size
        if self.states is not None:
            self.states.own -= 1
        if self.windows is not None:
            self.windows.own -= holding.first - first
            if holding.branch and cached // self.block_size >= holding.branch:
                holding.branch = 0
                self.slide(sequence, tokens - 1)

    def _cached(self, holding: Holding, tokens: int) -> int:
        """Of so many computed tokens those that join the tree: not beyond where its windows were missing, so that they join it there; with
        states, up to one that is there."""
        branch = holding.branch * self.block_size
        if self.states is not None:
            return self.states.of_prefill(holding.computed, tokens, branch)
        return branch if holding.branch > holding.pages and branch <= tokens else tokens

    def _leave(self, sequence: Sequence, tokens: int, known: int) -> None:
        """What a finished sequence computed joins the tree, and the sequence is gone; ``known`` of its tokens were not computed in vain."""
        holding = self.holdings[sequence]
        first, pages = holding.first, self.pages_of(tokens)
        if self.states is not None and known > sequence.start_tokens:
            cached = self.states.of_decodes(sequence.start_tokens, known)
        else:
            cached = self._cached(holding, known if self.states is not None else tokens)
        if self.keeps and cached:
            self._insert(sequence, cached)
            self._part(sequence, tokens)
            holding.pages = cached // self.block_size
        # Its last page, if that is not full; and what does not join the tree.
        self.free += pages - holding.pages
        if self.windows is not None:
            self.windows.own -= pages - first
        self.give_back_states(holding)
        self._stop(sequence)
        self.tree.unlock(holding.node, holding.bound)
        del self.holdings[sequence]
        del self._known[sequence]
        self.departures += 1

    def _insert(self, sequence: Sequence, tokens: int) -> RadixNode:
        """Its first tokens join the tree in full pages; those of its own that are there already are free."""
        holding = self.holdings[sequence]
        if holding.rest is None:
            holding.rest = Rest(self._pages.of(self._runs_of(sequence)))
            holding.rest.take(holding.pages)
        first, end = holding.pages, tokens // self.block_size
        key, live = holding.rest.take(end - first), max(0, holding.freed - first)
        node, known = self.tree.insert(key, holding.node, live, holding.inserted - first)
        holding.inserted = max(holding.inserted, end)
        self.free += known
        return node

    def _part(self, sequence: Sequence, tokens: int) -> None:
        """An edge ends with the prompt, so that an output can be evicted without it."""
        prompt = sequence.prompt_tokens
        if not isinstance(self.tree, ComponentTree) and tokens // self.block_size > prompt // self.block_size:
            self.tree.match(self._pages.of(first_tokens(self._runs_of(sequence), prompt)))

    def _slide_prefills(self) -> None:
        """Without a tree, give back windows before the chunks of a step, or before the chunk in flight."""
        assert self.windows is not None
        for sequence, _ in self._batch:
            self.slide(sequence, self.holdings[sequence].computed - self.windows.in_flight)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """Sequences leave before ``decode_step``; the tree keeps their computed tokens.

        The tokens of a sequence that left at the end of its prefill are in the tree already.
        """
        self._note_leaving(leaving, decode_step)
        self.process_results()

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``. SGLang processes the results of these sequences once the coming step has its slots, or at once without a coming step."""
        self._note_leaving(leaving, decode_step)
        if not self._batch and not self.decoding:
            self.process_results()

    def _note_leaving(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        held = [sequence for sequence in leaving if sequence in self.holdings]
        if len(held) > 1:
            places = {sequence: place for place, sequence in enumerate(self.holdings)}
            held.sort(key=places.__getitem__)
        for sequence in held:
            self._leaving[sequence] = tokens = sequence.held_tokens(decode_step)
            self._results.setdefault(sequence, tokens)
