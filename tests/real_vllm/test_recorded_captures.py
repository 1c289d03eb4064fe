"""The graphs of drawn settings beside those that vLLM 0.33.0 captured: what ``test_captures`` compares, without vLLM."""

from __future__ import annotations

from collections import Counter

from .captures import drawn, ours
from .record import captures_digest, recorded_captures


def test_the_graphs_are_those_that_vllm_captured():
    recorded, modes = recorded_captures(), Counter()
    for seed, digest in recorded.items():
        found = ours(drawn(int(seed)))
        modes[found[0] if found else "refused"] += 1
        assert captures_digest(found) == digest, drawn(int(seed))
    # Every mode is among them.
    assert (
        len(recorded) == 240
        and len(modes) >= 5
        and min(modes[mode] for mode in ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")) > 40
    )
