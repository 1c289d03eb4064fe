"""Bugs planted on purpose, one or two an allocator: random operations find each of them."""

from __future__ import annotations

from collections import OrderedDict
from unittest import mock

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from fragmeter.sim.memory import (
    BatchMemory,
    BlockPool,
    BuddyArena,
    ContiguousMemory,
    DeferredMemory,
    DialogueContiguousMemory,
    DialogueMemory,
    HostRadixMemory,
    PagedMemory,
    RadixMemory,
    ReservedMemory,
    SharingMemory,
    SlotRadixMemory,
)
from fragmeter.sim.memory.accounting.kv_groups import STATE
from fragmeter.sim.memory.contiguous.arena import BestFitArena, FirstFitArena
from fragmeter.sim.memory.contiguous.contiguous import ContiguousTransaction
from fragmeter.sim.memory.contiguous.dialogue_copies import DialogueTransaction
from fragmeter.sim.memory.paged.cells import CellTransaction
from fragmeter.sim.memory.paged.counts import BlockCounts, Partial
from fragmeter.sim.memory.paged.deferred import Regions
from fragmeter.sim.memory.paged.dialogue import Start
from fragmeter.sim.memory.paged.group_cache import GroupCache
from fragmeter.sim.memory.paged.group_tables import GroupTables
from fragmeter.sim.memory.paged.radix_slots import SlotTree
from fragmeter.sim.memory.paged.skipped import SkippedBlocks
from fragmeter.sim.memory.paged.streams import StreamMemory
from fragmeter.sim.memory.prefix import FreeKVCacheBlockQueue, HostTree, RadixTree, StateTree, WindowTree
from fragmeter.sim.memory.prefix.block_tables import BlockTables
from fragmeter.sim.memory.prefix.component_tree import ComponentTree
from fragmeter.sim.policy import vllm_v1
from fragmeter.sim.types.errors import SimulationFault
from machines import MACHINES, POLICY_MACHINES

EVERY = MACHINES | POLICY_MACHINES
admit = PagedMemory.admit
begins, make_free = DialogueMemory._start, DialogueMemory._make_free
free_blocks, drop_references = BlockPool.free_blocks, BlockPool._drop_references
remove_n = FreeKVCacheBlockQueue.remove_n
skip, swap_out, give_back, drop_partial = (
    GroupTables.skip,
    GroupTables.swap_out,
    GroupTables.give_back,
    PagedMemory._drop,
)
defer = PagedMemory._defer
split, drop, insert = RadixTree._split, GroupTables.drop, RadixMemory._insert
count_stream = StreamMemory._count
grow_until = BlockTables.grow_until


def frees_what_two_more_tables_name(pool: BlockPool, blocks: list[int]) -> list[int]:
    freed = drop_references(pool, blocks)
    left = [block for block in blocks if pool.ref_cnt[block] == 1]
    return [*freed, *(drop_references(pool, left) if left else [])]


def frees_the_beginning_first(pool: BlockPool, table: list[int]) -> None:
    free_blocks(pool, table[::-1])


def forgets_copies(pool: BlockPool, name: int, block: int) -> bool:
    """Of several blocks with a hash only the first is ever found."""
    copies = pool._copies.pop(name, None)
    return copies is not None and pool._cached_block_hash_to_block[name] != block


def keeps_the_hash_of_a_block_that_is_taken(pool: BlockPool, blocks, moments) -> None:
    pass


def unlinks_the_first_of_a_run(queue: FreeKVCacheBlockQueue, blocks: list[int]) -> None:
    remove_n(queue, blocks[:1])
    queue.num_free_blocks -= len(blocks) - len(blocks[:1])


def keeps_the_pieces_of_siblings(memory: ContiguousMemory, group, decode_step: int) -> None:
    memory._beams.pop(group, None)


def leaves_the_state_at_the_cut(tree: StateTree, node, tokens: int):
    upper = ComponentTree._split(tree, node, tokens)
    if node.component and not node.component_locks:
        tree._bury(node)
        tree._publish(upper)
    return upper


def splits_without_the_locks(tree: RadixTree, *split_at):
    upper = split(tree, *split_at)
    upper.locks = 0
    return upper


def does_not_merge(arena: BuddyArena, start: int, blocks: int) -> None:
    arena.free_lists[blocks][start] = None


def takes_the_last_run(arena: FirstFitArena, blocks: int) -> int | None:
    return max((place for place, length in enumerate(arena.lengths) if length >= blocks), default=None)


