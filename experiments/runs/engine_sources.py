"""Two vLLMs beside each other: each schedules one load over its own block pool, in a process of its own.

    settings, workload --pickle-->  process, PYTHONPATH = a checkout or an unpacked wheel  --JSON-->  steps, summary, bytes of a block
                       --pickle-->  process, PYTHONPATH = another                          --JSON-->

A process runs policy ``vllm-real`` under our engine, clock and ledger, so that what differs is vLLM's: ``Side`` has what it did in each
step, and ``comparison`` the first step in which two differ and the bytes that moved between buckets.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import fragmeter

from ...sim.config.settings import Settings
from ...sim.engine.observer import Observed, Observer
from ...sim.engine.run import simulate
from ...sim.memory.accounting.ledger import Leap
from ...sim.metrics.summary import summary
from ...sim.runs.run import Run
from ...sim.spec import gpu, model
from ...sim.spec.startup.launch import resolved_kv_dtype
from ...sim.types.errors import SettingError, UserError
from ...sim.types.sequence import StepPlan
from ...sim.workload.workload import Workload

#: What is said of a step, in the order in which differences are looked for.
FIELDS = ("start, ps", "scheduled tokens", "preempted", "blocks in use", "evicted blocks")


class Side(NamedTuple):
    """What one vLLM did.

    Attributes:
        version: As it states it.
        steps: The values of ``FIELDS`` of each step.
        summary: As of ``summary.json``.
        pool_bytes: Of the KV cache of one GPU.
    """

    version: str
    steps: list[list[Any]]
    summary: Mapping[str, Any]
    pool_bytes: int

    def bucket_bytes(self) -> dict[str, float]:
        """Mean bytes over time, by bucket."""
        shares = self.summary["waste"]["mean_over_time_pct"]["buckets"]
        return {name: share / 100 * self.pool_bytes for name, share in shares.items()}


class FirstStep(NamedTuple):
    """The first step in which two sides differ: its number, the field, and both values; None where a side has no such step."""

    number: int
    field: str
    base: Any
    other: Any


def first_difference(base: Side, other: Side) -> FirstStep | None:
    """The first step in which two sides differ; None if none does."""
    for number, (mine, theirs) in enumerate(zip_longest(base.steps, other.steps)):
        if mine is None or theirs is None:
            return FirstStep(number, FIELDS[0], *(None if each is None else each[0] for each in (mine, theirs)))
        for field, value, known in zip(FIELDS, mine, theirs, strict=True):
            if value != known:
                return FirstStep(number, field, value, known)
    return None


def sides(sources: Sequence[Path], settings: Settings, workload: Workload) -> list[Side]:
    """Serve a workload with each vLLM.

    Args:
        sources: Folders with a package ``vllm``, or wheels.

    Raises:
        UserError: A source has no vLLM, or cannot serve the workload.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="engine-sources-")))
        asked = folder / "asked.pickle"
        asked.write_bytes(pickle.dumps((settings, workload)))
        runs = []
        for number, source in enumerate(sources):
            found, answer = _unpacked(source, folder / f"source-{number}"), folder / f"{number}.json"
            runs.append((source, answer, stack.enter_context(_started(found, asked, answer))))
        return [_answer(*run) for run in runs]


def _unpacked(source: Path, folder: Path) -> Path:
    """The folder in which Python finds the package."""
    if source.suffix == ".whl" and zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
            wheel.extractall(folder, names)
        source = folder
    if not (source / "vllm" / "__init__.py").is_file():
        remedy = "has no package vllm; give a checkout, a folder with an unpacked wheel, or a .whl"
        raise SettingError("engine_source", os.fspath(source), remedy)
    return source.resolve()


def _started(source: Path, asked: Path, answer: Path) -> subprocess.Popen[str]:
    paths = [os.fspath(source), os.fspath(Path(fragmeter.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", __name__, os.fspath(asked), os.fspath(answer)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, cwd=asked.parent, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def _answer(source: Path, answer: Path, process: subprocess.Popen[str]) -> Side:
    said, _ = process.communicate()
    if process.returncode:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        raise UserError(f"engine_source = {os.fspath(source)!r}: vLLM did not serve the load: {last.strip()}")
    return Side(**json.loads(answer.read_text()))


class _Steps(Observer):
    """Writes down what vLLM does in each step."""

    every_step = True

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self._evicted = 0

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        self._memory: Any = engine.memory

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        memory = self._memory
        last, evicted = memory.scheduled, memory.evicted_blocks - self._evicted
        self._evicted = memory.evicted_blocks
        tokens = sorted([index, number] for index, number, _ in last.tokens)
        used = memory.num_blocks - memory.core.pool.get_num_free_blocks()
        self.steps.append([now, tokens, sorted(last.preempted), used, evicted])


def _serve(asked: Path, answer: Path) -> None:
    """Run in a process of its own, where ``vllm`` is the source's."""
    settings, workload = pickle.loads(asked.read_bytes())
    log = _Steps()
    try:
        run = simulate(settings, workload, observers=[log])
    except UserError as error:
        sys.exit(str(error))
    import vllm

    side = Side(str(vllm.__version__), log.steps, summary(run), _pool_bytes(run))
    answer.write_text(json.dumps(side._asdict()))


def _pool_bytes(run: Run) -> int:
    """Bytes of the KV cache of one GPU."""
    replica, chosen = run.replica, run.settings
    if replica.page_bytes:
        return replica.num_blocks * replica.page_bytes
    shape = model(chosen.model)
    dtype = resolved_kv_dtype(shape, gpu(chosen.gpu), chosen.kv_cache_dtype)
    slot = shape.slot_bytes(dtype, chosen.tensor_parallel_size, chosen.pipeline_parallel_size)
    return replica.num_blocks * replica.block_size * slot


def moved(base: Side, other: Side) -> Iterator[tuple[str, float, float]]:
    """Buckets that hold something on a side, with mean bytes of both."""
    mine, theirs = base.bucket_bytes(), other.bucket_bytes()
    for name in {**mine, **theirs}:
        values = mine.get(name, 0.0), theirs.get(name, 0.0)
        if any(values):
            yield name, *values


if __name__ == "__main__":
    _serve(*map(Path, sys.argv[1:]))
