"""Loads for the compiled core, and what a run of them has in its columns."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from dataclasses import replace
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from calibrations import calibration
from engine_runs import LONG_MODEL, seconds_of
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import CalibratedCost, PaperCost, Server, ServerConstants, StepCost, cost
from fragmeter.sim.cost.server import ServedCost
from fragmeter.sim.engine import core
from fragmeter.sim.engine import run as run_module
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.prefix_cache import prefix_cache
from fragmeter.sim.runs.moments import ticks_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.ticks import PER_MS
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from observed import observed_ticks
from paths import ROOT
from strategies import COSTS, KneeCost

needs_core = pytest.mark.skipif(core.compiled()[0] is None, reason="the core is not built")
POLICIES = ("vllm-sosp23", "vllm-v1")
BENT = {"axes": ["length"], "knots": [[4, 16, 64, 256]], "log_ratios": [0, 1, 1.2, 2]}
CURVED = CalibratedCost(
    calibration(decode_attention={"coefficients": {"t0_us": 10}, "residuals": BENT}),
    model("toy-llama"),
    gpu("a100-40gb"),
)
#: The host takes longer than the device for small batches.
HOSTED = ServedCost(CURVED, Server(1, "server", "", {}, ServerConstants(step_us=3.0, host_us=720.0)), asynchronous=True)
#: Step times with a mean step in ticks, to which arrivals are scaled.
STEPS: list[tuple[StepCost, int]] = [
    *((cost, 200) for cost in COSTS.values()),
    (KneeCost(knee_tokens=7), 200),
    (KneeCost(knee_tokens=2000), 200),
    (PaperCost(), 26 * PER_MS),
    (PaperCost(ms_per_prefill_token_beyond=0.14), 26 * PER_MS),
    (CURVED, PER_MS // 20),
    (HOSTED, PER_MS // 20),
    (cost("fitted", model("opt-13b"), gpu("a100-40gb")), 25 * PER_MS),
    (cost("fitted", model("llama-3.1-8b"), gpu("h100-80gb"), asynchronous=True), 6 * PER_MS),
    (cost("fitted", model("deepseek-v3"), gpu("h200"), tensor_parallel=8), 14 * PER_MS),
    # Windows of layers, which only step times have here.
    (cost("roofline", model("gpt-oss-20b"), gpu("h100-80gb")), 2 * PER_MS),
]


class Load:
    """Settings, requests and step times of a policy drawn from a seed: often a pool that preempts."""

    def __init__(self, seed: int, policy: str = "vllm-sosp23", most: int = 40) -> None:
        rng = np.random.default_rng(seed)
        count, length = int(rng.integers(1, most + 1)), int(rng.choice([24, 96, 400, 900]))
        prompts = rng.integers(1, length // 2 + 1, count)
        outputs = rng.integers(1, length // 2 + 1, count)
        self.cost, step = STEPS[rng.integers(len(STEPS))]
        gap = rng.choice([0, 0.3, 3, 30, 300]) * step
        arrivals = np.cumsum(np.rint(rng.exponential(1.0, count) * gap) * rng.integers(0, 2, count)).astype(np.int64)
        self.work = Workload("load", arrivals, prompts, outputs)
        block_size = int(rng.choice([1, 2, 3, 4, 7, 16, 32]))
        room = rng.choice([0.9, 1.0, 1.3, 2.0, 5.0, 50.0]) * (prompts + outputs).max()
        self.chosen: dict[str, Any] = {
            "policy": policy,
            "model": LONG_MODEL,
            "max_model_len": length,
            "block_size": block_size,
            "num_gpu_blocks_override": max(1, int(room) // block_size),
            "max_num_seqs": int(rng.choice([1, 2, 5, 64, 2048])),
            "max_num_batched_tokens": int(rng.choice([1, length // 3, 2560])),
            "watermark": float(rng.choice([0.0, 0.01, 0.1, 0.4])),
        }
        self.share = np.sort(rng.random(2))
        if policy == "vllm-v1":
            self._set_v1(rng, length)

    def _set_v1(self, rng: np.random.Generator, length: int) -> None:
        """A token budget from one a sequence to many; ends before ``max_tokens`` and at it; both orders of the free queue; also
        no prefix cache."""
        seqs = int(rng.choice([1, 2, 5, 64]))
        tokens = int(rng.choice([seqs, seqs + 3, length // 3 + seqs, 2560]))
        release = str(rng.choice(["0.20", "0.33", "0.33"]))
        self.chosen |= {
            "max_num_seqs": seqs,
            "max_num_batched_tokens": tokens,
            "vllm_release": release,
            "outside_ms": 0,
        }
        if rng.random() < 0.7:
            more = rng.choice([0, 0, 5], len(self.work))
            room = length - self.work.prompt_tokens - self.work.output_tokens
            self.work = replace(self.work, max_tokens=self.work.output_tokens + np.minimum(more, room))
        self.chosen["enable_prefix_caching"] = bool(rng.random() < 0.7)
        if rng.random() < 0.6:
            self.work = replace(self.work, content=shared_content(rng, self.work))
            if not self.work.content.covers_outputs and rng.random() < 0.2:
                self.work = replace(self.work, n=rng.integers(1, 4, len(self.work)))

    def window_of(self, run: Run) -> tuple[float, float]:
        """A window within a run."""
        start, end = (int(share * run.log.end_ticks) for share in self.share)
        return seconds_of(start), seconds_of(max(end, start + 1))

    def looks_of(self, run: Run) -> tuple[list[int], int]:
        """Ticks at which to look at the same run again, many of them where a row begins, and the look that ends it, if any."""
        rng = np.random.default_rng(run.log.end_ticks)
        starts = run.log.rows["start_ticks"]
        drawn = rng.integers(1, run.log.end_ticks + 2, 12)
        at = np.unique([*drawn, *rng.choice(starts, 12), *rng.choice(starts, 12) + 1] if len(starts) else drawn)
        return at[at > 0].tolist(), int(rng.integers(len(at) + 3))

    def run(self, **switches: Any) -> Run:
        return simulate(settings(**self.chosen, **switches), self.work, self.cost)

    def watched(
        self, looks: list[int], last: int, **switches: Any
    ) -> tuple[Run, list[dict[str, dict[str, list[int]]]]]:
        """A run that ends with a look, and what the ledger has at each."""
        seen: list[dict[str, dict[str, list[int]]]] = []

        def watch(engine: Engine | core.CoreEngine) -> bool:
            found = {
                table: {name: column.tolist() for name, column in getattr(engine.ledger, table).columns().items()}
                for table in ("rows", "residencies", "evictions", "chunks")
            }
            seen.append(found | {"clock": {"now": [int(engine.env.now)]}})
            return len(seen) > last

        with mock.patch.object(run_module, "milestones", lambda _: iter(looks)):
            return simulate(settings(**self.chosen, **switches), self.work, self.cost, watch=watch), seen


def shared_content(rng: np.random.Generator, work: Workload) -> PromptContent:
    """Sessions, or a few pieces that begin prompts in common, some of them up to a point in the answer before."""
    count, kind = len(work), rng.choice(["sessions", "pieces", "answers"])
    if kind == "sessions":
        return PromptContent.of_sessions(rng.integers(-1, 1 + count // 3, count))
    room = work.prompt_tokens + (work.output_tokens if kind == "answers" else 0)
    most = max(1, int(work.prompt_tokens.mean()))
    lengths = rng.integers(1, most + 1, 6)
    pieces: list[list[tuple[int, int]]] = []
    for left in room.tolist():
        # From a tree: each piece is one of two after the piece before it.
        found: list[tuple[int, int]] = []
        for level in range(int(rng.integers(0, 4))):
            piece = 2 * level + int(rng.integers(2))
            tokens = min(left, int(lengths[piece] if rng.random() < 0.8 else rng.integers(1, most + 1)))
            if tokens:
                found.append((piece, tokens))
                left -= tokens
        pieces.append(found)
    ids, tokens = np.array([each for found in pieces for each in found], dtype=np.int64).reshape(-1, 2).T
    return PromptContent(np.cumsum([0, *map(len, pieces)]), ids, tokens, covers_outputs=kind == "answers")


def columns(run: Run) -> dict[str, list[Any]]:
    """All that the ledger has, and the end of the run."""
    tables = {name: getattr(run.log, name) for name in ("rows", "residencies", "evictions", "chunks", "copies", "host")}
    found = {f"{table}.{name}": column.tolist() for table, named in tables.items() for name, column in named.items()}
    cache = run.replica.cache_log
    if cache is not None and cache.residency is not None:
        found |= {f"look_ups.{name}": column.tolist() for name, column in cache.look_up_columns().items()}
        changes = cache.change_columns()
        found["changes"] = _summed(changes["moment"], changes["slots"])
        observed = observed_ticks(cache.residency, partial(ticks_of, run.log))
        found |= {name: _summed(*each) for name, each in observed.items()}
        found["evicted"] = [run.replica.memory.evicted_blocks]
        found["histograms"] = [prefix_cache(run)]
    return found | {"end": [run.log.end_ticks], "refused": run.refused.tolist()}


def _summed(keys: np.ndarray, values: np.ndarray) -> list[tuple[int, int]]:
    """The sum of the values of each key, where it is not 0."""
    unique, place = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(unique), dtype=np.int64)
    np.add.at(sums, place, values)
    return [(key, value) for key, value in zip(unique.tolist(), sums.tolist(), strict=True) if value]


class spied:
    """The replicas that the core is started for."""

    def __enter__(self) -> list[object]:
        started: list[object] = []
        module = core.compiled()[0]
        assert module is not None
        self._patch = mock.patch.object(
            module, "start", side_effect=lambda *given: started.append(real(*given)) or started[-1]
        )
        real = module.start
        self._patch.start()
        return started

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def sources_in(folder: Path) -> Path:
    """A folder with a copy of the core's sources."""
    for path in (ROOT / "sim" / "engine").glob("_core*.[ch]"):
        shutil.copy(path, folder)
    return folder


