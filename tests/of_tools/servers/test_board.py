"""The standing board: classes of runs, medians by class, and the check of the accepted medians."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.experiments.measured.servers_like import stored_rows
from fragmeter.sim.config.settings import settings
from tools.servers import board as board_module
from tools.servers import servers
from tools.servers.__main__ import main
from tools.servers.board import (
    STEP_TIMES_CHANGED,
    accepted,
    accepted_text,
    backend_of,
    beside_peers,
    classes_of,
    standing_of,
    worsened,
)
from tools.servers.loads import random, sharegpt
from tools.servers.servers import board_of, facts, runs_of

MINE = {
    "name": "mine",
    "source": "vllm bench serve here",
    "settings": {"gpu": "h100-80gb", "model": "qwen3-14b", "vllm_release": "0.23"},
    "random": {"requests": 40, "prompt_tokens": 1024, "output_tokens": 16, "request_rate": 4.0},
    "measured": {"ttft_ms": {"mean": 60.0}, "tpot_ms": {"mean": 12.0}},
    "published_errors": {"theirs": {"mean_tpot_ms": 0.5}},
}


def facts_of(runs: list[dict]) -> dict:
    return {"notes": [], "runs": runs}


def test_medians_are_stored_of_all_runs_alone(capsys):
    with pytest.raises(SystemExit):
        main(["--accept-medians"])
    assert "give --runs FOLDER" in capsys.readouterr().err


def test_a_class_is_worse_from_two_points_on():
    before = [{"class": "x", "runs": ["a", "b"], "median_absolute_error": {"tpot": 0.031, "ttft": 0.2}}]

    def now(tpot: float, runs: tuple[str, ...] = ("a", "b")) -> list[dict]:
        return [{"class": "x", "runs": list(runs), "median_absolute_error": {"tpot": tpot, "ttft": 0.1}}]

    assert list(worsened(before, now(0.0509))) == []
    assert list(worsened(before, now(0.051))) == [{"class": "x", "metric": "tpot", "accepted": 0.031, "now": 0.051}]
    # Of other runs nothing was accepted.
    assert list(worsened(before, now(0.9, ("a", "c")))) == []


def test_a_run_is_seen_from_the_day_of_its_first_use_to_the_next_change_of_step_times(monkeypatch):
    monkeypatch.setattr(board_module, "STEP_TIMES_CHANGED", "2026-11-28")
    assert standing_of({"first_used": "2026-11-28"}) == "seen"
    assert standing_of({"first_used": "2026-11-29"}) == standing_of({}) == "unseen"
    assert standing_of({"first_used": "2026-11-29", "fitted": "a constant"}) == "fitted"


def test_every_run_of_the_package_has_the_day_of_its_first_use():
    assert all("2026-11-23" <= fact["first_used"] <= STEP_TIMES_CHANGED for fact in facts()["runs"])


@pytest.mark.parametrize(
    ("card", "name", "backend"),
    [
        ("a100-80gb", "qwen3-14b", "FA2"),
        ("rtx-pro-6000", "qwen3-32b", "FA2"),
        ("h100-80gb", "gpt-oss-120b", "FA3"),
        ("a100-80gb", "gpt-oss-20b", "Triton"),
        ("b200", "gpt-oss-120b", "FlashInfer"),
        ("h200", "deepseek-v3.2", "MLA kernels, sparse"),
        ("h200", "deepseek-v3", "MLA kernels"),
        ("mi300x", "qwen3-14b", "Triton"),
    ],
)
def test_attention_backends_are_those_of_vllm(card, name, backend):
    assert backend_of(settings(policy="vllm-v1", gpu=card, model=name)) == backend


def test_loads_have_the_published_totals():
    burst = sharegpt("x", 1000, 217393, 201605)
    assert len(burst) == 1000 and set(burst.arrival_ticks) == {0}
    assert burst.prompt_tokens.sum() == pytest.approx(217393, rel=0.005)
    assert burst.output_tokens.sum() == pytest.approx(201605, rel=0.005)
    assert np.std(burst.output_tokens) > 0.5 * np.mean(burst.output_tokens)
    at_rate = sharegpt("x", 100, 20000, 20000, 4.0)
    assert set(np.diff(at_rate.arrival_ticks)) == {250_000_000_000}
    apart = random("x", 2000, 1024, 128, 8.0)
    assert np.diff(apart.arrival_ticks).mean() / 1e12 == pytest.approx(1 / 8, rel=0.05)
    assert set(random("x", 5, 10, 3).arrival_ticks) == {0}


def board_rows(folder=None):
    """All runs simulated with the shipped defaults."""
    runs = runs_of(folder)
    return board_of(runs, [row for run in runs for row in servers._rows(run, "nothing", "", run.outcome(None))])


@pytest.fixture(scope="module")
def board():
    return board_rows()


@pytest.mark.slow
def test_no_class_is_worse_than_accepted(board):
    """`fragmeter reproduce servers --runs FOLDER --accept-medians` accepts a state."""
    assert list(worsened(accepted(), classes_of(board))) == []


@pytest.mark.slow
def test_the_stored_errors_are_those_of_todays_simulations(board):
    """Intervals come from them; `make servers` writes them."""
    stored = {row["run"]: row for row in stored_rows()}
    for row in board:
        found = row.as_dict()
        assert {name: stored[row.run][name] for name in ("server", "overload", "standing", "load", "kind")} == {
            name: found[name] for name in ("server", "overload", "standing", "load", "kind")
        }
        assert stored[row.run]["errors"] == pytest.approx(found["errors"], abs=1e-3)


@pytest.mark.slow
def test_a_planted_error_of_all_steps_is_found(board):
    """With each TPOT 4 % further off, classes are worse."""
    for row in board:
        if "tpot" in row.errors:
            row.errors["tpot"] += 0.04 if row.errors["tpot"] > 0 else -0.04
    assert {each["class"] for each in worsened(accepted(), classes_of(board))} >= {
        "h100-80gb FA3 dense, open loop",
        "a100-80gb FA2 dense, at once",
    }


def test_all_runs_of_the_package_are_accepted_in_one_class():
    names = [name for each in accepted() for name in each["runs"]]
    assert sorted(names) == sorted(fact["name"] for fact in facts()["runs"])
    assert json.loads(accepted_text(accepted())) == accepted()


@pytest.mark.slow
def test_peers_and_ours_are_of_the_same_runs(monkeypatch):
    monkeypatch.setattr(servers, "facts", lambda: facts_of([MINE]))
    rows = board_rows()
    found = beside_peers(rows)
    assert [each["our_median"] for each in found] == [abs(rows[-1].errors["tpot"])]


@pytest.mark.slow
def test_the_key_of_a_server_groups_its_runs_for_leaving_one_out():
    """Runs of one server at several rates share the key; other cards and models do not."""
    rows = board_rows_of(
        ["h100-80gb qwen3-14b general 8/s", "h100-80gb qwen3-14b general 2.5/s", "l40s qwen3-14b general 6/s"]
    )
    assert rows[0].server == rows[1].server != rows[2].server


def board_rows_of(names: list[str]):
    with pytest.MonkeyPatch.context() as patch:
        chosen = [fact for name in names for fact in facts()["runs"] if fact["name"] == name]
        patch.setattr(servers, "facts", lambda: facts_of(chosen))
        return board_rows()
