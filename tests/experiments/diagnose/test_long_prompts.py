"""Prompts longer than a step: those behind them wait for whole steps, until a threshold leaves room beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status

LINE = "vllm serve llama-3.1-8b --max-model-len 128K"


def trace(folder, longest: int) -> str:
    """600 requests at 4 a second, one in fifty with a prompt of up to ``longest`` tokens."""
    rng = np.random.default_rng(1)
    prompts = np.where(rng.random(600) < 0.02, rng.integers(longest // 2, longest, 600), rng.integers(100, 900, 600))
    rows = zip(np.cumsum(rng.exponential(0.25, 600)), prompts, rng.integers(50, 300, 600), strict=True)
    path = folder / "requests.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at:.6f},{p},{o}\n" for at, p, o in rows))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("longest", "line", "cause"),
    [
        (100_000, LINE, "long prompts"),
        # Prompts of one step, and a line that has the remedy.
        (8_000, LINE, None),
        (100_000, f"{LINE} --long-prefill-token-threshold 512", None),
    ],
)
def test_long_prompts_are_named_where_others_wait_for_them(longest, line, cause, tmp_path, capsys):
    out = tmp_path / "found.json"
    load = ("--trace", trace(tmp_path, longest), "--num-prompts", "600", "--seeds", "3", "--jobs", "1")
    assert status(["diagnose", "--serve", line, "--gpu", "h100-80gb", *load, "--json", str(out)]) == DONE
    found = json.loads(out.read_text())
    assert found["causes"] == ([] if cause is None else [cause])
    if cause is not None:
        text = " ".join(capsys.readouterr().out.split())
        steps = -(-max(int(row.split(",")[1]) for row in open(load[1]).readlines()[1:]) // 8192)
        assert f"of the prompts are longer than the 8,192 tokens of a step, and the longest fills {steps} steps" in text
        assert list(found["advised"]) == ["long-prefill-token-threshold"]
