"""Writes ``experiments/sglang_server/facts/flags.json``: the flags of the installed SGLang by how many values follow them, their other
spellings, and the choices and defaults of those that a line is read for.

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

from fragmeter.experiments.sglang_server.line import NAMED

FILE = Path(__file__).parents[2] / "experiments" / "sglang_server" / "facts" / "flags.json"


def flags() -> dict[str, object]:
    """The content of the file."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found: dict[str, list[str]] = {}
    also, choices, defaults = {}, {}, {}
    for action in parser._actions:
        number = 1 if action.nargs is None else action.nargs
        found.setdefault(str(number), []).extend(action.option_strings)
        flag, *others = action.option_strings
        if flag in NAMED:
            also |= {other: flag for other in others if not other.startswith("--no-")}
        if flag in NAMED and action.choices:
            choices[flag] = " ".join(action.choices)
        if flag in NAMED and action.default not in (None, False):
            defaults[flag] = str(action.default)
    values = {number: " ".join(sorted(names)) for number, names in sorted(found.items())}
    facts = {"also": also, "choices": choices, "defaults": defaults}
    return {"of": f"SGLang {version('sglang')}", "values": values} | {
        name: dict(sorted(each.items())) for name, each in facts.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(flags(), indent=1) + "\n", "utf-8")
