"""The C++ face splits work as Python does: its rule is compiled alone and asked at many shapes."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess

import pytest

from fragmeter.gpu.ops import paged_attention
from fragmeter.gpu.ops.source import KERNELS

PROGRAM = """
#include "partition_size.h"
extern "C" int64_t partition_size(int64_t max_context_len, int64_t columns, int64_t places) {
    return fragmeter::partition_size(max_context_len, columns, places);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_split_is_that_of_python(tmp_path):
    source, library = tmp_path / "split.cpp", tmp_path / "split.so"
    source.write_text(PROGRAM)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{KERNELS / 'include'}", "-o", library, source]
    subprocess.run(command, check=True)
    compiled = ctypes.CDLL(library).partition_size
    compiled.restype, compiled.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
    contexts = [0, 1, 255, 256, 257, 1000, 2048, 4097, 16384, 100_000, 262_144]
    for shape in itertools.product(contexts, [0, 1, 7, 8, 40, 64, 1024, 5000], [108, 216, 396, 432]):
        assert compiled(*shape) == paged_attention.partition_size(*shape), shape
