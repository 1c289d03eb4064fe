"""KV groups over one pool of pages: layers that keep every token, and layers that keep what a window needs.

A sequence has a table in every group, the full ones' first. A table has an entry for each block of tokens: a page, or
None once the page was given back. In a step the running sequences go in order, and each gives back what lies wholly
before the window of the first token that it computes now, in all its sliding groups, and then takes its pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .decode_step import run
from .iteration import IterationSystem, known
from .model import Limits, Outcome, Pool, Request, Sequence, check
from .slots import FREE, SlotMap, census, classify_slot


@dataclass(frozen=True)
class Groups:
    """How many groups keep every token, how many have a window, and its length in tokens."""

    full: int
    sliding: int
    window: int


class HybridSystem(IterationSystem):
    """``tables`` holds a list of tables, one a group."""

    def __init__(self, pool: Pool, limits: Limits, groups: Groups) -> None:
        super().__init__(pool, limits)
        self.groups = groups
        self.num_groups = groups.full + groups.sliding
        self.group_buckets: list[list[dict[str, int]]] = []

    def most_in_flight(self) -> int:
        """Tokens of one sequence that a step may compute."""
        raise NotImplementedError

    def asked_pages(self, tokens: int) -> int:
        """Pages that the admission of a sequence with so many known tokens asks for."""
        before_and_chunk = min(self.groups.window - 1 + self.most_in_flight(), self.limits.max_model_len)
        most = self.blocks_for(before_and_chunk) + 1
        blocks = self.blocks_for(tokens)
        return self.groups.full * blocks + self.groups.sliding * min(blocks, most)

    def refusal(self, sequence: Sequence) -> str | None:
        pages = self.asked_pages(self.largest_tokens(sequence))
        if pages > self.pool.num_blocks:
            return f"needs {pages} pages of a pool of {self.pool.num_blocks}"
        return None

    def give_back(self, sequence: Sequence) -> None:
        """Null the entries of tokens that the next one does not see, block by block."""
        first_seen = self.computed[sequence] - (self.groups.window - 1)
        for table in self.tables[sequence][self.groups.full :]:
            for number, page in enumerate(table):
                last_token = (number + 1) * self.pool.block_size - 1
                if last_token < first_seen and page is not None:
                    self.free.append(page)
                    table[number] = None

    def pages_missing(self, sequence: Sequence, tokens: int) -> int:
        """Pages to take until all tables reach to so many tokens."""
        return sum(max(0, self.blocks_for(tokens) - len(table)) for table in self.tables[sequence])

    def grow(self, sequence: Sequence, tokens: int) -> None:
        for table in self.tables[sequence]:
            while len(table) < self.blocks_for(tokens):
                table.append(self.free.pop())

    def admit(self, tokens: int) -> Sequence:
        sequence = self.waiting.pop(0)
        self.tables[sequence] = [[] for _ in range(self.num_groups)]
        self.computed[sequence] = 0
        self.running.append(sequence)
        self.compute(sequence, tokens)
        return sequence

    def release(self, sequence: Sequence) -> None:
        tables = self.tables.pop(sequence)
        self.free.extend(page for table in tables for page in table if page is not None)
        del self.computed[sequence]
        self.decoding.discard(sequence)

    def buckets(self) -> dict[str, int]:
        """The census of the pool by address; those of the groups are kept in ``group_buckets``."""
        size = self.pool.block_size
        slot_map = SlotMap(self.pool.slots)
        in_groups: list[list[str]] = [[] for _ in range(self.num_groups)]
        for sequence, tables in self.tables.items():
            computed = self.computed_now(sequence)
            for group, table in enumerate(tables):
                end = len(table) * size
                if computed > end:
                    raise AssertionError(
                        f"{sequence.index} computed {computed} tokens and group {group} has {end} slots"
                    )
                window = self.groups.window if group >= self.groups.full else computed
                self._see_all(sequence, table, window)
                for i in (i for i in range(end) if table[i // size] is not None):
                    bucket = classify_slot(i, computed, sequence.final_tokens, computed, end)
                    slot_map.put(table[i // size] * size + i % size, bucket)
                    in_groups[group].append(bucket)
        for slot in (page * size + offset for page in self.free for offset in range(size)):
            slot_map.put(slot, FREE)
        self.group_buckets.append([census(slots) for slots in in_groups])
        return slot_map.census()

    def _see_all(self, sequence: Sequence, table: list, window: int) -> None:
        """Whether every token computed in this step finds the tokens of its window."""
        for token in range(self.computed[sequence], self.computed_now(sequence)):
            for seen in range(max(0, token - window + 1), token + 1):
                if table[seen // self.pool.block_size] is None:
                    raise AssertionError(f"{sequence.index} computes token {token} and has lost token {seen}")


class HybridV1(HybridSystem):
    """vLLM V1: a budget of tokens, chunks, the last running one gives way. One page is the null block."""

    def __init__(self, pool: Pool, limits: Limits, groups: Groups) -> None:
        super().__init__(Pool(pool.num_blocks - 1, pool.block_size), limits, groups)

    def most_in_flight(self) -> int:
        return self.limits.max_num_batched_tokens

    def decide(self) -> None:
        budget = self.limits.max_num_batched_tokens
        for sequence in self.running:
            tokens = min(known(sequence) - self.computed[sequence], budget)
            self.give_back(sequence)
            missing = self.pages_missing(sequence, self.computed[sequence] + tokens)
            # Victims leave at the end of the list, which the loop has yet to reach.
            if not self.make_room(sequence, missing):
                break
            self.compute(sequence, tokens)
            budget -= tokens
        if self.work.preempted:
            return
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            if self.asked_pages(tokens) > len(self.free):
                break
            chunk = min(tokens, budget)
            self.admit(chunk)
            budget -= chunk


class HybridWhole(HybridSystem):
    """Whole prompts, and a free page in each group for every running sequence, needed or not; recompute or swap."""

    def __init__(self, pool: Pool, limits: Limits, groups: Groups) -> None:
        super().__init__(pool, limits, groups)
        self.swapped: list[Sequence] = []
        self.host_free = list(range(pool.host_blocks))
        self.host_tables: dict[Sequence, list[list[int | None]]] = {}

    def has_work(self) -> bool:
        return super().has_work() or bool(self.swapped)

    def most_in_flight(self) -> int:
        return self.limits.max_model_len

    def preempt(self, victim: Sequence) -> None:
        """What its next token sees goes to the host, where that has room and the pool could take it back."""
        if self.limits.preemption_mode == "swap":
            self.give_back(victim)
            pages = sum(page is not None for table in self.tables[victim] for page in table)
            if pages <= len(self.host_free) and pages + self.num_groups <= self.pool.num_blocks:
                self._swap_out(victim, pages)
                return
        super().preempt(victim)

    def _swap_out(self, victim: Sequence, pages: int) -> None:
        self.stop(victim)
        tables = self.tables.pop(victim)
        self.free.extend(page for table in tables for page in table if page is not None)
        self.host_tables[victim] = [
            [page if page is None else self.host_free.pop() for page in table] for table in tables
        ]
        self.work.swapped_out.append(victim)
        self.work.swapped_out_blocks += pages
        self.swapped.append(victim)
        self.swapped.sort(key=lambda sequence: sequence.arrival_order)

    def swap_in(self) -> None:
        """First come first served, each with a page a group to spare; they decode in this same step."""
        while self.swapped and len(self.running) < self.max_num_seqs:
            tables = self.host_tables[self.swapped[0]]
            on_host = [page for table in tables for page in table if page is not None]
            if len(self.free) - len(on_host) - self.num_groups < self.watermark_blocks():
                break
            sequence = self.swapped.pop(0)
            self.host_free.extend(on_host)
            del self.host_tables[sequence]
            self.tables[sequence] = [[page if page is None else self.free.pop() for page in table] for table in tables]
            self.work.swapped_in.append(sequence)
            self.work.swapped_in_blocks += len(on_host)
            self.running.append(sequence)
            self.compute(sequence, 1)

    def buckets(self) -> dict[str, int]:
        on_host = [
            page for tables in self.host_tables.values() for table in tables for page in table if page is not None
        ]
        if sorted(on_host + self.host_free) != list(range(self.pool.host_blocks)):
            raise AssertionError(f"{len(on_host)} pages held and {len(self.host_free)} free of {self.pool.host_blocks}")
        return super().buckets()

    def decode_all(self) -> None:
        """In order of arrival; the last arrivals give way."""
        queue = sorted(self.running, key=lambda sequence: sequence.arrival_order)
        while queue:
            sequence = queue.pop(0)
            self.give_back(sequence)
            while len(self.free) < self.num_groups and queue:
                self.preempt(queue.pop())
            if len(self.free) < self.num_groups:
                self.preempt(sequence)
            else:
                self.compute(sequence, 1)


class HybridV0(HybridWhole):
    """vLLM 0.x: a step that admits a request prefills, and none decodes in it."""

    def decide(self) -> None:
        prompt_tokens = 0
        while self.waiting and not self.swapped and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            prompt_tokens += tokens
            if self.computes and prompt_tokens > self.limits.max_num_batched_tokens:
                break
            if len(self.free) - self.asked_pages(tokens) < self.watermark_blocks():
                break
            self.admit(tokens)
        if not self.computes:
            self.decode_all()
            if not self.work.preempted:
                self.swap_in()


class HybridSosp23(HybridWhole):
    """vLLM of the paper: prompts and decodes share a step; preempted sequences wait in order of arrival."""

    def __init__(self, pool: Pool, limits: Limits, groups: Groups) -> None:
        super().__init__(pool, limits, groups)
        self.max_num_seqs = 2048 if limits.max_num_seqs is None else limits.max_num_seqs

    def preempt(self, victim: Sequence) -> None:
        super().preempt(victim)
        self.waiting.sort(key=lambda sequence: sequence.arrival_order)

    def decide(self) -> None:
        self.decode_all()
        if not self.work.swapped_out:
            self.swap_in()
        batched = len(self.running)
        while self.waiting and not self.swapped and len(self.running) < self.max_num_seqs:
            sequence, tokens = self.waiting[0], known(self.waiting[0])
            if sequence in self.work.preempted:
                break
            if len(self.free) - self.asked_pages(tokens) < self.watermark_blocks():
                break
            if self.running and batched + tokens > self.limits.max_num_batched_tokens:
                break
            batched += tokens
            self.admit(tokens)


HYBRID: dict[str, Callable[[Pool, Limits, Groups], HybridSystem]] = {
    "vllm-v1": HybridV1,
    "vllm-v0": HybridV0,
    "vllm-sosp23": HybridSosp23,
}


def simulate_hybrid(
    policy: str,
    requests: list[Request],
    pool: Pool,
    limits: Limits,
    groups: Groups,
    cost: Callable[[int, int, int, int], int],
    swap_out: Callable[[int], int] = lambda blocks: 0,
    swap_in: Callable[[int], int] = lambda blocks: 0,
) -> tuple[Outcome, list[list[dict[str, int]]]]:
    """As ``simulate``, over KV groups; and the buckets of each group in every step, without what is free."""
    check(requests, limits)
    system = HYBRID[policy](pool, limits, groups)
    outcome = run(system, requests, cost, swap_out, swap_in)
    return outcome, system.group_buckets
