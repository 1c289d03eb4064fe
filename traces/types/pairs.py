"""Length pairs: prompt and output lengths of requests, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...sim.types.errors import SettingError


def frozen_column(values: object) -> np.ndarray:
    """``values`` as a read-only int64 [n]."""
    column = np.array(values, dtype=np.int64)
    column.setflags(write=False)
    return column


@dataclass(frozen=True, slots=True, eq=False)
class LengthPairs:
    """Requests without times, in file order, as columns.

    Attributes:
        name: Name of the set, for titles.
        prompt_tokens: int64 [n], read-only.
        output_tokens: int64 [n], read-only: the true output lengths.
    """

    name: str
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", frozen_column(self.prompt_tokens))
        object.__setattr__(self, "output_tokens", frozen_column(self.output_tokens))
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise SettingError("output_tokens", len(self.output_tokens), f"must have {len(self.prompt_tokens)} values")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def __eq__(self, other: object) -> bool:
        """Equality by name and content, so that pairs compare equal after transfer to another process."""
        if not isinstance(other, LengthPairs):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[str, bytes, bytes]:
        return self.name, self.prompt_tokens.tobytes(), self.output_tokens.tobytes()

    def capped(self, max_total: int, strict: bool) -> LengthPairs:
        """The pairs with prompt + output of at most ``max_total`` tokens (``strict``: below it)."""
        total_tokens = self.prompt_tokens + self.output_tokens
        keep = total_tokens < max_total if strict else total_tokens <= max_total
        return LengthPairs(self.name, self.prompt_tokens[keep], self.output_tokens[keep])
