"""``fragmeter report``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ...reports.data.probed import read_probed
from ...reports.data.results import Result, read_result
from ...reports.page.images import IMAGES, ImageFormat, require_kaleido, write_images
from ...reports.page.run_report import PageInputs, figures, write_report
from ...reports.page.sweep_report import write_sweep_report
from ...sim.metrics.objectives import objectives
from ...sim.output.files import as_utf8, require_apart
from ...sim.output.folders import check_folder
from ...sim.types.errors import MissingExtra, SettingError, install
from ..measured.evidence import recorded_text
from ..measured.report import is_against, read_measured, write_against_report
from ..runs.inputs import named_files
from ..runs.output import RESULT_FILE, RESULTS, JsonTarget, Report, make_folder_of
from ..runs.unread import refuse_flags
from ..sweep.report import is_sweep, read_sweep

FOLDERS = (
    "Results of simulate --out, of one run or of several on the same load, and files of fragmeter.probe; or the folder of"
    " sweep, or of validate --against."
)
#: Bounds of the width of a picture: labels of axes hardly leave room below, and no page is wider.
NARROWEST_MM, WIDEST_MM = 40, 420
#: Largest number of runs that remain readable side by side on a page.
MOST_FOLDERS = 4


def report(
    *folders: Annotated[Path, Parameter(help=FOLDERS)],
    request: int | None = None,
    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True, negative_iterable="")] = None,
    measured: Path | None = None,
    out: Annotated[Path, RESULT_FILE] = Path("report.html"),
    perfetto: Annotated[Path | None, RESULT_FILE] = None,
    images: Annotated[Path | None, RESULTS] = None,
    image_format: Annotated[ImageFormat, RESULTS] = "png",
    width: Annotated[str | None, RESULTS] = None,
    json: JsonTarget = None,
) -> None:
    """Draw one or several runs as an HTML page that needs no network.

    Runs of ``simulate --record-blocks`` have the block map: every physical block over time. Runs of ``--record-plan``
    have the block tables of a request and its siblings, step by step.

    The file of ``fragmeter.probe`` has what a live vLLM server scheduled: the waste of its memory, measured.

    The folder of a sweep gives goodput and latency against the request rate, and throughput against the speed of a
    user. The folder of validate --against gives every request, simulated against measured.

    Args:
        request: Number of the request with the block tables to show, from 0. By default the first request that shares
            blocks.
        goodput: Objectives of every request in ms, as in vllm bench serve: ttft:500 tpot:50 e2el:10000.
        measured: Result file of vllm bench serve --save-result --save-detailed for the same requests on a real server.
        out: File for the page; - for standard output.
        perfetto: Also write a timeline for ui.perfetto.dev into this file (.pftrace): requests, steps, preemptions and
            memory. Needs the extra perfetto.
        images: Also write every figure of the page as a picture into this folder. Needs the extra images, and Chrome
            or Chromium.
        image_format: Format of the pictures. A PDF has its fonts embedded.
        width: Width of the pictures in a paper, such as 84mm; its caption takes the place of titles and definitions.
    """
    for path in (out, perfetto):
        make_folder_of(path)
    output = Report(json, out=out, perfetto=perfetto)
    read = named_files(folders=folders, measured=measured)
    require_apart({"out": out, "json": json, "perfetto": perfetto, "images": images}, read)
    if not 1 <= len(folders) <= MOST_FOLDERS:
        raise SettingError("folders", len(folders), f"name 1 to {MOST_FOLDERS} folders that simulate --out has written")
    goal = None if goodput is None else objectives(goodput)
    for is_one, draw in ((is_sweep, _sweep), (is_against, _against)):
        for folder in filter(is_one, folders):
            flags = {"request": request, "goodput": goodput, "measured": measured}
            _require_alone(folder, folders, **flags, perfetto=perfetto, images=images)
            draw(folder, out, output)
            return
    write_timeline = _timeline_writer(perfetto)
    width_mm = _millimetres(width, images)
    if images is not None:
        check_folder(images, IMAGES, "images")
        require_kaleido()
    results = [
        (read_probed if folder.is_file() else read_result)(folder, name)
        for folder, name in zip(folders, _names(folders), strict=True)
    ]
    _check_request(request, results)
    beside = None if measured is None else read_measured(measured, results)
    inputs = PageInputs(results, request, goal, beside, _step_times(results))
    pictures = write_images(images, figures(inputs), image_format, width_mm) if images is not None else []
    if perfetto is not None and write_timeline is not None:
        write_timeline(perfetto, results)
    write_report(out, inputs)
    _write_output(output, folders, inputs, out, perfetto, pictures)


def _millimetres(width: str | None, images: Path | None) -> float | None:
    """The width of pictures; None where none is given."""
    if width is None:
        return None
    if images is None:
        raise SettingError("width", width, "is the width of pictures; add --images FOLDER, or leave it out")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)mm", width)
    if found is None or not NARROWEST_MM <= float(found[1]) <= WIDEST_MM:
        raise SettingError(
            "width", width, f"must be {NARROWEST_MM}mm to {WIDEST_MM}mm, such as 84mm, a column of a paper"
        )
    return float(found[1])


def _step_times(results: Sequence[Result]) -> list[str]:
    """What the step times of the simulated runs rest on; after the names of the runs where they differ."""
    simulated = [result for result in results if not result.is_probed]
    found = {each.name: recorded_text(each.about["settings"], each.about.get("cost")) for each in simulated}
    if len(set(found.values())) < 2:
        return list(found.values())[:1]
    return [f"{name}: {text}" for name, text in found.items()]


def _write_output(
    output: Report,
    folders: Sequence[Path],
    inputs: PageInputs,
    out: Path,
    perfetto: Path | None,
    pictures: Sequence[Path],
) -> None:
    """Print the content and the path of the output."""
    for result in inputs.results:
        output.print_line(_result_text(result))
    for text in inputs.step_times:
        output.print_line(text)
    for folder, result in zip(folders, inputs.results, strict=True):
        if result.is_probed:
            output.print_line(_probed_text(folder, result))
        elif result.blocks is None:
            output.print_line(f"{folder} has no block map; simulate --record-blocks records one.")
    if inputs.measured is not None and inputs.measured.warning:
        output.print_line(inputs.measured.warning)
    if perfetto is not None:
        output.point_to("Timeline for ui.perfetto.dev", perfetto)
    if pictures:
        output.point_to(f"{len(pictures)} pictures", pictures[0].parent)
    output.point_to("Report", out)
    output.data(
        {
            "report": str(out),
            "timeline": None if perfetto is None else str(perfetto),
            "pictures": [str(picture) for picture in pictures],
            "runs": [_described(result) for result in inputs.results],
        }
    )


def _timeline_writer(path: Path | None) -> Callable[[Path, list[Result]], Path] | None:
    """The timeline writer, if a timeline is wanted; refuses a path that takes no file before other work starts."""
    if path is None:
        return None
    try:
        from ...reports.perfetto.timeline import write_timeline
    except ImportError:
        text = f"perfetto: the package perfetto is not installed; {install('perfetto')}"
        raise MissingExtra(text) from None
    return write_timeline


def _require_alone(folder: Path, folders: tuple[Path, ...], **flags: Any) -> None:
    """Refuse flags of runs if the folder is not a run."""
    if len(folders) > 1:
        raise SettingError("folders", str(folder), "is not a run; name it alone")
    remedy = "applies only to runs; leave it out"
    refuse_flags(f"{remedy}, and give it to fragmeter sweep", goodput=flags.pop("goodput", None))
    refuse_flags(remedy, **flags)


def _sweep(folder: Path, out: Path, output: Report) -> None:
    sweep = read_sweep(folder)
    write_sweep_report(out, sweep)
    output.print_line(
        f"{sweep.name}: {len(sweep.points):,} points of a sweep, {sweep.failed:,} more that could not be run"
    )
    for text in sweep.step_times:
        output.print_line(text)
    output.point_to("Report", out)
    output.data({"report": str(out), "points": len(sweep.points), "failed": sweep.failed, "axes": list(sweep.axes)})


def _against(folder: Path, out: Path, output: Report) -> None:
    about = write_against_report(folder, out)
    output.print_line(f"{about['benchmark']}: {about['requests']:,} requests, simulated against measured")
    output.point_to("Report", out)
    output.data({"report": str(out), **about})


def _check_request(request: int | None, results: list[Result]) -> None:
    """Refuse a request without recorded block tables."""
    if request is None:
        return
    for result in results:
        plan = result.plan
        if plan is not None and plan.is_paged and request in result.request_of_sequence[plan.sequence]:
            return
    remedy = "no plan has block tables of it; record one with simulate --record-plan, or name another request"
    raise SettingError("request", request, remedy)


def _names(folders: tuple[Path, ...]) -> list[str]:
    """Names of runs: the policy of a single run; the folders of several, numbered if they share a name."""
    if len(folders) == 1:
        return [""]
    names = [as_utf8(folder.resolve().name) for folder in folders]
    return names if len(set(names)) == len(names) else [f"{place}: {name}" for place, name in enumerate(names, 1)]


def _result_text(result: Result) -> str:
    kept = [kind for kind in ("blocks", "plan") if getattr(result, kind) is not None]
    besides = f", with {' and '.join(kept)}" if kept else ""
    name = result.name if result.name == result.policy else f"{result.name}: {result.policy}"
    return f"{name}, {len(result.requests):,} requests in {result.end_s:,.1f} s{besides}"


def _probed_text(path: Path, result: Result) -> str:
    held = result.summary["waste"]["mean_over_time_pct"]["paper_view"]["token_states"]
    probe = result.about["probe"]
    unfinished = f"; {probe['unfinished']:,} more requests had not finished" if probe["unfinished"] else ""
    cut = "; the file ends early, as that of a killed server does" if probe["cut"] else ""
    return (
        f"{path}: measured on a live server, {held:.1f} % of the KV cache held tokens (mean over time){unfinished}{cut}"
    )


def _described(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "policy": result.policy,
        "requests": len(result.requests),
        "end_s": result.end_s,
        "has_blocks": result.blocks is not None,
        "has_plan": result.plan is not None,
    }
