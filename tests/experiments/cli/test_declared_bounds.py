"""Every number that a command takes, at and beyond the ends of its declaration.

Flags and bounds are read from the commands, so that a flag that is added is tested without a change here. A value beyond
its bounds is refused by one line that begins with the flag's name. No value of any size ends in an internal fault, or in
a refusal without a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from cyclopts import Argument

from fragmeter.experiments.cli.app import VERBS, app, status
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.policy.registry import declaring, options_by_policy

#: A line of each command that is served in milliseconds, with ``trace.csv`` beside it; flags that are tested replace its own.
LINES = {
    "reproduce": "waste --trace trace.csv --request-rate 1 --seeds 1",
    "simulate": "--num-prompts 3 --request-rate 1",
    "sweep": "--grid policy=orca-max --num-prompts 3 --request-rate 1 --out sweep",
    "explore": "--grid policy=orca-max --vary block_size=16,32 --num-prompts 3 --request-rate 1 --out page.html",
    "compare": "--set policy=orca-max --set policy=vllm-v1 --num-prompts 3 --request-rate 1 --seeds 2",
    "report": "no-such-run --out report.html",
    "plan": "--model opt-13b --gpu a100-40gb --goodput ttft:1000 --num-prompts 100 --seeds 1",
    "diagnose": "--gpu h100-80gb --serve vllm_serve_Qwen/Qwen3-8B --request-rate 1 --num-prompts 50 --seeds 1",
    "validate": "--against bench.json --gpu a100-40gb --model opt-13b",
    "traces stats": "trace.csv",
    "traces convert": "trace.csv converted.csv",
    "traces synth": "trace.csv synthetic.json",
    "traces sample": "synthetic.json sample.csv --num-prompts 3",
    "calibrate": "--device cpu --out own.json",
}
TRACE = "arrival_s,prompt_tokens,output_tokens\n0,7,5\n1,3,4\n"
#: Beyond every bound, and beyond 64 bits.
HUGE = {int: ("-1", "0", str(2**63), str(10**19)), float: ("-1.0", "0.0", "1e-300", "1e300", "nan", "inf")}
#: A refusal: a setting and its value, a flag, a file, or a sentence that names a flag.
NAMED = re.compile(r"(--)?[\w./-]+(: | = )|.* \w+ = |.*--[a-z]")


class Number(NamedTuple):
    """A flag with a number: its command, its type, and its bounds by pydantic's names."""

    command: str
    flag: str
    kind: type
    bounds: dict[str, float]

    def line(self, value: str, load: str | None = None) -> list[str]:
        """The command line with this value, beside ``load`` or the small one of ``LINES``."""
        words = [word.replace("_", " ") for word in f"{self.command} {load or LINES[self.command]}".split()]
        if self.flag in words:
            place = words.index(self.flag)
            del words[place : place + 2]
        return [*words, self.flag, value]

    @property
    def beyond(self) -> list[str]:
        """The nearest values beyond the bounds."""
        moves = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
        step = (lambda end: 1) if self.kind is int else (lambda end: 1e-9 + abs(end) * 1e-9)
        return [str(self.kind(end + moves[name] * step(end))) for name, end in self.bounds.items()]

    @property
    def ends(self) -> list[str]:
        """The least and the largest value, where the declaration includes them."""
        return [str(self.kind(end)) for name, end in self.bounds.items() if name in ("ge", "le")]


def bounds(hint: Any) -> dict[str, float]:
    """The bounds in an annotated type, at any depth."""
    found: dict[str, float] = {}
    if get_origin(hint) is Annotated:
        for note in get_args(hint)[1:]:
            for each in getattr(note, "metadata", None) or [note]:
                name = type(each).__name__.lower()
                if name in ("ge", "gt", "le", "lt"):
                    found[name] = getattr(each, name)
    for inner in get_args(hint):
        if get_args(inner):
            found |= bounds(inner)
    return found


