"""Finished points of a sweep: one file each, found by the hash of its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...sim import Settings, Workload
from ...sim.metrics.objectives import Objectives
from ...sim.output.files import as_utf8
from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.policy.registry import options_by_policy, plugin_files
from ...sim.spec import gpu
from ...sim.spec.model import origin
from ...traces import Pacing, Trace, holds_load
from .inputs import Inputs
from .kept import Kept, versions

#: Subfolder of a sweep or a plan for finished points.
POINTS = "points"
#: Pattern of the files of finished points, named by their keys.
FINISHED = f"{POINTS}/{'[0-9a-f]' * 64}.json"
#: File of all points in the folder of a sweep.
TABLE = "sweep.parquet"
SWEEP = FolderKind("sweep", (TABLE, FINISHED))
#: Cached workloads: most neighbouring points serve one or two of them.
_KEPT = 4


class Workloads:
    """Makes workloads and caches the last few, because points that differ in a policy serve the same workload."""

    def __init__(self) -> None:
        self._made = lru_cache(_KEPT)(self._make)
        self._lengths = lru_cache(_KEPT)(Inputs.lengths)

    def of(self, inputs: Inputs) -> Workload:
        """The workload of the inputs.

        Raises:
            UserError: As ``Inputs.lengths`` and ``Inputs.workload``.
        """
        chosen = inputs.settings
        bare = Settings(model=chosen.model, max_model_len=chosen.max_model_len, seed=chosen.seed)
        return self._made(replace(inputs, settings=bare))

    def _make(self, inputs: Inputs) -> Workload:
        requests, settings = inputs.requests, inputs.settings
        if requests.trace is not None and not holds_load(requests.trace):
            # A file gives the same requests for every seed.
            settings = replace(settings, seed=0)
        requests = replace(requests, max_tokens=None, n=None)
        lengths: Trace = self._lengths(replace(inputs, requests=requests, settings=settings, pacing=Pacing()))
        return inputs.workload(lengths)


def key(inputs: Inputs, work: Workload, goal: Objectives | None = None) -> str:
    """A hash of everything that determines a run's summary.

    The hash covers settings, the files that they name, requests, objectives, the code and numpy's version.
    """
    content = {
        "versions": versions(),
        "settings": inputs.settings.as_dict(),
        "files": file_hashes(inputs.settings),
        "workload": work.sha256(),
    } | ({} if goal is None else {"goodput": goal.limits})
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_hashes(settings: Settings) -> dict[str, str | None]:
    """Hashes of all files that settings name, and of the modules of plug-ins: an edit of one changes the result.

    Raises:
        UserError: A model, a GPU or a plug-in that cannot be read.
    """
    speculative = settings.policy_options.speculative
    models = [settings.model, *([speculative.model] if speculative and speculative.method == "draft_model" else [])]
    card = [settings.gpu, gpu(settings.gpu).profile or ""] if settings.gpu.endswith(".json") else []
    paths = {name: Path(name) for name in (*card, settings.cost or "", settings.server or "")}
    paths |= {f"module {name}": path for name, path in plugin_files(settings.policy, settings.allocator).items()}
    return {f"model {name}": origin(name) for name in models if name} | {
        name: sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()
    }


class Store:
    """The summaries of finished points, in the folder of a sweep or of a plan.

    Args:
        folder: May hold an earlier sweep or plan.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self._kept = Kept(folder, f"{POINTS}/")

    def find(self, key: str) -> dict[str, Any] | None:
        """The summary of a point; None if it is not finished, or its file is damaged or belongs to another point."""
        found = self._kept.find(key, key)
        return None if found is None else found.get("summary")

    def keep(self, key: str, inputs: Inputs, summary: dict[str, Any]) -> None:
        """Store the summary of a point; the file appears whole or not at all.

        Raises:
            UserError: It cannot be written.
        """
        about = {name: str(value) for name, value in flat(columns(inputs))}
        self._kept.keep(key, key, {"asked": about, "summary": summary})


def columns(inputs: Inputs) -> dict[str, Any]:
    """Every setting of the inputs by its name, paths as text."""
    others = (inputs.requests, inputs.reading, inputs.pacing)
    found = inputs.settings.as_dict() | {name: value for part in others for name, value in asdict(part).items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def row(inputs: Inputs, work_sha256: str, summary: Mapping[str, Any], axes: Iterable[str] = ()) -> dict[str, Any]:
    """A point as one row: settings, then results.

    Args:
        axes: Settings that have a column even if the point's policy does not read them.

    For a name that settings and results share (``block_size``), the row has the given setting, or else the resulting
    value.
    """
    # The refused requests belong to a run, not to a table of runs.
    results = {name: value for name, value in summary.items() if name != "refused_requests"}
    options = {name: inputs.settings.value(name) for name in axes if name in options_by_policy()}
    inputs_columns = dict(flat(columns(inputs) | options)) | {"workload_sha256": work_sha256}
    return inputs_columns | {name: value for name, value in flat(results) if name not in inputs_columns}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by path: ``waste.window_s.0``. None values are left out."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for inner, content in items:
            yield from flat(content, f"{name}.{inner}" if name else str(inner))
    elif value is not None:
        yield name, value


def as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as a Parquet file, with every column of any row; the same rows give the same bytes."""
    names = dict.fromkeys(name for cells in rows for name in cells)
    content = BytesIO()
    pq.write_table(pa.table({name: [_cell(cells.get(name)) for cells in rows] for name in names}), content)
    return content.getvalue()


def _cell(value: Any) -> Any:
    return as_utf8(value) if isinstance(value, str) else value
