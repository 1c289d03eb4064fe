"""The kernels' CPU build under AddressSanitizer and UndefinedBehaviorSanitizer: what is wrong is named by its line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from fragmeter.gpu.ops import cpu_kernels
from fragmeter.gpu.ops.source import KERNELS, Kernel
from fragmeter.sim.types.errors import UserError
from paths import TESTS
from tools.kernels import sanitize


def has_sanitizer() -> bool:
    try:
        sanitize.environment({})
    except UserError:
        return False
    return sys.platform == "linux"


needs_sanitizer = pytest.mark.skipif(not has_sanitizer(), reason="no g++ with AddressSanitizer")


def sanitized(*command: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "tools.kernels.sanitize", *command]
    return subprocess.run(whole, capture_output=True, text=True, cwd=TESTS.parent)


WILD_BLOCK = """
import gpu_cases
given = gpu_cases.case("float16", (8, 2), 64, 16, [40, 20])
print(gpu_cases.error(gpu_cases.run(given), gpu_cases.expected(given)))
given.block_tables[1, 1] = 10**6
gpu_cases.run(given)
"""


@pytest.mark.slow
@needs_sanitizer
def test_a_wild_block_id_is_named_with_the_kernels_line():
    done = sanitized("-c", f"import sys; sys.path.insert(0, {os.fspath(TESTS / 'helpers')!r})\n{WILD_BLOCK}")
    assert float(done.stdout) < 1e-3  # the kernel itself is clean
    assert "KernelFault: decode_attention<__half, 64, " in done.stderr
    frames = [line.rpartition("/")[2] for line in done.stderr.splitlines() if line.lstrip().startswith("#")]
    outside = ("asan_", "memory.h", "ptx.cuh")  # the sanitizer, the shim and the instruction
    name, _, line = next(frame for frame in frames if not frame.startswith(outside)).partition(":")
    assert "cp_async16" in (KERNELS / name).read_text().splitlines()[int(line) - 1]


SMALL = """
import numpy as np
from fragmeter.gpu.ops import arrays, cpu_kernels, source
kernel = source.Kernel('#line 1 "small.cu"\\n__global__ void small(int *out, int size) {{ {body} }}', "small")
out = np.arange(32, dtype=np.int32)
cpu_kernels.CpuKernels().prepared(kernel, (1, 1, 1), (32, 1, 1), (arrays.view("out", out), np.int32(32)))()
"""


@needs_sanitizer
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[threadIdx.x + 1] = size;", "heap-buffer-overflow"),
        ("out[threadIdx.x] *= 1000000000;", "signed integer overflow"),
    ],
)
def test_what_is_undefined_ends_the_program_with_its_line(body, message):
    done = sanitized("-c", SMALL.format(body=body))
    assert done.returncode != 0
    assert message in done.stderr
    assert "small.cu:1" in done.stderr


@needs_sanitizer
@pytest.mark.slow
def test_every_kernel_is_clean():
    stories = ["test_prefill.py", "test_contiguous.py", "test_paged_attention.py", "test_cache.py"]
    options = ["--rootdir=tests", "--import-mode=importlib", "-c", "setup.cfg", "-q", "-m", "not slow"]
    chosen = "not planted and not fault and not 64_bits"
    done = sanitized("-m", "pytest", *options, "-k", chosen, *(f"tests/gpu/{story}" for story in stories))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_sanitizer_one_line_says_how_to_load_it(monkeypatch):
    monkeypatch.setenv(cpu_kernels.SANITIZE, "1")
    with pytest.raises(UserError, match=r"needs the sanitizer loaded first: python -m tools.kernels.sanitize"):
        cpu_kernels._function(Kernel("", "any"))


def test_without_a_compiler_that_has_it_one_line_says_so(monkeypatch):
    monkeypatch.setenv("CXX", shutil.which("true") or "no-such-compiler")
    with pytest.raises(UserError, match=r"^no libasan.so: install gcc's sanitizers"):
        sanitize.environment({})
