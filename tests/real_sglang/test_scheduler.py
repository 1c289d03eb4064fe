"""Policy ``sglang`` beside the scheduler, allocator and radix cache of the installed SGLang, step by step.

What is compared is ``steps.Step``: prefill or decode, the tokens of each request, retractions, free and evictable slots;
and when each request finishes. Whatever differs is shrunk, and named by the first step in which it does.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from itertools import islice

import numpy as np
import pytest

from fragmeter.sim import Workload
from fragmeter.sim.memory import HostRadixMemory, RadixMemory
from fragmeter.sim.memory.paged import radix_host, radix_transaction
from fragmeter.sim.memory.paged.radix_holdings import States
from fragmeter.sim.memory.paged.radix_host import HiCache, HostRadixTransaction
from fragmeter.sim.memory.paged.radix_transaction import RadixTransaction
from fragmeter.sim.memory.prefix import HostComponents, HostTree, HostWindowTree, StateTree, WindowTree
from fragmeter.sim.policy.sglang import SGLang
from fragmeter.sim.policy.sglang_prefill import PrefillBatch
from fragmeter.sim.spec.startup.sglang_unified import SharedBuffer
from fragmeter.sim.types.errors import SettingError, SimulationFault
from fragmeter.sim.types.sequence import LayeredLoad
from fragmeter.sim.types.state import State
from fragmeter.sim.workload.content import PromptContent

from . import ours, server
from .record import real, recorded
from .steps import Served, first_difference
from .workloads import KINDS, Case, or_nothing, shrunk

#: Workloads of a kind, in step and with the overlap schedule, and of one test.
_SEEDS, _SEEDS_A_TEST = {False: 200, True: 50}, 10
_BATCHES = [
    (kind, overlaps, first)
    for kind in KINDS
    for overlaps, seeds in _SEEDS.items()
    for first in range(0, seeds, _SEEDS_A_TEST)
]


remove = HostTree._remove


def _difference(case: Case) -> object:
    return first_difference(*_both(case))


def _both(case: Case) -> tuple[Served, Served]:
    """What the real scheduler and ours do."""
    return or_nothing(server.serve, case, AssertionError, RuntimeError), or_nothing(ours.serve, case, SettingError)


def test_the_release_is_the_one_that_sglang_follows():
    """And of what is taken out of its scheduler's file no line has changed."""
    assert version("sglang") == "0.5.23"
    assert server.decisions_digest() == "0d4a2545835b65b2"


