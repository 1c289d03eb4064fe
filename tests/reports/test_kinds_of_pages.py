"""Each kind of page in a real browser: the index, the search, the colours, and what is folded come from one template."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from browser import as_new, poor_texts, show, texts, wait
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.cli.traces import write_trace_page
from fragmeter.experiments.paper.paper import source
from fragmeter.experiments.paper.published import published_fig2
from fragmeter.experiments.paper.rows import value_row
from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.reproduce.reproduction import Benches, Page
from fragmeter.reports.page.page import Section
from fragmeter.reports.page.sweep_report import Sweep, write_sweep_report
from fragmeter.traces import read, stats

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 2},{90 + 40 * at},{30 + at}\n" for at in range(12))
ENTRIES = (
    "return [...document.querySelectorAll('.index li a')].filter((a) => a.checkVisibility()).map((a) => a.textContent)"
)
HEADINGS = "return [...document.querySelectorAll('main > section:not([hidden]) h2')].map((title) => title.textContent)"
#: Tables, folded ones too, of which a part is outside of the screen.
OFF_SCREEN = """
document.querySelectorAll('main details').forEach((part) => { part.open = true; });
return [...document.querySelectorAll('.records')].filter((table) => table.parentElement.scrollWidth > table.parentElement.clientWidth)
  .map((table) => table.caption.textContent)
