"""Measured servers beside their simulation: requests from figures, and constants that come back."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from fragmeter.experiments.runs.output import Report
from fragmeter.reports.page.table import filled
from fragmeter.sim import simulate
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.cost import ServerConstants
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.summary import summary
from paths import ROOT
from tools.servers import page as servers_page
from tools.servers import servers
from tools.servers.__main__ import main
from tools.servers.loads import closed_loop, poisson, shared_prefix
from tools.servers.servers import TARGETS, ServerRun, facts, fit_constants

STAGE = next(fact for fact in facts()["runs"] if fact["name"] == "h100-80gb llama-2-7b roleplay 6/s")
SHORT = STAGE | {"shared_prefix": STAGE["shared_prefix"] | {"requests": 200}}


@pytest.mark.slow
def test_requests_are_those_of_the_figures():
    about = STAGE["shared_prefix"]
    work = shared_prefix("x", **about)
    prompts = about["system_prompts"] * about["users"]
    assert len(work) == 7200 and set(work.output_tokens) == {251}
    lengths = work.prompt_tokens[:prompts]
    assert 770 <= lengths.min() and lengths.max() <= 806 and np.median(lengths) == pytest.approx(784, abs=1)
    assert lengths.mean() == pytest.approx(785.84, abs=1.5)
    run = simulate(ServerRun(SHORT).settings, ServerRun(SHORT).workload)
    # After the first use of each prompt only its last block is computed, of 16 tokens at most.
    assert summary(run)["prefix_cache"]["hit_rate"] == pytest.approx(1 - (50 * 785 + 150 * 8.5) / (200 * 785), abs=0.05)


@pytest.mark.slow
def test_planted_constants_come_back():
    planted = ServerConstants(outside_ms=9.0, step_us=350.0)
    run = ServerRun(SHORT)
    run.measured = run.simulated(planted)
    found = fit_constants([run])
    assert found.step_us == pytest.approx(350, rel=0.03)
    assert found.outside_ms == pytest.approx(9, abs=0.3)


def test_constants_are_not_negative():
    run = ServerRun(SHORT)
    fast = run.simulated(ServerConstants())
    run.measured = {name: value * 0.8 for name, value in fast.items()}
    assert fit_constants([run]) == ServerConstants(0.0, 0.0)


def test_every_run_has_a_source_and_its_latencies():
    assert len(facts()["runs"]) == len({fact["name"] for fact in facts()["runs"]})
    for fact in facts()["runs"]:
        measured = set(fact["measured"])
        assert fact["source"] and "ttft_ms" in measured and measured & {"e2el_ms", "tpot_ms"}


def held_out_runs() -> list[str]:
    return [fact["name"] for fact in facts()["runs"] if fact.get("class") == "held out"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100-80gb qwen3-14b general 2.5/s", "h200 deepseek-v3.2 x8 2k at once"])
def test_runs_without_constants_are_those_of_a_simulation_without_server(name):
    """Evidence and the board have their errors: with step times of a profile, and of a roofline, which assumes gaps between kernels."""
    run = ServerRun(next(fact for fact in facts()["runs"] if fact["name"] == name))
    times = request_times(simulate(only_read(run.settings, run.workload), run.workload))
    found = run.simulated(None)
    assert found["mean_tpot_ms"] == times.tpot_ms.mean() and found["mean_ttft_ms"] == times.ttft_ms.mean()
    assert found["mean_tpot_ms"] < run.simulated(ServerConstants(step_us=1000.0))["mean_tpot_ms"]


def test_the_front_page_has_the_errors_of_the_runs_that_are_held_out():
    """By card and model: TPOT but for gpt-oss on B200, and TTFT but for Mixtral 8x22B, as rounded there."""
    rows = re.findall(r"^\| ([\w.-]+ [\w.-]+) \(\d+\)[^|]*\|[^|]*\| ([\d.]+)%[^|]*\| ([\d.]+)%", WRITTEN, re.MULTILINE)
    tpot, ttft = ({name: float(each[at]) for name, *each in rows} for at in (1, 0))
    assert len(rows) == 15
    apart = round(tpot.pop("b200 gpt-oss-120b")), round(ttft.pop("h100-80gb mixtral-8x22b"))
    ends = [round(end) for errors in (tpot, ttft) for end in (min(errors.values()), max(errors.values()))]
    line = f"TPOT {ends[0]} to {ends[1]} % by model and card, gpt-oss on B200 {apart[0]} %; TTFT {ends[2]} to {ends[3]} %, Mixtral 8x22B {apart[1]} %"
    assert line in (ROOT / "README.md").read_text("utf-8")


def test_runs_are_held_out_and_targets_are_either():
    assert len(held_out_runs()) == 56
    assert {kind for _, _, kind, _ in TARGETS} == {"fitted", "predicted"}


@pytest.mark.slow
def test_nothing_is_fitted_to_a_held_out_run(whole_document):
    """Some have the prefixes of names that constants are fitted to."""
    held_out, found = set(held_out_runs()), whole_document
    assert not held_out & {name for fit in found["constants"].values() for name in fit["fitted_on"]}
    for row in found["rows"]:
        assert (row["run"] in held_out) == (row["kind"] == "held out")
        assert row["kind"] != "held out" or row["constants"] == "nothing"


@pytest.mark.slow
def test_a_held_out_run_of_a_fitted_card_and_model_is_not_fitted_to(monkeypatch):
    """The class decides, not the name."""
    also = SHORT | {"name": "h100-80gb llama-2-7b other 6/s", "class": "held out"}
    monkeypatch.setattr(servers, "facts", lambda: {"notes": [], "runs": [SHORT, also]})
    found = servers.compare_servers(None)
    assert found["constants"]["h100 llama-2-7b"]["fitted_on"] == [SHORT["name"]]
    assert {(row["run"], row["constants"]) for row in found["rows"] if row["kind"] == "held out"} == {
        (also["name"], "nothing")
    }


def test_users_of_a_closed_loop_are_always_busy():
    work = closed_loop("x", 80, 8, (820, 1024), (100, 120))
    assert set(work.arrival_ticks) == {0} and work.users.max_concurrency == 8
    assert 820 <= work.prompt_tokens.min() <= 850 and 995 <= work.prompt_tokens.max() <= 1024
    assert 100 <= work.output_tokens.min() and work.output_tokens.max() <= 120
    assert np.corrcoef(work.prompt_tokens, work.output_tokens)[0, 1] == pytest.approx(0, abs=0.3)
    fact = next(fact for fact in facts()["runs"] if fact["name"] == "h100-80gb gpt-oss-120b x8 1k1k 4 users")
    run = simulate(ServerRun(fact).settings, ServerRun(fact).workload)
    times = request_times(run)
    sent, answered = times.arrival_ticks, times.arrival_ticks + np.rint(times.e2el_ms * 1e9).astype(np.int64)
    under_way = [int(((sent <= at) & (answered > at)).sum()) for at in sent]
    # An answered request and the next one share a tick.
    assert max(under_way) == 4 and min(under_way[3:-4]) >= 3


def test_poisson_requests_have_the_quantiles():
    about = next(fact for fact in facts()["runs"] if "poisson" in fact)["poisson"]
    work = poisson("x", **about)
    for lengths, quantiles in (
        (work.prompt_tokens, about["prompt_tokens"]),
        (work.output_tokens, about["output_tokens"]),
    ):
        # Of 300 lengths the longest is beside the last quantile.
        found = np.percentile(lengths, np.linspace(0, 100, len(quantiles)))
        assert found[:-1] == pytest.approx(quantiles[:-1], rel=0.02)
    mean_gap_s = np.diff(work.arrival_ticks).mean() / 1e12
    assert mean_gap_s == pytest.approx(1 / about["request_rate"], rel=0.15)
    assert np.corrcoef(work.prompt_tokens, work.output_tokens)[0, 1] == pytest.approx(0, abs=0.15)


@pytest.mark.slow
def test_the_command_says_what_is_fitted_and_what_is_predicted(tmp_path, monkeypatch, capsys):
    kept = [SHORT, SHORT | {"name": "h100-80gb other 6/s"}, facts()["runs"][0]]
    monkeypatch.setattr(servers, "facts", lambda: {"notes": [], "runs": kept})
    target = tmp_path / "found.json"
    assert main(["--json", str(target)]) == 0
    found = json.loads(target.read_text())
    kinds = {(row["run"], row["constants"]): row["kind"] for row in found["rows"]}
    assert kinds == {
        (SHORT["name"], "nothing"): "fitted",
        ("h100-80gb other 6/s", "nothing"): "fitted",
        (SHORT["name"], "h100 llama-2-7b"): "fitted",
        ("h100-80gb other 6/s", "h100 llama-2-7b"): "predicted",
    }
    assert found["left_out"] == [kept[2]["name"]]
    for row in found["rows"]:
        assert row["error"] == pytest.approx(row["simulated"] / row["measured"] - 1)


def as_read(document: dict) -> dict:
    """As a reader of JSON sees it."""
    return json.loads(json.dumps(document))


@pytest.fixture(scope="module")
def whole_document():
    """Of all runs that need no file."""
    return as_read(servers.compare_servers(None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "card"),
    [
        ("some_document", "h200 gpt-oss-120b (1)"),
        pytest.param("whole_document", "h200 gpt-oss-120b (4)", marks=pytest.mark.slow),
    ],
)
def test_every_run_and_every_card_is_one_row_of_80_columns(document, card, request, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    found = request.getfixturevalue(document)
    servers.print_servers(found, Report(None))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("\u2026" in line for line in lines)
    first = next(place for place, line in enumerate(lines) if line.startswith("No constants, "))
    for row in found["rows"]:
        if row["constants"] == "nothing" and row["metric"] == "mean_tpot_ms":
            shown = next(line for line in lines[first:] if line.startswith(f"{row['run']}  "))
            assert f"{row['error']:+.1%}" in shown
    means = lines[lines.index("Mean absolute error, and bias, in percent over the runs of a card and model") :]
    assert sum(line.startswith(card) for line in means) == 1


@pytest.fixture(scope="module")
def some_document():
    """Of every fifth run that is held out."""
    kept = [fact for fact in facts()["runs"] if fact["name"] in held_out_runs()[::5]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "facts", lambda: {"notes": [], "runs": kept})
        return as_read(servers.compare_servers(None))


WRITTEN = (ROOT / "docs" / "results" / "servers.md").read_text("utf-8")


@pytest.mark.slow
def test_the_page_of_the_documentation_has_every_run(whole_document):
    text = filled(WRITTEN, servers_page.markdown_parts(whole_document))
    others = {fact["name"]: len(fact.get("published", fact.get("published_errors", {}))) for fact in facts()["runs"]}
    for name in {row["run"]: None for row in whole_document["rows"]}:
        # A line of errors for each set of constants and each other simulator; and the values.
        constants = {row["constants"] for row in whole_document["rows"] if row["run"] == name}
        lines = re.findall(rf"^\| {re.escape(name)} \| ", text, re.MULTILINE)
        assert len(lines) == len(constants) + 1 + others[name], name


def test_the_written_page_has_every_target_and_every_run_that_is_held_out():
    assert WRITTEN.count("| pass |") == 14 and WRITTEN.count("| nothing | held out |") == 56


def held_out_lines(document: dict) -> set[str]:
    return {line for line in servers_page.error_table(document["rows"]) if "| nothing | held out |" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "runs"), [("some_document", 12), pytest.param("whole_document", 56, marks=pytest.mark.slow)]
)
def test_the_page_is_that_of_the_simulations(document, runs, request):
    """Each line of a run on the written page is one of today's simulation; a changed figure makes another line."""
    found = request.getfixturevalue(document)
    lines = held_out_lines(found)
    assert len(lines) == runs and lines <= set(WRITTEN.splitlines())
    changed = as_read(found)
    row = next(row for row in changed["rows"] if row["kind"] == "held out" and row["metric"] == "mean_tpot_ms")
    row["error"] = row["simulated"] * 1.02 / row["measured"] - 1
    assert not held_out_lines(changed) >= lines


def test_a_folder_without_the_requests_is_one_line(tmp_path, capsys):
    assert main(["--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "rtx4090_llama31_8b_requests.csv.gz" in error and error.count("\n") == 1
