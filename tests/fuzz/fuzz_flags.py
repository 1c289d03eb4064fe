"""Hostile flags, words and outputs of every command."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts import App

from fragmeter.experiments.cli.app import app
from fuzz_damage import INPUTS, NUMBERS, OUTPUTS, TEXTS, hostile_files
from fuzz_stock import GOODPUT, LOAD, SERVE, SMALL_POOL, copied, flat
from fuzzing import Case, kind

Rng = random.Random


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
    ("reproduce",): [Base(("fig1",), {"--jobs": "1"})],
    ("simulate",): [Base((), LOAD), Base((), {"--trace": "trace.csv"}, ("trace.csv",))],
    ("sweep",): [
        Base((), LOAD | {"--grid": "seed=0:1", "--jobs": "1", "--out": "out"}),
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
    ("explore",): [
        Base((), LOAD | {"--grid": "policy=orca", "--vary": "block_size=16,32", "--max-tokens": "2048", "--jobs": "1", "--out": "out.html"}),
        Base((), {"--trace": "trace.csv", "--grid": "policy=vllm-v1", "--vary": "block_size=16", "--jobs": "1", "--out": "out.html"}, ("trace.csv",)),
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
_OUTPUTS = {"--out", "--json", "--perfetto", "--record-plan", "--images", "--predict"}
#: What more of which is more work, as the user asked; only what no machine can do is tried.
_WORK = {"--num-prompts", "--seeds", "--n", "--num-replicas", "--every", "--jobs"}
#: Values that would start workers, wait for clusters, or open a browser.
_UNTRIED = {
    "--jobs": {"2", "7"},
    "--images": {"out", "out-é.html", "out.json", "linked/out"},
}
#: Values that look right, of flags with text values.
_VALUES = {
    "--policy": ["orca-max", "vllm-v1", "sglang", "tgi", "lightllm", "vattention", "static", "fastertransformer"],
    "--gpu": ["h100-80gb", "a100-40gb,h200"], "--model": ["llama-3.1-8b", "toy-opt", "opt-175b", "config.json"],
    "--grid": ["policy=orca-max,vllm-v1", "n=none,2"], "--set": ["n=2", "block_size=8"], "--goodput": ["tpot:1", "ttft:1 e2el:2"],
    "--router": ["round-robin", "prefix"], "--record-steps": ["0:2", "5:1", "1000000:1"], "--max-tokens": ["pow2", "true"],
    "--vllm": ["0.9", "0.16.0", "v1"], "--window": ["0"],
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
    values = rng.choice([texts, right_values(flag) or texts])
    if flag.name in _WORK:
        values = [text for text in values if not text.isdecimal() or len(text) < 2 or len(text) > 20]
    return rng.choice([text for text in values if text not in _UNTRIED.get(flag.name, ())])


def right_values(flag: Flag) -> list[str]:
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
    return Case([*path, *positional, *flat(given), *tokens, *base.always])


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
    run = ["simulate", "--trace", "trace.csv", *SMALL_POOL]
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
