"""vllm-sosp23 and vllm-v0 over groups of sequences that share blocks: samples, beams, and a pinned prefix.

A group of n needs n free blocks to go on, and n of ``max_num_seqs``. Its leader computes the prompt; before their first
decode the others name all its blocks. A sequence that writes into a block that others name copies it. Computed again,
the leader computes all it knows, and each of the others what lies past the full blocks of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from .families import FORKED, RECOMPUTED, SWAPPED_IN, Draws, Family, FamilyRequest, FamilySystem
from .families_blocks import PIN, Blocks
from .model import Limits, Pool


class GroupedSosp23(FamilySystem):
    """Three phases a step: keep running, swap in, admit.

    ``ancestry`` gives the fates of a request's beams; None where they are samples.
    """

    def __init__(
        self, pool: Pool, limits: Limits, prefix_tokens: int = 0, ancestry: Callable[[int], Draws] | None = None
    ) -> None:
        super().__init__()
        self.pool, self.limits = pool, limits
        self.prefix_blocks = prefix_tokens // pool.block_size
        self.blocks = Blocks(pool.num_blocks, pool.block_size, self.prefix_blocks)
        self.host_free = pool.host_blocks
        self.host_tables: dict[Family, list[list[int]]] = {}
        self.ancestry = ancestry
        self.draws: dict[Family, Draws] = {}

    @property
    def free_blocks(self) -> int:
        return len(self.blocks.free)

    def refuses(self, request: FamilyRequest) -> bool:
        """Its own blocks of all members at the end; the last token is never stored."""
        shared = request.prompt_tokens // self.pool.block_size
        last = self.blocks.blocks_for(request.prompt_tokens + request.output_tokens - 1)
        return shared + request.n * (last - shared) > self.pool.num_blocks

    def decide(self) -> None:
        self.keep_running()
        if not self.decided.swapped_out:
            self.swap_in()
        if not self.swapped:
            self.admit()

    def watermark_blocks(self) -> int:
        """What an admission or return must leave; nothing while no sequence runs."""
        return int(self.limits.watermark_fraction * self.pool.num_blocks) if self.running else 0

    def has_free_seqs(self, family: Family) -> bool:
        """A group that runs alone may have more than ``max_num_seqs``."""
        return not self.running or self.num_seqs() + family.n <= self.limits.max_num_seqs

    def keep_running(self) -> None:
        """In order of arrival: as many free blocks as sequences, or the last arrival goes, at worst itself."""
        queue = sorted(self.running, key=lambda family: family.index)
        self.running = []
        while queue:
            family = queue.pop(0)
            while self.free_blocks < family.n and queue:
                self.preempt(queue.pop())
            if self.free_blocks < family.n:
                self.preempt(family)
            else:
                self.running.append(family)
                self.decode(family)

    def decode(self, family: Family) -> None:
        """A slot for each member; those that have not begun begin with all that the leader has."""
        if not family.forked:
            family.forked = True
            for sibling in family.members[1:]:
                self.blocks.share(sibling, family.leader)
                sibling.computed_tokens = family.leader.computed_tokens
                self.decided.began.append((sibling, family.generated, FORKED))
        for member in family.members:
            self.decided.copied_slots += self.blocks.append_slot(member)
        self.decided.decoded += family.members
        self.decided.families.append(family)

    def preempt(self, family: Family) -> None:
        """A group of several goes to the host where it has room, and the pool for its return; else recompute."""
        decided, own = self.decided, self.blocks.of(family)
        decided.victims.append(family)
        returns = len(own) + family.n <= self.pool.num_blocks - self.prefix_blocks
        swaps = family.n > 1 or self.limits.preemption_mode == "swap"
        if swaps and returns and len(own) <= self.host_free:
            self.swap_out(family, len(own))
            return
        family.recomputed += 1
        decided.recomputed += family.present
        for member in family.present:
            self.blocks.give_back(member)
        family.forked, family.kind = True, RECOMPUTED
        self.requeue(family)

    def requeue(self, family: Family) -> None:
        """Back among those that wait, in order of arrival."""
        self.waiting.append(family)
        self.waiting.sort(key=lambda waiting: waiting.index)

    def swap_out(self, family: Family, own_blocks: int) -> None:
        """Each block goes once, however many tables name it; the host knows them by the numbers they had."""
        family.swapped += 1
        self.decided.swapped_out += family.present
        self.decided.swapped_out_blocks += own_blocks
        self.host_tables[family] = [list(self.blocks.tables[member]) for member in family.present]
        self.host_free -= own_blocks
        for member in family.present:
            self.blocks.give_back(member)
        self.swapped.append(family)
        self.swapped.sort(key=lambda swapped: swapped.index)

    def swap_in(self) -> None:
        """First come first served, with all blocks and one more for each sequence."""
        while self.swapped:
            need = self.host_blocks_of(self.swapped[0]) + self.swapped[0].n
            if self.free_blocks - need < self.watermark_blocks() or not self.has_free_seqs(self.swapped[0]):
                break
            self.bring_back(self.swapped.pop(0))

    def host_blocks_of(self, family: Family) -> int:
        """Blocks that the host holds of a family, each once; what is pinned never left."""
        return len({block for table in self.host_tables[family] for block in table[self.prefix_blocks :]})

    def bring_back(self, family: Family) -> None:
        """The same tables over other blocks; then it decodes."""
        blocks = self.host_blocks_of(family)
        self.host_free += blocks
        self.decided.swapped_in_blocks += blocks
        there: dict[int, int] = {}
        for member, table in zip(family.present, self.host_tables.pop(family)):
            self.blocks.share(member, PIN)
            for block in table[self.prefix_blocks :]:
                if block in there:
                    self.blocks.name(member, there[block])
                else:
                    there[block] = self.blocks.take(member)
            self.decided.began.append((member, family.generated, SWAPPED_IN))
        self.running.append(family)
        self.decode(family)

    def admit(self) -> None:
        """First come first served, in the step that decodes."""
        tokens = len(self.decided.decoded)
        while self.waiting and self.waiting[0] not in self.decided.victims:
            family = self.waiting[0]
            tokens += self.prefill_tokens(family)
            if self.running and tokens > self.limits.max_num_batched_tokens:
                break
            if self.free_blocks - self.admission_blocks(family) < self.watermark_blocks():
                break
            if not self.has_free_seqs(family):
                break
            self.prefill(self.waiting.pop(0))

    def there(self, family: Family) -> list[int]:
        """Tokens that each present member need not compute: of the prefix, or of the leader's prompt."""
        size = self.pool.block_size
        full = family.request.prompt_tokens // size * size
        return [self.prefix_blocks * size] + [full] * (len(family.present) - 1)

    def prefill_tokens(self, family: Family) -> int:
        return sum(family.known_tokens - tokens for tokens in self.there(family))

    def admission_blocks(self, family: Family) -> int:
        """Blocks that its prefill takes."""
        known = self.blocks.blocks_for(family.known_tokens)
        return sum(known - tokens // self.pool.block_size for tokens in self.there(family))

    def prefill(self, family: Family) -> None:
        """All that is known is computed, but for what is there."""
        for member, tokens in zip(family.present, self.there(family)):
            source = PIN if member is family.leader else family.leader
            self.blocks.share(member, source, tokens // self.pool.block_size)
            self.blocks.grow(member, family.known_tokens)
            member.computed_tokens = family.known_tokens
            self.decided.prefilled.append((member, tokens, family.known_tokens))
            self.decided.began.append((member, family.generated, family.kind))
        family.forked = family.forked or family.n == 1
        self.running.append(family)
        self.decided.families.append(family)

    def step_over(self, family: Family) -> None:
        """The fates of beams are known: one that dies goes on with a survivor's table."""
        if self.ancestry is None or family.n == 1 or not family.forked:
            return
        if family not in self.draws:
            self.draws[family] = self.ancestry(family.index)
        for dead, survivor in next(self.draws[family]):
            self.blocks.give_back(family.members[dead])
            self.blocks.share(family.members[dead], family.members[survivor])

    def release(self, family: Family) -> None:
        for member in family.present:
            self.blocks.give_back(member)

    def census(self) -> tuple[int, int, int, int, int]:
        return *self.blocks.census(), 0, (self.pool.host_blocks - self.host_free) * self.pool.block_size


class GroupedV0(GroupedSosp23):
    """A step prefills the admitted groups, or decodes; none is admitted while one is swapped out."""

    def decide(self) -> None:
        if not self.swapped:
            self.prefill_waiting()
        if self.decided.families:
            self.decided.pauses = True
            return
        self.keep_running()
        if not self.decided.victims:
            self.swap_in()

    def prefill_waiting(self) -> None:
        tokens = 0
        while self.waiting:
            family = self.waiting[0]
            tokens += self.prefill_tokens(family)
            if self.decided.families and tokens > self.limits.max_num_batched_tokens:
                break
            if self.free_blocks - self.admission_blocks(family) < self.watermark_blocks():
                break
            if not self.has_free_seqs(family):
                break
            self.prefill(self.waiting.pop(0))

    def requeue(self, family: Family) -> None:
        """Before all that wait."""
        self.waiting.insert(0, family)
