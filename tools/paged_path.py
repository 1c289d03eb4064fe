"""The lines of the paged path: which functions a run of Fig 2's load calls from its requests to its ledger.

    python -m tools.paged_path [--policy vllm-sosp23] [--duration 900]

The load is Fig 2's with drawn lengths (seed 0), in Python, with leaps. Counted are the modules of ``FOLDERS``: the loop, one policy, the
pool and its tables, the ledger, the run log and the types that they share. Settings, models, step times and metrics stand before or
behind the path. Of each module are printed

    module   its lines
    called   lines of the functions that were called, with their docstrings
    code     the same without docstrings, comments and blank lines
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from fragmeter.experiments.paper.paper import FIG2, source
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.reports.page.table import markdown
from fragmeter.sim.engine.run import simulate

SIM = Path(sys.modules["fragmeter.sim.engine.run"].__file__ or "").resolve().parents[1]
FOLDERS = ("workload", "types", "policy", "engine", "memory", "runs")


class Lines(NamedTuple):
    """Numbers of lines of a module."""

    module: int
    called: int
    code: int


def called_by(policy: str, duration_s: float) -> set[CodeType]:
    """The functions of ``FOLDERS`` that a run calls."""
    work = source(seeds=1).workload(replace(FIG2, duration_s=duration_s), seed=0)
    # The paper measured its step times without CUDA graphs.
    settings = paper_settings(policy=policy, core=False, enforce_eager=True)
    found: set[CodeType] = set()

    def noticed(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code)

    sys.setprofile(noticed)
    try:
        simulate(settings, work)
    finally:
        sys.setprofile(None)
    return {each for each in found if Path(each.co_filename).resolve().is_relative_to(SIM)}


def lines_of(path: Path, firsts: set[int]) -> Lines:
    """Lines of a module and of its functions that begin, with their decorators, in these lines."""
    text = path.read_text("utf-8")
    called: set[int] = set()
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            # Python counts a function from its first decorator on.
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            called |= set(range(first, _end(node))) if first in firsts else set()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, _end(node)))
    rows = text.splitlines()
    plain = {at for at, row in enumerate(rows, start=1) if not row.strip() or row.strip().startswith("#")}
    return Lines(len(rows), len(called), len(called - words - plain))


def _end(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) + 1


def path_lines(policy: str, duration_s: float) -> Iterator[tuple[str, Lines]]:
    """The modules of the path, in the order of ``FOLDERS``."""
    firsts: dict[Path, set[int]] = {}
    for each in called_by(policy, duration_s):
        firsts.setdefault(Path(each.co_filename).resolve(), set()).add(each.co_firstlineno)
    for folder in FOLDERS:
        for path in sorted(path for path in firsts if path.relative_to(SIM).parts[0] == folder):
            found = lines_of(path, firsts[path])
            if found.called:
                yield str(path.relative_to(SIM)), found


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the lines of the paged path.")
    parser.add_argument("--policy", default="vllm-sosp23")
    parser.add_argument("--duration", type=float, default=FIG2.duration_s, help="seconds of requests")
    given = parser.parse_args(arguments)
    rows = list(path_lines(given.policy, given.duration))
    sums = [sum(column) for column in zip(*(lines for _, lines in rows))]
    print(*markdown(("module of sim", *Lines._fields), [(name, *lines) for name, lines in rows]), sep="\n")
    print(f"{given.policy}: {len(rows)} modules of {sums[0]:,} lines; called {sums[1]:,}, of them code {sums[2]:,}")


if __name__ == "__main__":
    main()
