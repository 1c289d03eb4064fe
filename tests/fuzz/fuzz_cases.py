"""What the fuzzer runs in this process: hostile flags, files and texts of every command."""

from __future__ import annotations

import atexit
import gzip
import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
from cyclopts import App

from calibrations import document as calibration_document
from fragmeter.experiments.cli.app import DONE, FAULT, MISTAKE, app
from fragmeter.experiments.runs.grid import PART_OF
from fuzz_damage import (
    INPUTS,
    NUMBERS,
    OUTPUTS,
    TEXTS,
    any_text,
    damaged_arrays,
    damaged_bytes,
    damaged_document,
    damaged_file,
    damaged_folder,
    damaged_lines,
    damaged_table,
    hostile_column,
    hostile_files,
)
from fuzzing import Case, kind, run_here
from paths import SAMPLES
from served_bench import FLAGS, Server, requests, written

Rng = random.Random
LOAD = {"--num-prompts": "3", "--request-rate": "5"}
SERVE = "vllm serve facebook/opt-13b"
TRACE = """arrival_s,prompt_tokens,output_tokens,max_tokens,n
0,5,3,8,2
0.1,20,4,9,1
0.1,7,1,1,3
2,33,6,6,1
"""
#: A run of several replicas, which serve requests of one sequence each.
CLUSTER = ["--num-prompts", "4", "--request-rate", "5", "--num-gpu-blocks-override", "200", "--num-replicas", "2"]
_SMALL_POOL = ["--block-size", "4", "--num-gpu-blocks-override", "30", "--max-model-len", "64"]


@cache
def stock() -> Path:
    """A folder with one of everything that commands read, made once by the commands themselves."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-stock-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "trace.csv").write_text(TRACE)
    (folder / "curve.csv").write_text("start_s,request_rate\n0,2\n1,5.5\n3,1\n")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "cost.json").write_text(json.dumps(calibration_document()))
    (folder / "prices.json").write_text('{"currency": "USD", "per_gpu_hour": {"a100-80gb": 1.5, "h200": 4.5}}')
    written(folder, Server(), requests(4))
    shutil.copy(SAMPLES / "mooncake.jsonl", folder / "hashed.jsonl")
    run = ["simulate", "--trace", f"{folder}/trace.csv", *_SMALL_POOL]
    made = [
        [*run, "--out", "run", "--record-blocks", "--record-plan", "--record-steps", "0:6"],
        ["simulate", *CLUSTER, "--out", "cluster"],
        ["sweep", *run[1:], "--grid", "seed=0:1", "--jobs", "1", "--goodput", "ttft:500", "--out", "sweep"],
        ["validate", "--against", "bench.json", "--metrics", "metrics.txt", *map(str, FLAGS), "--out", "against"],
        ["traces", "synth", "trace.csv", "--out", "load.json"],
        ["reproduce", "fig1", "--jobs", "1", "--out", "figures"],
        ["traces", "convert", "hashed.jsonl", "hashed.parquet"],
        ["plan", *_flat(GOODPUT), "--out", "planned"],
    ]
    before = os.getcwd()
    os.chdir(folder)
    try:
        for tokens in made:
            ran = run_here(tokens)
            assert ran.status == DONE, (tokens, ran.stderr)
    finally:
        os.chdir(before)
    return folder


#: A model's config.json, of those that are read most.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 64,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "quantization_config": {"quant_method": "awq", "bits": 4},
}  # fmt: skip
GOODPUT = {
    "--model": "opt-13b", "--gpu": "a100-80gb", "--goodput": "ttft:2000", "--num-prompts": "100", "--jobs": "1",
    "--seeds": "1", "--verify-seeds": "1",
}  # fmt: skip


def copied(*names: str) -> None:
    """Put files or folders of the stock into the current folder; ``out-`` of a name copies it to where it may be written."""
    for name in names:
        source = stock() / name.removeprefix("out-")
        if source.is_dir():
            shutil.copytree(source, name)
        else:
            shutil.copy(source, name)


def _flat(flags: dict[str, str]) -> list[str]:
    return [token for each in flags.items() for token in each]


# Flags -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A quick command line, before a flag of it is replaced by a hostile one.

    Attributes:
        needs: What it reads of the stock.
        always: Tokens that stay, for a command that would take seconds if it were let do its work.
    """

    positional: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


