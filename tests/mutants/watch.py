"""A plugin of pytest for the tests beside a mutant: they import the mutant, and none goes on for ever.

Both limits are of the processor's time and not of the clock, so that they do not depend on what else the machine does.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

#: Processor seconds of a test, several times what the longest takes; bytes of the address space.
_SECONDS, _BYTES = 30, 16 << 30
#: Exit statuses: a test took too long; the tests did not import the mutant.
TOO_LONG, NOT_IMPORTED = 77, 78
#: Names the mutated file, and the module.
FILE, MODULE = "FRAGMETER_MUTANT_FILE", "FRAGMETER_MUTANT_MODULE"


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    # What fails need not be made small.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    for name in ("machines", "fragmeter"):
        profile = hypothesis.settings.get_profile(name)
        hypothesis.settings.register_profile(name, profile, phases=phases)
    hypothesis.settings.load_profile("fragmeter")
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, lambda *_: os._exit(TOO_LONG))


def pytest_runtest_logstart() -> None:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    module = sys.modules.get(os.environ[MODULE])
    if module is not None and Path(str(module.__file__)) != Path(os.environ[FILE]):
        os._exit(NOT_IMPORTED)
