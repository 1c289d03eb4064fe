"""docs/architecture.md: its table is that of the code, and its paths exist."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from paths import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_architecture", ROOT / "docs" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = load()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each folder imports; every module is parsed for it."""
    return docs.imports()


def test_the_table_is_that_of_the_code():
    """Otherwise: python docs/architecture.py --write."""
    assert docs.main([]) == 0


def test_every_path_of_the_page_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:sim|traces|gpu|experiments|reports|docs|tests)/[^`\s]*)`", page)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_every_import_between_folders_follows_from_the_table(graph):
    few = docs.reduced(graph)

    def reached(name: str, arrows: dict[str, set[str]]) -> set[str]:
        return {name}.union(*(reached(other, arrows) for other in arrows[name]))

    assert all(reached(name, few) == reached(name, graph) for name in graph)
    text = docs.table()
    assert all(f"| `{name}` | " in text for name in graph) and "|  |  |" not in text


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
        "sim": set(),
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


def test_a_stale_table_is_named_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "architecture.md"
    page.write_text("<!-- folders -->\n<!-- end of folders -->\n")
    monkeypatch.setattr(docs, "PAGE", page)
    monkeypatch.setattr(docs, "table", lambda: "| a |\n|---|")
    assert docs.main([]) == 1
    assert docs.main(["--write"]) == docs.main([]) == 0
    assert "| a |" in page.read_text()
    assert capsys.readouterr().out == "architecture.md: out of date; run python docs/architecture.py --write\n"
