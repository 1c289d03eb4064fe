"""The page of sliders in a real browser: each slider, the numbers of simulate, addresses, lines, steps, schemes, widths, keys."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest

import fragmeter as fm
from browser import as_new, poor_texts, requested_urls, show, texts, wait
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.metrics.views import WASTE, amount, nine_buckets

AXES = {
    "request_rate": ["4", "8"], "output_len": ["60", "120"], "max_tokens": ["256", "512", "2048"], "input_len": ["60", "120"],
    "block_size": ["16", "64", "256"], "pool_tokens": ["7680", "15360"],
}  # fmt: skip
CROSSED = ("request_rate", "output_len", "max_tokens")
STARTS = {name: values[0] for name, values in AXES.items()}
POLICIES = ("static", "orca", "orca-pow2", "vllm-sosp23")
LABELS = {
    "request_rate": "Request rate", "output_len": "Answer length", "max_tokens": "max_tokens", "input_len": "Prompt length",
    "block_size": "Block size", "pool_tokens": "KV cache pool",
}  # fmt: skip
CARDS = """
return [...document.querySelectorAll(".card")].map((card) => ({
  run: Number(card.dataset.run), waste: card.querySelector(".wasted b").textContent, was: card.querySelector(".was").textContent,
  bar: card.querySelector(".bar").getAttribute("aria-label"), moment: card.querySelector(".moment-of").textContent,
  ...Object.fromEntries([...card.querySelectorAll("[data-number]")].map((cell) => [cell.dataset.number, cell.textContent])),
}));
"""
LINES = "return [...document.querySelectorAll('.lines pre')].map((line) => line.textContent)"
DIALS = """
return Object.fromEntries([...document.querySelectorAll(".dial input")].map((input) => [input.dataset.axis,
  { label: input.labels[0].textContent, text: input.getAttribute("aria-valuetext"), place: Number(input.value) }]));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "waste.html"
    given = [
        (f"--{'grid' if name in CROSSED else 'vary'}", f"{name}={','.join(values)}") for name, values in AXES.items()
    ]
    tokens = [word for pair in given for word in pair]
    assert status(["explore", "--num-prompts", "80", *tokens, "--jobs", "1", "--out", str(path)]) == DONE
    return path


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium) as driver:
        yield driver


def opened(
    driver, page: Path, scheme: str = "light", width_px: int = 1400, state: dict[str, str] | None = None
) -> None:
    """The page at a state, at first that of its start."""
    if driver.current_url.partition("#")[0] != page.as_uri() or "=" in driver.current_url:
        driver.get("about:blank")
    show(driver, page, scheme, width_px)
    wait(driver, "return document.querySelector('.explore')?.dataset.ready === 'true'")
    go(driver, state or {})


def go(driver, state: dict[str, str]) -> None:
    """To the address of a state; the page names what it shows once it is drawn."""
    address = "&".join(f"{name}={value}" for name, value in (STARTS | state).items())
    driver.execute_script(
        "document.querySelector('.explore').dataset.state = ''; history.replaceState(null, '', '#');"
        "location.hash = arguments[0]",
        address,
    )
    wait(driver, "return document.querySelector('.explore').dataset.state !== ''")


def slide(driver, name: str, place: int) -> None:
    """Moves a slider as a hand does."""
    driver.execute_script(
        "document.querySelector('.explore').dataset.state = '';"
        "const input = document.querySelector(`.dial input[data-axis=${arguments[0]}]`); input.value = arguments[1];"
        "input.dispatchEvent(new Event('input', { bubbles: true }))",
        name,
        place,
    )
    wait(driver, "return document.querySelector('.explore').dataset.state !== ''")


def simulated(line: str, folder: Path) -> dict:
    """What ``fragmeter simulate`` says of a line that the page shows."""
    _, *words = shlex.split(line)
    assert status([*words, "--json", str(folder / "run.json")]) == DONE
    return json.loads((folder / "run.json").read_text())