_BENCH = {"--against": "bench.json", "--model": "opt-13b", "--gpu": "a100-40gb"}
BASES: dict[tuple[str, ...], list[Base]] = {
    ("reproduce",): [Base(("fig1",), {"--jobs": "1"}), Base(("prefix-cache",), {"--trace": "hashed.jsonl"}, ("hashed.jsonl",))],
    ("simulate",): [Base((), LOAD), Base((), {"--trace": "trace.csv"}, ("trace.csv",))],
    ("sweep",): [
        Base((), LOAD | {"--grid": "seed=0:1", "--jobs": "1", "--out": "out"}),
        Base((), LOAD | {"--search": "block_size=8:9", "--minimize": "p99_ttft_ms", "--trials": "2", "--jobs": "1", "--out": "out"}),
    ],
    ("compare",): [
        Base((), LOAD | {"--seeds": "2", "--jobs": "1"}, always=("--set", "block_size=8", "--set", "n=2")),
        Base(("run", "cluster"), {}, ("run", "cluster")),
        Base((), {"--num-prompts": "3", "--jobs": "1", "--seeds": "1"}, always=("--waste",)),
    ],
    ("report",): [
        Base(("run",), {"--out": "out.html"}, ("run",)), Base(("sweep",), {"--out": "out.html"}, ("sweep",)),
        Base(("against",), {"--out": "out.html"}, ("against",)), Base(("missing",), {"--out": "out.html"}),
    ],
    ("plan",): [Base((), {"--serve": SERVE, "--gpu": "h200"}), Base((), GOODPUT, ("prices.json",))],
    ("validate",): [Base((), _BENCH, ("bench.json", "metrics.txt")), Base((), {"--plan": "run/plan.npz", "--every": "3"}, ("run",), ("--check",))],
    ("diagnose",): [Base((), {"--serve": SERVE, "--gpu": "h200", "--trace": "trace.csv", "--num-prompts": "50", "--seeds": "1"}, ("trace.csv",))],
    ("story",): [Base(("samples",)), Base(("no-story",)), Base(("trace.csv",), {}, ("trace.csv",))],
    ("list",): [Base(("policies",)), Base(("models",)), Base(("cards",))],
    ("traces", "list"): [Base()],
    ("traces", "get"): [Base(("no-set",))],
    ("traces", "stats"): [Base(("trace.csv",), {}, ("trace.csv",))],
    ("traces", "convert"): [Base(("trace.csv", "out.csv"), {}, ("trace.csv",))],
    ("traces", "synth"): [Base(("trace.csv",), {"--out": "out.json"}, ("trace.csv",))],
    ("traces", "sample"): [Base(("load.json", "out.csv"), {}, ("load.json",))],
    # These take seconds: what is given last is refused.
    ("calibrate",): [Base((), {"--device": "none", "--out": "out.json"})],
    ("doctor",): [Base((), {}, (), ("--json", "mine"))],
}  # fmt: skip
#: Flags that name what is written.
_OUTPUTS = {"--out", "--json", "--perfetto", "--record-plan", "--images"}
#: What more of which is more work, as the user asked; only what no machine can do is tried.
_WORK = {"--num-prompts", "--seeds", "--verify-seeds", "--trials", "--n", "--num-replicas", "--every", "--jobs"}
#: Values that would start workers, wait for clusters, or open a browser.
_UNTRIED = {
    "--engine": {"dask", "ray"},
    "--jobs": {"2", "7"},
    "--images": {"out", "out-é.html", "out.json", "linked/out"},
}
#: Values that look right, of flags with text values.
_VALUES = {
    "--policy": ["orca-max", "vllm-v1", "sglang", "tgi", "lightllm", "vattention", "static", "fastertransformer"],
    "--gpu": ["h100-80gb", "a100-40gb,h200"], "--model": ["llama-3.1-8b", "toy-opt", "opt-175b", "config.json"],
    "--grid": ["policy=orca-max,vllm-v1", "n=none,2"], "--set": ["n=2", "block_size=8"], "--goodput": ["tpot:1", "ttft:1 e2el:2"],
    "--router": ["round-robin", "prefix"], "--record-steps": ["0:2", "5:1", "1000000:1"], "--max-tokens": ["pow2", "true"],
    "--vllm": ["0.9", "0.16.0", "v1"], "--ask": ["max-num-seqs", "samples", "preemption-mode"], "--window": ["0"],
    "--prices": ["prices.json"], "--cost": ["paper", "roofline", "fitted"], "--metrics": ["metrics.txt", "bench.json"],
}  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """A flag, or where it has none the name of an argument, and the values that its type allows."""

    name: str
    hint: Any

    @property
    def is_switch(self) -> bool:
        return self.hint is bool or bool in get_args(self.hint) and Path not in get_args(self.hint)


