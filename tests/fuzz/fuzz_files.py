"""What commands read beside traces, damaged: models, costs, prices, benchmarks, and result folders."""

from __future__ import annotations

import random
from pathlib import Path

from fragmeter.experiments.cli.app import DONE, FAULT, MISTAKE
from fuzz_damage import damaged_arrays, damaged_file, damaged_folder, damaged_lines
from fuzz_stock import CLUSTER, GOODPUT, LOAD, SMALL_POOL, copied, flat, stock
from fuzzing import Case, kind
from served_bench import FLAGS

Rng = random.Random


def _damaged_copy(rng: Rng, name: str) -> None:
    copied(name)
    damaged_file(rng, Path(name))


@kind("model", 200)
def model(rng: Rng, folder: Path) -> Case:
    """A model's config.json."""
    _damaged_copy(rng, "config.json")
    more = rng.choice([[], ["--tensor-parallel-size", "2"], ["--enable-prefix-caching"], ["--kv-cache-dtype", "fp8"]])
    return Case(rng.choice([
        ["simulate", *flat(LOAD), "--model", "config.json", "--max-model-len", "2048", *more],
        ["simulate", *flat(LOAD), "--model", "config.json", "--policy", "vllm-v1", *more],
        ["plan", "--serve", "vllm serve mine/model", "--model", "config.json", "--gpu", "h200"],
    ]))  # fmt: skip


@kind("cost", 150)
def cost(rng: Rng, folder: Path) -> Case:
    """A calibration that the cost of steps follows from."""
    _damaged_copy(rng, "cost.json")
    return Case(["simulate", *flat(LOAD), "--cost", "cost.json"])


@kind("curve", 100)
def curve(rng: Rng, folder: Path) -> Case:
    """A rate over time."""
    _damaged_copy(rng, "curve.csv")
    return Case(["simulate", "--num-prompts", "3", "--rate-curve", "curve.csv"])


@kind("load", 150)
def load(rng: Rng, folder: Path) -> Case:
    """A load that was fitted to a trace."""
    _damaged_copy(rng, "load.json")
    return Case(rng.choice([
        ["traces", "sample", "load.json", "out.csv", *rng.choice([[], ["--num-prompts", "5"]])],
        ["simulate", "--trace", "load.json", "--num-prompts", "3"],
        ["simulate", "--trace", "load.json", *flat(LOAD)],
    ]))  # fmt: skip


@kind("prices", 60)
def prices(rng: Rng, folder: Path) -> Case:
    """Prices of GPUs, JSON and TOML."""
    name = rng.choice(["prices.json", "prices.toml"])
    if name == "prices.json":
        _damaged_copy(rng, name)
    else:
        Path(name).write_bytes(damaged_lines(rng, 'currency = "USD"\n[per_gpu_hour]\na100-80gb = 1.5\n', " "))
    return Case(["plan", *flat(GOODPUT), "--prices", name])


@kind("bench", 200)
def bench(rng: Rng, folder: Path) -> Case:
    """A benchmark of a real server, and what the server said of itself."""
    copied("bench.json", "metrics.txt")
    if rng.random() < 0.6:
        damaged_file(rng, Path("bench.json"))
    else:
        text = Path("metrics.txt").read_text()
        Path("metrics.txt").write_bytes(damaged_lines(rng, text, rng.choice([" ", "{", ",", '"'])))
    shown = rng.choice([["--model", "opt-13b"], []])
    tokens = ["validate", "--against", "bench.json", "--gpu", "a100-40gb", *shown]
    return Case(
        [*tokens, *rng.choice([[], ["--metrics", "metrics.txt"], ["--metrics", "metrics.txt", "--out", "out"]])]
    )


@kind("plan-file", 40)
def plan_file(rng: Rng, folder: Path) -> Case:
    """A recorded plan: it is refused, or carried out, and what it says may not be what its tables hold."""
    copied("run")
    path = Path("run/plan.npz")
    path.write_bytes(damaged_arrays(rng, path.read_bytes()))
    return Case(["validate", "--plan", str(path), "--check", "--every", "3"], (DONE, MISTAKE, FAULT))


@kind("folders", 250)
def folders(rng: Rng, folder: Path) -> Case:
    """Result folders that are damaged, then read, compared, written again, or gone on with."""
    name = rng.choice(["run", "run", "cluster", "sweep", "against", "figures", "planned"])
    reads = {
        "run": [["report", "run", "--out", "out.html"], ["compare", "run", "cluster"], ["report", "run", "--measured", "bench.json", "--out", "out.html"]],
        "cluster": [["report", "cluster", "--out", "out.html"], ["compare", "run", "cluster"]],
        "sweep": [["report", "sweep", "--out", "out.html"]],
        "against": [["report", "against", "--out", "out.html"]],
    }  # fmt: skip
    run = ["--trace", str(stock() / "trace.csv"), *SMALL_POOL]
    writes = {
        "run": [["simulate", *run, "--out", "out-run"]],
        "cluster": [["simulate", *CLUSTER, "--out", "out-cluster"]],
        "sweep": [["sweep", *run, "--grid", "seed=0:1", "--jobs", "1", "--goodput", "ttft:500", "--out", "out-sweep"]],
        "against": [["validate", "--against", "bench.json", *map(str, FLAGS), "--out", "out-against"]],
        "figures": [["reproduce", "fig1", "--jobs", "1", "--out", "out-figures"]],
        "planned": [["plan", *flat(GOODPUT), "--out", "out-planned"]],
    }  # fmt: skip
    tokens = rng.choice(reads.get(name, []) * 2 + writes[name])
    copied("bench.json")
    if any(token.startswith("out-") for token in tokens):
        copied(f"out-{name}")
        damaged_folder(rng, Path(f"out-{name}"))
    else:
        copied(*{name, "run", "cluster"})
        damaged_folder(rng, Path(name))
    return Case(tokens)
