"""Communication between GPUs in a step: all-reduces of tensor parallelism, hops between pipeline stages, exchanges of tokens
between engines that share experts, and of queries and outputs between ranks that divide the tokens of a sequence.

Of the latter, every attention layer has three calls over the decoding rows (``ag_rs``, the default of vLLM's
``dcp_comm_backend``): the queries of the group's heads are gathered, then the logarithms of their softmax sums, of 4 bytes, and
the outputs are added up, each rank getting those of its own heads. In a ring each rank sends what it has, or gets, to all others."""

from __future__ import annotations

from typing import NamedTuple

from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from ..types.ticks import PER_US
from . import shares
from .attention import ELEMENT_BYTES, ticks
from .base import coefficient

#: Of the logarithm of a softmax sum.
_LSE_BYTES = 4
LINK_SOURCE = f"data sheet of the GPU; {shares.LINK_SHARE} of it {shares.ASSUMED}"


class Link(NamedTuple):
    """The slowest link between some GPUs: latency of a call, bandwidth in one direction, and where both come from."""

    latency_us: float
    bytes_per_s: float
    source: str


def link_between(gpu: GpuSpec, gpus: int) -> Link:
    """The slowest link of a ring through ``gpus`` GPUs: the network if they are in several nodes, else NVLink or PCIe."""
    # As data sheets have it, a GPU without NVLink reaches others over PCIe.
    if gpu.nvlink_bytes_per_s == gpu.pcie_bytes_per_s:
        source = f"data sheet of the GPU; {shares.PCIE_SHARE} of its PCIe {shares.ASSUMED}"
        found = Link(shares.PCIE_LATENCY_US, gpu.pcie_bytes_per_s * shares.PCIE_SHARE, source)
    else:
        found = Link(shares.ALL_REDUCE_LATENCY_US, gpu.nvlink_bytes_per_s * shares.LINK_SHARE, LINK_SOURCE)
    if gpus <= shares.GPUS_PER_NODE:
        return found
    source = f"{shares.GPUS_PER_NODE} GPUs a node, and 400 Gbit/s a GPU between nodes, {shares.ASSUMED}"
    return Link(
        shares.NETWORK_LATENCY_US, min(found.bytes_per_s, shares.NETWORK_BYTES_PER_S * shares.LINK_SHARE), source
    )


class Links:
    """Lines in the tokens of a step, compiled to ticks; nothing on one GPU.

    Ranks of an engine come first in a node, then its stages, then further engines.

    Args:
        engines: Engines that share the experts. Each gathers the hidden states of all others before the experts of a layer,
            and gets the sums of its own tokens back (``all2all_backend`` allgather_reducescatter, vLLM's default).
        context_ranks: Ranks that divide the tokens of a sequence.

    Attributes:
        any: Whether there is more than one GPU.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int,
        stages: int,
        engines: int = 1,
        context_ranks: int = 1,
    ) -> None:
        state, gpus = model.hidden_size * ELEMENT_BYTES, tensor_parallel * stages
        # One after every attention or state, one after every MLP: two a layer in most models. A ring sends each rank's
        # share 2 * (ranks - 1) times.
        reduced = model.num_mixers + model.num_mlps if tensor_parallel > 1 else 0
        self._sources: dict[str, str] = {}
        self._all_reduce, self._all_reduce_per_token = self._line(
            "all_reduce",
            link_between(gpu, tensor_parallel),
            reduced,
            2 * (tensor_parallel - 1) * state / tensor_parallel,
        )
        # Hidden states and residual, from each stage to the next; some hops are from node to node.
        far = -(-gpus // shares.GPUS_PER_NODE) - 1 if stages > 1 else 0
        near = self._line(
            "hop", link_between(gpu, 1)._replace(latency_us=shares.HOP_LATENCY_US), stages - 1 - far, 2 * state
        )
        between = self._line("hop", link_between(gpu, gpus), far, 2 * state)
        self._hop, self._hop_per_token = near[0] + between[0], near[1] + between[1]
        exchanges = 2 * len(model.experts.layers) if model.experts and engines > 1 else 0
        self._exchange, self._exchange_per_token = self._line(
            "exchange", link_between(gpu, gpus * engines), exchanges, (engines - 1) * state
        )
        self._context, self._context_per_token = self._line(
            "context",
            link_between(gpu, context_ranks),
            3 * len(model.attention_layers) if context_ranks > 1 else 0,
            _combined_bytes(model, tensor_parallel, context_ranks) / 3,
        )
        self._others = max(1, engines - 1)
        self.any = bool(self._sources)
        self._sources = {"all_reduce": link_between(gpu, tensor_parallel).source} | self._sources

    def _line(self, name: str, link: Link, calls: int, bytes_per_token: float) -> tuple[int, int]:
        """Ticks of so many calls, and of the bytes that they send for a token."""
        if not calls:
            return 0, 0
        self._sources[name] = link.source
        return round(calls * link.latency_us * PER_US), ticks(calls * bytes_per_token, link.bytes_per_s)

    def all_reduce_ticks(self, tokens: int) -> int:
        """All-reduces of all layers over ``tokens`` hidden states."""
        return self._all_reduce + self._all_reduce_per_token * tokens

    def hop_ticks(self, tokens: int) -> int:
        """Handing ``tokens`` hidden states from stage to stage."""
        return self._hop + self._hop_per_token * tokens

    def exchange_ticks(self, received: int) -> int:
        """Sending hidden states to the experts and back; the engine that receives most gets ``received`` from others."""
        return self._exchange + self._exchange_per_token * received // self._others

    def context_ticks(self, decodes: int) -> int:
        """Gathering queries and adding up outputs of ``decodes`` rows, of ranks that divide the tokens of a sequence."""
        return self._context + self._context_per_token * decodes if decodes else 0

    def ticks(self, tokens: int, received: int) -> int:
        """Communication of a step over ``tokens`` tokens, and ``received`` ones of other engines, but for ``context_ticks``."""
        return self.all_reduce_ticks(tokens) + self.hop_ticks(tokens) + self.exchange_ticks(received)

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; all but all-reduces only where there are any."""
        terms: dict[str, object] = {}
        for name, source in self._sources.items():
            terms[name] = coefficient(getattr(self, f"_{name}"), "ticks", shares.ASSUMED)
            terms[f"{name}_per_token"] = coefficient(getattr(self, f"_{name}_per_token"), "ticks", source)
        return terms


def _combined_bytes(model: ModelSpec, tensor_parallel: int, ranks: int) -> int:
    """What a rank sends in one attention layer for a decoding row."""
    if ranks == 1:
        return 0
    heads = model.heads_per_rank(tensor_parallel)
    return (ranks - 1) * (model.attention(tensor_parallel).decode_elements * ELEMENT_BYTES + ranks * heads * _LSE_BYTES)
