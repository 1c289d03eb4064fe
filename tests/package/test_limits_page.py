"""docs/limits.md: its line of evidence is the one that is printed."""

from __future__ import annotations

from fragmeter.experiments.measured.evidence import evidence
from fragmeter.sim.engine.settings import settings
from paths import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text("utf-8")


def test_the_line_of_the_example_is_printed():
    line = evidence(settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb")).text()
    assert line in " ".join(PAGE.split())
