"""Step times of any model on any GPU with a data sheet: a roofline with published shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import partial
from math import fsum

import numpy as np

from ..spec.deployment import Deployment, ExpertRanks
from ..spec.gpu import GpuSpec
from ..spec.matrix import Matrix, format_of, matrix_bytes
from ..spec.pool import block_bytes
from ..spec.shape import ModelSpec
from ..spec.weights import head_bytes, layer_matrices, mixer_matrices
from ..types.errors import SettingError
from ..types.ticks import PER_US
from . import shares
from .attention import ELEMENT_BYTES, AttentionCost, ticks
from .base import Peers, StepCost, StepParts, coefficient
from .curves import ticks_of
from .envelope import Segment, segment_at, stretches
from .gemms import layer_gemms
from .links import LINK_SOURCE, Links
from .sampler import describe_sampler, sampler_us
from .shares import shares_of
from .small_kernels import small_kernels


class RooflineCost:
    """Each term of a step is a line, or the maximum of a line in bytes and a line in flops.

    Per rank of a tensor-parallel group: GEMMs over all tokens of the step, the output head over the
    decoding rows (the one row a prompt adds is left out), attention over the context, the KV write,
    states of fixed size (``StateCost``), all-reduces, the shortest calls of all kernels, and the host. Terms add up: nothing overlaps.

    Experts are read as far as the step's tokens reach them, see ``touched``; engines that share them (data parallelism) are
    taken to compute as many tokens each, but for ``among``. Quantised weights are read
    in their bytes, and multiplied at the flops of their format (``shares.speedup``). Pipeline stages are passed one after the other,
    by one batch at a time (``engine.batch_queue`` overlaps several). With CUDA graphs GEMMs and
    all-reduces run over the rows that the batch is padded to, in every step that is small enough, as in
    vLLM V1; the shortest calls are those of tables that were measured with graphs, and count without them, too.

    Args:
        dtype: Number format of activations and unquantised weights; fp16 or bf16, as the flops of the data sheet.
        block_size: Slots per block, for swaps.
        deployment: Pipeline stages, number formats of KV and weights, CUDA graphs.
        page_bytes: Of a block that swaps move; 0 for a block of all layers.
    """

    name = "roofline"

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int = 1,
        dtype: str = "fp16",
        block_size: int = 16,
        deployment: Deployment = Deployment(),
        page_bytes: int = 0,
    ) -> None:
        if dtype not in ("fp16", "bf16"):
            raise SettingError("dtype", dtype, "must be fp16 or bf16: the data sheets give the flops of these")
        self.model, self.gpu, self.tensor_parallel, self.deployment = model, gpu, tensor_parallel, deployment
        self._lines: dict[int, list[Segment]] = {}
        self._peers: Peers | None = None
        share = shares_of(gpu.architecture, gpu.field("architecture"))
        self._ranks = deployment.expert_ranks(tensor_parallel)
        divided = deployment.decode_context_parallel
        self._links = Links(model, gpu, tensor_parallel, self._stages, self._ranks.engines, divided)
        self._attention = AttentionCost(model, gpu, tensor_parallel, deployment.kv_dtype, share, divided)
        self._states = StateCost(model, gpu, tensor_parallel, dtype, share)
        self._compile_gemms(share)
        self._compile_experts(share)
        self._compile_overhead()
        whole = block_bytes(model, tensor_parallel, block_size, deployment.kv_dtype, self._stages)
        self._compile_swaps(page_bytes or whole, whole)
        self._compile_copies(model.slot_bytes(deployment.kv_dtype, tensor_parallel, self._stages), share)

    @property
    def _stages(self) -> int:
        return self.deployment.pipeline_parallel

    def _compile_gemms(self, share: shares.Shares) -> None:
        read = partial(ticks, per_second=self.gpu.memory_bytes_per_s * share.gemm_bandwidth)
        compute = partial(ticks, per_second=self.gpu.fp16_flops_per_s * share.gemm_flops)
        model, ranks = self.model, self.tensor_parallel
        dense = [matrix for matrix in self._matrices() if matrix.part != "expert"]
        head = model.head_params(ranks)
        self._gemm_read = read(self._bytes(dense))
        self._gemm_read_per_token = read(self._gemm_activations() * ELEMENT_BYTES)
        self._gemm_flops_per_token = compute(2 * self._multiplied())
        self._expert_flops_per_token = compute(2 * self._multiplied("expert"))
        self._head_read = read(head_bytes(model, ranks, self.deployment.quantization))
        self._head_read_per_row = read((model.hidden_size + model.vocab_size // ranks) * ELEMENT_BYTES)
        self._head_flops_per_row = compute(2 * head)
        kept = model.slot_bytes(self.deployment.kv_dtype, ranks) / self.deployment.decode_context_parallel
        self._kv_write_per_token = read(kept)

    def _matrices(self, ranks: ExpertRanks | None = None) -> list[Matrix]:
        """Of all layers."""
        model, parallel = self.model, self.tensor_parallel
        layers = range(model.num_layers)
        return [matrix for layer in layers for matrix in layer_matrices(model, layer, parallel, ranks)]

    def _multiplied(self, part: str | None = None) -> float:
        """Parameters that a token is multiplied with; of faster formats as many as 16 bits take the time of.

        Where engines share experts they send each other as many tokens as they receive, so that the division of the experts
        changes nothing.
        """
        params: Counter[str | None] = Counter()
        for matrix in self._matrices():
            if part is not None and matrix.part != part:
                continue
            params[format_of(matrix, self.deployment.quantization)] += matrix.used_params
        return fsum(count / shares.speedup(self.gpu, form) if form else count for form, count in params.items())

    def _bytes(self, matrices: list[Matrix]) -> int:
        return sum(matrix_bytes(matrix, self.deployment.quantization) for matrix in matrices)

    def _gemm_activations(self) -> int:
        """Elements that the GEMMs of all layers read and write for one token."""
        model, ranks, mixer = self.model, self.tensor_parallel, self.model.mixer
        # Attention residuals read the outputs of earlier blocks before both parts of a layer.
        blocks = sum(map(model.residual_blocks, range(model.num_layers)))
        parts = (model.num_mixers + model.num_mlps) * model.residual_streams
        hidden = 2 * (parts + blocks) * model.hidden_size
        attention = sum(
            group.num_layers * model.attention(ranks, group.span).gemm_elements
            for group in model.kv_groups()
            if group.span.keeps_tokens
        )
        if model.indexer:
            attention += len(model.indexer.layers) * model.indexer.gemm_elements(ranks)
        if model.shared_blocks:
            # A call reads the embedding beside the hidden state, and has matrices of its own.
            own = model.call_matrices(model.attention_layers[0], ranks)
            call = model.hidden_size + sum(each.copies * (each.inputs + each.outputs_on_rank) for each in own)
            attention += len(model.attention_layers) * call
        states = len(model.state_layers) * mixer.gemm_elements(ranks) if mixer else 0
        return hidden + attention + states + sum(model.mlp_width(layer, ranks) for layer in range(model.num_layers))

    def _compile_experts(self, share: shares.Shares) -> None:
        """Set the ticks to read all experts. ``_experts_read`` has those of the experts that n tokens reach, and grows as steps need more."""
        bandwidth = self.gpu.memory_bytes_per_s * share.gemm_bandwidth
        routed = self._bytes([matrix for matrix in self._matrices(self._ranks) if matrix.part == "expert"])
        self._expert_read = ticks(routed, bandwidth)
        self._experts_read = [0]

    def _compile_overhead(self) -> None:
        """Set the ticks of the shortest calls of all kernels but attention, which has its own (``AttentionCost``), and of the host."""
        model, quantization = self.model, self.deployment.quantization
        parts = model.num_mixers + model.num_mlps
        kernels = model.num_mixers * shares.KERNELS_PER_MIXER + model.num_mlps * shares.KERNELS_PER_MLP
        kernels += small_kernels(model, self.deployment.vllm_minor)
        us = kernels * shares.SMALL_KERNEL_US
        for layer in range(model.num_layers):
            gemms = layer_gemms(model, layer, self.tensor_parallel, quantization, self._ranks)
            formats = [gemm.quantization for gemm in gemms if gemm.experts is None]
            if model.has_vectors:
                # Their projections are no GEMMs of ``layer_gemms``.
                formats += [
                    format_of(each, quantization) for each in mixer_matrices(model, layer, self.tensor_parallel)
                ]
            us += fsum(shares.GEMM_US if form is None else shares.QUANTISED_GEMM_US for form in formats)
        us += len(model.experts.layers) * shares.EXPERTS_US if model.experts else 0.0
        us += parts * shares.HYPER_CONNECTION_US if model.residual_streams > 1 else 0.0
        self._launch = round(us * PER_US)
        self._host = round(shares.HOST_US * PER_US)

    def _compile_swaps(self, bytes_per_block: int, whole: int) -> None:
        """Stages swap side by side: the one with most attention counts. A block of one KV group has as many pieces as its share of a
        block of all layers, which has ``whole`` bytes."""
        transfer = ticks(bytes_per_block, self.gpu.pcie_bytes_per_s * shares.LINK_SHARE)
        longest = self.model.most_attention_layers(self._stages)
        copies = (
            self.model.attention(self.tensor_parallel).kv_tensors * longest * (bytes_per_block / whole if whole else 1)
        )
        self._per_block_out = transfer + round(copies * shares.COPY_OUT_US * PER_US)
        self._per_block_in = transfer + round(copies * shares.COPY_IN_US * PER_US)

    def _compile_copies(self, bytes_per_slot: int, share: shares.Shares) -> None:
        """A copy reads and writes."""
        self._per_slot_copied = ticks(2 * bytes_per_slot, self.gpu.memory_bytes_per_s * share.gemm_bandwidth)

    def gemm_ticks(self, tokens: int, rows: int | None = None) -> int:
        """All matrices of all layers over ``tokens`` tokens: the larger of reading and computing.

        Args:
            rows: Tokens of all engines that share the experts; None takes as many of each.
        """
        engines = self._ranks.engines
        rows = tokens * engines if rows is None else rows
        read = self._gemm_read + self._expert_ticks(rows) + self._gemm_read_per_token * tokens
        # Rows of the experts are divided evenly among the engines.
        more = self._expert_flops_per_token * (rows - tokens * engines) // engines
        return max(read, self._gemm_flops_per_token * tokens + more)

    def _expert_ticks(self, tokens: int) -> int:
        """Reading the experts that ``tokens`` tokens of all engines reach, as ``touched`` has it."""
        experts, found = self.model.experts, self._experts_read
        if experts is None:
            return 0
        while len(found) <= tokens and found[-1] < self._expert_read:
            left = self._expert_read - found[-1]
            found.append(self._expert_read - left * (experts.count - experts.used) // experts.count)
        return found[min(tokens, len(found) - 1)]

    def head_ticks(self, rows: int) -> int:
        """The output head over ``rows`` rows, and the sampler."""
        head = max(self._head_read + self._head_read_per_row * rows, self._head_flops_per_row * rows)
        if self.deployment.sampling == "greedy":
            return head
        return head + ticks_of(sampler_us(self.deployment, self.gpu, self.model.vocab_size, np.array(rows)))

    def decode_attention_ticks(self, decodes: int, context: int) -> int:
        """Attention of ``decodes`` new tokens to ``context`` tokens in total."""
        return self._attention.decode_ticks(decodes, context)

    def prefill_attention_ticks(self, tokens: int, pairs: int) -> int:
        """Attention of ``tokens`` prompt tokens over ``pairs`` causal pairs, at most a window each."""
        return self._attention.prefill_ticks(tokens, pairs)

    def kv_write_ticks(self, tokens: int) -> int:
        """Writing K and V of ``tokens`` tokens to their slots."""
        return self._kv_write_per_token * tokens

    def state_ticks(self, decodes: int, prefill_tokens: int) -> int:
        """Convolutions and recurrences over ``decodes`` states and ``prefill_tokens`` tokens; 0 without such layers."""
        return self._states.step_ticks(decodes, prefill_tokens)

    def all_reduce_ticks(self, tokens: int) -> int:
        """All-reduces of all layers over ``tokens`` hidden states; 0 on one GPU."""
        return self._links.all_reduce_ticks(tokens)

    def context_ticks(self, decodes: int) -> int:
        """Gathering queries and adding up outputs of ``decodes`` rows; 0 where no ranks divide the tokens of a sequence."""
        return self._links.context_ticks(decodes)

    def hop_ticks(self, tokens: int) -> int:
        """Handing ``tokens`` hidden states from stage to stage; 0 with one stage."""
        return self._links.hop_ticks(tokens)

    def among(self, tokens: Sequence[int]) -> StepCost:
        """See ``base.among``."""
        found = copy(self)
        found._peers, found._lines = Peers.of(tokens, self.deployment.cuda_graphs), {}
        return found

    def overhead_ticks(self) -> int:
        """Shortest calls of the kernels of all layers, and the host's work between two steps."""
        return self._launch + self._host

    def host_ticks(self) -> int:
        """The host's work between two steps."""
        return self._host

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``. A step that computes no token costs the overhead alone."""
        attention = self.decode_attention_ticks(decodes, decode_context)
        prefill = self.prefill_attention_ticks(prefill_tokens, prefill_pairs)
        states = self.state_ticks(decodes, prefill_tokens)
        return self._without_mixers(decodes, decodes + prefill_tokens) + attention + prefill + states

    def _without_mixers(self, rows: int, tokens: int) -> int:
        if not tokens:
            return self.overhead_ticks()
        peers = self._peers or Peers.of([tokens] * self._ranks.engines, self.deployment.cuda_graphs)
        computed = tokens if peers.padded is None else peers.padded
        dense = self.gemm_ticks(computed, peers.rows) + self.head_ticks(rows)
        sent = self._links.ticks(computed, peers.received) + self.context_ticks(rows)
        return dense + self.kv_write_ticks(tokens) + sent + self.overhead_ticks()

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; knots are where reading overtakes the floor of the attention calls, and full windows."""
        segments = self._lines.get(decodes)
        if segments is None:
            segments = self._lines[decodes] = self._decode_segments(decodes)
        return segment_at(segments, context)

    def _decode_segments(self, decodes: int) -> list[Segment]:
        dense = self._without_mixers(decodes, decodes) + self.state_ticks(decodes, 0)
        return [(dense + base, slope, until) for base, slope, until in stretches(self._attention.decode_lines(decodes))]

    def parts(self) -> StepParts | None:
        """See ``StepParts``; None for models with states."""
        if self.model.mixer:
            return None
        per_token, per_pair = self._attention.prefill_line()
        head = self.head_ticks(0)
        return StepParts(
            of_tokens=lambda tokens: self._without_mixers(0, tokens) - head,
            of_rows=lambda rows: self.head_ticks(rows) + self.context_ticks(rows),
            mixed_decode=self._attention.decode_segment,
            per_token=per_token,
            per_pair=per_pair,
        )

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return blocks * self._per_block_out

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return blocks * self._per_block_in

    def copy_ticks(self, slots: int) -> int:
        """See ``StepCost``."""
        return slots * self._per_slot_copied

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        published = f"data sheet of the GPU; {shares.origin(self.gpu.architecture)}"
        sources = dict.fromkeys(_TERMS, published) | _OTHER_SOURCES
        if self.model.experts:
            sources["expert_read"] = f"{published}; of all experts, of which a step reads those it reaches"
        terms = {term: coefficient(getattr(self, f"_{term}"), "ticks", source) for term, source in sources.items()}
        return {
            "name": self.name,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "gpu_source": self.gpu.source,
            "tensor_parallel": self.tensor_parallel,
            **({} if self.deployment.is_default else self.deployment.describe()),
            **describe_sampler(self.deployment),
            **terms,
            **self._links.describe(),
            **self._attention.describe(),
            **self._states.describe(),
        }


