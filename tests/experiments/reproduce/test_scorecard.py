"""Grades of figures: by the worst predicted value, in points or percent; fitted values have none."""

from __future__ import annotations

import re

import pytest

from fragmeter.experiments.cli.app import status
from fragmeter.experiments.paper.rows import accuracy
from fragmeter.experiments.reproduce import scorecard
from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.reproduce.reproduction import Page, head_of
from fragmeter.experiments.reproduce.sections import compared
from fragmeter.experiments.reproduce.text import RULE
from fragmeter.reports.page.page import Section


def row(error: float, metric: str = "crossing_req_per_s", kind: str = "predicted") -> dict:
    """Of a value published as 200."""
    value = {"series": "vLLM", "metric": metric, "x": None, "published": 200.0, "simulated": 200.0 + error}
    return value | {"error": error, "how": "label", "kind": kind}


def document(*rows: dict, figure: str = "fig12a") -> dict:
    return {"figure": figure, "workload": "made up", "rows": list(rows), "findings": [], "basis": []}


@pytest.mark.parametrize(
    ("error", "metric", "grade"),
    [
        (40.0, "crossing_req_per_s", "pass"),
        (-40.1, "crossing_req_per_s", "near"),
        (80.0, "crossing_req_per_s", "near"),
        (80.1, "crossing_req_per_s", "miss"),
        (4.0, "internal_pct", "pass"),
        (-8.0, "internal_pct", "near"),
        (8.1, "internal_pct", "miss"),
    ],
)
def test_the_worst_predicted_value_decides(error, metric, grade):
    rows = [row(1.0, metric), row(error, metric), row(199.0, metric, "fitted")]
    assert scorecard.badge(document(*rows)) == grade


def test_a_card_gives_the_reason_of_its_grade_by_the_same_limits():
    """Its accuracy of all values is a check of its own, and no check can have a better grade than its values."""
    rows = [row(90.0), row(2.0)]
    shown = compared("Fig 12a: x", document(*rows) | {"findings": [accuracy(rows[1:], "A part")]})
    assert (shown.badge, [given for given, _ in shown.checks]) == ("miss", ["miss", "pass"])
    assert shown.checks[0][1] == (
        "All of it: the worst of the 2 predicted values is vLLM, rate at 0.5 s/token: 290.0\u00a0req/s, published 200.0"
        " (+45.0\u00a0%); the mean error is 23.0\u00a0%."
    )
    assert "pass within 20 % of the published value, near within 40 %" in RULE and "4 and 8 points" in RULE


def test_without_predicted_values_there_is_no_grade():
    fitted = document(row(1.0, kind="fitted"))
    assert scorecard.badge(fitted) == scorecard.finding(fitted) == ""
    assert scorecard.first_section({"fig12a": fitted}, {"fig12a": "Fig 12a: x"}) == []


def test_figures_are_in_the_order_of_the_paper():
    names = ["waste", "fig14a", "table1", "fig2", "fig19a", "fig11", "fig18b", "fig12f", "fig12a", "fig1"]
    ordered = ["fig1", "fig2", "table1", "fig11", "fig12a", "fig12f", "fig14a", "fig18b", "fig19a", "waste"]
    assert sorted(names, key=scorecard.paper_order) == ordered
    assert [scorecard.name_of(name) for name in ("fig12a", "table1", "waste")] == ["Fig 12a", "Table 1", "Waste"]


def test_the_answer_counts_the_grades_and_names_the_worst():
    documents = {f"fig12{letter}": document(row(error)) for letter, error in zip("abc", (2.0, 60.0, 200.0))}
    [section] = scorecard.first_section(documents, dict.fromkeys(documents, "title"))
    assert section.text == "Grades of 3 figures: 1 pass, 1 near, 1 miss; the worst is Fig 12c (+100.0\u00a0%)."
    [card] = section.widgets
    assert [score.grade for score in card.rows] == ["pass", "near", "miss"]
    assert [score.dots[0][1] for score in card.rows] == [False, False, True]


