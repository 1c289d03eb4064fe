"""Check that captured decodes give the same results as eager ones.

``python -m fragmeter.gpu.check.graphs --device cuda --json graphs.json``. A replay reads the values that its buffers
contain at that time, so the check replays a graph with other queries, blocks and lengths than it was captured with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..devices import program

SCHEMA_VERSION = 1


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m fragmeter.gpu.check.graphs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...")
    parser.add_argument("--json", type=Path, help="file for what came of each check")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    target = program.JsonFile(given.json)
    device = program.gpu(given.device)
    # Imports torch, which is loaded only after a device is open.
    from .graph_checks import CHECKS

    checks = [check(device) for check in CHECKS]
    results = [check.as_dict() for check in checks]
    target.write({"schema_version": SCHEMA_VERSION, "device": device.describe(), "checks": results})
    for check in checks:
        outcome = "passes" if check.passes else "FAILED"
        print(f"{outcome} {check.name}: error {check.error:.1e}, allowed {check.tolerance:.0e}")
    return all(check.passes for check in checks)


if __name__ == "__main__":
    sys.exit(main())
