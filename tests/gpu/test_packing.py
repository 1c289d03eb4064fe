"""Tensors in one piece of memory: each comes back as it was, from a copy, too."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fragmeter.gpu.devices import devices
from fragmeter.gpu.model import skeleton as skeletons
from fragmeter.gpu.model.batch import Batch, Stager
from fragmeter.gpu.model.packing import packed, views
from fragmeter.sim.spec import model

#: Kernels load 16 bytes at a time.
LOAD_BYTES = 16


def test_tensors_come_back_from_a_copy_of_the_memory():
    generator = torch.Generator().manual_seed(0)
    shapes = [
        ((7,), torch.int64),
        ((3, 5), torch.int32),
        ((0,), torch.int64),
        ((1,), torch.int32),
        ((300,), torch.int64),
    ]
    tensors = [torch.randint(-(2**30), 2**30, shape, generator=generator).to(dtype) for shape, dtype in shapes]
    tensors.append(tensors[1].T)  # not contiguous
    memory = packed(tensors)
    found = list(views(memory.clone(), tensors))
    for tensor, back in zip(tensors, found, strict=True):
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
        assert not len(back) or (back.data_ptr() - found[0].data_ptr()) % LOAD_BYTES == 0
    again = packed([tensor + 1 for tensor in tensors])
    assert len(again) == len(memory)


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_batch_keeps_its_tensors_apart(contiguous):
    """A batch of decodes and prompts over other tensors is the same batch: none is lost, and none takes another's place."""
    lens, contexts = [1, 4, 1, 3], [9, 12, 5, 3]
    ids = np.arange(9)
    if contiguous:
        batch = Batch.contiguous(lens, contexts, ids, [0, 16, 32, 48])
    else:
        batch = Batch.paged(lens, contexts, ids, [[4, 1, 6], [0, 2, 5], [3, 7], [8]], 4)
    inputs = Stager(100, 4, 64).inputs(batch)
    tensors = inputs.tensors()
    moved = inputs.holding(views(packed(tensors), tensors))
    for before, after in zip(tensors, moved.tensors(), strict=True):
        assert torch.equal(before, after) and before.data_ptr() != after.data_ptr()
    for name in ("token_ids", "positions", "slot_mapping", "last_tokens"):
        assert torch.equal(getattr(inputs, name), getattr(moved, name))
    for before, after in ((inputs.decodes, moved.decodes), (inputs.prefills, moved.prefills)):
        for name in before.__slots__:
            one, other = getattr(before, name), getattr(after, name)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name


def test_a_gpu_gets_a_copy_of_all_tensors_at_once(monkeypatch):
    """Played by a CPU, where pinned memory is any memory."""
    sent = []

    def pinned_on_a_gpu(tensors, pinned=False):
        assert pinned
        sent.append(packed(tensors))
        return sent[-1]

    monkeypatch.setattr(skeletons, "packed", pinned_on_a_gpu)
    skeleton = skeletons.Skeleton(model("toy-llama"), devices.open("cpu"), num_blocks=8)
    batch = Batch.paged([3, 1], [20, 5], [1, 2, 3, 4], [[5, 2], [1]], 16)
    here = skeleton.inputs(batch)
    monkeypatch.setattr(skeleton, "_on_gpu", True)
    there = skeleton.inputs(batch)
    (memory,) = sent
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    for before, after in zip(here.tensors(), there.tensors(), strict=True):
        assert torch.equal(before, after) and before.dtype == after.dtype
        assert begin <= after.data_ptr() < end
