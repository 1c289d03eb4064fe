"""Facts that several pages state are those that commands measured: ``python docs/facts.py`` would change no page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT

RIGHT = 'answers [beside](x.md) the public logs of <!--starts-->159<!----> servers, of which "starts" is said of most\n'


@pytest.fixture(scope="module")
def facts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_facts", ROOT / "docs" / "facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def values(facts: ModuleType) -> dict[str, str]:
    return facts.measured()


def test_the_file_has_what_is_measured(facts, values):
    listed = json.loads((ROOT / "docs" / "facts.json").read_text("utf-8"))
    assert {name: fact["value"] for name, fact in listed.items()} == values
    assert {name: fact["measured_by"] for name, fact in listed.items()} == {
        name: fact.source for name, fact in facts.FACTS.items()
    }


def test_every_page_carries_them_between_comments(facts, values):
    wrong = [
        line
        for path in facts.pages()
        for line in facts.wrong_lines(str(path.relative_to(ROOT)), path.read_text("utf-8"), values)
    ]
    assert not wrong


def test_every_fact_is_stated_on_a_page(facts):
    text = "".join(path.read_text("utf-8") for path in facts.pages())
    assert [name for name in facts.FACTS if f"<!--{name}-->" not in text] == []


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(RIGHT.replace("159", "160"), id="another-number"),
        pytest.param(RIGHT.replace("<!--starts-->159<!---->", "160"), id="another-number-outside-of-comments"),
        pytest.param(RIGHT.replace("<!--starts-->159<!---->", "159"), id="outside-of-comments"),
        pytest.param(RIGHT.replace("<!--starts-->", "<!--figures-->"), id="the-name-of-another-fact"),
        pytest.param("of <!--starts-->159<!----> lines\n", id="comments-around-no-fact"),
    ],
)
def test_a_planted_contradiction_is_named_and_mended(facts, planted):
    values = dict.fromkeys(facts.FACTS, "1") | {"starts": "159"}
    assert not facts.wrong_lines("page.md", RIGHT, values)
    [line] = facts.wrong_lines("page.md", planted, values)
    assert line.startswith("page.md, line 1: ") and line.endswith("run python docs/facts.py")
    assert not facts.wrong_lines("page.md", facts.with_facts(planted, values), values)


def test_grades_stay_as_they_are(facts, values):
    for name in facts.PAGES:
        written = Path(ROOT / name).read_text("utf-8")
        _, _, rest = written.partition(facts.BEGIN)
        block, _, _ = rest.partition(facts.END)
        assert block.strip() and facts.with_facts(block, values) == block
