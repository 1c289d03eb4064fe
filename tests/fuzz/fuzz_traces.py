"""Damaged traces of every format."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz_damage import INPUTS, damaged_bytes, damaged_document, damaged_lines, damaged_table, hostile_column
from fuzz_stock import TRACE, stock
from fuzzing import Case, kind
from paths import SAMPLES

Rng = random.Random


def _reading(rng: Rng, file: str) -> list[str]:
    """A command that reads a trace."""
    more = rng.choice(
        [[], [], ["--skip-bad"], ["--max-inflated-bytes", "1000"], ["--timed-trace-chunk-hash-size", "7"]]
    )
    few = ["--request-rate", "9"] if rng.random() < 0.7 else []
    commands = [
        ["traces", "stats", file], ["traces", "stats", file], ["traces", "stats", file, "--json", "-"],
        ["traces", "convert", file, rng.choice(["out.csv", "out.jsonl.gz", "out.parquet"])],
        ["traces", "synth", file, "--out", "out.json"], ["simulate", "--trace", file, *few],
        ["simulate", "--trace", file, *few, "--policy", rng.choice(["orca-max", "vllm-v1", "sglang"])],
    ]  # fmt: skip
    return [*rng.choice(commands), *more]


_LINED = [
    "azure2023.csv",
    "azure2024.csv",
    "burstgpt.csv",
    "burstgpt_sessions.csv",
    "litellm.csv",
    "vidur.csv",
    "vidur_timed.csv",
    "splitwise.csv",
]
_JSON_LINED = [
    *("mooncake.jsonl", "timed_trace.jsonl", "bailian.jsonl", "ours.jsonl", "ragpulse/0_trace.jsonl", "litellm.jsonl"),
    *("otel_spans.jsonl", "agents.jsonl", "batch_output.jsonl"),
]


@kind("csv", 350)
def csv(rng: Rng, folder: Path) -> Case:
    """CSV of every form."""
    name = rng.choice([None, *_LINED])
    Path("trace.csv").write_bytes(damaged_lines(rng, TRACE if name is None else (SAMPLES / name).read_text()))
    return Case(_reading(rng, "trace.csv"))


@kind("dialogue", 100)
def dialogue(rng: Rng, folder: Path) -> Case:
    """Requests that fork from others or go on from them, with any numbers."""
    rows = ["arrival_s,prompt_tokens,output_tokens,parent,fork_at,truncate_to,n"]
    for number in range(rng.randint(1, 5)):
        parent = rng.choice(["", str(rng.randrange(number)), str(rng.randint(-1, 5))]) if number else ""
        place = rng.randrange(3) if parent else 2
        cells = [
            rng.choice(["1", "2", "5", "30", "99"]) if each == place or rng.random() < 0.03 else "" for each in range(2)
        ]
        rows.append(
            ",".join([str(number), str(rng.randint(1, 40)), str(rng.randint(1, 5)), parent, *cells, rng.choice("1112")])
        )
    text = "\n".join(rows)
    Path("trace.csv").write_bytes(damaged_lines(rng, text) if rng.random() < 0.3 else text.encode())
    return Case([*_reading(rng, "trace.csv")])


@kind("jsonl", 350)
def jsonl(rng: Rng, folder: Path) -> Case:
    """JSON lines of every form: a value of some line is another one, or the text is damaged."""
    lines = (SAMPLES / rng.choice(_JSON_LINED)).read_text().splitlines()
    if rng.random() < 0.3:
        data = damaged_lines(rng, "\n".join(lines), rng.choice([",", ":", " "]))
    else:
        parts = [line.encode() for line in lines]
        row = rng.randrange(len(lines))
        parts[row] = damaged_document(rng, json.loads(lines[row])).replace(b"\n", b" ")
        data = rng.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(parts)
    Path("trace.jsonl").write_bytes(data)
    return Case(_reading(rng, "trace.jsonl"))


_DOCUMENTS = [
    *("sharegpt.json", "bench_serve.json", "sglang_bench.jsonl", "guidellm.json", "guidellm_0.3.json"),
    *("inference_perf.json", "langfuse.json", "jaeger.json"),
]


@kind("json", 250)
def whole_json(rng: Rng, folder: Path) -> Case:
    """JSON documents: conversations, and what benchmarks write."""
    name = rng.choice(_DOCUMENTS)
    Path("trace.json").write_bytes(damaged_document(rng, json.loads((SAMPLES / name).read_text())))
    more = ["--tokenizer", rng.choice(INPUTS)] if name == "sharegpt.json" and rng.random() < 0.2 else []
    return Case([*_reading(rng, "trace.json"), *more])


_COLUMNS = [
    "arrival_s", "prompt_tokens", "output_tokens", "max_tokens", "n", "parent", "fork_at", "truncate_to", "hash_ids",
    "block_tokens", "session_id", "input", "output", "timestamp", "input_length", "output_length",
]  # fmt: skip


@kind("parquet", 300)
def parquet(rng: Rng, folder: Path) -> Case:
    """Parquet with columns of any type."""
    if rng.random() < 0.3:
        data = damaged_table(rng, pq.read_table(stock() / "hashed.parquet"))
    else:
        rows = rng.randint(0, 4)
        good = {"prompt_tokens": pa.array([5] * rows, pa.int64()), "output_tokens": pa.array([2] * rows, pa.int64())}
        bad = {name: hostile_column(rng, rows) for name in rng.sample(_COLUMNS, rng.randint(1, 3))}
        data = damaged_table(rng, pa.table(good | bad)) if rng.random() < 0.2 else None
        if data is None:
            pq.write_table(pa.table(good | bad), "trace.parquet")
    if data is not None:
        Path("trace.parquet").write_bytes(data)
    return Case(_reading(rng, "trace.parquet"))


class _Call:
    """A pickle that would call something."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("called",)


