"""Help in two tiers: ``--help`` has the flags that most use, each with the first sentence on it; ``--help-all`` has every flag.

Verbs with few flags show all of them. A flag that is not in ``MOST_USED`` works as before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel, InlineText
from rich.console import Console, ConsoleOptions

HELP_ALL = "--help-all"
#: Verbs with a second tier; all flags of any other fit on a screen or two.
TIERED = ("reproduce", "simulate", "sweep", "compare", "explore", "plan", "diagnose", "validate")
#: The flags of the first tier, in whichever verbs have them.
MOST_USED = {
    # What serves.
    "--policy", "--model", "--gpu", "--serve", "--tensor-parallel-size", "--max-num-seqs",
    "--num-gpu-blocks-override", "--num-replicas", "--router",
    # The load.
    "--trace", "--input-len", "--output-len", "--num-prompts", "--request-rate",
    # What is asked.
    "--goodput", "--loads", "--confidence", "--attainment", "--prices", "--explain", "--grid", "--vary", "--set", "--against",
    "--metrics", "--startup-log", "--bench", "--plan", "--device", "--measured", "--deploy",
    # What comes out.
    "--out", "--json", "--record-blocks", "--jobs",
}  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[\w)\]`]\.) (?=[A-Za-z])")


class TieredHelp(DefaultFormatter):
    """Shows the tier of a command's help that the words of its line ask for."""

    def __init__(self, tokens: Sequence[str]) -> None:
        super().__init__()
        is_whole = HELP_ALL in tokens
        self._verb = None if is_whole else next((token for token in tokens if token in TIERED), None)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        console.print(description)
        if self._verb is not None:
            console.print(f"The flags that most use; fragmeter {self._verb} {HELP_ALL} has every flag in full.\n")

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if self._verb is not None:
            panel = panel.copy(entries=[_shortened(each) for each in panel.entries if _is_first(each)])
        if panel.entries:
            super().__call__(console, options, panel)


def _is_first(entry: HelpEntry) -> bool:
    """Whether an entry is in the first tier: a flag that most use, or an argument without a flag."""
    return not entry.positive_names or not MOST_USED.isdisjoint(entry.positive_names)


def _shortened(entry: HelpEntry) -> HelpEntry:
    """The entry with its first spelling and the first sentence of its description."""
    text = entry.description
    if isinstance(text, InlineText) and (markup := getattr(text.primary_renderable, "markup", "")):
        text = InlineText.from_format(_SENTENCE_END.split(markup)[0], "markdown")
    return entry.copy(
        positive_names=entry.positive_names[:1], negative_names=(), positional_label=None, description=text
    )
