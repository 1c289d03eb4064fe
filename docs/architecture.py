"""Writes the table of folders into docs/architecture.md: ``python docs/architecture.py --write``.

A row is a folder, the first line of its ``__init__.py``, and the folders that its modules import when they are loaded, without those that
follow from others. Without ``--write`` nothing is written, and the exit status is 1 when the table is out of date.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fragmeter.reports.page.table import filled, markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("experiments", "reports", "gpu", "traces", "sim")

Graph = dict[str, set[str]]


def imports(root: Path = ROOT) -> Graph:
    """Folders, as "room/folder", that each folder of the rooms imports; modules beside the folders of a room are "room"."""
    graph: Graph = {}
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        package = path.relative_to(root).parts[:-1]
        found = graph.setdefault("/".join(package[:2]), set())
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = (*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split(".")))
                for name in (base, *((*base, alias.name) for alias in node.names)):
                    place = root.joinpath(*name)
                    if place.with_suffix(".py").is_file():
                        found.add("/".join(name[:-1][:2]))
                    elif (place / "__init__.py").is_file():
                        found.add("/".join(name[:2]))
    return {name: others - {name} for name, others in graph.items()}


def reduced(graph: Mapping[str, Iterable[str]]) -> Graph:
    """The transitive reduction of a graph.

    Raises:
        ValueError: The graph has a cycle.
    """
    reached: Graph = {}
    left = {name: set(others) for name, others in graph.items()}
    while left:
        ready = [name for name, others in left.items() if others <= reached.keys()]
        if not ready:
            raise ValueError(f"a cycle among {sorted(left)}")
        for name in ready:
            reached[name] = left.pop(name).union(*(reached[other] for other in graph[name]))
    return {
        name: {other for other in others if not any(other in reached[third] for third in others)}
        for name, others in graph.items()
    }


def table(root: Path = ROOT) -> str:
    """The table of folders in Markdown, a room after those that import it."""
    graph = reduced(imports(root))
    rows = []
    for name in sorted(graph, key=lambda name: (ROOMS.index(name.partition("/")[0]), name)):
        text = ast.get_docstring(ast.parse((root / name / "__init__.py").read_text("utf-8"))) or ""
        rows.append((f"`{name}`", text.split("\n")[0], ", ".join(f"`{other}`" for other in sorted(graph[name]))))
    return "\n".join(markdown(("folder", "contents", "imports"), rows))


def main(arguments: list[str]) -> int:
    """Write or check the page; the exit status."""
    text = PAGE.read_text("utf-8")
    new = filled(text, {"folders": table()})
    if "--write" in arguments:
        PAGE.write_text(new, "utf-8")
    elif new != text:
        print(f"{PAGE.name}: out of date; run python docs/architecture.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
