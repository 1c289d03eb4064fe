"""Two versions of the code, compared by the bytes of what their commands write: for changes that must change no result.

    git worktree add /tmp/before/fragmeter HEAD~1
    PYTHONPATH=/tmp/before python benchmarks/same_bytes.py run before-bytes
    python benchmarks/same_bytes.py run after-bytes
    python benchmarks/same_bytes.py compare before-bytes after-bytes

``run`` runs every command below with the ``fragmeter`` that Python imports: each policy on loads that preempt, share,
swap and cache, clusters, sweeps, plans, comparisons, reports, traces, and every figure of ``reproduce all`` (with one seed;
``--all-seeds`` takes each figure's own). ``compare`` compares file by file; in JSON, hashes of 64 digits count as equal,
since the hash of the code is among them, and ``--json`` output that differs is shown key by key. ``compare --values``
looks into JSON and Parquet files that differ: values of keys and columns that both have must be equal, and keys and columns
that one side lacks are counted. It knows the names of the schema version before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

POLICIES = (
    "static", "fastertransformer", "orca", "orca-max", "orca-pow2", "orca-oracle", "vllm-sosp23", "vllm-v0", "vllm-v1",
    "sarathi", "tgi", "trtllm-no-evict", "trtllm-max-util", "lightllm", "fastgen", "vattention", "sglang", "llama-cpp",
)  # fmt: skip
FIGURES = (
    "table1", "fig1", "fig3", "fig11", "fig19a", "waste", "fig2", "fig12a", "fig12b", "fig12c", "fig12d", "fig12e", "fig12f",
    "fig13a", "fig13b", "fig14a", "fig14b", "fig14c", "fig14d", "fig14e", "fig14f", "fig15", "fig16", "fig17", "fig18b",
    "fig19b",
)  # fmt: skip
SAMPLES = Path(__file__).resolve().parent.parent / "tests" / "data" / "traces"
LOAD = ("--num-prompts", "150", "--request-rate", "12")
RECORDED = ("--record-blocks", "--record-plan")
LLAMA = ("--model", "llama-3.1-8b", "--gpu", "a100-80gb")
#: What is not a result: hashes of code and content.
HASH = re.compile(rb"\b[0-9a-f]{64}\b")


def commands() -> Iterator[tuple[str, list[str]]]:
    """A name and the arguments of each command; ``{out}`` is a folder of its own, ``{trace}`` that of the samples."""
    simulate = ("simulate", "--out", "{out}/result", "--json", "{out}/summary.json")
    for policy in POLICIES:
        chosen = (*simulate, "--policy", policy)
        yield f"plain {policy}", [*chosen, *LOAD]
        yield f"samples {policy}", [*chosen, *LOAD, "--n", "3"]
        yield f"recorded {policy}", [*chosen, "--num-prompts", "40", "--request-rate", "12", *RECORDED]
        yield (
            f"closed loop {policy}",
            [*chosen, "--num-prompts", "60", "--request-rate", "inf", "--max-concurrency", "7"],
        )
        yield f"contents {policy}", [*chosen, "--trace", "{trace}/mooncake.jsonl", *LLAMA, "--ids"]
    for policy in ("vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi", "sglang", "orca-oracle"):
        tight = ("--num-gpu-blocks-override", "200")
        yield f"tight {policy}", [*simulate, "--policy", policy, *LOAD, *tight, "--ids", "--no-leap"]
    swapping = ("--preemption-mode", "swap", "--num-gpu-blocks-override", "200")
    yield "swap", [*simulate, "--policy", "vllm-sosp23", *LOAD, *swapping, "--ids"]
    yield "beams", [*simulate, "--policy", "vllm-sosp23", *LOAD, "--n", "4", "--use-beam-search"]
    yield (
        "shared prefix",
        [
            *simulate,
            "--trace",
            "{trace}/azure2023.csv",
            "--model",
            "opt-66b",
            "--gpu",
            "h200",
            "--shared-prefix-tokens",
            "80",
        ],
    )
    for policy in ("vllm-v1", "sglang"):
        cached = ("--trace", "{trace}/bailian.jsonl", *LLAMA, "--policy", policy, "--num-gpu-blocks-override", "40")
        yield f"cached {policy}", [*simulate, *cached, "--enable-prefix-caching"]
    yield "windows", [*simulate, "--policy", "vllm-v1", "--model", "gpt-oss-120b", "--gpu", "h100-80gb", *LOAD]
    served = (*simulate, "--policy", "vllm-v1", *LLAMA, *LOAD)
    for router in ("round-robin", "least-outstanding-tokens", "kv-aware", "prefix-affine"):
        yield f"cluster {router}", [*served, "--num-replicas", "3", "--router", router]
    yield "disaggregated", [*served, "--prefill-replicas", "1", "--decode-replicas", "2"]
    grid = ("--grid", "policy=orca-max,vllm-sosp23,vllm-v1", "--grid", "seed=0:2", "--jobs", "1")
    yield "sweep", ["sweep", *LOAD, *grid, "--out", "{out}/sweep", "--json", "{out}/sweep.json"]
    yield (
        "waste",
        ["compare", "--waste", "--num-prompts", "150", "--seeds", "2", "--jobs", "1", "--json", "{out}/waste.json"],
    )
    plan = ("--serve", "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192", "--gpu", "h200")
    yield "plan", ["plan", *plan, "--json", "{out}/plan.json"]
    goal = (
        "--trace",
        "{trace}/azure2023.csv",
        "--goodput",
        "ttft:500",
        "tpot:50",
        "--num-prompts",
        "200",
        "--seeds",
        "1",
    )
    yield (
        "plan goodput",
        ["plan", *plan, *goal, "--request-rate", "4", "--out", "{out}/plan", "--json", "{out}/plan.json"],
    )
    yield (
        "report",
        ["report", "{out}/../plain_vllm-v1/result", "--out", "{out}/page.html", "--perfetto", "{out}/run.pftrace"],
    )
    for name in ("azure2023.csv", "mooncake.jsonl", "bench_serve.json", "ours.jsonl", "sharegpt.json"):
        yield f"stats {name}", ["traces", "stats", "{trace}/" + name, "--json", "{out}/stats.json"]
        yield f"convert {name}", ["traces", "convert", "{trace}/" + name, "{out}/trace.jsonl"]
    yield "synth", ["traces", "synth", "{trace}/azure2023.csv", "--out", "{out}/load.json"]
    for figure in FIGURES:
        yield (
            f"figure {figure}",
            ["reproduce", figure, "--jobs", "1", "--out", "{out}/figure", "--json", "{out}/figure.json"],
        )


#: Figures that draw nothing, and take no seeds.
SEEDLESS = ("table1", "fig1", "fig3", "fig19a")


def run(folder: Path, all_seeds: bool, only: str) -> int:
    """Run the commands, as many at a time as there are cores; a refusal is a result, too."""
    chosen = [
        (name.replace(" ", "_").replace("/", "_"), tokens) for name, tokens in commands() if re.search(only, name)
    ]
    shutil.rmtree(folder, ignore_errors=True)

    def one(name: str, tokens: list[str]) -> str:
        out = folder / name
        out.mkdir(parents=True)
        filled = [token.format(out=out, trace=SAMPLES) for token in tokens]
        if name.startswith("figure_") and not all_seeds and filled[1] not in SEEDLESS:
            filled += ["--seeds", "1"]
        environment = os.environ | {"COLUMNS": "100", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "fragmeter", *filled], capture_output=True, text=True, env=environment, check=False
        )
        printed = done.stdout.replace(str(folder), "OUT").replace(str(SAMPLES), "TRACES")
        complaint = done.stderr.replace(str(folder), "OUT").replace(str(SAMPLES), "TRACES")
        (out / "console.txt").write_text(f"{done.returncode}\n{printed}\n{complaint}")
        return f"{done.returncode} {name}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # A report waits for the result that it is of.
        for line in pool.map(lambda pair: one(*pair), [pair for pair in chosen if pair[0] != "report"]):
            print(line, flush=True)
    for name, tokens in chosen:
        if name == "report":
            print(one(name, tokens))
    return 0


def content(path: Path) -> bytes:
    """A file, with what is not a result struck out."""
    data = path.read_bytes()
    return HASH.sub(b"#", data) if path.suffix in (".json", ".html", ".txt") else data


def compare(before: Path, after: Path, values: bool = False) -> int:
    """Print the files that differ; the exit status is 1 where some do.

    Args:
        values: Whether files that hold equal values under the names that both have count as equal.
    """
    lacking: Counter[str] = Counter()
    sides = [
        {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        for folder in (before, after)
    ]
    names = [{known_by(name, path): path for name, path in side.items()} for side in sides]
    if values:
        # ``run`` must work with any version that Python imports.
        from fragmeter.sim.metrics.result import FORMER_TABLES

        for table, former in FORMER_TABLES.items():
            old, new = f"/{former}.parquet", f"/{table}.parquet"
            names[0] = {name.replace(old, new): path for name, path in names[0].items()}
    differing = []
    for name in sorted(names[0].keys() | names[1].keys()):
        paths = [side.get(name) for side in names]
        if None in paths:
            differing.append(f"{name}: only {'after' if paths[0] is None else 'before'}")
        elif content(paths[0]) != content(paths[1]) and not (values and same_values(*paths, lacking)):
            differing.append(f"{name}: {first_difference(*paths)}")
    digest = hashlib.sha256(
        b"".join(name.encode() + content(path) for name, path in sorted(names[0].items()))
    ).hexdigest()
    print(*differing, sep="\n")
    for text, count in sorted(lacking.items()):
        print(f"{text}: in {count} files")
    print(f"{len(names[0])} files before, {len(names[1])} after, {len(differing)} differ (before: {digest[:12]})")
    return int(bool(differing))


def known_by(name: str, path: Path) -> str:
    """The name of a file; of one that is named by the hash of what it follows from, that of its content in its place."""
    return HASH.sub(hashlib.sha256(content(path)).hexdigest()[:12].encode(), name.encode()).decode()


def same_values(before: Path, after: Path, lacking: Counter[str]) -> bool:
    """Whether a JSON or Parquet file holds equal values under all names that both sides have.

    Args:
        lacking: Is counted up for each name that one side lacks.
    """
    if before.suffix == ".json":
        one, other = (json.loads(HASH.sub(b"a hash", path.read_bytes())) for path in (before, after))
        return _same_json(one, other, "", lacking)
    if before.suffix != ".parquet":
        return False
    # Not at the top of the module, as in ``compare``.
    from fragmeter.sim.metrics.result import FORMER_COLUMNS

    tables = [pq.read_table(path).to_pandas() for path in (before, after)]
    tables[0] = tables[0].rename(columns={former: now for now, former in FORMER_COLUMNS.items()})
    both = [column for column in tables[0] if column in tables[1]]
    for side, table in zip(("before", "after"), tables):
        lacking.update(f"column {column}, only {side}" for column in table if column not in both)
    return tables[0][both].equals(tables[1][both])


def _same_json(before: Any, after: Any, name: str, lacking: Counter[str]) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        for side, one, other in (("before", before, after), ("after", after, before)):
            lacking.update(f"key {name}{key}, only {side}" for key in one.keys() - other.keys())
        both = before.keys() & after.keys()
        same = [_same_json(before[key], after[key], f"{key}.", lacking) for key in both]
        return all(same)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        same = [_same_json(*pair, name, lacking) for pair in zip(before, after)]
        return all(same)
    return before == after or name == "schema_version."


def first_difference(before: Path, after: Path) -> str:
    """Where two files begin to differ."""
    if before.suffix == ".json":
        one, other = (json.loads(path.read_bytes()) for path in (before, after))
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
            return f"keys {', '.join(sorted(keys))}"
    for line, (left, right) in enumerate(
        zip(content(before).split(b"\n"), content(after).split(b"\n"), strict=False), 1
    ):
        if left != right:
            return f"line {line}: {left[:100]!r} and {right[:100]!r}"
    return "one ends before the other"


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Compare what two versions of the code write.")
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--all-seeds", action="store_true")
    running.add_argument("--only", default="", help="commands with a name that matches this regular expression")
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--values", action="store_true", help="look into JSON and Parquet files that differ")
    options = parser.parse_args()
    if options.action == "run":
        return run(options.folder.resolve(), options.all_seeds, options.only)
    return compare(options.before, options.after, options.values)


if __name__ == "__main__":
    sys.exit(main())
