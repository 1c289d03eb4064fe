"""``fragmeter report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..reports.results import Result, read_result
from ..reports.run_report import Asked, write_report
from ..sim.errors import SettingError
from ..sim.files import require_writable_file
from .output import RESULTS, JsonTarget, Report

#: Runs that stand beside each other on a page and can still be read.
MOST_FOLDERS = 4


def report(
    *folders: Annotated[Path, Parameter(help="Results of simulate --out, of one run or of several on the same load.")],
    request: int | None = None,
    out: Annotated[Path, RESULTS] = Path("report.html"),
    json: JsonTarget = None,
) -> None:
    """Draw a run, or several beside each other: one HTML page that needs no network.

    With ``simulate --record-blocks`` it has the block map: every physical block over time. With ``--record-plan`` it has
    the block tables of a request and its siblings, step by step.

    Args:
        request: Whose block tables are shown, counted from 0. By default the first request that shares blocks.
        out: The page.
    """
    told = Report(json)
    if not 1 <= len(folders) <= MOST_FOLDERS:
        raise SettingError("folders", len(folders), f"name 1 to {MOST_FOLDERS} folders that simulate --out has written")
    out.parent.mkdir(parents=True, exist_ok=True)
    require_writable_file(out)
    results = [read_result(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    _check_request(request, results)
    write_report(out, Asked(results, request))
    for result in results:
        told.say(_told(result))
    for folder, result in zip(folders, results, strict=True):
        if result.blocks is None:
            told.say(f"{folder} has no block map; simulate --record-blocks records one.")
    told.point_to("Report", out)
    told.data({"report": str(out), "runs": [_described(result) for result in results]})


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
