"""A file with columns that the user names (``--columns``)."""

from __future__ import annotations

from collections.abc import Mapping

from ..parsing.form import SECONDS, SESSION, Form
from ..parsing.jsonl_format import sessions
from ..parsing.table import Table

#: Our columns by the names in ``Reading.columns``.
_OURS = {
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "max_tokens": "max_tokens",
    "n": "n",
    "priority": "priority",
    "ignore_eos": "ignore_eos",
}


def named_form(columns: Mapping[str, str]) -> Form:
    """The form of a file with these columns. Times are in seconds, where their values do not say otherwise."""
    session = columns.get("session")

    def prepare(table: Table) -> Table:
        renamed = {
            ours: table.columns[columns[name]] for name, ours in _OURS.items() if columns.get(name) in table.columns
        }
        if session in table.columns:
            renamed[SESSION] = table.columns[session]
        return table.having(**renamed)

    return Form(
        "columns named by --columns",
        {columns["arrival"]: SECONDS} if "arrival" in columns else {},
        {ours: (columns[name],) for name, ours in _OURS.items() if name in columns},
        content={} if session is None else {session: sessions},
        preparer=lambda: prepare,
    )
