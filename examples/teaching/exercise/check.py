"""Checks an allocator: python check.py [FILE], by default starter.py beside this file.

Every check prints a line, in the order of the gaps; the exit status is 0 when all pass, and 2 for a file that cannot be run. The last checks replay runs of the simulator (the
stories of ``fragmeter story``): the allocator does what each step asks, and its tables and references must be the simulator's.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.experiments.story.reading import story
from fragmeter.sim.recording.steps import record

#: Stories in which blocks are taken on demand and sequences are done in turn, and the name of the run.
REPLAYED = (
    ("first-prompt", "vllm-sosp23"),
    ("two-requests", "vllm-sosp23"),
    ("samples", "vllm-sosp23"),
    ("beams", "vllm-sosp23"),
    ("orca-chunks", "vLLM: blocks"),
)


def a_block_is_taken_and_dropped(make: Callable[[int, int], Any]) -> None:
    pool = make(2, 4)
    equal("the first block that is taken", pool.take(), 0)
    equal("the references with block 0 taken", pool.references, [1, 0])
    equal("the free blocks with block 0 taken", pool.free, [1])
    pool.drop(0)
    equal("the references with block 0 dropped", pool.references, [0, 0])
    equal("the free blocks with block 0 dropped", sorted(pool.free), [0, 1])


def a_prompt_takes_the_blocks_that_it_fills(make: Callable[[int, int], Any]) -> None:
    pool = make(4, 4)
    pool.admit("A", 5)
    equal("the table of a prompt of 5 tokens in blocks of 4", pool.tables["A"], [0, 1])
    equal("its tokens", pool.tokens["A"], 5)
    equal("the references", pool.references, [1, 1, 0, 0])
    equal("the free blocks", sorted(pool.free), [2, 3])
    pool.admit("B", 4)
    equal("the table of a prompt of 4 tokens", pool.tables["B"], [2])


def a_prompt_without_room_changes_nothing(make: Callable[[int, int], Any]) -> None:
    pool = make(2, 4)
    pool.admit("A", 4)
    try:
        pool.admit("B", 5)
    except MemoryError:
        equal("the tables", pool.tables, {"A": [0]})
        equal("the free blocks", pool.free, [1])
        equal("the tokens", pool.tokens, {"A": 4})
    else:
        raise AssertionError("a prompt of two blocks is admitted while one is free; raise MemoryError")


def a_decode_takes_a_block_only_when_the_last_is_full(make: Callable[[int, int], Any]) -> None:
    pool = make(4, 2)
    pool.admit("A", 1)
    equal("a copy for the second token", pool.append("A"), None)
    equal("the table with two tokens", pool.tables["A"], [0])
    pool.append("A")
    equal("the table with three tokens", pool.tables["A"], [0, 1])
    equal("the tokens", pool.tokens["A"], 3)


def a_release_frees_blocks_for_others(make: Callable[[int, int], Any]) -> None:
    pool = make(3, 2)
    pool.admit("A", 4)
    pool.admit("B", 2)
    pool.release("A")
    equal("the tables", pool.tables, {"B": [2]})
    equal("the references", pool.references, [0, 0, 1])
    pool.admit("C", 4)
    equal("the table of C, which takes the block freed last first", pool.tables["C"], [1, 0])


def a_fork_shares_and_a_write_copies(make: Callable[[int, int], Any]) -> None:
    pool = make(4, 2)
    pool.admit("A1", 3)
    pool.fork("A1", "A2")
    equal("the references after a fork", pool.references, [2, 2, 0, 0])
    equal("the tokens of the child", pool.tokens["A2"], 3)
    equal("the copy before A1 writes to a shared block", pool.append("A1"), (1, 2))
    equal("the table of A1", pool.tables["A1"], [0, 2])
    equal("the table of A2, which is alone in block 1 now", pool.tables["A2"], [0, 1])
    equal("the copy before A2 writes", pool.append("A2"), None)
    equal("the references", pool.references, [2, 1, 1, 0])
    pool.append("A1")
    equal("the table of A1 with a block of its own", pool.tables["A1"], [0, 2, 3])


def a_shared_block_is_free_when_no_table_names_it(make: Callable[[int, int], Any]) -> None:
    pool = make(4, 2)
    pool.admit("A1", 4)
    pool.fork("A1", "A2")
    pool.release("A1")
    equal("the references with A2 left", pool.references, [1, 1, 0, 0])
    equal("the free blocks with A2 left", sorted(pool.free), [2, 3])
    pool.release("A2")
    equal("the references at the end", pool.references, [0, 0, 0, 0])
    equal("the free blocks at the end", sorted(pool.free), [0, 1, 2, 3])


def replays(name: str, run: str) -> Callable[[Callable[[int, int], Any]], None]:
    """A check: the tables and references of a story's run."""

    def check(make: Callable[[int, int], Any]) -> None:
        chosen = story(name)
        own, names = chosen.runs[run], chosen.cast().names
        _, steps = record(own, chosen.workload(), OneSecondStep())
        pool = make(own.num_gpu_blocks_override, own.block_size)
        for number, step in enumerate(steps, start=1):
            tables = {names[each.sequence]: list(each.table) for each in step.held}
            follow(pool, step, names, [each for each in pool.tables if each not in tables])
            equal(f"the tables in step {number}", pool.tables, tables)
            equal(f"the references in step {number}", pool.references, list(step.references))

    check.__name__ = f"the_story_{name.replace('-', '_')}_is_replayed"
    return check


