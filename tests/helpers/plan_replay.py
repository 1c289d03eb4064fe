"""A recorded plan carried out on plain lists: what a slot holds is the id of a token, or nothing.

Shares no code with the recorder, and reads the arrays of the plan by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from fragmeter.sim.recording.plans import Plan


class Replay:
    """Device and host slots, and the strings that sequences are said to hold."""

    def __init__(self, plan: Plan) -> None:
        self.plan, meta = plan, plan.meta
        self.size = meta["block_size"] if meta["layout"] == "paged" else 1
        self.device: list[int | None] = [None] * meta["num_slots"]
        self.host: list[int | None] = [None] * (meta["host_blocks"] * meta["block_size"])
        self.strings: dict[int, list[int]] = {}
        for slots, pool in ((("slots", "token_ids"), self.device), (("host_slots", "host_token_ids"), self.host)):
            where, what = (getattr(plan, f"initial_{name}").tolist() for name in slots)
            for slot, token in zip(where, what, strict=True):
                pool[slot] = token

    def run(self) -> None:
        """All steps; every row must find in its table what it logically holds."""
        for step in range(self.plan.num_steps):
            self.move(step)
            rows = range(*self.plan.row_offsets[step : step + 2].tolist())
            self.write(rows)
            for row in rows:
                assert self.found(row) == self.held(row), f"step {step}, sequence {self.plan.sequence[row]}"

    def move(self, step: int) -> None:
        """Swap outs, swap ins, then copies; the copies at once."""
        plan = self.plan
        for out, back in self._pairs("swap_out", step):
            self._put(self.host, back, [self._take(self.device, out)])
        for out, back in self._pairs("swap_in", step):
            self._put(self.device, back, [self._take(self.host, out)])
        copies = list(self._pairs("copy", step, "copies"))
        slots = plan.copied_slots[slice(*plan.copy_offsets[step : step + 2])].tolist()
        taken = [self.device[a * self.size : a * self.size + count] for (a, _), count in zip(copies, slots)]
        for (_, target), contents in zip(copies, taken, strict=True):
            self._put(self.device, target, [contents])

    def _pairs(self, name: str, step: int, array: str | None = None) -> Iterator[list[int]]:
        offsets = getattr(self.plan, f"{name}_offsets")
        yield from getattr(self.plan, array or f"{name}s")[slice(*offsets[step : step + 2])].tolist()

    def _take(self, pool: list[int | None], block: int) -> list[int | None]:
        return pool[block * self.size : (block + 1) * self.size]

    def _put(self, pool: list[int | None], start: int, contents: list[list[int | None]]) -> None:
        for tokens in contents:
            assert start * self.size + len(tokens) <= len(pool)
            pool[start * self.size : start * self.size + len(tokens)] = tokens

    def write(self, rows: range) -> None:
        """New tokens; no slot is written twice in a step (invariant 3)."""
        plan = self.plan
        new = slice(*(plan.slot_offsets[[rows.start, rows.stop]].tolist()))
        slots = plan.slot_mapping[new].tolist()
        assert len(set(slots)) == len(slots)
        for slot, token in zip(slots, plan.token_ids[new].tolist(), strict=True):
            self.device[slot] = token

    def found(self, row: int) -> list[int | None]:
        """The tokens that a row finds where its table says."""
        plan, tokens = self.plan, int(self.plan.context_lens[row])
        if plan.meta["layout"] == "contiguous":
            start = int(plan.slot_starts[row])
            return self.device[start : start + tokens]
        table = plan.block_ids[slice(*plan.table_offsets[row : row + 2])].tolist()
        return [slot for block in table for slot in self._take(self.device, block)][:tokens]

    def held(self, row: int) -> list[int]:
        """The tokens that it logically holds, from what it computed and from what it was said to hold."""
        plan, sequence = self.plan, int(self.plan.sequence[row])
        new = plan.token_ids[slice(*plan.slot_offsets[row : row + 2])].tolist()
        before = int(plan.context_lens[row]) - len(new)
        said = plan.held_token_ids[slice(*plan.held_offsets[row : row + 2])].tolist()
        string = said or (self.strings[sequence] if before else [])
        assert len(string) == before
        self.strings[sequence] = string + new
        return self.strings[sequence]


def replay(plan: Plan) -> None:
    """Carry out a plan; AssertionError where a table does not hold what its sequence does."""
    Replay(plan).run()
