"""docs/limits.md: its table of the profiles' errors is that of the profiles, and its line of evidence is printed."""

from __future__ import annotations

import importlib.util

from fragmeter.experiments.measured.evidence import evidence
from fragmeter.sim.engine.settings import settings
from paths import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text("utf-8")


def test_the_table_is_that_of_the_profiles():
    """Otherwise: python docs/profiles.py --write."""
    spec = importlib.util.spec_from_file_location("docs_profiles", ROOT / "docs" / "profiles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page(PAGE) == PAGE
    assert PAGE.count("| gemm |") == 12


def test_the_line_of_the_example_is_printed():
    line = evidence(settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb")).text()
    assert line in " ".join(PAGE.split())
