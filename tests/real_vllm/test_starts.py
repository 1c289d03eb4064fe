"""The check of sequences and blocks of states beside that of the installed vLLM, with its words."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve import start
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.cuda_graphs import GraphSettings

from . import graphs
from .record import real_starts, recorded_starts
from .starts import starts


def _differing() -> list[str]:
    found = []
    for each in starts():
        refused = each.started().refusal()
        if graphs.answer(each) != (None if refused is None else refused.text):
            found.append(each.name)
    return found


def test_lines_start_where_vllm_starts(record_property):
    differing = _differing()
    record_property("compared/graphs", [len(list(starts())), 0, len(differing)])
    assert differing == []


def test_a_pool_has_the_blocks_of_vllm():
    for each in starts():
        assert graphs.pool(each.launch()).num_blocks == capacity(each.launch()).num_blocks


def test_what_is_recorded_is_what_this_release_says():
    assert real_starts() == recorded_starts()


def test_graphs_that_are_not_read_are_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start, "graph_settings", lambda line, release: GraphSettings())
    # Refusals where vLLM has no graphs of whole decode steps, for each of five models with states.
    assert len(_differing()) == 5 * 5
