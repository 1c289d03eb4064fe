"""A headless Chromium that can reach no network, for tests of pages.

Tests that ask for one are skipped, visibly, where Chromium, its driver or selenium is missing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # Whatever asks for a host finds none, and the proxy is a port where nobody listens.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
)


@contextmanager
def offline_browser(width_px: int = 1280, height_px: int = 800) -> Iterator:
    """A selenium driver of a fresh Chromium of that window size, closed at the end; skips the test if there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, _CHROMIUM_NAMES)), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium or chromedriver is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width_px},{height_px}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # A given driver path keeps selenium from looking for one to download.
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
        try:
            driver.get("about:blank")
            requested_urls(driver)
            yield driver
        finally:
            driver.quit()


def emulate(driver: object, scheme: str, width_px: int = 1280, height_px: int = 800) -> None:
    """Shows the page as on a screen of that size to a reader who prefers the ``light`` or the ``dark`` scheme."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def requested_urls(driver: object) -> list[str]:
    """Every address the page has asked for since the last call, its own included; reading empties the log."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
