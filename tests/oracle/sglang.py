"""SGLang: every computed token stays in a trie, and the request that finds most of its prompt there comes first.

A token's slot is named by the tables of running sequences, by the trie, or not at all; a census looks at every one.
"""

from __future__ import annotations

from .decode_step import System, Work
from .iteration import known, pairs
from .model import Limits, Pool, Sequence, allowed_output_tokens
from .slots import CACHED, FREE, LIVE, SlotMap
from .trie import String, Trie

FIRST_RATIO = 0.7
LEAST_RATIO = FIRST_RATIO * 0.14
DECAY = (FIRST_RATIO - LEAST_RATIO) / 600
INPUT_TOKENS, LONGEST_OUTPUT, TOKENS_AFTER_RETRACTION, MOST_SORTED, ALIKE = 16_384, 4096, 20, 128, 32
#: Passes over a queue that is not sorted between two that touch its prefixes.
REFRESH = 32


class SgLang(System):
    """``running`` decodes, in the order of its prefills; ``chunked`` is the sequence in a chunked prefill."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__()
        if pool.block_size != 1:
            raise ValueError(f"block_size = {pool.block_size}: SGLang's slots hold one token")
        self.pool, self.limits = pool, limits
        self.max_num_seqs = 2048 if limits.max_num_seqs is None else limits.max_num_seqs
        self.trie = Trie()
        self.free = list(range(pool.num_blocks))
        # The slots of the tokens computed so far, and how much of that a sequence locks in the trie.
        self.tables: dict[Sequence, list[int]] = {}
        self.locked: dict[Sequence, String] = {}
        self.chunked: Sequence | None = None
        self.prefills: list[tuple[Sequence, int]] = []
        self.ratio = FIRST_RATIO
        self.is_full = False
        self.unsorted = 0
        self.queried = self.hit = 0
        self.first_hits: dict[int, int] = {}

    def refusal(self, sequence: Sequence) -> str | None:
        if sequence.final_tokens + 2 > self.pool.slots:
            return f"needs {sequence.final_tokens + 2} slots of a pool of {self.pool.slots}"
        return None

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.chunked)

    def string(self, sequence: Sequence, tokens: int) -> String:
        """The first tokens of prompt and output."""
        request = sequence.request
        prompt = request.prompt_ids or [(sequence.index, i) for i in range(request.prompt_tokens)]
        output = request.output_ids or [(sequence.index, "out", i) for i in range(request.output_tokens)]
        return (*prompt, *output)[:tokens]

    def allowed(self, sequence: Sequence) -> int:
        """The max_tokens of a sequence, which the pool cuts."""
        declared = allowed_output_tokens(sequence.request, self.limits)
        return min(declared, self.pool.slots - 2 - sequence.request.prompt_tokens)

    def room(self) -> int:
        return len(self.free) + len(self.trie.evictable())

    def lock(self, sequence: Sequence, string: String) -> None:
        self.trie.locks.append(string)
        self.locked[sequence] = string

    def unlock(self, sequence: Sequence) -> None:
        self.trie.locks.remove(self.locked.pop(sequence))

    def make_free(self, slots: int) -> None:
        if len(self.free) < slots:
            self.free += self.trie.evict(slots - len(self.free))

    def take(self, slots: int) -> list[int]:
        return [self.free.pop() for _ in range(slots)]

    def rest(self) -> None:
        self.ratio = FIRST_RATIO

    def schedule(self) -> Work:
        self.prefills = []
        if not self.running:
            self.is_full = False
        if not self.chunked and len(self.running) >= self.max_num_seqs:
            self.is_full = True
        if self.chunked or (self.waiting and not self.is_full):
            self.sort_queue()
            self.fill()
        return self.prefill() if self.prefills else self.decode()

    def sort_queue(self) -> None:
        if self.limits.schedule_policy == "fcfs" or len(self.waiting) > MOST_SORTED:
            if self.waiting:
                if self.unsorted % REFRESH == 0:
                    for sequence in self.waiting[:MOST_SORTED][::-1]:
                        self.trie.find(self.string(sequence, known(sequence)))
                self.unsorted += 1
            return
        found, ahead = {}, []
        for sequence in self.waiting:
            string = self.string(sequence, known(sequence))
            matched = self.trie.find(string)
            found[sequence] = min(matched, known(sequence) - 1)
            if matched <= ALIKE:
                if any(len(other) >= ALIKE and other[:ALIKE] == string[:ALIKE] for other in ahead):
                    found[sequence] = -1
                else:
                    ahead.append(string)
        self.waiting.sort(key=lambda s: found[s], reverse=True)

    def fill(self) -> None:
        """Choose the sequences that prefill in this step; each takes a page more than its tokens."""
        reserved = 0.0
        for sequence in self.running:
            reserved += min(self.allowed(sequence) - sequence.generated, LONGEST_OUTPUT) * self.ratio
        chunk, inputs, at_once, is_full = self.limits.max_num_batched_tokens, INPUT_TOKENS, 0, False

        def join(sequence: Sequence, tokens: int, is_whole: bool) -> None:
            nonlocal chunk, inputs, at_once, reserved
            self.prefills.append((sequence, tokens))
            chunk -= tokens
            inputs -= tokens
            at_once += tokens + 1
            reserved += tokens + 1 + (min(self.allowed(sequence), LONGEST_OUTPUT) if is_whole else 0)
            self.chunked = None if is_whole else sequence

        if self.chunked:
            sequence = self.chunked
            left = min(chunk, int(self.room() - reserved))
            lacking = known(sequence) - len(self.tables[sequence])
            tokens = min(lacking, left if left > 0 else chunk)
            join(sequence, tokens, tokens == lacking)
        for sequence in list(self.waiting):
            has_room = self.room() > reserved and self.room() > at_once
            if has_room and (chunk <= 0 or inputs <= 0):
                break
            if len(self.running) + len(self.prefills) >= self.max_num_seqs:
                is_full = True
                break
            found = self.string(sequence, self.trie.find(self.string(sequence, known(sequence) - 1)))
            own = known(sequence) - len(found)
            self.lock(sequence, found)
            to_come = min(max(0, self.allowed(sequence) - sequence.generated), LONGEST_OUTPUT)
            if own + to_come + 1 >= self.room() - reserved:
                self.unlock(sequence)
                is_full = True
                break
            self.waiting.remove(sequence)
            self.tables[sequence] = [self.trie.slots[found[:end]] for end in range(1, len(found) + 1)]
            self.queried += known(sequence)
            self.hit += len(found)
            self.first_hits.setdefault(sequence.index, len(found))
            tokens = min(own, chunk)
            join(sequence, tokens, tokens == own)
            if reserved >= self.room() or at_once >= self.room():
                is_full = True
                break
        # A batch without running sequences is replaced by the one that prefills, and that is not full.
        self.is_full = self.is_full or (is_full and bool(self.running))

    def prefill(self) -> Work:
        self.make_free(sum(tokens for _, tokens in self.prefills))
        pairs_computed = 0
        for sequence, tokens in self.prefills:
            before = len(self.tables[sequence])
            self.tables[sequence] += self.take(tokens)
            pairs_computed += pairs(before, before + tokens)
        if self.chunked:
            self.is_full = False
        computed = sum(tokens for _, tokens in self.prefills)
        return Work(
            running=[*self.running, *(sequence for sequence, _ in self.prefills)],
            prefilled=list(self.prefills),
            paused=list(self.running),
            cost_arguments=(0, 0, computed, pairs_computed),
        )

    def decode(self) -> Work:
        work = Work()
        if self.room() < len(self.running):
            work.preempted = self.retract()
        else:
            self.ratio = max(LEAST_RATIO, self.ratio - DECAY)
        if work.preempted:
            self.is_full = False
        self.make_free(len(self.running))
        for sequence in self.running:
            self.tables[sequence] += self.take(1)
        work.running, work.decodes = list(self.running), list(self.running)
        work.cost_arguments = (len(self.running), sum(len(self.tables[s]) for s in self.running), 0, 0)
        return work

    def retract(self) -> list[Sequence]:
        retracted: list[Sequence] = []
        self.make_free(len(self.running))
        while self.room() < len(self.running) and len(self.running) > 1:
            order = enumerate(self.running)
            _, victim = min(order, key=lambda pair: (pair[1].generated, -pair[1].request.prompt_tokens, -pair[0]))
            self.running.remove(victim)
            retracted.append(victim)
            victim.preemptions += 1
            self.free += self.tables.pop(victim)[len(self.locked[victim]) :]
            self.unlock(victim)
            self.make_free(TOKENS_AFTER_RETRACTION * len(self.running))
        self.waiting += retracted
        self.running.sort(key=lambda s: (s.generated, -s.request.prompt_tokens), reverse=True)
        needed = sum(s.generated for s in self.running) + TOKENS_AFTER_RETRACTION * len(self.running)
        self.ratio = min(1.0, needed / (sum(self.allowed(s) for s in self.running) + 1))
        return retracted

    def complete(self, now_ticks: int) -> None:
        """The trie takes what was computed; one that has computed all it knows gets a token, and some finish."""
        if not self.prefills:
            for sequence in list(self.running):
                sequence.add_token(now_ticks)
                if sequence.done:
                    self.is_full = False
                    self.running.remove(sequence)
                    self.finish(sequence, now_ticks)
        for sequence, _ in self.prefills:
            if sequence is self.chunked:
                self.keep(sequence)
                continue
            sequence.add_token(now_ticks)
            if sequence.done:
                self.is_full = False
                self.finish(sequence, now_ticks)
            else:
                self.keep(sequence)
                self.running.append(sequence)

    def keep(self, sequence: Sequence) -> None:
        """What a sequence has computed is cached, and locked; what others cached before it, it has in their slots."""
        string = self.string(sequence, len(self.tables[sequence]))
        own, table = len(self.locked[sequence]), self.tables[sequence]
        there = self.trie.insert(string, table)
        prompt = self.string(sequence, sequence.request.prompt_tokens)
        if len(prompt) < len(string):
            # An edge ends with the prompt.
            self.trie.find(prompt)
        self.free += table[own:there]
        self.tables[sequence] = [self.trie.slots[string[:end]] for end in range(1, len(string) + 1)]
        self.unlock(sequence)
        self.lock(sequence, string)

    def finish(self, sequence: Sequence, now_ticks: int) -> None:
        sequence.finish_ticks = now_ticks
        self.keep(sequence)
        self.unlock(sequence)
        del self.tables[sequence]

    def buckets(self) -> dict[str, int]:
        slot_map = SlotMap(self.pool.slots)
        named = {slot for table in self.tables.values() for slot in table}
        for slot in named:
            slot_map.put(slot, LIVE)
        for slot in set(self.trie.slots.values()) - named:
            slot_map.put(slot, CACHED)
        for slot in self.free:
            slot_map.put(slot, FREE)
        return slot_map.census()
