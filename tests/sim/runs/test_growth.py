"""What the running sequences will take, and what they took, against counting step by step."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runs import serve
from fragmeter.sim.memory import PagedMemory
from fragmeter.sim.runs.growth import growth_moments
from fragmeter.sim.runs.run_log import RunLog
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from strategies import crowded_cases, long_cases


def taken_by_step(run_log: RunLog) -> list[int]:
    """Blocks taken in every step by sequences that ran in the one before."""
    taken = [0] * run_log.num_steps
    residencies = run_log.residencies
    for start, tokens, end in zip(
        residencies["start_step"].tolist(), residencies["tokens"].tolist(), run_log.residency_end.tolist()
    ):
        for decode_step in range(start + 1, end):
            # The slots held before are full blocks.
            taken[decode_step] += (tokens + decode_step - start - 1) % run_log.block_size == 0
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("chunk_steps", [1, 3, 64, 1 << 18])
@settings(max_examples=60)
@given(case=st.one_of(crowded_cases(), long_cases()), leap=st.booleans())
def test_growth_moments_are_what_counting_gives(chunk_steps, case, leap):
    """However many steps are laid out at a time."""
    run_log = serve("vllm-sosp23", case, leap=leap).log
    with mock.patch("fragmeter.sim.runs.growth._CHUNK_STEPS", chunk_steps):
        moments = [column.tolist() for column in growth_moments(run_log)]
    taken, expected = taken_by_step(run_log), ([], [], [])
    for decode_step, steps in zip(run_log.row_step.tolist(), run_log.rows["steps"].tolist()):
        for power, column in enumerate(expected):
            column.append(sum(taken[decode_step + j] * j**power for j in range(1, steps)))
    assert moments == list(expected)


def growing(prompts: list[int], block_size: int) -> tuple[State, PagedMemory]:
    """A replica in which sequences of these lengths are admitted in step 0."""
    state, memory = State(), PagedMemory(10_000, block_size)
    sequences = [Sequence(index, prompt, 1_000, 1_000) for index, prompt in enumerate(prompts)]
    for sequence in sequences:
        memory.admit(sequence, 0)
        state.start(sequence, 0)
    return state, memory


@pytest.mark.slow
@settings(max_examples=300)
@given(
    prompts=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    block_size=st.integers(1, 20),
    decode_step=st.integers(1, 60),
    steps=st.integers(0, 90),
    blocks=st.integers(0, 60),
)
def test_the_histogram_tells_the_need_of_any_span(prompts, block_size, decode_step, steps, blocks):
    state, memory = growing(prompts, block_size)
    memory.advance(state, 1)
    assert memory.free == 10_000 - sum(-(-prompt // block_size) for prompt in prompts)

    def held(at: int) -> int:
        return sum(-(-(prompt + at) // block_size) for prompt in prompts)

    assert memory.phases.total(decode_step, steps) == held(decode_step + steps - 1) - held(decode_step - 1)
    within = memory.phases.steps_within(decode_step, blocks)
    assert (
        held(decode_step + within - 1) - held(decode_step - 1)
        <= blocks
        < held(decode_step + within) - held(decode_step - 1)
    )
