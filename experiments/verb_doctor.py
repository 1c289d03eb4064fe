"""``fragmeter doctor``."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

from rich import box
from rich.table import Table

from .. import __version__
from ..gpu.probe import probe
from .output import JsonTarget, Report

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<bounds>[^;]*)(;.*extra == ['\"](?P<extra>\w+)['\"])?")


def doctor(*, json: JsonTarget = None) -> None:
    """Say what works on this machine, and why not."""
    report = Report(json)
    findings = {
        "fragmeter": __version__,
        "python": platform.python_version(),
        "packages": packages(),
        "gpu": probe().as_dict(),
    }
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "found", "asked for", "needed by"):
        table.add_column(heading)
    table.add_row("fragmeter", findings["fragmeter"])
    table.add_row("Python", findings["python"], ">=3.11")
    for package in findings["packages"]:
        needed_by = f"extra {package['extra']}" if package["extra"] else "fragmeter"
        table.add_row(package["name"], package["found"] or "not installed", package["asked_for"], needed_by)
    report.console.print(table)
    report.say()
    report.say(f"GPU: {findings['gpu']['text']}")
    report.data(findings)


def packages() -> list[dict[str, str | None]]:
    """Every package that fragmeter or one of its extras asks for, and the version found, if any."""
    try:
        asked = requires("fragmeter") or []
    except PackageNotFoundError:
        return []
    matches = (_REQUIREMENT.match(requirement) for requirement in asked)
    return [
        {
            "name": match["name"],
            "found": _found(match["name"]),
            "asked_for": match["bounds"].strip(),
            "extra": match["extra"],
        }
        for match in matches
        if match
    ]


def _found(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
