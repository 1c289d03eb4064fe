"""Most bytes of tensors that are alive at once while PyTorch code runs, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations have made and that are still alive, after each operation.

    Attributes:
        peak: The most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return made
