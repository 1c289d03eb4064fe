"""Layers with a state of fixed size, from a profile.

Tables have the convolution and the recurrence of gated delta nets with heads of 128 and states in fp32 (Qwen3.5). Other states take the
data sheet (``roofline.StateCost``), and no less than the shortest calls in the card's tables: two kernels for a step that decodes, and one more
for each product of the scan in a prefill.
"""

from __future__ import annotations

import numpy as np

from ..spec.deployment import Deployment, dtype_bits
from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from ..spec.states import GatedDelta
from ..types.ticks import PER_US
from .calibration import Calibration
from .operations import GDN_DIM, OPERATIONS, OpModel, OpName
from .roofline import StateCost
from .shares import shares_of

GDN_OPERATIONS: tuple[OpName, OpName] = ("gdn_decode", "gdn_prefill")
#: Convolution and update of the state; convolution, and the kernels of a scan in chunks (``ssd_combined.py``, ``chunk.py`` of vLLM).
_DECODE_KERNELS, _PREFILL_KERNELS = 2, 6


def has_table(calibration: Calibration, model: ModelSpec) -> bool:
    """Whether a profile's tables have the states of a model."""
    mixer = model.mixer
    widths = isinstance(mixer, GatedDelta) and mixer.key_dim == mixer.value_dim == GDN_DIM
    return widths and all(name in calibration.ops for name in GDN_OPERATIONS)


class StateOperations:
    """Microseconds of the states of all layers on one rank.

    Attributes:
        operations: Those of the tables; empty where the data sheet stands in.
    """

    def __init__(
        self, calibration: Calibration, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, deployment: Deployment
    ) -> None:
        mixer, self._layers = model.state_mixer(tensor_parallel), len(model.state_layers)
        assert mixer is not None
        self.operations: dict[OpName, OpModel] = {}
        self._sheet: StateCost | None = None
        if isinstance(mixer, GatedDelta) and has_table(calibration, model):
            self.operations = {name: calibration.ops[name] for name in GDN_OPERATIONS}
            self._heads = mixer.key_heads // tensor_parallel, mixer.value_heads // tensor_parallel
            self._state_bytes = dtype_bits(mixer.state_dtypes("bf16")[1]) / 8
        else:
            share = shares_of(gpu.architecture, gpu.field("architecture"))
            self._sheet = StateCost(model, gpu, tensor_parallel, "bf16", share)
        floor = calibration.ops.get("small_kernel")
        self._floor_us = self._layers * (floor.coefficients.t0_us if floor else 0.0)

    def decode_us(self, batch: int) -> float:
        """Of ``batch`` sequences by a token each."""
        if self._sheet is not None:
            return self._of_sheet(self._sheet.step_ticks(batch, 0), _DECODE_KERNELS)
        work = OPERATIONS["gdn_decode"](batch, *self._heads, self._state_bytes)
        return self._layers * float(self.operations["gdn_decode"].us(work))

    def prefill_us(self, tokens: int, pairs: np.ndarray) -> np.ndarray:
        """Of ``tokens`` prompt tokens, one or more; their pairs say how long a prompt is, as for whole prompts."""
        if self._sheet is not None:
            return np.full(pairs.shape, self._of_sheet(self._sheet.step_ticks(0, tokens), _PREFILL_KERNELS))
        length = np.clip(2 * pairs / tokens - 1, 1, tokens)
        work = OPERATIONS["gdn_prefill"](tokens, length, *self._heads)
        return self._layers * self.operations["gdn_prefill"].us(work)

    def describe(self) -> dict[str, object]:
        """Coefficients from the data sheet, see ``StepCost``; none where tables have the states."""
        return {} if self._sheet is None else self._sheet.describe()

    def _of_sheet(self, ticks: int, kernels: int) -> float:
        return ticks / PER_US + kernels * self._floor_us
