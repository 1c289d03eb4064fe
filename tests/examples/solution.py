"""A solution of ``examples/teaching/exercise``, which no page shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_STARTER = Path(__file__).parents[2] / "examples" / "teaching" / "exercise" / "starter.py"
_spec = importlib.util.spec_from_file_location("starter", _STARTER)
_starter = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_starter)


class Allocator(_starter.Allocator):
    def take(self) -> int:
        if not self.free:
            raise MemoryError("no block is free")
        block = self.free.pop()
        self.references[block] = 1
        return block

    def drop(self, block: int) -> None:
        self.references[block] -= 1
        if not self.references[block]:
            self.free.append(block)

    def admit(self, sequence: str, prompt_tokens: int) -> None:
        blocks = -(-prompt_tokens // self.block_size)
        if blocks > len(self.free):
            raise MemoryError(f"{blocks} blocks are needed and {len(self.free)} are free")
        self.tables[sequence] = [self.take() for _ in range(blocks)]
        self.tokens[sequence] = prompt_tokens

    def append(self, sequence: str) -> tuple[int, int] | None:
        table, copy = self.tables[sequence], None
        if self.tokens[sequence] == len(table) * self.block_size:
            table.append(self.take())
        elif self.references[table[-1]] > 1:
            copy = table[-1], self.take()
            self.drop(table[-1])
            table[-1] = copy[1]
        self.tokens[sequence] += 1
        return copy

    def fork(self, parent: str, child: str) -> None:
        self.tables[child] = list(self.tables[parent])
        self.tokens[child] = self.tokens[parent]
        for block in self.tables[child]:
            self.references[block] += 1

    def release(self, sequence: str) -> None:
        for block in self.tables.pop(sequence):
            self.drop(block)
        del self.tokens[sequence]
