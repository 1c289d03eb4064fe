"""Devices by their names: the calls of each against float64, and what is missing in one line."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.check import fp8
from fragmeter.gpu.devices import devices, probe
from fragmeter.gpu.ops.prepared import Call
from fragmeter.sim.types.errors import MissingExtra, SettingError, UserError

torch = pytest.importorskip("torch")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
BOTH = pytest.mark.parametrize("name", ["cpu", pytest.param("shim", marks=needs_compiler)])


def tensors(*arrays: np.ndarray) -> list:
    return [torch.from_numpy(array.copy()) for array in arrays]


def flat(cache: np.ndarray) -> np.ndarray:
    """A cache by slots."""
    return cache.reshape(-1, *cache.shape[2:])


@BOTH
def test_decode_attention(name):
    given = gpu_cases.case("float32", (4, 2), 64, 16, [37, 1, 0, 40])
    arrays = tensors(*list(vars(given).values())[:5])
    out = torch.full_like(arrays[0], torch.nan)
    step = (*arrays[3:], given.block_size, given.max_context_len)
    devices.open(name).run(Call("decode_attention", (out, *arrays[:3]), step))
    assert gpu_cases.error(out.numpy(), gpu_cases.expected(given)) <= 1e-5


@BOTH
def test_contiguous_attention(name):
    given = gpu_cases.case("float32", (4, 2), 64, 16, [16, 5])
    query, key_cache, value_cache, tables, contexts = list(vars(given).values())[:5]
    starts = tables[:, 0].astype(np.int64) * 16
    arrays = tensors(query, flat(key_cache), flat(value_cache), starts, contexts)
    out = torch.full_like(arrays[0], torch.nan)
    devices.open(name).run(Call("contiguous_attention", (out, *arrays[:3]), (*arrays[3:], 16)))
    assert gpu_cases.error(out.numpy(), gpu_cases.expected(given)) <= 1e-5


@BOTH
def test_prefill_attention(name):
    """A whole prompt, a sequence without new tokens, and a chunk after 18 tokens."""
    given = gpu_cases.case("float32", (4, 2), 64, 16, [20, 3, 23])
    counts = np.array([20, 0, 5], np.int32)
    # Each new token as a decode of its own.
    sequences = np.repeat(np.arange(3), counts)
    lengths = np.concatenate([np.arange(1, 21), np.arange(19, 24)]).astype(np.int32)
    queries = np.random.default_rng(5).standard_normal((25, 4, 64)).astype(np.float32)
    caches = given.key_cache, given.value_cache
    wanted = gpu_cases.expected(gpu_cases.Case(queries, *caches, given.block_tables[sequences], lengths, 16, 23))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays = tensors(queries, *caches, given.block_tables, starts, given.context_lens)
    out = torch.full_like(arrays[0], torch.nan)
    devices.open(name).run(Call("prefill_attention", (out, *arrays[:3]), (*arrays[3:], 16, 20, 23)))
    assert gpu_cases.error(out.numpy(), wanted) <= 1e-5


@BOTH
def test_tokens_are_written_and_blocks_copied(name):
    device = devices.open(name)
    key, value = torch.randn(2, 4, 2, 64)
    caches = [torch.zeros(3, 2, 2, 64) for _ in "kv"]
    device.run(Call("reshape_and_cache", (key, value, *caches), (torch.tensor([5, -1, 0, 1]),)))
    device.copy_blocks(caches[:1], caches[1:], torch.tensor([[0, 1]]))
    for new, cache in zip((key, value), caches, strict=True):
        wanted = torch.zeros(6, 2, 64)
        wanted[[5, 0, 1, 2, 3]] = new[[0, 2, 3, 2, 3]]
        assert torch.equal(cache.flatten(0, 1), wanted)


@BOTH
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
def test_bytes_of_fp8_are_codes(cache_dtype, name):
    """uint8 caches hold the codes that float8_e4m3fn caches hold, and no integers."""
    device, new = devices.open(name), [20, 1, 0, 5]
    given = fp8.fp8_case("float16", (4, 2), 64, 32, [20, 1, 0, 23], query_lens=new)
    case = given.given
    caches = [cache.view(cache_dtype) for cache in tensors(case.key_cache, case.value_cache)]
    query, tables, contexts, *scales = tensors(
        case.query, case.block_tables, case.context_lens, given.k_scale, given.v_scale
    )
    out, starts = torch.empty_like(query), torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    device.run(Call("prefill_attention", (out, query, *caches), (tables, starts, contexts, 32, 20, 32), tuple(scales)))
    wanted = given.expected(new)
    assert gpu_cases.error(out.numpy(), wanted) <= 1e-3
    # The last new token of a sequence attends to all of its tokens.
    last = [19, 20, 20, 25]
    alone, wanted = query[last].contiguous(), wanted[last]
    wanted[2] = 0
    out = torch.full_like(alone, torch.nan)
    device.run(Call("decode_attention", (out, alone, *caches), (tables, contexts, 32, 32), tuple(scales)))
    assert gpu_cases.error(out.numpy(), wanted) <= 1e-3
    flat_caches, starts = [cache.flatten(0, 1) for cache in caches], tables[:, 0].long() * 32
    starts[2] = -1
    layer = (out.fill_(torch.nan), alone, *flat_caches)
    device.run(Call("contiguous_attention", layer, (starts, contexts, 32), tuple(scales)))
    assert gpu_cases.error(out.numpy(), wanted) <= 1e-3


@BOTH
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
def test_tokens_are_written_as_codes_of_fp8(cache_dtype, name):
    key, value = torch.randn(2, 4, 2, 64)
    k_scale, v_scale = torch.tensor([[0.03, 0.01], [0.001, 0.5]])
    caches = [torch.zeros(3, 2, 2, 64, dtype=torch.uint8).view(cache_dtype) for _ in "kv"]
    slots = torch.tensor([5, -1, 0, 1])
    devices.open(name).run(Call("reshape_and_cache", (key, value, *caches), (slots,), (k_scale, v_scale)))
    for new, scale, cache in zip((key, value), (k_scale, v_scale), caches, strict=True):
        wanted = np.zeros((6, 2, 64), np.uint8)
        wanted[[5, 0, 1]] = fp8.encoded((new / scale[:, None]).numpy())[[0, 2, 3]]
        assert np.array_equal(cache.view(torch.uint8).numpy().reshape(wanted.shape), wanted)


@BOTH
def test_blocks_go_to_the_host_and_back(name):
    device = devices.open(name)
    cache, host = torch.randn(4, 2, 1, 64), device.host_empty((2, 2, 1, 64), torch.float32)
    before = cache.clone()
    device.swap_blocks(cache, host, torch.tensor([[1, 0], [3, 1]]))
    device.swap_blocks(host, cache, torch.tensor([[0, 2], [1, 0]]))
    device.synchronize()
    assert torch.equal(cache, before[[3, 1, 1, 3]])


@pytest.mark.parametrize("name", ["cpu", "shim"])
def test_a_device_says_what_it_is(name):
    said = devices.open(name).describe()
    assert json.loads(json.dumps(said)) == said
    assert said["device"] == name and said["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["gpu", "cpu:1", "cuda:", "cuda:x", ""])
def test_another_name_is_refused(name):
    with pytest.raises(SettingError, match=f"device = '{name}': must be cpu, shim, cuda, or cuda: and a number"):
        devices.open(name)


def test_without_torch_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[torch\]'"):
        devices.open("cpu")


def found(state: str, *names: str) -> probe.GpuReport:
    return probe.GpuReport(state, f"what {state} means", devices=names, memory_bytes=(80 << 30,) * len(names))


@pytest.mark.parametrize(
    ("report", "cuda", "seen", "complaint"),
    [
        (found("no-cupy"), "13.0", True, "what no-cupy means"),
        (found("ready", "H200"), None, False, "torch 2.13 is built for the CPU only: install a build of it for CUDA"),
        (found("no-driver"), "13.0", False, "no GPU to work with: what no-driver means"),
        (found("no-device"), "13.0", False, "no GPU to work with: what no-device means"),
        (
            found("ready", "H200"),
            "13.0",
            False,
            "torch 2.13, built for CUDA 13.0, does not see the GPU: install its build for the driver's CUDA",
        ),
        (found("ready", "H200"), "13.0", True, "device = 'cuda:1': there are 1, numbered from 0"),
    ],
)
def test_what_a_gpu_lacks_is_said_in_one_line(report, cuda, seen, complaint, monkeypatch):
    monkeypatch.setattr(devices, "probe", lambda: report)
    built = {"version": SimpleNamespace(cuda=cuda), "cuda": SimpleNamespace(is_available=lambda: seen)}
    fake = SimpleNamespace(__version__="2.13", **built)
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(UserError) as caught:
        devices.open("cuda:1")
    assert str(caught.value) == complaint


def test_a_gpu_that_is_there_is_opened_and_made_current(monkeypatch):
    current = []
    cuda = SimpleNamespace(is_available=lambda: True, set_device=current.append)
    monkeypatch.setattr(devices, "probe", lambda: found("ready", "H200", "H200"))
    fake = SimpleNamespace(device=torch.device, version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert devices.open("cuda").torch_device == torch.device("cuda", 0)
    assert devices.open("cuda:1").torch_device == torch.device("cuda", 1)
    assert current == [0, 1]


def test_a_gpu_that_is_asked_for_is_not_made_current(monkeypatch):
    """That would take memory from the programs that open it."""
    monkeypatch.setattr(devices, "probe", lambda: found("ready", "H200"))
    cuda = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda))
    assert devices.require("cuda:0") == 80 << 30
    with pytest.raises(SettingError, match="device = 'cuda:1': there are 1, numbered from 0"):
        devices.require("cuda:1")


def test_memory_that_torch_reserves_and_does_not_use_is_free():
    """10 bytes are free, and of the 7 that torch holds 5 are used."""
    cuda = SimpleNamespace(mem_get_info=lambda _: (10, 80), memory_reserved=lambda _: 7, memory_allocated=lambda _: 5)
    fake = SimpleNamespace(device=torch.device, cuda=cuda)
    assert devices.CudaDevice(fake, 0).free_bytes() == 12


def test_a_gpu_says_what_it_is(monkeypatch):
    """Its properties as torch has them, versions as CuPy has them, clocks as the driver's own tool says."""
    commands = []

    def smi(command, **how) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout=f"{len(commands)}\n")

    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13010)
    cupy = SimpleNamespace(__version__="14.1", cuda=SimpleNamespace(runtime=runtime))
    found = dict(name="H200", major=9, minor=0, multi_processor_count=132, total_memory=10**11, L2_cache_size=10**8)
    properties = {3: SimpleNamespace(**found)}
    fake = SimpleNamespace(
        __version__="2.13",
        device=torch.device,
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(get_device_properties=properties.__getitem__),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(devices.subprocess, "run", smi)
    said = devices.CudaDevice(fake, 3).describe()
    assert json.loads(json.dumps(said)) == said
    assert (said["device"], said["name"], said["compute_capability"]) == ("cuda:3", "H200", "9.0")
    assert (said["driver"], said["clocks_mhz"]) == ("1", {"sm": "2", "max_sm": "3", "memory": "4", "max_memory": "5"})
    assert said["limits"]["power_limit_w"] == "6" and {"throttling", "temperature_c"} <= set(said["limits"])
    assert all("--id=3" in command for command in commands)

    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: open("no such file"))
    assert devices.CudaDevice(fake, 3).describe()["driver"] is None
