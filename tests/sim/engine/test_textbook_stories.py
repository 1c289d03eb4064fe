"""The textbook stories against logs and pictures worked out by hand, slot by slot."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.workload.workload import Workload
from textbook import Scene, Story, all_stories, run_scene, scenes

STATIC, CONTINUOUS, EQUAL, PAGING = range(4)

# Forty slots. Each of a batch of four reserves the longest prompt, 4, and the declared max_tokens of six.
# Padding (finished_hold) is what a prompt lacks to 4: 1, 2, 0, 2. Prompt + true output: S1 7, S2 8, S3 6, S4 7.
# Over-estimate is what 10 slots less the padding hold beyond that: 2, 0, 4, 1. The second batch likewise, on 30 slots.
STATIC_LOG = (
    "1: prefill S1:3 S2:2 S3:4 S4:2 | live 11 reserved 17 over_estimate 7 finished_hold 5",
    "2: decode S1 S2 S3 S4 | wait S5 | live 15 reserved 13 over_estimate 7 finished_hold 5",
    "3: decode S1 S2 S4 | hold S3 | wait S5 S6 | live 13 reserved 9 over_estimate 3 finished_hold 15",
    "4: decode S1 S2 S4 | hold S3 | wait S5 S6 S7 | live 16 reserved 6 over_estimate 3 finished_hold 15",
    "5: decode S2 S4 | hold S1 S3 | wait S5 S6 S7 | live 12 reserved 3 over_estimate 1 finished_hold 24",
    "6: decode S2 | hold S1 S3 S4 | wait S5 S6 S7 | live 7 reserved 1 finished_hold 32",
    "7: prefill S5:3 S6:2 S7:4 | live 9 reserved 9 over_estimate 9 finished_hold 3 free 10",
    "8: decode S5 S6 S7 | live 12 reserved 6 over_estimate 9 finished_hold 3 free 10",
    "9: decode S5 S6 | hold S7 | live 9 reserved 3 over_estimate 5 finished_hold 13 free 10",
    "10: decode S5 | hold S6 S7 | live 6 reserved 1 over_estimate 2 finished_hold 21 free 10",
)
STATIC_PICTURE = {
    "S1": "PDDDHH",
    "S2": "PDDDDD",
    "S3": "PDHHHH",
    "S4": "PDDDDH",
    "S5": ".WWWWWPDDD",
    "S6": "..WWWWPDDH",
    "S7": "...WWWPDHH",
}
# Each reserves its own prompt and six: 9, 8, 10, 8 slots of the forty, then 9, 8 and 10. Nothing is padded.
CONTINUOUS_LOG = (
    "1: prefill S1:3 S2:2 S3:4 S4:2 | live 11 reserved 17 over_estimate 7 free 5",
    "2: decode S1 S2 S3 S4 | wait S5 | live 15 reserved 13 over_estimate 7 free 5",
    "3: prefill S5:3 | decode S1 S2 S4 | wait S6 | live 16 reserved 13 over_estimate 5 free 6",
    "4: decode S1 S2 S4 S5 | wait S6 S7 | live 20 reserved 9 over_estimate 5 free 6",
    "5: prefill S6:2 | decode S2 S4 S5 | wait S7 | live 19 reserved 8 over_estimate 6 free 7",
    "6: prefill S7:4 | decode S2 S5 S6 | live 20 reserved 6 over_estimate 9 free 5",
    "7: decode S6 S7 | live 9 reserved 2 over_estimate 7 free 22",
)
CONTINUOUS_PICTURE = {
    "S1": "PDDD",
    "S2": "PDDDDD",
    "S3": "PD",
    "S4": "PDDDD",
    "S5": ".WPDDD",
    "S6": "..WWPDD",
    "S7": "...WWPD",
}
# Each reserves three and four: 28 slots, the whole pool, all of them live or about to be.
EQUAL_LOG = (
    "1: prefill S1:3 S2:3 S3:3 S4:3 | wait S5 S6 S7 S8 | live 12 reserved 16",
    "2: decode S1 S2 S3 S4 | wait S5 S6 S7 S8 | live 16 reserved 12",
    "3: decode S1 S2 S3 S4 | wait S5 S6 S7 S8 | live 20 reserved 8",
    "4: decode S1 S2 S3 S4 | wait S5 S6 S7 S8 | live 24 reserved 4",
    "5: prefill S5:3 S6:3 S7:3 S8:3 | live 12 reserved 16",
    "6: decode S5 S6 S7 S8 | live 16 reserved 12",
    "7: decode S5 S6 S7 S8 | live 20 reserved 8",
    "8: decode S5 S6 S7 S8 | live 24 reserved 4",
)
EQUAL_PICTURE = {f"S{i}": "PDDD" if i <= 4 else "WWWWPDDD" for i in range(1, 9)}
# Six blocks of four. 3: S2 holds 8 tokens and needs a third block, S1 and S2 hold four, S3 the other two; S3 gives
# them up. 4: S3 needs two blocks for prompt and one token, one is free. 5: S2 has given three back, S1 takes one.
PAGING_LOG = (
    "1: prefill S1:5 S2:7 | live 12 reserved 4 free 8",
    "2: prefill S3:5 | decode S1 S2 | live 19 reserved 5",
    "3: preempt S3 | decode S1 S2 | wait S3 | live 16 reserved 3 block_tail 1 free 4",
    "4: decode S1 S2 | wait S3 | live 18 reserved 1 block_tail 1 free 4",
    "5: prefill S3:6 | decode S1 | live 15 reserved 5 free 4",
    "6: decode S1 S3 | live 17 reserved 3 free 4",
    "7: decode S1 S3 | live 19 reserved 1 free 4",
    "8: decode S1 | live 12 free 12",
)
PAGING_PICTURE = {"S1": "PDDDDDDD", "S2": "PDDD", "S3": ".PWWPDD"}

LETTERS = {"prefill": "P", "decode": "D", "finished_hold": "H", "waiting": "W"}


def picture(story: Story) -> dict[str, str]:
    """One string a sequence, one letter an iteration, a dot where it is not there."""
    lines: dict[str, str] = {}
    for row in story.rows:
        line = lines.get(row["sequence"], "")
        assert row["iteration"] > len(line)
        lines[row["sequence"]] = line + "." * (row["iteration"] - 1 - len(line)) + LETTERS[row["state"]]
    return lines


def under(scene: Scene, **changes) -> Story:
    """The same scene with other settings; SGLang's pool has as many slots in pages of one token."""
    if changes.get("policy") == "sglang":
        slots = scene.settings.num_gpu_blocks_override * scene.settings.block_size
        changes |= {"num_gpu_blocks_override": slots, "block_size": 1}
    return run_scene(replace(scene, settings=replace(scene.settings, **changes)))


