"""The compiled core beside the engine in Python: the same bits in every column and in every file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from calibrations import calibration
from engine_runs import LONG_MODEL, seconds_of
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.cost import CalibratedCost, PaperCost, StepCost
from fragmeter.sim.engine import core
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.run import Run, simulate, simulate_window
from fragmeter.sim.engine.settings import settings
from fragmeter.sim.metrics.result import write
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.ticks import PER_MS
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from paths import ROOT
from same_runs import plain, same
from strategies import COSTS, KneeCost, LineCost

needs_core = pytest.mark.skipif(core.compiled()[0] is None, reason="the core is not built")
SOURCE = ROOT / "sim" / "engine" / "_core.c"
BENT = {"axes": ["length"], "knots": [[4, 16, 64, 256]], "log_ratios": [0, 1, 1.2, 2]}
CURVED = CalibratedCost(
    calibration(decode_attention={"coefficients": {"t0_us": 10}, "residuals": BENT}),
    model("toy-llama"),
    gpu("a100-40gb"),
)
#: Step times with a mean step in ticks, to which arrivals are scaled.
STEPS: list[tuple[StepCost, int]] = [
    *((cost, 200) for cost in COSTS.values()),
    (KneeCost(knee_tokens=7), 200),
    (KneeCost(knee_tokens=2000), 200),
    (PaperCost(), 26 * PER_MS),
    (PaperCost(ms_per_prefill_token_beyond=0.14), 26 * PER_MS),
    (CURVED, PER_MS // 20),
]


class Load:
    """Settings, requests and step times drawn from a seed: often a pool that preempts."""

    def __init__(self, seed: int, most: int = 40) -> None:
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
            "policy": "vllm-sosp23",
            "model": LONG_MODEL,
            "max_model_len": length,
            "block_size": block_size,
            "num_gpu_blocks_override": max(1, int(room) // block_size),
            "max_num_seqs": int(rng.choice([1, 2, 5, 64, 2048])),
            "max_num_batched_tokens": int(rng.choice([1, length // 3, 2560])),
            "watermark": float(rng.choice([0.0, 0.01, 0.1, 0.4])),
        }
        self.share = np.sort(rng.random(2))

    def window_of(self, run: Run) -> tuple[float, float]:
        """A window within a run."""
        start, end = (int(share * run.log.end_ticks) for share in self.share)
        return seconds_of(start), seconds_of(max(end, start + 1))

    def run(self, **switches: Any) -> Run:
        return simulate(settings(**self.chosen, **switches), self.work, self.cost)


def columns(run: Run) -> dict[str, list[int]]:
    """All that the ledger has, and the end of the run."""
    tables = {name: getattr(run.log, name) for name in ("rows", "residencies", "evictions", "chunks", "copies", "host")}
    found = {f"{table}.{name}": column.tolist() for table, named in tables.items() for name, column in named.items()}
    return found | {"end": [run.log.end_ticks], "refused": run.refused.tolist()}


def files(run: Run, folder: Path) -> dict[str, bytes]:
    """Every file of the result folder; step times that stand for none of the settings' describe themselves."""
    write(run, folder, {})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compare(load: Load) -> Run:
    """The core, Python, and Python step by step: the same bits. Returns the run of the core."""
    compiled, python = load.run(), load.run(core=False)
    assert columns(compiled) == columns(python)
    window = load.window_of(python)
    inside, outside = load.run(window=window), load.run(window=window, core=False)
    assert columns(inside) == columns(outside)
    assert plain(inside.window) == plain(outside.window)
    same(inside, load.run(window=window, leap=False))
    return compiled


@needs_core
@hypothesis_settings(max_examples=80)
@given(seed=st.integers(0, 1 << 40))
def test_core_python_and_stepping_are_the_same_bits(seed):
    compare(Load(seed))


@needs_core
@pytest.mark.slow
@hypothesis_settings(max_examples=2000)
@given(seed=st.integers(0, 1 << 40))
def test_core_python_and_stepping_are_the_same_bits_at_length(seed):
    compare(Load(seed, most=80))


@needs_core
def test_the_loads_preempt_refuse_idle_and_leap():
    """The property would say little if they did not."""
    runs = [Load(seed).run() for seed in range(120)]
    assert sum(len(run.log.evictions["index"]) > 0 for run in runs) > 20
    assert sum(bool(run.refused.any()) for run in runs) > 10
    assert max(run.log.rows["steps"].max(initial=0) for run in runs) > 50
    # Recomputed more than once.
    assert any(np.bincount(run.log.evictions["index"]).max(initial=0) > 1 for run in runs)


