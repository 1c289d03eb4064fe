"""The schedulers that chunk prompts, pause or estimate, against the independent oracle: every step and every slot."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from fragmeter.sim.policy import POLICIES
from oracle import SCHEDULERS, Outcome, simulate
from oracle import story as oracle_story
from paths import TESTS
from schedulers import StoryCost, cases, check, log_of, same_requests, served
from strategies import Case

NAMES = sorted(SCHEDULERS.keys() & POLICIES.keys())


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=30)
@given(case=cases)
def test_every_step_and_slot_is_what_the_oracle_says(policy, case):
    check(policy, case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=3000)
@given(case=cases)
def test_every_step_and_slot_is_what_the_oracle_says_at_length(policy, case):
    check(policy, case)


STORY_FILES = ("schedulers", "schedulers_servers", "schedulers_vllm")


def loaded(path: Path) -> ModuleType:
    """A test module, by its file: its stories are run here, too."""
    spec = importlib.util.spec_from_file_location(f"stories_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = [loaded(TESTS / "oracle" / f"test_oracle_{name}.py") for name in STORY_FILES]
STORIES = [
    story
    for module in MODULES
    for name, story in vars(module).items()
    if name.startswith("test_") and inspect.isfunction(story) and not inspect.signature(story).parameters
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_engine_tells_the_stories_that_were_worked_out_by_hand(story, monkeypatch):
    """Each holds a log worked out by hand to the oracle, and names the nearest policy, which decides otherwise. Here
    the engine is held to every run that the story makes, under its own policy and the other one."""

    def both(policy, requests, pool, limits, *costs) -> Outcome:
        outcome = simulate(policy, requests, pool, limits, *costs)
        understated = any(r.max_tokens is not None and r.max_tokens < r.output_tokens for r in requests)
        if not understated:
            max_num_seqs = limits.max_num_seqs or min(len(requests), limits.max_num_batched_tokens)
            limited = replace(limits, max_num_seqs=max_num_seqs)
            run = served(policy, Case(requests, pool, limited, StoryCost()), leap=False)
            assert log_of(run) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
            same_requests(run, outcome)
        return outcome

    monkeypatch.setattr(oracle_story, "simulate", both)
    story()


def test_there_are_stories_of_every_policy():
    source = "".join(map(inspect.getsource, MODULES))
    assert len(STORIES) >= 15 and all(f'serve("{policy}"' in source for policy in NAMES)