@cache
def commands() -> dict[tuple[str, ...], list[Flag]]:
    """Every command and its flags, as the program itself has them."""
    return {path: _flags(command) for path, command in _walk(app, ())}


def _walk(place: App, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    if place.default_command:
        yield path, place
    for name in place:
        if not name.startswith("-"):
            yield from _walk(place[name], (*path, name))


def _flags(command: App) -> list[Flag]:
    found = [each for each in command.assemble_argument_collection() if not each.children]
    return [Flag(name, each.hint) for each in found for name in each.names if name.startswith("--")]


def _value(rng: Rng, flag: Flag) -> str:
    """A value that is hostile, or may be right."""
    texts = OUTPUTS if flag.name in _OUTPUTS else [*TEXTS, *INPUTS] if "Path" in str(flag.hint) else TEXTS
    values = rng.choice([texts, _right(flag) or texts])
    if flag.name in _WORK:
        values = [text for text in values if not text.isdecimal() or len(text) < 2 or len(text) > 20]
    return rng.choice([text for text in values if text not in _UNTRIED.get(flag.name, ())])


def _right(flag: Flag) -> list[str]:
    """Values that are as its type and its name say."""
    numbers = NUMBERS if any(kind.__name__ in str(flag.hint) for kind in (int, float)) else []
    return [*numbers, *_VALUES.get(flag.name, []), *_literals(flag.hint)]


def _literals(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    return [value for each in get_args(hint) if get_origin(each) is not None for value in _literals(each)]


@kind("flags", 1400)
def flags(rng: Rng, folder: Path) -> Case:
    """One to three hostile flags of a command, in the place of its own."""
    path = rng.choice(list(commands()))
    return hostile_flags(rng, folder, path)


def hostile_flags(rng: Rng, folder: Path, path: tuple[str, ...]) -> Case:
    """The same of one command."""
    hostile_files(folder)
    os.mkfifo("fifo")
    base = rng.choice(BASES[path])
    copied(*{*base.needs, *(["config.json"] if rng.random() < 0.1 else [])})
    given, tokens = dict(base.flags), []
    for flag in rng.sample(commands()[path], min(rng.choice([1, 1, 2, 3]), len(commands()[path]))):
        given.pop(flag.name, None)
        if flag.is_switch and rng.random() < 0.8:
            tokens.append(flag.name)
            continue
        value = _value(rng, flag)
        tokens += [f"{flag.name}={value}"] if rng.random() < 0.4 else [flag.name, value]
        if flag.name == "--window":
            tokens.append(rng.choice(["1", *TEXTS]))
    positional = list(base.positional)
    if rng.random() < 0.1:
        positional = rng.choice([[], [*positional, rng.choice(TEXTS)], positional[:1], positional * 2])
    if positional and rng.random() < 0.1:
        positional[rng.randrange(len(positional))] = rng.choice([*TEXTS, *INPUTS])
    return Case([*path, *positional, *_flat(given), *tokens, *base.always])


@kind("words", 150)
def words(rng: Rng, folder: Path) -> Case:
    """Words in any order: commands, flags and values."""
    names = [name for path in commands() if path[0] not in ("doctor", "calibrate", "reproduce") for name in path]
    flags = [flag.name for found in commands().values() for flag in found if flag.name not in _UNTRIED]
    tokens = [rng.choice(rng.choice([names, flags, TEXTS])) for _ in range(rng.randint(0, 4))]
    # What validate does by itself takes a minute.
    return Case([*tokens, *(["--plan", "missing"] if "validate" in tokens else [])])


@kind("outputs", 180)
def outputs(rng: Rng, folder: Path) -> Case:
    """Every flag that names an output, at hostile places, with an input that must not be lost."""
    hostile_files(folder)
    os.mkfifo("fifo")
    copied("run", "trace.csv")
    out, data = rng.choice(OUTPUTS), rng.choice([*OUTPUTS, "trace.csv", "./trace.csv", "run", "run/run.json"])
    # A report does not read the trace, so as its output the trace may be replaced.
    other = "out.pftrace" if data in ("trace.csv", "./trace.csv") else data
    run = ["simulate", "--trace", "trace.csv", *_SMALL_POOL]
    tokens = rng.choice([
        [*run, "--out", out], [*run, "--out", "out", "--json", data], [*run, "--out", out, "--json", data],
        [*run, "--record-plan", out], [*run, "--record-plan", "--out", out, "--record-blocks"],
        ["sweep", *run[1:], "--grid", "n=1,2", "--jobs", "1", "--out", out], ["report", "run", "--out", out],
        ["report", "run", "--out", out, "--perfetto", other], ["report", "run", "--out", "out.html", "--perfetto", out],
        ["report", "run", "--out", out, "--json", out], ["traces", "synth", "trace.csv", "--out", out],
        ["traces", "convert", "trace.csv", out], ["traces", "stats", "trace.csv", "--out", out, "--json", data],
        ["traces", "convert", "trace.csv", "trace.csv"], ["reproduce", "fig1", "--jobs", "1", "--out", out],
        ["plan", "--serve", SERVE, "--gpu", "h200", "--json", out], ["traces", "list", "--json", out],
        ["compare", *run[1:], "--waste", "--seeds", "1", "--jobs", "1", "--out", out],
    ])  # fmt: skip
    return Case(tokens)


# Traces ----------------------------------------------------------------------------------------------------------


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
    "vidur.csv",
    "vidur_timed.csv",
    "splitwise.csv",
]
_JSON_LINED = ["mooncake.jsonl", "timed_trace.jsonl", "bailian.jsonl", "ours.jsonl", "ragpulse/0_trace.jsonl"]


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


@kind("json", 250)
def whole_json(rng: Rng, folder: Path) -> Case:
    """JSON documents: conversations, and what benchmarks write."""
    name = rng.choice(["sharegpt.json", "bench_serve.json", "sglang_bench.jsonl", "guidellm.json", "guidellm_0.3.json"])
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
        ["simulate", f"--trace={name}", "--num-prompts", "9"], ["reproduce", "prefix-cache", f"--trace={name}"],
        ["validate", "--against", f"./{name}", "--gpu", "h200"], ["plan", f"--serve={name}", "--gpu", "h200"],
    ]))  # fmt: skip


