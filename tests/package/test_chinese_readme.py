"""README.zh-CN.md is README.md in Chinese: the same commands, output, names, links and figures, in the same order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paths import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Commands, their output and examples."""
    return BLOCK.findall(page.read_text("utf-8"))


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """Targets, but for the link from each page to the other."""
    targets = re.findall(r"\]\(([^)]*)\)", prose(page))
    return sorted(target for target in targets if not target.startswith("README"))


def test_commands_and_output_are_the_same():
    assert blocks(CHINESE) == blocks(ENGLISH)
    assert len(blocks(ENGLISH)) >= 7


def test_each_page_points_to_the_other():
    assert "(README.zh-CN.md)" in prose(ENGLISH) and "(README.md)" in prose(CHINESE)


@pytest.mark.parametrize(
    "found",
    [
        links,
        lambda page: re.findall(r"^#+ ?", prose(page), re.MULTILINE),
        lambda page: len(re.findall(r"^\|", prose(page), re.MULTILINE)),
        lambda page: len(re.findall(r"^- ", prose(page), re.MULTILINE)),
        lambda page: sorted(re.findall(r"`([^`]+)`", prose(page))),
        lambda page: sorted(re.findall(r"[-+]?\d+(?:\.\d+)? %", prose(page))),
    ],
    ids=["links", "headings", "rows", "items", "names", "percentages"],
)
def test_the_prose_has_the_same(found):
    assert found(CHINESE) == found(ENGLISH)
