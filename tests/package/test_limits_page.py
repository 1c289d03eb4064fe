"""docs/limits.md: its line of evidence is the one that is printed."""

from __future__ import annotations

from fragmeter.experiments.measured.evidence import evidence
from fragmeter.experiments.measured.servers_like import Served
from fragmeter.sim.config.settings import settings
from paths import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text("utf-8")


def test_the_line_of_the_example_is_printed():
    served = Served("light", "open loop", {"tpot": 8.1, "ttft": 33.2})
    found = evidence(settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb"), served)
    page = " ".join(PAGE.split())
    assert found.text() in page and found.headline() in page
