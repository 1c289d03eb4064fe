"""Loading every instance: a CuPy that compiles nothing stands in for one."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fragmeter.gpu.check import modules
from fragmeter.gpu.check.modules import every_kernel
from fragmeter.gpu.devices import program

SAID = {
    "num_regs": 80,
    "local_size_bytes": 0,
    "shared_size_bytes": 1024,
    "max_threads_per_block": 128,
    "binary_version": 90,
}


class FakeCupy:
    """Compiles all but one kernel; which processes did is no matter."""

    def __init__(self, fails: str) -> None:
        self.fails, self.compiled = fails, []
        self.cuda = SimpleNamespace(Device=Device)

    def RawModule(self, code, options, name_expressions):
        self.compiled += name_expressions
        if name_expressions[0] == self.fails:
            raise RuntimeError("kernel.cu(7): error: no such thing\nmore")
        return SimpleNamespace(get_function=lambda name: SimpleNamespace(attributes=SAID))


class Device(nullcontext):
    """A device to make current."""

    attributes = {"MultiProcessorCount": 4, "MaxSharedMemoryPerMultiprocessor": 164 * 1024}


@pytest.fixture
def fake(monkeypatch):
    def given(fails: str = "") -> FakeCupy:
        cupy = FakeCupy(fails)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(modules, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
        device = SimpleNamespace(torch_device=SimpleNamespace(index=0), describe=lambda: {"name": "NVIDIA H200"})
        monkeypatch.setattr(program, "gpu", lambda name: device)
        return cupy

    return given


def test_every_instance_is_compiled_and_loaded(fake, tmp_path, capsys):
    cupy = fake()
    assert modules.main(["--json", str(tmp_path / "modules.json")]) == 0
    found = json.loads((tmp_path / "modules.json").read_text())
    expressions = [kernel.expression for kernel in every_kernel(164 * 1024)]
    assert [row["kernel"] for row in found["kernels"]] == expressions
    # Once by the processes that share the work, once by the one that loads.
    assert sorted(cupy.compiled) == sorted(expressions * 2)
    assert found["kernels"][0] == {
        "kernel": expressions[0],
        "error": None,
        "registers": 80,
        "local_bytes": 0,
        "shared_bytes": 1024,
        "most_threads": 128,
    }
    assert capsys.readouterr().out.startswith(f"{len(expressions)} kernels, 0 failed, 0 with local memory; ")


def test_one_that_does_not_compile_is_reported_and_the_rest_is_loaded(fake, tmp_path, capsys):
    fake("copy_blocks")
    assert modules.main(["--json", str(tmp_path / "modules.json")]) == 1
    rows = json.loads((tmp_path / "modules.json").read_text())["kernels"]
    assert [row["kernel"] for row in rows if row["error"]] == ["copy_blocks"]
    assert "FAILED copy_blocks: RuntimeError: kernel.cu(7): error: no such thing\n" in capsys.readouterr().out
