"""The dictionary of host blocks, beside a list that is sorted anew for every eviction."""

from __future__ import annotations

import random

import pytest

from fragmeter.sim.memory.prefix.host_cache import HostCache


class Sorted:
    """Blocks with the rank of their last request and their places; ``state`` is -1 for a block that is written, else its readers."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.turn, self.evicted = num_blocks, 0, []
        self.state: dict[int, int] = {}
        self.rank: dict[int, tuple[int, int]] = {}
        self.uses: dict[int, dict[int, int]] = {}
        self.rank_of: dict[int, int] = {}

    def use(self, request: int, blocks: list[tuple[int, int]]) -> None:
        places = self.uses.setdefault(request, {})
        for name, place in blocks:
            if name in places:
                continue
            if request not in self.rank_of:
                self.turn += 1
                self.rank_of[request] = self.turn
            places[name] = place
            if name in self.state:
                self.rank[name] = max(self.rank[name], (self.rank_of[request], -place))

    def store(self, request: int, blocks: list[tuple[int, int]]) -> list[int] | None:
        self.use(request, [block for block in blocks if self.state.get(block[0], 0) >= 0])
        names = [name for name, _ in blocks]
        missing = [name for name in names if name not in self.state]
        victims = sorted(
            (name for name, readers in self.state.items() if not readers and name not in names),
            key=self.rank.__getitem__,
        )
        over = max(0, len(self.state) + len(missing) - self.num_blocks)
        if over > len(victims):
            return None
        for name in victims[:over]:
            del self.state[name], self.rank[name]
            self.evicted.append(name)
        for name, place in blocks:
            if name in missing:
                self.state[name] = -1
                self.rank[name] = self.rank_of[request], -self.uses[request].get(name, place)
        return missing

    def finish(self, request: int) -> None:
        places = self.uses.pop(request, {})
        self.rank_of.pop(request, None)
        self.turn += 1
        for name, place in places.items():
            if name in self.state:
                self.rank[name] = self.turn, -place


def chain(draw: random.Random, request: int) -> list[int]:
    """Names of a request: some that one of four prefixes has, too, and others of its own."""
    length, family = draw.randrange(1, 15), 1000 * draw.randrange(4)
    shared = draw.randrange(length + 1)
    return [family + place if place < shared else 10_000 + 100 * request + place for place in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [5, 20, 60])
def test_the_dictionary_evicts_as_a_sorted_list_does(num_blocks):
    evicted = 0
    for seed in range(30):
        draw, ours, theirs = random.Random(seed), HostCache(num_blocks), Sorted(num_blocks)
        requests: dict[int, list[int]] = {}
        loads: list[list[int]] = []
        stores: list[list[int]] = []
        for turn in range(300):
            if not requests or draw.random() < 0.1:
                requests[turn] = chain(draw, turn)
            request = draw.choice(list(requests))
            blocks = [(name, place) for place, name in enumerate(requests[request])]
            ready = next((at for at, (name, _) in enumerate(blocks) if not ours.is_ready(name)), len(blocks))
            match draw.choice(("store", "store", "store", "load", "finish", "end")):
                case "store":
                    part = blocks[draw.randrange(len(blocks)) :]
                    found = ours.start_store(request, part)
                    assert found == theirs.store(request, part)
                    stores += [found] if found else []
                case "load" if ready:
                    ours.start_load(request, blocks[:ready])
                    theirs.use(request, blocks[:ready])
                    loads.append([name for name, _ in blocks[:ready]])
                    for name in loads[-1]:
                        theirs.state[name] += 1
                case "finish":
                    ours.finish(request)
                    theirs.finish(request)
                    del requests[request]
                case "end":
                    for ended, end in ((loads, ours.end_load), (stores, ours.end_store)):
                        if ended:
                            names = ended.pop(draw.randrange(len(ended)))
                            end(names)
                            for name in names:
                                theirs.state[name] = theirs.state[name] - 1 if ended is loads else 0
            assert all(ours.has(name) == (name in theirs.state) for name in (*theirs.state, *theirs.evicted[-20:]))
            assert (ours.used_blocks, ours.evicted_blocks) == (len(theirs.state), len(theirs.evicted))
            assert ours.evictable_blocks == sum(not readers for readers in theirs.state.values())
        evicted += ours.evicted_blocks
    assert evicted > 1000