# What else commands read -----------------------------------------------------------------------------------------


def _damaged_copy(rng: Rng, name: str) -> None:
    copied(name)
    damaged_file(rng, Path(name))


@kind("model", 200)
def model(rng: Rng, folder: Path) -> Case:
    """A model's config.json."""
    _damaged_copy(rng, "config.json")
    more = rng.choice([[], ["--tensor-parallel-size", "2"], ["--enable-prefix-caching"], ["--kv-cache-dtype", "fp8"]])
    return Case(rng.choice([
        ["simulate", *_flat(LOAD), "--model", "config.json", "--max-model-len", "2048", *more],
        ["simulate", *_flat(LOAD), "--model", "config.json", "--policy", "vllm-v1", *more],
        ["plan", "--serve", "vllm serve mine/model", "--model", "config.json", "--gpu", "h200"],
    ]))  # fmt: skip


@kind("cost", 150)
def cost(rng: Rng, folder: Path) -> Case:
    """A calibration that the cost of steps follows from."""
    _damaged_copy(rng, "cost.json")
    return Case(["simulate", *_flat(LOAD), "--cost", "cost.json"])


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
        ["simulate", "--trace", "load.json", *_flat(LOAD)],
    ]))  # fmt: skip


@kind("prices", 60)
def prices(rng: Rng, folder: Path) -> Case:
    """Prices of GPUs, JSON and TOML."""
    name = rng.choice(["prices.json", "prices.toml"])
    if name == "prices.json":
        _damaged_copy(rng, name)
    else:
        Path(name).write_bytes(damaged_lines(rng, 'currency = "USD"\n[per_gpu_hour]\na100-80gb = 1.5\n', " "))
    return Case(["plan", *_flat(GOODPUT), "--prices", name])


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
    run = ["--trace", str(stock() / "trace.csv"), *_SMALL_POOL]
    writes = {
        "run": [["simulate", *run, "--out", "out-run"]],
        "cluster": [["simulate", *CLUSTER, "--out", "out-cluster"]],
        "sweep": [["sweep", *run, "--grid", "seed=0:1", "--jobs", "1", "--goodput", "ttft:500", "--out", "out-sweep"]],
        "against": [["validate", "--against", "bench.json", *map(str, FLAGS), "--out", "out-against"]],
        "figures": [["reproduce", "fig1", "--jobs", "1", "--out", "out-figures"]],
        "planned": [["plan", *_flat(GOODPUT), "--out", "out-planned"]],
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


# Texts of flags --------------------------------------------------------------------------------------------------

_LINES = [
    SERVE,
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16K --enable-auto-tool-choice --port 8000",
    "export HF_TOKEN=secret; VLLM_LOGGING_LEVEL=INFO vllm serve Qwen/Qwen2.5-7B \\\n  --tensor-parallel-size 2",
    "python -m vllm.entrypoints.openai.api_server --model facebook/opt-13b --gpu-memory-utilization 0.8",
    "docker run --gpus all -p 8000:8000 -v ~/x:/models vllm/vllm-openai:v0.11.0 --model facebook/opt-13b -tp 2",
    "vllm serve facebook/opt-13b --hf-overrides '{\"max_position_embeddings\": 4096}' --max-num-seqs=64 -O3",
]
_WORDS = [
    "--max-model-len", "--max-model-len=1k", "--block-size", "--tensor-parallel-size", "-tp", "-pp", "--quantization", "fp8",
    "--kv-cache-dtype", "--gpu-memory-utilization", "--swap-space", "--cpu-offload-gb", "--enforce-eager", "--max-num-seqs",
    "--data-parallel-size", "--enable-prefix-caching", "--no-enable-prefix-caching", "--speculative-config", "{}", "'{", "&&",
    "|", ">", ";", "\\", "\n", "#", "$X", "'", '"', "(", "`", "A=b", "--", "-", "--x", "--compilation-config", "--dtype",
    "--num-gpu-blocks-override", "--model", "auto", "64k", "1e3", "0.5", "--config", "vllm", "serve", "docker", "-e", "{\"a\": 1",
]  # fmt: skip


def _line(rng: Rng) -> str:
    words = rng.choice(_LINES).split(" ")
    for _ in range(rng.choice([1, 1, 2, 3])):
        place, how = rng.randrange(len(words) + 1), rng.random()
        if how < 0.3:
            words += [rng.choice(_WORDS), any_text(rng, *NUMBERS, "fp8", "auto", "16k", "1.5M", "{}")]
        elif how < 0.7:
            words[place:place] = [rng.choice(_WORDS)] if rng.random() < 0.5 else [rng.choice(_WORDS), any_text(rng)]
        elif how < 0.8:
            del words[place : place + 1]
        else:
            words[place : place + 1] = [rng.choice(TEXTS)]
    return " ".join(words)


@kind("serve", 400)
def serve(rng: Rng, folder: Path) -> Case:
    """Pasted command lines of servers."""
    line = _line(rng)
    if rng.random() < 0.2:
        Path("line.sh").write_bytes(damaged_bytes(rng, line.encode("utf-8", "surrogateescape")))
        line = "line.sh"
    more = rng.choice(
        [[], [], ["--mean-tokens", "100"], ["--model", "opt-13b"], ["--vllm", rng.choice(["0.6", "0.16", *TEXTS])]]
    )
    return Case(["plan", f"--serve={line}", "--gpu", rng.choice(["h200", "a100-40gb"]), *more])


_LOG = """INFO 01-22 10:10:10 gpu_worker.py:298] Available KV cache memory: 12.34 GiB
INFO 01-22 10:10:10 kv_cache_utils.py:864] GPU KV cache size: 15,696 tokens
INFO 01-22 10:10:10 kv_cache_utils.py:868] Maximum concurrency for 2,048 tokens per request: 7.66x
INFO 01-22 10:10:10 executor_base.py:117] # CUDA blocks: 981, # CPU blocks: 0
"""


@kind("log", 100)
def log(rng: Rng, folder: Path) -> Case:
    """Start-up logs of a server."""
    lines = rng.sample(_LOG.splitlines(), rng.randint(1, 4))
    data = damaged_lines(rng, "\n".join(lines), " ")
    for _ in range(rng.randint(0, 1)):
        data = data.replace(
            rng.choice([b"12.34", b"15,696", b"2,048", b"7.66", b"981"]),
            rng.choice([b"0", b",", b".", b"-1", b"9" * 400, b"1.2.3", b"-.", b"0.0"]),
        )
    Path("start.log").write_bytes(data)
    return Case(["plan", "--serve", SERVE, "--gpu", "a100-40gb", "--startup-log", "start.log"])


def _axis(rng: Rng) -> str:
    name = rng.choice([*PART_OF, *PART_OF, "policy", "block_size", "request_rate", "seed"])
    name = rng.choice(TEXTS) if rng.random() < 0.1 else name
    if name == "num_prompts":
        return f"{name}={rng.choice(['2', '0', '-1', 'x', 'none'])}"
    right = [
        each for flag in commands()["simulate",] if flag.name == f"--{name.replace('_', '-')}" for each in _right(flag)
    ]
    values = [any_text(rng, *right, *NUMBERS, "none") for _ in range(rng.randint(1, 3))]
    ranges = [
        "1:2",
        "2:1",
        "1:2:0",
        "1:2:-1",
        "0:1e9:1e-9",
        "nan:1",
        "1:inf",
        "a:b",
        "1:2:0.5",
        "::",
        "1:1",
        "0:0",
        "1:8:log",
        "0.1:1:log",
    ]
    return f"{name}={','.join(values) if rng.random() < 0.7 else rng.choice(ranges)}"


@kind("grid", 250)
def grid(rng: Rng, folder: Path) -> Case:
    """Axes of a sweep and of a search, what a search is for, and the sides of a comparison."""
    copied("trace.csv")
    axes = [_axis(rng) for _ in range(rng.choice([1, 1, 2]))]
    run = ["--trace", "trace.csv", *_SMALL_POOL[2:], "--jobs", "1"]
    if rng.random() < 0.5:
        return Case(["sweep", *run, *(f"--grid={axis}" for axis in axes), "--out", "out"])
    if rng.random() < 0.3:
        return Case(["compare", *run, "--seeds", "1", f"--set={axes[0]}", f"--set={_axis(rng)}"])
    wanted = rng.choice(["request_throughput", "p99_ttft_ms", "waste", "completed", *TEXTS])
    limits = [f"--at-most={rng.choice(['p99_ttft_ms', 'x'])}={rng.choice(TEXTS)}"] if rng.random() < 0.3 else []
    way = rng.choice(["--maximize", "--minimize"])
    return Case(
        [
            "sweep",
            *run,
            *(f"--search={axis}" for axis in axes),
            f"{way}={wanted}",
            *limits,
            "--trials",
            "2",
            "--out",
            "out",
        ]
    )


@kind("goal", 80)
def goal(rng: Rng, folder: Path) -> Case:
    """Objectives, and candidates of a plan."""
    names = ["ttft", "tpot", "e2el", "itl", "x", ""]
    texts = [
        f"{rng.choice(names[:3] if rng.random() < 0.8 else names)}:{any_text(rng)}"
        if rng.random() < 0.9
        else rng.choice(TEXTS)
        for _ in range(rng.choice([1, 1, 2]))
    ]
    if rng.random() < 0.5:
        flags = GOODPUT | {"--goodput": texts[0]}
        choice = rng.choice(
            ["--tensor-parallel-size", "--block-size", "--max-num-seqs", "--policy", "--kv-cache-dtype", "--attainment"]
        )
        return Case(["plan", *_flat(flags), f"{choice}={rng.choice(['1,2', 'none,64', 'none', *TEXTS])}"])
    copied("trace.csv", "run")
    return Case(rng.choice([
        ["sweep", "--trace", "trace.csv", *_SMALL_POOL, "--grid", "seed=0:1", "--jobs", "1", "--out", "out", "--goodput", *texts],
        ["report", "run", "--out", "out.html", "--goodput", *texts],
    ]))  # fmt: skip
