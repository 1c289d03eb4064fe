"""Files of the field are named as what they are; unknown ones get no name."""

from __future__ import annotations

import pytest

from fragmeter.sim.types.file_head import FileHead
from fragmeter.sim.types.signatures import EXPECTED, SIGNATURES, recognised, remedy
from known_files import SAMPLES, UNKNOWN
from paths import ROOT


def what(name: str, content: str | bytes, place: str | None = None) -> str | None:
    data = content.encode() if isinstance(content, str) else content
    found = recognised(FileHead(data, name), place)
    return None if found is None else found.what


@pytest.mark.parametrize(("expected", "name", "content"), SAMPLES, ids=[each[0] for each in SAMPLES])
def test_a_sample_is_named(expected, name, content):
    assert what(name, content) == expected


def test_every_signature_has_a_sample():
    assert {each.what for each in SIGNATURES} == {expected for expected, _, _ in SAMPLES}


@pytest.mark.parametrize(("expected", "name", "content"), SAMPLES, ids=[each[0] for each in SAMPLES])
def test_a_place_that_does_not_read_it_says_what_it_is_and_what_to_run(expected, name, content):
    data = content.encode() if isinstance(content, str) else content
    signature = recognised(FileHead(data, name))
    for place in EXPECTED:
        said = remedy(data, name, place)
        if place in signature.read_as:
            assert said is None
        elif place != "table" and recognised(FileHead(data, name), place) is signature:
            assert said == f"is {expected}, not {EXPECTED[place]}; {signature.use}"


@pytest.mark.parametrize(("name", "content"), UNKNOWN)
def test_an_unknown_file_gets_no_name(name, content):
    for place in (None, *EXPECTED):
        assert what(name, content, place) is None


@pytest.mark.parametrize(
    ("place", "pattern", "least"),
    [
        ("cost", "sim/cost/profiles/*.json", 3),
        ("story", "experiments/story/stories/*.toml", 3),
        ("gpu", "sim/spec/data/gpus.json", 1),
        ("prices", "experiments/capacity/facts/prices.json", 1),
        ("model", "tests/data/**/config.json", 2),
        ("metrics", "tests/data/real_server/**/*.metrics.txt", 3),
        ("trace", "tests/data/traces/*.*", 10),
    ],
)
def test_no_file_of_the_package_is_refused_where_it_is_read(place, pattern, least):
    found = [path for path in ROOT.glob(pattern) if path.suffix != ".md"]
    assert len(found) >= least
    assert {path.name: said for path in found if (said := remedy(path.read_bytes(), path, place))} == {}


def test_keys_are_those_of_the_first_object():
    head = FileHead(b'[{"a": {"b": [{"c": 1, "d": "x:"}, {"e": 2}]}, "f": "\\"g\\": 1"}, {"h": 1}]', "x.json")
    assert head.keys == {"a", "a.b", "a.b.c", "a.b.d", "a.b.e", "f"}
    assert FileHead(b'broken\n{"a": {"b": "cut of', "x.jsonl").keys == {"a", "a.b"}
    assert FileHead(b"[2026-11-28 10:00:00] a log\n", "x").keys == frozenset()
