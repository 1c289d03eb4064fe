"""Writes ``experiments/llama_server/facts/flags.json``, the arguments of llama-server by how many values follow them.

    python -m real_llama_cpp.flags [SOURCE]      SOURCE is llama.cpp's, by default that of ``make test-llama-cpp``

An argument is of the server if ``common/arg.cpp`` has it for all programs or for LLAMA_EXAMPLE_SERVER.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / ".venv-llama-cpp" / "source" / "vendor" / "llama.cpp"
FILE = ROOT / "experiments" / "llama_server" / "facts" / "flags.json"
VERSION = "llama-cpp-python 0.3.36"
_NAMES = re.compile(r"\s*\{([^}]*)\}\s*,\s*(?:\{([^}]*)\})?")
_HANDLER = re.compile(r"\[[^\]]*\]\s*\(common_params &\s*\w*((?:\s*,[^,()]+)*)\)")
_SETS = {name: re.compile(rf"set_{name}\(\{{([^}}]*)\}}\)") for name in ("examples", "excludes")}
_REMOVED = re.compile(r'arg_removed\(\s*"([^"]+)"')


def arguments(source: str) -> dict[str, object]:
    """The content of the file, of the text of ``arg.cpp``."""
    text = re.sub(r"/\*.*?\*/|^[ \t]*//[^\n]*$", "", source, flags=re.DOTALL | re.MULTILINE)
    values: dict[int, list[str]] = {}
    removed: dict[str, str] = {}
    for each in text.split("add_opt(common_arg(")[1:]:
        found, handler = _NAMES.match(each), _HANDLER.search(each)
        programs = {name: (match[1] if (match := pattern.search(each)) else "") for name, pattern in _SETS.items()}
        served = re.search("COMMON|SERVER", programs["examples"] or "COMMON") and "SERVER" not in programs["excludes"]
        if found is None or handler is None or not served:
            continue
        names = re.findall(r'"([^"]+)"', found[1] + (found[2] or ""))
        follow = [kind for kind in handler[1].split(",")[1:] if not kind.strip().startswith("bool")]
        values.setdefault(len(follow), []).extend(names)
        if (said := _REMOVED.search(each)) is not None:
            removed |= dict.fromkeys(names, said[1])
    return {
        "of": VERSION,
        "values": {str(number): " ".join(sorted(names)) for number, names in sorted(values.items())},
        "removed": dict(sorted(removed.items())),
    }


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    found = arguments((where / "common" / "arg.cpp").read_text("utf-8"))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