def changed_core(folder: Path, part: str, before: str, after: str) -> ModuleType:
    """The core, compiled in a folder with a change in one of its sources, and loaded beside the real one."""
    path = sources_in(folder) / f"_core_{part}.c"
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, after))
    if not can_compile():
        pytest.skip("no C compiler, or no headers of Python")
    return loaded(compiled_in(folder, "-O0"))


def can_compile() -> bool:
    """Whether there are a C compiler and the headers of Python."""
    return shutil.which("cc") is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def compiled_in(folder: Path, *flags: str) -> Path:
    """The library of the sources in a folder."""
    sources = sorted(each.name for each in folder.glob("_core*.c"))
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", "-shared", "-fPIC", *flags, include, "-o", "_core.so", *sources], cwd=folder, check=True)
    return folder / "_core.so"


def loaded(library: Path) -> ModuleType:
    """A library of the core, beside the real one."""
    loader = ExtensionFileLoader("_core", str(library))
    module = module_from_spec(spec_from_loader("_core", loader))
    loader.exec_module(module)
    return module


def turns(seed: int, sessions: int = 10, longest: int = 3) -> Workload:
    """Sessions whose turns repeat what came before; others evict it meanwhile."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.repeat(np.arange(sessions), longest))
    turn = [int((order[:place] == session).sum()) for place, session in enumerate(order)]
    arrivals = np.cumsum(rng.integers(0, 3000, len(order)))
    lengths = 12 + 12 * np.array(turn), np.full(len(order), 4)
    return Workload("turns", arrivals, *lengths, content=PromptContent.of_sessions(order))
