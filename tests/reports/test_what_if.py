"""The sliders of a plan in a real browser: each slider, lengths one at a time, addresses, keys, schemes and widths."""

from __future__ import annotations

from itertools import product
from math import floor
from pathlib import Path

import pytest

from browser import as_new, emulate, poor_texts, texts, wait
from fragmeter.reports.explore.axis import Axis
from fragmeter.reports.explore.what_if import NO_RATE, NOT_KNOWN, Offer, WhatIf
from fragmeter.reports.page.page import Section, write_page

AXES = [
    Axis("request_rate", "Request rate", "requests/s", "", ("2.5", "5", "10"), 1, True),
    Axis("objectives", "TTFT/TPOT", "ms", "", ("500/25", "1000/50"), 1, True),
    Axis("input_len", "Prompt length", "tokens", "", ("100", "200", "400"), 1, False),
    Axis("output_len", "Answer length", "tokens", "", ("50", "100", "200"), 1, False),
]
#: Places of the sliders, in the order in which the page numbers its states.
STATES = [
    (rate, goal, *lengths)
    for rate, goal, lengths in product(range(3), range(2), [(1, 1), (0, 1), (2, 1), (1, 0), (1, 2)])
]
#: Every state has its own fleets; the first rate meets no objective with the last lengths.
REPLICAS = [
    [NO_RATE if at[0] == 0 and at[3] == 2 else number + 1 for number, at in enumerate(STATES)],
    [
        NO_RATE if at[0] == 0 and at[3] == 2 else NOT_KNOWN if at[2] == 0 else 1100 - 40 * number
        for number, at in enumerate(STATES)
    ],
]
OFFERS = [
    Offer("h200, tensor_parallel_size=2", "h200", 2, 9.0, REPLICAS[0]),
    Offer("l40s", "l40s", 1, 0.9, REPLICAS[1]),
]
#: The bill of the cheapest at the start of every slider.
PLANNED = min(offer.price_a_replica * offer.replicas[STATES.index((1, 1, 1, 1))] for offer in OFFERS)
#: As the page writes it.
MINUS = "\u2212"
#: What the page shows: the sentence, and the line of each candidate.
SHOWN = """
return [document.querySelector(".what-if .best").textContent,
  [...document.querySelectorAll(".offers li")].map((line) => line.textContent)];
"""
#: A turn of a slider as by hand, and the milliseconds until the picture of it.
TURN = """
const [name, value, done] = arguments;
const input = document.querySelector(`.what-if input[data-axis=${name}]`);
const start = performance.now();
input.value = value;
input.dispatchEvent(new Event("input", { bubbles: true }));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    sections = [Section("What would it cost if", "Sliders.", widgets=[WhatIf(AXES, OFFERS, "USD")], key="what-if")]
    return write_page(tmp_path_factory.mktemp("what-if") / "plan.html", "A plan", "Buy some.", sections)


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium, 1400, 900) as driver:
        yield driver


def opened(driver, page: Path, scheme: str = "light", width_px: int = 1400, address: str = "") -> None:
    emulate(driver, scheme, width_px)
    driver.get("about:blank")
    driver.get(page.as_uri() + address)
    wait(driver, "return document.querySelector('.what-if')?.dataset.ready === 'true'")


def test_each_slider_shows_the_fleets_of_its_state(driver, page):
    opened(driver, page)
    at, times_ms = [1, 1, 1, 1], []
    for place, axis in enumerate(AXES):
        for value in (0, len(axis.values) - 1, axis.start):
            times_ms.append(driver.execute_async_script(TURN, axis.name, value))
            at[place] = value
            assert driver.execute_script(SHOWN) == expected(tuple(at))
    # Of a busy machine, the fastest.
    assert min(times_ms) < 100
    driver.execute_async_script(TURN, "request_rate", 0)
    driver.execute_async_script(TURN, "output_len", 2)
    assert driver.execute_script(SHOWN) == expected((0, 1, 1, 2))
    assert driver.get_log("browser") == []


def expected(at: tuple[int, ...]) -> list[object]:
    """The sentence and the lines of candidates at places of the sliders."""
    state, lines, bills = STATES.index(at), [], {}
    for offer in OFFERS:
        replicas = offer.replicas[state]
        cost = replicas * offer.price_a_replica
        said = {NO_RATE: "no rate meets these objectives", NOT_KNOWN: "not known"}.get(replicas)
        if said is None:
            said = bills[cost] = f"{replicas * offer.gpus_a_replica:,} x {offer.gpu}, {cost:,.2f} USD an hour"
        lines.append(f"{offer.name}: {said}")
    if not bills:
        return ["None of these candidates meets the objectives here.", lines]
    change = floor(100 * (min(bills) / PLANNED - 1) + 0.5)
    apart = f" ({'+' if change > 0 else MINUS}{abs(change):,} % of the plan's bill)" if change else ""
    return [f"{bills[min(bills)]}{apart}.", lines]


def test_only_one_length_is_away_from_the_plan(driver, page):
    opened(driver, page)
    for name in ("input_len", "output_len"):
        driver.execute_async_script(TURN, name, 0)
    shown = "return [...document.querySelectorAll('.what-if input')].map((input) => [input.dataset.axis, Number(input.value)])"
    places = dict(driver.execute_script(shown))
    assert (places["input_len"], places["output_len"]) == (1, 0)


def test_a_state_has_an_address_and_keys_move_the_sliders(driver, page):
    from selenium.webdriver.common.keys import Keys

    opened(driver, page)
    start = driver.execute_script(SHOWN)
    driver.find_element("css selector", ".what-if input[data-axis=request_rate]").send_keys(Keys.END)
    moved = driver.execute_script(SHOWN)
    assert moved != start and "% of the plan's bill" in moved[0]
    spoken = driver.execute_script("return document.querySelector('.what-if [role=status]').textContent")
    assert spoken == f"Request rate 10 requests/s. {moved[0]}"
    address = driver.current_url.partition("#")[2]
    opened(driver, page, address=f"#{address}")
    assert driver.execute_script(SHOWN) == moved
    driver.find_element("css selector", ".what-if .reset").send_keys("\n")
    assert driver.execute_script(SHOWN) == start


@pytest.mark.parametrize(("scheme", "width_px"), [("light", 1400), ("dark", 420)])
def test_text_can_be_read_and_nothing_runs_over(scheme, width_px, driver, page):
    opened(driver, page, scheme, width_px)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width_px
    assert poor_texts([text for text in texts(driver) if "color(" not in text[2]]) == []
    unnamed = "return [...document.querySelectorAll('.what-if input')].filter((part) => !part.labels?.length).length"
    assert driver.execute_script(unnamed) == 0
