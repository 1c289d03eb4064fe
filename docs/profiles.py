"""Writes docs/profiles.md: the errors of the GPU profiles of the package, which each profile holds for its reader."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fragmeter.gpu.calibrate.fit_profiles import SCALED
from fragmeter.sim.cost.calibration import PROFILES
from fragmeter.sim.spec import gpu_names

PAGE = Path(__file__).parent / "profiles.md"
HEAD = """\
# Errors of the GPU profiles

`--cost fitted` takes step times from the profile of the card, a file of `sim/cost/profiles` ([docs/gpu.md](gpu.md) says how they are
fitted). This page is written by `python docs/profiles.py` from these files and is not edited by hand. An error is predicted time over measured
time, less one. Predicted points were left out of the fit.

Together the profiles take {kib} KiB, compressed {packed} KiB.
"""
COLUMNS = """\
## Whole columns held out

All rows of one m, batch, length, ... are left out, a third of the inner columns at a time. GEMMs have n and k from 512. Decode attention
has 1 to 256 sequences of 512 to 32k tokens, head_dim 128. Prefill attention has prompts from 64 tokens, latent attention (`mla`) 8 to
128 heads.

| GPU | operation | held out | points | median | mean | 95 % | bias |
|---|---|---|---|---|---|---|---|
"""
SHAPES = """\
## Whole shapes held out

A model's sizes, which no row of the fit had. *Interpolated* are shapes within the range of the others, a third at a time; *extrapolated*
are all shapes with the largest n or k, or the most heads, predicted from the smaller ones. Tables of one model have too few shapes for
most of these.

| GPU | operation | shapes | points | median | 90 % | bias |
|---|---|---|---|---|---|---|
"""
EXPERTS = """\
## Experts of a known shape

Every shape of experts in the tables has a model of its own. A third of the numbers of tokens are left out at a time.

| GPU | operation | shapes | points | median | mean | 90 % | bias |
|---|---|---|---|---|---|---|---|
"""
KNOWN = "tokens of a known shape"


def page() -> str:
    """The page, as it should be."""
    rows: dict[str, list[str]] = {COLUMNS: [], SHAPES: [], EXPERTS: []}
    for gpu, operation, entry in _operations():
        fit = entry["fit"]
        for column, found in fit.get("held_out", {}).items():
            if column == KNOWN:
                rows[EXPERTS].append(_row(gpu, operation, len(entry["shapes"]), found, "mape", "p90"))
            else:
                rows[COLUMNS].append(_row(gpu, operation, column, found, "mape", "p95"))
        for shapes, found in sorted(fit.get("held_out_shapes", {}).items(), reverse=True):
            rows[SHAPES].append(_row(gpu, operation, shapes, found, "p90"))
    size = sum(path.stat().st_size for path in PROFILES.glob("*.json"))
    sections = [head + "".join(row + "\n" for row in found) for head, found in rows.items()]
    return "\n".join([HEAD.format(kib=f"{size / 1024:,.0f}", packed=_packed_kib()), *sections])


def _packed_kib() -> str:

    packed = sum(len(zlib.compress(path.read_bytes(), 6)) for path in PROFILES.glob("*.json"))
    return f"{round(packed / 1024, -1):.0f}"


def _operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name of the card, name of an operation, and its entry, for every operation that was fitted to a table."""
    for name in gpu_names():
        path = PROFILES / f"{name}.json"
        # The errors of a scaled profile are those of its source.
        if path.is_file() and name not in SCALED:
            ops = json.loads(path.read_text("utf-8"))["ops"]
            yield from (
                (name, operation, entry) for operation, entry in ops.items() if "held_out" in entry.get("fit", {})
            )


def _row(gpu: str, operation: str, what: object, found: dict[str, float], *sizes: str) -> str:
    errors = [f"{found['median_error']:.1%}", *(_size(found, name) for name in sizes), f"{found['bias']:+.1%}"]
    cells = [gpu, operation, str(what), f"{found['points']:,}", *(error.replace("%", " %") for error in errors)]
    return f"| {' | '.join(cells)} |"


def _size(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.1%}" if name == "mape" else f"{found[name]:.0%}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
