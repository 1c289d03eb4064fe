"""Layers with a state of fixed size, from a profile.

Tables have the convolution and the recurrence of gated delta nets with heads of 128 and states in fp32 (Qwen3.5); of the A100 SGLang's, of decodes alone.
Other states, and prompts there, take the data sheet (``roofline.StateCost``), and no less than the shortest calls in the card's tables: two kernels for a step that decodes, and one more
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
from .layer_work import GDN_DIM
from .op_model import OpModel
from .operations import OPERATIONS, OpName
from .roofline import StateCost
from .shares import shares_of

GDN_OPERATIONS: tuple[OpName, OpName] = ("gdn_decode", "gdn_prefill")
#: Convolution and update of the state; convolution, and the kernels of a scan in chunks (``ssd_combined.py``, ``chunk.py`` of vLLM).
_DECODE_KERNELS, _PREFILL_KERNELS = 2, 6


def state_operations(calibration: Calibration, model: ModelSpec) -> dict[OpName, OpModel]:
    """Those of ``GDN_OPERATIONS`` that a profile's tables have for the states of a model."""
    mixer = model.mixer
    if not isinstance(mixer, GatedDelta) or not mixer.key_dim == mixer.value_dim == GDN_DIM:
        return {}
    return {name: calibration.ops[name] for name in GDN_OPERATIONS if name in calibration.ops}


class StateOperations:
    """Microseconds of the states of all layers on one rank.

    Attributes:
        operations: As of ``state_operations``; for others the data sheet stands in.
    """

    def __init__(
        self, calibration: Calibration, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, deployment: Deployment
    ) -> None:
        mixer, self._layers = model.state_mixer(tensor_parallel), len(model.state_layers)
        assert mixer is not None
        self.operations = state_operations(calibration, model)
        self._sheet: StateCost | None = None
        if self.operations and isinstance(mixer, GatedDelta):
            self._heads = mixer.key_heads // tensor_parallel, mixer.value_heads // tensor_parallel
            self._state_bytes = dtype_bits(mixer.state_dtypes("bf16")[1]) / 8
        if len(self.operations) < len(GDN_OPERATIONS):
            share = shares_of(gpu.architecture, gpu.field("architecture"))
            self._sheet = StateCost(model, gpu, tensor_parallel, "bf16", share)
        floor = calibration.ops.get("small_kernel")
        self._floor_us = self._layers * (floor.coefficients.t0_us if floor else 0.0)

    def decode_us(self, batch: int) -> float:
        """Of ``batch`` sequences by a token each."""
        found = self.operations.get("gdn_decode")
        if found is None:
            return self._of_sheet(batch, 0, _DECODE_KERNELS)
        return self._layers * float(found.us(OPERATIONS["gdn_decode"](batch, *self._heads, self._state_bytes)))

    def prefill_us(self, tokens: int, pairs: np.ndarray) -> np.ndarray:
        """Of ``tokens`` prompt tokens, one or more; their pairs say how long a prompt is, as for whole prompts."""
        found = self.operations.get("gdn_prefill")
        if found is None:
            return np.full(pairs.shape, self._of_sheet(0, tokens, _PREFILL_KERNELS))
        length = np.clip(2 * pairs / tokens - 1, 1, tokens)
        return self._layers * found.us(OPERATIONS["gdn_prefill"](tokens, length, *self._heads))

    def describe(self) -> dict[str, object]:
        """Coefficients from the data sheet, see ``StepCost``; none where tables have the states."""
        return {} if self._sheet is None else self._sheet.describe()

    def _of_sheet(self, decodes: int, prompt_tokens: int, kernels: int) -> float:
        assert self._sheet is not None
        return self._sheet.step_ticks(decodes, prompt_tokens) / PER_US + kernels * self._floor_us
