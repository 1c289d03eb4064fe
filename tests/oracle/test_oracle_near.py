"""The Orcas and the static batches in stories in which the nearest policy decides otherwise, in oracle and engine.

A step costs 100 ticks, 10 more a decode and 1 more a prompt token.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from oracle import Limits, Pool, Request
from oracle.story import finishes, first_difference, log, serve
from same_as_oracle import same
from schedulers import StoryCost
from strategies import Case


class Story(NamedTuple):
    """What is served and what comes of it; ``near`` has policies, and the first step that each decides otherwise."""

    requests: list[Request]
    pool: Pool
    limits: Limits
    log: list[str]
    finishes: list[int]
    near: dict[str, int]


# Forty slots, three sequences, at most eight tokens of longest prompt and longest true output.
BATCHES = (
    [Request(0, 3, 2, 4), Request(0, 6, 2, 4), Request(0, 2, 3, 4), Request(0, 1, 1, 1)],
    Pool(10, 4),
    Limits(max_model_len=20, max_num_seqs=3, ft_max_tokens=8),
)

STORIES = {
    # 0, 1 and 2 have 6 + 4 slots each: ``max_num_seqs`` is reached, and no length of a batch stops it.
    "static": Story(
        *BATCHES,
        log=[
            "0+118 | run 0 1 2 | prefill 0:6 1:6 2:6 | live 11 reserved 7 over_estimate 5 finished_hold 7 free 10",
            "118+130 | run 0 1 2 | live 14 reserved 4 over_estimate 5 finished_hold 7 free 10",
            "248+130 | run 0 1 2 | live 4 reserved 1 over_estimate 1 finished_hold 24 free 10",
            "378+101 | run 3 | prefill 3:1 | live 1 reserved 1 free 38",
        ],
        finishes=[378, 378, 378, 479],
        near={"fastertransformer": 0},
    ),
    # True outputs count: 0 and 1 make 6 + 2, and 6 + 3 with 2 is too many. 2 and 3 have 2 + 4 slots each.
    "fastertransformer": Story(
        *BATCHES,
        log=[
            "0+112 | run 0 1 | prefill 0:6 1:6 | live 9 reserved 4 over_estimate 4 finished_hold 3 free 20",
            "112+120 | run 0 1 | live 11 reserved 2 over_estimate 4 finished_hold 3 free 20",
            "232+104 | run 2 3 | prefill 2:2 3:2 | live 3 reserved 4 over_estimate 4 finished_hold 1 free 28",
            "336+120 | run 2 3 | live 3 reserved 2 over_estimate 1 finished_hold 6 free 28",
            "456+120 | run 2 3 | live 4 reserved 1 over_estimate 1 finished_hold 6 free 28",
        ],
        finishes=[232, 232, 576, 576],
        near={"static": 0},
    ),
    # Eight blocks. 0 asks for 3 + 8 tokens (four blocks), 1 for 3 + 4 (two), 2 for 2 + 4 (two), and 3 waits for one.
    # True outputs would leave a block for 3, since 0 would do with two; the model's length is all eight.
    "orca-pow2": Story(
        [Request(0, 3, 5), Request(0, 3, 4), Request(0, 2, 3), Request(0, 1, 1)],
        Pool(8, 4),
        Limits(max_model_len=32),
        log=[
            "0+108 | run 0 1 2 | prefill 0:3 1:3 2:2 | live 8 reserved 12 over_estimate 4 round_up 8",
            "108+130 | run 0 1 2 | live 11 reserved 9 over_estimate 4 round_up 8",
            "238+130 | run 0 1 2 | live 14 reserved 6 over_estimate 4 round_up 8",
            "368+121 | run 0 1 3 | prefill 3:1 | live 13 reserved 4 over_estimate 3 round_up 8 free 4",
            "489+110 | run 0 | live 7 reserved 1 over_estimate 3 round_up 5 free 16",
        ],
        finishes=[599, 489, 368, 489],
        near={"orca-oracle": 0, "orca-max": 0},
    ),
    # Ten blocks, carved 8 and 2. Twenty tokens are five blocks, so a chunk of eight, and 1 waits. In slots two times
    # twenty would fit, and so would 7 and 4, which they declare, be it in chunks.
    "orca-max": Story(
        [Request(0, 4, 3, 3), Request(0, 2, 2, 2)],
        Pool(10, 4),
        Limits(max_model_len=20),
        log=[
            "0+104 | run 0 | prefill 0:4 | live 4 reserved 3 over_estimate 13 round_up 12 stranded 8",
            "104+110 | run 0 | live 5 reserved 2 over_estimate 13 round_up 12 stranded 8",
            "214+110 | run 0 | live 6 reserved 1 over_estimate 13 round_up 12 stranded 8",
            "324+102 | run 1 | prefill 1:2 | live 2 reserved 2 over_estimate 16 round_up 12 free 8",
            "426+110 | run 1 | live 3 reserved 1 over_estimate 16 round_up 12 free 8",
        ],
        finishes=[324, 536],
        near={"orca": 0},
    ),
    # Six blocks, carved 4 and 2: 0 needs three for 5 + 4 tokens and takes four, 1 two, and 2 waits. In slots
    # 9 + 5 + 3 would fit into the 24; with the 5 + 15 that 0 declares not even 1 would.
    "orca-oracle": Story(
        [Request(0, 5, 4, 15), Request(0, 3, 2, 2), Request(0, 2, 1, 1)],
        Pool(6, 4),
        Limits(max_model_len=32),
        log=[
            "0+108 | run 0 1 | prefill 0:5 1:3 | live 8 reserved 6 round_up 10",
            "108+120 | run 0 1 | live 10 reserved 4 round_up 10",
            "228+112 | run 0 2 | prefill 2:2 | live 9 reserved 3 round_up 8 free 4",
            "340+110 | run 0 | live 8 reserved 1 round_up 7 free 8",
        ],
        finishes=[450, 228, 340],
        near={"orca": 0},
    ),
}
PAIRS = [(policy, near) for policy, story in STORIES.items() for near in story.near]


@pytest.mark.parametrize("policy", STORIES)
def test_the_oracle_tells_the_log_worked_out_by_hand(policy):
    story = STORIES[policy]
    outcome, _ = serve(policy, *story[:3])
    assert log(outcome) == story.log
    assert finishes(outcome) == story.finishes


@pytest.mark.parametrize("policy", STORIES)
def test_the_engine_tells_what_the_oracle_tells(policy):
    """Under the story's policy and under those near to it, stepping and leaping."""
    story = STORIES[policy]
    case = Case(*story[:3], StoryCost())
    assert log(same(policy, case)) == story.log
    for near in story.near:
        assert log(same(near, case)) != story.log


@pytest.mark.parametrize(("policy", "near"), PAIRS)
def test_the_near_policy_decides_otherwise(policy, near):
    story = STORIES[policy]
    outcome, _ = serve(policy, *story[:3])
    assert first_difference(outcome, near, *story[:3]) == story.near[near]
