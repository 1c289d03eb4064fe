"""The block tables of a request, frame by frame, and in a real browser: what was recorded, and copies on write."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from browser import as_new, poor_texts, requested_urls, show, texts, wait
from fragmeter.reports.blockmap.table_viewer import Frame, TableViewer, chosen_request, table_frames
from fragmeter.reports.page.page import Section, write_page
from fragmeter.sim import Settings, Workload
from fragmeter.sim.recording.plans import Plan, record
from plan_cases import caching_case, swapping_case


def two_samples() -> Plan:
    """The paper's Fig 8: two samples of a prompt with a half-full last block."""
    requests = Workload("two", np.array([0]), np.array([7]), np.array([5]), n=np.array([2]))
    settings = Settings(model="toy-opt", block_size=4, num_gpu_blocks_override=9, max_model_len=32)
    return record(settings, requests)[1]


def requests_of(work: Workload) -> np.ndarray:
    return np.repeat(np.arange(len(work)), work.num_sequences)


def as_line(frame: Frame) -> str:
    tables = " ".join(str(table) for table in frame.tables)
    return f"{frame.step} {tables} {frame.tokens} {dict(sorted(frame.references.items()))} {frame.copy}"


def test_the_papers_figure_8():
    """Prefill, fork, copy on write: the references of block 1 fall from 2 to 1, and block 2 is the copy."""
    frames = [*table_frames(two_samples(), [0, 1])]
    assert [as_line(frame) for frame in frames[:5]] == [
        "0 [0, 1] [] [7, 0] {0: 1, 1: 1} None",
        "1 [0, 1] [0, 1] [7, 7] {0: 2, 1: 2} None",
        "1 [0, 2] [0, 1] [7, 7] {0: 2, 1: 1, 2: 1} (0, 1, 2, 2, 1)",
        "1 [0, 2] [0, 1] [8, 8] {0: 2, 1: 1, 2: 1} None",
        "2 [0, 2, 3] [0, 1, 4] [9, 9] {0: 2, 1: 1, 2: 1, 3: 1, 4: 1} None",
    ]
    assert [frame.text for frame in frames[:5]] == [
        "Sample 1 prefills 7 tokens.",
        "The step writes into block 1, which more than one table names.",
        "Copy on write: sample 1 takes block 2 in place of block 1, and the references of block 1 fall from 2 to 1.",
        "Sample 2 forks: its table names the blocks of sample 1, and each writes a token of its own.",
        "Each sample writes a token.",
    ]


@pytest.mark.parametrize("case", [swapping_case, caching_case])
def test_frames_are_what_the_plan_recorded(case):
    """The last frame of a step has its tables; copies lead there one by one, and no reference is lost on the way."""
    settings, work = case()
    plan, requests = record(settings, work)[1], requests_of(work)
    copies = 0
    for request in range(len(work)):
        sequences = np.flatnonzero(requests == request).tolist()
        frames = [*table_frames(plan, sequences)]
        for place, frame in enumerate(frames):
            step = plan.step(frame.step)
            rows = {name: row for row, name in enumerate(step.sequence.tolist())}
            recorded = [plan.block_table(frame.step, rows[s]).tolist() if s in rows else [] for s in sequences]
            named = Counter(b for row in range(len(rows)) for b in plan.block_table(frame.step, row).tolist())
            last = place + 1 == len(frames) or frames[place + 1].step != frame.step
            if last:
                assert frame.tables == recorded
                assert frame.references == {block: named[block] for table in recorded for block in table}
                continue
            if frame.copy:
                copies += 1
                sample, source, target, before, after = frame.copy
                assert [source, target] in step.copies.tolist() and after == before - 1
                was = frames[place - 1]
                assert was.references[source] == before >= 2 and target not in was.references
                assert frame.references[target] == 1 and target in recorded[sample]
                assert [was.tables[sample].index(source)] == [frame.tables[sample].index(target)]
            # Each table that is read below names as many blocks as were recorded.
            assert [*map(len, frame.tables)] == [*map(len, recorded)]
            assert sum(map(len, frame.tables)) <= sum(frame.references[b] for b in frame.references)
    assert copies == (len(plan.copies) if case is swapping_case else 0)