@kind("packed", 250)
def packed(rng: Rng, folder: Path) -> Case:
    """Pickles of anything, and compressed files that are damaged or are something else."""
    name = rng.choice(["trace.pkl", "trace.csv.gz", "trace.jsonl.zst", "trace.zip", "trace"])
    if rng.random() < 0.5:
        pairs = [(rng.randint(1, 50), rng.randint(1, 9)) for _ in range(rng.randint(0, 4))]
        odd = rng.choice(
            [
                (1,),
                (1, 2, 3),
                (-1, 2),
                ("1", 2),
                (1.5, 2),
                (2**70, 1),
                (None, 1),
                [1, 2],
                _Call(),
                {1: 2},
                b"x",
                7,
                (True, True),
            ]
        )
        value = rng.choice([pairs, [*pairs, odd], odd, tuple(pairs), dict(enumerate(pairs)), set(pairs)])
        data = pickle.dumps(value, protocol=rng.randint(0, 5))
        data = damaged_bytes(rng, data) if rng.random() < 0.5 else data
    else:
        text = damaged_lines(rng, TRACE) if rng.random() < 0.5 else TRACE.encode()
        data = rng.choice(
            [
                gzip.compress(text),
                pa.compress(text, codec="zstd", asbytes=True),
                gzip.compress(gzip.compress(text)),
                text,
            ]
        )
        data = damaged_bytes(rng, data) if rng.random() < 0.7 else data
    Path(name).write_bytes(data)
    return Case(_reading(rng, name))


@kind("names", 60)
def names(rng: Rng, folder: Path) -> Case:
    """Traces and folders with names that mean something to shells, terminals, markup or URLs."""
    name = rng.choice(
        [
            "[/b].csv",
            "a\nb.csv",
            "a[red]x.csv",
            "\udcff.csv",
            "a,b=c.csv",
            " .csv",
            "--out.csv",
            "😀.csv",
            "\x1b[31m.csv",
            "a%20b.csv",
            "x" * 250 + ".csv",
            "é<b>.csv",
        ]
    )
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(TRACE)
    run = name.removesuffix(".csv")[:200]
    shutil.copytree(stock() / "run", run)
    return Case(rng.choice([
        ["simulate", f"--trace={name}", "--out", "out", "--json", "-"], ["traces", "stats", f"./{name}", "--out", "out.html"],
        ["compare", f"./{run}", f"./{run}", "--json", "-"], ["report", f"./{run}", f"./{run}", "--out", "out.html"],
        ["sweep", "--grid", f"trace={name},{name}", "--request-rate", "5", "--jobs", "1", "--out", "out"],
        ["sweep", "--grid", f"trace={name},trace.csv", "--request-rate", "5", "--jobs", "1", "--out", "out"],
        ["simulate", f"--trace={name}", "--num-prompts", "9"],
        ["validate", "--against", f"./{name}", "--gpu", "h200"], ["plan", f"--serve={name}", "--gpu", "h200"],
    ]))  # fmt: skip
