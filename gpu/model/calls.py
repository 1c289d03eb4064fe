"""The kernel calls of a step: each is checked and prepared in the first layer, and launched in every layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..devices.devices import Device
from ..ops.prepared import Call, LayerCall, Operation
from .batch import Inputs, Rows

#: Tensors of a layer, without scales.
OF_LAYER = 4


class EveryLayer:
    """One operation of a step.

    Args:
        device: The device that computes.
        operation: The operation.
        rest: Its arguments after the four tensors of a layer: tables, lengths, sizes.
    """

    def __init__(self, device: Device, operation: Operation, rest: tuple[Any, ...]) -> None:
        self._device, self._operation, self._rest = device, operation, rest
        self._prepared: LayerCall | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch with the four tensors of a layer, and in fp8 its scales; the first call checks everything.

        Raises:
            SettingError: An argument does not fit, or a tensor is unlike that of the first layer.
        """
        if self._prepared is None:
            call = Call(self._operation, tensors[:OF_LAYER], self._rest, tensors[OF_LAYER:])
            self._prepared = self._device.prepared(call)
        self._prepared(*tensors)


class Attention:
    """Attention of rows of a step; layout and lengths of the rows select the operation.

    Attributes:
        tokens: The tokens of the step that belong to the rows.
    """

    def __init__(self, device: Device, rows: Rows) -> None:
        self.tokens, self._block_size = rows.tokens, rows.block_size
        operation, self._is_paged = _operation(rows), rows.block_tables is not None
        lengths: dict[Operation, tuple[Any, ...]] = {
            "contiguous_attention": (rows.slot_starts, rows.context_lens),
            "decode_attention": (rows.block_tables, rows.context_lens, rows.block_size),
            "prefill_attention": (
                *(rows.block_tables, rows.query_start_loc, rows.context_lens),
                *(rows.block_size, rows.max_query_len),
            ),
        }
        self._call = EveryLayer(device, operation, (*lengths[operation], rows.max_context_len))

    def __call__(self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, *scales: Tensor) -> None:
        """Attend in one layer.

        Args:
            out: ``[tokens, num_heads, head_dim]``, of the rows alone.
            query: As ``out``.
            keys: A cache of the layer in blocks of any size.
            values: As ``keys``.
            scales: Of keys and values in fp8; none else.
        """
        self._call(out, query, self._in_blocks(keys), self._in_blocks(values), *scales)

    def _in_blocks(self, cache: Tensor) -> Tensor:
        """The cache in the rows' blocks, or by slots."""
        if not self._is_paged:
            return cache.view(-1, *cache.shape[2:])
        return cache if cache.shape[1] == self._block_size else cache.view(-1, self._block_size, *cache.shape[2:])


def _operation(rows: Rows) -> Operation:
    if rows.block_tables is None:
        return "contiguous_attention"
    return "decode_attention" if rows.query_start_loc is None else "prefill_attention"


class StepCalls:
    """The kernel calls of a step.

    Attributes:
        write: ``reshape_and_cache`` of all tokens: key, value, and the caches of a layer, with their scales.
        decodes, prefills: Attention of the rows with one new token, and of those with more; None without such rows.
    """

    def __init__(self, device: Device, inputs: Inputs) -> None:
        self.write = EveryLayer(device, "reshape_and_cache", (inputs.slot_mapping,))
        self.decodes = Attention(device, inputs.decodes) if inputs.decodes else None
        self.prefills = Attention(device, inputs.prefills) if inputs.prefills else None

    def attend(self, out: Tensor, query: Tensor, *caches: Tensor) -> None:
        """Attention of all tokens in one layer, into ``out``; ``caches`` are those of :meth:`KvPool.layer`."""
        for attention in (self.decodes, self.prefills):
            if attention is not None:
                attention(out[attention.tokens], query[attention.tokens], *caches)
