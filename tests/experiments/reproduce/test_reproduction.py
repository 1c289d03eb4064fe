"""``fragmeter reproduce`` over figures that are made up: what is kept, what is run again, and how errors add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from fragmeter.experiments.cli import reproduce as verb_reproduce
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.comparison import Payload
from fragmeter.experiments.paper.figures.fig11 import fig11
from fragmeter.experiments.paper.paper import source
from fragmeter.experiments.paper.rows import as_finding
from fragmeter.experiments.reproduce import reproduction
from fragmeter.experiments.reproduce.figures import FIGURES, Figure
from fragmeter.experiments.reproduce.sections import shown
from fragmeter.experiments.reproduce.text import summary_rows
from fragmeter.experiments.runs import kept
from fragmeter.sim.output.folders import MARKER
from fragmeter.sim.types.errors import SettingError
from fragmeter.traces import LengthPairs


def row(published: float | None, simulated: float, metric: str = "batched_requests", kind: str = "predicted") -> dict:
    error = None if published is None else simulated - published
    cells = {"series": "vLLM", "metric": metric, "x": None, "published": published, "how": "label"}
    return cells | {"simulated": simulated, "error": error, "kind": kind}


def document(figure: str, rows: list[dict], **more: object) -> Payload:
    return {"figure": figure, "workload": "made up", "rows": rows, "basis": ["Made up."], **more}


@pytest.fixture
def made(monkeypatch) -> list[tuple[str, tuple[int, ...], bool]]:
    """Two figures in place of all; each entry is one that was run: its name, its seeds, whether it had the pairs."""
    runs: list = []

    def figure(name: str, **more: object) -> Figure:
        def make(bench) -> Payload:
            runs.append((name, bench.source.seeds, bench.source.exact is not None))
            return document(name, [row(2.0, 3.0)])

        return Figure(make, shown(f"Figure {name}"), **more)

    both = {"one": figure("one", seeds=3), "two": figure("two", seeds=None, traced=False)}
    monkeypatch.setattr(reproduction, "FIGURES", both)
    # Pairs are made up, too.
    monkeypatch.setattr(reproduction, "require_papers", lambda **_: None)
    # The page's stories are runs of seconds.
    monkeypatch.setattr(reproduction, "Page", lambda names, head=None: Pages())
    return runs


class Pages(list):
    """Stands for the page: the titles that it was written with."""

    def add(self, _: str, document: Payload, sections: list) -> None:
        self.extend(section.title for section in sections)

    def write(self, path: Path, stopped: bool = False) -> None:
        path.write_text("\n".join([*self, *(["stopped"] if stopped else [])]))


def rerun(wanted: str, trace: Path | None, seeds: int | None, out: Path, alpaca: Path | None = None) -> None:
    traces = reproduction.Traces(trace, alpaca)
    reproduction.reproduce(wanted, traces, seeds, report=Silent(), folder=reproduction.folder_of(out))


class Silent:
    """A report without a reader."""

    def __getattr__(self, _: str):
        return lambda *args, **kwargs: None

    class console:
        @staticmethod
        def print(*args, **kwargs) -> None:
            pass


def test_each_figure_has_its_own_number_of_seeds_unless_some_are_asked_for(made, tmp_path):
    rerun("all", None, None, out=tmp_path / "a")
    rerun("all", None, 2, out=tmp_path / "b")
    assert made == [
        ("one", (0, 1, 2), False), ("two", (0,), False),
        ("one", (0, 1), False), ("two", (0, 1), False),
    ]  # fmt: skip


def test_pairs_go_to_the_figures_that_serve_them(made, tmp_path):
    (tmp_path / "pairs.csv").write_text("input,output\n7,5\n9,3\n")
    rerun("all", tmp_path / "pairs.csv", None, out=tmp_path / "out")
    assert made == [("one", (0,), True), ("two", (0,), False)]


@pytest.mark.slow
def test_the_pairs_of_alpaca_go_to_the_figures_that_serve_them(monkeypatch, tmp_path):
    served = {}

    def figure(name: str, **more: object) -> Figure:
        def make(bench) -> Payload:
            source = bench.source
            served[name] = (
                source.exact is not None,
                source.alpaca.exact is not None,
                source.alpaca.drawn_from,
                source.seeds,
            )
            return document(name, [row(2.0, 3.0)])

        return Figure(make, **more)

    figures = {
        "one": figure("one", alpaca=True),
        "two": figure("two"),
        "three": figure("three", traced=False, alpaca=True),
    }
    monkeypatch.setattr(reproduction, "FIGURES", figures)
    monkeypatch.setattr(reproduction, "require_papers", lambda **_: None)
    (tmp_path / "sharegpt.csv").write_text("input,output\n7,5\n9,3\n")
    (tmp_path / "alpaca.csv").write_text("input,output\n2,4\n")
    rerun("all", tmp_path / "sharegpt.csv", None, tmp_path / "out", tmp_path / "alpaca.csv")
    assert served == {
        "one": (True, True, "alpaca52k_opt", (0,)),
        "two": (True, False, "alpaca52k_opt", (0,)),
        "three": (False, True, "alpaca52k_opt", (0,)),
    }
    for name in ("two", "three"):
        trace, alpaca = (None, tmp_path / "alpaca.csv") if name == "two" else (tmp_path / "sharegpt.csv", None)
        with pytest.raises(SettingError, match=f"{name} does not serve it; leave it out"):
            rerun(name, trace, None, tmp_path / "out", alpaca)


def test_the_exact_lengths_of_alpaca_are_those_of_fig_11(tmp_path):
    """12 and 28 tokens in the mean, with one pair of more than 2,048 tokens that the figure leaves out."""
    path = tmp_path / "alpaca.csv"
    path.write_text("input,output\n10,20\n14,36\n2000,500\n")
    rows = fig11(Bench(source(alpaca_trace=path, seeds=2)))["rows"]
    assert [row["simulated"] for row in rows if row["series"] == "Alpaca"] == [12.0, 28.0]
    assert all(100 < row["simulated"] < 400 for row in rows if row["series"] == "ShareGPT")


def test_what_is_finished_is_not_run_again_but_shown(made, tmp_path):
    rerun("one", None, None, out=tmp_path)
    first = (tmp_path / "one.json").read_bytes()
    rerun("all", None, None, out=tmp_path)
    assert [name for name, *_ in made] == ["one", "two"]
    assert (tmp_path / "one.json").read_bytes() == first
    assert (tmp_path / "reproduction.html").read_text() == "Figure one\nFigure two"


def test_what_follows_from_other_seeds_pairs_or_code_is_run_again(made, tmp_path, monkeypatch):
    (tmp_path / "pairs.csv").write_text("input,output\n7,5\n9,3\n")
    out = tmp_path / "out"
    rerun("one", None, None, out=out)
    rerun("one", None, 2, out=out)
    rerun("one", tmp_path / "pairs.csv", None, out=out)
    (tmp_path / "pairs.csv").write_text("input,output\n7,5\n9,4\n")
    rerun("one", tmp_path / "pairs.csv", None, out=out)
    rerun("one", tmp_path / "pairs.csv", None, out=out)
    assert len(made) == 4
    monkeypatch.setattr(kept, "code_sha256", lambda: "other code")
    rerun("one", tmp_path / "pairs.csv", None, out=out)
    assert len(made) == 5


def test_a_figure_that_draws_nothing_is_the_same_with_any_seeds(made, tmp_path):
    rerun("all", None, 2, out=tmp_path)
    rerun("all", None, 3, out=tmp_path)
    assert [name for name, *_ in made] == ["one", "two", "one"]


def test_a_document_with_a_changed_number_is_made_anew(made, tmp_path):
    rerun("one", None, None, out=tmp_path)
    whole = (tmp_path / "one.json").read_text()
    (tmp_path / "one.json").write_text(whole.replace("3.0", "4.0"))
    rerun("one", None, None, out=tmp_path)
    assert len(made) == 2 and (tmp_path / "one.json").read_text() == whole


@pytest.mark.parametrize("content", ["", "{", "[]", '{"figure": "one"}', "null"])
def test_a_damaged_document_is_made_anew(made, tmp_path, content):
    rerun("one", None, None, out=tmp_path)
    (tmp_path / "one.json").write_text(content)
    rerun("one", None, None, out=tmp_path)
    assert len(made) == 2
    assert json.loads((tmp_path / "one.json").read_text())["rows"] == [row(2.0, 3.0)]


def test_an_interruption_keeps_what_is_finished(made, tmp_path, monkeypatch):
    def interrupted(_) -> Payload:
        raise KeyboardInterrupt

    monkeypatch.setitem(reproduction.FIGURES, "two", Figure(interrupted, seeds=None))
    with pytest.raises(KeyboardInterrupt):
        rerun("all", None, None, out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARKER, "one.json", "reproduction.html"]
    assert (tmp_path / "reproduction.html").read_text() == "Figure one\nstopped"


def test_nothing_is_left_where_no_folder_is_named(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rerun("all", None, None, out=None)
    assert not list(tmp_path.iterdir())


def test_all_as_data_has_every_figure_and_the_summary(made, tmp_path):
    assert status(["reproduce", "all", "--json", str(tmp_path / "all.json")]) == DONE
    found = json.loads((tmp_path / "all.json").read_text())
    assert [one["figure"] for one in found["figures"]] == ["one", "two"]
    assert [(line["figure"], line["worst_error"], line["unit"]) for line in found["summary"]] == [
        ("one", 50.0, "%"), ("two", 50.0, "%"),
    ]  # fmt: skip


class TestTheSummary:
    def test_points_and_percent_are_kept_apart_and_fitted_values_are_no_agreement(self):
        rows = [
            row(10.0, 11.0), row(4.0, 3.0), row(5.0, 9.0, kind="fitted"), row(None, 1.0),
            row(20.0, 21.5, "internal_pct"), row(20.0, 20.5, "internal_pct"),
        ]  # fmt: skip
        findings = [as_finding("A", True), as_finding("B", False)]
        points, percent = summary_rows([document("fig", rows, findings=findings)])
        assert (points["unit"], points["predicted"], points["fitted"]) == ("points", 2, 0)
        assert (points["mean_error"], points["worst_error"]) == (1.0, 1.5)
        assert (percent["unit"], percent["predicted"], percent["fitted"]) == ("%", 2, 1)
        # +10 % and -25 %.
        assert (percent["mean_error"], percent["worst_error"]) == (17.5, -25.0)
        assert percent["worst_at"] == "vLLM, batched requests"
        assert (percent["passed"], percent["findings"]) == (1, 2)

    def test_a_figure_of_fitted_values_alone_has_no_line(self):
        assert summary_rows([document("fig", [row(10.0, 10.0, kind="fitted")])]) == []


def test_the_hash_is_of_names_lengths_and_seeds():
    def pairs(name: str, prompts: list[int], outputs: list[int]) -> LengthPairs:
        return LengthPairs(name, np.array(prompts), np.array(outputs))

    base = pairs("a", [1, 2], [3, 4])
    others = [
        ("fig2", [pairs("a", [1, 2], [3, 5])], (0,)), ("fig2", [pairs("a", [1, 3], [3, 4])], (0,)),
        ("fig2", [pairs("b", [1, 2], [3, 4])], (0,)), ("fig2", [base], (0, 1)), ("fig2", [None], (0,)),
        ("fig2", [base], None), ("fig13a", [base], (0,)), ("fig2", [base, base], (0,)), ("fig2", [None, base], (0,)),
    ]  # fmt: skip
    keys = [kept.key("fig2", [base], (0,)), *(kept.key(*other) for other in others)]
    assert len(set(keys)) == len(keys)
    assert kept.key("fig2", [pairs("a", [1, 2], [3, 4])], (0,)) == keys[0]


def test_the_command_knows_every_figure():
    assert get_args(verb_reproduce.Wanted) == (*FIGURES, "all")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_asked_for_by_name(name, capsys):
    assert status(["reproduce", name, "--seeds", "0"]) == MISTAKE
    assert capsys.readouterr().err.startswith("fragmeter: seeds = 0: ")
