"""The step player of a story in a real browser: stepping, keys, slider, play, strip, schemes, widths, print."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import as_new, poor_texts, requested_urls, show, texts, wait
from fragmeter.experiments.cli.story import story as draw
from fragmeter.experiments.story.reading import story, story_names
from fragmeter.experiments.story.story import run_story


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stories")
    for name in story_names():
        draw(name, out=folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in story_names()}


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium) as driver:
        yield driver


def opened(driver, page: Path, scheme: str = "light", width_px: int = 1400) -> None:
    """The page at its first step."""
    show(driver, page, scheme, width_px)
    wait(driver, "return document.querySelector('.story').dataset.ready === 'true'")
    keys(driver, "HOME")


def keys(driver, *names: str) -> None:
    from selenium.webdriver.common.keys import Keys

    driver.execute_script("document.activeElement.blur()")
    for name in names:
        driver.find_element("css selector", "body").send_keys(getattr(Keys, name))


def where(driver) -> str:
    return driver.find_element("css selector", ".where").text


def press(driver, selector: str) -> None:
    driver.execute_script("arguments[0].click()", driver.find_element("css selector", selector))


def shown(driver, stage: int = 0) -> dict:
    """What a stage shows, read from its elements."""
    return driver.execute_script(
        """
        const stage = document.querySelectorAll(".stage")[arguments[0]];
        const texts = (selector, root = stage) => [...root.querySelectorAll(selector)].map((each) => each.textContent);
        return {
          events: texts(".events li"),
          tables: Object.fromEntries([...stage.querySelectorAll(".sequence")].map((each) =>
            [each.querySelector("h4").firstChild.textContent, texts(".entry", each).map(Number)])),
          words: Object.fromEntries([...stage.querySelectorAll(".sequence")].map((each) =>
            [each.querySelector("h4").firstChild.textContent, texts(".slot", each).filter(Boolean)])),
          references: texts(".pool:not(.host) .count").map((text) => Number(text.replace("ref ", ""))),
          blocks: [...stage.querySelectorAll(".pool:not(.host) > li")].map((each) => texts(".slot", each).filter(Boolean).join(" ")),
          marked: texts(".pool .slot.is-new"),
          host: stage.querySelector(".pool.host").hidden ? null : texts(".pool.host .slot").filter(Boolean),
        };""",
        stage,
    )


def expected(name: str, run: int, frame: int) -> dict:
    """The same of the frames."""
    found = run_story(story(name))[run].frames[frame]
    return {
        "events": list(found.events),
        "tables": {view.name: list(view.table) for view in found.sequences},
        "words": {view.name: [cell.word for cell in view.cells if cell.word] for view in found.sequences},
        "references": [block.references for block in found.blocks if block.references is not None],
        "blocks": [" ".join(cell.word for cell in block.cells if cell.word) for block in found.blocks],
        "marked": [cell.word for block in found.blocks for cell in block.cells if cell.is_new],
        "host": [cell.word for block in found.host for cell in block.cells if cell.word] or None,
    }


@pytest.mark.slow
def test_it_opens_without_an_error_and_asks_for_nothing(driver, pages):
    for page in pages.values():
        opened(driver, page)
        assert driver.get_log("browser") == []
        assert [url for url in requested_urls(driver) if not url.startswith("data:")] == [page.as_uri()]


@pytest.mark.slow
@pytest.mark.parametrize("name", story_names())
def test_every_step_forward_and_back_shows_its_frame(driver, pages, name):
    opened(driver, pages[name])
    (labels, places) = driver.execute_script(
        "const { moments } = JSON.parse(document.querySelector('.story .data').textContent);"
        "return [moments.map((each) => each.label), moments.map((each) => each.frames)]"
    )
    runs = range(len(places[0]))
    forward = []
    for label, frames in zip(labels, places):
        assert where(driver) == ("the end" if label == "end" else f"step {label}")
        forward.append([shown(driver, run) for run in runs])
        assert forward[-1] == [expected(name, run, frames[run]) for run in runs]
        press(driver, ".story .next")
    for before in reversed(forward[:-1]):
        press(driver, ".story .back")
        assert [shown(driver, run) for run in runs] == before


@pytest.mark.slow
def test_the_buttons_end_at_the_ends(driver, pages):
    opened(driver, pages["samples"])
    disabled = "return ['.back', '.next'].map((name) => document.querySelector(`.story ${name}`).disabled)"
    assert driver.execute_script(disabled) == [True, False]
    keys(driver, "END")
    assert (where(driver), driver.execute_script(disabled)) == ("the end", [False, True])


@pytest.mark.slow
def test_keys(driver, pages):
    opened(driver, pages["samples"])
    keys(driver, "ARROW_RIGHT", "ARROW_RIGHT")
    assert where(driver) == "step 2b"
    keys(driver, "ARROW_LEFT")
    assert where(driver) == "step 2a"
    keys(driver, "ARROW_LEFT", "ARROW_LEFT")
    assert where(driver) == "step 1"
    # In a text field the keys move the cursor.
    from selenium.webdriver.common.keys import Keys

    driver.find_element("css selector", ".tools input").send_keys(Keys.ARROW_RIGHT)
    assert where(driver) == "step 1"


@pytest.mark.slow
def test_the_slider(driver, pages):
    from selenium.webdriver.common.keys import Keys

    opened(driver, pages["samples"])
    slider = driver.find_element("css selector", ".moment")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert (where(driver), slider.get_attribute("aria-valuetext")) == ("step 2a", "step 2a")
    slider.send_keys(Keys.END)
    assert where(driver) == "the end"


@pytest.mark.slow
def test_the_strip_jumps_to_a_step_and_marks_it(driver, pages):
    opened(driver, pages["static-vs-continuous"])
    marked = (
        "return [...document.querySelectorAll('.strip')].map((strip) => strip.querySelector('thead .at').textContent)"
    )
    assert driver.execute_script(marked) == ["1", "1"]
    button = driver.find_elements("css selector", ".strip button")[5]
    assert button.accessible_name == "Step 6"
    button.send_keys("\n")
    assert where(driver) == "step 6" and driver.execute_script(marked) == ["6", "6"]
    letters = (
        "return [...document.querySelectorAll('.strip')].map((strip) => [...strip.querySelectorAll('tbody tr')].map("
        "(row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent || '.').join('')))"
    )
    static, continuous = driver.execute_script(letters)
    assert static == [
        *("PDDDHH.....", "PDDDDD.....", "PDHHHH.....", "PDDDDH....."),
        *(".WWWWWPDDD.", "..WWWWPDDH.", "...WWWPDHH."),
    ]
    assert continuous == [
        *("PDDD.......", "PDDDDD.....", "PD.........", "PDDDD......"),
        *(".WPDDD.....", "..WWPDD....", "...WWPD...."),
    ]


@pytest.mark.slow
def test_play_steps_until_it_is_paused(driver, pages):
    opened(driver, pages["samples"])
    press(driver, ".story .play")
    assert driver.find_element("css selector", ".story .play").text == "Pause"
    wait(driver, "return document.querySelector('.where').textContent === 'step 2a'")
    press(driver, ".story .play")
    assert driver.find_element("css selector", ".story .play").get_attribute("aria-pressed") == "false"


@pytest.mark.slow
def test_a_block_is_marked_with_its_table_entries(driver, pages):
    from selenium.webdriver.common.action_chains import ActionChains

    opened(driver, pages["samples"])
    keys(driver, "ARROW_RIGHT")
    block = driver.find_elements("css selector", ".pool > li")[1]
    ActionChains(driver).move_to_element(block).perform()
    pointed = "return [...document.querySelectorAll('.pointed')].map((each) => each.tagName)"
    assert driver.execute_script(pointed) == ["TR", "TR", "LI"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["samples", "swap", "prefix-cache", "static-vs-continuous", "orca-chunks"])
def test_all_text_has_a_contrast_of_4_5(driver, pages, name, scheme):
    opened(driver, pages[name], scheme)
    for _ in range(5):
        keys(driver, "ARROW_RIGHT")
        assert poor_texts(texts(driver)) == []


@pytest.mark.slow
def test_the_colours_can_be_chosen_on_the_page(driver, pages):
    opened(driver, pages["samples"])
    tint = "return getComputedStyle(document.querySelector('.pool .slot.live')).backgroundColor"
    light = driver.execute_script(tint)
    driver.find_element("css selector", ".theme").click()
    wait(driver, "return document.documentElement.dataset.drawn === 'dark'")
    assert driver.execute_script(tint) != light and poor_texts(texts(driver)) == []
    driver.find_element("css selector", ".theme").click()
    wait(driver, "return document.documentElement.dataset.drawn === 'light'")
    assert driver.execute_script(tint) == light
    driver.execute_script("delete document.documentElement.dataset.theme")


@pytest.mark.slow
@pytest.mark.parametrize("width_px", [1400, pytest.param(900, marks=pytest.mark.slow), 420])
@pytest.mark.parametrize("name", story_names())
def test_nothing_sticks_out_of_the_window(driver, pages, name, width_px):
    opened(driver, pages[name], "light", width_px)
    for _ in range(4):
        keys(driver, "ARROW_RIGHT")
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1] == width_px
    inside = (
        "return [...document.querySelectorAll('.sequence, .pool, .events')].every((each) =>"
        " each.scrollWidth <= each.clientWidth + 1)"
    )
    assert driver.execute_script(inside)


@pytest.mark.slow
def test_blocks_of_more_than_eight_slots_have_lines(driver, pages):
    opened(driver, pages["fig3"])
    lines = (
        "return [...document.querySelectorAll('.pool > li:first-child .slots, .sequence:first-child tbody .slots')].map((slots) =>"
        " Object.values(Object.groupBy(slots.children, (slot) => slot.offsetTop)).map((line) => line.length))"
    )
    assert driver.execute_script(lines) == [[4, 4, 4, 4], [4, 4, 4, 4]]
    opened(driver, pages["samples"])
    assert driver.execute_script(lines)[-1] == [4]


@pytest.mark.slow
@pytest.mark.parametrize("name", story_names())
def test_paper_cuts_no_word(driver, pages, name):
    """At the width of A4 with margins, in each step; a word as long as a line breaks, and none is hidden."""
    opened(driver, pages[name], "light", 720)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    cut = (
        "return [...document.querySelectorAll('.slot, .scroll, .events li, .sequence, .pool > li')].filter((each) => each.checkVisibility()"
        " && (getComputedStyle(each).overflow !== 'visible' || each.scrollWidth > each.clientWidth + 1)).map((each) => each.textContent)"
    )
    try:
        for _ in range(int(driver.find_element("css selector", ".moment").get_attribute("max")) + 1):
            assert driver.execute_script(cut) == []
            driver.execute_script("document.querySelector('.story .next').click()")
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
def test_paper_has_the_step_that_is_shown_and_all_steps_in_words(driver, pages):
    opened(driver, pages["samples"])
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        visible = (
            "return ['.controls', '.pool', '.requests'].map((name) => document.querySelector(name).checkVisibility())"
        )
        assert driver.execute_script(visible) == [False, True, True]
        rows = "return [...document.querySelectorAll('section:has(#section-2) .scroll tbody tr th')].map((cell) => cell.textContent)"
        assert driver.execute_script(rows) == ["1", "2a", "2b", "3", "4", "5", "6", "end"]
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
