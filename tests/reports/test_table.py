"""One table in each of its forms has the same cells."""

from __future__ import annotations

import io

from rich.console import Console

from fragmeter.reports.page.page import Section, render_page
from fragmeter.reports.page.table import Column, Table, markdown
from helpers.shown_shares import Page


def example():
    table = Table("policy", "requests/s", Column("why", is_text=True, wraps=True), title="Rates")
    table.add_row("vllm-v1", 1234.5678, "blocks", ends_group=True)
    table.add_row("orca", None, "reserves\nall")
    return table


def printed(table, width=80):
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_terminal_aligns_names_left_and_numbers_right():
    assert printed(example()) == [
        "Rates",
        "policy    requests/s   why",
        "───────────────────────────────",
        "vllm-v1        1,235   blocks",
        "",
        "orca               -   reserves",
        "                       all",
    ]


def test_a_gap_is_the_blanks_between_columns():
    for gap in (1, 2, 3):
        table = Table("a", "b", gap=gap)
        table.add_row("x", 1)
        assert printed(table) == [f"a{' ' * gap}b", "─" * (2 + gap), f"x{' ' * gap}1"]


def test_markdown_escapes_what_would_end_a_cell():
    assert example().markdown() == [
        "| policy | requests/s | why |",
        "|---|---|---|",
        "| vllm-v1 | 1,235 | blocks |",
        "| orca |  | reserves all |",
    ]
    assert markdown(["a|b"], [[True]]) == ["| a\\|b |", "|---|", "| yes |"]


def test_a_page_has_the_rows_by_heading():
    rows = example().records()
    assert rows[1] == {"policy": "orca", "requests/s": None, "why": "reserves\nall"}
    seen = Page(render_page("Rates", "", [Section("Table", rows=rows)])).seen
    assert all(text in seen for text in ("policy", "requests/s", "1,234.57", "blocks"))


def test_records_make_a_table():
    assert Table.of_records(example().records()).markdown() == example().markdown()
