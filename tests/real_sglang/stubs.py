"""Stand-ins for packages that SGLang imports and its scheduler does not use on a CPU.

``install`` has to come before the first import of ``sglang``. PyTorch decides without them whether it has Triton.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from typing import Any

#: Kernels, other devices and readers of weights.
PACKAGES = frozenset(("IPython", "compressed_tensors", "dill", "gguf", "setproctitle", "torchvision", "triton"))


class _Kind(type):
    """A class that has every attribute, and that leaves a function which it decorates as it is."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Thing,), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__()

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Thing(metaclass=_Kind):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _Package(types.ModuleType):
    __path__: list[str] = []
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Thing,), {})

    @staticmethod
    def dumps(*args: Any, **kwargs: Any) -> bytes:
        """Of ``dill``."""
        return b""


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Make the packages importable, and nothing compiled or pinned."""
    import torch
    import torch._inductor.select_algorithm

    torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor
    torch.compile = lambda function=None, **_: function if function is not None else lambda each: each
    sys.meta_path.insert(0, _Finder())