def follow(pool: Any, step: Any, names: tuple[str, ...], done: list[str]) -> None:
    """Do on the allocator what a step of the simulator does."""
    for sequence in done:
        pool.release(sequence)
    for dead, parent in step.replaced:
        pool.release(names[dead])
        pool.fork(names[parent], names[dead])
    for sibling in step.forked:
        leader = min(each.sequence for each in step.held if names[each.sequence][0] == names[sibling][0])
        pool.fork(names[leader], names[sibling])
    for each in step.computed:
        if each.decodes:
            pool.append(names[each.sequence])
    for each in step.computed:
        if not each.decodes:
            pool.admit(names[each.sequence], each.stop)


CHECKS = (
    a_block_is_taken_and_dropped,
    a_prompt_takes_the_blocks_that_it_fills,
    a_prompt_without_room_changes_nothing,
    a_decode_takes_a_block_only_when_the_last_is_full,
    a_release_frees_blocks_for_others,
    a_fork_shares_and_a_write_copies,
    a_shared_block_is_free_when_no_table_names_it,
    *(replays(*key) for key in REPLAYED),
)


def equal(what: str, found: object, expected: object) -> None:
    """Raises AssertionError with both values."""
    if found != expected:
        raise AssertionError(f"{what}: {found}, and should be {expected}")


class NoAllocator(Exception):
    """A file without an allocator that can be run; the text says why, in one line."""


def allocator(path: Path) -> Callable[[int, int], Any]:
    """The ``Allocator`` of a file.

    Raises:
        NoAllocator: There is none.
    """
    spec = importlib.util.spec_from_file_location("allocator", path)
    if spec is None or not path.is_file():
        raise NoAllocator(f"{path}: is no Python file that is there; name one with a class Allocator")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        inside = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = inside[-1] if inside else getattr(error, "lineno", 1)
        reason = f"{type(error).__name__}: {getattr(error, 'msg', error)}"
        raise NoAllocator(f"{path}, line {line}: cannot be run: {reason}") from None
    if not hasattr(module, "Allocator"):
        raise NoAllocator(f"{path}: has no class Allocator; begin with a copy of starter.py")
    return module.Allocator


def failures(path: Path) -> dict[str, str]:
    """What each check of the file's ``Allocator`` finds: empty where it passes."""
    made, found = allocator(path), {}
    for check in CHECKS:
        try:
            check(made)
            found[check.__name__] = ""
        except NotImplementedError as error:
            found[check.__name__] = f"{error} is not written yet"
        except Exception as error:
            found[check.__name__] = " ".join(f"{type(error).__name__}: {error}".split())
    return found


def main(arguments: list[str]) -> int:
    """Print the checks; the exit status."""
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("starter.py")
    try:
        found = failures(path)
    except NoAllocator as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    for name, failure in found.items():
        print(f"{'FAIL' if failure else 'pass'}  {name.replace('_', ' ')}{f': {failure}' if failure else ''}")
    missing = [failure for failure in found.values() if failure]
    print(f"{len(found) - len(missing)} of {len(found)} checks pass")
    if missing:
        print(f"next in {path.name}: {missing[0]}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