def test_each_constant_is_named_once_with_its_value_and_where_it_is_used():
    step = {"name": "step (ms)", "value": 25.7, "on": "Fig 1, ten points"}
    scale = {"name": "step-time scale", "value": 1.2345, "on": "Fig 12a's vLLM crossing"}
    beams = {"name": "survival of a beam", "value": 0.92, "on": "Fig 15, two beams on Alpaca"}
    documents = {
        "fig15": document(row(1.0)) | {"constants": [step, beams]},
        "fig12a": document(row(0.0, kind="fitted"), row(1.0)) | {"constants": [step, scale]},
        "fig12b": document(row(1.0)) | {"constants": [step, scale]},
        "fig12c": document(row(1.0)) | {"constants": [step]},
    }
    known = scorecard.constants(documents)
    assert [tuple(line.values()) for line in known] == [
        ("25.7", "step (ms)", "Fig 1, ten points", "Fig 15, Figs 12a to c"),
        ("1.234", "step-time scale", "Fig 12a's vLLM crossing", "Figs 12a, b"),
        ("0.92", "survival of a beam", "Fig 15, two beams on Alpaca", "Fig 15"),
    ]
    [section] = scorecard.first_section(documents, dict.fromkeys(documents, "title"))
    assert section.widgets[0].notes[0] == (
        "3 constants are fitted: 1 on Fig 1, 1 on Fig 12, 1 on Fig 15. The 1 published value that they were fitted on has"
        " no grade; the other 4 are predicted. Each is named below."
    )
    assert section.fold == "The 3 fitted constants"
    assert section.folded_rows == known


def test_figures_without_requests_list_their_constants():
    used = {name: {each["on"] for each in FIGURES[name].make(None)["constants"]} for name in ("fig1", "fig19a")}
    assert used["fig1"] == {"Fig 1, ten points"} and "Fig 19a, block sizes 8 and 256" in used["fig19a"]


def test_values_that_are_the_published_ones_have_no_worst():
    assert scorecard.finding(document(row(0.0), row(0.0))) == "The 2 predicted values equal the published."
    assert scorecard.finding(document(row(10.0))).startswith("The predicted value is vLLM, rate at 0.5 s/token: 210.0")


@pytest.mark.slow
def test_a_page_of_one_figure_is_titled_by_it_and_answers_for_no_other(tmp_path):
    assert status(["reproduce", "fig3", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "reproduction.html").read_text("utf-8")
    head = " ".join(re.search("<header>(.*?)</header>", text, re.DOTALL)[1].split())
    assert "<h1>Fig 3 of the PagedAttention paper, rerun</h1>" in head
    assert "One figure of Kwon et al., SOSP 2023" in head and "does not answer for the others" in head
    # The claim of the page of all figures.
    assert "Every figure" not in head and "Does it reproduce?" not in text


def test_what_is_no_figure_of_the_paper_has_a_title_of_its_own():
    shown = [name for name, figure in FIGURES.items() if figure.show is not None]
    others = [name for name in shown if not re.match("fig|table", name)]
    assert sorted(others) == ["waste", "waste-today"]
    assert not any(head_of(name)[0].endswith("of the PagedAttention paper, rerun") for name in others)
    assert head_of("fig12a")[0] == "Fig 12a of the PagedAttention paper, rerun"


@pytest.mark.slow
def test_a_page_has_a_place_for_what_is_not_finished(tmp_path):
    page = Page(["waste", "fig12a"])
    page.write(tmp_path / "page.html")
    begun = (tmp_path / "page.html").read_text("utf-8")
    assert begun.index('<h2 id="fig12a">Fig 12a</h2>') < begun.index('<h2 id="waste">Waste</h2>')
    assert "location.reload" in begun and not page
    page.write(tmp_path / "page.html", stopped=True)
    stopped = (tmp_path / "page.html").read_text("utf-8")
    assert "location.reload" not in stopped and "Not finished yet" not in stopped
    assert "Stopped at 0 of 2 figures; the same command goes on from there." in stopped
    for name in ("fig12a", "waste"):
        page.add(name, document(row(1.0), figure=name), [Section(f"{name}: done"), Section("More of it")])
    # The last figure may be there before an error is.
    page.write(tmp_path / "page.html", stopped=True)
    done = (tmp_path / "page.html").read_text("utf-8")
    assert "location.reload" not in done and "Stopped at" not in done
    assert '<h2 id="fig12a">fig12a: done</h2>' in done
