"""docs/results/reproduction.md: what writes it, and that no figure is missing in it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.reproduce.scorecard import paper_order
from fragmeter.experiments.reproduce.text import summary_rows
from fragmeter.reports.style.labels import comparison_numbers
from paths import ROOT

IN_ALL = [name for name, figure in FIGURES.items() if figure.in_all]


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return loaded("reproduction")


@pytest.fixture(scope="module")
def front():
    return loaded("facts")


def made_up(folder: Path, simulated: float) -> Path:
    folder.mkdir()
    for name in IN_ALL:
        cells = {"series": "vLLM|x", "metric": "time_ms", "x": 8, "published": 10.0, "how": "digitised"}
        row = cells | {"simulated": simulated, "error": simulated - 10, "kind": "predicted", "step_1pct": 0.5}
        document = {"figure": name, "workload": "made up", "rows": [row], "basis": [f"Basis of {name}."]}
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_every_figure_has_its_table_and_its_words(script, tmp_path):
    target = tmp_path / "reproduction.md"
    script.main(str(made_up(tmp_path / "drawn", 12.0)), str(target))
    text = target.read_text()
    for name in IN_ALL:
        assert f"\n## {script.name_of(name)}\n" in text and f"- Basis of {name}." in text
    line = "| vLLM\\|x | time | 8 | 10.00 | digitised | 12.00 |  | 4.2% | +20.0% | predicted |"
    assert text.count(line) == len(IN_ALL)
    assert "exact pairs" not in text


def test_exact_pairs_stand_beside_the_drawn_ones_where_they_are_served(script, tmp_path):
    target = tmp_path / "reproduction.md"
    drawn, exact = made_up(tmp_path / "drawn", 12.0), made_up(tmp_path / "exact", 9.0)
    script.main(str(drawn), str(target), str(exact))
    text = target.read_text()
    served = sum(FIGURES[name].traced or FIGURES[name].alpaca for name in IN_ALL)
    assert text.count("| +20.0% | 9.00 |  | -10.0% | predicted |") == served
    assert text.count("4.2% | +20.0% | predicted |") == len(IN_ALL) - served


def test_what_was_not_rerun_is_named(script, tmp_path):
    folder, target = made_up(tmp_path / "drawn", 12.0), tmp_path / "reproduction.md"
    script.main(str(folder), str(target))
    assert "Not rerun" not in target.read_text()
    (folder / "table1.json").unlink()
    script.main(str(folder), str(target))
    text = target.read_text()
    assert "\nNot rerun for this page: Table 1.\n" in text and "\n## Table 1\n" not in text


def test_a_folder_without_figures_is_refused(script, tmp_path):
    with pytest.raises(SystemExit) as ended:
        script.main(str(tmp_path), str(tmp_path / "reproduction.md"))
    assert str(ended.value) == f"{tmp_path}: has no figures; run fragmeter reproduce all --out {tmp_path}"
    assert not (tmp_path / "reproduction.md").exists()


@pytest.mark.parametrize(("name", "expected"), [("fig12a", "Fig 12a"), ("table1", "Table 1"), ("waste", "Waste")])
def test_headings(script, name, expected):
    assert script.name_of(name) == expected


def test_the_document_has_figures_that_there_are_in_their_order(script):
    text = (ROOT / "docs" / "results" / "reproduction.md").read_text("utf-8")
    known = [script.name_of(name) for name in sorted(IN_ALL, key=paper_order)]
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    figures = [heading for heading in headings if not heading.startswith(("Accuracy", "Fitted"))]
    assert figures == [heading for heading in known if heading in figures] and len(figures) > 10


def cells_of(text: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    lines = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_pages_agree_on_how_many_constants_are_fitted_and_values_predicted():
    """28 and 179 in all; 16 and 116 of what depends on step times and beams; 8 of Figs 12 and 14; 30 values fitted on."""
    rates = " ".join((ROOT / "docs" / "results" / "rates.md").read_text("utf-8").split())
    text = (ROOT / "docs" / "results" / "reproduction.md").read_text("utf-8")
    constants = cells_of(text, "Fitted constants")
    accuracy = [line for line in cells_of(text, "Accuracy against the paper") if line[0] != "waste"]
    predicted, fitted = ({line[0]: int(line[at]) for line in accuracy} for at in (1, 2))
    without_steps = ("table1", "fig1", "fig3", "fig11", "fig19a")
    of_steps = [line for line in constants if not line[2].startswith(("Fig 1,", "Fig 19a"))]
    dependent = sum(count for name, count in predicted.items() if name not in without_steps)
    assert (len(constants), sum(predicted.values()), sum(fitted.values())) == (28, 179, 30)
    assert (len(of_steps), dependent) == (16, 116)
    assert f"{len(constants)} constants are fitted" in text
    assert "the 8 constants of Figs 12 and 14" in rates and "30 fitted values" in rates
    eight = [line for line in of_steps if re.match("Fig 1[24]", line[2]) or line[0] == "1.07"]
    assert len(eight) == 8


def test_a_finding_that_fails_on_drawn_lengths_stands_beside_one_that_passes(script, tmp_path):
    target = tmp_path / "reproduction.md"
    drawn, exact = made_up(tmp_path / "drawn", 12.0), made_up(tmp_path / "exact", 9.0)
    for folder, passes in ((drawn, False), (exact, True)):
        path = folder / "fig19b.json"
        finding = {"finding": f"A limit is {'met' if passes else 'missed'}.", "passes": passes}
        both = {"finding": "Both alike.", "passes": True}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"findings": [finding, both]}))
    script.main(str(drawn), str(target), str(exact))
    section = target.read_text().partition("\n## Fig 19b\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("- ")] == [
        "- Drawn lengths: Fail: A limit is missed.",
        "- Exact pairs: Pass: A limit is met.",
        "- Pass: Both alike.",
        "- Basis of fig19b.",
    ]


def test_the_summary_counts_what_the_paper_published_and_no_formula():
    cells = {"series": "a", "metric": "memory_saved_pct", "x": 2, "published": 10.0, "simulated": 12.0, "error": 2.0}
    rows = [cells | {"how": how, "kind": kind} for how, kind in (("label", "predicted"), ("text", "fitted"))]
    formula = cells | {"how": "formula", "kind": "predicted", "error": 0.0}
    [row] = summary_rows([{"figure": "fig15", "rows": [*rows, formula]}])
    assert (row["predicted"], row["fitted"], row["mean_error"]) == (1, 1, 2.0)


def test_errors_of_the_page_are_percent_or_points():
    cells = {"series": "a", "x": None, "how": "label", "kind": "predicted"}
    rows = [
        cells | {"metric": "time_ms", "published": 0.2, "simulated": 0.203, "error": 0.003, "step_1pct": 0.00203},
        cells | {"metric": "time_ms", "published": 0.2, "simulated": 0.2, "error": -0.00001, "step_1pct": 0.0},
        cells | {"metric": "a_pct", "published": 50.0, "simulated": 47.0, "error": -3.0, "step_1pct": 0.4},
    ]
    numbers = comparison_numbers(rows)
    places = [numbers["columns"].index(name) for name in ("Per 1 % of step", "Error")]
    cells = [[line[place] for place in places] for line in numbers["rows"]]
    assert cells == [["1.0%", "+1.5%"], ["0.0%", "+0.0%"], ["0.4", "-3.0"]]


class TestTheFrontPage:
    """README.md says what the page of the reproduction says, the misses first."""

    TEXT = (ROOT / "docs" / "results" / "reproduction.md").read_text("utf-8")

    @pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
    def test_it_has_the_grades_of_the_document(self, page, front):
        written = (ROOT / page).read_text("utf-8")
        assert front.with_grades(page, written, self.TEXT) == written

    def test_every_miss_is_a_row_with_its_worst_value(self):
        table = cells_of(self.TEXT, "Accuracy against the paper")
        misses = [(f"Fig {line[0].removeprefix('fig')}", line[5], line[4]) for line in table if line[6] == "miss"]
        rows = cells_of((ROOT / "README.md").read_text("utf-8"), "Accuracy")
        assert len(misses) >= 4 and [tuple(row) for row in rows[: len(misses)]] == misses

    def test_what_passes_now_is_no_miss_and_a_conclusion_that_comes_out_is_not_denied(self, front):
        one = re.search(r"^\| fig14f .*$", self.TEXT, re.MULTILINE)[0]
        mended = self.TEXT.replace(one, one.replace("| miss |", "| pass |"))
        mended = mended.replace("Fail: Recompute or swap", "Pass: Recompute or swap")
        before, after = (front.block("README.md", text) for text in (self.TEXT, mended))
        assert "| Fig 14f |" in before and "Fig 19b does not come out" in before and "at all 9 block sizes" in before
        assert "| Fig 14f |" not in after and "does not come out" not in after and "| Fig 19b |" in after
        passed = [int(re.search(r"(\d+) pass", text)[1]) for text in (before, after)]
        assert passed[1] == passed[0] + 1
