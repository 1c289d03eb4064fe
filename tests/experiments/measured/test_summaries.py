"""A benchmark with and without its lists: a summary has the same figures, and its requests are rebuilt."""

from __future__ import annotations

import json

import pytest

import client_summaries
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.measured import replay as measured_replay
from fragmeter.experiments.measured.knobs import ranked, vary_knobs
from fragmeter.experiments.measured.start import benchmark
from fragmeter.traces import read
from served_bench import CHOSEN, FLAGS, SENT, Server, validate, with_one_that_failed, written

CLIENTS = {"vllm": client_summaries.vllm, "sglang": client_summaries.sglang}
#: Requests that were not answered, by clients that do not count them.
FAILED = {"sglang": 0}
#: Requests/s at which ``SENT`` are sent.
RATE = (len(SENT) - 1) / (SENT[-1].arrival_ticks - SENT[0].arrival_ticks) * 1e12


def both(folder, client: str, server: Server = Server(), **more):
    """A benchmark with its lists, and by the summary that a client writes of it."""
    path, _ = written(folder, server, SENT, **{"request_rate": RATE} | more)
    document = with_one_that_failed(json.loads(path.read_text()))
    path.write_text(json.dumps(document))
    (folder / "summary.json").write_text(CLIENTS[client](document))
    return benchmark(path, None, CHOSEN), benchmark(folder / "summary.json", None, CHOSEN)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_summary_has_the_figures_of_its_lists(client, tmp_path):
    listed, summed = both(tmp_path, client)
    assert (len(summed.trace), summed.trace.left_out.failed) == (len(SENT), FAILED.get(client, 1))
    for name in ("prompt_tokens", "output_tokens"):
        assert getattr(summed.trace, name).mean() == pytest.approx(getattr(listed.trace, name).mean(), rel=0.01)
    sent, arrivals = listed.sent_rate, summed.trace.arrival_ticks
    assert summed.sent_rate == pytest.approx(sent, rel=0.01)
    assert (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]) * 1e12 == pytest.approx(sent, rel=0.01)
    wanted, found = listed.values(), summed.values()
    compared = [name for name in wanted if name.startswith("mean_") or name.endswith("throughput")]
    assert {name: found.get(name) for name in compared} == pytest.approx(
        {name: wanted[name] for name in compared}, rel=0.01
    )


@pytest.mark.parametrize(
    ("limit", "throughput", "ttft"), [(None, 0.02, 0.1), (6, 0.1, 0.35)], ids=["at a rate", "closed loop"]
)
def test_rebuilt_requests_are_served_like_those_of_the_lists(limit, throughput, ttft, tmp_path):
    """All lengths are their mean: queues are shorter, no long answer comes last in a closed loop, and tails are missing."""
    rate = {} if limit is None else {"request_rate": "inf"}
    listed, summed = both(tmp_path, "vllm", max_concurrency=limit, **rate)
    one, other = (measured_replay.replay(each, CHOSEN).values() for each in (listed, summed))
    bounds = {"total_token_throughput": throughput, "mean_ttft_ms": ttft}
    bounds |= {"mean_tpot_ms": 0.03, "mean_itl_ms": 0.03, "mean_e2el_ms": 0.04}
    for name, bound in bounds.items():
        assert other[name] == pytest.approx(one[name], rel=bound), name
    assert other["p99_e2el_ms"] < 0.8 * one["p99_e2el_ms"]


def test_slower_steps_are_named_first(tmp_path):
    _, summed = both(tmp_path, "vllm", Server(scale=1.3))
    first = ranked(list(vary_knobs(summed, CHOSEN, measured_replay.replay(summed, CHOSEN))))[0]
    assert first.name == "step_scale" and first.value == pytest.approx(1.3 * 1.125, rel=0.02)


def test_the_command_says_what_it_assumed_first(tmp_path, capsys):
    both(tmp_path, "vllm")
    out = tmp_path / "out"
    assert (
        validate("--against", tmp_path / "summary.json", *FLAGS, "--out", out, "--json", tmp_path / "all.json") == DONE
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("summary.json: a summary of vllm bench serve without its requests. 80 are rebuilt:")
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["of_summary"] and "scatter" not in data and data["failed"] == 1
    assert {row["metric"] for row in data["rows"]} >= {"mean_ttft_ms", "p99_e2el_ms", "output_throughput"}
    assert status(["report", str(out), "--out", str(tmp_path / "page.html")]) == DONE


@pytest.mark.parametrize("rate", [None, 9.0])
def test_a_closed_loop_is_simulated_as_one_unless_a_rate_is_given(rate, tmp_path, capsys):
    both(tmp_path, "vllm", max_concurrency=4)
    document = json.loads((tmp_path / "summary.json").read_text()) | {"request_rate": "inf"}
    (tmp_path / "summary.json").write_text(json.dumps(document))
    given = [] if rate is None else ["--request-rate", rate]
    flags = ["simulate", "--policy", "vllm-v1", "--trace", tmp_path / "summary.json", *given, *FLAGS]
    assert status([str(flag) for flag in [*flags, "--json", tmp_path / "run.json"]]) == DONE
    arrivals = read(tmp_path / "summary.json")
    assert arrivals.arrival_ticks is None and arrivals.max_concurrency == 4
    found = json.loads((tmp_path / "run.json").read_text())
    assert "closed loop of 4" in found["notes"][0]
    assert (found["mean_batch"] <= 4) == (rate is None)
