"""What layers with a state of fixed size cost, beside their GEMMs: lines in decodes and in tokens of prompts.

A roofline of what the kernels must move and compute:

    decode, a sequence   read and write the whole state; inputs and outputs of convolution and recurrence
    prefill, a token     max(bytes, flops)
        bytes            inputs and outputs as above; the matrices that kernels hand on for each chunk
                         (``StateMixer.chunk_bytes``), over its tokens
        flops            of the recurrence in chunks, linear in the tokens (``StateMixer.prefill_flops``)

Neither depends on the context. Left out: the flops of a decode (about one for each byte of the state), the state that
a prompt starts from and leaves behind (once a prompt, where chunks pass many), and launches, which ``RooflineCost``
counts. The convolution's own flops are among those of the GEMMs. Sources are named in ``spec/states.py``.
"""

from __future__ import annotations

from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from . import shares
from .attention import ELEMENT_BYTES, ticks
from .base import coefficient


class StateCost:
    """The states of all layers that have one on one rank, compiled to ticks.

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
