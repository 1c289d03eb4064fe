"""docs/architecture.md: its picture is that of the code, and its paths exist."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree
from types import ModuleType

import pytest

from paths import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_architecture", ROOT / "docs" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


docs = load()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each folder imports; every module is parsed for it."""
    return docs.imports()


def drawn(graph: dict[str, set[str]]) -> set[str]:
    """What the arrows of the picture say."""
    tree = xml.etree.ElementTree.fromstring(docs.picture(graph))
    return {title.text for title in tree.findall(".//{*}path/{*}title")}


def test_the_picture_is_that_of_the_code(graph):
    """Otherwise: python docs/architecture.py --write."""
    assert docs.PICTURE.read_text("utf-8") == docs.picture(graph)


def test_every_path_of_the_page_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:sim|traces|gpu|experiments|reports|docs|tests)/[^`\s]*)`", page)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_every_folder_has_a_purpose_and_every_purpose_a_folder(graph):
    assert sorted(docs.PURPOSES) == sorted(graph)


def test_every_import_between_folders_follows_from_the_picture(graph):
    few = docs.reduced(graph)

    def reached(name: str, arrows: dict[str, set[str]]) -> set[str]:
        return {name}.union(*(reached(other, arrows) for other in arrows[name]))

    assert all(reached(name, few) == reached(name, graph) for name in graph)
    inside = {(name, other) for name in few for other in few[name] if name.split("/")[0] == other.split("/")[0]}
    rooms = {(name, other) for name, others in docs.reduced(docs.between_rooms(graph)).items() for other in others}
    assert drawn(graph) == {f"{name} imports {other}" for name, other in inside | rooms}


def test_imports_are_read_from_the_modules(tmp_path):
    for name, text in {
        "sim/__init__.py": "",
        "sim/types/__init__.py": "",
        "sim/types/ticks.py": "",
        "sim/engine/__init__.py": "",
        "sim/engine/engine.py": "from ..types import ticks\nfrom .executor import Executor\nimport numpy\n",
        "sim/engine/executor.py": "def late():\n    from ...traces import read\n",
        "traces/__init__.py": "from .readers.readers import read\n",
        "traces/readers/readers.py": "from ...sim.types.ticks import PER_MS\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert docs.imports(tmp_path) == {
        "sim/types": set(),
        "sim/engine": {"sim/types"},
        "traces": {"traces/readers"},
        "traces/readers": {"sim/types"},
    }


def test_a_reduction_keeps_what_does_not_follow():
    assert docs.reduced({"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}) == {
        "a": {"b", "d"},
        "b": {"c"},
        "c": set(),
        "d": set(),
    }
    with pytest.raises(ValueError, match=r"a cycle among \['a', 'b'\]"):
        docs.reduced({"a": {"b"}, "b": {"a"}, "c": set()})


def test_boxes_of_a_row_do_not_overlap(graph):
    few = docs.reduced(graph)
    for room in docs.CAPTIONS:
        laid = docs.panel(room, few)
        for row in laid.rows:
            for left, right in zip(row, row[1:]):
                assert left.x + left.width / 2 < right.x - right.width / 2


def test_a_box_stands_above_what_it_imports(graph):
    laid = docs.panel("sim", docs.reduced(graph))
    depth = {id(box): place for place, row in enumerate(laid.rows) for box in row}
    assert laid.arrows
    assert all(depth[id(low)] - depth[id(up)] == 1 for up, low in docs.steps(laid.arrows))


def test_a_stale_picture_is_named_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "PICTURE", tmp_path / "architecture.svg")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "imports", dict)
    monkeypatch.setattr(docs, "picture", lambda graph: "<svg/>\n")
    assert docs.main([]) == 1 and not docs.PICTURE.exists()
    assert docs.main(["--write"]) == docs.main([]) == 0
    assert docs.PICTURE.read_text() == "<svg/>\n"
    assert capsys.readouterr().out == "architecture.svg: out of date\narchitecture.svg: written\n"
