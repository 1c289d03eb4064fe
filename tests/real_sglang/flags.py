"""Writes ``experiments/sglang_server/facts/flags.json``, the flags of the installed SGLang by how many values follow them.

cd tests && python -m real_sglang.flags
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from . import stubs

stubs.install()

from sglang.srt.server_args import ServerArgs

FILE = Path(__file__).parents[2] / "experiments" / "sglang_server" / "facts" / "flags.json"


def flags() -> dict[str, object]:
    """The content of the file."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        number = 1 if action.nargs is None else action.nargs
        found.setdefault(str(number), []).extend(action.option_strings)
    values = {number: " ".join(sorted(names)) for number, names in sorted(found.items())}
    return {"of": f"SGLang {version('sglang')}", "values": values}


if __name__ == "__main__":
    FILE.write_text(json.dumps(flags(), indent=1) + "\n", "utf-8")
