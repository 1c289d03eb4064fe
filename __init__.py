"""fragmeter: every slot of an LLM server's KV cache, accounted for."""

from __future__ import annotations

import importlib

__version__ = "0.2.0"
__all__ = ["__version__", "experiments", "gpu", "reports", "sim", "traces"]


def __getattr__(name: str) -> object:
    # Lazy and absolute: `import fragmeter` stays quick, and pytest may import this file under the
    # name of whatever folder the clone lies in.
    if name in __all__:
        return importlib.import_module(f"fragmeter.{name}")
    raise AttributeError(f"module 'fragmeter' has no attribute {name!r}")
