"""Calls that are prepared once a step and launched in every layer, beside single calls and float64."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arguments, cache, contiguous, cpu_kernels, paged_attention, prefill, prepared
from fragmeter.sim.types.errors import KernelFault, SettingError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

HEADS, HEAD_DIM, BLOCK_SIZE = (4, 2), 64, 16
#: Long enough for several pieces, which merge.
CONTEXTS = [600, 1, 0, 37]
NEW = [20, 1, 0, 5]


def layers(count: int, query_lens=None) -> list[gpu_cases.Case]:
    """The same tables and lengths with the queries and caches of each layer."""
    first = gpu_cases.case("float32", HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXTS, query_lens=query_lens)
    rng = np.random.default_rng(7)
    drawn = [vars(first)]
    for _ in range(count - 1):
        changed = {
            name: rng.standard_normal(vars(first)[name].shape, np.float32)
            for name in ("query", "key_cache", "value_cache")
        }
        drawn.append(vars(first) | changed)
    return [gpu_cases.Case(**one) for one in drawn]


def empty_like(query: np.ndarray) -> np.ndarray:
    return np.full_like(query, np.nan)


def tensors(given: gpu_cases.Case) -> tuple[np.ndarray, ...]:
    return given.query, given.key_cache, given.value_cache


def prepare_decode(given: gpu_cases.Case) -> prepared.Prepared:
    rest = (given.block_tables, given.context_lens, given.block_size, given.max_context_len)
    return paged_attention.prepare(empty_like(given.query), *tensors(given), *rest, check_ids=True)


def decoded(call: prepared.Prepared, given: gpu_cases.Case) -> np.ndarray:
    out = empty_like(given.query)
    call(out, *tensors(given))
    return out


def test_decodes_of_every_layer_are_those_of_single_calls():
    first, *others = layers(3)
    call = prepare_decode(first)
    for given in (*others, first):
        out = decoded(call, given)
        assert out.tobytes() == paged_attention.forward(**vars(given)).tobytes()
        assert gpu_cases.error(out, gpu_cases.expected(given)) <= 1e-5


@pytest.mark.slow
def test_prefills_of_every_layer_are_those_of_single_calls():
    first, other = layers(2, NEW)
    starts = np.cumsum([0, *NEW]).astype(np.int32)
    sizes = {"query_start_loc": starts, "max_query_len": max(NEW)}
    call = prefill.prepare(empty_like(first.query), **vars(first), **sizes, check_ids=True)
    for given in (other, first):
        out = decoded(call, given)
        assert out.tobytes() == prefill.forward(**vars(given), **sizes).tobytes()
        assert gpu_cases.error(out, gpu_cases.expected(given, NEW)) <= 1e-5


def test_contiguous_decodes_of_every_layer_are_those_of_single_calls():
    rng = np.random.default_rng(3)
    starts, lens = np.array([0, 700]), np.array([700, 30], np.int32)
    query = rng.standard_normal((2, 2, *HEADS[:1], HEAD_DIM), np.float32)
    caches = rng.standard_normal((2, 2, 730, HEADS[1], HEAD_DIM), np.float32)
    call = contiguous.prepare(empty_like(query[0]), query[0], *caches[0], starts, lens, 700)
    for layer in (1, 0):
        out = empty_like(query[layer])
        call(out, query[layer], *caches[layer])
        assert out.tobytes() == contiguous.forward(query[layer], *caches[layer], starts, lens, 700).tobytes()


def test_tokens_are_written_to_the_caches_of_every_layer():
    rng = np.random.default_rng(5)
    new = rng.standard_normal((2, 2, 3, 2, 8), np.float32)
    caches = np.zeros((2, 2, 2, 4, 2, 8), np.float32)
    slots = np.array([6, -1, 1])
    call = cache.prepare_reshape_and_cache(*new[0], *caches[0], slots, check_ids=True)
    assert not caches.any(), "nothing is written before a launch"
    for layer in (1, 0):
        call(*new[layer], *caches[layer])
    wanted = np.zeros((2, 2, 8, 2, 8), np.float32)
    wanted[:, :, [6, 1]] = new[:, :, [0, 2]]
    assert caches.tobytes() == wanted.tobytes()


def test_a_launch_checks_no_argument_again(monkeypatch):
    """What a layer costs: no view, no choice of a kernel or its grid, no buffer."""
    first, other = layers(2)
    call, wanted = prepare_decode(first), paged_attention.forward(**vars(other))

    def never(*_, **__):
        raise AssertionError("belongs to the preparation")

    for module, name in (
        (prepared, "view"),
        (paged_attention, "views"),
        (paged_attention, "empty"),
        (paged_attention, "zeros"),
        (paged_attention, "merge_levels"),
        (cpu_kernels, "CpuLaunch"),
    ):
        monkeypatch.setattr(module, name, never)
    assert decoded(call, other).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("query", np.zeros((3, 4, 64), np.float32), r"out.shape = \(4, 4, 64\): must be \(3, 4, 64\)"),
        ("query", np.zeros((4, 3, 64), np.float32), r"out.shape = \(4, 4, 64\): must be \(4, 3, 64\)"),
        ("key_cache", np.zeros((9, 8, 2, 64), np.float32), r"key_cache.shape = \(9, 8, 2, 64\): must be \(any, 16, any, 64\)"),
        ("value_cache", np.zeros((9, 16, 2, 64), np.float16), r"value_cache.shape = .*: must be \(\d+, 16, 2, 64\)"),
        ("block_tables", np.zeros((4, 1), np.int32), "max_context_len = 600: block_tables hold 16 tokens a sequence"),
        ("block_tables", np.full((4, 38), 10**6, np.int32), r"block_tables\[0, 0\] = 1000000: the cache has blocks 0 to"),
        ("context_lens", np.array([601, 1, 0, 37], np.int32), r"context_lens\[0\] = 601: must be from 0 to max_context_len"),
        ("context_lens", np.zeros(4, np.int64), "context_lens.dtype = 'int64': must be int32"),
    ],
)  # fmt: skip
def test_the_preparation_names_what_does_not_fit(name, value, complaint):
    (given,) = layers(1)
    arrays = vars(given) | {name: value}
    with pytest.raises(SettingError, match=f"^{complaint}"):
        paged_attention.prepare(empty_like(given.query), **arrays, check_ids=True)


STALE = ", for which the call was prepared; prepare one for this step$"


@pytest.mark.parametrize(
    ("place", "change", "complaint"),
    [
        (1, lambda query: query[:3], r"query.shape = \(3, 4, 64\): must be \(4, 4, 64\)" + STALE),
        (0, lambda out: np.concatenate([out, out]), r"out.shape = \(8, 4, 64\): must be \(4, 4, 64\)" + STALE),
        (1, lambda query: query.astype(np.float16), "query.dtype = 'float16': must be float32" + STALE),
        (2, lambda keys: keys[1:], r"key_cache.shape = \(\d+, 16, 2, 64\): must be \(\d+, 16, 2, 64\)" + STALE),
        (3, lambda values: values[..., ::-1], "value_cache = .*: must be contiguous"),
        (1, lambda query: query.tolist(), "query = 'list': must be"),
        (2, lambda keys: shifted(keys), "key_cache = 'misaligned memory': must begin at a multiple of 16 bytes"),
    ],
    ids=["rows", "more rows", "dtype", "blocks", "strides", "no array", "alignment"],
)
def test_a_call_of_another_step_is_refused(place, change, complaint):
    (given,) = layers(1)
    call, layer = prepare_decode(given), [empty_like(given.query), *tensors(given)]
    layer[place] = change(layer[place])
    with pytest.raises(SettingError, match=f"^{complaint}"):
        call(*layer)
    if place:
        assert np.isnan(layer[0]).all(), "nothing ran"


def shifted(array: np.ndarray) -> np.ndarray:
    """The same values 4 bytes behind a multiple of 16."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[:] = array
    return moved


