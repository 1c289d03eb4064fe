"""Benchmark of decode attention: time and share of the device's bandwidth, compared with torch and FlashInfer.

``python -m fragmeter.gpu.bench --device cuda --json bench.json``. With ``--device cpu`` a few small shapes run through
torch. Shapes that do not fit into memory are left out, and the output names them.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..devices import devices, program
from .table import HEADINGS, line, shares

SCHEMA_VERSION = 1


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(prog="python -m fragmeter.gpu.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu: a few small shapes")
    parser.add_argument("--passes", choices=("all", "ours", "others"), default="all", help="implementations to measure")
    parser.add_argument("--json", type=Path, help="file for every row")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    """Measure pass by pass and rewrite the file after each row; returns whether our kernel, where it exists, always ran."""
    target = program.JsonFile(given.json)
    device = devices.open_timed(given.device)
    # Imports torch, which is loaded only after a device is open.
    from .copies import data_sheet, device_copy
    from .rows import PLANS, bench
    from .ways import PASSES

    plan, described = PLANS[device.torch_device.type], device.describe()
    sheet, copy = data_sheet(described), device_copy(device)
    peaks: dict[str, float | None] = {
        "data_sheet": sheet.memory_bytes_per_s if sheet else None,
        "copy": copy.bytes_per_s,
    }
    rows = [shape.as_dict() for shape in plan.shapes()]
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "device": described}
    document |= {"bytes_per_s": peaks, "rows": rows}
    print(f"measured copy {copy.bytes_per_s / 1e9:.0f} GB/s" + (f", data sheet {sheet.name}" if sheet else ""))
    of_passes = {"all": PASSES, "ours": PASSES[:1], "others": PASSES[1:]}[given.passes]
    for ways in of_passes:
        if ways == ("flashinfer",) and find_spec("flashinfer") is None:
            continue
        print(HEADINGS)
        for row, found in zip(rows, bench(device, plan.shapes(), plan.rounds, ways), strict=True):
            row |= found
            row |= shares(row, peaks)
            target.write(document)
            print(line(row), flush=True)
        # Clocks and temperature under load.
        document["device_after"] = device.describe()
        target.write(document)
    return not any(row.get("fragmeter", {}).get("exists") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
