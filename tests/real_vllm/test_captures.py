"""The graphs of drawn settings beside those of the installed vLLM."""

from __future__ import annotations

from .captures import drawn, ours
from .graph_captures import theirs
from .record import real_captures, recorded_captures


def test_the_graphs_are_those_of_vllm(record_property):
    seeds = range(600)
    differing = [seed for seed in seeds if ours(drawn(seed)) != theirs(drawn(seed))]
    record_property("compared/captures", [len(seeds), 0, len(differing)])
    assert differing == []


def test_what_is_recorded_is_what_this_release_captures():
    assert real_captures() == recorded_captures()
