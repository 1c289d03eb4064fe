"""Drafts: a server's metrics say how many are accepted, and whether they pay follows from a simulation with as many."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.measured.scrapes import readings_of
from fragmeter.experiments.measured.server_metrics import served_load
from fragmeter.sim.spec.speculative import parse_speculative, with_acceptance

CONFIG = '{"method": "ngram", "num_speculative_tokens": 2}'


def scrape(running: int, drafts: int, *accepted: int) -> str:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines = [f"vllm:num_requests_running {running}", f"vllm:spec_decode_num_drafts_total {drafts}"]
    return "\n".join([*lines, *(f'{name}{{position="{place}"}} {each}' for place, each in enumerate(accepted))]) + "\n"


def test_rates_are_those_between_the_scrapes():
    text = f"100\n{scrape(3, 1000, 900, 100)}110\n{scrape(4, 1400, 1200, 220)}"
    assert served_load(readings_of("m.txt", text)).acceptance_rates == (0.75, 0.3)
    # Of one scrape since the start of the server; none without drafts.
    assert served_load(readings_of("m.txt", scrape(3, 1000, 900, 100))).acceptance_rates == (0.9, 0.1)
    assert served_load(readings_of("m.txt", scrape(3, 0))).acceptance_rates == ()


def test_a_line_keeps_the_rates_that_it_states():
    assert parse_speculative(with_acceptance(CONFIG, (0.75, 0.3))).acceptance_rates == (0.75, 0.3)
    stated = json.dumps(
        json.loads(CONFIG) | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]}
    )
    assert with_acceptance(stated, (0.75, 0.3)) == stated
    # Metrics of another number of drafts are of another line.
    assert with_acceptance(CONFIG, (0.75, 0.3, 0.1)) == CONFIG


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "advised"),
    [([0.1, 0.02, 0.01, 0.0, 0.0], {"speculative-config": None}), ([0.9, 0.8, 0.7, 0.6, 0.5], None)],
)
def test_drafts_are_left_out_where_they_are_rejected(rates, advised, tmp_path, capsys):
    """The line says nothing of acceptance: its rates are those of the metrics."""
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    stated = drafts | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    server = (
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h100-80gb",
        "--max-model-len",
        "16K",
        "--speculative-config",
        json.dumps(stated),
    )
    load = ("--num-prompts", "300", "--input-len", "500", "--output-len", "150", "--request-rate", "30")
    metrics, found = tmp_path / "m.txt", tmp_path / "d.json"
    assert status(["simulate", "--policy", "vllm-v1", *server, *load, "--openmetrics", str(metrics)]) == DONE
    line = f"vllm serve llama-3.1-8b --max-model-len 16K --speculative-config '{json.dumps(drafts)}'"
    asked = ("--gpu", "h100-80gb", "--metrics", str(metrics), "--num-prompts", "300", "--seeds", "2", "--jobs", "1")
    assert status(["diagnose", "--serve", line, *asked, "--json", str(found)]) == DONE
    document = json.loads(found.read_text())
    assert document["advised"] == advised
    assert document["causes"] == ([] if advised is None else ["drafts"])