_TERMS = (
    "gemm_read",
    "gemm_read_per_token",
    "gemm_flops_per_token",
    "head_read",
    "head_read_per_row",
    "head_flops_per_row",
    "kv_write_per_token",
    "per_slot_copied",
)
_OTHER_SOURCES = {
    "launch": shares.FLOORS,
    "host": shares.ASSUMED,
    "per_block_out": f"{LINK_SOURCE}; copies by SOSP'23 Fig 19a",
    "per_block_in": f"{LINK_SOURCE}; copies by SOSP'23 Fig 19a",
}


class StateCost:
    """The states of all layers that have one on one rank, compiled to ticks.

    A roofline of what the kernels must move and compute, beside the layers' GEMMs:

        decode, a sequence   read and write the whole state; inputs and outputs of convolution and recurrence
        prefill, a token     max(bytes, flops)
            bytes            inputs and outputs as above; the matrices that kernels pass on for each chunk
                             (``StateMixer.chunk_bytes``), over its tokens
            flops            of the recurrence in chunks, linear in the tokens (``StateMixer.prefill_flops``)

    Neither depends on the context. Left out: the flops of a decode (about one for each byte of the state), the state
    that a prompt starts from and leaves behind (once a prompt, where chunks pass many), and launches, which
    ``RooflineCost`` counts. The convolution's own flops are among those of the GEMMs. Sources are named in
    ``spec/states.py``.

    Args:
        dtype: Of the model.
        share: What kernels reach of the data sheet.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, dtype: str, share: shares.Shares) -> None:
        self._per_decode = self._read_per_token = self._flops_per_token = 0
        mixer, layers = model.state_mixer(tensor_parallel), len(model.state_layers)
        if mixer is None:
            return
        bandwidth = gpu.memory_bytes_per_s * share.decode_bandwidth
        scanned = mixer.scan_elements(tensor_parallel) * ELEMENT_BYTES
        passed = 0.0
        if mixer.chunk_tokens:
            passed = mixer.chunk_bytes(tensor_parallel, dtype) / mixer.chunk_tokens
        state = 2 * mixer.state_bytes(tensor_parallel, dtype)
        self._per_decode = ticks(layers * (state + scanned), bandwidth)
        self._read_per_token = ticks(layers * (passed + scanned), bandwidth)
        flops = layers * mixer.prefill_flops(tensor_parallel)
        self._flops_per_token = ticks(flops, gpu.fp16_flops_per_s * share.gemm_flops)

    def step_ticks(self, decodes: int, prefill_tokens: int) -> int:
        """``decodes`` sequences by a token each, and ``prefill_tokens`` tokens of prompts."""
        return self._per_decode * decodes + max(self._read_per_token, self._flops_per_token) * prefill_tokens

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; nothing for a model without states."""
        if not self._per_decode:
            return {}
        return {
            "state_per_decode": coefficient(self._per_decode, "ticks", shares.RECURRENCE),
            "state_read_per_prefill_token": coefficient(self._read_per_token, "ticks", shares.RECURRENCE),
            "state_flops_per_prefill_token": coefficient(self._flops_per_token, "ticks", shares.RECURRENCE),
        }
