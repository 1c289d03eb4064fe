"""Logs of the real SGLang as digests, for tests without it.

cd tests && python -m real_sglang.record      writes recorded.json and recorded_models.json anew, by the installed SGLang
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from .steps import Served
from .workloads import KINDS, Case, or_nothing

_FILE, _MODELS = (Path(__file__).with_name(f"{name}.json") for name in ("recorded", "recorded_models"))
#: Workloads of each kind.
SEEDS = 12
NAMES = [f"{kind}/{seed}{way}" for kind in KINDS for seed in range(SEEDS) for way in ("", "/overlap")]


def digest(served: Served) -> str:
    """Digest of every field of every step, and of the finishes; the last field only where the host has a second pool."""
    last = any(step.beside_host_free for step in served.steps)
    log = [tuple(step if last else step[:-1]) for step in served.steps], served.finished
    return hashlib.sha256(repr(log).encode()).hexdigest()[:16]


def case_of(name: str) -> Case:
    """The workload of a name in ``NAMES``."""
    kind, seed, *overlap = name.split("/")
    return replace(KINDS[kind](int(seed)), overlaps=bool(overlap))


def recorded() -> dict[str, str]:
    """The digests of SGLang 0.5.23, by ``NAMES``."""
    found: dict[str, str] = json.loads(_FILE.read_text())["digests"]
    return found


def recorded_defaults() -> dict[str, list[float]]:
    """What SGLang 0.5.23 takes on each card, by ``cards.ours``."""
    found: dict[str, list[float]] = json.loads(_FILE.read_text())["defaults"]
    return found


def recorded_models() -> dict[str, list[float]]:
    """The same of each preset, by ``cards.ours_of_models``."""
    found: dict[str, list[float]] = json.loads(_MODELS.read_text())
    return found


def real() -> dict[str, str]:
    """The digests of the installed SGLang."""
    from . import server

    errors = AssertionError, RuntimeError
    return {name: digest(or_nothing(server.serve, case_of(name), *errors)) for name in NAMES}


if __name__ == "__main__":
    from importlib.metadata import version

    from .resolution import defaults, of_models

    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in of_models().items())
    _MODELS.write_text(f"{{\n{lines}\n}}\n")
    texts = [f'"sglang": "{version("sglang")}"', f'"digests": {json.dumps(real(), indent=0)}']
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in defaults().items())
    _FILE.write_text("{\n" + ",\n".join([*texts, f'"defaults": {{\n{rows}\n}}']) + "\n}\n")
