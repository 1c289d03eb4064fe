"""The draw: some mutants of all, by a seed.

Each mutant has a number, a hash of the seed and of its key, and those with the lowest numbers are drawn. An edit of the code so
changes the draw only where it adds or removes a mutant with a low number.
"""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path

from paths import ROOT

from .operators import Mutant, mutants

#: What is mutated: folders of modules, but for those that only make texts and pages.
MUTATED = ("experiments/capacity", "sim/memory/accounting", "sim/memory/paged", "sim/memory/prefix", "sim/runs")
TEXTS = ("text.py", "page.py", "day_text.py")
#: The draw of the tests. Another seed by hand says whether the tests were fitted to it.
SEED, COUNT = 49, 60
#: Mutants that change no result, by key, with the reason.
EQUIVALENT: dict[str, str] = json.loads((Path(__file__).parent / "equivalent.json").read_text())


@cache
def all_mutants() -> list[Mutant]:
    """The mutants of all modules of ``MUTATED``."""
    paths = [path for folder in MUTATED for path in sorted((ROOT / folder).glob("*.py")) if path.name not in TEXTS]
    return [mutant for path in paths for mutant in mutants(path.relative_to(ROOT).as_posix(), path.read_text())]


def drawn(seed: int, every: list[Mutant], count: int = COUNT) -> list[Mutant]:
    """So many of the mutants, in the order of their numbers; those that are listed as equivalent are among them."""
    return sorted(every, key=lambda mutant: sha256(f"{seed} {mutant.key}".encode()).digest())[:count]