def check_card(card: dict[str, str], found: dict) -> None:
    """The numbers of a card are those of the JSON of simulate, to the digits that it shows."""
    buckets = nine_buckets(found["waste"]["mean_over_iterations_pct"]["buckets"])
    values = {
        "waste": amount(buckets, WASTE),
        "mean_ttft_ms": found["mean_ttft_ms"],
        "output_throughput": found["output_throughput"],
        "mean_batch": found["mean_batch"],
        "preemptions": sum(found["preemptions"].values()),
        "refused": found["refused"],
    }
    for name, value in values.items():
        number, _, unit = card[name].replace(",", "").partition(" ")
        decimals = len(number.partition(".")[2])
        scale = 1000 if unit == "s" else 1
        # The page rounds numbers that it has with a few digits more.
        assert float(number) == pytest.approx(value / scale, abs=0.51 * 10**-decimals), (name, card[name], value)
    parts = dict(part.rsplit(" ", 2)[:2] for part in card["bar"].partition(": ")[2].split(", "))
    assert {name.replace(" ", "_"): float(part) for name, part in parts.items()} == {
        bucket: pytest.approx(share, abs=0.06) for bucket, share in buckets.items() if round(share, 3)
    }


def drawn_states(count: int) -> list[dict[str, str]]:
    rng, states = random.Random(58), []
    for _ in range(count):
        state = {name: rng.choice(AXES[name]) for name in CROSSED}
        varied = rng.choice([name for name in AXES if name not in CROSSED])
        states.append(state | {varied: rng.choice(AXES[varied])})
    return states


def test_it_opens_without_an_error_and_asks_for_nothing(driver, page):
    requested_urls(driver)
    opened(driver, page)
    assert driver.get_log("browser") == []
    urls = [url for url in requested_urls(driver) if not url.startswith(("data:", "about:"))]
    assert {url.partition("#")[0] for url in urls} == {page.as_uri()}


@pytest.mark.slow
def test_ten_states_have_the_numbers_of_simulate_and_lines_that_make_them(driver, page, tmp_path, capsys):
    opened(driver, page)
    for state in drawn_states(10):
        go(driver, state)
        cards, lines = driver.execute_script(CARDS), driver.execute_script(LINES)
        assert len(cards) == len(POLICIES) and len(lines) == 2 * len(POLICIES)
        for place, card in enumerate(cards):
            found = simulated(lines[2 * place], tmp_path)
            check_card(card, found)
            made = eval(lines[2 * place + 1], {"fm": fm})
            assert made.run.settings.policy == POLICIES[place]
            assert made.as_dict()["mean_ttft_ms"] == found["mean_ttft_ms"]
            assert made.as_dict()["waste"] == found["waste"]
        asked = STARTS | state
        for name, flag in (
            ("request_rate", "--request-rate"),
            ("output_len", "--output-len"),
            ("block_size", "--block-size"),
        ):
            assert all(f"{flag} {asked[name]}" in line for line in lines[::2])
        blocks = int(asked["pool_tokens"]) // int(asked["block_size"])
        assert all(f"--num-gpu-blocks-override {blocks}" in line for line in lines[::2])


@pytest.mark.parametrize("name", AXES)
def test_each_slider_moves_what_reads_it_and_names_its_value(name, driver, page):
    opened(driver, page)
    before = driver.execute_script(CARDS)
    for place, value in enumerate(AXES[name][1:], 1):
        slide(driver, name, place)
        dial = driver.execute_script(DIALS)[name]
        assert (dial["label"], dial["place"]) == (LABELS[name], place)
        assert dial["text"].split()[0].replace(",", "") == value
        assert f"{name}={value}" in driver.current_url
        said = driver.execute_script("return document.querySelector('.changed').textContent")
        assert said.startswith(f"{LABELS[name]} ") and "vLLM: " in said
    after = driver.execute_script(CARDS)
    unread = {"max_tokens": {"orca-pow2", "vllm-sosp23"}}.get(name, set())
    changed = {policy for policy, one, other in zip(POLICIES, before, after, strict=True) if one["run"] != other["run"]}
    assert changed == {*POLICIES} - unread
    assert all(
        card["was"] == "The same run as before."
        for card, policy in zip(after, POLICIES, strict=True)
        if policy in unread
    )
    slide(driver, name, 0)
    assert [card["run"] for card in driver.execute_script(CARDS)] == [card["run"] for card in before]