@needs_core
@pytest.mark.parametrize("seed", range(12))
def test_every_result_file_has_the_same_bytes(seed, tmp_path):
    load = Load(seed)
    load.cost = PaperCost()
    assert files(load.run(), tmp_path / "core") == files(load.run(core=False), tmp_path / "python")


@needs_core
def test_the_command_writes_the_same_bytes_with_and_without_the_core(tmp_path):
    """Preemptions under the default settings, and under the paper's cost with a window."""
    for place, flags in enumerate(
        (["--request-rate", "3"], ["--cost", "paper", "--request-rate", "4", "--window", "5", "60"])
    ):
        one, other = tmp_path / f"core{place}", tmp_path / f"python{place}"
        command = ["simulate", "--num-prompts", "300", *flags]
        assert status([*command, "--out", str(one)]) == DONE
        assert status([*command, "--no-core", "--out", str(other)]) == DONE
        assert {path.name: path.read_bytes() for path in one.iterdir()} == {
            path.name: path.read_bytes() for path in other.iterdir()
        }
        assert json.loads((one / "summary.json").read_text())["preemptions"]["recompute"] > 0


@needs_core
@pytest.mark.parametrize("leaps", [1, 7])
def test_a_full_buffer_changes_nothing(leaps, monkeypatch):
    """The core gives control back after so many leaps, or earlier where a step admits or preempts many."""
    for seed in range(30):
        load = Load(seed)
        whole = columns(load.run())
        with monkeypatch.context() as patched:
            patched.setattr(core, "_LEAPS", leaps)
            assert columns(load.run()) == whole


@needs_core
def test_a_run_to_the_end_of_its_window_has_the_same_window():
    for seed in range(40):
        load = Load(seed)
        window = load.window_of(load.run())
        runs = [
            simulate_window(settings(**load.chosen, window=window, core=which), load.work, load.cost)
            for which in (True, False)
        ]
        assert plain(runs[0].window) == plain(runs[1].window)


@needs_core
def test_progress_counts_every_request_once():
    load, counts = Load(3), []
    simulate(settings(**load.chosen), load.work, load.cost, progress=counts.append)
    assert counts == sorted(counts) and counts[-1] == len(load.work)


class Watcher(Observer):
    every_step = False


@needs_core
@pytest.mark.parametrize(
    ("changed", "by_core"),
    [
        ({}, True),
        ({"window": (0.0, 1.0)}, True),
        ({"core": False}, False),
        ({"leap": False}, False),
        ({"ids": True}, False),
        ({"preemption_mode": "swap"}, False),
        ({"policy": "vllm-v0"}, False),
        ({"policy": "vllm-v1"}, False),
        ({"model": "gemma-3-12b", "gpu": "a100-80gb"}, False),
        ({"shared_prefix_tokens": 16}, False),
    ],
    ids=str,
)
def test_the_core_serves_only_what_it_has(changed, by_core):
    work = Workload("three", *np.array([[0, 1, 2], [20, 30, 40], [5, 6, 7]]))
    with spied() as started:
        simulate(settings(**changed), work)
    assert len(started) == by_core


@needs_core
def test_users_siblings_and_observers_are_served_in_python():
    lengths = np.array([0, 0, 0]), np.array([20, 30, 40]), np.array([5, 6, 7])
    with spied() as started:
        simulate(settings(), Workload("users", *lengths, users=Users(2, np.zeros(3, dtype=np.int64))))
        simulate(settings(), Workload("siblings", *lengths, n=np.array([1, 2, 1])))
        simulate(settings(), Workload("watched", *lengths), observers=[Watcher()])
        assert not started
        simulate(settings(), Workload("alone", *lengths))
    assert len(started) == 1


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


@needs_core
def test_a_fault_of_the_step_times_is_passed_on():
    class Broken(LineCost):
        def step_ticks(self, *_: int) -> int:
            raise ValueError("no such step")

    work = Workload("one", np.array([0]), np.array([20]), np.array([5]))
    with pytest.raises(ValueError, match="no such step"):
        simulate(settings(), work, Broken())


@needs_core
def test_a_time_past_64_bits_is_an_error():
    class Ages(LineCost):
        def step_ticks(self, *_: int) -> int:
            return 1 << 62

    work = Workload("three", np.array([0, 0, 0]), np.array([20, 20, 20]), np.array([5, 6, 7]))
    with pytest.raises(OverflowError, match="64 bits"):
        simulate(settings(max_num_seqs=1), work, Ages())


@pytest.fixture
def loaded_anew():
    """The core is looked for again, now and after the test."""
    core.compiled.cache_clear()
    yield
    core.compiled.cache_clear()


