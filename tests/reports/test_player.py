"""The block map in a real browser: its pixels are what was recorded, it moves, and says what is under the pointer."""

from __future__ import annotations

import base64
import random
import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from browser import as_new, poor_texts, requested_urls, saved_csv, texts, wait
from fragmeter.reports.blockmap.palette import KIND_LABELS, KINDS
from fragmeter.reports.blockmap.player import PlayedMap, Player
from fragmeter.reports.page.page import Section, write_page
from fragmeter.sim import Settings
from fragmeter.sim.recording.blocks import GIVEN_UP, NO_SEQUENCE, BlockMap, record
from fragmeter.traces import synthetic_pairs, workload
from plan_cases import swapping_case
from played import PIXELS, meaning, play, plots, seconds, set_time, state

POLICIES = ("orca-max", "vllm-sosp23")


@pytest.fixture(scope="module")
def maps() -> dict[str, BlockMap]:
    """Two policies on one load, over a pool of which vLLM's runs short."""
    load = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 60, seed=0, max_model_len=2048), request_rate=4)
    pool = {"num_gpu_blocks_override": 300, "model": "opt-13b"}
    return {policy: record(Settings(policy=policy, **pool), load, most_columns=400)[1] for policy in POLICIES}


@pytest.fixture(scope="module")
def page(maps, tmp_path_factory) -> Path:
    player = Player([PlayedMap(policy, found, np.arange(60)) for policy, found in maps.items()])
    sections = [Section("The block map", "Two policies.", widgets=[player])]
    return write_page(tmp_path_factory.mktemp("page") / "page.html", "Blocks", "First paragraph.", sections)


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium, 1400, 1300) as driver:
        yield driver