@pytest.mark.slow
def test_of_sliders_that_vary_one_at_a_time_the_others_go_back(driver, page):
    opened(driver, page)
    slide(driver, "request_rate", 1)
    slide(driver, "input_len", 1)
    slide(driver, "block_size", 2)
    places = {name: dial["place"] for name, dial in driver.execute_script(DIALS).items()}
    assert places == {**dict.fromkeys(AXES, 0), "request_rate": 1, "block_size": 2}


@pytest.mark.slow
def test_keys_move_a_slider(driver, page):
    from selenium.webdriver.common.keys import Keys

    opened(driver, page)
    slider = driver.find_element("css selector", ".dial input[data-axis=max_tokens]")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert driver.execute_script(DIALS)["max_tokens"]["text"] == "512 tokens"
    slider.send_keys(Keys.END)
    assert driver.execute_script(DIALS)["max_tokens"]["text"] == "2,048 tokens"


@pytest.mark.slow
def test_every_question_shows_what_to_look_at_and_a_change(driver, page):
    opened(driver, page)
    buttons = driver.find_elements("css selector", ".ask")
    assert [button.text for button in buttons] == [
        "Double max_tokens: what happens to Orca?", "Why does Orca (Max) waste?", "What does a larger block do?",
        "When does vLLM preempt?",
    ]  # fmt: skip
    for place, button in enumerate(buttons):
        driver.execute_script("arguments[0].click()", button)
        assert button.get_attribute("aria-pressed") == "true"
        assert driver.find_element("css selector", ".look").is_displayed()
        was = [card["was"] for card in driver.execute_script(CARDS)]
        assert was[1].startswith("Before: ")
        assert was[3].startswith("The same run" if place < 2 else "Before: ")
    # Pictures are drawn anew where a text makes the page longer, and a map may come later.
    wait(driver, "return document.querySelector('.explore').dataset.state !== ''")
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_stepping_through_shows_the_queue_and_ends_with_all_served(driver, page):
    opened(driver, page)
    time = "const time = document.querySelector('.explore .time'); time.value = arguments[0]; time.dispatchEvent(new Event('input'))"
    driver.execute_script(time, 0)
    first = [card["moment"] for card in driver.execute_script(CARDS)]
    assert all("running" in text for text in first)
    driver.execute_script(time, 10**6)
    last = [card["moment"] for card in driver.execute_script(CARDS)]
    assert all(text.startswith("All served after ") for text in last)
    driver.execute_script("document.querySelector('.explore .play').click()")
    wait(driver, "return document.querySelector('.explore .time').value > 1")
    driver.execute_script("document.querySelector('.explore .play').click()")


@pytest.mark.slow
def test_maps_show_the_pool_in_colours_of_the_scheme(driver, page):
    seen = {}
    for scheme in ("light", "dark"):
        opened(driver, page, scheme)
        seen[scheme] = driver.execute_script(
            "return [...document.querySelectorAll('.map')].map((map) => {"
            "const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);"
            "const found = new Set(); for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());"
            "return found.size; })"
        )
        assert all(colours > 3 for colours in seen[scheme])


@pytest.mark.slow
@pytest.mark.parametrize("width_px", [1400, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_nothing_runs_over(scheme, width_px, driver, page):
    opened(driver, page, scheme, width_px)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width_px
    assert poor_texts([text for text in texts(driver) if "color(" not in text[2]]) == []


@pytest.mark.slow
def test_sliders_and_pictures_are_on_the_first_screen(driver, page):
    opened(driver, page, width_px=1400)
    driver.execute_script("scrollTo(0, 0)")
    bottoms = "return [...document.querySelectorAll('.dials, .map')].map((part) => part.getBoundingClientRect().bottom)"
    assert max(driver.execute_script(bottoms)) < 800


@pytest.mark.slow
def test_every_picture_and_slider_has_a_name(driver, page):
    opened(driver, page)
    unnamed = (
        "return [...document.querySelectorAll('.explore :is(input, canvas, .bar)')].filter((part) =>"
        " !part.getAttribute('aria-label') && !part.labels?.length).length"
    )
    assert driver.execute_script(unnamed) == 0
