"""The C++ face: a small torch extension that includes the header, built for the CPU, against the Python one; and by nvcc.

Each takes a minute: torch's headers are long.
"""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.check import cpp_face
from fragmeter.gpu.ops import paged_attention, source
from fragmeter.sim.types.errors import MissingExtra, SettingError
from tools.kernels import compile_gate

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    """The extension's function; as an extension for GPUs would be built, by g++ in nvcc's place."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return cpp_face.built("cpu", tmp_path_factory.mktemp("face"))


def found_nvcc() -> bool:
    try:
        cpp_face.nvcc()
    except MissingExtra:
        return False
    return True


@pytest.mark.skipif(not found_nvcc(), reason="no nvcc (extra: nvcc)")
def test_nvcc_compiles_it_and_spills_nothing():
    """Host code and 24 instances: three dtypes, four tiles of heads, two rules of slots; as many registers as NVRTC's of the same release."""
    entries = compile_gate.entries(cpp_face.registers("sm_80"))
    assert len(entries) == 3 * 4 * 2
    assert all(entry["stores"] == entry["loads"] == "0" for entry in entries.values())
    if (release := cpp_face.nvcc_release()) != "13.0":
        pytest.skip(f"registers are compared with those of CUDA 13.0, not {release}")
    pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")
    (wanted,) = compile_gate.compiled([source.decode_attention("float16", 64, 8, "PagedTiles")], "sm_80")
    (name,) = (name for name in entries if re.search("6__halfLi64ELi8ENS_10PagedTiles", name))
    assert int(entries[name]["registers"]) == wanted.registers


def test_without_nvcc_it_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cpp_face, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtra, match=r"nvcc of CUDA 12.6: pip install -e '.\[nvcc\]' in the checkout has that of CUDA 13"
    ):
        cpp_face.nvcc("12.6")


def test_the_check_of_the_runbook_passes_on_the_cpu(forward):
    found = list(cpp_face.checks(forward, torch.device("cpu")))
    assert len(found) == 3 * len(cpp_face.SHAPES)
    assert all(check.passes and check.equal for check in found)


def tensors(given: gpu_cases.Case) -> dict:
    named = dict(vars(given))
    for name in ("query", "key_cache", "value_cache"):
        dtype = getattr(torch, named[name].dtype.name)
        named[name] = torch.from_numpy(named[name].astype(np.float32)).to(dtype)
    for name in ("block_tables", "context_lens"):
        named[name] = torch.from_numpy(named[name])
    return named


def test_an_empty_batch_is_left_alone(forward):
    given = tensors(gpu_cases.case("float16", (8, 2), 64, 16, [40, 20]))
    given |= {name: given[name][:0] for name in ("query", "block_tables", "context_lens")}
    forward(torch.empty_like(given["query"]), **given)


MISTAKES = [
    dict(block_size=5000),
    dict(query=torch.zeros(2, 64)),
    dict(query=torch.zeros(2, 8, 64, dtype=torch.float64)),
    dict(query=torch.zeros(2, 7, 64, dtype=torch.float16)),
    dict(query=torch.zeros(2, 8, 128, dtype=torch.float16)[..., ::2]),
    dict(query=torch.zeros(2 * 8 * 64 + 1, dtype=torch.float16)[1:].view(2, 8, 64)),
    dict(key_cache=torch.zeros(5, 8, 2, 64, dtype=torch.float16)),
    dict(value_cache=torch.zeros(7, 16, 2, 64)),
    dict(block_tables=torch.zeros(2, 4, dtype=torch.int64)),
    dict(context_lens=torch.zeros(1, dtype=torch.int32)),
    dict(max_context_len=65),
    dict(max_context_len=-1),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: next(iter(mistake)))
def test_a_mistake_is_refused_with_the_same_words(forward, mistake):
    given = tensors(gpu_cases.case("float16", (8, 2), 64, 16, [40, 20])) | mistake
    with pytest.raises(ValueError) as caught:
        forward(torch.empty(given["query"].shape, dtype=given["query"].dtype), **given)
    with pytest.raises(SettingError) as wanted:
        paged_attention.forward(**given)
    assert str(caught.value) == str(wanted.value)


def test_a_head_dim_that_was_not_compiled_is_refused(forward):
    given = tensors(gpu_cases.case("float16", (8, 2), 80, 16, [40, 20]))
    with pytest.raises(ValueError, match="^head_dim = 80: must be one of 64$"):
        forward(torch.empty_like(given["query"]), **given)
