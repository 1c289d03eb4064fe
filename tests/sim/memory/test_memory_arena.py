"""Three arenas on one hand-worked log, and under a policy."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.contiguous.arena import BestFitArena, FirstFitArena, arena
from fragmeter.sim.memory.contiguous.buddy import BuddyArena
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.workload.workload import Workload

NAMES = ("buddy", "first-fit", "best-fit")


class TestTheSameRequestsInThreePlaces:
    """A pool of 32 blocks. Five come (3, 5, 4, 2 and 1 blocks), the second and the fourth go, one of 2 comes.

    buddy       aaa~ccccbbbbb~~~dde.............    rounds to 4, 8, 4, 2, 1
    the others  aaabbbbbccccdde.................
    """

    TOKENS = (3, 5, 4, 2, 1)
    PLACED = {"buddy": [0, 8, 4, 16, 18], "first-fit": [0, 3, 8, 12, 14], "best-fit": [0, 3, 8, 12, 14]}
    RUNS = {
        "buddy": [(8, 10), (19, 13)],
        "first-fit": [(3, 5), (12, 2), (15, 17)],
        "best-fit": [(3, 5), (12, 2), (15, 17)],
    }
    # The smallest chunk of 2; the first run; the shortest run.
    LAST = {"buddy": 16, "first-fit": 3, "best-fit": 12}
    # Chunks of 1; runs of 3 (5 to 7) and 2 (12 and 13); none, since 5 blocks in a row are left at 3.
    TOO_SMALL_FOR_4 = {"buddy": 1, "first-fit": 5, "best-fit": 0}

    @pytest.mark.parametrize("name", NAMES)
    def test_log(self, name):
        placed = arena(name, 32, 32)
        blocks = [placed.piece_blocks(tokens) for tokens in self.TOKENS]
        assert blocks == ([4, 8, 4, 2, 1] if name == "buddy" else [3, 5, 4, 2, 1])
        assert [placed.allocate(count) for count in blocks] == self.PLACED[name]
        for gone in (1, 3):
            placed.free(self.PLACED[name][gone], blocks[gone])
        assert placed.free_runs() == self.RUNS[name]
        assert placed.allocate(2) == self.LAST[name]
        assert placed.free_blocks_below(4) == self.TOO_SMALL_FOR_4[name]


def test_names_and_chunks():
    assert [type(arena(name, 983, 128)) for name in NAMES] == [BuddyArena, FirstFitArena, BestFitArena]
    assert arena("buddy", 983, 3).max_chunk_blocks == 128
    assert arena("buddy", 983, 129).max_chunk_blocks == 256


@pytest.mark.parametrize("kind", [FirstFitArena, BestFitArena])
def test_what_lies_outside_cannot_be_freed(kind):
    whole = kind(8)
    whole.allocate(8)
    for start, blocks in ((-1, 2), (7, 2), (8, 1)):
        with pytest.raises(SimulationFault, match=f"{blocks} blocks at {start} are freed twice, or lie outside"):
            whole.free(start, blocks)
    assert whole.free_runs() == [] and not whole.fits(1)
    assert kind(0).free_runs() == []


def served(name: str, policy: str = "orca-oracle", leap: bool = True, blocks: int = 40, prompts: tuple[int, ...] = ()):
    """A run over 60 requests of 1 to 200 tokens, or over prompts that all arrive at once."""
    random = np.random.default_rng(7)
    lengths = np.array(prompts) if prompts else random.integers(1, 150, 60)
    outputs = np.full(len(lengths), 8) if prompts else random.integers(1, 50, 60)
    arrivals = np.zeros(len(lengths), int) if prompts else np.cumsum(random.integers(0, 10**11, 60))
    chosen = settings(policy=policy, arena=name, num_gpu_blocks_override=blocks, leap=leap)
    return simulate(chosen, Workload("arenas", arrivals, lengths, outputs))


class TestUnderAPolicy:
    def test_a_request_that_rounding_would_not_let_in_is_served(self):
        """264 + 8 tokens are 17 blocks: a chunk of 32, or 17 of the 20 that there are."""
        assert served("buddy", blocks=20, prompts=(264,)).smallest_pool_blocks.tolist() == [32]
        for name in ("first-fit", "best-fit"):
            run = served(name, blocks=20, prompts=(264,))
            assert run.smallest_pool_blocks.tolist() == [17]
            assert len(request_times(run).index) == 1

    def test_only_whole_blocks_are_rounded_up(self):
        """Two of 33 + 8 tokens reserve 3 blocks each, 48 slots of which 7 are round-up; the buddy's 4 hold 64."""
        for name, rounded_up in (("buddy", 23), ("first-fit", 7), ("best-fit", 7)):
            run = served(name, prompts=(33, 33))
            assert run.accounts.at_rows()["round_up"].tolist()[0] == 2 * rounded_up

    @pytest.mark.parametrize("name", NAMES)
    def test_leaping_is_stepping(self, name):
        leapt, stepped = (served(name, leap=leap) for leap in (True, False))
        assert leapt.window == stepped.window
        times = [request_times(run) for run in (leapt, stepped)]
        np.testing.assert_array_equal(times[0].finish_ticks, times[1].finish_ticks)

    def test_runs_let_more_in_than_chunks(self):
        """The same load finishes sooner where nothing is rounded to powers of two."""
        waited = {name: int(request_times(served(name)).finish_ticks.sum()) for name in NAMES}
        assert waited["first-fit"] < waited["buddy"] and waited["best-fit"] < waited["buddy"]


@pytest.mark.parametrize(
    ("prompts", "first_steps"),
    [
        # Three requests hold slots 0 to 19; the first and the third end after two steps and leave runs of 5 and 5.
        ([3, 2, 3], [0, 0, 0, 2, 3]),
        # Runs of 7 and 3 have as many slots, and room for one piece: two fit when the second request ends.
        ([5, 2, 1], [0, 0, 0, 8, 9]),
    ],
    ids=["runs of 5 and 5", "runs of 7 and 3"],
)
def test_two_samples_need_a_free_run_each(prompts, first_steps):
    """Two pieces of 5 slots, in 10 free slots; the second sample starts one step after the first."""
    lengths = np.array([*prompts, 3]), np.array([2, 8, 2, 2])
    work = Workload("holes", np.zeros(4, dtype=np.int64), *lengths, n=np.array([1, 1, 1, 2]))
    chosen = settings(policy="orca-oracle", arena="first-fit", block_size=1, num_gpu_blocks_override=20)
    assert simulate(chosen, work).log.residencies["start_step"].tolist() == first_steps
