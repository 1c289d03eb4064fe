"""The page in a real browser without a network: it opens, draws, follows the scheme, and can be read by all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest

from browser import as_new, emulate, hexed, poor_texts, requested_urls, saved_csv, show, texts, wait
from fragmeter.reports.figures.figures import (
    curves,
    data_of,
    fig2,
    fig13a,
    fig15,
    ledger_over_time,
    waste,
)
from fragmeter.reports.figures.plan import cost_bars
from fragmeter.reports.figures.server import server_over_time
from fragmeter.reports.page.page import Section, write_page
from fragmeter.reports.page.scorecard import Score, Scorecard
from fragmeter.reports.style.palette import BUCKETS, DARK, PAPER
from fragmeter.sim.metrics.views import SLOTS_VIEW
from pools import waste_row

METRICS = ["token_states_pct", "reservation_pct", "internal_pct", "external_and_others_pct"]
SHARES = {"Orca (Max)": [20.4, 13.3, 57.3, 8.9], "Orca (Pow2)": [26.8, 17.9, 13.6, 41.6], "vLLM": [96.3, 0.0, 1.7, 2.0]}


def comparison() -> dict:
    rows = [
        {"series": series, "metric": metric, "x": None, "published": None if series == "vLLM" and at else value}
        | {"how": "label", "simulated": value, "error": 0.0, "minimum": 0.9 * value, "maximum": 1.02 * value}
        for series, values in SHARES.items()
        for at, (metric, value) in enumerate(zip(METRICS, values))
    ]
    return {"figure": "fig2", "workload": "made up", "rows": rows}


def batches(sequences: int | None = None) -> dict:
    row = {"series": "vLLM", "metric": "batched_requests", "x": sequences, "published": 30.42, "how": "label"}
    return {"figure": "fig13a", "workload": "made up", "rows": [row | {"simulated": 30.5, "error": 0.08}]}


def ledger() -> go.Figure:
    table = {"start_s": list(range(60)), **{bucket: [10 + at] * 60 for at, bucket in enumerate(BUCKETS)}}
    return ledger_over_time(table | {"live": list(range(60)), "free": list(range(60, 0, -1))}, "The ledger")


def policies() -> list[dict]:
    return [
        waste_row(
            "orca-max",
            300.0,
            7.0,
            live=20,
            reserved=13,
            over_estimate=37,
            block_tail=10,
            finished_hold=10,
            stranded=4,
            free=6,
        )
    ]


def figures() -> list[go.Figure]:
    shown = [fig2(comparison()), fig13a(batches()), waste(policies()), waste(policies(), SLOTS_VIEW), ledger()]
    return [*shown, fig15(batches(2))]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    rows = [{"Setting": "blocks", "Value": 983}, {"Setting": "slots", "Value": 15728}]
    sections = [Section("Pictures", "Text.", figures()), Section("Settings", rows=rows)]
    return write_page(tmp_path_factory.mktemp("page") / "page.html", "Waste", "First paragraph.", sections)


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium) as driver:
        yield driver


def test_it_opens_without_an_error_and_asks_for_nothing(driver, page):
    show(driver, page, "light")
    assert driver.get_log("browser") == []
    loaded = [url for url in requested_urls(driver) if not url.startswith("data:")]
    assert loaded == [page.as_uri()]


def test_every_figure_has_its_marks(driver, page):
    show(driver, page, "light")
    bars = """return [...document.querySelectorAll(".plot")].map((plot) =>
      [...plot.querySelectorAll(".barlayer .point path")].filter((bar) => bar.getBBox().width > 0).length)"""
    # In Fig 2: 12 simulated, 9 published and one "not published", less one of length 0.
    assert driver.execute_script(bars) == [21, 2, 4, 7, 0, 2]
    count = "return document.querySelectorAll('#plot-{} {}').length"
    assert driver.execute_script(count.format(5, ".scatterlayer .js-fill")) == 9


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_a_contrast_of_4_5(driver, page, scheme):
    show(driver, page, scheme)
    found = texts(driver)
    assert {"Orca (Max)", "published", "57.3", "First paragraph."} <= {text for text, *_ in found}
    assert poor_texts(found) == []


@pytest.mark.slow
def test_figures_follow_the_scheme_without_a_reload(driver, page):
    paper = "return document.querySelector('#plot-1 .main-svg').style.backgroundColor"
    seen = []
    for scheme in ("light", "dark", "light"):
        show(driver, page, scheme)
        seen.append(hexed(driver.execute_script(paper)))
    assert seen == [PAPER, DARK[PAPER], PAPER]


@pytest.mark.slow
@pytest.mark.parametrize("width_px", [1280, 400])
def test_nothing_sticks_out_of_the_window(driver, page, width_px):
    show(driver, page, "light", width_px)
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1] == width_px
    wait(driver, "return [...document.querySelectorAll('.plot')].every(p => p.scrollWidth <= p.clientWidth)")


@pytest.mark.slow
def test_a_legend_that_wraps_anew_is_not_over_the_bars(driver, page):
    show(driver, page, "light", 1280)
    clear = (
        "const [plot] = document.querySelectorAll('.plot'), place = (part) => plot.querySelector(part).getBoundingClientRect();"
        "return Math.abs(plot._fullLayout.width - plot.clientWidth) < 2 && place('.legend').bottom <= place('.barlayer').top"
    )
    wait(driver, clear)
    for width_px in (520, 400, 560):
        emulate(driver, "light", width_px)
        wait(driver, clear)


def test_the_keyboard_reaches_the_skip_link_every_section_and_every_figure(driver, page):
    from selenium.webdriver.common.keys import Keys

    show(driver, page, "light", 1400)
    driver.execute_script("document.activeElement.blur(); getSelection().collapse(document.body, 0)")
    reached = []
    for _ in range(60):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        here = driver.execute_script(
            "const at = document.activeElement;"
            "return [at.tagName, at.getAttribute('href') || at.id, at.getAttribute('aria-label'),"
            " getComputedStyle(at).outlineStyle]"
        )
        if here[0] == "BODY":
            break
        reached.append(here)
    assert reached[0][:2] == ["A", "#content"]
    assert [name for tag, name, *_ in reached if tag == "A"][1:] == ["#section-1", "#section-2"]
    plots = [found for found in reached if found[1].startswith("plot-")]
    assert [found[1] for found in plots] == [f"plot-{serial}" for serial in range(1, 7)]
    assert all(label and outline == "solid" for _, _, label, outline in plots)
    assert sum(tag == "SUMMARY" for tag, *_ in reached) == 6
    buttons = [outline for tag, _, _, outline in reached if tag == "BUTTON"]
    # One of each picture, and the one of the colours.
    assert buttons == ["solid"] * 7
    assert [name for tag, _, name, _ in reached if tag == "INPUT"] == ["Search the sections"]


ENTRIES = (
    "return [...document.querySelectorAll('.index li a')].filter((a) => a.checkVisibility()).map((a) => a.textContent)"
)
CURRENT = "return document.querySelector('.index [aria-current]').textContent"


@pytest.mark.slow
def test_the_index_is_beside_a_wide_page_and_folded_above_a_narrow_one(driver, page):
    show(driver, page, "light", 1400)
    assert driver.execute_script(ENTRIES) == ["Pictures", "Settings"]
    show(driver, page, "light", 900)
    wait(driver, "return !document.querySelector('.index details').open")
    assert driver.execute_script(ENTRIES) == []
    driver.find_element("css selector", ".index summary").send_keys("\n")
    assert driver.execute_script(ENTRIES) == ["Pictures", "Settings"]


@pytest.mark.slow
def test_the_index_follows_the_page(driver, page):
    show(driver, page, "light", 1400)
    # Scrolled again until it is so: pictures that adapt to another width move what is below them.
    for title in ("Pictures", "Settings", "Pictures"):
        at = "[...document.querySelectorAll('h2')].find((heading) => heading.textContent === '{}')"
        scroll = f"{at.format(title)}.scrollIntoView({{ behavior: 'instant' }});"
        wait(driver, f"{scroll} {CURRENT} === '{title}'")


@pytest.mark.slow
def test_the_index_marks_the_cards_of_a_row_and_the_one_that_is_asked_for(driver, tmp_path):
    """Two cards a row, in rows higher than what the last of them could scroll past."""
    text = "\n\n".join(["Text."] * 40)
    titles = ("Top", "Fig 1", "Fig 2", "Fig 3", "Fig 4")
    card = Scorecard(
        fig2(comparison()), [Score("fig1", "Fig 1", "Fig 1", "pass", "+3.0 %", 3, 0, [0.1])], ["The rule."]
    )
    cards = [
        Section(title, text, key=title.lower().replace(" ", ""), badge="pass", is_half=True) for title in titles[1:]
    ]
    path = write_page(tmp_path / "cards.html", "Cards", "", [Section(titles[0], widgets=[card]), *cards])
    show(driver, path, "light", 1400)
    marked = "[...document.querySelectorAll('.index [aria-current]')].map((entry) => entry.textContent).join()"
    top = "document.querySelector('main > section:nth-of-type({})').scrollIntoView({{ behavior: 'instant' }});"
    wait(driver, f"{top.format(2)} return {marked} === 'Fig 1,Fig 2'")
    for title in titles[1:]:
        entry = f"[...document.querySelectorAll('.index li a')].find((a) => a.textContent === '{title}')"
        driver.execute_script(f"{entry}.click()")
        wait(driver, f"return {marked} === '{title}'")


@pytest.mark.slow
def test_the_last_tick_of_a_percentage_is_shown_whole(driver, tmp_path):
    """In the scorecard and in a card of half the width; plotly hides a label that does not fit beside the bars."""
    card = Scorecard(
        fig2(comparison()), [Score("fig2", "Fig 2", "Fig 2", "pass", "+0.0 pts", 3, 0, [0.1])], ["The rule."]
    )
    sections = [
        Section("Top", widgets=[card]),
        *(Section(name, figures=[fig2(comparison())], is_half=True) for name in "AB"),
    ]
    show(driver, write_page(tmp_path / "ticks.html", "Ticks", "", sections), "light", 1400)
    rooms = driver.execute_script(
        "return [...document.querySelectorAll('.plot')].map((plot) => { const box = plot.getBoundingClientRect();"
        " const last = [...plot.querySelectorAll('.xtick text')].findLast((text) => text.checkVisibility()"
        " && getComputedStyle(text).display !== 'none' && text.getBoundingClientRect().width > 0);"
        " return [last.textContent, box.right - last.getBoundingClientRect().right]; })"
    )
    assert [text for text, _ in rooms] == ["100 %"] * 3
    assert all(room >= 0 for _, room in rooms)


@pytest.mark.slow
def test_a_legend_on_a_phone_is_whole_and_above_the_bars(driver, tmp_path):
    """One run's bars are lower than the legend of nine buckets."""
    row = {"policy": "vLLM", "batched_requests": 1.0, "output_tokens_per_s": 1.0} | {
        f"{name}_pct": 100 / 9 for name in BUCKETS
    }
    page = write_page(tmp_path / "legend.html", "Legend", "", [Section("Bars", figures=[waste([row], SLOTS_VIEW)])])
    show(driver, page, "light", 420)
    wait(
        driver,
        "const box = (one) => document.querySelector(one).getBoundingClientRect(); const legend = document.querySelector('.legend');"
        " const items = [...legend.querySelectorAll('.legendtext')].map((text) => text.getBoundingClientRect().bottom);"
        " return items.length === 9 && Math.max(...items) <= Math.min(box('.legend .bg').bottom, box('.bars path').top);",
    )


