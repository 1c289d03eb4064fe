"""A transformer for timing: a model's real shapes, random weights, torch's GEMMs and the kernels over a paged KV pool.

It computes the same operations as an engine in a step, from token ids to the logits of every row's last token. Only its
timing is meaningful; its output is not. On a GPU decode-only steps are captured as CUDA graphs, as in vLLM, with
one graph per padded batch, longest context and layout.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError
from ..devices.devices import Device
from .batch import Batch, Inputs, Stager
from .calls import StepCalls
from .graphs import DecodeGraphs
from .layers import check_shape, draw_weights
from .packing import packed, views
from .pool import KvPool, cache_dtype, require_room

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Skeleton:
    """A model on a device.

    Args:
        model: An OPT-like or Llama-like model.
        device: The device that computes, from ``devices.open``.
        num_blocks: Blocks of the KV pool.
        block_size: Tokens of a block.
        dtype: fp32, fp16 or bf16, of weights, activations and KV.
        kv_cache_dtype: auto, or fp8 for KV with scales of each layer and KV head.
        seed: Seed of the weights.
        host_blocks: Blocks of the pool on the host, for swaps.
        graphs: Whether to capture decode-only steps; default: on a GPU.

    Raises:
        SettingError: The model or dtype is not supported, or does not fit on the device.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        num_blocks: int,
        block_size: int = 16,
        dtype: str = "fp32",
        seed: int = 0,
        host_blocks: int = 0,
        graphs: bool | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        check_shape(model)
        if dtype not in DTYPES:
            raise SettingError("dtype", dtype, f"one of {', '.join(DTYPES)}")
        require_room(device, model.weight_bytes(dtype), "model", model.name, f"weights in {dtype}; take a smaller one")
        of_cache = cache_dtype(kv_cache_dtype, DTYPES[dtype], model, device)
        self.model, self.device, self.dtype, self.kv_cache_dtype = model, device, dtype, kv_cache_dtype
        self.weights = draw_weights(model, device.torch_device, DTYPES[dtype], seed)
        self.pool = KvPool(model, device, num_blocks, block_size, of_cache, host_blocks)
        self.stager = Stager(model.vocab_size, block_size, self.pool.num_slots)
        self._on_gpu = device.torch_device.type == "cuda"
        captures = self._on_gpu if graphs is None else graphs
        self._graphs = DecodeGraphs(self.stager, block_size, device.torch_device, self.forward) if captures else None

    @torch.inference_mode()
    def step(self, batch: Batch) -> Tensor:
        """One step: write the new keys and values, and return the logits ``[rows, vocab_size]`` of the last tokens.

        Starts the work without waiting for it. The logits of a captured step are valid until the next step.
        """
        if self._graphs and self._graphs.takes(batch):
            return self._graphs.step(batch)
        return self.forward(self.inputs(batch))

    @property
    def captures(self) -> bool:
        """Whether decode-only steps are captured."""
        return self._graphs is not None

    def inputs(self, batch: Batch) -> Inputs:
        """The tensors of a step on the device, padded as its graph has them if it is captured."""
        graphs = self._graphs if self._graphs and self._graphs.takes(batch) else None
        inputs = (graphs or self.stager).inputs(batch)
        if not self._on_gpu:
            return inputs
        tensors = inputs.tensors()
        memory = packed(tensors, pinned=True).to(self.device.torch_device, non_blocking=True)
        return inputs.holding(views(memory, tensors))

    def place(self, values: np.ndarray) -> Tensor:
        """``values`` as a new tensor on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device.torch_device)

    def forward(self, inputs: Inputs) -> Tensor:
        """A step with its inputs on the device."""
        hidden, rotary = self.weights.embed(inputs.token_ids, inputs.positions)
        calls = StepCalls(self.device, inputs)
        for number, layer in enumerate(self.weights.layers):
            hidden = layer.forward(hidden, rotary, functools.partial(self.attend, number, calls))
        return self.weights.logits(hidden[inputs.last_tokens])

    def attend(self, layer: int, calls: StepCalls, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values of a layer, and attend to all tokens of the rows."""
        caches = self.pool.layer(layer)
        calls.write(key, value, *caches)
        out = torch.empty_like(query)
        calls.attend(out, query, *caches)
        return out
