"""A name of a category of the KV pool has one value and a definition, in whatever the program shows of a run."""

from __future__ import annotations

import io
import re
from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console

import fragmeter as fm
from cli_runs import run_here
from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.comparison import compare
from fragmeter.experiments.paper.figures.waste import waste_table
from fragmeter.experiments.paper.fit import fit
from fragmeter.experiments.paper.paper import FIG2, source
from fragmeter.experiments.reproduce import sections
from fragmeter.experiments.reproduce.scorecard import badge, first_section
from fragmeter.experiments.reproduce.text import for_reports, summary_rows
from fragmeter.reports.page.page import render_page
from fragmeter.reports.page.terminal_tables import print_payload
from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, WASTE
from shown_shares import Page, Share, by_name, in_columns, in_lines, undefined

#: Orca (Max) fills every bucket that the two views name differently: over-estimates, and gaps that are not free.
LOAD = ("--policy", "orca-max", "--request-rate", "4", "--num-prompts", "120")
NAME = "orca-max"


def printed(payload: dict) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_payload(for_reports(payload), console)
    return console.file.getvalue()


def assert_one_value_each(shares: list[Share]) -> None:
    """Differences are those of rounding to one decimal."""
    found = by_name(shares)
    assert {name: values for name, values in found.items() if max(values) - min(values) > 0.051} == {}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(source(seeds=1))


@pytest.fixture(scope="module")
def documents(bench) -> dict[str, dict]:
    fitted = fit(bench)
    figure = compare(FIG2, bench, fitted, scales=(1.0,))
    return {"fig2": figure, "waste": waste_table(bench, fitted)}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, str]:
    """What each command shows of the run, by command."""
    folder = tmp_path_factory.mktemp("run")
    result, page = folder / NAME, folder / "report.html"
    texts = {
        "paper": run_here("simulate", *LOAD, "--out", result).stdout,
        "slots": run_here("simulate", *LOAD, "--view", "slots").stdout,
        "compare": run_here("compare", result, _other(folder)).stdout,
        "waste cost": run_here("compare", "--waste", *LOAD[:2], "--num-prompts", "60", "--seeds", "1").stdout,
    }
    assert run_here("report", result, "--out", page).returncode == 0
    run = fm.simulate(policy=NAME, request_rate=4, num_prompts=120)
    bars = fm.waste_bars(run)
    return texts | {"page": page.read_text("utf-8"), "bars": str(bars), "notebook": bars._repr_html_()}


@pytest.fixture(scope="module")
def shares(texts) -> dict[str, list[Share]]:
    """As means over iterations, which all of these show."""
    notebook = re.search(rf'aria-label="{NAME}: ([^"]*)"', texts["notebook"])[1].replace("&amp;", "&")
    bars = [re.fullmatch(r"(.*) ([\d.]+) %", part).groups() for part in notebook.split(", ")]
    states = re.search(r"([\d.]+) % token states", texts["bars"])[1]
    return {
        "paper": list(in_lines(NAME, texts["paper"])),
        "slots": list(in_lines(NAME, texts["slots"])),
        "page": list(Page(texts["page"]).shares()),
        "notebook": [(NAME, label, float(value)) for label, value in bars],
        "bars": [(NAME, "token states", float(states))],
    }


