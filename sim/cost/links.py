"""Communication between GPUs in a step: all-reduces of tensor parallelism, hops between pipeline stages, and exchanges of
tokens between engines that share experts."""

from __future__ import annotations

from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from ..types.ticks import PER_US
from . import shares
from .attention import ELEMENT_BYTES, ticks
from .base import coefficient

LINK_SOURCE = f"data sheet of the GPU; {shares.LINK_SHARE} of it {shares.ASSUMED}"


class Links:
    """Lines in the tokens of a step, compiled to ticks; nothing on one GPU.

    Args:
        engines: Engines that share the experts. Each gathers the hidden states of all others before the experts of a layer,
            and gets the sums of its own tokens back (``all2all_backend`` allgather_reducescatter, vLLM's default). All
            are assumed to send as many tokens.

    Attributes:
        any: Whether there is more than one GPU.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, stages: int, engines: int = 1) -> None:
        # One after every attention or state, one after every MLP: two a layer in most models.
        reduced, self._stages = model.num_mixers + model.num_mlps, stages
        # As data sheets have it, a GPU without NVLink reaches others over PCIe.
        by_pcie = gpu.nvlink_bytes_per_s == gpu.pcie_bytes_per_s
        link = gpu.nvlink_bytes_per_s * (shares.PCIE_SHARE if by_pcie else shares.LINK_SHARE)
        self._source = (
            f"data sheet of the GPU; {shares.PCIE_SHARE} of its PCIe {shares.ASSUMED}" if by_pcie else LINK_SOURCE
        )
        # A ring sends each rank's share 2 * (ranks - 1) times.
        sent = reduced * 2 * (tensor_parallel - 1) * model.hidden_size * ELEMENT_BYTES / tensor_parallel
        latency = shares.PCIE_LATENCY_US if by_pcie else shares.ALL_REDUCE_LATENCY_US
        self._all_reduce = round(reduced * latency * PER_US) if tensor_parallel > 1 else 0
        self._all_reduce_per_token = ticks(sent, link)
        # Hidden states and residual, from each stage to the next.
        hops = stages - 1
        self._hop = round(hops * shares.HOP_LATENCY_US * PER_US)
        self._hop_per_token = ticks(hops * 2 * model.hidden_size * ELEMENT_BYTES, link)
        exchanges = 2 * len(model.experts.layers) if model.experts and engines > 1 else 0
        self._exchange = round(exchanges * latency * PER_US)
        self._exchange_per_token = ticks(exchanges * (engines - 1) * model.hidden_size * ELEMENT_BYTES, link)
        self.any = tensor_parallel > 1 or stages > 1 or exchanges > 0

    def all_reduce_ticks(self, tokens: int) -> int:
        """All-reduces of all layers over ``tokens`` hidden states."""
        return self._all_reduce + self._all_reduce_per_token * tokens

    def hop_ticks(self, tokens: int) -> int:
        """Handing ``tokens`` hidden states from stage to stage."""
        return self._hop + self._hop_per_token * tokens

    def exchange_ticks(self, tokens: int) -> int:
        """Sending ``tokens`` hidden states of each engine to the experts and back."""
        return self._exchange + self._exchange_per_token * tokens

    def ticks(self, tokens: int) -> int:
        """All communication of a step over ``tokens`` tokens."""
        return self.all_reduce_ticks(tokens) + self.hop_ticks(tokens) + self.exchange_ticks(tokens)

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; hops only where there are any."""
        terms = {"all_reduce": shares.ASSUMED, "all_reduce_per_token": self._source}
        if self._stages > 1:
            terms |= {"hop": shares.ASSUMED, "hop_per_token": self._source}
        if self._exchange:
            terms |= {"exchange": shares.ASSUMED, "exchange_per_token": self._source}
        return {term: coefficient(getattr(self, f"_{term}"), "ticks", source) for term, source in terms.items()}