def test_the_request_that_is_shown_copies_a_block_if_one_does():
    settings, work = swapping_case()
    plan, requests = record(settings, work)[1], requests_of(work)
    chosen = chosen_request(plan, requests)
    assert any(frame.copy for frame in table_frames(plan, np.flatnonzero(requests == chosen).tolist()))
    settings, work = caching_case()
    assert chosen_request(record(settings, work)[1], requests_of(work)) == 0
    pieces = record(Settings(policy="orca-max", model="toy-opt"), work)[1]
    assert chosen_request(pieces, requests_of(work)) is None


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    viewer = TableViewer("vllm-sosp23", two_samples(), 0, [0, 1])
    path = tmp_path_factory.mktemp("page") / "page.html"
    return write_page(path, "Tables", "First paragraph.", [Section("Block tables", "Text.", widgets=[viewer])])


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium) as driver:
        yield driver


def look(driver, page: Path, scheme: str = "light", width_px: int = 1280) -> None:
    show(driver, page, scheme, width_px)
    wait(driver, "return document.querySelector('.tables').dataset.ready === 'true'")


def physical(driver) -> dict[int, int]:
    """References by block, as the page shows them."""
    script = """return [...document.querySelectorAll(".physical tbody tr")].map((row) =>
      [row.querySelector("th").textContent, row.querySelector(".number").textContent].map(Number))"""
    return dict(driver.execute_script(script))


def logical(driver) -> list[list[str]]:
    script = """return [...document.querySelectorAll(".logical tbody tr")].map((row) =>
      [...row.querySelectorAll("td")].map((cell) => cell.textContent))"""
    return driver.execute_script(script)


@pytest.mark.slow
def test_the_reference_count_falls_from_2_to_1_where_the_new_block_comes(driver, page):
    look(driver, page)
    assert driver.get_log("browser") == []
    assert [url for url in requested_urls(driver) if not url.startswith(("data:", "file:"))] == []
    assert physical(driver) == {0: 1, 1: 1} and logical(driver) == [["0", ""], ["1", ""]]
    driver.find_element("css selector", ".next").click()
    assert physical(driver) == {0: 2, 1: 2} and logical(driver) == [["0", "0"], ["1", "1"]]
    driver.find_element("css selector", ".copy").click()
    assert physical(driver) == {0: 2, 1: 1, 2: 1} and logical(driver) == [["0", "0"], ["2", "1"]]
    assert driver.find_element("css selector", ".where").text.startswith("step 1, ")
    assert driver.find_element("css selector", ".happens").text == (
        "Copy on write: sample 1 takes block 2 in place of block 1, and the references of block 1 fall from 2 to 1."
    )
    new = driver.execute_script("return document.querySelector('.logical .is-new').textContent")
    assert new == "2" and driver.find_element("css selector", ".tables .copy").get_property("disabled")
    driver.find_element("css selector", ".back").click()
    assert physical(driver) == {0: 2, 1: 2}


def test_the_slider_goes_to_the_last_step(driver, page):
    from selenium.webdriver.common.keys import Keys

    look(driver, page)
    slider = driver.find_element("css selector", ".frame")
    slider.send_keys(Keys.END)
    assert driver.find_element("css selector", ".happens").text.endswith("The request is done.")
    assert driver.find_element("css selector", ".next").get_property("disabled")
    slider.send_keys(Keys.HOME)
    assert physical(driver) == {0: 1, 1: 1}


@pytest.mark.slow
def test_the_keyboard_reaches_every_control(driver, page):
    from selenium.webdriver.common.keys import Keys

    look(driver, page)
    driver.execute_script("document.querySelector('.next').click(); document.activeElement.blur()")
    driver.execute_script("getSelection().collapse(document.body, 0)")
    reached = []
    for _ in range(20):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(driver.execute_script("return document.activeElement.className"))
    controls = ["back", "next", "copy", "frame"]
    assert [name for name in reached if name in controls][:4] == controls
    assert reached.count("scroll") >= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_a_contrast_of_4_5(driver, page, scheme):
    look(driver, page, scheme)
    found = texts(driver)
    assert {"Back", "Sample 1", "References", "Next copy"} <= {text for text, *_ in found}
    assert poor_texts(found) == []


@pytest.mark.parametrize("width_px", [1280, 400])
def test_nothing_sticks_out_of_the_window(driver, page, width_px):
    look(driver, page, "light", width_px)
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1] == width_px