def finished_hold(story: Story) -> list[int]:
    """Slots of that bucket by iteration."""
    found = (re.search(r"finished_hold (\d+)", line) for line in story.log)
    return [int(match[1]) if match else 0 for match in found]


@pytest.mark.parametrize(
    ("place", "log", "lines"),
    [
        (STATIC, STATIC_LOG, STATIC_PICTURE),
        (CONTINUOUS, CONTINUOUS_LOG, CONTINUOUS_PICTURE),
        (EQUAL, EQUAL_LOG, EQUAL_PICTURE),
        (PAGING, PAGING_LOG, PAGING_PICTURE),
    ],
)
class TestEveryStory:
    def test_the_log_is_the_one_worked_out_by_hand(self, place, log, lines):
        assert all_stories()[place].log == log

    def test_the_picture_is_the_one_worked_out_by_hand(self, place, log, lines):
        assert picture(all_stories()[place]) == lines
        assert list(picture(all_stories()[place])) == list(lines)

    def test_it_is_plain_data(self, place, log, lines):
        rows = all_stories()[place].rows
        assert json.loads(json.dumps(rows)) == list(rows)

    def test_every_slot_is_accounted_for_in_every_iteration(self, place, log, lines):
        override = scenes()[place].settings
        capacity = override.num_gpu_blocks_override * override.block_size
        sums = [sum(map(int, re.findall(r"[a-z_]+ (\d+)", line.split(" | ")[-1]))) for line in log]
        assert sums == [capacity] * len(log)

    def test_nothing_is_lost_by_stepping(self, place, log, lines):
        """The story has single steps; with leaps, sequences start and end at the same steps and hold the same slots."""
        scene = scenes()[place]
        stepped, leapt = (
            simulate(replace(scene.settings, leap=leap), scene.workload, OneSecondStep()) for leap in (False, True)
        )
        assert len(leapt.log.row_step) < len(stepped.log.row_step) == len(log)
        assert leapt.window == stepped.window
        assert leapt.log.residency_end.tolist() == stepped.log.residency_end.tolist()


