"""One buffer for pages and states beside SGLang's allocators of it, wherever these have put their units."""

from __future__ import annotations

import random

import pytest

from fragmeter.sim.spec.startup.sglang_unified import SharedBuffer

from . import server, unified
from .workloads import SLOT_BYTES


@pytest.mark.parametrize("seed", range(12))
def test_room_is_that_of_the_real_allocators_wherever_units_lie(seed: int):
    """Pages and states are taken and given back at random. How many more can be taken follows from how many are held, also beside holes, which
    either kind's next allocation fills or compacts."""
    draw = random.Random(seed)
    page, state_bytes = draw.choice((1, 1, 4, 16)), 4 * draw.choice((3, 8, 13, 100, 401))
    slots, states = page * draw.randint(20, 60), draw.randint(4, 40)
    with server.published(page_size=page):
        pools = unified.state_pools(4, slots, slots, states, state_bytes, page, extra_buffer=True, overlap=True)
        tokens, slot_of = pools.allocator, pools.rows.mamba_allocator
        buffer = SharedBuffer.of(
            slots * SLOT_BYTES + states * state_bytes, SLOT_BYTES, state_bytes, page, most_tokens=slots
        )
        assert tokens.mamba_slot_full_token_cost() == buffer.unit_slots
        pages_held, states_held, holes = [], [], 0
        for _ in range(150):
            left = buffer.left(len(pages_held), len(states_held))
            room = left // buffer.page_bytes, left // buffer.unit_bytes
            assert (tokens.available_size(), slot_of.schedulable_available_size()) == (room[0] * page, room[1])
            assert slot_of.available_size() == buffer.ids - len(states_held)
            of_states, take = draw.random() < 0.5, draw.random() < 0.6
            held, (pool, size) = ((states_held, (slot_of, 1)), (pages_held, (tokens, page)))[not of_states]
            if take:
                number = draw.randint(1, max(1, room[of_states] + draw.randint(-5, 2)))
                found = pool.alloc(number * size)
                assert (found is not None) == (number <= room[of_states])
                held += [] if found is None else [*found.split(size)]
            elif held:
                draw.shuffle(held)
                for each in held[: draw.randint(1, len(held))]:
                    pool.free(each)
                del held[: len(held) - sum(pool.is_slot_allocated(int(each[0])) for each in held)]
            holes += any(end._free_phys_pages.numel() for end in tokens._move_gate_targets())
            assert tokens.verify_byte_accounting() == []
        assert holes > 10 and any(end._stats_n_flush_calls for end in tokens._move_gate_targets())


@pytest.mark.parametrize("seed", range(12))
def test_room_for_windows_is_that_of_the_real_allocator_wherever_they_lie(seed: int):
    """Pages of both kinds are taken together; windows are given back before their tokens, or with them."""
    draw = random.Random(seed)
    page, window_bytes = draw.choice((1, 1, 4, 16)), 32 * draw.choice((1, 1, 2, 5))
    slots, windows = page * draw.randint(20, 60), page * draw.randint(10, 40)
    with server.published(page_size=page):
        pool = unified.window_pool(slots, windows, window_bytes, page)
        total = slots * SLOT_BYTES + windows * window_bytes
        buffer = SharedBuffer.of_windows(total, SLOT_BYTES, window_bytes, page, most_tokens=None)
        assert pool.size_full == buffer.most_tokens
        # Pages with windows, and those that gave them back.
        both, alone, holes = [], [], 0
        for _ in range(150):
            left = buffer.left(len(both) + len(alone), len(both))
            of_windows = min(min(buffer.ids, buffer.most_units) - len(both), left // buffer.unit_bytes)
            assert pool.full_available_size() == left // buffer.page_bytes * page
            assert pool.swa_available_size() == of_windows * page
            asked = draw.randint(0, 20) * page, draw.randint(0, 20) * page
            reserved = buffer.left(len(both) + len(alone) + asked[0] // page, len(both) + asked[1] // page) >= 0
            assert pool.can_reserve(*asked) == reserved
            assert pool.can_reserve(*asked, empty_pool=True, require_token_slack=True) == buffer.holds(*asked, page)
            number, act = draw.randint(1, 12), draw.random()
            if act < 0.5:
                found = pool.alloc(number * page)
                fits = number * (buffer.page_bytes + buffer.unit_bytes) <= left
                assert (found is not None) == fits
                both += [] if found is None else [*found.split(page)]
            elif act < 0.75:
                draw.shuffle(both)
                for each in both[:number]:
                    pool.free_swa(each)
                alone += both[:number]
                del both[:number]
            else:
                pages = draw.choice((both, alone))
                draw.shuffle(pages)
                for each in pages[:number]:
                    pool.free(each)
                del pages[:number]
            holes += any(end._free_phys_pages.numel() for end in pool._move_gate_targets())
            assert pool.verify_byte_accounting() == []
        assert holes > 10 and any(end._stats_n_flush_calls for end in pool._move_gate_targets())
