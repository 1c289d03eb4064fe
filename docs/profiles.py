"""Writes the tables of docs/results/profiles.md: the errors of the GPU profiles of the package, which each profile holds."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fragmeter.gpu.calibrate.fitting import limit_of
from fragmeter.reports.page.table import filled, markdown
from fragmeter.sim.cost.calibration import PROFILES
from fragmeter.sim.spec import gpu_names

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.profiles.fit_profiles import SCALED

PAGE = Path(__file__).parent / "results" / "profiles.md"
KNOWN = "tokens of a known shape"
_KINDS = ("interpolated", "extrapolated")


class Entry(NamedTuple):
    """A fitted operation of a card."""

    gpu: str
    operation: str
    entry: dict[str, Any]

    @property
    def fit(self) -> dict[str, Any]:
        found: dict[str, Any] = self.entry["fit"]
        return found

    @property
    def shapes(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = self.fit.get("held_out_shapes", {})
        return found


#: Headings of the tables by the names of their places.
HEADINGS = {
    "limits": ("operation", "limit", "interpolated", "medians", "extrapolated", "medians"),
    "columns": ("GPU", "operation", "held out", "points", "median", "mean", "95 %", "bias", "median within"),
    "shapes": ("GPU", "operation", "shapes", "points", "median", "90 %", "bias", "median within"),
    "missing": ("GPU", "operation", "shapes", "why"),
    "experts": ("GPU", "operation", "shapes", "points", "median", "mean", "90 %", "bias", "median within"),
}


def parts() -> dict[str, str]:
    """The parts of the page that are computed, by the names of their places."""
    rows: dict[str, list[list[str]]] = {name: [] for name in HEADINGS}
    entries = list(_operations())
    for one in entries:
        for column, found in one.fit["held_out"].items():
            if column == KNOWN:
                rows["experts"].append(_row(one, len(one.entry["shapes"]), found, "mape", "p90"))
            else:
                rows["columns"].append(_row(one, column, found, "mape", "p95"))
        for shapes, found in sorted(one.shapes.items(), reverse=True):
            rows["shapes"].append(_row(one, shapes, found, "p90"))
        rows["missing"] += ([one.gpu, one.operation, shapes, why] for shapes, why in _missing(one))
    rows["limits"] += (_summary([one for one in entries if one.operation == name]) for name in _names(entries))
    size = sum(path.stat().st_size for path in PROFILES.glob("*.json"))
    tables = {name: "\n".join(markdown(headings, rows[name])) for name, headings in HEADINGS.items()}
    return {"size": f"{size / 1024:,.0f} KiB, compressed {_packed_kib()} KiB", **tables}


def _packed_kib() -> str:
    packed = sum(len(zlib.compress(path.read_bytes(), 6)) for path in PROFILES.glob("*.json"))
    return f"{round(packed / 1024, -1):.0f}"


def _operations() -> Iterator[Entry]:
    """Every operation that was fitted to a table."""
    for name in gpu_names():
        path = PROFILES / f"{name}.json"
        # The errors of a scaled profile are those of its source.
        if path.is_file() and name not in SCALED:
            ops = json.loads(path.read_text("utf-8"))["ops"]
            yield from (
                Entry(name, operation, entry)
                for operation, entry in ops.items()
                if entry.get("fit", {}).get("held_out")
            )


def _names(entries: list[Entry]) -> list[str]:
    return list(dict.fromkeys(one.operation for one in entries))


def _missing(one: Entry) -> Iterator[tuple[str, str]]:
    """Shapes that were not held out, and why."""
    if not set(_KINDS) & set(one.shapes):
        yield "all", "its table has one shape"
    elif "interpolated" not in one.shapes:
        yield "interpolated", "no shape of its table lies between others in every size"


def _summary(entries: list[Entry]) -> list[str]:
    limits = sorted({limit_of(one.fit) for one in entries})
    cells = [entries[0].operation, _range(limits)]
    for kind in _KINDS:
        tested = [(one.shapes[kind]["median_error"], limit_of(one.fit)) for one in entries if kind in one.shapes]
        passed = sum(error <= limit for error, limit in tested)
        cells += [f"{passed} of {len(tested)}", _range(sorted(error for error, _ in tested))] if tested else ["-", "-"]
    return cells


def _range(values: list[float]) -> str:
    low, high = f"{values[0] * 100:.1f}", f"{values[-1] * 100:.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _row(one: Entry, what: object, found: dict[str, float], *sizes: str) -> list[str]:
    median, limit = found["median_error"], limit_of(one.fit)
    # With a digit more where rounding would hide why it fails.
    shown = f"{median:.2%}" if median > limit and f"{median:.1%}" == f"{limit:.1%}" else f"{median:.1%}"
    errors = [shown, *(_size(found, name) for name in sizes), f"{found['bias']:+.1%}"]
    mark = f"{limit:.1%}: {'pass' if median <= limit else 'fail'}"
    cells = [one.gpu, one.operation, str(what), f"{found['points']:,}"]
    return [*cells, *(error.replace("%", " %") for error in [*errors, mark])]


def _size(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.1%}" if name == "mape" else f"{found[name]:.0%}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8"), parts()), "utf-8")
