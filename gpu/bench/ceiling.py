"""Copy bandwidth of a device: the reference for a kernel's bandwidth.

``python -m fragmeter.gpu.bench.ceiling --device cuda --json ceiling.json``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..devices import devices, program

SCHEMA_VERSION = 1


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m fragmeter.gpu.bench.ceiling", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu")
    parser.add_argument("--json", type=Path, help="file for what is measured")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    target = program.JsonFile(given.json)
    device = devices.open_timed(given.device)
    # Imports torch, which is loaded only after a device is open.
    from .copies import COPY_BYTES, data_sheet, device_copy, host_copies

    copies = [device_copy(device)]
    if device.torch_device.type == "cuda":
        copies += host_copies(device, COPY_BYTES["cuda"] // 4)
    described = device.describe()
    sheet = data_sheet(described)
    target.write(
        {
            "schema_version": SCHEMA_VERSION,
            "device": described,
            "data_sheet_bytes_per_s": sheet and sheet.memory_bytes_per_s,
            "copies": [copy.as_dict() for copy in copies],
        }
    )
    for copy in copies:
        share = f", {copy.bytes_per_s / sheet.memory_bytes_per_s:.0%} of the data sheet" if sheet else ""
        print(f"{copy.kind:<10} {copy.bytes_per_s / 1e9:8.1f} GB/s{share if copy.kind == 'device' else ''}")
    return True


if __name__ == "__main__":
    sys.exit(main())
