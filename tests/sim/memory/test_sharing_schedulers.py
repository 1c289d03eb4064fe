"""The groups that are admitted, give way and come back: worked out by hand, in blocks of four tokens."""

from __future__ import annotations

import pytest

from fragmeter.sim import settings, simulate, summary
from sharing_walk import requests

SHARING = ("vllm-sosp23", "vllm-v0")


def starts(run) -> list[list[int]]:
    """Decode steps at which each sequence started; a prefill that others wait for counts as the decode step before."""
    residencies = run.log.residencies
    return [
        residencies["start_step"][residencies["index"] == index].tolist()
        for index in range(residencies["index"].max() + 1)
    ]


@pytest.mark.parametrize(("policy", "log"), [("vllm-sosp23", [0, 1, 0, 1, 5, 6]), ("vllm-v0", [-1, 0, -1, 0, 3, 4])])
def test_groups_are_admitted_while_that_leaves_the_watermark(policy, log):
    """Ten blocks, five of them the watermark. Prompts take two each: the first two leave six, a third would leave four.
    It comes when they are done, after four decode steps."""
    chosen = settings(policy=policy, num_gpu_blocks_override=10, block_size=4, watermark=0.5)
    assert starts(simulate(chosen, requests(*[(0, 8, 5, 2)] * 3))) == [[decode_step] for decode_step in log]


@pytest.mark.parametrize("policy", SHARING)
def test_a_group_goes_on_while_a_block_is_free_for_each_of_its_sequences_whether_it_needs_one_or_not(policy):
    """Two samples of five tokens behind a prompt of four: one block is shared, and when they fork each opens one of its
    own, in which all that follows has room. Of five blocks two are left free. Of four one does, so the group gives way
    before each of its other three tokens; the pool could not take it back and two more, so it is computed again."""
    preempted = [
        summary(
            simulate(settings(policy=policy, num_gpu_blocks_override=blocks, block_size=4), requests((0, 4, 5, 2)))
        )["preemptions"]
        for blocks in (5, 4)
    ]
    assert preempted == [{"recompute": 0, "swap": 0}, {"recompute": 3, "swap": 0}]


@pytest.mark.parametrize(("watermark", "back"), [(0.24, 7), (0.31, 17)])
def test_a_group_comes_back_where_its_blocks_and_one_a_sequence_leave_the_watermark(watermark, back):
    """Thirteen blocks; 0 and 1 alone, 2 of two samples (sequences 2 and 3), all behind two blocks of prompt. Step 1: each
    of the four sequences opens a block, three are left. Step 5: 0 and 1 open another, one is left, too few for two
    sequences, so 2 goes to the host with four blocks: five free. Step 6: not six. Step 7: 1 is done and left four, nine
    are free, which is 4 + 2 and a watermark of 3 (0.24), not of 4 (0.31). Then 2 waits until 0 is done, after step 16."""
    chosen = settings(num_gpu_blocks_override=13, block_size=4, watermark=watermark)
    run = simulate(chosen, requests((0, 8, 17, 1), (0, 8, 7, 1), (0, 8, 9, 2)))
    assert starts(run) == [[0], [0], [0, back], [1, back]]
    assert summary(run)["preemptions"] == {"recompute": 0, "swap": 1}


@pytest.mark.parametrize(("policy", "first", "back", "admitted"), [("vllm-sosp23", 0, 17, 17), ("vllm-v0", -1, 16, 16)])
def test_no_request_is_admitted_while_a_group_is_swapped_out(policy, first, back, admitted):
    """As above, with a watermark of 4; a prompt of one block comes about step 12, when eight are free. It waits for the
    group: vllm-sosp23 admits it in the same step, vllm-v0 in the next one, which only prefills."""
    chosen = settings(policy=policy, num_gpu_blocks_override=13, block_size=4, watermark=0.31)
    late = 36 * 10**10
    run = simulate(chosen, requests((0, 8, 17, 1), (0, 8, 7, 1), (0, 8, 9, 2), (late, 4, 2, 1)))
    assert starts(run) == [[first], [first], [first, back], [first + 1, back], [admitted]]
