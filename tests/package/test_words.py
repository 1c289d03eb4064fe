"""The words that the project does not use: what is found, and that limits only fall."""

from __future__ import annotations

import json

import pytest

import words
from paths import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to read")


def found(text: str, name: str = "a.py") -> list[tuple[int, str]]:
    return [(line, word) for _, line, word in words.hits_in(name, text)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# Who waits", "who"),
        ("whoever", "whoever"),
        ("for whom", "whom"),
        ("whose", "whose"),
        ("somebody_waits", "somebody"),
        ("def is_told(self)", "told"),
        ("class Book:", "book"),
        ("run.book", "book"),
        ("a row a stay", "stay"),
        ("self.stays", "stay"),
        ("stays.parquet", "stay"),
        ("memory.take_back(sequence)", "take_back"),
        ("it hangs\non the rate", "hangs on"),
        ("DOES NOT HOLD", "holds"),
        ('return "holds only"', "holds"),
        ("the verdicts", "verdict"),
        ("nobody", "nobody"),
        ("Everybody", "everybody"),
        ("anybody", "anybody"),
        ("two seats", "seats"),
        ("push_out(", "push_out"),
        ("def pass_steps", "pass_steps"),
        ("let_go", "let_go"),
        ("go_on", "go_on"),
        ("it ripened", "ripens"),
    ],
)
def test_a_word_is_found(text, word):
    assert found(text) == [(1, word)]
    assert found(f"first\n  {text}  \nlast") == [(2, word)]


def test_every_word_has_a_case():
    [cases] = [mark.args[1] for mark in test_a_word_is_found.pytestmark]
    assert {word for _, word in cases} == words.WORDS.keys()


@pytest.mark.parametrize(
    "text", ["whole", "untold", "a notebook", "its permissions stay", "it stays so", "holds a block", "ongoing"]
)
def test_other_words_are_not(text):
    assert found(text) == []


def test_lines_are_counted_and_code_of_a_page_is_left_out():
    page = "# Title\n\n```console\n$ told\nwho\n```\n\nwho\nand who and whose\n"
    assert found(page, "a.md") == [(8, "who"), (9, "who"), (9, "whose")]
    assert len(found(page, "a.py")) == 5


def test_a_limit_is_one_of_the_repository():
    limits = {"a.py": {"who": 2}, "b.py": {"told": 1}}
    moved = [("a.py", 1, "who"), ("c.py", 7, "who"), ("b.py", 1, "told")]
    assert words.risen(moved, limits) == []
    assert words.risen([*moved, ("c.py", 9, "who")], limits) == [("c.py", 7, "who"), ("c.py", 9, "who")]
    assert words.risen([("b.py", 3, "whom")], limits) == [("b.py", 3, "whom")]


def test_limits_are_lowered_and_never_raised(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(words, "LIMITS", tmp_path / "words.json")
    words.LIMITS.write_text(json.dumps({"a.py": {"who": 2}}))
    texts = {"a.py": "who\n"}
    monkeypatch.setattr(words, "tracked", lambda: texts.items())
    assert words.main([]) == 0
    assert json.loads(words.LIMITS.read_text()) == {"a.py": {"who": 2}}
    assert words.main(["--write"]) == 0
    assert json.loads(words.LIMITS.read_text()) == {"a.py": {"who": 1}}
    texts["a.py"] = "who\nwho\n"
    assert words.main(["--write"]) == 1
    assert json.loads(words.LIMITS.read_text()) == {"a.py": {"who": 1}}
    assert "a.py:2: who\nwho: 2, at most 1\n" in capsys.readouterr().out


def test_no_word_occurs_more_often_than_before(capsys):
    assert words.main([]) == 0, capsys.readouterr().out


def test_limits_name_known_words():
    assert words.totals(json.loads(words.LIMITS.read_text())).keys() <= words.WORDS.keys()
