"""What a paged memory counts: blocks that are held, taken and given back.

A sequence with ``c`` tokens holds ``ceil(c / block_size)`` blocks in each group. While it decodes it needs a new
block in the steps in which the tokens held before are a multiple of the block size. With
``c = decode_step + lag`` after ``decode_step``, that is when ``decode_step = 1 - lag (mod block_size)``: its phase (``phases``).

All groups grow at the same time, by one block each, as in vLLM's hybrid KV cache manager. Two counts are sufficient: the
blocks held in a group that keeps every token, and for each other kind the number of them that one group has released:

    free = pool - groups * blocks + sum over kinds of groups * skipped

Past its window a sequence takes a block every ``block_size`` steps in a sliding group, and releases one every
``block_size`` steps. **Each sequence releases before it takes**: in running order, a sequence releases the blocks before its
window, and then takes the blocks for its next token. Released blocks are available to this sequence and the ones after it in
the order, not to the ones before it.

Groups with blocks of several sizes (``PageGroups.sizes``) have a histogram of phases for each size, and a cycle of steps is their
least common multiple, ``block_size``. The blocks of a sequence are counted in units of their greatest common divisor: of u units a
group with blocks of r units has ``ceil(u / r)``.

Without prefix caching a state takes one block, from the first chunk of the prefill to the end of the sequence, and so does a
ring, always. It is not counted among the groups above, but as ``fixed`` blocks of each sequence.

With a prefix cache of KV groups a block may be in several tables; ``shared`` counts the entries beyond the first:

    free = pool - groups * blocks + sum over kinds of groups * skipped + shared

Tables then always have ids, and grants of a step take effect at once, because the next look-up depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from itertools import accumulate, repeat
from operator import add, mul, sub
from typing import NamedTuple

import numpy as np

from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.kv_groups import FULL, SLIDING, STATE, GroupClass, PageGroups, skipped_blocks
from ..accounting.ledger import METER, of_class
from ..interface.memory import Memory
from ..prefix import BlockPool, Chains, FreeKVCacheBlockQueue
from ..prefix.block_tables import BlockTables
from .fences import Fences
from .group_cache import GroupCache
from .group_tables import GroupTables
from .phases import GrowingGroups, Phases
from .skipped import SkippedBlocks, SkippedStates


class Partial(NamedTuple):
    """Blocks of a sequence in a chunked prefill, or of a stalled sequence.

    Attributes:
        blocks: Number of blocks in a full group, of the smallest size.
        skipped: Number of blocks that one group of each other kind has released.
        computed_tokens: Computed tokens, including the last chunk.
        known_tokens: Those of them that are known to be computed when the next step is decided.
    """

    blocks: int
    skipped: tuple[int, ...]
    computed_tokens: int
    known_tokens: int


class BlockCounts(Memory):
    """How many blocks a paged memory has, how many are held, and for how many steps they suffice: what a transaction and a policy read.

    Args:
        num_blocks: Blocks of the device pool.
        block_size: Tokens a block, for the layers of one group; of blocks of several sizes the least common multiple.
        host_blocks: Blocks of the swap space.
        ids: Whether to hand out physical block ids and keep block tables. Counts, and so every
            decision, are the same with and without.
        groups: The groups that share the pool.
        chains: Names of the blocks of every request, for prefix caching over KV groups; None disables it.
        whole_prompts: Whether the first chunk of a prefill takes the blocks of the whole prompt.
        in_turn: Whether prefills take blocks between decodes, and one group is managed like several.
        order: The order in which free blocks are taken, where they have ids.

    Attributes:
        free: Blocks that are free before the running sequences append their slots of the coming step; those that a
            cache keeps, and can give up, are free.
        host_free: Blocks of the swap space that are free.
        is_plain: Whether there is one group, which keeps every token, and decodes take their blocks first.
        phases: The phases of the sequences that decode, in blocks of ``block_size``.
        classes: The classes of ``groups``.
        unit_tokens: Tokens of the unit in which the blocks of a sequence in KV groups are counted.
        sizes: The groups that take a block with every block of a sequence, by the size of their blocks.
        growing: Number of groups that take a block with every block of a sequence.
        fixed: Additional blocks of every sequence.
        giving: The managers of the kinds of groups that release blocks while their sequences run.
        partial: Blocks held by each sequence in a chunked prefill, or that is stalled.
        cached_blocks: Blocks that count as free and keep contents, or a mapping, for others.
        searches: Whether beams run: each of their steps is a decision.
        prefix_blocks: Blocks of a prefix that every prompt begins with, pinned from the start.
        pending_copies: Shared blocks that running sequences copy in their next step.
        tables: Block tables of one group, where there are ids.
        group_tables: Block tables of KV groups, one per sequence and group, where there are ids.
        cache: The prefix cache of KV groups, or None.
        fences: The batches in flight that keep blocks from coming free, where ``groups.defers``.
    """

    #: What ``advance`` tells the ledger.
    meter: tuple[str, ...] = (*METER[:2], "prefill_tail")
    searches = False
    prefix_blocks = pending_copies = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        ids: bool = False,
        groups: PageGroups = PageGroups(),
        chains: Chains | None = None,
        whole_prompts: bool = False,
        in_turn: bool = False,
        order: type[FreeKVCacheBlockQueue] = FreeKVCacheBlockQueue,
    ) -> None:
        self.num_blocks, self.block_size, self.host_blocks = num_blocks, block_size, host_blocks
        self.free = num_blocks
        self.host_free, self.groups = host_blocks, groups
        self.fences = Fences()
        self.deferred = self.fences.deferred
        self.tables: BlockTables | None = None
        self.partial: dict[Sequence, Partial] = {}
        self.phases = Phases(block_size)
        self._whole_prompts = whole_prompts
        # A sequence that decodes, and has passed blocks in a step for which it then lacked some.
        self._passing_in_vain: Sequence | None = None
        self.is_plain, self.growing, self.fixed, self.unit_tokens = True, 1, 0, block_size
        self.classes: tuple[GroupClass, ...] = ()
        self.sizes: list[GrowingGroups] = []
        self.giving: list[SkippedBlocks] = []
        self.group_tables: GroupTables | None = None
        self.cache: GroupCache | None = None
        if in_turn or groups.kinds != (FULL,):
            self._manage(groups, ids, chains, order)
        elif ids:
            self.tables = BlockTables(num_blocks, host_blocks, block_size, BlockPool(num_blocks, order))
        self._nothing = Partial(0, (0,) * len(self.giving), 0, 0)

    def _manage(self, groups: PageGroups, ids: bool, chains: Chains | None, order: type[FreeKVCacheBlockQueue]) -> None:
        """Set up the managers of KV groups."""
        size, self.is_plain = self.block_size, False
        pool, self.classes = BlockPool(self.num_blocks, order), groups.classes(size)
        self.fixed = groups.rings + (0 if groups.states_by_block else groups.states)
        self.growing = groups.number - self.fixed
        self.unit_tokens = groups.hash_block_size(size)
        number = dict.fromkeys((each.block_size for each in self.classes), 0) if groups.sizes else {size: 0}
        for each in self.classes:
            if each.kind in (FULL, SLIDING) or (each.kind == STATE and groups.states_by_block):
                number[each.block_size] += each.number
        for tokens, growing in number.items():
            phases = self.phases if tokens == size else Phases(tokens)
            self.sizes.append(GrowingGroups(tokens, growing, tokens // self.unit_tokens, phases))
        self.giving = [
            SkippedBlocks(each.window_tokens, each.block_size, each.number, groups.ahead)
            for each in self.classes
            if each.kind == SLIDING
        ]
        if groups.states_by_block:
            self.giving.append(SkippedStates(size, groups))
        if chains is not None:
            self.cache = GroupCache(pool, size, groups, chains)
            self.cache_log = self.cached_level = self.cache.log
            self.contents_kept = None if self.cache.log.contents is None else self.cache
        self.meter = self._group_meter()
        # Table entries beyond the first of a block, as included in ``free``.
        self._shared = 0
        if ids or self.cache is not None:
            self.group_tables = GroupTables(pool, self.host_blocks, size, groups, self.cache)

    def _group_meter(self) -> tuple[str, ...]:
        """What ``advance`` tells the ledger of KV groups: of each class, where their blocks have several sizes."""
        if self.groups.sizes:
            columns = ["live"]
            for place, each in enumerate(self.classes):
                names = ["held", "prefill_tail"] + ["skipped"] * (each.kind == SLIDING) + ["shared"] * bool(self.cache)
                columns += (of_class(name, place) for name in names)
            return tuple(columns)
        skipped = ("skipped",) * bool(self.groups.sliding) + ("skipped_states",) * self.groups.states_by_block
        states = ("states",) * bool(self.fixed)
        shared = ("shared", "shared_in_windows", "shared_states") if self.cache else ()
        return (*self.meter, *skipped, *states, *shared)

    def log_no_contents(self) -> None:
        if self.cache is not None:
            self.cache.log_no_contents()
        self.contents_kept = None

    @property
    def cached_blocks(self) -> int:
        """See above."""
        return 0

    @property
    def evicted_blocks(self) -> int:
        return self.cache.pool.evicted_blocks if self.cache else 0

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``. Blocks of KV groups with a hash, in tables or not."""
        if self.cache is None:
            return super().cached_block_ids()
        return self.cache.pool.hashed_ids()

    # --- Blocks of all groups ---

    def pages(self, blocks: int, skipped: Values[int], before: int = 0) -> int:
        """Blocks of all growing groups if a full group has ``blocks``, of the smallest size, more than ``before``, and one group of each
        other kind has released ``skipped`` of them."""
        pages = 0
        for groups in self.sizes:
            pages += groups.number * groups.more(blocks, before)
        for kind, back in zip(self.giving, skipped, strict=True):
            pages -= kind.number * back
        return pages

    def pages_for(self, tokens: int) -> int:
        """Blocks of all groups that a sequence with ``tokens`` needs for its next token; the host pool has room for these."""
        blocks = -(-tokens // self.unit_tokens)
        if self.is_plain:
            return blocks
        return self.pages(blocks, [kind.of(tokens) for kind in self.giving]) + self.fixed

    def pages_of(self, tokens: int) -> int:
        """Blocks of all growing groups for ``tokens``, if windows have released none."""
        blocks = -(-tokens // self.unit_tokens)
        return blocks if self.is_plain else self.pages(blocks, self._nothing.skipped)

    def wanted_blocks(self, tokens: int) -> int:
        """Blocks of all groups that the admission of a prompt of ``tokens`` asks for."""
        if self.is_plain:
            return -(-tokens // self.block_size)
        wanted = 0
        for each in self.classes:
            wanted += each.number * each.wanted_blocks(tokens)
        return wanted

    def blocks_beside(self, known_tokens: int, tokens: int) -> int:
        """As ``wanted_blocks``, of a sequence that comes with ``known_tokens``: without what its windows have passed of them."""
        wanted = 0
        for each in self.classes:
            own = each.wanted_blocks(tokens)
            if known_tokens and each.kind == SLIDING:
                own = -(-tokens // each.block_size) - skipped_blocks(known_tokens, each.window_tokens, each.block_size)
            wanted += each.number * own
        return wanted

    def skipped_in_prefill(self, sequence: Sequence, holding: Partial, computed: int, tokens: int) -> list[int]:
        """Blocks that each kind releases in a step that computes a prompt from ``computed`` up to ``tokens`` tokens.

        Args:
            holding: What the sequence held before the step.
        """
        kinds = zip(self.giving, holding.skipped, strict=True)
        known, end = holding.known_tokens, sequence.prefill_end
        return [kind.in_chunk(known, computed, tokens, end) - back for kind, back in kinds]

    def pass_in_vain(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``; of a sequence that decodes it is counted once it stalls."""
        held = self.partial.get(sequence)
        if held is None:
            self._passing_in_vain = sequence
            return
        more = self.skipped_in_prefill(sequence, held, held.computed_tokens, held.computed_tokens + tokens)
        self._hold(0, more)
        self.partial[sequence] = held._replace(skipped=tuple(map(add, held.skipped, more)))

    def skipped_by(self, sequence: Sequence, decode_step: int) -> list[int]:
        """Blocks that a decoding sequence has released before ``decode_step``, for each kind."""
        return [kind.so_far(sequence, decode_step) for kind in self.giving]

    def _hold(self, blocks: int, skipped: Values[int], before: int = 0) -> None:
        """Hold ``blocks`` more than ``before`` of a sequence in a full group; a group of each other kind releases ``skipped`` more."""
        if self.is_plain:
            self.free -= blocks
            return
        for groups in self.sizes:
            groups.blocks += groups.more(blocks, before)
        for kind, back in zip(self.giving, skipped, strict=True):
            kind.released += back
        self.free -= self.pages(blocks, skipped, before)

    def _count_shared(self) -> None:
        """Update ``free`` for shared blocks: a block in several tables counts once."""
        if self.cache:
            shared = sum(self.cache.shared)
            self.free += shared - self._shared
            self._shared = shared

    def _settle_cache(self, moment: int | None = None) -> None:
        """Count what tables share and the cache keeps, from ``moment`` on; None is the current one."""
        if self.cache:
            self._count_shared()
            if moment is not None:
                self.cache.moment = moment
            self.cache.settle()

    # --- What policies ask; a memory of another kind has more to say ---

    def needed_blocks(self, members: Iterable[Sequence], tokens: int = 0) -> int:
        """Blocks that sequences which come together take for all but their last ``tokens`` known tokens."""
        return sum(self.pages_for(member.start_tokens - tokens) for member in members)

    def held_blocks(self, sequence: Sequence, decode_step: int) -> int:
        """Blocks that come free if a sequence, and all that share with it, give way before ``decode_step``."""
        partial = self.partial.get(sequence)
        if partial is not None:
            return partial.blocks if self.is_plain else self.pages(partial.blocks, partial.skipped) + self.fixed
        blocks = -(-sequence.held_tokens(decode_step) // self.unit_tokens)
        if self.is_plain:
            return blocks
        return self.pages(blocks, self.skipped_by(sequence, decode_step)) + self.fixed

    def look_up(self, sequence: Sequence, decode_step: int) -> None:
        """Set ``computed_tokens`` of a waiting sequence, where what is found for it may change while it waits."""

    def may_grow(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether what is found for a waiting sequence may be more in a later step."""
        return False

    def promise(self, sequence: Sequence) -> None:
        """The sequence is admitted in this step: what was looked up for it stays until then."""

    def reserve_decodes(self, need: int) -> None:
        """The running sequences take ``need`` blocks in the coming step: make them free, if a cache has them."""

    def may_admit(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a sequence that lacked blocks may find them, or more of its prefix, before a sequence leaves."""
        return True

    def steps_before_admission(self, state: State, steps: int) -> int:
        """Steps before the running sequences cache a block that the head of the queue lacks, at most ``steps``."""
        return steps

    def steps_settled(self, decode_step: int, limit: int) -> int:
        """Steps from ``decode_step`` on, at most ``limit``, in which ``cached_blocks`` changes in the first one at the most."""
        return limit

    def begin(self, sequence: Sequence, known_tokens: int) -> None:
        """Count the blocks of ``known_tokens``, which a waiting sequence has found, or comes with."""
        if known_tokens:
            blocks = -(-known_tokens // self.unit_tokens)
            nothing = self._nothing._replace(known_tokens=known_tokens)
            skipped = self.skipped_in_prefill(sequence, nothing, known_tokens, known_tokens)
            self._hold(blocks, skipped)
            self.free -= self.fixed
            self.partial[sequence] = Partial(blocks, tuple(skipped), known_tokens, known_tokens)

    def swapped_blocks(self, sequences: tuple[Sequence, ...]) -> int:
        """Blocks that move when these are swapped out, or in: all but that of the token that comes next."""
        return self.needed_blocks(sequences, 1)

    # --- Steps to come ---

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """Steps from the coming one on in which every sequence finds its blocks in any order of taking, with ``blocks``
        free before them: exact up to ``limit`` for one group, else and beyond it perhaps fewer than the truth."""
        size = self.block_size
        if self.is_plain:
            # Whatever their phases, they take no more than a block each in so many steps.
            safe = blocks // state.batch_size * size
            if safe >= limit:
                return safe
            enough = self.phases.total(state.decode_step, limit) <= blocks
            return limit if enough else self.phases.steps_within(state.decode_step, blocks)
        if self.cache:
            if self.cache.shares_in_windows():
                # A window that passes a shared block does not free it.
                return 1
            # The tables may have passed some in the coming step already, which ``free`` does not know.
            blocks += min(0, sum(self.cache.shared) - self._shared)
        alike = min((kind.steps_alike(state.decode_step) for kind in self.giving), default=limit)
        # In ``safe`` steps the sequences take at most ``blocks`` blocks, even if none is released.
        size = min(groups.size for groups in self.sizes)
        safe = blocks // (self.growing * state.batch_size) * size if self.growing else limit
        return min(alike, safe if safe >= limit else self._steps_within_cycles(state.decode_step, blocks, limit))

    def _steps_within_cycles(self, decode_step: int, blocks: int, limit: int) -> int:
        """As ``steps_with``, while all cycles of ``block_size`` steps are equal."""
        takes, backs = self._cycle(decode_step)
        # Blocks held more than now: before each step and after the last one, and in each step before it gives some back.
        before = list(accumulate(map(sub, takes, backs), initial=0))
        within = list(map(add, before, takes))
        # Increase of held blocks per cycle: blocks of full groups, and of windows that are not yet full.
        drift, peak = before[-1], max(0, max(within))
        if peak <= blocks and not drift:
            return limit
        cycles = (blocks - peak) // drift + 1 if peak <= blocks else 0
        left = blocks - cycles * drift
        steps = next((step for step, level in enumerate(within) if level > left), self.block_size)
        return cycles * self.block_size + steps

    def step_that_frees(self, decode_step: int, blocks: int) -> int | None:
        """Number, from 1, of the first step from ``decode_step`` on after which ``blocks`` are free because running
        sequences gave some back.

        None if the first cycle has no such step. Later equal cycles have none either, as a cycle never releases more
        blocks than it takes.
        """
        if not self.giving:
            return None
        free = self.free
        for number, (take, back) in enumerate(zip(*self._cycle(decode_step), strict=True), 1):
            free += back - take
            if free >= blocks:
                return number
        return None

    def _cycle(self, decode_step: int) -> tuple[list[int], list[int]]:
        """Blocks taken, and blocks released, in each of the ``block_size`` steps from ``decode_step`` on."""
        # Blocks of a model with states have a thousand tokens, and a leap of it asks for such a cycle: no loop of Python.
        steps, first, *others = self.block_size, *self.sizes
        takes = list(map(mul, repeat(first.number), _repeated(first.phases.cycle(decode_step), steps)))
        for groups in others:
            takes = list(
                map(add, takes, map(mul, repeat(groups.number), _repeated(groups.phases.cycle(decode_step), steps)))
            )
        backs = [0] * steps
        for kind in self.giving:
            backs = list(map(add, backs, map(mul, repeat(kind.number), _repeated(kind.cycle(decode_step), steps))))
        return takes, backs

    def room_after(self, state: State, steps: int) -> int:
        """Free slots after ``steps`` more decode steps of the running sequences. Changes nothing."""
        if self.is_plain:
            taken = self.phases.total(state.decode_step, steps)
        else:
            # Within a leap all cycles of ``block_size`` steps are equal.
            cycles, rest = divmod(steps, self.block_size)
            exchanges = list(map(sub, *self._cycle(state.decode_step)))
            taken = cycles * sum(exchanges) + sum(exchanges[:rest])
        return (self.free - taken) * self.block_size


def _repeated(cycle: list[int], steps: int) -> list[int]:
    """A cycle as often as it fits into so many steps."""
    return cycle if len(cycle) == steps else cycle * (steps // len(cycle))
