"""SGLang's order, admissions and retractions, against logs worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from engine_runs import serve
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory import RadixMemory
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy import sglang_prefill
from fragmeter.sim.policy.sglang_prefill import NewTokenRatio
from fragmeter.sim.types.errors import SettingError, SimulationFault
from fragmeter.sim.types.state import State
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from oracle import sglang as oracle
from radix_cases import A, B, log_lines, story


class TestStories:
    # 1 and 2 come while 0 runs alone, as only one may. 2 begins as 0 did.
    QUEUE = [(0, 2, [(A, 4), (-1, 2)]), (10, 1, [(-2, 5)]), (20, 2, [(A, 4), (-3, 1)])]

    def test_the_longest_prefix_goes_first(self):
        """2 finds four tokens of its five, computes one, and leaves the other three of 0 to be evicted. With its
        finish the batch is looked at at once, as nothing runs."""
        assert log_lines(story(self.QUEUE, 24, max_num_seqs=1)) == [
            "0+106 | run 0 | prefill 0:6 | live 6 free 18",
            "106+110 | run 0 | decode 0 | live 7 free 17",
            "216+101 | run 2 | prefill 2:1 | live 5 cached 3 free 16",
            "317+110 | run 2 | decode 2 | live 6 cached 3 free 15",
            "427+105 | run 1 | prefill 1:5 | live 5 cached 9 free 10",
        ]

    def test_but_not_under_fcfs(self):
        assert log_lines(story(self.QUEUE, 24, max_num_seqs=1, schedule_policy="fcfs")) == [
            "0+106 | run 0 | prefill 0:6 | live 6 free 18",
            "106+110 | run 0 | decode 0 | live 7 free 17",
            "216+105 | run 1 | prefill 1:5 | live 5 cached 7 free 12",
            "321+101 | run 2 | prefill 2:1 | live 5 cached 8 free 11",
            "422+110 | run 2 | decode 2 | live 6 cached 8 free 10",
        ]

    def test_nor_where_nothing_is_shared(self):
        case = story(self.QUEUE, 24, max_num_seqs=1)
        alone = [replace(request, prompt_ids=None, output_ids=None) for request in case.requests]
        assert log_lines(replace(case, requests=alone, content=None))[2:] == [
            "216+105 | run 1 | prefill 1:5 | live 5 cached 7 free 12",
            "321+105 | run 2 | prefill 2:5 | live 5 cached 12 free 7",
            "426+110 | run 2 | decode 2 | live 6 cached 12 free 6",
        ]

    def test_what_two_compute_at_once_is_held_once_afterwards_and_the_last_token_is_never_found(self):
        """0 and 1 compute the same prompt beside each other; when they have, one copy is free. 2 finds three tokens of the
        same four, computes the last one for the sake of its first output, and gives that slot back."""
        prompt = [(A, 4)]
        assert log_lines(story([(0, 3, prompt), (0, 3, prompt), (150, 3, prompt)], 30)) == [
            "0+108 | run 0 1 | prefill 0:4 1:4 | live 8 free 22",
            "108+120 | run 0 1 | decode 0 1 | live 6 free 24",
            "228+101 | run 0 1 2 | pause 0 1 | prefill 2:1 | live 7 free 23",
            "329+130 | run 0 1 2 | decode 0 1 2 | live 9 free 21",
            "459+110 | run 2 | decode 2 | live 6 cached 4 free 20",
        ]

    def test_a_retracted_request_finds_its_prompt_again(self):
        """0 and 1 have one prompt. Of those with the fewest generated tokens 0 and 1 have the longest, and 1 was
        admitted last. What 0 locks cannot be evicted, so that of the 12 tokens that 1 knows by then 3 are found; the
        other 9 find six free slots beside those of 0 and 2, which finished, and one leaf is evicted for the rest."""
        prompt = [(A, 3)]
        lines = log_lines(story([(0, 10, prompt), (50, 10, prompt), (150, 10, [(-1, 2)])], 29))
        assert lines[-4:] == [
            "1086+130 | run 0 1 2 | decode 0 1 2 | live 26 free 3",
            "1216+130 | run 0 1 2 | decode 0 1 2 | live 29",
            "1346+120 | run 2 0 | preempt 1 | decode 2 0 | live 23 free 6",
            "1466+109 | run 1 | prefill 1:9 | live 12 cached 11 free 6",
        ]

    def test_a_request_is_put_off_while_another_one_computes_its_prefix(self):
        """Two may run. 1 begins with 32 tokens of 0, so that 2 goes first; when 1's turn comes they are there. 31 are
        too few."""
        shared = [(A, 32)]
        lines = log_lines(story([(0, 1, shared), (0, 1, [*shared, (-1, 3)]), (0, 1, [(-2, 5)])], 150, max_num_seqs=2))
        assert lines == [
            "0+137 | run 0 2 | prefill 0:32 2:5 | live 37 free 113",
            "137+103 | run 1 | prefill 1:3 | live 35 cached 5 free 110",
        ]
        lines = log_lines(
            story([(0, 1, [(A, 31)]), (0, 1, [(A, 31), (-1, 3)]), (0, 1, [(-2, 5)])], 150, max_num_seqs=2)
        )
        assert lines[0] == "0+165 | run 0 1 | prefill 0:31 1:34 | live 65 free 85"

    def test_a_prefix_that_is_locked_makes_no_room(self):
        """2 would find ten tokens of 0's eleven that are cached, and asks for 1 + 4 slots and a page. Before that prefix is locked
        19 could be had less 4.2 reserved for 1, after it 9. So the batch is full, and is looked at again when 1 has
        finished. The end of 0's string goes first, then 1's."""
        lines = log_lines(story([(0, 2, [(A, 10)]), (30, 8, [(-1, 4)]), (300, 4, [(A, 10), (-2, 1)])], 24))
        assert lines == [
            "0+110 | run 0 | prefill 0:10 | live 10 free 14",
            "110+104 | run 0 1 | pause 0 | prefill 1:4 | live 14 free 10",
            "214+120 | run 0 1 | decode 0 1 | live 16 free 8",
            *(f"{334 + 110 * i}+110 | run 1 | decode 1 | live {6 + i} cached 11 free {7 - i}" for i in range(6)),
            "994+101 | run 2 | prefill 2:1 | live 11 cached 12 free 1",
            "1095+110 | run 2 | decode 2 | live 12 cached 12",
            "1205+110 | run 2 | decode 2 | live 13 cached 11",
            "1315+110 | run 2 | decode 2 | live 14 cached 4 free 6",
        ]

    def test_of_equals_the_last_admitted_is_retracted(self):
        """2 finds what 0 left, and is admitted before 1. Both have generated nine tokens when no slot is left, and both have
        longer prompts than 3: 1 goes. The batch goes on in the order in which they would have gone."""
        lines = log_lines(
            story([(0, 1, [(A, 2)]), (10, 10, [(-1, 3)]), (10, 10, [(A, 2), (-2, 1)]), (150, 10, [(-3, 2)])], 32)
        )
        assert lines[:3] + lines[10:12] == [
            "0+102 | run 0 | prefill 0:2 | live 2 free 30",
            "102+104 | run 2 1 | prefill 2:1 1:3 | live 6 free 26",
            "206+102 | run 2 1 3 | pause 2 1 | prefill 3:2 | live 8 free 24",
            "1218+130 | run 2 1 3 | decode 2 1 3 | live 32",
            "1348+120 | run 3 2 | preempt 1 | decode 3 2 | live 23 free 9",
        ]

    def test_of_two_that_finish_at_once_the_first_admitted_is_the_longest_ago(self):
        """2 finds what 0 left, is admitted before 1, and leaves with it. 3 needs six slots and finds five; the output of 2,
        an edge of its own, goes for the last one."""
        assert log_lines(
            story([(0, 1, [(A, 2)]), (10, 2, [(-1, 3)]), (10, 2, [(A, 2), (-2, 1)]), (200, 1, [(-3, 6)])], 13)
        ) == [
            "0+102 | run 0 | prefill 0:2 | live 2 free 11",
            "102+104 | run 2 1 | prefill 2:1 1:3 | live 6 free 7",
            "206+120 | run 2 1 | decode 2 1 | live 8 free 5",
            "326+106 | run 3 | prefill 3:6 | live 6 cached 7",
        ]

    def test_a_batch_that_was_empty_is_not_full_afterwards(self):
        """1 does not fit beside 0 before it runs, as its whole output is reserved then; a step later a share of it is."""
        assert log_lines(story([(0, 10, [(-1, 10)]), (0, 10, [(-2, 10)])], 41))[:3] == [
            "0+110 | run 0 | prefill 0:10 | live 10 free 31",
            "110+110 | run 0 1 | pause 0 | prefill 1:10 | live 20 free 21",
            "220+120 | run 0 1 | decode 0 1 | live 22 free 19",
        ]

    def test_more_than_the_input_is_computed_at_once_but_none_follows(self):
        with mock.patch.object(sglang_prefill, "MAX_PREFILL_TOKENS", 9), mock.patch.object(oracle, "INPUT_TOKENS", 9):
            assert log_lines(story([(0, 1, [(-1, 5)]), (0, 1, [(-2, 4)]), (0, 1, [(-3, 2)])], 60)) == [
                "0+109 | run 0 1 | prefill 0:5 1:4 | live 9 free 51",
                "109+102 | run 2 | prefill 2:2 | live 2 cached 9 free 49",
            ]


def interleaved_sessions(sessions: int, turns: int, prefix_tokens: int, rate: float) -> Workload:
    """Questions of 40 tokens, each behind the long prefix of its session; sessions take turns."""
    count = sessions * turns
    prompts = np.full(count, prefix_tokens + 40)
    gaps = np.random.default_rng(0).exponential(size=count) / rate
    content = PromptContent(np.arange(count + 1), np.arange(count) % sessions, np.full(count, prefix_tokens))
    arrivals = (np.cumsum(gaps) * 1e12).astype(np.int64)
    outputs = np.full(count, 60)
    return Workload("sessions", arrivals, prompts, outputs, outputs, content)


def test_the_longest_prefix_first_beats_first_come_first_served():
    """Sixteen sessions of 1,400 tokens take turns, in a pool that holds four of them: in order of arrival each finds its
    prefix evicted; sorted by what is there they follow on each other. 52 % of the tokens are found, and the first
    token comes after 6 s in place of 28."""
    work = interleaved_sessions(sessions=16, turns=20, prefix_tokens=1400, rate=3.0)
    results = {}
    for name in ("lpm", "fcfs"):
        run = simulate(settings(policy="sglang", num_gpu_blocks_override=6000, schedule_policy=name), work)
        results[name] = summary(run)["prefix_cache"]["hit_rate"], summary(run)["mean_ttft_ms"]
    assert results["fcfs"][0] == 0.0 and results["lpm"][0] > 0.5
    assert results["lpm"][1] < results["fcfs"][1] / 3


def test_the_ratio_falls_with_every_decode_and_not_below_its_least():
    ratio = NewTokenRatio()
    found = [ratio.at(decode_step) for decode_step in (0, 300, 600, 5000)]
    assert found == pytest.approx([0.7, 0.399, 0.098, 0.098], rel=1e-12) and found[-1] == ratio.LEAST
    ratio.estimate(generated=30, running=2, declared=99, decode_step=700)
    # (30 + 2 * 20) / 100, from the next step on.
    assert [ratio.at(701), ratio.at(702)] == [0.7, 0.7 - ratio.DECAY]
    ratio.estimate(generated=1, running=1, declared=999, decode_step=800)
    assert [ratio.at(801), ratio.at(802)] == [21 / 1000, ratio.LEAST]
    ratio.estimate(generated=500, running=9, declared=100, decode_step=900)
    assert ratio.at(901) == 1
    ratio.reset(950)
    assert ratio.at(950) == ratio.FIRST


def test_a_queue_above_128_is_not_sorted():
    """All but the first begin as the second last; in a queue of 129 it does not help."""

    def first_two(waiting: int) -> list[int]:
        requests = (
            [(0, 2, [(A, 4)])] + [(1, 1, [(-index, 5)]) for index in range(1, waiting)] + [(1, 1, [(A, 4), (B, 1)])]
        )
        case = story(requests, 2000, max_num_seqs=1)
        return serve("sglang", case).log.residencies["index"][:2].tolist()

    assert first_two(127 + 1) == [0, 128]
    assert first_two(128 + 1) == [0, 1]


@pytest.mark.parametrize("stages", [1, 2])
def test_pipeline_stages_have_no_overlap_schedule(stages):
    replica = build(settings(policy="sglang", model="llama-3.1-8b", gpu="h100-80gb", pipeline_parallel_size=stages))
    assert replica.policy.schedules_ahead is (stages == 1)


class TestMistakes:
    def test_chunks_that_are_not_whole_pages(self):
        with pytest.raises(SettingError, match="max_num_batched_tokens = 100: sglang's chunks are whole pages"):
            build(settings(policy="sglang", block_size=16, max_num_batched_tokens=100))
        assert build(settings(policy="sglang")).block_size == 1
        assert build(settings(policy="sglang", model="qwen3-8b", gpu="gb300")).block_size == 64

    def test_another_order(self):
        with pytest.raises(SettingError, match="schedule_policy"):
            settings(policy="sglang", schedule_policy="random")

    def test_the_longest_prefix_by_priority(self):
        with pytest.raises(
            SettingError, match="schedule_policy = 'lpm': enable_priority_scheduling orders fcfs or lof"
        ):
            chosen = settings(policy="sglang", schedule_policy="lpm", enable_priority_scheduling=True)
            columns = np.zeros(1, int), np.full(1, 4), np.full(1, 2)
            simulate(chosen, Workload("w", *columns, priority=np.zeros(1, int)))

    def test_priorities_that_no_request_has(self):
        chosen = settings(policy="sglang", enable_priority_scheduling=True, disable_priority_preemption=True)
        with pytest.raises(SettingError, match="enable_priority_scheduling = True: no request has a priority"):
            simulate(chosen, Workload("w", np.zeros(1, int), np.full(1, 4), np.full(1, 2)))

    def test_more_slots_than_there_are(self):
        memory, state = RadixMemory(3), State()
        state.batch_size = 4
        memory.phases.add(0, 4)
        with pytest.raises(SimulationFault, match="1 more slots are taken than there are"):
            memory.advance(state, 1)
