"""Every command, fed what is malformed: some cases of each kind, and in ``make test-all`` more than 5,000."""

from __future__ import annotations

import pytest

import fuzz_cases  # noqa: F401
from fuzz_flags import BASES, commands
from fuzzing import KINDS, Found, fuzz

#: Cases of each kind in ``make test``; those that take seconds are for ``make test-all``.
FEW = dict.fromkeys(KINDS.keys() - {"interrupted", "pipe"}, 4) | {"flags": 20, "plan-file": 1}


def check(found: list[Found]) -> None:
    failed = [each for each in found if each.complaints]
    assert not failed, f"{len(failed)} of {len(found)} cases fail:\n" + "\n".join(map(str, failed[:20]))


@pytest.mark.parametrize("name", sorted(FEW))
def test_a_few_malformed_cases_end_as_documented(name, tmp_path):
    check(list(fuzz(name, FEW[name], tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_malformed_cases_end_as_documented(name, tmp_path):
    check(list(fuzz(name, KINDS[name][1], tmp_path)))


def test_there_are_more_than_5000_cases():
    assert sum(cases for _, cases in KINDS.values()) >= 5000


def test_flags_of_every_command_are_tried():
    assert set(BASES) == set(commands())
    flags = {flag.name for flag in commands()["simulate",]}
    assert {"--policy", "--trace", "--no-leap", "--out", "--json"} <= flags


def test_a_fault_is_found(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        (tmp_path / next(tmp_path.glob("log-*")) / "mine.txt").unlink()
        raise ZeroDivisionError

    monkeypatch.setattr("fragmeter.experiments.cli.plan.read_start_log", broken)
    [found] = fuzz("log", 1, tmp_path)
    assert found.complaints == ["exit status 1", "mine.txt is gone"]


def test_a_case_is_the_same_again(tmp_path):
    once, again = (list(fuzz("serve", 5, tmp_path)) for _ in range(2))
    assert [(each.tokens, each.ran) for each in once] == [(each.tokens, each.ran) for each in again]
