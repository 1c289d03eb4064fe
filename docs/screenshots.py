"""Take the README's pictures from a page: ``python docs/screenshots.py PAGE FOLDER`` (needs Chromium and selenium)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

#: What is shown, by the start of the section's title.
PICTURES = {"fig2.png": "Fig 2", "waste.png": "The waste table"}
WIDTH_PX, HEIGHT_PX = 1000, 5000


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
        driver.get(Path(page).resolve().as_uri())
        for name, title in PICTURES.items():
            section = driver.find_element(By.XPATH, f"//section[h2[starts-with(., '{title}')]]")
            picture = section.find_element(By.CSS_SELECTOR, ".plot")
            WebDriverWait(driver, 20).until(lambda _, drawn=picture: is_drawn(drawn))
            picture.screenshot(str(Path(folder) / name))
    finally:
        driver.quit()


def is_drawn(picture: WebElement) -> bool:
    """Whether plotly has filled the place that the page keeps for a picture."""
    drawings = picture.find_elements(By.CSS_SELECTOR, "svg.main-svg")
    return bool(drawings) and drawings[0].size["height"] >= picture.size["height"] > 100


if __name__ == "__main__":
    main(*sys.argv[1:])
