"""Arrays of other libraries: taken without a copy, given back for DLPack, and refused by name."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays, cache, paged_attention, prefill
from fragmeter.sim.types.errors import MissingExtra, SettingError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


class Exported:
    """An array of a library that is known by DLPack alone, as JAX's and TensorFlow's are."""

    def __init__(self, array, device: tuple[int, int] | None = None) -> None:
        self._array, self._device = array, device

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device or tuple(self._array.__dlpack_device__())


class Legacy(Exported):
    """The same from before DLPack 1.0, which cannot say whether memory may be written."""

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__()


def exported(given: gpu_cases.Case) -> dict:
    return {name: Exported(one) if isinstance(one, np.ndarray) else one for name, one in vars(given).items()}


@needs_compiler
def test_arrays_with_dlpack_are_read_where_they_are(monkeypatch):
    given = gpu_cases.case("float32", (4, 2), 64, 16, [37, 1, 0, 40])
    wanted = paged_attention.forward(**vars(given))
    assert arrays.view("query", Exported(given.query)).pointer == given.query.ctypes.data
    out = paged_attention.forward(**exported(given), check_ids=True)
    assert isinstance(out, np.ndarray) and out.tobytes() == wanted.tobytes()
    # And what comes back goes on by DLPack.
    assert np.shares_memory(np.from_dlpack(Exported(out)), out)


@needs_compiler
def test_every_function_takes_them():
    given = gpu_cases.case("float32", (4, 2), 64, 16, [37, 20], query_lens=[5, 3])
    starts = np.array([0, 5, 8], np.int32)
    out = prefill.forward(**exported(given), query_start_loc=Exported(starts), max_query_len=5, check_ids=True)
    assert gpu_cases.error(out, gpu_cases.expected(given, [5, 3])) <= 1e-5
    new, caches = np.ones((2, 3, 2, 4), np.float32), [np.zeros((2, 4, 2, 4), np.float32) for _ in "kv"]
    cache.reshape_and_cache(*map(Exported, new), *caches, Exported(np.array([6, -1, 1])), check_ids=True)
    assert all(one.reshape(8, -1).any(axis=1).nonzero()[0].tolist() == [1, 6] for one in caches)


@needs_compiler
def test_a_prepared_call_takes_them_in_every_layer():
    given, other = (gpu_cases.case("float32", (4, 2), 64, 16, [37, 1]) for _ in range(2))
    other.query[:] *= -1
    out = np.empty_like(given.query)
    call = paged_attention.prepare(out, **exported(given))
    call(out, *(Exported(one) for one in (other.query, other.key_cache, other.value_cache)))
    assert gpu_cases.error(out, gpu_cases.expected(other)) <= 1e-5
    with pytest.raises(SettingError, match=r"^query.shape = \(1, 4, 64\): must be \(2, 4, 64\), for which"):
        call(out, Exported(other.query[:1]), other.key_cache, other.value_cache)


@needs_compiler
def test_bfloat16_goes_by_torch():
    """Numpy's DLPack has no such dtype; the error says what to do."""
    torch = pytest.importorskip("torch")
    given = gpu_cases.case("bfloat16", (4, 2), 64, 16, [37, 1])
    tensors = {
        name: torch.from_numpy(one.view(np.int16)).view(torch.bfloat16) if one.dtype.name == "bfloat16" else torch.from_numpy(one)
        for name, one in vars(given).items()
        if isinstance(one, np.ndarray)
    }  # fmt: skip
    sizes = {"block_size": 16, "max_context_len": 37}
    with pytest.raises(SettingError, match=r"^query = 'Exported': numpy cannot take it by DLPack .*torch.from_dlpack"):
        paged_attention.forward(**tensors | {"query": Exported(tensors["query"])}, **sizes)
    taken = {name: torch.from_dlpack(Exported(tensor)) for name, tensor in tensors.items()}
    out = paged_attention.forward(**taken, **sizes)
    assert gpu_cases.error(out.float().numpy(), gpu_cases.expected(given)) <= 1e-2


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "complaint"),
    [
        (read_only(np.zeros((2, 4, 64), np.float32)), "out = 'read-only memory': is written: must be writable"),
        (Exported(read_only(np.zeros((2, 4, 64), np.float32))), "out = 'read-only memory': is written: must be writable"),
        (Legacy(np.zeros((2, 4, 64), np.float32)), "out = 'read-only memory': is written: must be writable"),
        (Exported(np.zeros((2, 4, 64), np.float32), (2, 0)), "out = 'Exported': is written: must be an array of torch or CuPy"),
        (Exported(np.zeros((2, 4, 64), np.float32), (10, 0)), r"out = 'DLPack device \(10, 0\)': must be on the CPU or on a CUDA"),
        (Exported(np.zeros((2, 4, 64), np.float32)[..., ::2]), "out = .*: must be contiguous"),
        (Exported(np.zeros((2, 4, 32), np.float32)), r"out.shape = \(2, 4, 32\): must be \(2, 4, 64\)"),
        ([0.0], "out = 'list': must be an array of numpy, torch or CuPy, or export __dlpack__ or __cuda_array_interface__"),
    ],
    ids=["numpy", "dlpack", "legacy", "device memory", "other device", "strides", "shape", "list"],
)  # fmt: skip
def test_what_cannot_be_written_or_taken_is_named(out, complaint):
    given = gpu_cases.case("float32", (4, 2), 64, 16, [37, 1])
    with pytest.raises(SettingError, match=f"^{complaint}"):
        paged_attention.paged_attention_cuda_forward(out, **vars(given))


