"""fragmeter: every slot of an LLM server's KV cache, accounted for."""

from __future__ import annotations

import importlib
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # In a checkout that pip did not install: it would have refused. One line, as of every program here.
    this = ".".join(map(str, sys.version_info[:2]))
    remedy = "pip install uv && uv venv --python 3.12 .venv && uv pip install -e . (docs/on-a-gpu.md has CUDA's)"
    print(f"fragmeter: needs Python 3.11 or later, and this is {this}: {remedy}", file=sys.stderr)
    sys.exit(2)

__version__ = "0.2.0"
__all__ = [
    "Simulation",
    "UserError",
    "__version__",
    "experiments",
    "gpu",
    "reports",
    "sim",
    "simulate",
    "traces",
    "waste_bars",
]
#: Where the names are that are no folders.
_MODULES = {
    "Simulation": "experiments.api.simulation",
    "UserError": "sim.types.errors",
    "simulate": "experiments.api.simulation",
    "waste_bars": "experiments.api.simulation",
}


def __getattr__(name: str) -> object:
    # Lazy: `import fragmeter` stays quick.
    if name in _MODULES:
        return getattr(importlib.import_module(f"fragmeter.{_MODULES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"fragmeter.{name}")
    raise AttributeError(f"module 'fragmeter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
