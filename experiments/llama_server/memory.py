"""Memory of a GPU with llama-server, part by part.

    weights         those of the layers on the GPU, by the bits of the file's quantisation; the token embedding stays on the host
    KV cache        cells * bits of K and V * layers; a layer with a window has cells for the window and a micro-batch
    states          of layers with a state: a sequence each, in fp32
    compute buffer  of a micro-batch, the larger of two: logits and a hidden state in fp32; without flash attention, the scores of
                    all heads, and six hidden states
    CUDA context    an estimate

Cells are those of ``llama-context.cpp`` and ``llama-kv-cache-iswa.cpp`` (at 02c28f533): the context, and with a split cache the part of
a slot, is a multiple of 256; windows stay in 16 bits where the cache is quantised. The file mapped to the host and its buffers
there are not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...sim.spec import GpuSpec, ModelSpec
from ...sim.spec.gpu import GIB
from ...sim.spec.kv_layers import AttentionLayer, StateLayer, cache_layers, owners
from ...sim.spec.startup.estimate import Estimate, exactly, rest, within
from .gguf import CACHE_BITS, weight_bytes
from .line import LlamaLine

PAD = 256
BATCH, UBATCH = 2048, 512
#: ``--fit-ctx`` and ``--fit-target``: the least context that ``--fit`` lowers to, and the memory that it leaves free.
FIT_CTX, FIT_TARGET = 4096, GIB
_ALL_LAYERS = 1 << 20
#: Used memory of an H100 before anything is loaded, by a log of vLLM: 79.19 - 78.68 GiB. No log of llama.cpp has it.
_CONTEXT_BYTES = int(0.51 * GIB)


def _padded(tokens: int) -> int:
    return -(-tokens // PAD) * PAD


@dataclass(frozen=True)
class LlamaServer:
    """A llama-server with its defaults filled in.

    Attributes:
        ctx_size: ``--ctx-size`` in tokens, of all slots.
        gpu_layers: Layers on the GPU; the output head counts as one more.
    """

    line: LlamaLine
    model: ModelSpec
    gpu: GpuSpec
    ctx_size: int
    gpu_layers: int

    @cached_property
    def slot_cells(self) -> int:
        """Cells of a slot, or of the cache that all share."""
        return _padded(self.ctx_size if self.line.kv_unified else _padded(self.ctx_size) // self.line.slots)

    @property
    def cells(self) -> int:
        """Cells of all slots, in layers that keep every token."""
        return self.slot_cells * self._streams

    @property
    def _streams(self) -> int:
        return 1 if self.line.kv_unified else self.line.slots

    @property
    def batch_size(self) -> int:
        return min(self.line.whole("batch-size", BATCH, 1), self.cells)

    @property
    def ubatch_size(self) -> int:
        return min(self.line.whole("ubatch-size", UBATCH, 1), self.batch_size)

    def _window_cells(self, window: int) -> int:
        if self.line.switches.get("swa-full"):
            return self.cells
        kept = window * (self.line.slots if self.line.kv_unified else 1) + self.ubatch_size
        return _padded(min(self.slot_cells, kept)) * self._streams

    def _on_gpu(self, layer: int) -> bool:
        return layer >= self.model.num_layers + 1 - self.gpu_layers

    @cached_property
    def _layers(self) -> list[AttentionLayer | StateLayer]:
        placed = zip(owners(self.model), cache_layers(self.model), strict=True)
        return [each for layer, each in placed if isinstance(each, AttentionLayer | StateLayer) and self._on_gpu(layer)]

    @property
    def kv_bytes(self) -> int:
        """Of the layers on the GPU; on the host with ``--no-kv-offload``."""
        attention = (layer for layer in self._layers if isinstance(layer, AttentionLayer))
        return sum(map(self._layer_bytes, attention))

    def _layer_bytes(self, layer: AttentionLayer) -> int:
        k, v = (CACHE_BITS[self.line.cache_type(which)] for which in "kv")
        cells = self.cells
        if layer.span.tokens:
            cells, k, v = self._window_cells(layer.span.tokens), max(k, CACHE_BITS["f16"]), max(v, CACHE_BITS["f16"])
        values = 0 if layer.latent else layer.head_size if layer.head_size_v is None else layer.head_size_v
        return int(cells * layer.num_kv_heads * (layer.head_size * k + values * v) / 8)

    @property
    def state_bytes(self) -> int:
        """States of all slots, in fp32."""
        states = (layer for layer in self._layers if isinstance(layer, StateLayer))
        return self.line.slots * sum(4 * prod(shape) for layer in states for shape in layer.shapes)

    @property
    def weights(self) -> Estimate:
        whole, embedding = weight_bytes(self.model, self.line.quantization())
        # A tied embedding is on the GPU as the head, and on the host.
        kept = 0 if self.model.tied_embeddings else embedding
        share = min(self.gpu_layers, self.model.num_layers + 1) / (self.model.num_layers + 1)
        return Estimate(*(max(0, round((size - kept) * share)) for size in whole))

    @property
    def compute(self) -> Estimate:
        tokens = self.ubatch_size
        logits = 4 * tokens * (self.model.vocab_size + self.model.hidden_size)
        scores = 0
        if not self.line.flash_attention:
            scores = 4 * tokens * (self.model.num_heads * self.slot_cells + 6 * self.model.hidden_size)
        likely = max(logits, scores)
        # Later builds reserve logits for the slots alone.
        return Estimate(max(likely // 4, scores), likely, 3 * likely // 2)

    def parts(self) -> dict[str, Estimate]:
        """The parts on the GPU."""
        on_gpu = self.line.switches.get("kv-offload", True)
        return {
            "weights": self.weights,
            "KV cache": exactly(self.kv_bytes if on_gpu else 0),
            "states": exactly(self.state_bytes if on_gpu else 0),
            "compute buffer": self.compute,
            "CUDA context": within(_CONTEXT_BYTES, 0.5),
        }

    @property
    def free(self) -> Estimate:
        """Memory of the GPU that is left; negative where it does not fit."""
        return rest(self.gpu.memory_bytes, [*self.parts().values()])


def llama_server(line: LlamaLine, gpu: GpuSpec, given: str | None = None) -> LlamaServer:
    """The server of a line: what it leaves to ``--fit`` is lowered until its likely memory fits.

    Args:
        given: ``--model`` of the command: the shape of the model.

    Raises:
        SettingError: A value is invalid, or the model is not known.
    """
    shape = line.model(given)
    ctx = line.ctx_size or shape.max_model_len
    found = LlamaServer(line, shape, gpu, ctx, line.whole("gpu-layers", _ALL_LAYERS))
    if not line.fits or found.free.likely >= FIT_TARGET:
        return found
    whole = found
    if line.ctx_size is None:
        sizes = range(min(FIT_CTX, ctx), ctx + 1, PAD)
        fitting = bisect_left(sizes, True, key=lambda size: replace(whole, ctx_size=size).free.likely < FIT_TARGET)
        found = replace(found, ctx_size=sizes[max(0, fitting - 1)])
    if found.free.likely < FIT_TARGET and line.values.get("gpu-layers", "auto") in ("auto", "-1"):
        layers = range(shape.num_layers + 2)
        found = replace(
            found, gpu_layers=max(n for n in layers if not n or replace(found, gpu_layers=n).free.likely >= FIT_TARGET)
        )
    return found
