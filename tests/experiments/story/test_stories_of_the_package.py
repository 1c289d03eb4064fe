"""The stories of the package: their tables and reference counts step by step, and an invariant walk over any story."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fragmeter.experiments.paper.figures.fig3 import fig3
from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.experiments.story.reading import story, story_names
from fragmeter.experiments.story.story import Story, StoryRequest, run_story
from fragmeter.reports.story.frames import frames_of
from fragmeter.sim.config.settings import settings
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.recording.steps import record
from fragmeter.sim.types.errors import UserError
from story_walk import log_line, walk
from textbook import scenes

# Worked out by the rules of docs/policies.md. Blocks that came back last are the first to be taken.
LOGS = {
    ("first-prompt", "vllm-sosp23"): (
        "1: A prefill 7 [0 1] | 0:1 1:1",
        "2: A decode 8 [0 1] | 0:1 1:1",
        "3: A decode 9 [0 1 2] | 0:1 1:1 2:1",
        "4: A decode 10 [0 1 2] | 0:1 1:1 2:1",
        "5: A decode 11 [0 1 2] | 0:1 1:1 2:1",
        "6: A decode 12 [0 1 2] | 0:1 1:1 2:1",
        "7: A decode 13 [0 1 2 3] | 0:1 1:1 2:1 3:1",
        "end: ",
    ),
    ("two-requests", "vllm-sosp23"): (
        "1: A prefill 7 [0 1] | 0:1 1:1",
        "2: A decode 8 [0 1]; B prefill 7 [2 3] | 0:1 1:1 2:1 3:1",
        "3: A decode 9 [0 1 4]; B decode 8 [2 3] | 0:1 1:1 2:1 3:1 4:1",
        "4: A decode 10 [0 1 4]; B decode 9 [2 3 5] | 0:1 1:1 2:1 3:1 4:1 5:1",
        "5: A decode 11 [0 1 4]; B decode 10 [2 3 5] | 0:1 1:1 2:1 3:1 4:1 5:1",
        "6: B decode 11 [2 3 5] | 2:1 3:1 5:1",
        "7: B decode 12 [2 3 5] | 2:1 3:1 5:1",
        "8: B decode 13 [2 3 5 4] | 2:1 3:1 4:1 5:1",
        "end: ",
    ),
    ("samples", "vllm-sosp23"): (
        "1: A1 prefill 7 [0 1] | 0:1 1:1",
        "2a: A1 decode 7 [0 1]; A2 decode 7 [0 1] | 0:2 1:2",
        "2b: A1 decode 8 [0 2]; A2 decode 8 [0 1] | 0:2 1:1 2:1",
        "3: A1 decode 9 [0 2 3]; A2 decode 9 [0 1 4] | 0:2 1:1 2:1 3:1 4:1",
        "4: A1 decode 10 [0 2 3]; A2 decode 10 [0 1 4] | 0:2 1:1 2:1 3:1 4:1",
        "5: A1 decode 11 [0 2 3]; A2 decode 11 [0 1 4] | 0:2 1:1 2:1 3:1 4:1",
        "6: A1 decode 12 [0 2 3]; A2 decode 12 [0 1 4] | 0:2 1:1 2:1 3:1 4:1",
        "end: ",
    ),
    ("beams", "vllm-sosp23"): (
        "1: A1 prefill 7 [0 1] | 0:1 1:1",
        "2a: A1 decode 7 [0 1]; A2 decode 7 [0 1]; A3 decode 7 [0 1] | 0:3 1:3",
        "2b: A1 decode 8 [0 2]; A2 decode 8 [0 3]; A3 decode 8 [0 1] | 0:3 1:1 2:1 3:1",
        "3: A1 decode 9 [0 2 1]; A2 decode 9 [0 3 4]; A3 decode 9 [0 2 5] | 0:3 1:1 2:2 3:1 4:1 5:1",
        "4: A1 decode 10 [0 2 1]; A2 decode 10 [0 3 4]; A3 decode 10 [0 2 5] | 0:3 1:1 2:2 3:1 4:1 5:1",
        "5a: A1 decode 10 [0 2 1]; A2 decode 10 [0 2 1]; A3 decode 10 [0 2 5] | 0:3 1:2 2:3 5:1",
        "5b: A1 decode 11 [0 2 4]; A2 decode 11 [0 2 1]; A3 decode 11 [0 2 5] | 0:3 1:1 2:3 4:1 5:1",
        "6: A1 decode 12 [0 2 4]; A2 decode 12 [0 2 1]; A3 decode 12 [0 2 5] | 0:3 1:1 2:3 4:1 5:1",
        "end: ",
    ),
    ("swap", "vllm-sosp23"): (
        "1: A prefill 6 [0 1]; B prefill 7 [2 3] | 0:1 1:1 2:1 3:1",
        "2: A decode 7 [0 1]; B decode 8 [2 3]; C prefill 6 [4 5] | 0:1 1:1 2:1 3:1 4:1 5:1",
        "3: A decode 8 [0 1]; B decode 9 [2 3 5]; C swapped 6 [0 1] | 0:1 1:1 2:1 3:1 5:1",
        "4: A decode 9 [0 1 4]; B decode 10 [2 3 5]; C swapped 6 [0 1] | 0:1 1:1 2:1 3:1 4:1 5:1",
        "5: B decode 11 [2 3 5]; C decode 7 [4 1] | 1:1 2:1 3:1 4:1 5:1",
        "6: C decode 8 [4 1] | 1:1 4:1",
        "7: C decode 9 [4 1 5] | 1:1 4:1 5:1",
        "8: C decode 10 [4 1 5] | 1:1 4:1 5:1",
        "end: ",
    ),
    ("prefix-cache", "vllm-v1"): (
        "1: A prefill 12 [0 1 2] | 0:1 1:1 2:1",
        "2: A decode 13 [0 1 2 3] | 0:1 1:1 2:1 3:1",
        "3: A decode 14 [0 1 2 3]; B prefill 11 [0 1 4] | 0:2 1:2 2:1 3:1 4:1",
        "4: A decode 15 [0 1 2 3]; B decode 12 [0 1 4] | 0:2 1:2 2:1 3:1 4:1",
        "5: A decode 16 [0 1 2 3]; B decode 13 [0 1 4 5] | 0:2 1:2 2:1 3:1 4:1 5:1",
        "6: A decode 17 [0 1 2 3 6]; B decode 14 [0 1 4 5] | 0:2 1:2 2:1 3:1 4:1 5:1 6:1",
        "7: B decode 15 [0 1 4 5] | 0:1 1:1 4:1 5:1",
        "8: B decode 16 [0 1 4 5] | 0:1 1:1 4:1 5:1",
        "9: C prefill 9 [0 1 6] | 0:1 1:1 6:1",
        "10: C decode 10 [0 1 6] | 0:1 1:1 6:1",
        "end: ",
    ),
    ("static-vs-continuous", "Static batches"): (
        "1: S1 prefill 3 0+10; S2 prefill 2 10+10; S3 prefill 4 20+10; S4 prefill 2 30+10",
        "2: S1 decode 4 0+10; S2 decode 3 10+10; S3 decode 5 20+10; S4 decode 3 30+10; S5 waiting 0",
        "3: S1 decode 5 0+10; S2 decode 4 10+10; S3 finished 5 20+10; S4 decode 4 30+10; S5 waiting 0; S6 waiting 0",
        "4: S1 decode 6 0+10; S2 decode 5 10+10; S3 finished 5 20+10; S4 decode 5 30+10; S5 waiting 0; S6 waiting 0; S7 waiting 0",
        "5: S1 finished 6 0+10; S2 decode 6 10+10; S3 finished 5 20+10; S4 decode 6 30+10; S5 waiting 0; S6 waiting 0; S7 waiting 0",
        "6: S1 finished 6 0+10; S2 decode 7 10+10; S3 finished 5 20+10; S4 finished 6 30+10; S5 waiting 0; S6 waiting 0; S7 waiting 0",
        "7: S5 prefill 3 0+10; S6 prefill 2 10+10; S7 prefill 4 20+10",
        "8: S5 decode 4 0+10; S6 decode 3 10+10; S7 decode 5 20+10",
        "9: S5 decode 5 0+10; S6 decode 4 10+10; S7 finished 5 20+10",
        "10: S5 decode 6 0+10; S6 finished 4 10+10; S7 finished 5 20+10",
        "end: ",
    ),
    ("static-vs-continuous", "Continuous batching"): (
        "1: S1 prefill 3 0+9; S2 prefill 2 9+8; S3 prefill 4 17+10; S4 prefill 2 27+8",
        "2: S1 decode 4 0+9; S2 decode 3 9+8; S3 decode 5 17+10; S4 decode 3 27+8; S5 waiting 0",
        "3: S1 decode 5 0+9; S2 decode 4 9+8; S4 decode 4 27+8; S5 prefill 3 17+9; S6 waiting 0",
        "4: S1 decode 6 0+9; S2 decode 5 9+8; S4 decode 5 27+8; S5 decode 4 17+9; S6 waiting 0; S7 waiting 0",
        "5: S2 decode 6 9+8; S4 decode 6 27+8; S5 decode 5 17+9; S6 prefill 2 0+8; S7 waiting 0",
        "6: S2 decode 7 9+8; S5 decode 6 17+9; S6 decode 3 0+8; S7 prefill 4 26+10",
        "7: S6 decode 4 0+8; S7 decode 5 26+10",
        "end: ",
    ),
    ("orca-chunks", "Orca (Max): chunks"): (
        "1: A prefill 6 0+32; B prefill 6 32+32; C waiting 0; D waiting 0",
        "2: A decode 7 0+32; B decode 7 32+32; C waiting 0; D waiting 0",
        "3: A decode 8 0+32; B decode 8 32+32; C waiting 0; D waiting 0",
        "4: A decode 9 0+32; B decode 9 32+32; C waiting 0; D waiting 0",
        "5: B decode 10 32+32; C prefill 4 0+32; D waiting 0",
        "6: C decode 5 0+32; D prefill 4 32+32",
        "7: C decode 6 0+32; D decode 5 32+32",
        "8: C decode 7 0+32; D decode 6 32+32",
        "end: ",
    ),
    ("orca-chunks", "vLLM: blocks"): (
        "1: A prefill 6 [0 1]; B prefill 6 [2 3]; C prefill 4 [4]; D prefill 4 [5] | 0:1 1:1 2:1 3:1 4:1 5:1",
        "2: A decode 7 [0 1]; B decode 7 [2 3]; C decode 5 [4 6]; D decode 5 [5 7] | 0:1 1:1 2:1 3:1 4:1 5:1 6:1 7:1",
        "3: A decode 8 [0 1]; B decode 8 [2 3]; C decode 6 [4 6]; D decode 6 [5 7] | 0:1 1:1 2:1 3:1 4:1 5:1 6:1 7:1",
        "4: A decode 9 [0 1 7]; B decode 9 [2 3 5]; C decode 7 [4 6] | 0:1 1:1 2:1 3:1 4:1 5:1 6:1 7:1",
        "5: B decode 10 [2 3 5] | 2:1 3:1 5:1",
        "end: ",
    ),
    ("fig3", "vllm-sosp23"): (
        "1: A prefill 7 [0]; B prefill 3 [1]; C prefill 7 [2] | 0:1 1:1 2:1",
        "2: A decode 8 [0]; B decode 4 [1]; C decode 8 [2] | 0:1 1:1 2:1",
        "3: A decode 9 [0]; C decode 9 [2] | 0:1 2:1",
        "end: ",
    ),
}


@pytest.fixture(scope="module")
def runs() -> dict:
    return {(name, run.name): run for name in story_names() for run in run_story(story(name))}


def test_every_story_has_a_log(runs):
    assert list(LOGS) == list(runs)


@pytest.mark.parametrize("key", LOGS, ids=" ".join)
def test_tables_and_references_step_by_step(runs, key):
    assert tuple(map(log_line, runs[key].frames)) == LOGS[key]


@pytest.mark.parametrize("key", LOGS, ids=" ".join)
def test_no_frame_contradicts_itself(runs, key):
    walk(runs[key].frames, story(key[0]).cast(), has_beams=key[0] == "beams")


@pytest.mark.parametrize("name", story_names())
def test_every_word_of_an_output_is_generated(name):
    chosen = story(name)
    cast = chosen.cast()
    for run in run_story(chosen):
        last = {view.name: view.words for frame in run.frames for view in frame.sequences}
        for own, prompt, output in zip(cast.names, cast.prompts, cast.outputs):
            assert last[own][: len(prompt)] == prompt and len(last[own]) == len(prompt) + len(output)
            # A beam may go on from the words of another.
            assert name == "beams" or last[own] == prompt + output


def test_the_seven_sequences_are_those_of_the_textbook_pictures():
    """The same requests and pool as ``textbook``, in words."""
    chosen = story("static-vs-continuous")
    work = chosen.workload()
    for scene, own in zip(scenes(), chosen.runs.values()):
        for column in ("arrival_ticks", "prompt_tokens", "output_tokens", "max_tokens"):
            assert getattr(work, column).tolist() == getattr(scene.workload, column).tolist()
        for field in ("policy", "block_size", "num_gpu_blocks_override", "max_num_seqs", "max_model_len"):
            assert getattr(own, field) == getattr(scene.settings, field)


def test_the_requests_of_fig_3_are_those_of_the_figure(runs):
    """In the step of the paper's picture the blocks hold what the figure's document says, slot by slot."""
    [frame] = [frame for frame in runs["fig3", "vllm-sosp23"].frames if frame.label == "2"]
    _, blocks = fig3()["pools"]
    held = [each for part in blocks["parts"] if part["holder"] for each in [part["contents"]] * part["slots"]]
    assert [cell.bucket for block in frame.blocks for cell in block.cells][: len(held)] == held
    assert len(held) == 48 and frame.buckets == Counter(held) + Counter(free=16)


def test_events_of_a_copy_on_write_a_swap_and_a_dead_beam(runs):
    def events(name: str, label: str) -> tuple[str, ...]:
        return next(frame.events for frame in runs[name, "vllm-sosp23"].frames if frame.label == label)

    assert events("samples", "2a") == (
        "A2 forks from A1: the tables name the blocks of A1.",
        "The step writes to block 1, which more than one table names.",
    )
    assert events("samples", "2b") == (
        "Copy on write: A1 takes block 2, a copy of block 1. References of block 1: 2 before, 1 after.",
        "A1 writes “night” to block 2.",
        "A2 writes “dawn” to block 1.",
    )
    assert events("samples", "end") == ("A is done and releases blocks 0, 2, 3, 1 and 4.",)
    assert events("swap", "3")[0] == "C is swapped out: blocks 4 and 5 to host blocks 0 and 1."
    assert events("swap", "5")[:2] == (
        "A is done and releases blocks 0, 1 and 4.",
        "C is swapped in: host blocks 0 and 1 to blocks 4 and 1.",
    )
    dies = "Beam A3 dies and continues as a copy of A1: its table names the blocks of A1."
    assert events("beams", "3")[0] == dies
    assert "A2 writes “the” to a new block, 3." not in events("beams", "3")


def test_events_of_a_preemption_and_of_reservations(runs):
    small = story("two-requests")
    small = replace(small, runs={"six": replace(small.runs["vllm-sosp23"], num_gpu_blocks_override=6)})
    (run,) = run_story(small)
    walk(run.frames, small.cast())
    events = {frame.label: frame.events for frame in run.frames}
    assert events["5"][0] == "B is preempted and loses blocks 2, 3 and 5. Its tokens are computed again later."
    assert events["6"] == (
        "A is done and releases blocks 0, 1 and 4.",
        "B is admitted again: it takes blocks 4, 1 and 0 and prefills 10 tokens.",
    )
    static = {frame.label: frame.events for frame in runs["static-vs-continuous", "Static batches"].frames}
    assert static["3"][:2] == (
        "S3 has its last token. Its slots are held until the batch ends.",
        "S6 arrives and waits.",
    )
    assert static["7"][0] == "S1, S2, S3 and S4 are done and release 40 slots."


# vllm-real needs vLLM.
SHARING = ("vllm-sosp23", "vllm-v0")
ANY_POLICY = st.sampled_from([name for name in POLICIES if name != "vllm-real"])
WORDS = st.lists(st.sampled_from("one two three four five".split()), min_size=1, max_size=6).map(tuple)


@st.composite
def any_story(draw) -> Story:
    """Requests with few words, so that prompts begin alike, on a pool that is often too small for all of them."""
    # Half of them under the policies that share, swap and search.
    policy = draw(st.sampled_from(SHARING) | ANY_POLICY)
    n = draw(st.integers(1, 3)) if policy in SHARING else 1
    requests, at = [], 0.0
    for place in range(draw(st.integers(1, 4))):
        at += draw(st.sampled_from([0.0, 0.5, 3.0]))
        length = draw(st.integers(1, 6))
        outputs = tuple(tuple(f"{place}{sample}{word}" for word in range(length)) for sample in range(n))
        requests.append(StoryRequest(name="ABCD"[place], arrival_s=at, prompt=draw(WORDS), outputs=outputs))
    size = 1 if policy in ("sglang", "lightllm") else 2
    slots = 64 if policy in ("orca-max", "orca-pow2", "static", "fastertransformer") else draw(st.integers(6, 12)) * 2
    options = {}
    if policy in SHARING:
        options["preemption_mode"] = draw(st.sampled_from(["recompute", "swap"]))
        if n > 1 and draw(st.booleans()):
            options |= {"use_beam_search": True, "beam_survival": 0.5}
    if policy in ("sarathi", "vllm-v1", "fastgen"):
        # Prompts in chunks.
        options["max_num_batched_tokens"] = draw(st.integers(4, 8))
    pool = {"block_size": size, "num_gpu_blocks_override": slots // size, "max_model_len": 32, "max_num_seqs": 4}
    chosen = settings(model="toy-opt", policy=policy, seed=draw(st.integers(0, 99)), **pool, **options)
    return Story("any", "", {"any": chosen}, tuple(requests))


@pytest.mark.slow
@given(any_story())
@hypothesis_settings(max_examples=150, deadline=None)
def test_the_walk_of_any_story(any_story):
    try:
        runs = run_story(any_story)
    except UserError as error:
        assert "needs" in str(error) or "does not read it" in str(error)
        return
    for run in runs:
        walk(run.frames, any_story.cast(), has_beams="use_beam_search" in dict(run.settings.options))


@pytest.mark.parametrize(
    "fault",
    [
        lambda step: replace(step, copies=()),
        lambda step: replace(step, references=tuple(min(count, 1) for count in step.references)),
        lambda step: replace(step, buckets=("free", *step.buckets[1:])),
    ],
    ids=["a copy is missing", "a reference is missing", "a slot is in no table"],
)
def test_the_walk_finds_a_planted_fault(fault):
    chosen = story("samples")
    (own,) = chosen.runs.values()
    _, steps = record(own, chosen.workload(), OneSecondStep())
    walk(frames_of(steps, chosen.cast(), 4), chosen.cast())
    steps[1] = fault(steps[1])
    with pytest.raises((AssertionError, KeyError)):
        walk(frames_of(steps, chosen.cast(), 4), chosen.cast())


def test_equal_words_are_equal_tokens_after_equal_words():
    """B begins as A does, and finds its blocks; C has the words in another order."""
    requests = tuple(
        StoryRequest(name=name, arrival_s=at, prompt=tuple(prompt.split()), output=("x", "y"))
        for name, at, prompt in (("A", 0, "a b c d e"), ("B", 9, "a b c d f"), ("C", 18, "b a c d e"))
    )
    pool = {"block_size": 2, "num_gpu_blocks_override": 20, "max_model_len": 32}
    chosen = Story("t", "", {"v1": settings(model="toy-opt", policy="vllm-v1", **pool)}, requests)
    (run,) = run_story(chosen)
    found = [event for frame in run.frames for event in frame.events if "is admitted" in event]
    assert ["finds 4 tokens in the cache" in event for event in found] == [False, True, False]
    assert np.diff(chosen.workload().content.offsets).tolist() == [7, 7, 7]
