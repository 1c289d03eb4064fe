"""Take the pictures of the README and the gallery from a page: ``python docs/screenshots.py PAGE FOLDER``.

Needs Chromium and selenium.
"""

from __future__ import annotations

import shutil
import sys
from base64 import b64decode
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

#: What is shown of each page, by the start of the section's title and what of the section.
PICTURES = {
    "reproduction.html": {"fig2.png": ("Fig 2", "figure"), "waste.png": ("The waste table", "figure")},
    "report.html": {
        "blocks.png": ("The block map", ".screens"),
        "memory.png": ("Memory over time", "div:has(> figure)"),
    },
    "own_policy.html": {"own-policy.png": ("Waste bars", "div")},
    "sweep.html": {},
    "plan.html": {},
    "trace.html": {},
    "waste-today.html": {},
    "waste.html": {},
    "tables.html": {"tables.png": ("Block tables", ".tables")},
    "story.html": {"story.png": ("Step by step", ".stages")},
}
#: The first screen of each of these pages is in the gallery as ``page-NAME.png``.
FIRST_SCREENS = (
    "reproduction.html", "report.html", "sweep.html", "plan.html", "trace.html", "story.html",
    "waste-today.html", "waste.html",
)  # fmt: skip
#: Scripts that run before a picture is taken.
FIRST = {
    "tables.png": "document.querySelector('.tables .copy').click()",
    "story.png": "for (let step = 0; step < 2; step++) document.querySelector('.story .next').click()",
    # Both pools are busy after a quarter of the time.
    "blocks.png": "const slider = document.querySelector('.time'); slider.value = slider.max / 4;"
    "slider.dispatchEvent(new Event('input', { bubbles: true }))",
}
#: Hides controls and folded text, which have no use in a picture, and the scroll bar: a capture beyond the window has none,
#: and its text would wrap otherwise.
STYLE = """
const style = document.createElement("style");
style.textContent = "html { scrollbar-width: none } .player .controls, .story > :is(.controls, .keys), .chosen, .numbers, figcaption p { display: none }";
document.head.append(style);
"""
#: A page may be longer than the window; a clip is a place of the whole page.
PLACE = """
arguments[0].scrollIntoView({ block: "center", behavior: "instant" });
const place = arguments[0].getBoundingClientRect();
return { x: place.x + scrollX, y: place.y + scrollY, width: place.width, height: place.height };
"""
#: Whether all unfolded pictures are drawn, so that none moves what is below it.
DRAWN = "return !document.querySelector('.plot') || document.documentElement.dataset.drawn"
MARGIN_PX = 12
SCREEN_PX = {"width": 1400, "height": 900}
#: First screens are smaller than on a screen, and so are pictures that would be large files.
SMALLER = 0.7
SCALES = {"blocks.png": 0.65, "page-reproduction.png": 0.6}
WIDTH_PX, HEIGHT_PX = 1000, 5000
#: Widths of pages with parts side by side.
WIDE_PX = {"report.html": 1180, "story.html": 1100}


def browser() -> webdriver.Chrome:
    """A headless Chromium of a laptop's width."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={WIDTH_PX},{HEIGHT_PX}")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def main(page: str, folder: str) -> None:
    """Save the first screen, if it is wanted, and the first picture of each section that is."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    driver, shown = browser(), Path(page).name
    try:
        address = Path(page).resolve().as_uri()
        if shown in FIRST_SCREENS:
            name = f"page-{Path(page).stem}.png"
            (Path(folder) / name).write_bytes(first_screen(driver, address, SCALES.get(name, SMALLER)))
        driver.set_window_size(WIDE_PX.get(shown, WIDTH_PX), HEIGHT_PX)
        driver.get(address)
        WebDriverWait(driver, 120).until(lambda _: driver.execute_script(DRAWN))
        driver.execute_script(STYLE)
        for name, (title, part) in PICTURES[shown].items():
            section = driver.find_element(By.XPATH, f"//section[.//h2[starts-with(., '{title}')]]")
            WebDriverWait(driver, 60).until(lambda _, drawn=section: is_drawn(drawn))
            driver.execute_script(FIRST.get(name, ""))
            element = section.find_element(By.CSS_SELECTOR, part)
            (Path(folder) / name).write_bytes(picture_of(driver, element, SCALES.get(name, 1)))
    finally:
        driver.quit()


def first_screen(driver: webdriver.Chrome, address: str, scale: float) -> bytes:
    """A PNG of what a laptop shows of the page when it is opened."""
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**SCREEN_PX, "deviceScaleFactor": 1, "mobile": False})
    driver.get(address)
    WebDriverWait(driver, 120).until(lambda _: driver.execute_script(DRAWN))
    sections = driver.find_elements(By.TAG_NAME, "section")
    WebDriverWait(driver, 60).until(lambda _: all(map(is_drawn, sections[:2])))
    clip = {"x": 0, "y": 0, **SCREEN_PX, "scale": scale}
    picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return b64decode(picture["data"])


def picture_of(driver: webdriver.Chrome, element: WebElement, scale: float = 1) -> bytes:
    """A PNG of an element and a little of what is around it."""
    place = driver.execute_script(PLACE, element)
    # A clip that begins outside of the page is moved.
    clip = {"x": max(0, place["x"] - MARGIN_PX), "y": max(0, place["y"] - MARGIN_PX), "scale": scale}
    clip |= {side: place[side] + 2 * MARGIN_PX for side in ("width", "height")}
    return b64decode(
        driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})["data"]
    )


def is_drawn(section: WebElement) -> bool:
    """Whether plotly has filled the places that the page keeps for unfolded pictures, and what moves is ready to."""
    plots = section.find_elements(By.CSS_SELECTOR, ".plot:not(details:not([open]) .plot)")
    widgets = section.find_elements(By.CSS_SELECTOR, ".player, .tables, .story, .explore")
    return all(map(_is_filled, plots)) and all(widget.get_attribute("data-ready") for widget in widgets)


def _is_filled(picture: WebElement) -> bool:
    drawings = picture.find_elements(By.CSS_SELECTOR, "svg.main-svg")
    return bool(drawings) and drawings[0].size["height"] >= picture.size["height"] > 100


if __name__ == "__main__":
    main(*sys.argv[1:])