def test_torch_tensors_of_every_layer_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    first, other = layers(2)
    given = {name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in vars(first).items()}
    call = paged_attention.prepare(torch.empty_like(given["query"]), **given)
    out = torch.empty_like(given["query"])
    layer = [torch.from_numpy(one) for one in tensors(other)]
    call(out, *layer)
    assert out.numpy().tobytes() == paged_attention.forward(**vars(other)).tobytes()
    with pytest.raises(SettingError, match=r"^out.dtype = 'float64': must be float32" + STALE):
        call(out.double(), *layer)
    with pytest.raises(SettingError, match=r"^query.device = 'meta': must be cpu" + STALE):
        call(out, layer[0].to("meta"), *layer[1:])


def test_a_launch_with_the_keys_of_the_first_layer_is_noticed(monkeypatch):
    """A launch that forgets to replace one address computes with the first layer's keys."""
    place = arguments.Arguments.place

    def forgetful(self, number: int, pointer: int) -> None:
        if number != paged_attention.LAYER_ARGUMENTS[2]:
            place(self, number, pointer)

    monkeypatch.setattr(arguments.Arguments, "place", forgetful)
    first, other = layers(2)
    out = None
    try:
        out = decoded(prepare_decode(first), other)
    except KernelFault as fault:
        assert "outside every array" in str(fault)
    assert out is None or gpu_cases.error(out, gpu_cases.expected(other)) > 0.1


