"""Step times from a calibration file: measured on a device, or fitted to published tables.

Decode attention is a piecewise linear curve over the context. Prefill attention is a surface over tokens and query-key
pairs, in patches between integer nodes. Both are converted from float to integer ticks once: within a piece, the time
changes by a whole number of ticks per token. Sums over many steps are therefore exact, and a leap has the same bits as
its single steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, replace

import numpy as np

from ..spec.deployment import Deployment, element_bytes
from ..spec.gpu import GpuSpec
from ..spec.kernels import TRTLLM_MXFP8
from ..spec.matrix import formats_by_part
from ..spec.pool import block_bytes
from ..spec.shape import ModelSpec
from ..types.errors import SettingError
from . import layer_work, op_work, shares
from .attention_curves import AttentionCurves
from .backends import table_backend
from .base import Peers, StepCost, StepParts, coefficient, context_of_reads
from .calibration import Calibration
from .curves import Curve, ticks_of
from .gemms import layer_gemms
from .kernels import MXFP8_EXPERTS, Kernels, experts_kernels, gemm_kernels, unpacked_gemm
from .latent import LATENT_OPERATIONS, LatentCurves, latent_operations, module_layers
from .links import Links
from .op_model import OpModel
from .op_work import Work
from .operations import OPERATIONS, OpName
from .sampler import describe_sampler, sampler_us
from .small_kernels import NORM_BYTES, norm_all_reduces, small_kernels
from .states import GDN_OPERATIONS, StateOperations

#: Largest message, by number of GPUs, for which the all-reduce also normalises: vLLM's ``FI_ALLREDUCE_FUSION_MAX_SIZE_MB`` for
#: compute capability 9.0, 10.0 and 10.3.
_HOPPER_BYTES = {2: 64 << 20, 4: 2 << 20, 8: 1 << 19}
_FUSED_BYTES = {
    "h100": _HOPPER_BYTES,
    "h200": _HOPPER_BYTES,
    "b200": {2: 64 << 20, 4: 32 << 20, 8: 1 << 20},
    "b300": {2: 64 << 20, 4: 64 << 20, 8: 4 << 20},
}
#: Minor version from which on vLLM fuses them by default: ``fuse_allreduce_rms`` of its optimization level 2 in the wheels of 0.10 to 0.23.
_FUSED_SINCE = 17
#: Tables have all-reduces of up to as many GPUs.
_MOST_RANKS = 8


_OF_GEMMS: dict[str | None, OpName] = {"fp8": "gemm_fp8", "nvfp4": "gemm_nvfp4"}


def gemm_model(calibration: Calibration, gpu: GpuSpec, quantization: str | None) -> OpModel:
    """The model of GEMMs with weights in a number format.

    Formats in which the GPU multiplies faster than in 16 bits have the calibration's own model (``gemm_fp8``, ``gemm_nvfp4``),
    or the one of 16 bits with flops as the data sheet has them. Other formats are unpacked to 16 bits: ``gemm_w8`` or ``gemm_w4``, else
    the model of 16 bits, which reads fewer bytes.

    Args:
        quantization: None is 16 bits.
    """
    sixteen = calibration.ops["gemm"]
    if quantization is None:
        return sixteen
    if (faster := shares.speedup(gpu, quantization)) == 1:
        return calibration.ops.get(unpacked_gemm(quantization), sixteen)
    if (own := _OF_GEMMS.get(quantization)) in calibration.ops:
        return calibration.ops[own]
    found, rate = sixteen.coefficients, sixteen.coefficients.flops_per_s
    scaled = found if rate is None else replace(found, flops_per_s=rate * faster)
    return replace(sixteen, coefficients=scaled, source=shares.speedup_source(faster), fit={})


#: The operations of experts by number format of the weights.
_OF_EXPERTS: dict[str | None, OpName] = {
    None: "moe", "fp8": "moe_fp8", "nvfp4": "moe_nvfp4", "mxfp4": "moe_mxfp4", "awq": "moe_int4", "gptq": "moe_int4",
    "w4a16": "moe_int4", "w4a16-g32": "moe_int4",
}  # fmt: skip


def experts_model(
    calibration: Calibration, model: ModelSpec, quantization: str | None, kernels: Kernels | None = None
) -> tuple[OpName, OpModel] | None:
    """The operation that computes a model's experts, and its model: that of their shape, or of all shapes; None if the
    calibration has none for the number format, or for experts without a gate.

    Args:
        kernels: As of ``experts_kernels``: some multiply weights in mxfp4 by activations in mxfp8.
    """
    name = _OF_EXPERTS.get(quantization and formats_by_part(quantization).get("expert"))
    if kernels is not None and kernels.table == TRTLLM_MXFP8:
        name = MXFP8_EXPERTS
    if model.experts is None or name is None or name not in calibration.ops or not model.gated_mlp:
        return None
    found, experts = calibration.ops[name], model.experts
    shape = op_work.experts_name(experts.count, experts.used, model.hidden_size, experts.intermediate_size)
    return name, found.shapes.get(shape, found)


#: Tokens of a step up to which its curve bends.
MOST_TOKENS = 1 << 17


class CalibratedCost:
    """A step as the sum of its operations, each from its own fitted model. Operations do not overlap.

        GEMMs          those that vLLM calls for the model's shapes on a rank, with QKV fused and gate and up fused. Quantised
                       weights are read in their own bytes, and multiplied at the rates of ``gemm_model``
        output head    over the decoding rows
        attention      for each KV group, at the mean length of the batch; a window bounds the tokens read. Attention of a step
                       that decodes and prefills is one operation (``mixed_attention``). Prefills are priced as whole prompts,
                       or as one chunk if they have more pairs than whole prompts have
        latent         attention with its projections (``LatentCurves``)
        experts        one operation per layer if the calibration has one for their number format (``experts_model``); else a
                       GEMM for each expert that the step's tokens reach, over its share of the tokens
        links          all-reduces and pipeline hops (``Links``); assumed, not measured

    Args:
        calibration: Must have a model of every operation.
        block_size: Slots of a block, for swaps.
        deployment: As for ``RooflineCost``.
        paged: See ``AttentionCurves``.
        page_bytes: Bytes of a swapped block; 0 for a block of all layers.

    Raises:
        SettingError: The calibration lacks an operation that the model needs, such as one for latent vectors or
            states.
    """

    @staticmethod
    def refusal(model: ModelSpec, calibration: Calibration, quantization: str | None = None) -> str | None:
        """The reason why a calibration does not cover a model; None if it does."""
        sparse, latent = model.indexer is not None, latent_operations(calibration, model, quantization)
        if sparse and not latent:
            return f"{model.name} attends to the tokens that an indexer chooses, and {calibration.name} has no operation for its widths"
        if model.compressed and not latent:
            return f"{model.name} attends to compressed vectors, and {calibration.name} has no operation that does, for its widths and number formats"
        if model.latent and not latent:
            return f"{model.name} keeps latent vectors, and {calibration.name} has no operation that attends to them"
        if model.mixer and (calibration.kind != "profile" or model.shared_blocks or model.latent):
            return f"{model.name} has layers with a fixed-size state, which no calibrated operation computes"
        if model.window_heads or (model.mlp_sizes and calibration.kind != "profile"):
            return f"layers of {model.name} differ in their heads or MLPs, and operations are computed for one kind of layer"
        return None

    def __init__(
        self,
        calibration: Calibration,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int = 1,
        block_size: int = 16,
        deployment: Deployment = Deployment(),
        paged: bool = True,
        page_bytes: int = 0,
    ) -> None:
        calibration.require(name for name, each in OPERATIONS.items() if each.is_measured and not each.is_optional)
        refusal = self.refusal(model, calibration, deployment.quantization)
        if refusal is not None:
            raise SettingError(
                "cost", calibration.name, f"{refusal}; leave --cost out for the default, which covers it"
            )
        refusal = calibration.kv_refusal(deployment.kv_dtype)
        if refusal is not None:
            # auto is fp8 for a checkpoint that asks for it.
            measured = "fp16" if calibration.kv_cache_dtype == "auto" else calibration.kv_cache_dtype
            remedy = f"run with --kv-cache-dtype {measured}, or leave --cost out"
            raise SettingError("cost", calibration.name, f"{refusal}; {remedy}")
        self.name = "fitted" if calibration.kind == "profile" else "calibrated"
        self.calibration, self.model, self.gpu = calibration, model, gpu
        self.tensor_parallel, self.deployment = tensor_parallel, deployment
        stages = deployment.pipeline_parallel
        self._block_size = block_size
        self._pieces = model.attention(tensor_parallel).kv_tensors * model.most_attention_layers(stages)
        whole = block_bytes(model, tensor_parallel, block_size, deployment.kv_dtype, stages)
        self._block_bytes = page_bytes or whole
        # A block of one KV group has as many pieces as its share of a block of all layers.
        self._swapped_pieces = -(-self._pieces * self._block_bytes // whole) if whole else self._pieces
        self._slot_bytes = model.slot_bytes(deployment.kv_dtype, tensor_parallel, stages)
        ranks = deployment.expert_ranks(tensor_parallel)
        divided = deployment.decode_context_parallel
        self._links = Links(model, gpu, tensor_parallel, stages, ranks.engines, divided)
        self._latent = latent_operations(calibration, model, deployment.quantization, deployment.kv_dtype)
        self._attention: AttentionCurves | LatentCurves
        modules = LatentCurves(self._latent, model, tensor_parallel, divided) if self._latent else None
        self._modules = module_layers(model) if modules else frozenset[int]()
        if modules and len(self._modules) == len(model.attention_layers):
            self._attention = modules
        else:
            given = calibration, model, gpu, tensor_parallel
            states = StateOperations(*given, deployment) if model.mixer else None
            self._attention = AttentionCurves(*given, block_size, deployment, paged, states, modules)
        self._gemms = Counter(
            gemm
            for layer in range(model.num_layers)
            for gemm in layer_gemms(
                model, layer, tensor_parallel, deployment.quantization, ranks, layer in self._modules
            )
        )
        self._reduced = self._all_reduces(calibration)
        self._expert_kernels = experts_kernels(model, gpu, deployment, tensor_parallel, calibration.ops)
        self._experts = experts_model(calibration, model, deployment.quantization, self._expert_kernels)
        if self._experts is not None:
            self._gemms = Counter({gemm: count for gemm, count in self._gemms.items() if gemm.experts is None})
        formats = {gemm.quantization for gemm in self._gemms}
        self._gemm_models = {form: gemm_model(calibration, gpu, form) for form in formats}
        self._engines = ranks.engines
        self._peers: Peers | None = None
        self._by_token = Curve(self._token_us, MOST_TOKENS)
        # Over the tokens of all engines.
        self._by_row_of_experts = Curve(self._shared_us, MOST_TOKENS * self._engines) if self._engines > 1 else None
        self._by_row = Curve(self._row_us, MOST_TOKENS)
        self._by_head = Curve(self._head_us, MOST_TOKENS)
        has_launches = "launches" in calibration.ops
        self._launch_ticks = ticks_of(self._us("launches", op_work.launches())) if has_launches else 0
        self._dense: dict[int, int] = {}
        self.effective_context = context_of_reads(calibration.repeated_reads)
        attention = self._attention
        shared = isinstance(attention, AttentionCurves) and attention.caches_shared
        self.saved_ticks = attention.saved if shared and isinstance(attention, AttentionCurves) else None

    def _all_reduces(self, calibration: Calibration) -> Curve | None:
        """Ticks of all layers over the tokens; None without tensor parallelism, or if the calibration has no all-reduces of so
        many GPUs."""
        reduce, ranks = calibration.ops.get("all_reduce"), self.tensor_parallel
        if reduce is None or ranks == 1 or ranks > _MOST_RANKS:
            return None
        # One after every attention and every MLP.
        calls, width = self.model.num_mixers + self.model.num_mlps, self.model.hidden_size * op_work.ELEMENT_BYTES
        norms = norm_all_reduces(self.model)

        def us(tokens: np.ndarray) -> np.ndarray:
            tokens = np.maximum(tokens, 1)
            states = calls * reduce.us(op_work.all_reduce(tokens * width, ranks))
            return states + norms * reduce.us(op_work.all_reduce(tokens * NORM_BYTES, ranks)) if norms else states

        return Curve(us, MOST_TOKENS)

    def _token_us(self, tokens: np.ndarray) -> np.ndarray:
        """All layers without attention, and the embedding."""
        model, us = self.model, self._us
        tokens = np.maximum(tokens, 1)
        layers = []
        plain = [layer for layer in model.attention_layers if layer not in self._modules]
        if plain:
            shape, kv_element_bytes = (
                model.head_attention(self.tensor_parallel),
                element_bytes(self.deployment.kv_dtype),
            )
            written = tokens / self.deployment.decode_context_parallel
            one = us("kv_write", op_work.kv_write(written, shape.kv_heads, shape.head_dim, kv_element_bytes))
            layers = [one] * len(plain)
        for layer in range(model.num_layers):
            # Of a layer with a mixer or an MLP alone there are half of the kernels.
            share = ((model.span(layer).kind != "none") + model.has_mlp(layer)) / 2
            if share:
                layers.append(share * self._elementwise_us(tokens, round(self._activated(layer) / share)))
        if model.residual_streams > 1 and "hyper_connections" in self.calibration.ops:
            layers.append(
                model.num_layers * us("hyper_connections", layer_work.hyper_connections(tokens, model.hidden_size))
            )
        if "small_kernel" in self.calibration.ops:
            launched = small_kernels(model, self.deployment.vllm_minor, self._modules)
            layers.append(launched * us("small_kernel", op_work.small_kernel()))
        models = self._gemm_models
        own = [(gemm, count) for gemm, count in self._gemms.items() if gemm.experts is None or self._engines == 1]
        gemms = [count * models[gemm.quantization].us(gemm.work(tokens)) for gemm, count in own]
        return (
            sum(layers + gemms)
            + (self._experts_us(tokens) if self._engines == 1 else 0.0)
            + us("embedding", op_work.embedding(tokens, model.hidden_size))
        )

    def _shared_us(self, rows: np.ndarray) -> np.ndarray:
        """Experts of all layers, over ``rows`` tokens of all engines."""
        each, models = np.maximum(rows, 1) / self._engines, self._gemm_models
        shared = [(gemm, count) for gemm, count in self._gemms.items() if gemm.experts is not None]
        gemms = [count * models[gemm.quantization].us(gemm.work(each)) for gemm, count in shared]
        return np.zeros(rows.shape) + sum(gemms) + self._experts_us(each)

    def _elementwise_us(self, tokens: np.ndarray, width: int) -> np.ndarray:
        """Norms, rotary positions and activations of one layer; the two norms are part of an all-reduce where vLLM fuses them."""
        hidden_size, coefficients = self.model.hidden_size, self.calibration.ops["elementwise"].coefficients
        plain = self._us("elementwise", op_work.elementwise(tokens, hidden_size, width))
        limits, minor = _FUSED_BYTES.get(self.gpu.architecture), self.deployment.vllm_minor
        if self._reduced is None or self.calibration.kind != "profile" or limits is None:
            return plain
        # With several engines or stages vLLM does not fuse, as results were wrong.
        alone = self.deployment.data_parallel == self.deployment.pipeline_parallel == 1
        if not alone or (minor is not None and minor < _FUSED_SINCE):
            return plain
        rest = self._us("elementwise", op_work.elementwise(tokens, hidden_size, width, norms=False))
        limit = limits.get(self.tensor_parallel, 0)
        # Two of its four kernels are left.
        fused = rest - coefficients.t0_us / 2
        return np.where(tokens * hidden_size * op_work.ELEMENT_BYTES <= limit, fused, plain)

    def _activated(self, layer: int) -> int:
        """Elements of a layer's activations that no other operation includes, for one token."""
        experts = self.model.experts
        if self._experts is not None and experts is not None and self.model.has_experts(layer):
            return experts.shared_size // self.tensor_parallel
        return self.model.mlp_width(layer, self.tensor_parallel) // self.model.mlp_matrices

    def _experts_us(self, tokens: np.ndarray) -> np.ndarray | float:
        """Of all layers, where the calibration has an operation for them."""
        experts = self.model.experts
        if self._experts is None or experts is None:
            return 0.0
        (name, model), ranks = self._experts, self.deployment.expert_ranks(self.tensor_parallel)
        held, width = -(-experts.count // ranks.holders), experts.intermediate_size // ranks.slices
        sizes = (experts.used, experts.count, held, self.model.hidden_size, width)
        return len(experts.layers) * model.us(OPERATIONS[name](tokens * ranks.engines, *sizes))

    def _row_us(self, rows: np.ndarray) -> np.ndarray:
        """The output head, the sampler, and what a step takes beside its operations."""
        return self._head_us(rows) + self._us("step", op_work.step(rows))

    def _head_us(self, rows: np.ndarray) -> np.ndarray:
        """The output head, and the sampler."""
        head = op_work.gemm(np.maximum(rows, 1), self.model.vocab_size // self.tensor_parallel, self.model.hidden_size)
        return self._us("gemm", head) + sampler_us(self.deployment, self.gpu, self.model.vocab_size, rows)

    def _us(self, name: OpName, work: Work) -> np.ndarray:
        return self.calibration.ops[name].us(work)

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``. A step that computes no token costs ``step`` alone."""
        tokens = decodes + prefill_tokens
        if not tokens:
            return self.overhead_ticks()
        attention = self._attention
        if not prefill_tokens:
            return self._decode_ticks(decodes) + attention.decode(decodes)(decode_context)
        if decodes:
            attended = attention.mixed(decodes, decode_context, prefill_tokens, prefill_pairs)
        else:
            attended = attention.prefill(prefill_tokens, prefill_pairs)
        if "prefill_step" not in self.calibration.ops:
            return self._without_attention(decodes, tokens, self._by_row) + attended
        computed = self._without_attention(decodes, tokens, self._by_head) + attended
        # The number of prompts is unknown here: one at least.
        rest = self._us("prefill_step", op_work.prefill_step(decodes + 1, tokens))
        return max(computed, self._launch_ticks) + ticks_of(rest)

    def parts(self) -> StepParts | None:
        """See ``StepParts``; None where a part is over more counts: measured steps with prompts, and measured mixed attention."""
        attention = self._attention
        mixed = attention.parts()
        if mixed is None or "prefill_step" in self.calibration.ops:
            return None
        head, (mixed_decode, per_block, shared) = self._by_row(0), mixed
        return StepParts(
            of_tokens=lambda tokens: self._without_attention(0, tokens, self._by_row) - head,
            of_rows=lambda rows: self._by_row(rows) + self._links.context_ticks(rows),
            mixed_decode=lambda decodes, context: mixed_decode(decodes).segment(context),
            prefill_node=attention.prefill.node,
            per_block=per_block,
            shared=shared,
        )

    def among(self, tokens: Sequence[int]) -> StepCost:
        """See ``base.among``."""
        found = copy(self)
        found._peers, found._dense = Peers.of(tokens, self.deployment.cuda_graphs), {}
        return found

    def overhead_ticks(self) -> int:
        """Ticks of a step that are independent of its tokens."""
        return ticks_of(self._us("step", op_work.step(0)))

    def host_ticks(self) -> int:
        """The part of ``overhead_ticks`` that a profile assumes for the host; 0 for a measured calibration."""
        return self.overhead_ticks() if self.calibration.kind == "profile" else 0

    def _without_attention(self, rows: int, tokens: int, of_rows: Callable[[int], int]) -> int:
        peers = self._peers or Peers.of([tokens] * self._engines, self.deployment.cuda_graphs)
        computed = tokens if peers.padded is None else peers.padded
        reduced = self._links.all_reduce_ticks(computed) if self._reduced is None else self._reduced(computed)
        sent = reduced + self._links.hop_ticks(computed) + self._links.exchange_ticks(peers.received)
        sent += self._links.context_ticks(rows)
        if self._by_row_of_experts is not None:
            sent += self._by_row_of_experts(peers.rows)
        return self._by_token(computed) + of_rows(rows) + sent

    def _decode_ticks(self, decodes: int) -> int:
        ticks = self._dense.get(decodes)
        if ticks is None:
            ticks = self._dense[decodes] = self._without_attention(decodes, decodes, self._by_row)
        return ticks

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; a line ends at each knot of the curve of attention over the context."""
        if not decodes:
            return self.overhead_ticks(), 0, None
        base, slope, until = self._attention.decode(decodes).segment(context)
        return base + self._decode_ticks(decodes), slope, until

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return self._transfer_ticks("swap_out", blocks * self._block_bytes, blocks * self._swapped_pieces)

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return self._transfer_ticks("swap_in", blocks * self._block_bytes, blocks * self._swapped_pieces)

    def copy_ticks(self, slots: int) -> int:
        """See ``StepCost``; slots are copied in blocks."""
        return self._transfer_ticks(
            "block_copy", slots * self._slot_bytes, -(-slots // self._block_size) * self._pieces
        )

    def _transfer_ticks(self, name: OpName, size: int, pieces: int) -> int:
        return ticks_of(self._us(name, op_work.transfer(size, pieces))) if pieces else 0

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; the file that ``sha256`` names has the residuals."""
        calibration = self.calibration
        formats = [(f"gemm_{form}", found) for form, found in self._gemm_models.items() if form is not None]
        one_of = {
            *_OF_EXPERTS.values(),
            MXFP8_EXPERTS,
            *LATENT_OPERATIONS,
            *GDN_OPERATIONS,
            "gemm_w8",
            "gemm_w4",
            "mixed_attention",
            "hyper_connections",
        }
        attention = self._attention
        states = attention.states if isinstance(attention, AttentionCurves) else None
        used = self._latent | (states.operations if states else {})
        others = [(name, found) for name, found in calibration.ops.items() if name not in one_of]
        others += used.items()
        experts = [] if self._experts is None else [self._experts]
        mixed, backend = [], {}
        if isinstance(attention, AttentionCurves):
            table = table_backend(self.gpu) if calibration.kind == "profile" else attention.backend
            backend = {"attention_backend": attention.backend.name, "attention_table": table.name}
        if isinstance(attention, AttentionCurves) and attention.mixed_model is not None:
            mixed = [("mixed_attention", attention.mixed_model)]
        models = [*others, *experts, *mixed, *formats]
        terms: dict[str, object] = {
            f"{name}.{term}": coefficient(value, _UNITS[term], model.source or calibration.source)
            for name, model in models
            for term, value in asdict(model.coefficients).items()
            if value is not None
        }
        terms |= {
            f"{name}.memory_{term}": coefficient(value, "bytes/s", calibration.source)
            for name, model in models
            for term, value in (asdict(model.memory) if model.memory else {}).items()
        }
        if isinstance(attention, AttentionCurves) and attention.mixed_model is None:
            terms |= attention.calls.describe()
        if states is not None:
            terms = {**terms, **states.describe()}
        if calibration.repeated_reads < 1:
            source = f"{calibration.source}; time of a repeated read of KV over that of a first one"
            terms["repeated_reads"] = coefficient(calibration.repeated_reads, "1", source)
        return {
            "name": self.name,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "calibration": calibration.name,
            "sha256": calibration.sha256,
            "source": calibration.source,
            "device": str(calibration.device.get("name", "")),
            **backend,
            **describe_sampler(self.deployment),
            **(self._kernels() if calibration.kind == "profile" else {}),
            "tensor_parallel": self.tensor_parallel,
            **({} if self.deployment.is_default else self.deployment.describe()),
            **terms,
            **(self._links.describe() if self._links.any else {}),
        }

    def _kernels(self) -> dict[str, object]:
        """Kernels of vLLM, where there is a choice, and of the profile's tables."""
        given = self.model, self.gpu, self.deployment
        gemms = gemm_kernels(self._gemms, *given, self.calibration.ops)
        experts = self._expert_kernels if self._experts is not None else None
        found: dict[str, object] = {}
        if gemms:
            found["gemm_kernels"] = {form: kernels.run for form, kernels in gemms.items()}
            found["gemm_tables"] = {form: kernels.table for form, kernels in gemms.items()}
        if experts is not None:
            found |= {"experts_kernels": experts.run, "experts_table": experts.table}
        return found


_UNITS = {"t0_us": "us", "flops_per_s": "flops/s", "bytes_per_s": "bytes/s", "each_us": "us", "q": "1"}
