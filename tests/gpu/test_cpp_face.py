"""The C++ face: a small torch extension that includes the header, built for the CPU, against the Python one.

It takes a minute: torch's headers are long.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import cpu_kernels, paged_attention
from fragmeter.gpu.ops.source import KERNELS
from fragmeter.sim.types.errors import SettingError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")]

EXTENSION = """
#define FRAGMETER_HEAD_DIMS 64
#include <torch/library.h>
#include "paged_attention_cuda.cuh"
TORCH_LIBRARY(fragmeter_face, library) {
    library.def("forward(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
                "Tensor context_lens, int block_size, int max_context_len) -> ()", &paged_attention_cuda_forward);
}
"""


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    """The extension's function; as an extension for GPUs would be built, by g++ in nvcc's place."""
    folder = tmp_path_factory.mktemp("face")
    (folder / "face.cpp").write_text(EXTENSION)
    torch_folder = Path(torch.__path__[0])
    places = [KERNELS / "include", torch_folder / "include", torch_folder / "include" / "torch/csrc/api/include"]
    flags = [flag for flag in cpu_kernels._FLAGS if not flag.startswith(("-std", "-O"))]
    command = ["g++", "-std=c++20", "-O1", *flags, *(f"-I{place}" for place in places)]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command += ["-o", folder / "face.so", folder / "face.cpp", *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch.ops.load_library(folder / "face.so")
    return torch.ops.fragmeter_face.forward


def tensors(given: gpu_cases.Case) -> dict:
    named = dict(vars(given))
    for name in ("query", "key_cache", "value_cache"):
        dtype = getattr(torch, named[name].dtype.name)
        named[name] = torch.from_numpy(named[name].astype(np.float32)).to(dtype)
    for name in ("block_tables", "context_lens"):
        named[name] = torch.from_numpy(named[name])
    return named


#: Every tile of heads, sequences that blocks share and others, ragged.
SHAPES = [
    ((4, 4), [64, 70, 0, 1, 33]),
    ((4, 2), [1100, 300]),
    ((14, 2), [2500]),
    ((40, 2), [64, 70, 0, 1, 33]),
]


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
@pytest.mark.parametrize(("heads", "contexts"), SHAPES)
def test_it_fills_out_with_what_python_gives(forward, dtype, heads, contexts):
    given = tensors(gpu_cases.case(dtype, heads, 64, 16, contexts))
    out = torch.full_like(given["query"], torch.nan)
    assert forward(out, **given) is None
    assert torch.equal(out, paged_attention.forward(**given))


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
