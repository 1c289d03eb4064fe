"""Integers on the command line: every integer flag of every verb refuses what is no whole number in digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from cyclopts import App

from fragmeter.experiments.cli.app import MISTAKE, app, is_whole, status

REMEDY = "must be a whole number, in digits"


def verbs(place: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every verb, and what it is called by."""
    names = [name for name in place if not name.startswith("-")]
    if not names:
        yield path, place
    for name in names:
        yield from verbs(place[name], (*path, name))


def takes_integers(hint: Any) -> bool:
    """Also a list of them, or a number among other things."""
    return hint is int or any(map(takes_integers, get_args(hint)))


FOUND = {
    (path, argument.name): argument.hint
    for path, verb in verbs(app)
    for argument in verb.assemble_argument_collection()
    if takes_integers(argument.hint)
}
#: Of each verb that has one the last flag that is a whole number.
FLAGS = dict(FOUND.keys())


def test_every_integer_flag_is_whole():
    assert [flag for flag, hint in FOUND.items() if not is_whole(hint)] == []


@pytest.mark.parametrize(("verb", "flag"), FLAGS.items(), ids=map(" ".join, FLAGS))
def test_a_fraction_is_refused_and_not_rounded_by_any_verb(verb, flag, capsys):
    assert status([*verb, flag, "1.5"]) == MISTAKE
    field = flag.removeprefix("--").replace("-", "_")
    assert capsys.readouterr().err == f"fragmeter: {field} = '1.5': {REMEDY}\n"


@pytest.mark.parametrize("value", ["two", "1e3", "1.0", "0x10", "1_0", "+3", " 3", "3\n", "\N{SUPERSCRIPT TWO}", ""])
@pytest.mark.parametrize(
    ("verb", "field"), [("sample", "seed"), ("stats", "max_inflated_bytes")], ids=["cyclopts", "pydantic"]
)
def test_so_is_whatever_one_parser_takes_for_a_number_and_another_does_not(verb, field, value, capsys):
    assert status(["traces", verb, f"--{field.replace('_', '-')}={value}"]) == MISTAKE
    assert capsys.readouterr().err == f"fragmeter: {field} = {value!r}: {REMEDY}\n"


@pytest.mark.parametrize(("value", "meant"), [("-1", -1), ("007", 7)])
def test_a_whole_number_is_taken_as_it_is(value, meant):
    _, bound, _ = app.parse_args(["traces", "sample", "a", "b", "--num-prompts", value])
    assert bound.arguments["num_prompts"] == meant


@pytest.mark.parametrize("flag", ["--max-model-len", "--max-num-batched-tokens"])
class TestSuffixes:
    """The two flags of ``vllm serve`` that it reads with a suffix, on every verb that has them."""

    @pytest.mark.parametrize(("value", "meant"), [("16K", 16_384), ("16k", 16_000), ("16384", 16_384), ("2.5k", 2500)])
    def test_they_are_read_as_by_vllm(self, flag, value, meant):
        field = flag.removeprefix("--").replace("-", "_")
        for verb in ("simulate", "sweep --out x --grid seed=0", "compare", "validate"):
            _, bound, _ = app.parse_args([*verb.split(), flag, value])
            assert [getattr(each, field) for each in bound.arguments.values() if hasattr(each, field)] == [meant]

    @pytest.mark.parametrize("value", ["16Q", "1.5K", "K", "16 K", "1e3", "9" * 300 + "k"])
    def test_anything_else_is_refused_in_a_line(self, flag, value, capsys):
        assert status(["simulate", flag, value]) == MISTAKE
        field = flag.removeprefix("--").replace("-", "_")
        error = capsys.readouterr().err
        assert error == f"fragmeter: {field} = {value!r}: {REMEDY}, or with a suffix as 16K\n"

    def test_other_flags_take_none(self, flag, capsys):
        assert status(["simulate", flag, "16K", "--max-num-seqs", "1K"]) == MISTAKE
        assert capsys.readouterr().err == f"fragmeter: max_num_seqs = '1K': {REMEDY}\n"
