"""``reproduce --trace`` and ``--alpaca-trace`` take the paper's pairs alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import MISTAKE, status
from fragmeter.experiments.paper.paper import require_papers
from fragmeter.sim.types.errors import UserError

ROWS = {"pairs": "input,output\n7,5\n9,3\n", "timed": "arrival_s,prompt_tokens,output_tokens\n0,7,5\n"}


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("flag", "name"), [("--trace", "ShareGPT"), ("--alpaca-trace", "Alpaca")])
def test_other_pairs_are_refused_before_anything_is_run(flag, name, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(text)
    assert status(["reproduce", "fig11", flag, "mine.csv", "--out", "out"]) == MISTAKE
    field = flag.removeprefix("--").replace("-", "_")
    remedy = f"not the paper's pairs of {name}; simulate and sweep take a trace of your own"
    assert capsys.readouterr() == ("", f"fragmeter: {field} = 'mine.csv': {remedy}\n")
    assert not Path("out").exists()


@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
def test_the_papers_pairs_are_recognised_whatever_the_file_is_called(tmp_path):
    folder = Path(os.environ["FRAGMETER_TRACES"])
    sharegpt, alpaca = (folder / f"sosp23_{name}_opt.csv.gz" for name in ("sharegpt", "alpaca"))
    (tmp_path / "mine.csv.gz").write_bytes(sharegpt.read_bytes())
    require_papers(trace=tmp_path / "mine.csv.gz", alpaca_trace=alpaca)
    with pytest.raises(UserError, match="pairs of ShareGPT"):
        require_papers(trace=alpaca)