def test_without_the_core_python_serves_and_doctor_says_so(loaded_anew, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fragmeter.sim.engine._core", None)
    monkeypatch.delattr("fragmeter.sim.engine._core", raising=False)
    assert core.compiled() == (None, "not built")
    run = Load(5).run()
    assert columns(run) == columns(Load(5).run(core=False))
    assert doctor_says(tmp_path)["works"] is False


@needs_core
def test_a_core_of_another_source_is_not_used(loaded_anew, monkeypatch, tmp_path):
    changed = tmp_path / SOURCE.name
    changed.write_bytes(SOURCE.read_bytes() + b"/* changed */")
    monkeypatch.setattr(core, "_SOURCE", changed)
    assert core.compiled() == (None, "built from another _core.c than the one beside it")
    found = doctor_says(tmp_path)
    assert not found["works"] and "again" in found["remedy"]


@needs_core
def test_doctor_says_that_the_core_is_used(tmp_path):
    found = doctor_says(tmp_path)
    assert found["works"] and found["found"].startswith("built from _core.c")


def doctor_says(folder: Path) -> dict[str, Any]:
    assert status(["doctor", "--json", str(folder / "doctor.json")]) == DONE
    [part] = [
        part for part in json.loads((folder / "doctor.json").read_text())["parts"] if part["name"] == "compiled core"
    ]
    return part


#: Differences to plant: text of the source, and what stands for it.
PLANTED = {
    "pressure at one free block": ("r->free - need < 1", "r->free - need < 0"),
    "victims until one more is free": ("r->free > *need - own", "r->free >= *need - own"),
    "no watermark": ("r->watermark_blocks : 0", "0 : 0"),
    "the watermark of an empty batch": ("(r->batch_size ? r->watermark_blocks : 0)", "(r->watermark_blocks)"),
    "one place fewer": ("r->batch_size == r->max_num_seqs)", "r->batch_size == r->max_num_seqs - (r->max_num_seqs > 1))"),
    "no budget": ("r->batch_size && prefill > budget", "r->batch_size && prefill > 2560"),
    "leaps past a budget": ("step->steady && !any", "step->steady"),
    "leaps past a preemption": ("step->steady = !step->preempts", "step->steady = true"),
    "wakes for nothing": ("int64_t second = line->base", "wakes = true; int64_t second = line->base"),
    "a step after an arrival": ("2 + whole_steps(ahead", "3 + whole_steps(ahead"),
    "no knots": ("line->until != WITHOUT_END", "false"),
    "no edges": ("if (r->num_edges)", "if (false)"),
    "a horizon of a block more": ("blocks = r->free - 1, steps", "blocks = r->free, steps"),
    "tokens lost": (".lost_tokens = held_tokens(r, sequence)", ".lost_tokens = held_tokens(r, sequence) + 1"),
    "tokens generated": ("sequence->generated_tokens + r->decode_step", "r->decode_step"),
    "a knee": ("beyond <= 0 || add_product(&ticks, r->steeper, beyond)", "true"),
    "the context of a first step": ("step ? context + batch : context", "context"),
    "blocks of a prompt": ("r->free -= ceil_div(tokens - 1, size)", "r->free -= ceil_div(tokens, size)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def compile_core(tmp_path_factory):
    """Compiles a changed source, and loads it beside the real one."""
    compiler, include = shutil.which("cc"), Path(sysconfig.get_path("include"))
    if compiler is None or not (include / "Python.h").is_file():
        pytest.skip("no C compiler, or no headers of Python")

    def make(source: str) -> ModuleType:
        folder = tmp_path_factory.mktemp("core")
        (folder / "_core.c").write_text(source)
        command = [compiler, "-shared", "-fPIC", "-O0", f"-I{include}", "-o", "_core.so", "_core.c"]
        subprocess.run(command, cwd=folder, check=True)
        loader = ExtensionFileLoader("_core", str(folder / "_core.so"))
        module = module_from_spec(spec_from_loader("_core", loader))
        loader.exec_module(module)
        return module

    return make


@needs_core
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_caught(name, compile_core, monkeypatch):
    before, after = PLANTED[name]
    source = SOURCE.read_text()
    assert source.count(before) == 1
    changed = compile_core(source.replace(before, after))
    monkeypatch.setattr(core, "compiled", lambda: (changed, "changed"))
    assert any(differs(Load(seed)) for seed in range(150))


def differs(load: Load) -> bool:
    """Whether any of the comparisons fails."""
    try:
        compare(load)
    except Exception:
        return True
    return False
