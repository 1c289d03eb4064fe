"""Requests as strings of tokens."""

from __future__ import annotations


class Strings:
    """What requests are made of, as ``workload.content.Tokens``: one string of runs each, to the end of its output."""

    def __init__(self) -> None:
        self.strings: list[list[tuple[int, int, int]]] = []
        self._unshared: list[bool] = []

    def add(self, prompt: list[tuple[int, int, int]]) -> int:
        """A request with such a prompt, and an output of its own."""
        own = 100 + len(self.strings)
        self.strings.append([*prompt, (own, 0, 40)])
        self._unshared.append(not prompt)
        return len(self.strings) - 1

    def runs(self, request: int) -> list[tuple[int, int, int]]:
        return self.strings[request][:-1]

    def output_runs(self, request: int) -> list[tuple[int, int, int]]:
        return self.strings[request][-1:]

    @property
    def unshared(self) -> list[bool]:
        return self._unshared

    def tokens(self, request: int) -> tuple[tuple[int, int], ...]:
        """One by one."""
        return tuple(
            (stream, place) for stream, start, length in self.strings[request] for place in range(start, start + length)
        )
