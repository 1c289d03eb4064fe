"""How one kind of file says what we read: its names and its units.

A form is recognised by names that no other has. ``prepare`` converts its columns into fragmeter's own; the same checks
then apply to all forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...sim.types import ticks
from .jsonl_format import Reader, numbers, sessions, whole_lists
from .table import Table

#: Our columns of lengths and numbers, and what files of our own form, of the SOSP'23 pairs and of Mooncake call them.
OWN_NAMES = {
    "prompt_tokens": ("prompt_tokens", "input", "input_length"),
    "output_tokens": ("output_tokens", "output", "output_length"),
    "max_tokens": ("max_tokens",),
    "n": ("n",),
    "parent": ("parent",),
    "fork_at": ("fork_at",),
    "truncate_to": ("truncate_to",),
}
#: Tokens of a block in Mooncake's traces, and in vLLM's and Bailian's, where neither says it.
MOONCAKE_BLOCK_TOKENS, VLLM_BLOCK_TOKENS = 512, 16
HASH_IDS, BLOCK_TOKENS, SESSION = "hash_ids", "block_tokens", "session_id"
#: What a prompt is made of, and how it is read from JSON.
CONTENT = {HASH_IDS: whole_lists, BLOCK_TOKENS: whole_lists, SESSION: sessions}


@dataclass(frozen=True, slots=True)
class Clock:
    """The unit of arrivals in a file.

    Attributes:
        unit_ticks: Ticks of a unit; None where it is a date.
        from_first: Whether the first request arrives at 0, whatever its time.
    """

    unit_ticks: int | None
    from_first: bool = False


SECONDS, MILLISECONDS = Clock(ticks.PER_SECOND), Clock(ticks.PER_MS)


def as_it_is(table: Table) -> Table:
    """The table of a form that has our own columns, whatever their names."""
    return table


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of file with rows and columns.

    Attributes:
        title: What it is, for people.
        marks: Columns that tell it from all others.
        clocks: Its names of the arrival, and how each tells the time.
        names: Our name of each column of numbers, and its names in the file.
        content: Columns that say what prompts are made of, by the file's names, and how they are read from JSON.
        delays: Its names of the time between a turn of a session and the answer before it, and ticks of their units.
        clock_reader: How an arrival is read from JSON.
        preparer: Makes, for one file, what turns ``content`` into our own columns of that.
        failures: Whether a length of 0 says that a request failed; such rows are left out and counted.
        block_tokens: Tokens of a full block of ``hash_ids``, where the file does not say.
    """

    title: str
    marks: frozenset[str]
    clocks: Mapping[str, Clock]
    names: Mapping[str, Sequence[str]] = field(default_factory=lambda: OWN_NAMES)
    content: Mapping[str, Reader] = field(default_factory=lambda: CONTENT)
    delays: Mapping[str, int] = field(default_factory=dict)
    clock_reader: Reader = numbers
    preparer: Callable[[], Callable[[Table], Table]] = lambda: as_it_is
    failures: bool = False
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def numbers(self) -> list[str]:
        """Columns of the file that hold numbers or times."""
        return [*(name for names in self.names.values() for name in names), *self.clocks, *self.delays]

    def readers(self, content: bool) -> dict[str, Reader]:
        """How the file's keys are read from JSON; with ``content``, also those that say what prompts are made of."""
        readers = dict.fromkeys(self.numbers, numbers) | dict.fromkeys(self.clocks, self.clock_reader)
        return readers | (dict(self.content) if content else {})


def lengths(prompt: str, output: str) -> Mapping[str, Sequence[str]]:
    """Names of a form that has the two lengths and no more."""
    return {"prompt_tokens": (prompt,), "output_tokens": (output,)}