class TestOneRun:
    @pytest.mark.slow
    def test_a_name_has_one_value_in_all_of_them(self, shares):
        found = [(NAME, label, value) for _, label, value in chain(*shares.values())]
        assert_one_value_each(found)
        named = {label for _, label, _ in found}
        assert named >= {each.label for view in (PAPER_VIEW, SLOTS_VIEW) for each in view.categories.values()}

    def test_the_two_views_say_different_things_of_this_run(self, shares):
        """Else one value a name would be no test."""
        value = {label: value for _, label, value in shares["page"]}
        assert value["internal"] > 40 and value["stranded"] + value["round up"] > 5
        assert value["over estimate"] == pytest.approx(value["internal"])

    def test_each_defines_what_it_shows(self, texts, shares):
        for name, found in shares.items():
            text = Page(texts[name]).seen if "<" in texts[name][:20] else texts[name]
            assert undefined(text, found) == [], name
        assert WASTE.defined in texts["bars"] and WASTE.defined in Page(texts["notebook"]).seen
        assert PAPER_VIEW.categories["token_states"].defined in texts["compare"]
        cost = texts["waste cost"]
        without = re.findall(r"^without (.*?)  ", cost, re.MULTILINE)
        labels = {each.label: each.defined for each in SLOTS_VIEW.categories.values()}
        assert len(without) >= 3 and all(labels[name] in cost for name in without if name != "all")

    def test_a_page_with_both_views_moves_the_number(self, texts, shares):
        value = {label: value for _, label, value in shares["page"]}["internal"]
        sentence = f"{value:.1f} of the {value:.1f} points of internal are slots for output that never comes"
        assert sentence in Page(texts["page"]).seen


def _other(folder: Path) -> Path:
    assert run_here("simulate", "--num-prompts", "20", "--out", folder / "other").returncode == 0
    return folder / "other"


@pytest.mark.slow
class TestTheReproduction:
    def test_a_name_has_one_value_in_its_terminal_output_and_on_its_page(self, bench, documents):
        shown = [*sections.fig2(documents["fig2"], bench), *sections.waste(documents["waste"], bench)]
        page = Page(render_page("The paper", "", shown))
        table, slots = printed(documents["waste"]), printed(documents["waste"] | {"view": "slots"})
        figure = printed(documents["fig2"])
        found = [*in_columns(table), *in_columns(slots), *_by_series(figure), *page.shares()]
        assert_one_value_each(found)
        assert len({name for name, label, _ in found if label == "internal"}) == 7

    def test_every_output_defines_its_categories(self, bench, documents):
        shown = {
            "terminal, paper": (printed(documents["waste"]), in_columns),
            "terminal, slots": (printed(documents["waste"] | {"view": "slots"}), in_columns),
            "terminal, fig2": (printed(documents["fig2"]), _by_series),
        }
        for name, (text, shares) in shown.items():
            found = list(shares(text))
            assert found and undefined(text, found) == [], name
        made = {
            "fig2": sections.fig2(documents["fig2"], bench),
            "waste": sections.waste(documents["waste"], bench),
        }
        for name, parts in made.items():
            seen = " ".join(Page(render_page(name, "", parts)).seen.split())
            assert all(category.defined in seen for category in PAPER_VIEW.categories.values()), name

    def test_the_first_picture_of_the_page_is_defined_where_it_is_seen(self, documents):
        table = documents["fig2"]
        three = {name: table | {"figure": name} for name in ("fig2", "fig11", "table1")}
        parts = first_section(three, dict.fromkeys(three, "A title"))
        seen = " ".join(Page(render_page("The paper", "", parts)).seen.split())
        assert all(category.defined in seen for category in PAPER_VIEW.categories.values())

    def test_the_two_have_one_grade_and_one_row_of_the_summary(self, documents):
        assert badge(documents["fig2"]) == badge(documents["waste"])
        assert [row["figure"] for row in summary_rows(documents.values())] == ["fig2"]
        [alone] = summary_rows([documents["waste"]])
        [beside] = summary_rows([documents["fig2"]])
        assert (alone["worst_error"], alone["predicted"]) == (beside["worst_error"], beside["predicted"])


def _by_series(text: str) -> list[Share]:
    """The comparison of Fig 2: a heading for each system, and the simulated value in the second column."""
    found, name = [], ""
    for line in text.splitlines():
        label, _, rest = line.strip().partition("  ")
        if label in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"):
            name = label
        elif rest and label in {category.label for category in PAPER_VIEW.categories.values()}:
            found.append((name, label, float(rest.split()[1])))
    return found