@pytest.mark.slow
def test_on_a_phone_no_name_is_cut_and_no_picture_is_wider_than_the_page(driver, tmp_path):
    """Long names of candidates, a picture with a width of its own, and a table of cards with one long cell."""
    name = "h100-80gb, tensor_parallel_size=4, checkpoint=RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"
    costs = [{"candidate": name, "cost": 4.0, "lowest": 2.0, "highest": 5.0}]
    times = pd.DataFrame({"time_s": [0.0, 1.0], "running": [1.0, 2.0], "waiting": [0.0, 1.0], "usage_pct": [1.0, 2.0]})
    rows = [{"Step": 1, "What happens": "A takes blocks 0 and 1 and prefills 7 tokens of its prompt. " * 4}]
    sections = [
        Section("Pictures", figures=[cost_bars(costs, "USD per hour"), server_over_time("Server", times, 2)], rows=rows)
    ]
    show(driver, write_page(tmp_path / "names.html", "Names", "", sections), "light", 420)
    places = (
        "return [...document.querySelectorAll('.plot text')].map((text) => [text.textContent, text.getBoundingClientRect()])"
        ".filter(([, box]) => box.width).map(([name, box]) => [name, box.left, box.right])"
    )
    shown = driver.execute_script(places)
    assert any("checkpoint" in text for text, *_ in shown) and any("KV cache in use" in text for text, *_ in shown)
    assert all(0 <= left and right <= 420 for _, left, right in shown)
    # A label keeps its words whole beside a long cell.
    width = "return getComputedStyle([...document.querySelectorAll('.cards tbody tr > :last-child')].at(-1), '::before').width"
    assert float(driver.execute_script(width).removesuffix("px")) > 85


