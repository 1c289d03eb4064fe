"""Pages of large runs are small."""

from __future__ import annotations

import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status

PICTURE = re.compile(r'"source":"data:image/png;base64,([A-Za-z0-9+/=]+)"')


def simulated(folder: Path, policy: str, *load: str) -> str:
    flags = ["--policy", policy, *load, "--record-blocks", "--out", str(folder / policy)]
    assert status(["simulate", *flags]) == DONE
    return str(folder / policy)


def weighed(folder: Path, *runs: str) -> tuple[int, list[int]]:
    """Bytes of the page of some runs, and of its block maps' pictures."""
    page = folder / "report.html"
    assert status(["report", *runs, "--out", str(page)]) == DONE
    return page.stat().st_size, [len(b64decode(picture)) for picture in PICTURE.findall(page.read_text())]


@pytest.mark.slow
def test_a_hundred_thousand_requests_are_one_page_of_less_than_12_mb(tmp_path):
    """And so are two such runs beside each other."""
    load = ("--num-prompts", "100000", "--request-rate", "1.7")
    runs = [simulated(tmp_path, policy, *load) for policy in ("vllm-sosp23", "orca-max")]
    for shown in (runs[:1], runs):
        page, pictures = weighed(tmp_path, *shown)
        assert page < 12e6
        assert len(pictures) == len(shown) and max(pictures) <= 300_000


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [2048, 20_000])
def test_a_full_map_of_short_requests_after_a_long_time_takes_less_than_300_kb(tmp_path, blocks):
    """2,048 rows and 2,000 columns: every block has changed hands hundreds of times, in any order."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(blocks / 80_000, 60_000))
    rows = zip(arrivals, rng.integers(10, 120, 60_000), rng.integers(5, 80, 60_000))
    trace = tmp_path / "short.csv"
    lines = (f"{arrival:.6f},{prompt},{output}" for arrival, prompt, output in rows)
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    run = simulated(tmp_path, "vllm-sosp23", "--trace", str(trace), "--num-gpu-blocks-override", str(blocks))
    page, (picture,) = weighed(tmp_path, run)
    assert picture <= 300_000 and page < 12e6
