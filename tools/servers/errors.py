"""Writes the errors of measured servers that later runs take intervals from (``experiments.measured.servers_like``).

    python -m tools.servers.errors out/servers.json     server_errors.json, of ``python -m tools.servers --runs FOLDER --json FILE``
    python -m tools.servers.errors --data-sheets [FOLDER with the files of requests]    data_sheet_errors.json: simulated by data sheets

The first is written if no run is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fragmeter.sim.output.files import write_whole

from .servers import data_sheet_rows, facts

FACTS = Path(__file__).parents[2] / "experiments" / "measured" / "facts"
#: Fields of the board that are stored.
_STORED = ("server", "gpu", "backend", "kernels", "kind", "load", "busy", "overload", "standing", "errors", "source")


def errors(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The errors of each run with the shipped defaults, its class and standing, and the settings that the board does not name."""
    settings = {fact["name"]: fact["settings"] for fact in facts()["runs"]}
    for row in found["board"]:
        given = settings[row["run"]]
        yield {
            "run": row["run"],
            "model": given["model"],
            "data_parallel_size": given.get("data_parallel_size", 1),
            "quantization": given.get("quantization"),
            "kv_cache_dtype": given.get("kv_cache_dtype"),
            **{name: row[name] for name in _STORED},
        }


def _write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_whole(FACTS / name, f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if sys.argv[1] == "--data-sheets":
        _write("data_sheet_errors.json", data_sheet_rows(Path(sys.argv[2]) if len(sys.argv) > 2 else None))
    else:
        document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
        if not document["left_out"]:
            _write("server_errors.json", errors(document))