@pytest.mark.slow
def test_the_search_leaves_the_sections_with_all_its_words(driver, page):
    show(driver, page, "light", 1400)
    search = driver.find_element("css selector", ".tools input")
    shown = "return [...document.querySelectorAll('main > section:not([hidden]) h2')].map((title) => title.textContent)"
    for words, sections in (("blocks 983", ["Settings"]), ("Orca", ["Pictures"]), ("", ["Pictures", "Settings"])):
        search.clear()
        search.send_keys(words or " ")
        wait(
            driver,
            f"return JSON.stringify((() => {{ {shown} }})()) === '{json.dumps(sections, separators=(',', ':'))}'",
        )
        assert driver.execute_script(ENTRIES) == sections
    # What a script holds is no text.
    search.send_keys("hovertemplate")
    wait(driver, "return document.querySelector('.found').textContent === '0 of 2 sections'")
    search.clear()
    search.send_keys(" ")


@pytest.mark.slow
def test_the_colours_can_be_chosen_on_the_page(driver, page):
    show(driver, page, "light", 1400)
    button = driver.find_element("css selector", ".theme")
    assert button.text == "Dark"
    button.click()
    wait(driver, "return document.documentElement.dataset.drawn === 'dark'")
    paper = "return document.querySelector('#plot-1 .main-svg').style.backgroundColor"
    assert (button.text, hexed(driver.execute_script(paper))) == ("Light", DARK[PAPER])
    assert poor_texts(texts(driver)) == []
    button.click()
    wait(driver, "return document.documentElement.dataset.drawn === 'light'")
    assert hexed(driver.execute_script(paper)) == PAPER
    driver.execute_script("delete document.documentElement.dataset.theme")


