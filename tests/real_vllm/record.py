"""Logs of the real vLLM as digests, what it says of lines before it captures its graphs, and the graphs, for tests without it.

cd tests && python -m real_vllm.record      writes recorded.json anew, by the installed vLLM
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.live.step_log import Served

from . import captures
from .drafts import DRAFTED, HYBRIDS, METHODS, PACKED, drawn
from .starts import starts
from .workloads import KINDS, OPTIONS, Case

_FILE = Path(__file__).with_name("recorded.json")
#: Workloads of each kind.
SEEDS = 6
_MODES = ("sync", "async")
NAMES = [f"{kind}/{seed}/{mode}" for kind in KINDS for seed in range(SEEDS) for mode in _MODES]
NAMES += [f"{option}/{kind}/3/{mode}" for option in OPTIONS for kind in KINDS for mode in _MODES]
#: With drafts: over several KV groups, and over all under an option.
_DRAFTS = [f"{kind}/{seed}/{METHODS[seed % 3]}" for kind in HYBRIDS for seed in range(SEEDS)]
_DRAFTS += [f"{kind}/{seed}/{method}" for kind, method in PACKED for seed in range(2)]
_DRAFTS += [f"{option}/{kind}/4/eagle" for option in ("priorities", "intervals", "combined") for kind in DRAFTED]
NAMES += [f"drafts/{each}/{mode}" for each in _DRAFTS for mode in _MODES]


def digest(served: Served) -> str:
    """Digest of every field of every step, and of the order of finishes."""
    log = list(map(tuple, served.steps)), served.finished
    return hashlib.sha256(repr(log).encode()).hexdigest()[:16]


def case_of(name: str) -> tuple[Case, bool]:
    """The workload of a name in ``NAMES``, and whether its steps are scheduled ahead."""
    *options, kind, seed, mode = name.split("/")
    if name.startswith("drafts/"):
        *options, kind, seed, method, mode = name.split("/")[1:]
        return drawn(kind, int(seed), method, options[0] if options else None), mode == "async"
    case = KINDS[kind](int(seed))
    for option in options:
        case = OPTIONS[option](case)
    return case, mode == "async"


def recorded() -> dict[str, str]:
    """The digests of vLLM 0.33.0, by ``NAMES``."""
    found: dict[str, str] = json.loads(_FILE.read_text())["digests"]
    return found


def recorded_starts() -> dict[str, str | None]:
    """What vLLM 0.33.0 says of the lines of ``starts``, by their names."""
    found: dict[str, str | None] = json.loads(_FILE.read_text())["starts"]
    return found


def real_starts() -> dict[str, str | None]:
    """What the installed vLLM says of them."""
    from . import graphs

    return {each.name: graphs.answer(each) for each in starts()}


def captures_digest(found: list[Any]) -> str:
    """Digest of the graphs of drawn settings: their mode and sizes."""
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def recorded_captures() -> dict[str, str]:
    """Digests of the graphs that vLLM 0.33.0 captures, by the seeds of ``captures.drawn``."""
    found: dict[str, str] = json.loads(_FILE.read_text())["captures"]
    return found


def real_captures() -> dict[str, str]:
    """Digests of the graphs that the installed vLLM captures."""
    from .graph_captures import theirs

    return {str(seed): captures_digest(theirs(captures.drawn(seed))) for seed in range(captures.SEEDS)}


def real(names: Iterable[str] = NAMES) -> dict[str, str]:
    """The digests of the installed vLLM."""
    from . import server, speculation

    def served(case: Case, asynchronous: bool) -> Served:
        if "speculative_config" in case.options:
            return speculation.serve(case, asynchronous)[0]
        return server.serve(case, asynchronous)

    return {name: digest(served(*case_of(name))) for name in names}


if __name__ == "__main__":
    from vllm import __version__

    everything = {"vllm": __version__, "digests": real(), "starts": real_starts(), "captures": real_captures()}
    _FILE.write_text(json.dumps(everything, indent=0) + "\n")
