"""Figures as PNG, SVG or PDF pictures, drawn by kaleido in a headless browser.

The browser loads plotly.js from the installed package and nothing from a network. On one machine the same figures give
the same bytes; another browser version or other fonts may change them. A PDF has its fonts embedded.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import plotly.graph_objects as go

from ...sim.output.files import write_whole
from ...sim.output.folders import FolderKind, replace_folder
from ...sim.types.errors import MissingExtra, UserError, install
from ...sim.types.optional import not_none
from ..style.labels import file_stem

ImageFormat = Literal["png", "svg", "pdf"]
#: File names start with the position of the figure on the page.
IMAGES = FolderKind("set of pictures", tuple(f"[0-9][0-9]-*.{kind}" for kind in get_args(ImageFormat)))
_WIDTH_PX = 1000
#: Title and subtitle, which a page prints beside the picture.
_HEADING_PX = 60
#: A line that defines a label, which a page prints below the picture.
_LINE_PX = 17
#: Scale of a PNG: pixels of the file per pixel of the figure.
_SCALE = 2
#: Of a browser, in a millimetre.
_PX_PER_MM = 96 / 25.4
#: Of a figure with a width in a text: its labels of 12 pixels are 6.5 points high there.
_IN_TEXT = 0.72
#: Pixels of a PNG in a text, for each of a browser's: 300 dpi.
_PRINTED = 300 / 96
#: plotly.js gives every drawing a random number, which ends the names of its parts.
_DRAWING = re.compile(rb'id="defs-([0-9a-f]{6})"')
#: When a PDF was made.
_MADE = re.compile(rb"\(D:\d{14}(?=[+-]\d\d'\d\d'\))")


def require_kaleido() -> None:
    """Refuse pictures if the package that draws them is missing; called before other work.

    Raises:
        MissingExtra: The package is missing.
    """
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise MissingExtra(f"images: the package kaleido is not installed; {install('images')}") from None


def write_images(
    folder: str | os.PathLike[str], figures: Sequence[go.Figure], kind: ImageFormat, width_mm: float | None = None
) -> list[Path]:
    """Write every figure into ``folder``, in place of earlier pictures, and return the files.

    A name has the position of a figure, from 01, and its title. The folder is written whole or not at all.

    Args:
        width_mm: Width in a text, whose caption stands in for the title, the subtitle and the definitions of labels.
            None draws them, at the width of a page.

    Raises:
        MissingExtra: kaleido is not installed.
        UserError: kaleido finds no browser, the browser does not start, or files cannot be written.
    """
    require_kaleido()
    names = [f"{place:02d}-{file_stem(figure.layout.title.text)}.{kind}" for place, figure in enumerate(figures, 1)]
    target = Path(folder)
    with tempfile.TemporaryDirectory() as parts:
        drawn = [Path(parts) / name for name in names]
        _draw([_task(figure, path, kind, width_mm) for path, figure in zip(drawn, figures, strict=True)])
        contents = [path.read_bytes() for path in drawn]
    if kind == "svg":
        contents = [_named_for_good(content) for content in contents]
    elif kind == "pdf":
        contents = [_MADE.sub(b"(D:20000101000000", content) for content in contents]
    named = zip(names, contents, strict=True)
    replace_folder(target, IMAGES, {name: partial(write_whole, content=content) for name, content in named})
    return [target / name for name in names]


def _task(figure: go.Figure, path: Path, kind: ImageFormat, width_mm: float | None) -> dict[str, Any]:
    layout, content = figure.layout, figure.to_dict()
    for place, trace in enumerate(content["data"]):
        # Without this, plotly.js chooses a random one.
        trace["uid"] = f"{place:06d}"
    if width_mm is not None:
        del content["layout"]["title"]
        scale = _IN_TEXT * (_PRINTED if kind == "png" else 1)
        size = {"width": width_mm * _PX_PER_MM / _IN_TEXT, "height": layout.height}
        return {"fig": content, "path": path, "opts": {"format": kind, "scale": scale, **size}}
    defined = layout.meta.get("definitions", ())
    lines = [layout.title.subtitle.text, *(f"{label}: {definition}" for label, definition in defined)]
    content["layout"]["title"]["subtitle"]["text"] = "<br>".join(lines)
    height = layout.height + _HEADING_PX + _LINE_PX * len(defined)
    size = {"width": layout.width or _WIDTH_PX, "height": height}
    return {"fig": content, "path": path, "opts": {"format": kind, "scale": _SCALE if kind == "png" else 1, **size}}


def _named_for_good(svg: bytes) -> bytes:
    """A drawing with the number 0 in place of its random number."""
    number = not_none(_DRAWING.search(svg))[1]
    return re.sub(rb"(?<=[a-z-])" + number, b"000000", svg)


def _draw(tasks: list[dict[str, Any]]) -> None:
    import kaleido
    from kaleido.errors import BrowserClosedError, BrowserFailedError, ChromeNotFoundError

    try:
        kaleido.write_fig_from_object_sync(tasks, kopts={"mathjax": False})
    except ChromeNotFoundError:
        remedy = "install one, or say where it is in the environment variable BROWSER_PATH"
        raise UserError(f"images: kaleido finds no Chrome or Chromium; {remedy}") from None
    except (BrowserClosedError, BrowserFailedError):
        remedy = "say in the environment variable BROWSER_PATH where one is that does"
        raise UserError(f"images: the browser that kaleido found does not start; {remedy}") from None