@pytest.mark.parametrize("kind, overlaps, first", _BATCHES)
def test_every_step_is_that_of_the_real_scheduler(kind: str, overlaps: bool, first: int, record_property):
    differing, steps = {}, 0
    for seed in range(first, first + _SEEDS_A_TEST):
        case = replace(KINDS[kind](seed), overlaps=overlaps)
        served, mine = _both(case)
        steps += len(served.steps)
        if first_difference(served, mine):
            small = shrunk(case, lambda each: _difference(each) is not None)
            differing[case.name] = f"{_difference(small)}, of {len(small.workload)} requests"
    record_property(f"sglang/{kind}{', overlap' * overlaps}", [_SEEDS_A_TEST, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


def test_the_recorded_logs_are_those_of_this_release():
    assert real() == recorded()


def _case(prompts: list[int], outputs: list[int], arrivals: list[int], slots: int, seqs: int, ignores: bool) -> Case:
    lengths = np.array(outputs)
    work = Workload(
        "story",
        np.array(arrivals),
        np.array(prompts),
        lengths,
        max_tokens=lengths,
        ignore_eos=np.full(len(prompts), int(ignores)),
    )
    return Case("story", work, slots, seqs, 8192)


def _first_steps(case: Case) -> list[int]:
    """Step, from 1, of the first token of each request."""
    first: dict[int, int] = {}
    for number, step in enumerate(server.serve(case).steps, 1):
        for request, _ in step.scheduled:
            first.setdefault(request, number)
    return [first[request] for request in sorted(first)]


@pytest.mark.parametrize("ignores, second", [(True, 401), (False, 2)])
def test_a_story_of_outputs_that_are_reserved(ignores, second):
    """900 slots, prompts of 100 and outputs of 400: beside the first the second fits only where a share is reserved."""
    case = _case([100, 100], [400, 400], [0, 50], 900, 64, ignores)
    assert _first_steps(case) == [1, second]
    assert _difference(case) is None


def test_a_story_of_a_full_batch():
    """Two seats; the third follows in the step after the first one has finished."""
    case = _case([10, 10, 10], [3, 20, 5], [0, 0, 0], 1000, 2, False)
    assert _first_steps(case) == [1, 1, 4]
    assert _difference(case) is None


def test_a_story_of_a_token_in_vain():
    """Ends by text, which the decision of the next step does not know: it decodes once more. An end by length is known."""
    short, long = np.array([4, 4]), np.array([9, 4])
    work = Workload(
        "story", np.array([0, 0]), np.array([10, 10]), short, max_tokens=long, ignore_eos=np.zeros(2, dtype=np.int64)
    )
    case = Case("story", work, 1000, 64, 8192, overlaps=True)
    steps = server.serve(case).steps
    assert [[request for request, _ in step.scheduled] for step in steps] == [[0, 1]] * 4 + [[0]]
    assert _difference(case) is None


def test_a_story_of_a_request_that_waits_for_ever():
    """It lacks 350 tokens, the pool of windows has 460 slots, and the prefix of 200 that it finds locks 127 of them: SGLang asks for
    all of its chunk, as the empty pool would hold it."""
    content = PromptContent(np.array([0, 1, 2]), np.array([5, 5]), np.array([200, 200]))
    case = _case([200, 550], [1, 1], [0, 1000], 2000, 64, False)
    case = replace(case, workload=replace(case.workload, content=content), window=127, window_slots=460)
    assert server.serve(case).is_stuck
    assert _difference(case) is None
    assert not server.serve(replace(case, max_num_batched_tokens=300)).is_stuck


def test_a_story_of_a_prompt_whose_rest_is_forgotten():
    """A fault of SGLang, which is left out: where windows cut two prompts of a step, ``new_chunked_req`` (``_commit_prefill_admission``) is the
    second, and the first decodes without its rest."""
    case = replace(_case([1000, 1000], [100, 1], [0, 0], 4000, 64, False), window=127, window_slots=680)

    def prefilled(served: Served) -> list[int]:
        computed = [each for step in served.steps if step.prefills for each in step.scheduled]
        return [sum(tokens for request, tokens in computed if request == index) for index in range(2)]

    assert prefilled(server.serve(case)) == [579, 1000]
    assert prefilled(ours.serve(case)) == [1000, 1000]


def _is_noticed(kind: str, overlaps: bool = False) -> bool:
    """Whether three of forty workloads differ, or fail."""

    def differs(seed: int) -> bool:
        case = replace(KINDS[kind](seed), overlaps=overlaps)
        try:
            return _difference(case) is not None
        except (SimulationFault, AssertionError):
            return True

    differing = filter(differs, range(40))
    return len(list(islice(differing, 3))) == 3


def test_a_share_of_outputs_that_ignore_the_end_of_text_is_noticed(monkeypatch):
    """As in 0.5.9, which reserved the same share of every output."""
    to_reserve = PrefillBatch._to_reserve

    def alike(batch, sequence):
        ignores, sequence.ignores_eos = sequence.ignores_eos, False
        found = to_reserve(batch, sequence)
        sequence.ignores_eos = ignores
        return found

    monkeypatch.setattr(PrefillBatch, "_to_reserve", alike)
    assert _is_noticed("ignore_eos")


def test_an_admission_without_its_page_is_noticed(monkeypatch):
    """As in 0.5.9."""
    compute, room = PrefillBatch._compute, PrefillBatch._room

    def without(batch, *args):
        compute(batch, *args)
        batch._taken -= batch._page
        batch._taken_now -= batch._page

    monkeypatch.setattr(PrefillBatch, "_compute", without)
    monkeypatch.setattr(PrefillBatch, "_room", property(lambda batch: room.fget(batch) + batch._page))
    assert _is_noticed("ignore_eos")


def test_a_decode_that_asks_for_no_more_pages_than_it_takes_is_noticed(monkeypatch):
    """SGLang evicts for a page of each sequence, also in steps in which few begin one."""
    take = RadixMemory._take
    monkeypatch.setattr(RadixMemory, "_take", lambda memory, pages, asked: take(memory, pages, min(asked, pages)))
    assert _is_noticed("pages")


def test_a_preemption_within_the_threshold_is_noticed(monkeypatch):
    preempt_for, urgency = SGLang._preempt_for, SGLang._urgency

    def twice_as_far(policy, sequence, batch):
        with monkeypatch.context() as patched:
            patched.setattr(SGLang, "_urgency", lambda policy, sequence: 2 * urgency(policy, sequence))
            return preempt_for(policy, sequence, batch)

    monkeypatch.setattr(SGLang, "_preempt_for", twice_as_far)
    assert _is_noticed("priorities")


def test_a_preemption_of_the_first_to_join_is_noticed(monkeypatch):
    def join(policy, sequences):
        for sequence in sequences:
            policy._joined[sequence] = -policy._joins
            policy._joins += 1

    monkeypatch.setattr(SGLang, "_join", join)
    assert _is_noticed("priorities")


def test_a_full_batch_that_is_looked_at_a_step_late_is_noticed(monkeypatch):
    """As in 0.5.9, where a finished sequence left the batch at the next decode."""
    schedule = SGLang.schedule

    def late(policy, state, transaction):
        full, seen = policy._full_at, policy.__dict__.setdefault("seen", [0])
        if full is not None and full != transaction.departures and seen[0] != transaction.departures:
            seen[0] = transaction.departures
            transaction.memory.departures, kept = full, transaction.memory.departures
            plan = schedule(policy, state, transaction)
            transaction.memory.departures = kept
            return plan._replace(valid_until_horizon=False)
        return schedule(policy, state, transaction)

    monkeypatch.setattr(SGLang, "schedule", late)
    assert _is_noticed("fcfs")


def test_evictions_of_all_that_is_asked_for_are_noticed(monkeypatch):
    """As in 0.5.9, which did not count what was free already."""

    def make_free(memory, pages, *_):
        if memory.free < pages:
            freed = memory.tree.evict(pages)
            memory.free += freed
            memory.evicted_blocks += freed

    monkeypatch.setattr(RadixMemory, "make_free", make_free)
    assert _is_noticed("fcfs")


def test_a_spent_chunk_that_looks_at_one_more_is_noticed(monkeypatch):
    """As in 0.5.9, where the first candidate was looked up, and could find the batch full, in any case."""
    add, is_spent = PrefillBatch.add, PrefillBatch.is_spent

    def look(batch, sequence):
        if not is_spent.fget(batch):
            return add(batch, sequence)
        own = sequence.start_tokens - batch._transaction.look_up(sequence)
        batch.is_full = own + sequence.max_tokens - sequence.generated_tokens >= batch._room
        return False

    monkeypatch.setattr(PrefillBatch, "add", look)
    monkeypatch.setattr(PrefillBatch, "is_spent", False)
    assert _is_noticed("chunks")


def test_results_that_are_processed_at_once_are_noticed(monkeypatch):
    """Of a step that runs while the next one is decided the tree has nothing yet."""
    end = RadixMemory._end_prefills

    def at_once(memory, decode_step):
        end(memory, decode_step)
        memory.process_results()

    monkeypatch.setattr(RadixMemory, "_end_prefills", at_once)
    assert _is_noticed("chunks", overlaps=True)


def test_outputs_in_flight_that_are_known_are_noticed(monkeypatch):
    monkeypatch.setattr(SGLang, "_is_in_flight", lambda policy, sequence: False)
    assert _is_noticed("retraction", overlaps=True)


def test_ends_of_text_that_are_known_are_noticed(monkeypatch):
    monkeypatch.setattr(SGLang, "expects_end", lambda policy, sequence: True)
    assert _is_noticed("fcfs", overlaps=True)


def test_a_retraction_that_keeps_the_token_in_flight_is_noticed(monkeypatch):
    monkeypatch.setattr(State, "take_back", lambda state, sequence: None)
    assert _is_noticed("retraction", overlaps=True)


def test_a_decode_that_does_not_wait_for_those_that_finish_is_noticed(monkeypatch):
    """SGLang retracts nothing while a request that finishes by its length is in flight."""
    decode = SGLang._decode

    def at_once(policy, state, transaction, queue, preempted):
        if state.finished and transaction.room < transaction.begun():
            return policy._retract(state, transaction, queue, preempted)
        return decode(policy, state, transaction, queue, preempted)

    monkeypatch.setattr(SGLang, "_decode", at_once)
    assert _difference(replace(KINDS["retraction"](8), overlaps=True)) is not None


def test_windows_without_their_tombstones_are_noticed(monkeypatch):
    """A look-up that ends where the tokens do finds windows that are gone."""

    def follow(tree, key, place):
        found = WindowTree.__base__.follow(tree, key, tree.start)
        tree.hit = found.tokens
        return found

    monkeypatch.setattr(WindowTree, "follow", follow)
    assert _is_noticed("windows")


def test_windows_that_are_given_back_token_by_token_are_noticed(monkeypatch):
    monkeypatch.setattr(radix_transaction, "EVICTION_INTERVAL", 1)
    assert _is_noticed("windows")


def test_an_admission_that_does_not_ask_for_windows_is_noticed(monkeypatch):
    monkeypatch.setattr(PrefillBatch, "_in_windows", lambda *args: 0)
    assert _is_noticed("windows")


def test_windows_that_do_not_join_the_tree_where_they_were_missing_are_noticed(monkeypatch):
    monkeypatch.setattr(RadixMemory, "branch", lambda memory, pages: 0)
    assert _is_noticed("windows")


def test_leaves_longer_than_a_window_are_noticed(monkeypatch):
    """Whose lock holds more than a window."""
    init = WindowTree.__init__

    def long(tree, window):
        init(tree, window)
        tree.tail = 1 << 20

    monkeypatch.setattr(WindowTree, "__init__", long)
    assert _is_noticed("windows")


def test_a_request_that_goes_on_without_a_copy_of_its_state_is_noticed(monkeypatch):
    """Of a pool with as many states as SGLang gives it, the copy is rarely the one that lacks one."""
    monkeypatch.setattr(RadixMemory, "copy_state", lambda memory, node: 0)
    assert _difference(KINDS["states"](38)) is not None


def test_states_on_a_grid_from_the_first_token_are_noticed(monkeypatch):
    """SGLang's begins with the prefill, also in the middle of a prompt."""

    def of_prefill(states, first, end, branch):
        return of(states, first - first % (states.tracked and states.grid or 1), end, branch)

    of = States.of_prefill
    monkeypatch.setattr(States, "of_prefill", of_prefill)
    assert _is_noticed("states")


def test_a_state_that_does_not_join_the_tree_where_prompts_part_is_noticed(monkeypatch):
    of = States.of_prefill
    monkeypatch.setattr(States, "of_prefill", lambda states, first, end, branch: of(states, first, end, 0))
    assert _is_noticed("states")


def test_an_output_whose_states_are_not_copied_on_the_way_is_noticed(monkeypatch):
    monkeypatch.setattr(States, "of_decodes", lambda states, first, end: 0)
    assert _is_noticed("states")


def test_a_path_whose_states_are_all_used_is_noticed(monkeypatch):
    """As of windows: only the state that a request goes on from is."""
    monkeypatch.setattr(StateTree, "_refresh", lambda tree, path: WindowTree._refresh(tree, path))
    monkeypatch.setattr(StateTree, "window", 1 << 20, raising=False)
    assert _is_noticed("states")


def test_a_copy_that_a_refused_request_keeps_is_noticed(monkeypatch):
    """SGLang looks a request up, and copies its state, before it knows whether there is room."""
    unlock = RadixTransaction.unlock

    def kept(transaction, sequence):
        transaction.memory.holdings[sequence].states = 0
        unlock(transaction, sequence)

    monkeypatch.setattr(RadixTransaction, "unlock", kept)
    assert _is_noticed("states")


def test_a_prefill_without_room_for_copies_of_its_state_is_noticed(monkeypatch):
    monkeypatch.setattr(RadixMemory, "_take_states_of_prefills", lambda memory, each: None)
    assert _is_noticed("states")


def test_room_that_does_not_lack_the_states_taken_ahead_is_noticed(monkeypatch):
    """SGLang takes one for each request of the queue while it looks at it."""
    monkeypatch.setattr(RadixMemory, "take_ahead", lambda memory, number: None)
    assert _is_noticed("unified")


def test_states_that_give_way_before_leaves_are_noticed(monkeypatch):
    """As in pools of their own."""

    def alone(memory, pages, states):
        while memory.available < pages and memory._evict(1):
            pass
        while memory.state_free < states and memory.tree.component_evictable:
            memory._evict(0, 1)

    monkeypatch.setattr(RadixMemory, "_make_free_together", alone)
    assert _is_noticed("unified")


def test_an_admission_that_does_not_count_its_state_is_noticed(monkeypatch):
    monkeypatch.setattr(SharedBuffer, "unit_slots", 0)
    assert _is_noticed("unified")


def test_leaves_that_leave_the_bytes_of_their_states_are_noticed(monkeypatch):
    """SGLang stops when the page and its state have made room, not when pages alone have."""

    def by_pages(memory, pages, states):
        memory._evict(max(0, pages - memory.available))
        together(memory, 0, states)

    together = RadixMemory._make_free_together
    monkeypatch.setattr(RadixMemory, "_make_free_together", by_pages)
    assert _is_noticed("unified")


def test_windows_that_are_asked_for_beside_the_slots_are_noticed(monkeypatch):
    """As of pools of their own: in one buffer both are one sum."""
    monkeypatch.setattr(RadixMemory, "can_reserve", lambda memory, slots, windows: slots <= memory.room)
    assert _is_noticed("unified windows")


def test_leaves_that_give_way_for_all_that_lacks_are_noticed(monkeypatch):
    """Without a look at what a leaf's windows leave."""

    def by_pages(memory, buffer, pages):
        lacking = -memory._left(buffer, pages, pages)
        if lacking > 0:
            memory._evict(-(-lacking // buffer.page_bytes))

    monkeypatch.setattr(RadixMemory, "_make_windows_free", by_pages)
    assert _is_noticed("unified windows")


def test_outputs_as_long_as_the_slots_alone_are_noticed(monkeypatch):
    def alone(memory, sequence, windows, buffer):
        return min(sequence.max_tokens, buffer.most_tokens - sequence.prompt_tokens - 2)

    monkeypatch.setattr(RadixMemory, "_most_output_tokens", alone)
    assert _difference(KINDS["unified windows"](33)) is not None


def test_a_prefill_that_waits_without_its_seat_is_noticed(monkeypatch):
    """With one seat SGLang admits nobody beside it."""
    monkeypatch.setattr(PrefillBatch, "seats", property(lambda batch: batch.running + len(batch)))
    assert _difference(KINDS["unified windows"](192)) is not None


def test_a_write_that_does_not_lock_its_nodes_is_noticed(monkeypatch):
    """As if its copy had ended at once."""
    monkeypatch.setattr(HiCache, "_copy", lambda copies, index, now, pages, ticks, is_store, done: done() or now)
    assert _is_noticed("hicache", overlaps=True)


def test_loads_of_a_few_tokens_are_noticed(monkeypatch):
    """SGLang loads no fewer than ten."""
    monkeypatch.setattr(radix_host, "LEAST_LOADED", 1)
    assert _is_noticed("hicache")


def test_a_step_that_waits_for_no_load_is_noticed(monkeypatch):
    monkeypatch.setattr(LayeredLoad, "wait", lambda load, step_ticks: 0)
    assert _is_noticed("hicache")


def test_chunks_that_are_written_a_step_early_are_noticed(monkeypatch):
    monkeypatch.setattr(HostRadixMemory, "_keep_chunks", RadixMemory._keep_chunks)
    assert _is_noticed("hicache_states")


def test_an_order_that_does_not_count_the_host_is_noticed(monkeypatch):
    def match(transaction, sequence):
        _, on_device = of_both(transaction, sequence)
        return on_device, on_device

    of_both = HostRadixTransaction.match
    monkeypatch.setattr(HostRadixTransaction, "match", match)
    assert _difference(KINDS["hicache"](52)) is not None


def test_evicted_nodes_that_leave_the_tree_are_noticed(monkeypatch):
    """As without a host."""
    monkeypatch.setattr(HostTree, "_remove", lambda tree, leaf: (setattr(leaf, "on_host", False), remove(tree, leaf)))
    assert _is_noticed("hicache")


def test_a_state_that_is_not_loaded_is_noticed(monkeypatch):
    """A look-up that ends with what the device has."""
    monkeypatch.setattr(HostComponents, "_has_component", lambda tree, node: node.component)
    assert _is_noticed("hicache_states")


def test_a_request_that_takes_no_state_for_its_load_is_noticed(monkeypatch):
    monkeypatch.setattr(HostRadixMemory, "take_state", lambda memory: 0)
    assert _is_noticed("hicache_states")


def test_a_state_that_is_written_with_its_tokens_alone_is_noticed(monkeypatch):
    """SGLang writes one that joins a node on the host, too."""
    monkeypatch.setattr(HostComponents, "_complete", HostTree._complete)
    assert _is_noticed("hicache_states")


def test_a_state_that_leaves_the_host_with_the_device_is_noticed(monkeypatch):
    def bury(tree, node):
        buried(tree, node)
        if node.component_on_host:
            tree._forget_on_host(node)

    buried = HostComponents._bury
    monkeypatch.setattr(HostComponents, "_bury", bury)
    assert _is_noticed("hicache_states")


def test_a_copy_that_does_not_lock_its_state_is_noticed(monkeypatch):
    monkeypatch.setattr(HostComponents, "_add_copies", lambda tree, nodes, sign: None)
    assert _is_noticed("hicache_states", overlaps=True)


def test_windows_that_are_written_node_by_node_are_noticed(monkeypatch):
    """SGLang writes those of a whole window."""

    def unwritten(tree, node):
        return [node] if node.component and not node.component_on_host and node.written_by is None else []

    monkeypatch.setattr(HostWindowTree, "_unwritten", unwritten)
    assert _is_noticed("hicache_windows")


def test_windows_of_which_all_are_loaded_are_noticed(monkeypatch):
    """As the tokens: only the last window is."""
    monkeypatch.setattr(HostWindowTree, "_needed", lambda tree, node: tree.path(node))
    monkeypatch.setattr(
        HostComponents, "to_load", lambda tree, node: [n for n in tree.path(node) if n.component_on_host > n.component]
    )
    assert _is_noticed("hicache_windows")