@pytest.mark.slow
def test_what_is_folded_is_printed_on_white_paper(driver, tmp_path):
    section = Section(
        "One", figures=figures()[:1], finding="Found.", checks=[("fail", "Too far")], details="More of it."
    )
    path = write_page(tmp_path / "page.html", "Print", "", [section])
    show(driver, path, "dark")
    seen = "return [document.querySelector('.more').open, document.documentElement.dataset.drawn]"
    assert driver.execute_script(seen) == [False, "dark"]
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    wait(driver, "return document.documentElement.dataset.drawn === 'light' && document.querySelector('.more').open")
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    wait(driver, "return document.documentElement.dataset.drawn === 'dark' && !document.querySelector('.more').open")


@pytest.mark.slow
def test_folded_pictures_are_drawn_when_they_unfold_as_wide_as_their_card(driver, tmp_path):
    along = [row | {"x": at} for at, row in enumerate(batches()["rows"] * 2, start=1)]
    sections = [
        Section("One", figures=figures()[:1], folded_figures=[curves(batches() | {"rows": along})], fold="More"),
        Section("Two", "No picture."),
    ]
    path = write_page(tmp_path / "page.html", "Folded", "", sections)
    show(driver, path, "light")
    marks = "return document.querySelectorAll('#plot-2 .scatterlayer .point').length"
    assert driver.execute_script(marks) == 0
    summary = driver.find_element("css selector", ".more > summary")
    assert summary.text.startswith("More")
    summary.click()
    wait(driver, f"{marks} === 4")
    assert (
        driver.execute_script("return document.querySelector('#plot-2 .main-svg').getBoundingClientRect().width") > 800
    )
    paper = "document.querySelector('#plot-2 .main-svg').style.backgroundColor"
    show(driver, path, "dark")
    assert hexed(driver.execute_script(f"return {paper}")) == DARK[PAPER]
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_half_cards_stand_side_by_side_on_a_wide_page_only(driver, tmp_path):
    sections = [Section("Whole", "Text."), *(Section(name, "Text.", is_half=True) for name in ("One", "Two", "Three"))]
    path = write_page(tmp_path / "page.html", "Cards", "", sections)
    places = "return [...document.querySelectorAll('section')].map((card) => card.getBoundingClientRect()).map((box) => [box.x, box.y])"
    show(driver, path, "light", 1400)
    whole, one, two, three = driver.execute_script(places)
    assert one[1] == two[1] > whole[1] and three[1] > one[1]
    assert whole[0] == one[0] == three[0] < two[0]
    show(driver, path, "light", 900)
    wait(driver, "return !document.querySelector('.index details').open")
    whole, one, two, three = driver.execute_script(places)
    assert whole[1] < one[1] < two[1] < three[1] and one[0] == two[0]


