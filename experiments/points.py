"""Points of a sweep that are finished: a file for each, found again by what it follows from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .. import __version__
from ..sim.errors import SettingError
from ..sim.files import as_json, require_writable, user_paths, write_whole
from ..sim.objectives import Objectives
from ..sim.result import SCHEMA_VERSION
from ..sim.settings import Settings
from ..sim.workload import Workload
from ..traces import Pacing, Trace, holds_load
from .inputs import Inputs, Requests

#: Where a sweep keeps what is finished, in its folder.
POINTS = "points"
#: Workloads that are kept: of the points that stand side by side, most serve one or two.
_KEPT = 4


class Workloads:
    """Makes workloads, and keeps the last few: points that differ in a policy serve the same."""

    def __init__(self) -> None:
        self._made = lru_cache(_KEPT)(self._make)
        self._lengths = lru_cache(_KEPT)(Inputs.lengths)

    def of(self, inputs: Inputs) -> Workload:
        """What the inputs ask for.

        Raises:
            UserError: As ``Inputs.lengths`` and ``Inputs.workload``.
        """
        chosen = inputs.settings
        asked = Settings(model=chosen.model, max_model_len=chosen.max_model_len, seed=chosen.seed)
        return self._made(replace(inputs, settings=asked))

    def _make(self, inputs: Inputs) -> Workload:
        asked, settings = inputs.requests, inputs.settings
        if asked.trace is not None and not holds_load(asked.trace):
            # A file says the same whatever the seed.
            settings = replace(settings, seed=0)
        asked = Requests(trace=asked.trace, dataset=asked.dataset, num_prompts=asked.num_prompts)
        lengths: Trace = self._lengths(replace(inputs, requests=asked, settings=settings, pacing=Pacing()))
        return inputs.workload(lengths)


def key(inputs: Inputs, work: Workload, goal: Objectives | None = None) -> str:
    """A hash of all that a run's summary follows from: settings, files that they name, requests, objectives, and our
    version."""
    settings = inputs.settings
    content = {
        "versions": [SCHEMA_VERSION, __version__],
        "settings": settings.as_dict(),
        "files": [_hash_of(Path(name)) for name in (settings.model, settings.cost or "")],
        "workload": work.sha256(),
    } | ({} if goal is None else {"goodput": goal.limits})
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash_of(path: Path) -> str | None:
    path = path / "config.json" if path.is_dir() else path
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else None


class Store:
    """The summaries of finished points, in a folder.

    Args:
        folder: Is made; may hold an earlier sweep.

    Raises:
        UserError: It holds something else, or takes no files.
    """

    def __init__(self, folder: Path) -> None:
        self._points = folder / POINTS
        if folder.is_dir() and not self._points.is_dir() and any(folder.iterdir()):
            raise SettingError("out", str(folder), "holds files that are no sweep; choose another directory")
        require_writable(folder, folder, create=True)
        with user_paths(folder):
            self._points.mkdir(parents=True, exist_ok=True)

    def find(self, key: str) -> dict[str, Any] | None:
        """The summary of a point; None where it is not finished, or its file is damaged."""
        try:
            return json.loads(self._path(key).read_bytes())["summary"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, key: str, inputs: Inputs, summary: dict[str, Any]) -> None:
        """Put the summary of a point there, whole or not at all.

        Raises:
            UserError: It cannot be written.
        """
        asked = {name: str(value) for name, value in flat(columns(inputs))}
        write_whole(self._path(key), as_json({"asked": asked, "summary": summary}))

    def _path(self, key: str) -> Path:
        return self._points / f"{key}.json"


def columns(inputs: Inputs) -> dict[str, Any]:
    """Every setting of the inputs by its name, paths as text."""
    found = {name: value for part in vars(inputs).values() for name, value in asdict(part).items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def row(inputs: Inputs, work_sha256: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A point as one row: settings, then results.

    Where both have a name (``block_size``), it is what was asked, or else what it came to.
    """
    # Which requests were refused is of a run, not of a table of runs.
    results = {name: value for name, value in summary.items() if name != "refused_requests"}
    asked = dict(flat(columns(inputs))) | {"workload_sha256": work_sha256}
    return asked | {name: value for name, value in flat(results) if name not in asked}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is within, by path: ``waste.window_s.0``. What is None is left out."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for inner, content in items:
            yield from flat(content, f"{name}.{inner}" if name else str(inner))
    elif value is not None:
        yield name, value


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, whole or not at all, with every column that any of them has; the same rows are the same bytes.

    Raises:
        UserError: It cannot be written.
    """
    names = dict.fromkeys(name for cells in rows for name in cells)
    content = BytesIO()
    pq.write_table(pa.table({name: [cells.get(name) for cells in rows] for name in names}), content)
    write_whole(path, content.getvalue())