@pytest.mark.slow
def test_it_opens_without_an_error_and_asks_for_nothing(driver, page):
    play(driver, page)
    assert driver.get_log("browser") == []
    assert [url for url in requested_urls(driver) if not url.startswith(("data:", "file:"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_thousand_pixels_decode_to_the_state_that_was_recorded(driver, page, maps, scheme):
    play(driver, page, scheme)
    for plot, found in zip(plots(driver), maps.values(), strict=True):
        columns, rows = found.bucket.shape
        draw = random.Random(7)
        places = [[draw.randrange(columns), draw.randrange(rows)] for _ in range(1000)]
        size, colours = driver.execute_async_script(PIXELS, f"#{plot} image", places)
        assert size == [columns, rows]
        for (column, row), colour in zip(places, colours, strict=True):
            assert meaning(colour, scheme) == state(found, column, row)


def cells(driver, screen: int, places: list[int]) -> list[list[int]]:
    """Colours of cells of the grid of the pool, by row of the map."""
    script = """
    const [screen, places] = arguments;
    const canvas = document.querySelectorAll(".grid")[screen], wide = arguments[2];
    const cell = canvas.width / wide, context = canvas.getContext("2d");
    return places.map((at) => {
      const [x, y] = [(at % wide + 0.4) * cell, (Math.floor(at / wide) + 0.4) * cell];
      return Array.from(context.getImageData(x, y, 1, 1).data.slice(0, 3));
    });
    """
    return driver.execute_script(script, screen, places, 32)


@pytest.mark.slow
def test_the_slider_moves_the_cursor_and_the_pool(driver, page, maps):
    play(driver, page)
    end_s = max(found.meta["end_ticks"] for found in maps.values()) / 1e12
    lefts = []
    for share in (0.1, 0.35, 0.8):
        set_time(driver, share)
        assert seconds(driver) == pytest.approx(share * end_s, abs=0.1 + end_s / 400)
        lefts.append(driver.execute_script("return document.querySelector('.cursor').getBoundingClientRect().left"))
        exact = driver.execute_script("const s = document.querySelector('.time'); return s.value / s.max") * end_s
        for screen, found in enumerate(maps.values()):
            column = min(int(exact / (found.meta["end_ticks"] / 1e12) * found.num_columns), found.num_columns - 1)
            rows = list(range(0, len(found.block_ids), 7))
            shown = [meaning(colour, "light") for colour in cells(driver, screen, rows)]
            assert shown == [state(found, column, row) for row in rows]
            said = driver.find_elements("css selector", ".state")[screen].text
            live = found.census_slots[column, 0] / found.census_slots[column].sum()
            # A script rounds ties up, Python to even: 97.25 is 97.3 on the page.
            shown_live = re.search(r"live ([\d.]+) %", said)
            assert not live if shown_live is None else float(shown_live[1]) == pytest.approx(100 * live, abs=0.0501)
    assert lefts == sorted(lefts) and len(set(lefts)) == 3


@pytest.mark.parametrize("width_px", [1080, 1400])
def test_maps_beside_each_other_are_at_one_height_under_any_legend(driver, page, width_px):
    play(driver, page, "light", width_px)
    tops = """return [...document.querySelectorAll('.player .plot')].map((plot) =>
      plot.getBoundingClientRect().top + plot._fullLayout.yaxis._offset)"""
    heights = "return [...document.querySelectorAll('.legend')].map((legend) => legend.children.length)"
    assert len(set(driver.execute_script(tops))) == 1 and len(set(driver.execute_script(heights))) == 2


@pytest.mark.slow
def test_play_runs_and_stops_at_the_end(driver, page):
    play(driver, page)
    set_time(driver, 0)
    button = driver.find_element("css selector", ".play")
    button.click()
    assert button.text == "Pause" and button.get_attribute("aria-pressed") == "true"
    wait(driver, "return parseFloat(document.querySelector('.now').textContent) > 0")
    button.click()
    assert button.text == "Play" and button.get_attribute("aria-pressed") == "false"
    set_time(driver, 0.99)
    button.click()
    wait(driver, "return document.querySelector('.play').textContent === 'Play'")
    assert driver.execute_script("const s = document.querySelector('.time'); return s.value === s.max")


POINTED_BLOCK = """
const plot = document.getElementById(arguments[0]), { yaxis } = plot._fullLayout;
return Math.round(yaxis.p2l(window.pointedAt - plot.getBoundingClientRect().top - yaxis._offset));
"""


@pytest.mark.slow
def test_the_pointer_shows_the_holder_of_a_block(driver, page, maps):
    from selenium.webdriver.common.action_chains import ActionChains

    play(driver, page)
    driver.execute_script("addEventListener('pointermove', (event) => { window.pointedAt = event.clientY; }, true)")
    for plot, found in zip(plots(driver), maps.values(), strict=True):
        element = driver.find_element("css selector", f"#{plot} .nsewdrag")
        driver.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", element)
        width, height = element.size["width"], element.size["height"]
        reach = found.meta["end_ticks"] / max(other.meta["end_ticks"] for other in maps.values())
        for share_x, share_y in ((0.2, 0.3), (0.5, 0.6), (0.8, 0.9)):
            # Offsets are from the middle.
            place = int((share_x * reach - 0.5) * width), int((share_y - 0.5) * height)
            ActionChains(driver).move_to_element_with_offset(element, *place).perform()
            said = driver.find_element("css selector", ".tip").text
            block = int(re.match(r"block ([\d,]+)", said)[1].replace(",", ""))
            assert block == driver.execute_script(POINTED_BLOCK, plot)
            at = float(re.search(r"([\d.,]+) s$", said)[1].replace(",", ""))
            column = int(np.abs(found.start_ticks / 1e12 - at).argmin())
            # Of columns that show the same step any will do.
            kind, holder = int(found.bucket[column, block]), int(found.sequence[column, block])
            assert KIND_LABELS[KINDS[kind]] in said
            if holder != NO_SEQUENCE:
                tokens, references = found.live_slots[column, block], found.references[column, block]
                assert f"request {holder}, " in said and f"{tokens} of 16 slots hold tokens, {references} ref" in said


@pytest.mark.slow
def test_a_block_that_a_preemption_freed_names_its_last_holder(driver, page, maps):
    found = maps["vllm-sosp23"]
    column, row = (int(place) for place in np.argwhere(found.bucket == GIVEN_UP)[0])
    holder = next(held for held in found.sequence[column::-1, row] if held != NO_SEQUENCE)
    assert holder in found.preempted_sequence
    play(driver, page)
    text = driver.execute_script("return document.querySelectorAll('.chosen')[1].textContent")
    assert text.startswith("block 0: ")
    end_s = max(other.meta["end_ticks"] for other in maps.values())
    share = found.at_ticks[column] / end_s
    driver.execute_script("document.querySelector('.time').step = 'any'; document.querySelector('.time').max = 1e6")
    driver.execute_script(
        "const block = document.querySelector('.block'); block.value = arguments[0];"
        "block.dispatchEvent(new Event('input', { bubbles: true }))",
        row,
    )
    driver.execute_script(
        "const slider = document.querySelector('.time'); slider.value = arguments[0] * 1e6;"
        "slider.dispatchEvent(new Event('input', { bubbles: true }))",
        float(share),
    )
    text = driver.execute_script("return document.querySelectorAll('.chosen')[1].textContent")
    assert text == f"block {row}: free since a preemption of request {holder}"
    driver.refresh()


@pytest.mark.slow
def test_the_keyboard_reaches_every_control_and_moves_it(driver, page):
    from selenium.webdriver.common.keys import Keys

    play(driver, page)
    driver.execute_script("document.activeElement.blur(); getSelection().collapse(document.body, 0)")
    reached = []
    for _ in range(30):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        here = driver.execute_script(
            "const at = document.activeElement; return [at.className || at.tagName, getComputedStyle(at).outlineStyle]"
        )
        if here[0] == "BODY":
            break
        reached.append(here)
        if here[0] == "time":
            before = seconds(driver)
            driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT * 5)
            assert seconds(driver) > before
    names = [name for name, _ in reached]
    assert [name for name in names if name in ("play", "time", "block")] == ["play", "time", "block"]
    assert sum(name.startswith("plot") for name in names) == 2
    assert all(outline != "none" for _, outline in reached)


@pytest.mark.slow
def test_keys_zoom_all_maps_together(driver, page):
    from selenium.webdriver.common.keys import Keys

    play(driver, page)
    ranges = "return [...document.querySelectorAll('.player .plot')].map((plot) => plot._fullLayout.xaxis.range)"
    whole = driver.execute_script(ranges)
    plot = driver.find_element("css selector", ".player .plot")
    plot.send_keys("+")
    wait(driver, f"{ranges}.every((range) => range[0] > 0)")
    near = driver.execute_script(ranges)
    assert near[0] == near[1] != whole[0]
    plot.send_keys(Keys.ARROW_RIGHT)
    wait(driver, f"{ranges}.every((range) => range[0] > {near[0][0]})")
    plot.send_keys("0")
    wait(driver, f"{ranges}.every((range) => range[0] <= 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_a_contrast_of_4_5(driver, page, scheme):
    play(driver, page, scheme)
    found = texts(driver)
    assert {"Play", "The pool at that moment, block by block", "over estimate"} <= {text for text, *_ in found}
    assert poor_texts(found) == []


@pytest.mark.parametrize("width_px", [1400, 400])
def test_nothing_sticks_out_of_the_window(driver, page, width_px):
    play(driver, page, "light", width_px)
    widths = "document.documentElement.scrollWidth <= window.innerWidth && window.innerWidth"
    wait(driver, f"return {widths} === {width_px}")


def test_planes_say_which_sample_of_which_request_holds_a_block():
    settings, work = swapping_case()
    _, found = record(settings, work)
    requests = np.repeat(np.arange(len(work)), work.num_sequences)
    data = PlayedMap("samples", found, requests).data()
    planes = {name: plane_of(plane).reshape(data["rows"], data["columns"]).T for name, plane in data["planes"].items()}
    first = plane_of(data["first_requests"])
    request = plane_of(data["requests"])[first[:-1, None] + planes["holder"] - 1]
    for column, place in enumerate(planes["holder"][1:], start=1):
        request[column] = np.where(place == 0, request[column - 1], request[column])
    held = found.sequence != NO_SEQUENCE
    assert (request[~held & (found.bucket != GIVEN_UP)] == NO_SEQUENCE).all()
    assert (planes["live"] + 4 * (found.bucket == KINDS.index("live")) == found.live_slots).all()
    assert (planes["references"] + held == found.references).all() and planes["references"].any()
    own = np.concatenate([np.arange(count) for count in work.num_sequences])
    assert (request[held] == requests[found.sequence[held]]).all()
    assert (planes["sample"][held] == own[found.sequence[held]]).all() and planes["sample"].any()


def plane_of(plane: dict[str, str]) -> np.ndarray:
    """A plane as a page's script inflates it."""
    kind = np.dtype(plane["kind"].removesuffix("Array").lower())
    places = np.frombuffer(zlib.decompress(base64.b64decode(plane["text"])), np.uint8)
    return places.reshape(kind.itemsize, -1).T.copy().view(kind).ravel().astype(np.int64)


@pytest.mark.slow
def test_a_map_in_steps_has_a_clock_of_steps(driver, maps, tmp_path):
    """The first map, a tick of which is a step of a run as long."""
    found = maps[POLICIES[0]]
    stride = int(found.at_ticks[1] - found.at_ticks[0])
    ticks = {name: getattr(found, name) // stride for name in ("at_ticks", "start_ticks", "preempted_ticks")}
    in_steps = replace(found, meta={**found.meta, "end_ticks": found.num_columns}, **ticks)
    player = Player([PlayedMap("steps", in_steps, np.arange(60), in_steps=True)])
    page = write_page(tmp_path / "page.html", "Blocks", "", [Section("The block map", widgets=[player])])
    play(driver, page)
    now = driver.find_element("css selector", ".now").text
    assert now == f"step {found.num_columns // 3:,}"
    _, rows = saved_csv(driver, 0)
    assert rows[0][1:3] == ["From (step)", "To (step)"]
