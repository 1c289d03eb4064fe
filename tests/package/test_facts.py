"""Facts that several pages state are those that commands measured: ``python docs/facts.py`` would change no page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT

RIGHT = 'answers [beside](x.md) the public logs of 159 servers, of which "starts" is said of most\n'


@pytest.fixture(scope="module")
def facts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_facts", ROOT / "docs" / "facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def values(facts: ModuleType) -> dict[str, str]:
    return facts.measured()


def test_the_file_has_what_is_measured_and_where_it_is_stated(facts, values):
    """A phrase that was reworded is stated less often than the file says."""
    listed = json.loads((ROOT / "docs" / "facts.json").read_text("utf-8"))
    assert listed == facts.listed(values), "run python docs/facts.py, and look at what docs/facts.json no longer has"


def test_every_page_states_what_is_measured(facts, values):
    wrong = [
        line
        for path in facts.pages()
        for line in facts.wrong_lines(str(path.relative_to(ROOT)), path.read_text("utf-8"), values)
    ]
    assert not wrong


def test_every_fact_is_stated_on_a_page(facts, values):
    assert [name for name, fact in facts.listed(values).items() if not fact["stated_on"]] == []


def test_the_cards_are_those_with_results(values):
    assert values["cards"] == "H100, H200"


@pytest.mark.parametrize(
    ("right", "planted"),
    [
        (RIGHT, RIGHT.replace("159", "160")),
        (RIGHT, RIGHT.replace("159", "1.59")),
        ("kernels [measured on cards (H100, H200)](x.md)\n", "kernels [measured on cards (A100, H100, H200)](x.md)\n"),
        ("kernels [measured on cards (H100, H200)](x.md)\n", "kernels [measured on cards (H100)](x.md)\n"),
    ],
)
def test_a_planted_contradiction_is_named_and_mended(facts, right, planted):
    values = dict.fromkeys(facts.FACTS, "1") | {"starts": "159", "cards": "H100, H200"}
    assert not facts.wrong_lines("page.md", right, values)
    [line] = facts.wrong_lines("page.md", planted, values)
    assert line.startswith("page.md, line 1: ") and line.endswith("run python docs/facts.py")
    assert facts.with_facts(planted, values) == right


def test_a_reworded_phrase_is_stated_no_more(facts):
    assert facts.stated(RIGHT) == {"starts": 1}
    assert facts.stated(RIGHT.replace("public logs of", "logs of")) == {}


def test_grades_stay_as_they_are(facts, values):
    for name in facts.PAGES:
        written = Path(ROOT / name).read_text("utf-8")
        _, _, rest = written.partition(facts.BEGIN)
        block, _, _ = rest.partition(facts.END)
        assert block.strip() and facts.with_facts(block, values) == block
