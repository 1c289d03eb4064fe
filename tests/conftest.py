"""What every test module needs: helpers by name, and property tests that draw the same cases each time."""

from __future__ import annotations

import gc
import os
import signal
import sys
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cyclopts
import hypothesis
import pytest

# importlib mode puts no folder of tests on the path.
# The first, `..`, ends up last: of it only `tools` is imported.
for _folder in ("..", "", "helpers", "fuzz"):
    sys.path.insert(0, str((Path(__file__).parent / _folder).resolve()))

# Other cores have other tests to run, and workers take longer to start than most of what tests ask of them.
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")
# Tests download no models.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts the tests in the background has them ignore Ctrl-C, and the programs that they interrupt would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No time limit an example: the machines that run this differ.
hypothesis.settings.register_profile("fragmeter", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fragmeter")
# Sequences of operations, of up to twenty each.
hypothesis.settings.register_profile("machines", max_examples=30, stateful_step_count=20)
hypothesis.settings.register_profile("machines-in-full", max_examples=20_000, stateful_step_count=20)


#: Files that take longest. They begin first, so that no worker has one of them alone at the end.
_LONGEST = [
    "package/test_docs.py", "experiments/cli/test_declared_bounds.py", "sim/engine/test_leaps.py", "real_vllm/test_recorded.py",
    "reports/test_story_player.py", "reports/test_browser.py", "sim/engine/test_core.py", "experiments/cli/test_reproduce.py",
    "reports/test_run.py", "sim/config/test_unread_settings.py", "experiments/cli/test_machine_states.py", "package/test_distributions.py",
    "experiments/capacity/test_plan_command.py", "experiments/capacity/test_fitting.py", "of_tools/kernels/test_compile_gate.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the Makefile asks xdist to keep the order of files."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: places.get(item.path.relative_to(root).as_posix(), len(places)))


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: collections of garbage need not look through these half a million objects."""
    gc.collect()
    gc.freeze()


_assemble = cyclopts.App.assemble_argument_collection
_assembled: dict[tuple[int, bool], Any] = {}


def _assemble_once(app: cyclopts.App, *, parse_docstring: bool = False, **others: Any) -> Any:
    """The flags of a command, which take longer to assemble than most of what tests ask of a command: copies of the first ones."""
    key = id(app), parse_docstring
    if others or key not in _assembled:
        found = _assemble(app, parse_docstring=parse_docstring, **others)
        if others:
            return found
        # The command stays alive, so that no other one has its id.
        _assembled[key] = app, found
    first = _assembled[key][1]
    copies = {id(argument): copy(argument) for argument in first}
    for argument in copies.values():
        argument.tokens = []
        argument.children = type(first)(copies[id(child)] for child in argument.children)
    return type(first)(copies.values())


cyclopts.App.assemble_argument_collection = _assemble_once


@pytest.fixture
def small_caches(monkeypatch):
    """Buffers of timed calls are three times as large as the processor's last cache, which has hundreds of MB on large servers. Where
    no measured time is judged, 3 MB are enough."""
    if find_spec("torch"):
        monkeypatch.setattr("fragmeter.gpu.devices.timing._last_cache_bytes", lambda: 1 << 20)


@pytest.fixture
def brief_drift(monkeypatch):
    """Drift is looked for between the runs of a validation, five times a call. Where no measured time is judged, once is enough."""
    if find_spec("torch"):
        from fragmeter.gpu.validate import drift

        monkeypatch.setattr(drift, "AGAIN", replace(drift.AGAIN, rounds=1))
