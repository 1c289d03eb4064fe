"""Logs of the real llama-server as digests, for tests without it.

cd tests && python -m real_llama_cpp.record     writes recorded.json anew, by the llama-server in FRAGMETER_LLAMA_CPP
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .served import Served
from .workloads import KINDS

_FILE = Path(__file__).with_name("recorded.json")
#: Loads of each kind.
SEEDS = 12
NAMES = [f"{kind}/{seed}" for kind in KINDS for seed in range(SEEDS)]


def digest(served: Served) -> str:
    """Digest of every step and answer."""
    log = served.steps, list(map(tuple, served.answers)), served.purged, served.exceeded
    return hashlib.sha256(repr(log).encode()).hexdigest()[:16]


def recorded() -> dict[str, str]:
    """The digests of llama-server at 0c1e57098, by ``NAMES``."""
    found: dict[str, str] = json.loads(_FILE.read_text())["digests"]
    return found


def real() -> dict[str, str]:
    """The digests of the llama-server in ``FRAGMETER_LLAMA_CPP``."""
    from . import server

    cases = (KINDS[name.partition("/")[0]](int(name.partition("/")[2])) for name in NAMES)
    return {case.name: digest(server.serve(case)) for case in cases}


if __name__ == "__main__":
    _FILE.write_text(json.dumps({"llama.cpp": "0c1e57098", "digests": real()}, indent=0) + "\n")
