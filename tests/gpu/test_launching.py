"""Which way arrays take. A CuPy that runs kernels on the CPU stands in for a GPU: what is packed, where it goes."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.check.fp8 import fp8_case
from fragmeter.gpu.ops import arrays, cpu_kernels, launching, paged_attention, prefill
from fragmeter.gpu.ops.cache import copy_blocks, swap_blocks
from fragmeter.gpu.ops.source import Kernel
from fragmeter.sim.types.errors import MissingExtra, SettingError


class Current:
    """A device or a stream, which is current while it is entered."""

    entered: list[Current] = []

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.id, self.ptr = kind, number, number
        self.attributes = {"MultiProcessorCount": 4, "MaxSharedMemoryPerMultiprocessor": 164 * 1024}

    def __enter__(self) -> None:
        self.entered.append(self)

    def __exit__(self, *error: object) -> None:
        self.entered.pop()

    @classmethod
    def now(cls, kind: str) -> int | None:
        return next((one.id for one in reversed(cls.entered) if one.kind == kind), None)


class DeviceArray:
    """What of CuPy's ndarray is used, over numpy."""

    made: list[DeviceArray] = []

    def __init__(self, values: np.ndarray, device: int | None = None) -> None:
        number = Current.now("device") or 0 if device is None else device
        self.values, self.device = values, Current("device", number)
        self.data = SimpleNamespace(ptr=values.ctypes.data)
        self.shape, self.dtype, self.flags, self.nbytes = values.shape, values.dtype, values.flags, values.nbytes
        self.fill = values.fill
        self.made.append(self)

    def get(self) -> np.ndarray:
        return self.values


DeviceArray.__module__ = "cupy"


class FakeFunction:
    """A kernel that may have 48 KiB of dynamic shared memory unless it is granted more."""

    def __init__(self, cupy: FakeCupy, kernel: Kernel) -> None:
        self.cupy, self.source, self.max_dynamic_shared_size_bytes = cupy, kernel, 48 * 1024
        self.kernel = SimpleNamespace(ptr=self)

    def values(self, parameters: int) -> list[np.uint64]:
        """The 8 bytes at each address of a launch's parameters; a kernel reads as many of them as its type has, and of a pack as
        many as its expression names pointers."""
        name, _, of_pack = self.source.expression.partition("<")
        declared = re.search(rf"\b{name}\(([^)]*)\) {{", self.source.text)
        count = sum("..." not in parameter for parameter in declared[1].split(",")) + of_pack.count("*")
        addresses = (ctypes.c_uint64 * count).from_address(parameters)
        return [np.uint64(ctypes.c_uint64.from_address(address).value) for address in addresses]


