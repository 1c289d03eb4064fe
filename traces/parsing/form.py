"""The form of a trace file: its column names and units.

``sim.types.signatures`` says how it is recognised. ``prepare`` converts its columns into fragmeter's own; the
same checks then apply to all forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...sim.types.signatures import OUTPUT_NAMES, PROMPT_NAMES
from .jsonl_format import Reader, flags, moments, numbers, sessions, whole_lists
from .table import Table
from .times import Clock, clock

#: Our columns of lengths and numbers, and their names in files.
OWN_NAMES = {
    "prompt_tokens": PROMPT_NAMES,
    "output_tokens": OUTPUT_NAMES,
    "max_tokens": ("max_tokens",),
    "n": ("n",),
    "priority": ("priority",),
    "ignore_eos": ("ignore_eos",),
    "parent": ("parent",),
    "fork_at": ("fork_at",),
    "truncate_to": ("truncate_to",),
}
#: Tokens of a block in Mooncake's traces, and in vLLM's and Bailian's; the files do not state them.
MOONCAKE_BLOCK_TOKENS, VLLM_BLOCK_TOKENS = 512, 16
HASH_IDS, BLOCK_TOKENS, SESSION = "hash_ids", "block_tokens", "session_id"
#: Columns of prompt contents, and their JSON readers.
CONTENT = {HASH_IDS: whole_lists, BLOCK_TOKENS: whole_lists, SESSION: sessions}

#: Failed requests of a format that gives them no tokens.
ZERO: frozenset[int | None] = frozenset({0})
SECONDS, MILLISECONDS = clock("s"), clock("ms", whole=True)


def as_it_is(table: Table) -> Table:
    """The table unchanged: the ``prepare`` of a form with content columns that need no conversion."""
    return table


@dataclass(frozen=True, slots=True)
class Form:
    """One format of a trace file with rows and columns.

    Attributes:
        title: Name of the format in messages.
        clocks: Its names of the arrival column, and the clock of each: of numbers, since dates have no unit.
        names: Our name of each column of numbers, and its names in the file.
        content: Columns of prompt contents, by the file's names, and their JSON readers.
        delays: Its names of the time between a turn of a session and the answer before it, and the clock of each; one of the
            same clock as the arrivals has their unit.
        preparer: Returns, for one file, the function that converts ``content`` into our own columns of prompt contents.
        in_order: Whether a row that is earlier than the row above is refused, because the meaning of a row depends on those
            above. Rows of other forms are sorted by arrival.
        subsessions: Whether a session whose name ends with a slash and more is that of a sub-agent of the session named before the slash.
        side_by_side: Whether the rows of one session follow those of another, so that their order says nothing.
        failures: Lengths that mark a failed request, None for a missing one; the rows of failed requests are left out and
            counted.
        at_once: Whether the requests of a file without times arrive at once, as those of a batch.
        remarks: What the reader of an answer has to know of every file of the format, one sentence each.
        block_tokens: Tokens of a full block of ``hash_ids``, for files that do not state it.
    """

    title: str
    clocks: Mapping[str, Clock]
    names: Mapping[str, Sequence[str]] = field(default_factory=lambda: OWN_NAMES)
    content: Mapping[str, Reader] = field(default_factory=lambda: CONTENT)
    delays: Mapping[str, Clock] = field(default_factory=dict)
    preparer: Callable[[], Callable[[Table], Table]] = lambda: as_it_is
    in_order: bool = False
    side_by_side: bool = False
    subsessions: bool = False
    failures: frozenset[int | None] = frozenset()
    at_once: bool = False
    remarks: tuple[str, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def numbers(self) -> list[str]:
        """Columns of the file with numbers or times."""
        return [*(name for names in self.names.values() for name in names), *self.clocks, *self.delays]

    def readers(self, content: bool) -> dict[str, Reader]:
        """JSON readers of the file's keys; with ``content``, also those of the prompt contents."""
        readers = dict.fromkeys(self.numbers, numbers) | dict.fromkeys(self.clocks, moments)
        readers |= dict.fromkeys(self.names.get("ignore_eos", ()), flags)
        return readers | (dict(self.content) if content else {})


def lengths(prompt: str, output: str) -> Mapping[str, Sequence[str]]:
    """Names of a form that has only the two lengths."""
    return {"prompt_tokens": (prompt,), "output_tokens": (output,)}
