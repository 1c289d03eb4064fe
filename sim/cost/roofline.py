"""The step time of any model on any GPU of the data sheets: a roofline with published shares."""

from __future__ import annotations

from functools import partial

from ..errors import SettingError
from ..spec.gpu import GpuSpec
from ..spec.pool import block_bytes
from ..spec.shape import ModelSpec
from ..ticks import PER_SECOND, PER_US
from . import shares
from .base import coefficient
from .envelope import Segment, upper_envelope
from .shares import SHARES

ELEMENT_BYTES = 2


class RooflineCost:
    """Every term of a step is one line, or the larger of a line by bytes and a line by flops.

    Per rank of a tensor-parallel group: GEMMs over all tokens of the step, the output head over the
    decoding rows (the one row a prompt adds is left out), attention over the context, the KV write,
    all-reduces, launches and the host. Terms add up: nothing overlaps.

    Args:
        dtype: Of weights, activations and KV; fp16 or bf16, for which the flops hold.
        block_size: Slots of a block, for the swaps.
    """

    name = "roofline"

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int = 1, dtype: str = "fp16", block_size: int = 16
    ) -> None:
        if dtype not in ("fp16", "bf16"):
            raise SettingError("dtype", dtype, "one of fp16, bf16: the flops of the data sheets hold for these")
        self.model, self.gpu, self.tensor_parallel = model, gpu, tensor_parallel
        self._lines: dict[int, list[Segment]] = {}
        share = SHARES[gpu.architecture]
        self._compile_gemms(share)
        self._compile_attention(share)
        self._compile_communication()
        self._compile_swaps(block_bytes(model, tensor_parallel, block_size, dtype))

    def _compile_gemms(self, share: shares.Shares) -> None:
        read = partial(_ticks, per_second=self.gpu.memory_bytes_per_s * share.gemm_bandwidth)
        compute = partial(_ticks, per_second=self.gpu.fp16_flops_per_s * share.gemm_flops)
        model, ranks = self.model, self.tensor_parallel
        params = model.num_layers * model.layer_matrix_params(ranks)
        head = model.head_params(ranks)
        self._gemm_read = read(params * ELEMENT_BYTES)
        self._gemm_read_per_token = read(self._gemm_activations() * ELEMENT_BYTES)
        self._gemm_flops_per_token = compute(2 * params)
        self._head_read = read(head * ELEMENT_BYTES)
        self._head_read_per_row = read((model.hidden_size + model.vocab_size // ranks) * ELEMENT_BYTES)
        self._head_flops_per_row = compute(2 * head)
        self._kv_write_per_token = read(model.slot_bytes("fp16", ranks))

    def _gemm_activations(self) -> int:
        """Elements that the GEMMs of all layers read and write for one token."""
        model, ranks = self.model, self.tensor_parallel
        query = model.heads_per_rank(ranks) * model.head_dim
        kv = model.kv_heads_per_rank(ranks) * model.head_dim
        mlp = model.mlp_matrices * model.intermediate_size // ranks
        return model.num_layers * (4 * model.hidden_size + 2 * query + 2 * kv + mlp)

    def _compile_attention(self, share: shares.Shares) -> None:
        model, ranks = self.model, self.tensor_parallel
        read = partial(_ticks, per_second=self.gpu.memory_bytes_per_s * share.decode_bandwidth)
        query = model.num_layers * model.heads_per_rank(ranks) * model.head_dim
        flops = self.gpu.fp16_flops_per_s
        per_pair, per_token = share.prefill_factors()
        self._attention_floor = round(model.num_layers * shares.ATTENTION_FLOOR_US * PER_US)
        self._attention_read_per_decode = read(2 * query * ELEMENT_BYTES)
        self._attention_read_per_context = read(model.slot_bytes("fp16", ranks))
        self._attention_flops_per_context = _ticks(4 * query, flops * share.gemm_flops)
        self._prefill_per_pair = _ticks(4 * query * per_pair, flops)
        self._prefill_per_token = _ticks(4 * query * per_token, flops)

    def _compile_communication(self) -> None:
        layers, ranks = self.model.num_layers, self.tensor_parallel
        # Two all-reduces a layer; a ring sends each rank's share 2 * (ranks - 1) times.
        sent = 2 * layers * 2 * (ranks - 1) * self.model.hidden_size * ELEMENT_BYTES / ranks
        latency = shares.ALL_REDUCE_LATENCY_US if ranks > 1 else 0
        self._all_reduce = round(2 * layers * latency * PER_US)
        self._all_reduce_per_token = _ticks(sent, self.gpu.nvlink_bytes_per_s * shares.LINK_SHARE)
        self._launch = round(layers * shares.KERNELS_PER_LAYER * shares.LAUNCH_US * PER_US)
        self._host = round(shares.HOST_US * PER_US)

    def _compile_swaps(self, bytes_per_block: int) -> None:
        transfer = _ticks(bytes_per_block, self.gpu.pcie_bytes_per_s * shares.LINK_SHARE)
        copies = 2 * self.model.num_layers
        self._per_block_out = transfer + round(copies * shares.COPY_OUT_US * PER_US)
        self._per_block_in = transfer + round(copies * shares.COPY_IN_US * PER_US)

    def gemm_ticks(self, tokens: int) -> int:
        """All matrices of all layers over ``tokens`` tokens: the larger of reading and computing."""
        return max(self._gemm_read + self._gemm_read_per_token * tokens, self._gemm_flops_per_token * tokens)

    def head_ticks(self, rows: int) -> int:
        """The output head over ``rows`` rows."""
        return max(self._head_read + self._head_read_per_row * rows, self._head_flops_per_row * rows)

    def decode_attention_ticks(self, decodes: int, context: int) -> int:
        """Attention of ``decodes`` new tokens to ``context`` tokens in all."""
        return max(base + slope * context for base, slope in self._attention_lines(decodes))

    def _attention_lines(self, decodes: int) -> list[tuple[int, int]]:
        if not decodes:
            return [(0, 0)]
        return [
            (self._attention_floor, 0),
            (self._attention_read_per_decode * decodes, self._attention_read_per_context),
            (0, self._attention_flops_per_context),
        ]

    def prefill_attention_ticks(self, tokens: int, pairs: int) -> int:
        """Attention of ``tokens`` prompt tokens over ``pairs`` causal pairs."""
        return self._prefill_per_token * tokens + self._prefill_per_pair * pairs

    def kv_write_ticks(self, tokens: int) -> int:
        """Writing K and V of ``tokens`` tokens to their slots."""
        return self._kv_write_per_token * tokens

    def all_reduce_ticks(self, tokens: int) -> int:
        """Two all-reduces a layer over ``tokens`` hidden states; 0 on one GPU."""
        return self._all_reduce + self._all_reduce_per_token * tokens

    def overhead_ticks(self) -> int:
        """Launches of all layers, and the host's work between two steps."""
        return self._launch + self._host

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``. A step that computes no token costs the overhead alone."""
        attention = self.decode_attention_ticks(decodes, decode_context)
        prefill = self.prefill_attention_ticks(prefill_tokens, prefill_pairs)
        return self._without_attention(decodes, decodes + prefill_tokens) + attention + prefill

    def _without_attention(self, rows: int, tokens: int) -> int:
        if not tokens:
            return self.overhead_ticks()
        dense = self.gemm_ticks(tokens) + self.head_ticks(rows)
        return dense + self.kv_write_ticks(tokens) + self.all_reduce_ticks(tokens) + self.overhead_ticks()

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; knots are where reading overtakes the floor of the attention calls."""
        segments = self._lines.get(decodes)
        if segments is None:
            segments = self._lines[decodes] = self._decode_segments(decodes)
        for segment in segments:
            if segment[2] is None or context < segment[2]:
                break
        return segment

    def _decode_segments(self, decodes: int) -> list[Segment]:
        dense = self._without_attention(decodes, decodes)
        return [
            (dense + base, slope, until) for base, slope, until in upper_envelope(self._attention_lines(decodes))
        ]

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return blocks * self._per_block_out

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return blocks * self._per_block_in

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        sources = dict.fromkeys(_TERMS, f"data sheet of the GPU; {shares.PUBLISHED}") | _OTHER_SOURCES
        terms = {term: coefficient(getattr(self, f"_{term}"), "ticks", source) for term, source in sources.items()}
        return {
            "name": self.name,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "gpu_source": self.gpu.source,
            "tensor_parallel": self.tensor_parallel,
            **terms,
        }


_TERMS = (
    "gemm_read",
    "gemm_read_per_token",
    "gemm_flops_per_token",
    "head_read",
    "head_read_per_row",
    "head_flops_per_row",
    "kv_write_per_token",
    "attention_read_per_decode",
    "attention_read_per_context",
    "attention_flops_per_context",
    "prefill_per_pair",
    "prefill_per_token",
)
_LINK = f"data sheet of the GPU; {shares.LINK_SHARE} of it {shares.ASSUMED}"
_OTHER_SOURCES = {
    "attention_floor": f"{shares.PUBLISHED}: {shares.ATTENTION_FLOOR_US} us a call",
    "all_reduce": shares.ASSUMED,
    "all_reduce_per_token": _LINK,
    "launch": shares.ASSUMED,
    "host": shares.ASSUMED,
    "per_block_out": f"{_LINK}; copies by SOSP'23 Fig 19a",
    "per_block_in": f"{_LINK}; copies by SOSP'23 Fig 19a",
}


def _ticks(amount: float, per_second: float) -> int:
    return round(amount / per_second * PER_SECOND)
