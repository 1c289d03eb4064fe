"""Dialogue trees: the prompt of a request begins with the tokens of its parent.

    request 0   |- prompt 0 -|- output 0 -|
    request 1   |- prompt 0 -|- output 0 -|- own -|- output 1 -|     forks at the end of 0
    request 2   |- prompt 0 -|- ou|- own -|- output 2 -|             forks within its output
    request 3   |- prompt 0 -|- output 3 -|                          rolls 0 back to its prompt

A fork does not change the parent. A rollback replaces the parent and discards the parent's tokens beyond its start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..types.errors import SettingError

NO_PARENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """The parent of every request.

    Attributes:
        parent: int64 [n], the row of an earlier request, or ``NO_PARENT``.
        parent_tokens: int64 [n], number of tokens of the parent's prompt and output that the prompt begins with; 0
            without a parent.
        rolls_back: bool [n], whether the request replaces its parent.
    """

    parent: np.ndarray
    parent_tokens: np.ndarray
    rolls_back: np.ndarray

    def __post_init__(self) -> None:
        for field, kind in (("parent", np.int64), ("parent_tokens", np.int64), ("rolls_back", np.bool_)):
            column = np.ascontiguousarray(getattr(self, field), dtype=kind)
            column.setflags(write=False)
            object.__setattr__(self, field, column)
            if len(column) != len(self.parent):
                raise SettingError(field, len(column), f"must have a value for each of {len(self.parent)} requests")

    def __len__(self) -> int:
        return len(self.parent)

    def columns(self) -> list[str]:
        """Names of the columns."""
        return ["parent", "parent_tokens", "rolls_back"]

    def check(self, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> None:
        """Check the parents against the lengths of the requests.

        Raises:
            SettingError: A parent that is no earlier request; more tokens than have keys and values when the parent
                finishes, or than the prompt has before its last.
        """
        child = self.parent != NO_PARENT
        if (child & ((self.parent < 0) | (self.parent >= np.arange(len(self))))).any():
            raise SettingError("parent", "a later row", "must be the row of an earlier request")
        most = np.minimum(prompt_tokens - 1, (prompt_tokens + output_tokens)[self.parent] - 1)
        wrong = np.where(child, (self.parent_tokens < 1) | (self.parent_tokens > most), self.parent_tokens != 0)
        if wrong.any():
            row = int(wrong.argmax())
            remedy = f"request {row} can begin with 1 to {int(most[row])} tokens of its parent"
            raise SettingError("parent_tokens", int(self.parent_tokens[row]), remedy)

    def children(self, served: np.ndarray) -> np.ndarray:
        """Number of children of each request, int64 [n], counting only those that are ``served``, bool [n]."""
        return np.bincount(self.parent[served & (self.parent != NO_PARENT)], minlength=len(self))

    def first(self, requests: int) -> Dialogue:
        """The first requests alone."""
        return Dialogue(self.parent[:requests], self.parent_tokens[:requests], self.rolls_back[:requests])
