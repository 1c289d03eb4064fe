"""The table of residencies: which sequence computes when, held to an engine that is watched step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import settings_of, workload_of
from fragmeter.sim import Settings, Workload, simulate
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory.accounting.ledger import STALLED
from fragmeter.sim.metrics.residencies import residencies_table
from fragmeter.sim.metrics.result import requests_table
from strategies import Case, crowded_cases, medium_cases


class Watched(Observer):
    """Writes down the running sequences, and the chunked prefills, of every step."""

    every_step = True

    def __init__(self):
        self.seen: list[tuple[int, set[int], set[int]]] = []

    def run_started(self, engine, refused):
        self.state = engine.state

    def step_started(self, now, ticks, leap, plan):
        running = {sequence.index for sequence in self.state.running}
        self.seen.append((now, running, {sequence.index for sequence in self.state.prefilling}))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1", "fastgen", "sarathi", "orca-max", "static"])
@hypothesis_settings(max_examples=5)
@given(case=st.one_of(crowded_cases(), medium_cases()))
def test_residencies_are_what_a_watched_engine_does(policy, case: Case):
    settings = settings_of(policy, case.pool, case.limits)
    workload = workload_of(case.requests, case.limits.max_model_len)
    watched = Watched()
    simulate(settings, workload, case.cost, observers=[watched])
    run = simulate(settings, workload, case.cost)
    residencies = residencies_table(run)
    requests = requests_table(run)
    undisturbed = set(requests.index[(requests["recomputed"] + requests["swapped"]).fillna(0) == 0])
    # Of steps that begin together all but the last take no time.
    last = {now: sides for now, *sides in watched.seen}
    for now, (running, prefilling) in last.items():
        there = residencies[(residencies["start_ticks"] <= now) & (now < residencies["end_ticks"])]["sequence"]
        assert running <= set(there) <= running | prefilling
        # A sequence in its prefill is on its way to a residency, unless it is preempted before.
        assert prefilling & undisturbed <= set(there)
    for request, own in residencies.groupby("request"):
        assert own["start_ticks"].min() >= requests["first_scheduled_ticks"][request]
        assert own["first_token_ticks"].min() == requests["first_token_ticks"][request]
        assert own["end_ticks"].max() == requests["finish_ticks"][request]
        assert own["ended"].tolist()[-1] == "finished" and (own["ended"] == "finished").sum() == 1
        assert own["begun"].iloc[0] == "prefilled" and "prefilled" not in own["begun"].tolist()[1:]
        for ended, begun in zip(own["ended"], own["begun"].iloc[1:]):
            # A stalled sequence may be flushed later.
            known = {"preempted": {"recomputed"}, "swapped": {"resumed"}, "stalled": {"resumed", "recomputed"}}
            assert begun in known[ended]
    evicted = residencies[residencies["ended"].isin(["preempted", "swapped"])].groupby("request").size()
    preempted = requests["recomputed"] + requests["swapped"]
    assert all(count <= preempted[request] for request, count in evicted.items())


@pytest.mark.parametrize("policy", ["vllm-v1", "fastgen", "sarathi"])
@hypothesis_settings(max_examples=20)
@given(case=crowded_cases())
def test_a_residency_begins_with_its_first_chunk_that_was_not_lost(policy, case: Case):
    """Chunk by chunk, in Python."""
    run = simulate(
        settings_of(policy, case.pool, case.limits), workload_of(case.requests, case.limits.max_model_len), case.cost
    )
    log = run.log
    starts, sequences = log.residencies["start_ticks"].tolist(), log.residencies["index"].tolist()
    evictions = [
        (sequence, ticks)
        for sequence, ticks, swapped in zip(*(log.evictions[name].tolist() for name in ("index", "ticks", "swapped")))
        if swapped != STALLED
    ]
    begins = [*starts]
    for sequence, at in zip(log.chunks["index"].tolist(), log.chunks["start_ticks"].tolist()):
        later = [place for place, start in enumerate(starts) if sequences[place] == sequence and start >= at]
        if later and not any(of == sequence and at < ticks <= starts[later[0]] for of, ticks in evictions):
            begins[later[0]] = min(begins[later[0]], at)
    assert residencies_table(run)["start_ticks"].tolist() == begins


def test_a_residency_begins_with_the_first_chunk_of_its_prompt():
    """Ten tokens in chunks of four: the residency begins with the first, and its token comes after the third."""
    settings = Settings(
        policy="vllm-v1",
        model="toy-opt",
        block_size=4,
        num_gpu_blocks_override=20,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=4,
        outside_ms=0,
    )
    run = simulate(settings, Workload("one", np.array([7]), np.array([10]), np.array([3])))
    chunks = run.log.chunks["start_ticks"].tolist()
    assert len(chunks) == 2 and chunks[0] == 7
    (residency,) = residencies_table(run).itertuples()
    assert residency.start_ticks == 7 and residency.first_token_ticks > chunks[1]
    assert (residency.begun, residency.ended) == ("prefilled", "finished")
