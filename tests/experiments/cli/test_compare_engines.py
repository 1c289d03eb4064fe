"""``compare --engine-source``: what is refused, and how two logs of steps are told apart. ``tests/real_vllm`` runs it over vLLM."""

from __future__ import annotations

import zipfile

import pytest

from fragmeter.experiments.cli.app import MISTAKE, status
from fragmeter.experiments.cli.compare_engines import _steps
from fragmeter.experiments.runs.engine_sources import FirstStep, Side, _unpacked, first_difference, moved
from fragmeter.sim.types.errors import SettingError

TWICE = ["--engine-source", "a", "--engine-source", "b"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--engine-source", "a"], "engine_source = 1: two are compared; give it twice"),
        (
            [*TWICE, "--set", "block_size=8"],
            "--engine-source compares two vLLMs under the settings as they are; leave out --set",
        ),
        ([*TWICE, "--waste"], "leave out --waste"),
        (
            [*TWICE, "--num-prompts", "2", "--request-rate", "1"],
            "engine_source = 'a': has no package vllm; give a checkout",
        ),
        (
            ["--set", "block_size=8", "--set", "block_size=16", "--markdown", "-"],
            "--markdown goes with --engine-source",
        ),
    ],
)
def test_what_is_refused(line, said, capsys):
    assert status(["compare", *line]) == MISTAKE
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_vllm_that_cannot_be_imported_is_one_line(tmp_path, capsys):
    broken = tmp_path / "vllm" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('no wheel of this release')\n")
    line = ["compare", *("--engine-source", str(tmp_path)) * 2, "--num-prompts", "2", "--request-rate", "1"]
    assert status(line) == MISTAKE
    error = capsys.readouterr().err
    assert "vLLM did not serve the load" in error and "no wheel of this release" in error and error.count("\n") == 1


def test_a_wheel_is_unpacked_without_its_libraries(tmp_path):
    wheel = tmp_path / "vllm-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("vllm/__init__.py", "vllm/_C.so", "other/__init__.py"):
            made.writestr(name, "")
    found = _unpacked(wheel, tmp_path / "found")
    assert sorted(path.name for path in found.rglob("*.*")) == ["__init__.py"]
    with pytest.raises(SettingError, match="has no package vllm"):
        _unpacked(tmp_path, tmp_path / "none")


def side(*steps: list[object], live: float = 50.0) -> Side:
    shares = {"live": live, "reserved": 0.0, "free": 100 - live}
    return Side("0.33.0", [*steps], {"waste": {"mean_over_time_pct": {"buckets": shares}}}, 1000)


def test_the_first_step_that_differs_is_named_by_its_first_field():
    one, two = [0, [[0, 5]], [], 1, 0], [100, [[0, 1]], [], 2, 0]
    assert first_difference(side(one, two), side(one, two)) is None
    assert first_difference(side(one, two), side(one, [100, [[0, 1]], [3], 1, 0])) == FirstStep(1, "preempted", [], [3])
    assert first_difference(side(one, two), side(one)) == FirstStep(1, "start, ps", 100, None)


def test_bytes_that_moved_are_those_of_buckets_with_something():
    assert [*moved(side(), side(live=75.0))] == [("live", 500.0, 750.0), ("free", 500.0, 250.0)]


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ([[0, 1], [1, 1], [2, 1]], [[0, 1], [1, 1], [2, 1], [9, 200]], " (3 are the same): A none, B 9: 200."),
        ([[0, 1], [1, 64]], [[0, 1], [1, 32]], " (1 are the same): A 1: 64, B 1: 32."),
        ([[0, 1], [1, 1]], [[1, 1], [0, 1]], ": A 0: 1, 1: 1, B 1: 1, 0: 1."),
        ([], [[4, 2]], ": A none, B 4: 2."),
    ],
)
def test_of_the_first_difference_what_differs_is_shown(mine, theirs, said):
    """A batch of many sequences is cut behind the first few, which are mostly the same."""
    sides = [Side("0.33.0", [[0, each, [], 1, 0]], {}, 1) for each in (mine, theirs)]
    first = first_difference(*sides)
    (text,) = _steps(*sides, first)
    assert text.endswith(f"Step 0 differs, scheduled tokens{said}")
