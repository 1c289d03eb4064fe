"""``reproduce --markdown``: the values of the JSON of the same run, and a refusal where there is none."""

from __future__ import annotations

import json

import pytest

from cli_runs import run_here
from fragmeter.experiments.reproduce.markdown import document
from fragmeter.experiments.reproduce.text import SUMMARY_NOTE
from fragmeter.reports.style.labels import number


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("markdown")
    files = {name: folder / f"fig1.{name}" for name in ("json", "markdown")}
    done = run_here("reproduce", "fig1", *(word for name, path in files.items() for word in (f"--{name}", path)))
    assert done.returncode == 0, done.stderr
    return json.loads(files["json"].read_text()), files["markdown"].read_text()


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_value_of_the_data_has_a_line(made):
    data, text = made
    head, line, *rows = rows_of(text)
    assert set(line) == {"---"} and len(rows) == len(data["rows"])
    for row, cells in zip(data["rows"], rows, strict=True):
        found = dict(zip(head, cells, strict=True))
        assert found["series"] == row["series"]
        assert found["published"] == number(row["metric"], row["published"])
        assert found["simulated"] == number(row["metric"], row["simulated"])
    assert all(f"- {sentence}" in text.splitlines() for sentence in data["basis"])


def test_several_figures_have_a_summary(made):
    data, text = made
    assert SUMMARY_NOTE not in text
    several = document("Two", "Lead.", {"fig1": data, "fig1 again": data})
    assert SUMMARY_NOTE in several and several.count("- fig1") == text.count("- fig1")


def test_on_standard_output_nothing_else_is_printed(made):
    assert run_here("reproduce", "fig1", "--markdown", "-").stdout == made[1]
