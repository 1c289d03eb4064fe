"""Words that the project does not use, by file and line, with a limit on each that may only fall.

Usage: python tests/helpers/words.py [--list [WORD ...] | --write]

Without arguments: exits with status 1 when a word occurs more often in the repository than ``words.json`` beside this
file allows, and prints each line of the files in which it became more. ``--list`` prints every line, of these words
or of all. ``--write`` lowers the limits to what there is; it raises none.

Read are the tracked ``.py`` files, names and strings included, and the prose of the ``.md`` files. A word ends at an
underscore: ``told`` is found in ``is_told``, and not in ``untold``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from paths import ROOT

LIMITS = Path(__file__).with_suffix(".json")
#: Files about the words themselves.
_EXEMPT = ("CHANGELOG.md", "tests/helpers/words.py", "tests/package/test_words.py")

#: What is found, by name; a pattern stands between two characters that are no letters. Letters match either case,
#: unless the pattern says ``(?-i:...)``.
WORDS = {
    # People, where a sequence, a request or a policy is meant: name it.
    "who": "who",
    "whoever": "whoever",
    "whom": "whom",
    "whose": "whose",
    "nobody": "nobody",
    "somebody": "somebody",
    "everybody": "everybody",
    "anybody": "anybody",
    # Names of one meaning each: format_*, max_tokens, as_dict, notify.
    "told": "told",
    # run log; residency; max_num_seqs.
    "book": "books?",
    "stay": r"(?:a|an|the|each|every|of|its|their|one|no|per|two) stays?|stays?(?=_|\.parquet)|(?<=[_.])stays?|(?-i:Stay|STAY)",
    "seats": "seats?",
    # swap_in, preempt, advance, release, continue_prefill.
    "take_back": "take_back",
    "push_out": "push_out",
    "pass_steps": "pass_steps",
    "let_go": "let_go",
    "go_on": "go_on",
    # pass, fail, not testable; slo_check.
    "verdict": "verdicts?",
    "holds": r"(?-i:DOES NOT HOLD|HOLDS(?: ONLY)?)|(?<=\*\*)(?:holds(?: only)?|does not hold)|(?<=\")(?:holds(?: only)?|does not hold)(?=\")",
    # Sensitivity; grows.
    "hangs on": r"(?:hangs?|hung)\s+on",
    "ripens": "ripen(?:s|ed|ing)?",
}
_FOUND = re.compile(
    "(?<![A-Za-z])(?:"
    + "|".join(f"(?P<w{place}>{pattern})" for place, pattern in enumerate(WORDS.values()))
    + ")(?![A-Za-z])",
    re.IGNORECASE,
)
#: What every word contains, in lower case.
_CORES = (
    *("who", "body", "told", "book", "stay", "seat", "verdict", "hold", "hang", "hung", "ripen"),
    *("take_back", "push_out", "pass_steps", "let_go", "go_on"),
)
_NAMES = {f"w{place}": name for place, name in enumerate(WORDS)}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

#: File, line, word.
Hit = tuple[str, int, str]


def hits_in(name: str, text: str) -> list[Hit]:
    """The words of one file, in its order. Fenced blocks of a page are left out: they show code and its output."""
    if name.endswith(".md"):
        text = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    found, line, before = [], 1, 0
    for start, end in _lines_with(text):
        line += text.count("\n", before, start)
        before = start
        # Two words may stand on both sides of a line's end.
        for hit in _FOUND.finditer(text, start, end + 40):
            if hit.start() < end:
                found.append((name, line, _NAMES[hit.lastgroup]))
    return found


def _lines_with(text: str) -> list[tuple[int, int]]:
    """Starts and ends of the lines that a word may be in: plain searches, as patterns take ten times as long."""
    lowered, spans = text.lower(), {}
    for core in _CORES:
        place = lowered.find(core)
        while place >= 0:
            end = lowered.find("\n", place)
            end = len(lowered) if end < 0 else end
            spans[lowered.rfind("\n", 0, place) + 1] = end
            place = lowered.find(core, end)
    return sorted(spans.items())


def tracked(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Names and texts of the files that are read."""
    command = ["git", "ls-files", "-z", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if name not in _EXEMPT and (root / name).is_file():
            yield name, (root / name).read_text("utf-8")


def counted(hits: Iterable[Hit]) -> dict[str, dict[str, int]]:
    """How often each word occurs in each file, sorted by file and word."""
    counts: dict[str, Counter[str]] = {}
    for name, _, word in hits:
        counts.setdefault(name, Counter())[word] += 1
    return {name: dict(sorted(words.items())) for name, words in sorted(counts.items())}


def totals(counts: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    """How often each word occurs in all files."""
    return sum((Counter(words) for words in counts.values()), Counter())


def risen(hits: Sequence[Hit], limits: Mapping[str, Mapping[str, int]]) -> list[Hit]:
    """Hits of the words that occur more often than their limits, in the files that have more of them than before.

    Limits are those of the repository: a line may move to another file.
    """
    now, allowed = totals(counts := counted(hits)), totals(limits)
    return [
        hit
        for hit in hits
        for name, _, word in [hit]
        if now[word] > allowed[word] and counts[name][word] > limits.get(name, {}).get(word, 0)
    ]


def lines(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Limits as JSON, a line a file."""
    rows = [f"  {json.dumps(name)}: {json.dumps(words)}" for name, words in counts.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n" if rows else "{}\n"


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    hits = [hit for name, text in tracked() for hit in hits_in(name, text)]
    if arguments[:1] == ["--list"]:
        shown = [hit for hit in hits if not arguments[1:] or hit[2] in arguments[1:]]
        print(*(f"{name}:{line}: {word}" for name, line, word in shown), sep="\n")
        return 0
    limits = json.loads(LIMITS.read_text("utf-8"))
    more = risen(hits, limits)
    for name, line, word in more:
        print(f"{name}:{line}: {word}")
    now, allowed = totals(counted(hits)), totals(limits)
    for word in sorted({word for *_, word in more}):
        print(f"{word}: {now[word]}, at most {allowed[word]}")
    if not more and arguments == ["--write"]:
        LIMITS.write_text(lines(counted(hits)), "utf-8")
    print(f"words: {now.total():,} to replace, at most {allowed.total():,}")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
