"""Step time in the rate sweeps, before the fitted scale of each model.

The paper measured the steps of OPT-13B alone: 25.7 ms + 0.42 ms a sequence + 0.047 ms a prompt token; the reading of
keys and values is a part of the 0.42 ms that grows with the context (``ContextCost``). For OPT-66B and OPT-175B, on
four and eight GPUs, each of the three numbers is multiplied by the roofline's ratio between the two servers,
all-reduces included. FasterTransformer runs fused kernels without Python between its steps: its base is the roofline
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ....sim.cost import PaperCost, StepCost, cost
from ....sim.cost.paper import MS_PER_DECODE, MS_PER_PREFILL_TOKEN, STEP_MS
from ....sim.spec import gpu, model
from ..context_cost import ContextCost, Server
from ..published import usual_length

_MEASURED = ("opt-13b", "a100-40gb", 1)
#: Sequences and prompt tokens over which the roofline's slopes are taken.
_SEQUENCES, _PROMPTS = (1, 64), (1024, 2048)


@dataclass(frozen=True)
class Steps:
    """The step time of a system.

    Attributes:
        model, gpu, tensor_parallel: The server.
        roofline: Take the roofline itself, in place of the paper's step.
        sequence_slope: Share of the time per sequence, without the reading of its keys and values, that each sequence
            of a load takes.
    """

    model: str = "opt-13b"
    gpu: str = "a100-40gb"
    tensor_parallel: int = 1
    roofline: bool = False
    sequence_slope: float = 1.0

    def cost(self) -> StepCost:
        """The cost, at scale 1."""
        if self.roofline:
            return _roofline(self.model, self.gpu, self.tensor_parallel)
        step, decode, prefill = self.ratios()
        return ContextCost(
            server=Server(self.model, self.gpu, self.tensor_parallel),
            step_ms=step * STEP_MS,
            ms_per_decode=decode * MS_PER_DECODE,
            ms_per_prefill_token=prefill * MS_PER_PREFILL_TOKEN,
            sequence_slope=self.sequence_slope,
        )

    def ratios(self) -> tuple[float, float, float]:
        """Factors on the paper's step, its time per sequence and its time per prompt token."""
        own = _slopes(self.model, self.gpu, self.tensor_parallel)
        if PaperCost.fits(model(self.model), gpu(self.gpu), self.tensor_parallel):
            return 1.0, 1.0, 1.0
        step, decode, prefill = (mine / measured for mine, measured in zip(own, _slopes(*_MEASURED), strict=True))
        return step, decode, prefill


def _roofline(model_name: str, gpu_name: str, tensor_parallel: int) -> StepCost:
    return cost("roofline", model(model_name), gpu(gpu_name), tensor_parallel)


@cache
def _slopes(model_name: str, gpu_name: str, tensor_parallel: int) -> tuple[float, float, float]:
    """Ticks of the roofline: the shortest step, one more sequence of the usual length, one more prompt token."""
    ticks = _roofline(model_name, gpu_name, tensor_parallel).step_ticks
    few, many = (ticks(batch, batch * usual_length(), 0, 0) for batch in _SEQUENCES)
    short, long = (ticks(0, 0, tokens, 0) for tokens in _PROMPTS)
    a_sequence, a_token = (many - few) / (_SEQUENCES[1] - _SEQUENCES[0]), (long - short) / (_PROMPTS[1] - _PROMPTS[0])
    return ticks(1, 1, 0, 0), a_sequence, a_token
