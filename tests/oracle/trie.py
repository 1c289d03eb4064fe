"""Cached strings by brute force: a dictionary of all of them, token by token, searched from end to end."""

from __future__ import annotations

String = tuple[object, ...]


class Trie:
    """Cached strings, each with the slot of its last token, and the ends at which its edges are cut."""

    def __init__(self) -> None:
        self.slots: dict[String, int] = {}
        self.touched: dict[String, tuple[int, int]] = {}
        self.ends: set[String] = {()}
        self.locks: list[String] = []
        self.calls = 0

    def edge(self, end: String) -> list[String]:
        """The strings on the edge that leads to ``end``."""
        above = max(len(other) for other in self.ends if len(other) < len(end) and end[: len(other)] == other)
        return [end[:length] for length in range(above + 1, len(end) + 1)]

    def find(self, string: String) -> int:
        """How much of ``string`` is cached; touches the edges on the way and cuts the last one there."""
        self.calls += 1
        length = 0
        while length < len(string) and string[: length + 1] in self.slots:
            length += 1
        reached: String = ()
        while len(reached) < length:
            through = string[: len(reached) + 1]
            reached = min((end for end in self.ends if end[: len(through)] == through), key=len)
            for part in self.edge(reached):
                self.touched[part] = (self.calls, 0)
        self.ends.add(string[:length])
        return length

    def insert(self, string: String, slots: list[int]) -> int:
        """Cache ``string``, with its tokens in ``slots``; how much of it was cached already, in slots of its own."""
        length = self.find(string)
        for end in range(length + 1, len(string) + 1):
            self.slots[string[:end]] = slots[end - 1]
            self.touched[string[:end]] = (self.calls, 1)
        self.ends.add(string)
        return length

    def is_locked(self, string: String) -> bool:
        return any(locked[: len(string)] == string for locked in self.locks)

    def evictable(self) -> list[String]:
        return [string for string in self.slots if not self.is_locked(string)]

    def evict(self, tokens: int) -> list[int]:
        """The slots of leaves without locks, whole ones, the one touched longest ago first, for so many tokens."""
        freed: list[int] = []
        while len(freed) < tokens:
            inner = {end[:length] for end in self.ends for length in range(len(end))}
            leaves = [end for end in self.ends if end and end not in inner and not self.is_locked(end)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda end: self.touched[end])
            for string in self.edge(oldest):
                freed.append(self.slots.pop(string))
            self.ends.remove(oldest)
        return freed
