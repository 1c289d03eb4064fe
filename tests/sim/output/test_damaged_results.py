"""Folders of results, damaged: refused in one line that says which file, or drawn; never a fault."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pandas as pd
import pytest

from bench_files import benchmark
from cli_runs import run_here
from damage import damage
from fragmeter.experiments.cli.app import DONE, MISTAKE

SMALL = ["--num-prompts", "6", "--request-rate", "20", "--num-gpu-blocks-override", "60"]
RUNS = {
    "paged": ["--policy", "vllm-v1", "--record-blocks", "--record-plan"],
    "swapped": ["--policy", "vllm-sosp23", "--preemption-mode", "swap", "--n", "2", "--record-blocks"],
    "contiguous": ["--policy", "orca-oracle"],
    "replicas": ["--policy", "vllm-v1", "--prefill-replicas", "1", "--decode-replicas", "2"],
}
#: Damaged folders of each kind in `make test`, and in `make test-all`.
FEW, MANY = 5, 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each kind that a command leaves and another one reads."""
    place = tmp_path_factory.mktemp("whole")
    for name, flags in RUNS.items():
        assert run_here("simulate", *SMALL, *flags, "--out", place / name).returncode == DONE
    grid = ["--grid", "policy=vllm-v1,orca-max", "--grid", "request_rate=1,inf", "--goodput", "ttft:1000"]
    assert run_here("sweep", "--num-prompts", "6", *grid, "--jobs", "1", "--out", place / "sweep").returncode == DONE
    measured = benchmark(place / "bench.json", pd.read_parquet(place / "paged" / "requests.parquet"))
    against = ["--against", measured, "--gpu", "a100-40gb", "--out", place / "against"]
    assert run_here("validate", *against).returncode == DONE
    return {path.name: path for path in place.iterdir()}


def commands(name: str, whole: Path, hurt: Path, bench: Path, page: Path) -> list[list[object]]:
    """What reads a folder."""
    found: list[list[object]] = [["report", hurt, "--out", page]]
    if name in RUNS:
        found[0] += ["--goodput", "ttft:500", "tpot:50", "--perfetto", page.with_suffix(".pftrace")]
        found += [["compare", whole, hurt], ["compare", hurt, whole]]
    if name == "paged":
        found.append(["report", hurt, "--measured", bench, "--out", page])
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*RUNS, "sweep", "against"])
@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_what_is_damaged_is_refused_in_a_line_or_drawn(folders, tmp_path, name, seeds):
    statuses = set()
    for seed in seeds:
        hurt = tmp_path / "hurt"
        shutil.rmtree(hurt, ignore_errors=True)
        shutil.copytree(folders[name], hurt)
        how = damage(hurt, random.Random(f"{name} {seed}"), "sweep.parquet" if name == "sweep" else "*.*")
        for tokens in commands(name, folders[name], hurt, folders["bench.json"], tmp_path / "page.html"):
            done = run_here(*tokens)
            assert done.returncode in (DONE, MISTAKE), (seed, how, tokens[0], done.stderr)
            assert done.stderr.count("\n") == (done.returncode == MISTAKE), (seed, how, done.stderr)
            statuses.add(done.returncode)
    assert MISTAKE in statuses, "some damage is seen"


def one(column: str, value: object):
    """The last row has another value."""
    return lambda frame: frame.assign(**{column: [*frame[column].astype(object)[:-1], value]})


def dropped(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="weight")


NAMED = [
    ("gaps", dropped, "gaps.parquet: has no column weight"),
    ("gaps", lambda frame: frame.astype({"count": str}), "gaps.parquet: count: has type string, not whole"),
    ("gaps", one("weight", None), "gaps.parquet: weight: has type "),
    ("gaps", one("count", -1), "gaps.parquet: count: is -1 in row "),
    ("gaps", lambda frame: frame.assign(slope_ticks=-(2**62), count=2), "gaps.parquet: slope_ticks lead below 0"),
    ("preemptions", one("kind", "evict"), "preemptions.parquet: kind: is none of recompute, swap in row "),
    ("preemptions", one("request", 6), "preemptions.parquet: request: is 6 in row "),
    ("preemptions", lambda frame: frame.astype({"ticks": float}), "ticks: has type double, not whole numbers"),
    ("requests", one("prompt_tokens", 0), "requests.parquet: prompt_tokens: is 0 in row 6, and not from 1 to "),
    ("requests", lambda frame: pd.concat([frame, frame]), "requests.parquet: has 12 rows, and run.json 6 requests"),
    ("requests", one("n", 10**6), "requests.parquet: n: is 1000000 in row 6, and not from 1 to 1024"),
    ("requests", one("arrival_ticks", 2**62), "arrival_ticks is above first_scheduled_ticks in row 6"),
    (
        "requests",
        lambda frame: frame.assign(refused=True),
        "summary.json: belongs to another run than requests.parquet",
    ),
    ("requests", one("finish_ticks", pd.NA), "requests.parquet: finish_ticks is not of those that were served"),
    ("residencies", one("sequence", 99), "residencies.parquet: sequence: is 99 in row "),
    ("residencies", lambda frame: frame.assign(request=0), "residencies.parquet: sequences are of other requests"),
    ("residencies", lambda frame: frame.assign(replica=0), "replica is in some tables and not in others"),
    ("steps", one("ticks", 2**63 - 1), "steps.parquet: does not end"),
    ("steps", one("iterations", 2**30), "steps.parquet: iterations are not the num_steps of summary.json"),
    ("steps", lambda frame: frame[::-1], "memory.parquet: belongs to another run than steps.parquet"),
    ("memory", one("free", 0), "memory.parquet: the pool changes its size"),
]


@pytest.mark.parametrize(("name", "change", "complaint"), NAMED)
def test_each_damage_is_named(folders, tmp_path, name, change, complaint):
    hurt = tmp_path / "hurt"
    shutil.copytree(folders["swapped"], hurt)
    path = hurt / f"{name}.parquet"
    change(pd.read_parquet(path)).to_parquet(path, index=False)
    done = run_here("report", hurt, "--out", tmp_path / "page.html")
    assert done.returncode == MISTAKE and not (tmp_path / "page.html").exists()
    assert done.stderr.startswith(f"fragmeter: {hurt}: holds a damaged result, or another version's (")
    assert complaint in done.stderr.replace("large_string", "string") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        ("summary.json", {"completed": "6"}, "summary.json: completed is not a whole number, 0 or more"),
        ("summary.json", {"mean_ttft_ms": float("nan")}, "summary.json: mean_ttft_ms is a number beyond 1e+100"),
        ("summary.json", {"copied_slots": 10**400}, "summary.json: copied_slots is a number beyond 1e+100, or none"),
        ("summary.json", {"waste": {}}, "summary.json: waste.window_s is missing"),
        ("run.json", {"workload": []}, "run.json: workload: is not a JSON object"),
        ("run.json", {"cluster": {"num_replicas": 0}}, "run.json: cluster has no number of replicas"),
    ],
)
def test_each_damage_of_a_document_is_named_by_every_command(folders, tmp_path, file, change, complaint):
    hurt = tmp_path / "hurt"
    shutil.copytree(folders["contiguous"], hurt)
    (hurt / file).write_text(json.dumps(json.loads((hurt / file).read_bytes()) | change))
    for tokens in (["report", hurt, "--out", tmp_path / "page.html"], ["compare", folders["contiguous"], hurt]):
        done = run_here(*tokens)
        assert (done.returncode, done.stderr.count("\n")) == (MISTAKE, 1) and complaint in done.stderr