"""


def reproduction(folder: Path, fig2: dict | None = None) -> Path:
    """Figures that take next to nothing, with a scorecard; and a Fig 2 if there is a document of it."""
    names, benches = ["fig1", "fig3", "table1", "fig19a"], Benches(source(), None)
    page = Page([*names, *(["fig2"] if fig2 else [])], with_stories=False)
    for name in names:
        bench = benches.of(FIGURES[name])
        document = FIGURES[name].make(bench)
        page.add(name, document, FIGURES[name].show(document, bench))
    if fig2:
        page.add("fig2", fig2, [Section("Fig 2")])
    page.write(folder / "reproduction.html")
    return folder / "reproduction.html"


def fig2_document() -> dict:
    """Every bar is the published one, but those called internal, which are three points more."""
    rows = [
        value_row(series, metric, value, [(value or 0.0) + (3.0 if metric == "internal_pct" else 0.0)])
        for (series, metric), value in published_fig2().items()
    ]
    return {"figure": "fig2", "workload": "made up", "rows": rows}


def run_report(folder: Path) -> Path:
    (folder / "mine.csv").write_text(TRACE)
    assert (
        status(["simulate", "--trace", str(folder / "mine.csv"), "--record-blocks", "--out", str(folder / "run")])
        == DONE
    )
    assert status(["report", str(folder / "run"), "--out", str(folder / "report.html")]) == DONE
    return folder / "report.html"


def sweep(folder: Path) -> Path:
    rates = {"series": ["a", "a", "b", "b"], "request_rate": [1.0, 2, 1, 2], "seed": 0, "request_throughput": 0.9}
    rates |= {"request_goodput": [0.8, 1.1, 0.9, 0.2], "p99_ttft_ms": [20.0, 900, 30, 4000], "p99_tpot_ms": 30.0}
    speeds = {"tokens_per_s_per_user": [40.0, 30, 35, 20], "tokens_per_s_per_gpu": [90.0, 150, 80, 190]}
    return write_sweep_report(
        folder / "sweep.html", Sweep("small", pd.DataFrame(rates | speeds), ["policy"], "ttft:500", 0)
    )


def trace(folder: Path) -> Path:
    (folder / "mine.csv").write_text(TRACE)
    found = read(folder / "mine.csv")
    return write_trace_page(found, stats(found), folder / "trace.html")


def plan(folder: Path) -> Path:
    line = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h200",
        "--goodput",
        "ttft:500",
        "tpot:50",
        "--request-rate",
        "4",
    ]
    load = ["--input-len", "200", "--output-len", "20", "--num-prompts", "100", "--seeds", "1"]
    assert status([*line, *load, "--out", str(folder / "plan")]) == DONE
    return folder / "plan" / "plan.html"


KINDS = {kind.__name__: kind for kind in (reproduction, run_report, sweep, trace, plan)}


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium, 1400, 900) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[] if kind in (reproduction, run_report, plan) else [pytest.mark.slow])
        for name, kind in KINDS.items()
    ],
)
def test_a_page_has_an_index_a_search_and_two_schemes(kind, driver, tmp_path):
    path = kind(tmp_path)
    show(driver, path, "light", 1400)
    assert driver.get_log("browser") == []
    headings = driver.execute_script(HEADINGS)
    assert headings == driver.execute_script(ENTRIES) and len(headings) > 1
    # What is folded is closed, and opens.
    folded = "return [...document.querySelectorAll('main details')].filter((part) => part.open).length"
    assert driver.execute_script(folded) == 0
    last = "[...document.querySelectorAll('h2')].at(-1)"
    wait(
        driver,
        f"{last}.scrollIntoView({{ behavior: 'instant' }});"
        f" return [...document.querySelectorAll('.index [aria-current]')].at(-1).textContent === {last}.textContent",
    )
    search = driver.find_element("css selector", ".tools input")
    search.send_keys(headings[-1])
    wait(
        driver, f"return document.querySelector('main > section[hidden]') !== null && !{last}.closest('section').hidden"
    )
    assert driver.execute_script(HEADINGS) == driver.execute_script(ENTRIES) != headings
    search.clear()
    search.send_keys(" ")
    driver.find_element("css selector", ".theme").click()
    wait(driver, "return document.documentElement.dataset.drawn === 'dark'")
    assert poor_texts(texts(driver)) == []
    driver.execute_script("delete document.documentElement.dataset.theme")
    show(driver, path, "dark", 420)
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1] == 420 and driver.execute_script(ENTRIES) == []
    assert driver.execute_script(OFF_SCREEN) == []


@pytest.mark.slow
def test_the_scorecard_is_on_the_first_screen_and_leads_to_each_figure(driver, tmp_path):
    path = reproduction(tmp_path)
    for scheme, width_px in (("light", 1400), ("dark", 900), ("light", 420)):
        show(driver, path, scheme, width_px)
        top = "return document.querySelector('.scores').getBoundingClientRect().top"
        assert driver.execute_script(top) < 900
    rows = "return [...document.querySelectorAll('.scores tbody tr')].map((row) => row.querySelector('a').textContent)"
    assert driver.execute_script(rows) == ["Fig 1", "Fig 3", "Table 1", "Fig 19a"]
    driver.find_element("link text", "Fig 19a").click()
    wait(driver, "return location.hash === '#fig19a'")
    # The fitted constants are one click away.
    driver.execute_script("document.querySelector('.more').open = true")
    constants = "return [...document.querySelectorAll('.more th')].map((cell) => cell.textContent)"
    assert "Constant" in driver.execute_script(constants)


#: The text that is on the screen as it is opened, of 900 px.
FIRST_SCREEN = """
return [...document.querySelectorAll('main p, main summary')]
  .filter((part) => part.checkVisibility() && part.getBoundingClientRect().bottom + scrollY <= 900)
  .map((part) => part.textContent).join(' ')
"""


@pytest.mark.slow
def test_a_new_reader_has_three_answers_within_no_and_one_click(driver, tmp_path):
    """Is Fig 2 reproduced? Which figure is worst? Which constants were fitted?"""
    path = reproduction(tmp_path, fig2_document())
    for scheme, width_px in (("light", 1400), ("dark", 900), ("light", 420)):
        show(driver, path, scheme, width_px)
        driver.refresh()
        wait(driver, f"return document.documentElement.dataset.drawn === '{scheme}'")
        seen = driver.execute_script(FIRST_SCREEN)
        assert (
            "Fig 2, the waste of the KV cache, has grade pass: all 13 shares of the pool are within 3.0 points" in seen
        )
        assert "the worst is Fig 1 (+35.9\u00a0%)" in seen
        constants = "return [...document.querySelectorAll('.more tbody tr')].filter((row) => row.checkVisibility())"
        assert driver.execute_script(constants) == []
        [fold] = [each for each in driver.find_elements("css selector", "summary") if "fitted constants" in each.text]
        driver.execute_script("arguments[0].click()", fold)
        names = driver.execute_script(f"{constants}.map((row) => row.cells[1].textContent)")
        assert f"The {len(names)} fitted constants" in fold.text and "step (ms)" in names