def test_keys_and_values_that_are_exchanged_are_noticed(monkeypatch):
    monkeypatch.setattr(paged_attention, "LAYER_ARGUMENTS", (0, 3, 5, 4))
    first, other = layers(2)
    assert gpu_cases.error(decoded(prepare_decode(first), other), gpu_cases.expected(other)) > 0.1


@pytest.mark.parametrize("lens", [[1, 1, 1], [1, 1, 40]], ids=["decodes", "mixed"])
def test_a_step_prepares_each_operation_once_for_all_layers(lens, monkeypatch):
    pytest.importorskip("torch")
    from fragmeter.gpu.devices import devices
    from fragmeter.gpu.model.batch import Batch
    from fragmeter.gpu.model.skeleton import Skeleton
    from fragmeter.sim.spec import ModelSpec

    spec = ModelSpec("small", 5, 64, 4, 2, 16, 96, 97, 64, gated_mlp=True)
    subject, seen = Skeleton(spec, devices.open("cpu"), 12), []
    prepare = devices.CpuDevice.prepared
    monkeypatch.setattr(
        devices.CpuDevice, "prepared", lambda self, call: (seen.append(call.operation), prepare(self, call))[1]
    )
    tables = np.arange(9).reshape(3, 3)
    for _ in range(2):
        subject.step(Batch.paged(lens, [10, 3, 40], [0] * sum(lens), tables, 16))
    once = ["reshape_and_cache", "decode_attention", *(["prefill_attention"] if 40 in lens else [])]
    assert seen == once * 2


DRIVER = """
#include <stdio.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    printf("%p %u %u %u %u %u %u %u %p %llx %d %g %p\\n", function, gx, gy, gz, bx, by, bz, shared, stream,
           *(unsigned long long *)parameters[0], *(int *)parameters[1], *(float *)parameters[2], (void *)extra);
    return 0;
}
"""
LAUNCH = """
import numpy as np
from cupy.cuda import driver
from fragmeter.gpu.ops.arguments import Arguments
from fragmeter.gpu.ops.arrays import view
packed = Arguments((view("out", np.zeros(1)), np.int32(-7), np.float32(0.125)))
packed.place(0, 0xDEADBEEF12)
driver.launchKernel(0x1234, 3, 2, 1, 128, 4, 5, 65536, 0x77, packed.address, 0)
"""


@pytest.mark.slow
def test_cupys_binding_hands_the_arguments_to_the_driver(tmp_path):
    """A driver that prints what it is asked to launch, under CuPy's own compiled binding."""
    pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")
    (tmp_path / "driver.c").write_text(textwrap.dedent(DRIVER))
    build = ["g++", "-x", "c", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"]
    subprocess.run(build, check=True)
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, env=environment)
    assert done.stdout == "0x1234 3 2 1 128 4 5 65536 0x77 deadbeef12 -7 0.125 (nil)\n", done.stderr
