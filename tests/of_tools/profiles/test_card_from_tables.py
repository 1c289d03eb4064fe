"""The example of docs/extending.md: a card from tables of its own."""

from __future__ import annotations

import runpy

import pytest

from paths import ROOT


@pytest.mark.slow
def test_the_example_prints_its_tables_and_a_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "extending" / "card_from_tables.py"), run_name="__main__")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "gemm_dtype,m,n,k,latency" and last == "20.2 ms for 16 sequences of 1,000 tokens"
    assert (tmp_path / "profile.json").exists()