@pytest.mark.slow
def test_an_unfinished_page_loads_itself_again_until_its_file_no_longer_changes(driver, tmp_path):
    path = write_page(tmp_path / "page.html", "Unfinished", "", [Section("One", "Text.")], refresh_s=1)
    driver.get(path.as_uri())
    driver.execute_script("window.isOld = true")
    wait(driver, "return window.isOld === undefined && document.readyState === 'complete'")
    os.utime(path, (0, path.stat().st_mtime - 601))
    driver.get(path.as_uri())
    driver.execute_script("window.isOld = true")
    wait(driver, "return document.querySelector('.reloading').textContent.includes('no longer loads itself again')")
    assert driver.execute_script("return window.isOld")


@pytest.mark.slow
def test_a_scorecard_leads_to_its_sections(driver, tmp_path):
    scores = [
        Score("fig1", "Fig 1", "Fig 1: one", "pass", "+3.0 %", 3, 0, [0.1, -0.15, 0.0]),
        Score("fig2", "Fig 2", "Fig 2: two", "miss", "+90.0 %", 2, 1, [4.5, 1.0]),
    ]
    card = Scorecard(fig2(comparison()), scores, ["The rule."])
    sections = [
        Section("Scorecard", widgets=[card]),
        Section("Fig 1: one", "Text.", key="fig1", badge="pass"),
        Section("Fig 2: two", "Text.", key="fig2", badge="miss"),
    ]
    for scheme, width_px in (("light", 1400), ("dark", 420)):
        path = write_page(tmp_path / f"{scheme}.html", "Scores", "", sections)
        show(driver, path, scheme, width_px)
        places = "return [...document.querySelectorAll('.strip')].map((strip) => [...strip.querySelectorAll('circle')].map((dot) => dot.className.baseVal))"
        assert driver.execute_script(places) == [["", "", ""], ["beyond", ""]]
        assert driver.execute_script(
            "return [...document.querySelectorAll('.scores a')].every((a) => document.querySelector(a.hash))"
        )
        widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1] == width_px
        assert poor_texts(texts(driver)) == [] and driver.get_log("browser") == []
        # All dots are in sight, also on a phone.
        ends = "return [...document.querySelectorAll('.strip circle')].map((dot) => dot.getBoundingClientRect().right)"
        assert max(driver.execute_script(ends)) < width_px - 20
        scrolls = (
            "const table = document.querySelector('.scorecard > .scroll'); return table.scrollWidth > table.clientWidth"
        )
        assert not driver.execute_script(scrolls)


@pytest.mark.slow
def test_a_csv_file_holds_all_digits_and_any_text(driver, page, tmp_path):
    rows = [row | {"simulated": value} for row, value in zip(comparison()["rows"], (1 / 3, 1e-9, 0.0, 2.0**53, 1e22))]
    rows[0] |= {"series": 'Orca, "Max"\r\nof old', "published": None, "minimum": float("nan")}
    rows[1]["how"] = "x < y </script>"
    figure = fig2(comparison() | {"rows": rows})
    figure.update_layout(title_text="Étude: 5 % & “more”, said /twice/")
    write_page(tmp_path / "page.html", "CSV", "", [Section("One", figures=[figure])])
    show(driver, tmp_path / "page.html", "light")
    name, (head, *lines) = saved_csv(driver, 0)
    assert name == "tude-5-more-said-twice.csv"
    wanted = data_of(figure)
    assert head == list(wanted.columns)
    assert [[read(cell) for cell in line] for line in lines] == [
        [None if cell != cell else cell for cell in row] for row in wanted.astype(object).values.tolist()
    ]
    assert driver.get_log("browser") == []
    said = driver.execute_script("return document.querySelector('.csv').textContent")
    assert said == "CSV of: Étude: 5 % & “more”, said /twice/"


def read(cell: str) -> str | float | None:
    """A cell of a CSV file: a number if it is one; nothing if it is empty."""
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell
