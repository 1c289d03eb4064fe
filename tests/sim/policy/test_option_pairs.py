"""The tables of docs/policies.md on which options of ``vllm-v1`` combine, beside runs of every pair."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.slow
def test_the_tables_of_option_pairs_are_those_of_runs():
    spec = importlib.util.spec_from_file_location("docs_pairs", _DOCS / "pairs.py")
    docs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = docs
    spec.loader.exec_module(docs)
    page = (_DOCS / "policies.md").read_text("utf-8")
    assert docs.text_between(page) == docs.tables([*docs.pairs()])
