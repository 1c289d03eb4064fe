"""A headless Chromium that can reach no network, for tests of pages.

Tests that ask for one are skipped, visibly, where Chromium, its driver or selenium is missing.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contrast import contrast

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # Requests for a host find none, and the proxy is a port without a listener.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
)


@contextmanager
def offline_browser() -> Iterator:
    """A selenium driver of a fresh Chromium, closed at the end; skips the test if there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium or chromedriver is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # A given driver path keeps selenium from looking for one to download.
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
        try:
            yield driver
        finally:
            driver.quit()


@contextmanager
def as_new(driver: object, width_px: int = 1280, height_px: int = 800) -> Iterator:
    """The browser as after a start: with a window of that size, an empty page, nothing emulated and nothing logged. It is left with
    an empty page, so that no page goes on beside other tests."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    driver.set_window_size(width_px, height_px)
    driver.get("about:blank")
    driver.get_log("browser")
    requested_urls(driver)
    yield driver
    driver.get("about:blank")


def emulate(driver: object, scheme: str, width_px: int = 1280, height_px: int = 800) -> None:
    """Shows the page on a screen of that size, with ``light`` or ``dark`` as the preferred colour scheme."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def requested_urls(driver: object) -> list[str]:
    """Every address the page has asked for since the last call, its own included; reading empties the log."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def show(driver: object, page: Path, scheme: str, width_px: int = 1280) -> None:
    """Opens the page and waits until every figure is drawn in the scheme."""
    emulate(driver, scheme, width_px)
    if driver.current_url != page.as_uri():
        driver.get(page.as_uri())
    wait(driver, f"return document.documentElement.dataset.drawn === '{scheme}'")


def wait(driver: object, condition: str) -> None:
    """Waits until a script returns true; a test fails where it never does."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20, poll_frequency=0.05).until(lambda shown: shown.execute_script(condition), condition)


#: Keeps what the page would download: name and blob of the link that it clicks. Chromium writes a file now and then
#: only after a minute, which says nothing of the page.
_KEEP_DOWNLOADS = """
window.kept = null;
const blobs = new Map();
const createUrl = URL.createObjectURL;
URL.createObjectURL = (blob) => { const url = createUrl(blob); blobs.set(url, blob); return url; };
HTMLAnchorElement.prototype.click = function () { window.kept = { name: this.download, blob: blobs.get(this.href) }; };
"""
_READ_KEPT = "const done = arguments[0]; window.kept.blob.text().then((text) => done([window.kept.name, text]));"


def saved_csv(driver: object, place: int) -> tuple[str, list[list[str]]]:
    """Presses the page's CSV button of that place and reads what it saves: the file's name and its rows."""
    driver.execute_script(_KEEP_DOWNLOADS)
    button = driver.find_elements("css selector", ".csv")[place]
    button.send_keys("\n")
    name, text = driver.execute_async_script(_READ_KEPT)
    assert name == button.get_attribute("data-file")
    return name, list(csv.reader(io.StringIO(text, newline=""), strict=True))


# Every text that can be seen, with its colour and all colours behind it: for a bar's label the bar's own fill, for a
# legend or an axis the paper of the figure, for HTML the nearest background that is not transparent.
TEXTS = """
const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true })
  && element.getBoundingClientRect().width > 1;
function behindHtml(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
  return "rgb(255, 255, 255)";
}
function behindSvg(element) {
  if (element.matches(".bartext")) return getComputedStyle(element.parentElement.querySelector("path")).fill;
  return element.closest(".plot").querySelector(".main-svg").style.backgroundColor;
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.textContent.trim() || element.closest("script, noscript, .unseen, .skip") || !shown(element)) continue;
  const svg = element.closest("text");
  found.push([node.textContent, svg ? getComputedStyle(element).fill : getComputedStyle(element).color,
    svg ? behindSvg(svg) : behindHtml(element)]);
}
return found;
"""


def texts(driver: object) -> list[list[str]]:
    """Every text that can be seen, its colour, and the colour behind it."""
    return driver.execute_script(TEXTS)


def poor_texts(found: list[list[str]], least: float = 4.5) -> list[list[str]]:
    """Those of too little contrast."""
    return [text for text in found if contrast(hexed(text[1]), hexed(text[2])) < least]


def hexed(colour: str) -> str:
    """A colour as browsers tell it, as ``#rrggbb``."""
    red, green, blue, *alpha = (float(part) for part in re.findall(r"[\d.]+", colour))
    assert alpha in ([], [1.0]), colour
    return "#" + "".join(f"{round(channel):02x}" for channel in (red, green, blue))
