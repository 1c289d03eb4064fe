"""``fragmeter report``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..reports.images import ImageFormat, require_kaleido, write_images
from ..reports.results import Result, read_result
from ..reports.run_report import Asked, figures, write_report
from ..sim.errors import MissingExtra, SettingError
from ..sim.files import require_writable, require_writable_file
from .output import RESULTS, JsonTarget, Report

#: Runs that stand beside each other on a page and can still be read.
MOST_FOLDERS = 4


def report(
    *folders: Annotated[Path, Parameter(help="Results of simulate --out, of one run or of several on the same load.")],
    request: int | None = None,
    out: Annotated[Path, RESULTS] = Path("report.html"),
    perfetto: Annotated[Path | None, RESULTS] = None,
    images: Annotated[Path | None, RESULTS] = None,
    image_format: Annotated[ImageFormat, RESULTS] = "png",
    json: JsonTarget = None,
) -> None:
    """Draw a run, or several beside each other: one HTML page that needs no network; timelines and pictures too.

    With ``simulate --record-blocks`` it has the block map: every physical block over time. With ``--record-plan`` it has
    the block tables of a request and its siblings, step by step.

    Args:
        request: Whose block tables are shown, counted from 0. By default the first request that shares blocks.
        out: The page.
        perfetto: Write the runs as a timeline for ui.perfetto.dev too, into this file (.pftrace): requests, steps,
            preemptions and memory. Needs the extra perfetto.
        images: Write every figure of the page as a picture too, into this folder. Needs the extra images, and Chrome
            or Chromium.
        image_format: What the pictures are.
    """
    told = Report(json)
    if not 1 <= len(folders) <= MOST_FOLDERS:
        raise SettingError("folders", len(folders), f"name 1 to {MOST_FOLDERS} folders that simulate --out has written")
    out.parent.mkdir(parents=True, exist_ok=True)
    require_writable_file(out)
    write_timeline = _timeline_writer(perfetto)
    if images is not None:
        require_writable(images, images, create=True)
        require_kaleido()
    results = [read_result(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    _check_request(request, results)
    asked = Asked(results, request)
    pictures = write_images(images, figures(asked), image_format) if images is not None else []
    if perfetto is not None:
        write_timeline(perfetto, results)
    write_report(out, asked)
    for result in results:
        told.say(_told(result))
    for folder, result in zip(folders, results, strict=True):
        if result.blocks is None:
            told.say(f"{folder} has no block map; simulate --record-blocks records one.")
    if perfetto is not None:
        told.point_to("Timeline for ui.perfetto.dev", perfetto)
    if images is not None:
        told.point_to(f"{len(pictures)} pictures", images)
    told.point_to("Report", out)
    told.data(
        {
            "report": str(out),
            "timeline": None if perfetto is None else str(perfetto),
            "pictures": [str(picture) for picture in pictures],
            "runs": [_described(result) for result in results],
        }
    )


def _timeline_writer(path: Path | None) -> Callable[[Path, list[Result]], Path] | None:
    """What writes the timeline, where one is wanted; a place that takes no file is refused before other work."""
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    require_writable_file(path)
    try:
        from ..reports.perfetto_timeline import write_timeline
    except ImportError:
        text = "perfetto: the package perfetto is not installed; pip install 'fragmeter[perfetto]'"
        raise MissingExtra(text) from None
    return write_timeline


def _check_request(request: int | None, results: list[Result]) -> None:
    """Refuse a request of which nobody recorded tables."""
    if request is None:
        return
    for result in results:
        plan = result.plan
        if plan is not None and plan.is_paged and request in result.request_of_sequence[plan.sequence]:
            return
    remedy = "no plan has block tables of it; record one with simulate --record-plan, or name another request"
    raise SettingError("request", request, remedy)


def _names(folders: tuple[Path, ...]) -> list[str]:
    """One by its policy, several by their folders."""
    return [""] if len(folders) == 1 else [folder.resolve().name for folder in folders]


def _told(result: Result) -> str:
    kept = [kind for kind in ("blocks", "plan") if getattr(result, kind) is not None]
    besides = f", with {' and '.join(kept)}" if kept else ""
    return f"{result.name}: {result.policy}, {len(result.requests):,} requests in {result.end_s:,.1f} s{besides}"


def _described(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "policy": result.policy,
        "requests": len(result.requests),
        "end_s": result.end_s,
        "has_blocks": result.blocks is not None,
        "has_plan": result.plan is not None,
    }