def grows_table_by_table(tables: BlockTables, decode_step: int) -> None:
    steps = range(tables._grown_until, decode_step)
    for sequence, table in tables.tables.items():
        table += tables.pool.get_new_blocks(
            sum(sequence in tables._members[step % tables._block_size] for step in steps)
        )
    tables._grown_until = max(decode_step, tables._grown_until)


def stalls_in_the_count_only(memory: PagedMemory, sequence, decode_step: int, finished: bool = False) -> None:
    held = sequence.held_tokens(decode_step)
    memory.partial[sequence] = Partial(-(-held // memory.block_size), (), held, held)


def takes_the_blocks_of_its_prefill_twice(memory: PagedMemory, sequence, *step_and_past) -> None:
    memory.partial.pop(sequence, None)
    admit(memory, sequence, *step_and_past)


def unmaps_first_pages_first(regions: Regions, count: int) -> list[int]:
    pages = []
    while len(pages) < count:
        pages.append((regions.deferred or list(regions.spare.values()))[0].pop(0))
        regions.deferred = [region for region in regions.deferred if region]
        regions.spare = {sequence: spare for sequence, spare in regions.spare.items() if spare}
    regions.cached -= len(pages)
    return pages


def settles_at_once(memory: DeferredMemory, decode_step: int, limit: int) -> int:
    return limit


def sees_no_window_fill(skipped: SkippedBlocks, decode_step: int) -> int:
    return 1 << 40


def counts_all_that_left(skipped: SkippedBlocks, sequence, decode_step: int) -> int:
    blocks = skipped.so_far(sequence, decode_step)
    skipped.prompts.pop(sequence, None)
    return blocks


def gives_its_first_pages_back_first(tables: GroupTables, sequence) -> None:
    tables.tables[sequence] = tuple(table[::-1] for table in tables.tables[sequence])
    drop(tables, sequence)


def finds_any_block_of_a_window(cache: GroupCache, cached, seeker, names: list[int], most: int, drops: bool) -> int:
    return next((place + 1 for place in reversed(range(most)) if cache._has(cached, seeker, names[place])), 0)


def forgets_other_tables(cache: GroupCache, blocks: list[int], group: int) -> None:
    pass


def gives_the_last_state_back(tables: GroupTables, sequence, known: int) -> None:
    skip(tables, sequence, known + tables._size)


def keeps_every_state(tables: GroupTables, blocks: list[int], group: int) -> None:
    if tables._groups.kinds[group] != STATE:
        give_back(tables, blocks, group)


def swaps_what_windows_have_passed(memory: PagedMemory, tokens: int) -> int:
    return memory.growing * -(-tokens // memory.block_size)


def leaves_its_window_behind(tables: GroupTables, sequence, computed: int) -> None:
    swap_out(tables, sequence, computed + tables._size)


def keeps_the_state_of_a_victim(memory: PagedMemory, sequence, decode_step: int) -> None:
    drop_partial(memory, sequence, decode_step)
    memory.free -= memory.fixed


def never_copies(tables: BlockTables, decode_step: int) -> None:
    tables._copiers.clear()
    grow_until(tables, decode_step)


def evicts_a_page_too_many(memory: RadixMemory, pages: int) -> None:
    if memory.free < pages:
        memory.free += memory.tree.evict(pages - memory.free + 1)


def frees_all_that_it_inserts(memory: RadixMemory, sequence, tokens: int):
    free, held = memory.free, memory.holdings[sequence].pages
    node = insert(memory, sequence, tokens)
    memory.free = free + tokens // memory.block_size - held
    return node


def keeps_its_own_slots(memory: SlotRadixMemory, sequence, tokens: int):
    node, table = RadixMemory._insert(memory, sequence, tokens), memory.tables.tables[sequence]
    memory.tree.slots.setdefault(node, table[tokens - node.tokens : tokens])
    return node


def names_a_half_full_block(memory: DialogueMemory, sequence) -> Start:
    start = begins(memory, sequence)
    return start if start.copied is None else Start([*start.shared, start.copied], None, start.parent)


def gives_up_what_was_used_last(memory: DialogueMemory, blocks: int) -> None:
    memory.kept = OrderedDict(reversed(memory.kept.items()))
    make_free(memory, blocks)
    memory.kept = OrderedDict(reversed(memory.kept.items()))


def takes_no_room(transaction: ContiguousTransaction, tokens: int) -> None:
    slots = transaction.memory.slots_of(tokens)
    transaction.places.append((tokens, slots, transaction.memory.take_place(slots)))


def keeps_the_pieces_of_a_trial(transaction: ContiguousTransaction, slots: int, pieces: int) -> bool:
    memory = transaction.memory
    return all(memory.has_place(slots) and memory.take_place(slots) is not None for _ in range(pieces))


def spares_none(memory: DialogueContiguousMemory, spared: int = -1) -> list[int]:
    return [parent for parent in memory.kept if parent not in memory._promised]


def takes_whatever_piece_there_is(transaction: DialogueTransaction, sequence, tokens: int):
    return transaction.memory.piece_to_take(sequence)


def keeps_the_longest_run(memory: ContiguousMemory, grant) -> None:
    if memory.arena:
        memory.arena.free(grant.start, grant.slots // memory.block_size)


def counts_the_stream_of_a_prefill_twice(memory: StreamMemory, sequence, sign: int) -> None:
    if sign > 0:
        count_stream(memory, sequence, sign)


def begins_beside_what_the_slot_kept(transaction: CellTransaction, sequence, slot: int, found: int) -> None:
    transaction.memory.slots[sequence] = slot


def strands_nothing(memory: ContiguousMemory, blocked_blocks: int) -> int:
    return 0


def frees_at_once(memory: PagedMemory, sequence) -> None:
    defer(memory, sequence)
    memory._process(memory.fences.scheduled)


def passes_nothing(memory: BlockCounts, sequence, tokens: int) -> None:
    pass


def spares_no_step_in_flight(*given) -> bool:
    return False


PLANTED = [
    ("BlockPool", BlockPool, "_drop_references", frees_what_two_more_tables_name),
    ("BlockPool, hashes", BlockPool, "free_blocks", frees_the_beginning_first),
    ("BlockPool, hashes", BlockPool, "_drop_copy", forgets_copies),
    ("BlockPool, hashes", FreeKVCacheBlockQueue, "remove_n", unlinks_the_first_of_a_run),
    ("RadixTree", RadixTree, "_split", splits_without_the_locks),
    ("WindowTree", WindowTree, "_split", RadixTree._split),
    ("StateTree", StateTree, "_split", leaves_the_state_at_the_cut),
    ("BuddyArena", BuddyArena, "free", does_not_merge),
    ("FirstFitArena", FirstFitArena, "choose", takes_the_last_run),
    ("BestFitArena", BestFitArena, "choose", FirstFitArena.choose),
    ("PagedMemory", BlockTables, "grow_until", grows_table_by_table),
    ("PagedMemory", PagedMemory, "swap_in", PagedMemory.admit),
    ("PagedMemory, chunked prefills", PagedMemory, "admit", takes_the_blocks_of_its_prefill_twice),
    ("PagedMemory, chunked prefills", PagedMemory, "stall", stalls_in_the_count_only),
    ("DeferredMemory", Regions, "unmap", unmaps_first_pages_first),
    ("DeferredMemory", DeferredMemory, "steps_settled", settles_at_once),
    ("PagedMemory, KV groups", SkippedBlocks, "steps_alike", sees_no_window_fill),
    ("PagedMemory, KV groups", SkippedBlocks, "leave", counts_all_that_left),
    ("PagedMemory, KV groups", GroupTables, "drop", gives_its_first_pages_back_first),
    (
        "vllm-v1: CachedMemory, steps ahead",
        BlockPool,
        "_maybe_evict_cached_blocks",
        keeps_the_hash_of_a_block_that_is_taken,
    ),
    ("vllm-v1: CachedMemory", FreeKVCacheBlockQueue, "remove_n", unlinks_the_first_of_a_run),
    ("vllm-v1: CachedMemory, freed blocks last", FreeKVCacheBlockQueue, "remove_n", unlinks_the_first_of_a_run),
    ("vllm-v1: PagedMemory, windows, prompts in turn", SkippedBlocks, "leave", counts_all_that_left),
    (
        "vllm-v1: PagedMemory, prefix cache, prompts in turn",
        BlockPool,
        "_maybe_evict_cached_blocks",
        keeps_the_hash_of_a_block_that_is_taken,
    ),
    ("vllm-v1: PagedMemory, windows, steps ahead", SkippedBlocks, "leave", counts_all_that_left),
    (
        "vllm-v1: PagedMemory, windows, prefix cache, steps ahead",
        GroupCache,
        "_end_in_windows",
        finds_any_block_of_a_window,
    ),
    ("vllm-v1: PagedMemory, windows, prefix cache, steps ahead", GroupCache, "leave", forgets_other_tables),
    (
        "vllm-v1: PagedMemory, windows, prefix cache",
        GroupCache,
        "_end_in_windows",
        finds_any_block_of_a_window,
    ),
    ("vllm-v1: PagedMemory, states, prefix cache", GroupTables, "skip", gives_the_last_state_back),
    ("vllm-v1: PagedMemory, states, steps ahead", PagedMemory, "_drop", keeps_the_state_of_a_victim),
    (
        "vllm-v1: PagedMemory, states, prefix cache, steps ahead",
        BlockPool,
        "_maybe_evict_cached_blocks",
        keeps_the_hash_of_a_block_that_is_taken,
    ),
    ("vllm-v1: PagedMemory, states, prefix cache, steps ahead", GroupTables, "skip", gives_the_last_state_back),
    ("vllm-v1: PagedMemory, windows, states, prefix cache, steps ahead", GroupTables, "give_back", keeps_every_state),
    ("vllm-v1: PagedMemory, steps ahead, blocks deferred", PagedMemory, "_defer", frees_at_once),
    ("vllm-v1: PagedMemory, windows, steps ahead, blocks deferred", vllm_v1, "_in_flight", spares_no_step_in_flight),
    ("vllm-v1: PagedMemory, windows, steps ahead, blocks deferred", BlockCounts, "pass_in_vain", passes_nothing),
    ("vllm-sosp23: PagedMemory, windows, host pool", PagedMemory, "pages_for", swaps_what_windows_have_passed),
    ("vllm-v0: PagedMemory, windows, host pool", GroupTables, "swap_out", leaves_its_window_behind),
    ("SharingMemory", BlockTables, "grow_until", never_copies),
    ("SharingMemory", SharingMemory, "swap_in", PagedMemory.swap_in),
    ("RadixMemory", RadixMemory, "make_free", evicts_a_page_too_many),
    ("RadixMemory", RadixMemory, "_insert", frees_all_that_it_inserts),
    ("SlotRadixMemory", SlotRadixMemory, "_insert", keeps_its_own_slots),
    ("SlotRadixMemory", SlotTree, "_split", RadixTree._split),
    ("HostTree", HostTree, "_remove", RadixTree._remove),
    ("HostTree", HostTree, "_split", RadixTree._split),
    ("HostRadixMemory", HostRadixMemory, "_insert", RadixMemory._insert),
    ("DialogueMemory", DialogueMemory, "_start", names_a_half_full_block),
    ("DialogueMemory", DialogueMemory, "_make_free", gives_up_what_was_used_last),
    ("ContiguousMemory, groups", ContiguousMemory, "_disband", keeps_the_pieces_of_siblings),
    ("ContiguousMemory, groups", ContiguousTransaction, "_all_have_places", keeps_the_pieces_of_a_trial),
    ("DialogueContiguousMemory", DialogueContiguousMemory, "unpromised", spares_none),
    ("DialogueContiguousMemory", DialogueTransaction, "_piece", takes_whatever_piece_there_is),
    ("ContiguousMemory", ContiguousTransaction, "reserve", takes_no_room),
    ("ReservedMemory", ReservedMemory, "slots_of", ContiguousMemory.slots_of),
    ("ContiguousMemory", ContiguousMemory, "stranded_slots", strands_nothing),
    ("ContiguousMemory", ContiguousMemory, "give_place", keeps_the_longest_run),
    ("BatchMemory", BatchMemory, "release", ContiguousMemory.release),
    ("llama-cpp: StreamMemory", StreamMemory, "_count", counts_the_stream_of_a_prefill_twice),
    ("llama-cpp: CellMemory", CellTransaction, "begin", begins_beside_what_the_slot_kept),
]


def test_every_machine_has_a_bug_to_find():
    """Of policies every memory and every part in some composition of it."""
    planted = {allocator for allocator, *_ in PLANTED}
    assert planted <= (EVERY.keys())
    assert planted >= MACHINES.keys() - {"CachedMemory"}
    found, wanted = (
        {part for label in labels for part in label.partition(": ")[2].split(", ")} for labels in (planted, EVERY)
    )
    assert found >= wanted - MACHINES.keys()


#: `make test` plants every fifth bug, and `make test-all` each of them.
OFTEN = PLANTED[::5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allocator", "owner", "method", "broken"),
    [
        pytest.param(*bug, id=f"{bug[0]}-{bug[3].__qualname__}", marks=[] if bug in OFTEN else [pytest.mark.slow])
        for bug in PLANTED
    ],
)
def test_random_operations_find(allocator, owner, method, broken):
    few = hypothesis.settings.get_profile("machines")
    # The smallest example is of no interest. Mostly far fewer will do; but hypothesis draws constants of the modules
    # that are loaded, so that which example finds it changes with them.
    quick = hypothesis.settings(
        few, max_examples=20_000, phases=[hypothesis.Phase.generate], report_multiple_bugs=False
    )
    with mock.patch.object(owner, method, broken), pytest.raises((AssertionError, SimulationFault, KeyError)):
        run_state_machine_as_test(EVERY[allocator], settings=quick)
