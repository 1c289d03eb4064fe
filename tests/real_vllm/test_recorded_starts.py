"""The check of sequences and blocks of states beside recorded answers of vLLM 0.33.0: what ``test_starts`` compares, without vLLM."""

from __future__ import annotations

from .record import recorded_starts
from .starts import starts


def test_lines_start_where_vllm_started():
    recorded, refusals = recorded_starts(), 0
    for each in starts():
        refused = each.started().refusal()
        assert (None if refused is None else refused.text) == recorded[each.name], each.name
        refusals += refused is not None
    # One sequence too many, in the modes that capture whole decode steps, for each of five models with states.
    assert len(recorded) == len(list(starts())) and refusals == 5 * 5
