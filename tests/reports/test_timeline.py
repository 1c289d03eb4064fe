"""The timeline of more requests than it draws, closer up, in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from browser import as_new, show, wait
from fragmeter.reports.figures.figures import request_timeline
from fragmeter.reports.figures.timeline import MOST_REQUESTS, request_spans
from fragmeter.reports.page.page import Section, write_page
from fragmeter.sim import Settings, simulate
from fragmeter.sim.metrics.residencies import residencies_table
from fragmeter.sim.metrics.result import requests_table
from fragmeter.traces import synthetic_pairs, workload


@pytest.fixture(scope="module")
def spans(tmp_path_factory) -> tuple[pd.DataFrame, Path]:
    """What thousands of requests did, and a page of them; the pool runs short, and every seventh is left out."""
    load = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 4200, seed=0, max_model_len=2048), request_rate=1.8)
    run = simulate(Settings(policy="vllm-sosp23", num_gpu_blocks_override=700, cost="paper"), load)
    residencies = residencies_table(run)
    residencies = residencies[residencies["request"] % 7 != 3]
    figure = request_timeline(requests_table(run), residencies, "Many")
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, "Many", "", [Section("Requests over time", "", [figure])])
    return request_spans(requests_table(run), residencies), path


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium, 1400, 1300) as driver:
        yield driver


PLOT = "const plot = document.querySelector('.plot');"
DRAWN = (
    PLOT
    + """
return plot.data.map(({ name, x, y }) => [name, Array.from(x), Array.from(y)]);
"""
)


def opened(driver, path: Path) -> None:
    show(driver, path, "light", 1400)
    wait(driver, "return document.querySelector('figure').dataset.ready === 'true'")


def drawn(driver) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """From when to when each request is drawn, by state."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for name, x, y in driver.execute_script(DRAWN):
        breaks = [place for place, value in enumerate(x) if value is None]
        for first, last in zip([0, *(place + 1 for place in breaks)], breaks):
            assert len(set(y[first:last])) == 1 and x[first:last] == sorted(x[first:last])
            found.setdefault((y[first], name), []).append((x[first], x[last - 1]))
    return found


def there(spans: pd.DataFrame, from_s: float, to_s: float) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """The same of what was simulated; what ends within a millisecond of the window is no matter."""
    inside = spans[(spans["start_s"] < to_s - 1e-3) & (spans["end_s"] > from_s + 1e-3)]
    inside = inside[inside["end_s"] - inside["start_s"] > 2e-3]
    rows = zip(inside["request"], inside["state"], inside["start_s"].clip(from_s), inside["end_s"].clip(upper=to_s))
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for request, state, start, end in rows:
        found.setdefault((request, state), []).append((start, end))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("length_s", [1, 30, 300])
def test_closer_up_every_request_is_drawn(driver, spans, length_s):
    table, path = spans
    opened(driver, path)
    zoom(driver, 1000.0, 1000.0 + length_s)
    shown, wanted = drawn(driver), there(table, 1000.0, 1000.0 + length_s)
    assert len({request for request, _ in wanted}) >= min(10 * length_s, 100)
    for key, parts in wanted.items():
        assert np.allclose(np.array(shown[key])[: len(parts)], parts, atol=2e-3), key
    extra = [part for key in shown.keys() - wanted.keys() for part in shown[key]]
    assert all(end - start < 5e-3 for start, end in extra)
    ends = [min(request for request, _ in shown), max(request for request, _ in shown)]
    assert driver.execute_script(PLOT + "return plot._fullLayout.yaxis.range") == [ends[1] + 0.6, ends[0] - 0.6]
    requests = len({request for request, _ in shown})
    text = driver.find_element("css selector", ".drawn").text
    assert text == f"{requests:,} requests are drawn from 1,000.00 to {1000 + length_s:,}.00 s."


def zoom(driver, from_s: float, to_s: float) -> None:
    driver.execute_async_script(
        PLOT + "Plotly.relayout(plot, { 'xaxis.range': [arguments[0], arguments[1]] }).then(arguments[2])", from_s, to_s
    )


@pytest.mark.slow
def test_keys_go_closer_and_back_to_all(driver, spans):
    from selenium.webdriver.common.keys import Keys

    table, path = spans
    opened(driver, path)
    plot = driver.find_element("css selector", ".plot")
    last = -1
    for keys in ("+++++", Keys.ARROW_RIGHT):
        plot.send_keys(keys)
        wanted = there(table, *driver.execute_script(PLOT + "return plot._fullLayout.xaxis.range"))
        shown = {request for request, _ in drawn(driver)}
        assert shown >= {request for request, _ in wanted} and max(shown) > last
        last = max(shown)
    plot.send_keys("0")
    assert len({request for request, _ in drawn(driver)}) == MOST_REQUESTS
    assert driver.find_element("css selector", ".drawn").text == f"{MOST_REQUESTS:,} requests are drawn."


@pytest.mark.slow
def test_a_box_keeps_to_its_requests(driver, spans):
    opened(driver, spans[1])
    zoom(driver, 1000.0, 1060.0)
    requests = sorted({request for request, _ in drawn(driver)})
    box = [requests[60] + 0.5, requests[50] - 0.5]
    driver.execute_async_script(
        PLOT + "Plotly.relayout(plot, { 'xaxis.range[0]': 1000, 'xaxis.range[1]': 1060, 'yaxis.range[0]': arguments[0],"
        " 'yaxis.range[1]': arguments[1] }).then(arguments[2])",
        *box,
    )
    assert sorted({request for request, _ in drawn(driver)}) == requests[50:61]
    assert driver.execute_script(PLOT + "return plot._fullLayout.yaxis.range") == box
