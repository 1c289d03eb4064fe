"""The lessons, and the exercise: its starter fails every check, a solution passes all, a mistake fails the right one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

TEACHING = ROOT / "examples" / "teaching"
EXERCISE = TEACHING / "exercise"
SOLUTION = Path(__file__).with_name("solution.py")


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check", EXERCISE / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_starter_fails_every_check(check):
    found = check.failures(EXERCISE / "starter.py")
    assert len(found) == 12
    assert all("is not written yet" in failure for failure in found.values())


def test_the_solution_passes_all(check, capsys):
    assert check.main([str(SOLUTION)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "12 of 12 checks pass"


def test_each_gap_is_one_of_the_solution():
    gaps = re.findall(r"def (\w+)\(.*?(gap \d)", (EXERCISE / "starter.py").read_text(), re.DOTALL)
    assert [gap for _, gap in gaps] == [f"gap {place}" for place in range(1, 7)]
    assert re.findall(r"    def (\w+)\(", SOLUTION.read_text()) == [
        "take",
        "drop",
        "admit",
        "append",
        "fork",
        "release",
    ]


#: A line of the solution, what a student writes in its place, and the check that finds it.
MISTAKES = {
    "one block too many": (
        "-(-prompt_tokens // self.block_size)",
        "prompt_tokens // self.block_size + 1",
        "a_prompt_takes_the_blocks_that_it_fills",
    ),
    "half a prompt": (
        'raise MemoryError(f"{blocks} blocks are needed and {len(self.free)} are free")',
        "pass",
        "a_prompt_without_room_changes_nothing",
    ),
    "a block a token": (
        "== len(table) * self.block_size",
        ">= 0",
        "a_decode_takes_a_block_only_when_the_last_is_full",
    ),
    "the block that is free for longest": (
        "self.free.append(block)",
        "self.free.insert(0, block)",
        "the_story_two_requests_is_replayed",
    ),
    "no copy": ("self.references[table[-1]] > 1", "False", "a_fork_shares_and_a_write_copies"),
    "a copy of everything": (
        "self.tables[child] = list(self.tables[parent])",
        "self.tables[child] = [self.take() for _ in self.tables[parent]]",
        "a_fork_shares_and_a_write_copies",
    ),
    "one table for both": (
        "self.tables[child] = list(self.tables[parent])",
        "self.tables[child] = self.tables[parent]",
        "a_fork_shares_and_a_write_copies",
    ),
    "freed while it is shared": (
        "if not self.references[block]:",
        "if True:",
        "a_shared_block_is_free_when_no_table_names_it",
    ),
    "released from the end": (
        "for block in self.tables.pop(sequence):",
        "for block in self.tables.pop(sequence)[::-1]:",
        "a_release_frees_blocks_for_others",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_its_check(check, tmp_path, mistake):
    line, wrong, name = MISTAKES[mistake]
    # The solution finds the starter from its place.
    solution = SOLUTION.read_text().replace("Path(__file__)", f"Path({str(SOLUTION)!r})")
    assert line in solution
    (tmp_path / "wrong.py").write_text(solution.replace(line, wrong))
    found = check.failures(tmp_path / "wrong.py")
    assert found[name], found
    assert any(not failure for failure in found.values()) or mistake == "one block too many"


def test_it_runs_where_the_documentation_says(tmp_path):
    """As a program beside the starter: status 1, a line a check."""
    done = subprocess.run(
        [sys.executable, "check.py"], cwd=EXERCISE, capture_output=True, text=True, env={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert (done.returncode, done.stderr) == (1, "")
    *lines, count, begin = done.stdout.splitlines()
    assert (count, begin) == ("0 of 12 checks pass", "next in starter.py: gap 1 is not written yet")
    assert all(line.startswith("FAIL  ") for line in lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, ": is no Python file that is there; name one with a class Allocator"),
        ("x = 1\n", ": has no class Allocator; begin with a copy of starter.py"),
        ("x = 1\nclass Allocator\n", ", line 2: cannot be run: SyntaxError: expected ':'"),
        (
            "import starter_of_nothing\n",
            ", line 1: cannot be run: ModuleNotFoundError: No module named 'starter_of_nothing'",
        ),
    ],
)
def test_a_file_without_an_allocator_is_one_line(check, tmp_path, capsys, text, shown):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    assert check.main([str(path)]) == 2
    assert capsys.readouterr().err == f"check.py: {path}{shown}\n"


def test_the_solution_can_be_checked_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXERCISE / "check.py"), str(SOLUTION)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_page_shows_the_solution():
    for page in [*(ROOT / "docs").rglob("*.md"), *TEACHING.rglob("*.py")]:
        text = page.read_text()
        assert "examples/solution" not in text and "references[table[-1]]" not in text, page


def test_lessons_are_cells_that_end_with_questions():
    lessons = sorted(TEACHING.glob("*.py"))
    assert [lesson.name[0] for lesson in lessons] == ["1", "2", "3", "4"]
    for lesson in lessons:
        cells = lesson.read_text().split("# %% ")
        assert len(cells) >= 5 and cells[-1].startswith("To think about:"), lesson
