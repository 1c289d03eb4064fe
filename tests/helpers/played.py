"""Pages with block maps, in a browser: what tests of them share."""

from __future__ import annotations

from pathlib import Path

from browser import show, wait
from fragmeter.reports.blockmap.palette import KINDS, SHADES, palette
from fragmeter.sim.recording.blocks import BlockMap


def play(driver, page: Path, scheme: str = "light", width_px: int = 1400) -> None:
    """Opens the page and waits until the maps can be played."""
    show(driver, page, scheme, width_px)
    wait(driver, "return document.querySelector('.player').dataset.ready === 'true'")


# Draws an image as it is shown, and reads some of its pixels: [[x, y], ...] to [[red, green, blue], ...].
PIXELS = """
const [selector, places, done] = arguments;
const image = new Image();
image.onload = () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  done([[canvas.width, canvas.height],
    places.map(([x, y]) => Array.from(context.getImageData(x, y, 1, 1).data.slice(0, 3)))]);
};
const shown = document.querySelector(selector);
image.src = shown.getAttributeNS("http://www.w3.org/1999/xlink", "href") || shown.getAttribute("href");
"""


def meaning(colour: list[int], scheme: str) -> tuple[int, int | None]:
    """What a pixel says: the kind of a block, and of one that a request holds the shade."""
    index = palette(scheme == "dark").index("#" + "".join(f"{channel:02x}" for channel in colour))
    held = KINDS.index("stranded")
    if index < held * SHADES:
        return index // SHADES, index % SHADES
    return index - held * (SHADES - 1), None


def state(found: BlockMap, column: int, row: int) -> tuple[int, int | None]:
    """What was recorded, in the same terms."""
    kind, sequence = int(found.bucket[column, row]), int(found.sequence[column, row])
    return kind, None if kind >= KINDS.index("stranded") else sequence * 5 % SHADES


def plots(driver) -> list[str]:
    return driver.execute_script("return [...document.querySelectorAll('.player .plot')].map((plot) => plot.id)")


def seconds(driver) -> float:
    return float(driver.find_element("css selector", ".now").text.removesuffix(" s").replace(",", ""))


def set_time(driver, share: float) -> None:
    driver.execute_script(
        "const slider = document.querySelector('.time'); slider.value = arguments[0] * slider.max;"
        "slider.dispatchEvent(new Event('input', { bubbles: true }))",
        share,
    )
