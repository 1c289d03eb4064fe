"""Mutants: what is one, which are drawn, that the tests beside one import it, and the share that they kill (slow)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mutants import trial
from mutants.draw import COUNT, EQUIVALENT, MUTATED, SEED, all_mutants, drawn
from mutants.nearest import NEAREST, nearest
from mutants.operators import Mutant, mutants, mutated, unchanged
from mutants.trial import Trial, package_with, report, try_all, try_out
from paths import ROOT, TESTS

#: Least share of the mutants of a draw that the nearest tests kill.
LEAST = 0.85


def changes(source: str) -> list[str]:
    return [f"{each.before} => {each.after}" for each in mutants("module.py", source)]


class TestOperators:
    @pytest.mark.parametrize(
        ("source", "found"),
        [
            ("a = b < 3", ["a = b <= 3", "a = b >= 3", "a = b < 4", "a = b < 2"]),
            ("a = b is None", ["a = b is not None"]),
            ("a = b not in c", ["a = b in c"]),
            ("a = b + c * d", ["a = b - c * d", "a = b + c // d"]),
            ("a = b and c or not d", ["a = (b and c) and (not d)", "a = (b or c) or not d", "a = b and c or d"]),
            ("a += min(b, c)", ["a -= min(b, c)", "a += max(b, c)"]),
            ("a = np.maximum(b, c)", ["a = np.minimum(b, c)"]),
            ("f(True)", ["pass", "f(False)"]),
            ("a = [b for b in c if b]", ["a = [b for b in c if not b]"]),
            ("while a:\n    b()", ["while not a:", "pass"]),
            ("a = -b", ["a = b"]),
            ("def f(a=1.5) -> bool:\n    return a.b", ["def f(a=2.5) -> bool:", "def f(a=0.5) -> bool:", "return not a.b"]),
            ("def f() -> int:\n    return a", ["return a + 1"]),
            ("def f() -> int | None:\n    return a", ["return None"]),
        ],
    )  # fmt: skip
    def test_what_becomes_of_a_line(self, source, found):
        assert [each.partition(" => ")[2] for each in changes(source)] == found

    @pytest.mark.parametrize(
        "source",
        [
            '"""Not 1 < 2."""\nfrom a import b',
            "a: Annotated[int, Field(ge=1)]",
            "raise ValueError(a + 1)",
            "assert a < 1",
            "try:\n    pass\nexcept OSError as error:\n    at = error.errno + 1\n    raise ValueError(at) from None",
            "a = f'{b + 1}'",
            "a = 1e300",
            "def f(a) -> str:\n    return a + 1",
            "report.line(a + 1)",
            "zip(a, b, strict=True).c",
            "@cache(maxsize=4)\nclass A:\n    pass",
            "if TYPE_CHECKING:\n    a = 1",
        ],
    )
    def test_what_only_people_read_or_only_finds_faults_of_the_program_is_left_alone(self, source):
        assert changes(source) == []

    def test_the_text_has_one_change(self):
        source = "def f(a: int) -> int:\n    return a if a > 0 else -a\n"
        every = mutants("module.py", source)
        texts = {mutated(mutant, source) for mutant in every}
        assert len(texts) == len(every) == 6
        assert "def f(a: int) -> int:\n    return a if a >= 0 else -a" in texts


class TestDraw:
    SOURCE = "def f(a):\n    return a < 1\n\ndef g(a):\n    return a < 1\n"

    def test_a_mutant_keeps_its_key_when_other_code_changes(self):
        edited = "def e(a):\n    return a + 1\n\n" + self.SOURCE.replace("def f(a):\n", "def f(a):\n    b = a * 2\n")
        keys, more = ({each.key for each in mutants("module.py", text)} for text in (self.SOURCE, edited))
        assert keys < more

    def test_a_draw_changes_by_what_an_edit_adds_alone(self):
        every = [each for path in ("a.py", "b.py", "c.py") for each in mutants(path, self.SOURCE)]
        fewer = [each for each in every if each.path != "b.py"]
        before, after = drawn(1, every, 10), drawn(1, fewer, 10)
        assert [each for each in before if each.path != "b.py"] == after[: sum(each.path != "b.py" for each in before)]
        assert before != drawn(2, every, 10)

    @pytest.mark.slow
    def test_every_module_has_nearest_tests_and_they_exist(self):
        assert all((TESTS / name).exists() for names in NEAREST.values() for name in names)
        every = all_mutants()
        assert len({each.key for each in every}) == len(every)
        assert all(nearest(path) for path in {each.path for each in every})

    def test_those_listed_as_equivalent_are_mutants(self):
        """A line that changed has to be looked at again."""
        assert set(EQUIVALENT) <= {each.key for each in all_mutants()}


def first_of(path: str, before: str) -> Mutant:
    return next(each for each in mutants(path, (ROOT / path).read_text()) if each.before == before)


#: An admission asks for other numbers of blocks.
WANTED = first_of("sim/memory/accounting/kv_groups.py", "return blocks if most is None else min(blocks, most)")


class TestTrial:
    @pytest.mark.slow
    def test_the_package_is_the_checkout_but_for_the_mutant(self, tmp_path):
        file = package_with(WANTED, tmp_path)
        assert file.read_text() == mutated(WANTED, (ROOT / WANTED.path).read_text())
        code = (
            "import fragmeter.sim.memory.accounting.kv_groups as one, fragmeter.sim.memory.accounting.ledger as other;"
            "print(one.__file__, other.__file__)"
        )
        command = [sys.executable, "-c", code]
        environment = {"PYTHONPATH": str(tmp_path)}
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        one, other = map(Path, ran.stdout.split())
        assert (
            one == file and other.is_relative_to(tmp_path) and other.samefile(ROOT / "sim/memory/accounting/ledger.py")
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("path", [f"{folder}/__init__.py" for folder in MUTATED])
    def test_beside_no_mutant_all_tests_pass(self, path):
        """What kills a mutant is the mutant."""
        assert try_out(unchanged(path)).killed_by is None

    @pytest.mark.slow
    def test_it_is_killed_by_a_test_of_its_result_and_not_by_another(self, monkeypatch):
        monkeypatch.setattr(trial, "nearest", lambda _: ["sim/memory/test_known_answers.py"])
        killed = try_out(WANTED)
        assert killed.killed_by is not None and "test_an_admission_asks" in killed.killed_by
        monkeypatch.setattr(trial, "nearest", lambda _: ["sim/memory/test_memory_buddy.py"])
        assert try_out(WANTED).killed_by is None


def test_a_report_names_what_survives():
    assert report([Trial(WANTED, "a test", 1.0), Trial(WANTED, None, 1.0)]) == (
        f"1 of 2 mutants were killed.\nsurvived: {WANTED.key}"
    )


@pytest.mark.slow
def test_of_60_mutants_85_percent_are_killed_by_the_nearest_tests():
    """Those that change no result are listed, each with the reason, and do not count."""
    chosen = [mutant for mutant in drawn(SEED, all_mutants(), COUNT) if mutant.key not in EQUIVALENT]
    trials = [*try_all(chosen)]
    killed = sum(trial.killed_by is not None for trial in trials)
    assert killed >= LEAST * len(trials), report(trials)
