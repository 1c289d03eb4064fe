"""``fragmeter doctor``."""

from __future__ import annotations

import importlib
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import numpy as np

from ... import __version__
from ...gpu.check.parts import Part, every_part
from ...gpu.devices.probe import probe
from ...reports.page.table import Column, Table
from ...sim import Workload, settings, simulate, summary
from ...sim.engine.core import compiled
from ...sim.types.errors import install
from ..runs.output import JsonTarget, Report

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^]]*\])?(?P<bounds>[^;]*)(;.*extra == ['\"](?P<extra>\w+)['\"])?")


def doctor(*, json: JsonTarget = None) -> None:
    """Say what works on this machine, and why not."""
    report = Report(json)
    parts = [simulator(), core(), reports(), *every_part()]
    findings: dict[str, Any] = {
        "fragmeter": __version__,
        "python": platform.python_version(),
        "parts": [part.as_dict() for part in parts],
        "packages": packages(),
        "gpu": probe().as_dict(),
    }
    for part in parts:
        _print(report, part)
    report.print_line()
    report.console.print(_packages_table(findings["packages"]))
    report.data(findings)


def simulator() -> Part:
    """Serve a request."""
    one = np.array([0]), np.array([16]), np.array([4])
    try:
        served = summary(simulate(settings(policy="vllm-sosp23"), Workload("one request", *one)))["completed"]
    except Exception as error:
        return Part("simulator", False, f"{type(error).__name__}: {error}", "an internal fault; please report it")
    return Part("simulator", served == 1, f"fragmeter {__version__}, Python {platform.python_version()}")


def core() -> Part:
    """Load the compiled core. Without it Python gives the same results."""
    module, found = compiled()
    remedy = None if module else f"{install()} again, with a C compiler; Python gives the same results"
    return Part("compiled core", module is not None, found, remedy)


def reports() -> Part:
    """Import the packages that draw pages and pictures. No browser is needed."""
    try:
        importlib.import_module("...reports.page.page", __package__)
    except ImportError as error:
        return Part("reports", False, f"{error.name} is missing", f"{install()} again")
    return Part("reports", True, f"plotly {version('plotly')}, jinja2 {version('jinja2')}")


def _print(report: Report, part: Part) -> None:
    """Print a line, and a second one with a remedy if there is one."""
    report.line(f"{'yes' if part.works else 'no ':<5}{part.name:<14}{part.found}")
    if part.remedy:
        report.line(f"{'':<19}{part.remedy}")


def _packages_table(found: list[dict[str, str | None]]) -> Table:
    table = Table(*(Column(name, is_text=True, wraps=True) for name in ("package", "found", "asked for", "needed by")))
    for package in found:
        needed_by = f"extra {package['extra']}" if package["extra"] else "fragmeter"
        table.add_row(package["name"], package["found"] or "not installed", package["asked_for"], needed_by)
    return table


def packages() -> list[dict[str, str | None]]:
    """Every package that fragmeter or one of its extras requires, and its installed version, if any."""
    try:
        requirements = requires("fragmeter") or []
    except PackageNotFoundError:
        return []
    matches = (_REQUIREMENT.match(requirement) for requirement in requirements)
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
