"""Print the lowest version that setup.cfg declares of each package, as constraints for pip.

Usage: python3 tests/helpers/lowest_bounds.py > constraints.txt
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable

from paths import ROOT

_LOWER_BOUND = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<version>[\w.]+)")


def requirements() -> list[str]:
    """Requirements of the core and of every extra, as setup.cfg writes them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lists = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    return [line for text in lists for line in text.split("\n") if line]


def lowest(requirements: Iterable[str]) -> list[str]:
    """``name==version`` for each distinct lower bound, sorted; requirements without one, as ``==13.*``, are left out."""
    bounds = filter(None, map(_LOWER_BOUND.fullmatch, requirements))
    return sorted({f"{bound['name']}=={bound['version']}" for bound in bounds})


if __name__ == "__main__":
    print(*lowest(requirements()), sep="\n")