def declared(argument: Argument) -> dict[str, float]:
    """The bounds of a flag; those of a setting are declared with the setting."""
    field = argument.name.lstrip("-").replace("-", "_")
    hints = get_type_hints(Settings, include_extras=True)
    if field in hints:
        return bounds(hints[field])
    if field in options_by_policy() and bounds(argument.field_info.annotation) == {}:
        return bounds(get_type_hints(declaring(field), include_extras=True)[field])
    return bounds(argument.field_info.annotation)


def numbers() -> Iterator[Number]:
    """Every flag with a number, of every command."""
    for command in LINES:
        found = app
        for word in command.split():
            found = found[word]
        for argument in found.assemble_argument_collection():
            kinds = [kind for kind in (argument.hint, *get_args(argument.hint)) if kind in (int, float)]
            if kinds:
                yield Number(command, argument.name, kinds[0], declared(argument))


ALL = list(numbers())


def test_every_command_has_a_line():
    without = {"story", "list", "doctor"}
    assert {command.split()[0] for command in LINES} == set(VERBS) - without
    assert {"reproduce", "plan", "validate", "calibrate"} <= {number.command for number in ALL}


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder of its own with a trace and a benchmark of the same requests."""
    (tmp_path / "trace.csv").write_text(TRACE)
    measured = {"input_lens": [7, 3], "output_lens": [5, 4], "start_times": [0, 1], "ttfts": [0.1, 0.1]}
    spans = {"itls": [[0.03] * 4, [0.03] * 3], "duration": 1.3, "model_id": "facebook/opt-13b"}
    (tmp_path / "bench.json").write_text(json.dumps(measured | spans))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", LINES)
def test_a_value_beyond_its_bounds_is_refused_by_name(command, at_home, capsys):
    for number in (each for each in ALL if each.command == command):
        for value in number.beyond:
            found = status(number.line(value))
            line = capsys.readouterr().err
            assert (found, line.count("\n")) == (2, 1), (number.line(value), line)
            names = rf"fragmeter: (\{{.*\}}: )?{number.flag.lstrip('-').replace('-', '_')} = "
            assert re.match(names, line), (number.line(value), line)


class Started(BaseException):
    """Raised in place of a run."""


#: Sweeps, comparisons and validations take the flags of simulate.
_RARE = ("sweep", "compare", "validate")
_SLOW = [pytest.param(each, marks=pytest.mark.slow) if each in _RARE else each for each in LINES]


@pytest.mark.slow
@pytest.mark.parametrize("command", _SLOW)
def test_no_value_ends_in_a_fault_or_without_a_name(command, at_home, monkeypatch, capsys):
    """Up to the start of the first run, which every value that is allowed reaches."""

    def started(*_: object, **__: object) -> None:
        raise Started

    for place in (
        "sim.engine.engine.Engine.__init__",
        "sim.engine.core.CoreEngine.__init__",
        "gpu.devices.devices.open_timed",
    ):
        monkeypatch.setattr(f"fragmeter.{place}", started)
    for number in (each for each in ALL if each.command == command):
        for value in [*number.ends, *HUGE[number.kind]]:
            try:
                found = status(number.line(value))
            except Started:
                continue
            _require_named(found, number.line(value), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-v1", "orca-max"])
def test_every_end_is_served_to_the_end(policy, at_home, capsys):
    """Whole runs near saturation, which are served again with changed settings."""
    load = f"--policy {policy} --num-prompts 60 --request-rate 3"
    for number in (each for each in ALL if each.command == "simulate" and each.flag != "--num-prompts"):
        for value in number.ends:
            line = number.line(value, load)
            _require_named(status(line), line, capsys)


def _require_named(found: int, line: list[str], capsys: pytest.CaptureFixture) -> None:
    said = capsys.readouterr().err.removeprefix("fragmeter: ")
    assert found in (0, 2), (line, said)
    assert found == 0 or NAMED.match(said), (line, said)
