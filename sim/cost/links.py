"""Communication between GPUs in a step: all-reduces of tensor parallelism, hops between pipeline stages."""

from __future__ import annotations

from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from ..types.ticks import PER_US
from . import shares
from .attention import ELEMENT_BYTES, ticks
from .base import coefficient

LINK_SOURCE = f"data sheet of the GPU; {shares.LINK_SHARE} of it {shares.ASSUMED}"


class Links:
    """Lines in the tokens of a step, compiled to ticks; nothing on one GPU."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, stages: int) -> None:
        # One after every attention or state, one after every MLP: two a layer in most models.
        reduced, self._stages = model.num_mixers + model.num_mlps, stages
        link = gpu.nvlink_bytes_per_s * shares.LINK_SHARE
        # A ring sends each rank's share 2 * (ranks - 1) times.
        sent = reduced * 2 * (tensor_parallel - 1) * model.hidden_size * ELEMENT_BYTES / tensor_parallel
        latency = shares.ALL_REDUCE_LATENCY_US if tensor_parallel > 1 else 0
        self._all_reduce = round(reduced * latency * PER_US)
        self._all_reduce_per_token = ticks(sent, link)
        # Hidden states and residual, from each stage to the next.
        hops = stages - 1
        self._hop = round(hops * shares.HOP_LATENCY_US * PER_US)
        self._hop_per_token = ticks(hops * 2 * model.hidden_size * ELEMENT_BYTES, link)

    def all_reduce_ticks(self, tokens: int) -> int:
        """All-reduces of all layers over ``tokens`` hidden states."""
        return self._all_reduce + self._all_reduce_per_token * tokens

    def hop_ticks(self, tokens: int) -> int:
        """Handing ``tokens`` hidden states from stage to stage."""
        return self._hop + self._hop_per_token * tokens

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; hops only where there are any."""
        terms = {"all_reduce": shares.ASSUMED, "all_reduce_per_token": LINK_SOURCE}
        if self._stages > 1:
            terms |= {"hop": shares.ASSUMED, "hop_per_token": LINK_SOURCE}
        return {term: coefficient(getattr(self, f"_{term}"), "ticks", source) for term, source in terms.items()}
