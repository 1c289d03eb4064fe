"""``fragmeter reproduce fig15``: its document, its page and its terminal, over runs that are made up."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.paper.figures import fig15
from fragmeter.experiments.paper.rows import passed
from fragmeter.experiments.paper.sharing import CLOSED_FORM, SAVED, Saved
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE

CONTRACT = ["series", "metric", "x", "published", "how", "simulated", "error"]
OWN = "beam search, ShareGPT, a survival of its own"
WAYS = ("parallel sampling", "beam search")
SERIES = [*(f"{way}, {lengths}" for lengths in ("Alpaca", "ShareGPT") for way in WAYS), OWN]
PUBLISHED = fig15.FIG15.published()


def made_up(beyond: float):
    """Stands for ``measure_sharing``: everything is so many points beyond what was published for Alpaca."""

    def measured(cases, sources, subject):
        assert all(case.experiment in sources for case in cases)
        # 1 % of step time moves everything by 0.1, and over short traces so do other seeds.
        values = {
            case: PUBLISHED[_series(case), case.n] + beyond + _longer(case) / 10 + _shifted(case) for case in cases
        }
        return {case: Saved({SAVED: at, CLOSED_FORM: at - 0.5}, {SAVED: at + 1}) for case, at in values.items()}

    return measured


def _longer(case) -> float:
    return 0 if case.step_scale is None else round(100 * (case.step_scale / FITTED_STEP_SCALE - 1), 3)


def _shifted(case) -> float:
    return (0, -0.2, 0.5)[case.seed] if case.experiment.duration_s < 300 else 0


def _series(case) -> str:
    return fig15.SAMPLES_ALPACA if case.survival is None else fig15.BEAMS_ALPACA


def document(monkeypatch, tmp_path, beyond: float = 0.25, *more: str) -> dict:
    monkeypatch.setattr(fig15, "measure_sharing", made_up(beyond))
    target = tmp_path / "fig15.json"
    assert status(["reproduce", "fig15", "--json", str(target), *more]) == DONE
    return json.loads(target.read_text("utf-8"))


def test_every_value_is_there_and_two_beams_are_the_ones_fitted(monkeypatch, tmp_path):
    content = document(monkeypatch, tmp_path)
    assert content["figure"] == "fig15"
    rows = {(row["series"], row["x"]): row for row in content["rows"]}
    assert [*rows] == [(series, n) for series in (*SERIES, "closed form, ShareGPT") for n in (2, 4, 6)]
    assert all(
        list(row) == [*CONTRACT, "kind", "minimum", "maximum", "step_1pct", "over_time"] for row in rows.values()
    )
    assert [key for key, row in rows.items() if row["kind"] == "fitted"] == [("beam search, Alpaca", 2), (OWN, 2)]
    assert {row["step_1pct"] for row in rows.values()} == {0.1}
    assert all(row["minimum"] == pytest.approx(row["simulated"] - 0.2) for row in rows.values())
    assert all(row["maximum"] == pytest.approx(row["simulated"] + 0.5) for row in rows.values())
    six = rows["parallel sampling, Alpaca", 6]
    assert (six["published"], six["how"], six["simulated"], six["error"]) == (9.79, "label", 10.04, 0.25)
    middle = rows["beam search, ShareGPT", 4]
    assert (middle["published"], middle["how"], middle["error"]) == (None, None, None)
    assert rows["beam search, ShareGPT", 6]["how"] == "text"
    closed = rows["closed form, ShareGPT", 2]
    assert (closed["how"], closed["error"]) == ("formula", 0.5)


def test_the_values_of_beams_are_reported_at_every_survival(monkeypatch, tmp_path):
    survivals = [(row["x"], row["survival"]) for row in document(monkeypatch, tmp_path)["sensitivity"]["rows"]]
    assert survivals == [(n, survival) for n in (2, 4, 6) for survival in (0.9, 0.91, 0.92, 0.93, 0.94, 0.95)]


@pytest.mark.parametrize(("beyond", "grade"), [(0.25, "pass"), (4.5, "near"), (-8.1, "miss")])
def test_the_accuracy_of_each_set_has_a_grade(monkeypatch, tmp_path, beyond, grade):
    found = document(monkeypatch, tmp_path, beyond)["findings"]
    # The closed form is of the simulated requests, whatever is published.
    assert [finding["grade"] for finding in found[:3]] == [grade, grade, "pass"]
    assert f": worst {beyond:+.2f} points (parallel sampling, Alpaca, " in found[0]["finding"]
    assert found[1]["finding"].endswith(", of 2 predicted values.")
    # Values of Alpaca are no values of ShareGPT.
    assert not passed(found[3]) and "the paper's text gives 16.2 to 30.5 %" in found[3]["finding"]


@pytest.mark.slow
def test_the_folder_holds_the_document_and_the_page(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    content = document(monkeypatch, tmp_path, 0.25, "--out", str(out))
    assert json.loads((out / "fig15.json").read_text("utf-8")) == content
    page = (out / "reproduction.html").read_text("utf-8")
    assert "Fig 15: memory saved by sharing" in page and "Memory saved by sharing, published and simulated" in page
    assert f"Page: {out / 'reproduction.html'}" in capsys.readouterr().out


def test_the_terminal_shows_both_tables_uncut(monkeypatch, tmp_path, capsys):
    document(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "fig15: mean memory saved, by beam survival q" in printed
    finding = "Pass: Samples save what the paper printed for Alpaca: worst +0.25 points (parallel sampling, Alpaca, "
    assert finding in " ".join(printed.split())


def test_several_seeds_give_means_with_their_range(monkeypatch, tmp_path, capsys):
    rows = document(monkeypatch, tmp_path, 0.25, "--seeds", "2")["rows"]
    assert all(row["minimum"] == row["maximum"] == row["simulated"] for row in rows)
    printed = capsys.readouterr().out
    assert "…" not in printed and "20 req/s, 900 s, mean of seeds 0 to 1" in " ".join(printed.split())


def test_no_seed_is_a_mistake(capsys):
    assert status(["reproduce", "fig15", "--seeds", "0"]) == MISTAKE
    assert capsys.readouterr().err == "fragmeter: seeds = 0: must be at least 1\n"