class FakeCupy:
    """Devices and streams have numbers, CuPy's own stream is 0; what is launched where is written down."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.pinned: list[int] = []
        self.empty = lambda shape, dtype: DeviceArray(np.empty(shape, dtype))
        self.asarray = DeviceArray
        self.RawModule = lambda code, options, name_expressions: SimpleNamespace(
            get_function=lambda name: FakeFunction(self, Kernel(code, name))
        )
        self.cuda = SimpleNamespace(
            Device=lambda number: Current("device", number),
            get_current_stream=lambda: Current("stream", 0),
            driver=SimpleNamespace(
                occupancyMaxActiveBlocksPerMultiprocessor=self._occupancy, launchKernel=self._launch
            ),
            runtime=SimpleNamespace(
                setDevice=self._set_device,
                memcpyAsync=self._copy,
                memcpyDefault=4,
                pointerGetAttributes=self._attributes,
                memoryTypeUnregistered=0,
            ),
        )

    def _copy(self, target: int, origin: int, nbytes: int, kind: int, stream: int) -> None:
        self.launched.append(("copy", nbytes, Current.now("device"), stream))
        ctypes.memmove(target, origin, nbytes)

    def _occupancy(self, function: FakeFunction, threads: int, shared_bytes: int) -> int:
        assert (threads, max(shared_bytes, 48 * 1024)) == (128, function.max_dynamic_shared_size_bytes)
        assert Current.now("device") is not None
        return 2

    def _attributes(self, pointer: int) -> SimpleNamespace:
        known = [one.data.ptr for one in DeviceArray.made] + self.pinned
        return SimpleNamespace(type=int(pointer in known))

    def _set_device(self, number: int) -> None:
        """Makes the context of the current device current to the thread."""
        assert number == Current.now("device")

    def _launch(self, function: FakeFunction, *rest: int) -> None:
        (*extents, shared_bytes, stream, parameters, extra) = rest
        grid, block = tuple(extents[:3]), tuple(extents[3:])
        assert shared_bytes <= function.max_dynamic_shared_size_bytes and extra == 0
        self.launched.append((function.source.expression, grid, Current.now("device"), stream))
        touched = [arrays.view("array", one.values) for one in DeviceArray.made]
        values = function.values(parameters)
        cpu_kernels.CpuKernels().prepared(
            function.source, grid, block, values, touched=touched, shared_bytes=shared_bytes
        )()


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(DeviceArray, "made", [])
    launching._cuda.cache_clear()
    yield fake
    launching._cuda.cache_clear()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def on_device(given: gpu_cases.Case, device: int = 0) -> dict:
    return {
        name: DeviceArray(value, device) if isinstance(value, np.ndarray) else value
        for name, value in vars(given).items()
    }


@needs_compiler
def test_device_arrays_are_launched_on_their_device_and_the_current_stream(cupy):
    given = gpu_cases.case("float16", (8, 2), 64, 16, [1100, 1, 0])
    out = paged_attention.forward(**on_device(given, 3), check_ids=True)
    assert gpu_cases.error(out.get(), gpu_cases.expected(given)) <= 1e-3
    # The places of 4 multiprocessors.
    assert cupy.launched == [("decode_attention<__half, 64, 8, PagedTiles>", (8, 1, 1), 3, 0)]


@needs_compiler
def test_a_prepared_call_takes_the_arrays_of_another_layer(cupy):
    """All pieces are of the other layer's arrays, through the driver's parameters."""
    first, other = (gpu_cases.case("float16", (8, 2), 64, 16, [1100, 1, 0], seed=0) for _ in range(2))
    other.query[:], other.value_cache[:] = np.roll(other.query, 1, axis=0), 2 * other.value_cache
    held = on_device(first, 3)
    outs = [DeviceArray(np.full_like(first.query, np.nan), 3) for _ in range(2)]
    call = paged_attention.prepare(outs[0], **held)
    layer = {name: DeviceArray(getattr(other, name), 3) for name in ("query", "key_cache", "value_cache")}
    call(outs[1], *layer.values())
    assert np.isnan(outs[0].get()).all()
    assert gpu_cases.error(outs[1].get(), gpu_cases.expected(other)) <= 1e-3
    assert [name.partition("<")[0] for name, *_ in cupy.launched] == ["decode_attention"]


@needs_compiler
def test_prefill_is_granted_its_shared_memory(cupy):
    given = on_device(gpu_cases.case("float16", (4, 2), 128, 16, [40, 3], query_lens=[30, 3]))
    starts = DeviceArray(np.array([0, 30, 33], np.int32), 0)
    out = prefill.forward(**given, query_start_loc=starts, max_query_len=30, check_ids=True)
    assert not np.isnan(out.get()).any()
    assert prefill.tile_of("float16", 128).shared_bytes > 48 * 1024
    assert cupy.launched == [("prefill_attention<__half, 128>", (2, 2, 1), 0, 0)]


@needs_compiler
def test_prefill_over_fp8_passes_the_scales_of_a_layer(cupy):
    """Those of the launch, which are not those of the preparation."""
    new = [30, 3]
    given = fp8_case("float16", (4, 2), 128, 16, [40, 3], query_lens=new)
    named = {
        name: DeviceArray(one, 0) if isinstance(one, np.ndarray) else one for name, one in given.arguments().items()
    }
    out = DeviceArray(np.full_like(given.given.query, np.nan), 0)
    others = {name: DeviceArray(np.full(2, np.nan, np.float32), 0) for name in ("k_scale", "v_scale")}
    starts = DeviceArray(np.array([0, 30, 33], np.int32), 0)
    call = prefill.prepare(out, **named | others, query_start_loc=starts, max_query_len=30)
    call(out, *(named[name] for name in ("query", "key_cache", "value_cache", "k_scale", "v_scale")))
    assert gpu_cases.error(out.get(), given.expected(new)) <= 1e-3


@needs_compiler
def test_addresses_of_layers_go_to_the_device(cupy):
    caches = [DeviceArray(np.arange(64, dtype=np.float16).reshape(4, 2, 1, 8) + layer) for layer in range(4)]
    copy_blocks(caches[:2], caches[2:], DeviceArray(np.array([[0, 3]])))
    for cache in caches:
        assert (cache.get()[3] == cache.get()[0]).all()
    assert [grid for _, grid, *_ in cupy.launched] == [(1, 2, 1)]


def test_blocks_are_swapped_on_the_current_stream_from_pinned_memory(cupy):
    device = DeviceArray(np.arange(64, dtype=np.float16).reshape(4, 2, 1, 8), 3)
    host = np.zeros((4, 2, 1, 8), np.float16)
    pairs = np.array([[2, 0], [3, 1], [0, 3]])
    with pytest.raises(SettingError, match="destination_cache = 'pageable memory': must be pinned"):
        swap_blocks(device, host, pairs)
    cupy.pinned.append(host.ctypes.data)
    swap_blocks(device, host, pairs)
    assert host[[0, 1, 3]].tobytes() == device.get()[[2, 3, 0]].tobytes()
    assert cupy.launched == [("copy", 32, 3, 0), ("copy", 64, 3, 0)]


def test_an_empty_cache_of_the_host_has_no_memory_to_ask_about(cupy, monkeypatch):
    """Its address is 0, of which CUDA knows nothing."""
    device = DeviceArray(np.zeros((4, 2, 1, 8), np.float16), 0)
    known = {device.data.ptr: SimpleNamespace(type=2)}
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", known.__getitem__)
    swap_blocks(device, np.zeros((0, 2, 1, 8), np.float16), np.zeros((0, 2), np.int64))
    assert cupy.launched == []


def test_two_gpus_swap_nothing(cupy):
    one, other = (DeviceArray(np.zeros((4, 2, 1, 8), np.float16), device) for device in (0, 1))
    with pytest.raises(SettingError, match="destination_cache = 'cuda:1': must be on the host or on cuda:0"):
        swap_blocks(one, other, np.array([[0, 0]]))


def test_nothing_is_launched_for_an_empty_batch(cupy):
    given = on_device(gpu_cases.case("float16", (8, 2), 64, 16, [5]))
    for name in ("query", "block_tables", "context_lens"):
        given[name] = DeviceArray(given[name].get()[:0])
    assert paged_attention.forward(**given).shape == (0, 8, 64)
    assert cupy.launched == []


def test_torch_tensors_take_torchs_current_stream(cupy, monkeypatch):
    class Tensor:
        pass

    handles = iter((700, 800))
    current = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=next(handles) + device))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=current))
    given = arrays.Array("query", 16, (0,), "int32", 0, "cuda:2", Tensor())
    nothing = Kernel('extern "C" __global__ void nothing(const int *query) { (void)query; }', "nothing")
    launch = launching.kernels_for(given).prepared(nothing, (1, 1, 1), (1, 1, 1), (given,))
    # A launch takes the stream that is current then, not the one of its preparation.
    launch()
    launch()
    assert cupy.launched == [("nothing", (1, 1, 1), 2, stream) for stream in (702, 802)]


def test_arrays_of_two_devices_do_not_mix(cupy):
    given = on_device(gpu_cases.case("float16", (8, 2), 64, 16, [5]))
    given["value_cache"] = given["value_cache"].get()
    with pytest.raises(SettingError, match="value_cache = 'cpu': must be on cuda:0, as query is"):
        paged_attention.forward(**given)


def test_without_cupy_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    launching._cuda.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[gpu\]'"):
        launching.kernels_for(arrays.Array("query", 0, (0,), "int32", 0, "cuda:0", None))


def test_another_kind_of_device_is_refused():
    with pytest.raises(SettingError, match="query = 'mps:0': must be on the CPU or on a CUDA device"):
        launching.kernels_for(arrays.Array("query", 0, (0,), "int32", 0, "mps:0", None))