class TestAnotherPolicy:
    """The logs are those of the policy: any other gives another, but for those that must agree."""

    @pytest.mark.parametrize(
        ("place", "same_log"),
        [
            (STATIC, {"static", "fastertransformer"}),
            (CONTINUOUS, {"orca"}),
            (EQUAL, {"static", "fastertransformer", "orca"}),
            # Short prompts fill no budget, and here the policies do not differ in whether a block is needed or only requested.
            (PAGING, {"vllm-sosp23", "sarathi", "trtllm-max-util"}),
        ],
    )
    def test_tells_another_story(self, place, same_log):
        scene = scenes()[place]
        log = run_scene(scene).log
        assert {policy for policy in POLICIES if under(scene, policy=policy).log == log} == same_log

    def test_continuous_batching_of_the_static_batch_and_the_other_way_round(self):
        static, continuous = scenes()[STATIC], scenes()[CONTINUOUS]
        assert under(static, policy="orca").log == CONTINUOUS_LOG
        assert under(continuous, policy="static").log == STATIC_LOG

    def test_fastertransformer_parts_from_static_beyond_its_2040_tokens(self):
        """With 2,032 tokens more a prompt: S1 + S2 are 2035 + 6 and S3 + S4 2036 + 5 tokens, one too many; S4, S5
        and S6 are 2035 + 5 and go together; with S7's 2036 they would be too many again."""
        scene = scenes()[STATIC]
        work = scene.workload
        longer = Workload(work.name, work.arrival_ticks, work.prompt_tokens + 2032, work.output_tokens, work.max_tokens)
        roomy = replace(scene.settings, num_gpu_blocks_override=2042, max_model_len=2048)
        scene = replace(scene, workload=longer, settings=roomy)
        assert picture(run_scene(scene)) == STATIC_PICTURE
        assert picture(under(scene, policy="fastertransformer")) == {
            "S1": "PDDD",
            "S2": "WWWWPDDDDD",
            "S3": "WWWWWWWWWWPD",
            "S4": "WWWWWWWWWWWWPDDDD",
            "S5": ".WWWWWWWWWWWPDDDH",
            "S6": "..WWWWWWWWWWPDDHH",
            "S7": "...WWWWWWWWWWWWWWPD",
        }

    def test_orca_oracle_differs_from_orca_in_what_it_holds_only(self):
        """Two blocks of four for each: S1 and S4 want seven, S2 eight, S3 six. Ten blocks leave a chunk of two."""
        story = under(scenes()[CONTINUOUS], policy="orca-oracle")
        assert picture(story) == CONTINUOUS_PICTURE
        assert story.log[0] == "1: prefill S1:3 S2:2 S3:4 S4:2 | live 11 reserved 17 round_up 4 free 8"

    def test_what_is_swapped_out_is_not_computed_again(self):
        """S3 comes back in the same iteration, with its two blocks and one for the next token: three are free."""
        story = under(scenes()[PAGING], preemption_mode="swap")
        assert picture(story) == PAGING_PICTURE | {"S3": ".PWWDDD"}
        assert story.log[4] == "5: decode S1 S3 | live 15 reserved 5 free 4"


class TestSeats:
    def test_continuous_batching_keeps_the_batch_full_while_requests_wait(self):
        lines = picture(all_stories()[CONTINUOUS]).values()
        for column in ([line[k] for line in lines if k < len(line)] for k in range(7)):
            assert "W" not in column or column.count("P") + column.count("D") == 4

    def test_static_batching_computes_for_one_sequence_in_four_in_the_end(self):
        lines = [line.ljust(10, ".") for line in picture(all_stories()[STATIC]).values()]
        computed = [sum(line[k] in "PD" for line in lines) for k in range(10)]
        assert computed == [4, 4, 3, 3, 2, 1, 3, 3, 2, 1]


class TestFinishedHold:
    def test_by_iteration_padding_of_running_and_ten_slots_of_finished_sequences(self):
        assert finished_hold(all_stories()[STATIC]) == [
            1 + 2 + 0 + 2,
            1 + 2 + 0 + 2,
            1 + 2 + 10 + 2,
            1 + 2 + 10 + 2,
            10 + 2 + 10 + 2,
            10 + 2 + 10 + 10,
            1 + 2 + 0,
            1 + 2 + 0,
            1 + 2 + 10,
            1 + 10 + 10,
        ]

    def test_is_nothing_where_lengths_are_equal_or_sequences_leave_alone(self):
        for place in (CONTINUOUS, EQUAL, PAGING):
            assert not any(finished_hold(all_stories()[place]))

    @pytest.mark.slow
    @given(st.data(), st.integers(1, 4), st.integers(0, 5), st.booleans())
    def test_is_zero_exactly_if_each_batch_has_equal_prompts_and_outputs(self, data, num_seqs, slack, leap):
        """A request of o_i of O iterations and p_i of P prompt tokens holds P - p_i for o_i of them, then all R."""
        sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
        equal = sizes.map(lambda size: [size] * num_seqs)
        mixed = st.lists(sizes, min_size=num_seqs, max_size=num_seqs)
        batches = data.draw(st.lists(st.one_of(equal, mixed), min_size=1, max_size=3))
        prompts, outputs = np.array([size for batch in batches for size in batch]).T
        work = Workload("batches", np.zeros(len(prompts), int), prompts, outputs, outputs + slack)
        roomy = settings(
            policy="static", max_num_seqs=num_seqs, max_model_len=32, block_size=8, num_gpu_blocks_override=4 * num_seqs,
            leap=leap,
        )  # fmt: skip
        held = simulate(roomy, work, OneSecondStep()).window.slot_steps["finished_hold"]
        expected = 0
        for batch in batches:
            longest_prompt, longest_output = (max(size) for size in zip(*batch))
            reserved = longest_prompt + longest_output + slack
            expected += sum((longest_prompt - p) * o + reserved * (longest_output - o) for p, o in batch)
        assert held == expected
        assert (held == 0) == all(len(set(batch)) == 1 for batch in batches)
