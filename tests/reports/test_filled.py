"""A page of Markdown whose computed parts stand between comments."""

from __future__ import annotations

import pytest

from fragmeter.experiments.runs.output import Report
from fragmeter.reports.page.table import filled
from fragmeter.sim.types.errors import UserError

PAGE = """# Title

All <!-- runs -->7<!-- end of runs --> runs:

<!-- errors -->

| old |

<!-- end of errors -->

Words by hand.
"""
NEW = {"runs": "9", "errors": "| new |\n|---|\n| 1 |"}


def test_parts_take_their_places_and_all_else_stays():
    assert filled(PAGE, NEW) == PAGE.replace("7", "9").replace("| old |", NEW["errors"])
    assert filled(filled(PAGE, NEW), {"runs": "7", "errors": "| old |"}) == PAGE


def test_a_part_without_a_place_is_refused():
    with pytest.raises(UserError, match="no <!-- sources -->"):
        filled(PAGE, {"sources": ""})
    with pytest.raises(UserError, match="no <!-- runs -->"):
        filled(PAGE.replace("<!-- end of runs -->", ""), NEW)


def test_markdown_fills_a_page_and_begins_a_new_file(tmp_path):
    page, new = tmp_path / "page.md", tmp_path / "new.md"
    page.write_text(PAGE)
    new.write_text("something else\n")
    for path in (page, new):
        Report(None, markdown=path).markdown_parts("Title", lambda: NEW)
    assert page.read_text() == filled(PAGE, NEW)
    assert new.read_text() == f"# Title\n\nruns:\n\n9\n\nerrors:\n\n{NEW['errors']}\n\n"
