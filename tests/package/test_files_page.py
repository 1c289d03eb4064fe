"""docs/files.md is the table of ``sim.types.signatures``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from fragmeter.sim.types.signatures import SIGNATURES

ROOT = Path(__file__).resolve().parents[2]


def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_files", ROOT / "docs" / "files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_of_the_table():
    docs = page()
    assert docs.PAGE.read_text("utf-8") == docs.page()
    assert sorted(row.what for rows in docs.SECTIONS.values() for row in rows) == sorted(row.what for row in SIGNATURES)
