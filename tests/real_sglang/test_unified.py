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
