"""Take the README's pictures from a page: ``python docs/screenshots.py PAGE FOLDER`` (needs Chromium and selenium)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

#: What is shown of each page, by the start of the section's title and what of the section.
PICTURES = {
    "reproduction.html": {"fig2.png": ("Fig 2", ".plot"), "waste.png": ("The waste table", ".plot")},
    "report.html": {"blocks.png": ("The block map", ".screens")},
    "tables.html": {"tables.png": ("Block tables", ".tables")},
}
#: What is done before the picture is taken.
FIRST = {"tables.png": "document.querySelector('.tables .copy').click()"}
WIDTH_PX, HEIGHT_PX = 1000, 5000
#: Of a page whose maps stand side by side.
WIDE_PX = {"report.html": 1440}


def browser() -> webdriver.Chrome:
    """A headless Chromium of a laptop's width."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={WIDTH_PX},{HEIGHT_PX}")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def main(page: str, folder: str) -> None:
    """Save the first picture of each section that is wanted."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    driver = browser()
    try:
        driver.set_window_size(WIDE_PX.get(Path(page).name, WIDTH_PX), HEIGHT_PX)
        driver.get(Path(page).resolve().as_uri())
        for name, (title, part) in PICTURES[Path(page).name].items():
            section = driver.find_element(By.XPATH, f"//section[h2[starts-with(., '{title}')]]")
            WebDriverWait(driver, 20).until(lambda _, drawn=section: is_drawn(drawn))
            driver.execute_script(FIRST.get(name, ""))
            section.find_element(By.CSS_SELECTOR, part).screenshot(str(Path(folder) / name))
    finally:
        driver.quit()


def is_drawn(section: WebElement) -> bool:
    """Whether plotly has filled the places that the page keeps for pictures, and what moves is ready to."""
    plots = section.find_elements(By.CSS_SELECTOR, ".plot")
    widgets = section.find_elements(By.CSS_SELECTOR, ".player, .tables")
    return all(map(_is_filled, plots)) and all(widget.get_attribute("data-ready") for widget in widgets)


def _is_filled(picture: WebElement) -> bool:
    drawings = picture.find_elements(By.CSS_SELECTOR, "svg.main-svg")
    return bool(drawings) and drawings[0].size["height"] >= picture.size["height"] > 100


if __name__ == "__main__":
    main(*sys.argv[1:])