@needs_compiler
def test_a_prepared_call_writes_to_no_read_only_array():
    given = gpu_cases.case("float32", (4, 2), 64, 16, [37, 1])
    call = paged_attention.prepare(np.empty_like(given.query), **vars(given))
    out = read_only(np.zeros_like(given.query))
    with pytest.raises(SettingError, match="^out = 'read-only memory'"):
        call(out, given.query, given.key_cache, given.value_cache)
    assert not out.any()


class OfCupy:
    """What :func:`arrays.view` reads of CuPy's ndarray."""

    def __init__(self, source: object) -> None:
        self.source, self.device = source, SimpleNamespace(id=3)
        self.data, self.shape, self.dtype = SimpleNamespace(ptr=4096), (2,), np.dtype(np.int32)
        self.nbytes, self.flags = 8, SimpleNamespace(c_contiguous=True)


OfCupy.__module__ = "cupy"


def test_device_arrays_are_taken_by_cupy_which_waits_for_their_stream(monkeypatch):
    """Numba's by the interface, with its stream; JAX's by DLPack, to which CuPy passes its current stream."""
    taken: list[tuple[str, object]] = []

    def take(how: str):
        def of(array: object) -> OfCupy:
            taken.append((how, array))
            return OfCupy(array)

        return of

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asarray=take("interface"), from_dlpack=take("DLPack")))
    numba = SimpleNamespace(__cuda_array_interface__={"data": (4096, False), "stream": 7})
    jax = Exported(np.zeros(2, np.int32), (2, 3))
    for array in (numba, jax):
        found = arrays.view("context_lens", array)
        assert (found.pointer, found.device, found.dtype) == (4096, "cuda:3", "int32")
    assert taken == [("interface", numba), ("DLPack", jax)]
    numba.__cuda_array_interface__["data"] = (4096, True)
    assert arrays.view("query", numba).pointer == 4096
    with pytest.raises(SettingError, match="^out = 'read-only memory': is written: must be writable"):
        arrays.view("out", numba, written=True)


def test_device_arrays_without_cupy_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[gpu\]'"):
        arrays.view("query", Exported(np.zeros(2, np.int32), (2, 3)))
