"""The correctness grid through the kernels' CPU build, what it covers, and that it finds what is wrong."""

from __future__ import annotations

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest

import gpu_cases
from fragmeter.gpu.check import grid
from fragmeter.gpu.check.cases import Host, OnDevice
from fragmeter.gpu.check.grid import KERNELS, Point
from fragmeter.gpu.devices import devices
from fragmeter.gpu.ops import cache
from fragmeter.gpu.ops.source import HEAD_DIMS, LATENT_KEY_DIM
from fragmeter.sim.types.errors import UserError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
SUBSET, WHOLE = list(grid.points(subset=True)), list(grid.points())


def failures(points: list[Point]) -> list[grid.Outcome]:
    return [outcome for outcome in (grid.tried(point, Host()) for point in points) if not outcome.passes]


#: Every kernel of a type and head_dim is a build of its own: all types have two of them in the quick tests.
QUICK = (64, 128)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        pytest.param(dtype, head_dim, marks=() if dtype == "float16" or head_dim in QUICK else pytest.mark.slow)
        for dtype, head_dim in itertools.product(gpu_cases.DTYPES, HEAD_DIMS)
    ],
)
def test_the_subset_agrees_with_float64(dtype, head_dim):
    assert not failures([point for point in SUBSET if (point.dtype, point.head_dim) == (dtype, head_dim)])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("dtype", "heads"), list(itertools.product(gpu_cases.DTYPES, grid.HEADS)))
def test_the_whole_grid_agrees_with_float64(dtype, heads):
    assert not failures([point for point in WHOLE if (point.dtype, point.heads) == (dtype, heads)])


@pytest.mark.slow
@needs_compiler
def test_latent_attention_agrees_with_float64():
    """Its quick tests are in a file of their own."""
    assert not failures([point for point in WHOLE if point.kernel == "latent_attention"])


def test_the_whole_grid_has_every_combination():
    shapes = {(point.kernel, point.dtype, point.heads, point.head_dim, point.block_size) for point in WHOLE}
    heads = [(32, 8), (40, 40), (64, 8), (64, 64), (16, 1)]
    head_dims = [64, 80, 96, 112, 120, 128, 160, 192, 256]
    dtypes = ["float16", "bfloat16", "float32"]
    of_fp8 = {"reshape_and_cache_fp8": dtypes}
    of_fp8 |= {f"{kernel}_fp8": dtypes[:2] for kernel in grid.ATTENTION}
    for kernel in grid.OF_HEAD_DIMS:
        # A contiguous cache has no blocks.
        block_sizes = [16] if kernel.startswith("contiguous_attention") else [1, 8, 16, 32, 64]
        if kernel in of_fp8:
            rows = [head_dim for head_dim in head_dims if head_dim != 120]
            wanted = set(itertools.product([kernel], of_fp8[kernel], heads, rows, block_sizes))
            assert wanted <= shapes and all(point.exists for point in WHOLE)
            continue
        assert set(itertools.product([kernel], dtypes, heads, head_dims, block_sizes)) <= shapes
    of_latent = itertools.product(["latent_attention"], dtypes[:2], [(16, 1), (32, 1), (128, 1)], [576], [16, 32, 64])
    assert set(of_latent) <= shapes
    assert {1, 2, 8191, 8192} <= {context for point in WHOLE for context in point.contexts}
    assert any(point.num_blocks and point.num_blocks > 32768 for point in WHOLE)
    assert len(set(WHOLE)) == len(WHOLE)


def test_the_subset_is_of_the_whole_and_misses_no_kernel_dtype_head_dim_or_block_size():
    assert set(SUBSET) <= set(WHOLE)
    assert {point.kernel for point in SUBSET} == set(KERNELS)
    head_dims = {(point.dtype, point.head_dim) for point in SUBSET if point.kernel != "latent_attention"}
    assert head_dims == set(itertools.product(gpu_cases.DTYPES, HEAD_DIMS))
    assert {point.block_size for point in SUBSET} == set(grid.BLOCK_SIZES)


def test_a_few_points_on_a_gpu_have_every_kernel_of_fp8():
    """Those of the runbook's part ``smoke``."""
    assert {point.kernel for point in SUBSET if (point.dtype, point.head_dim) == ("float16", 128)} >= set(grid.FP8)


@needs_compiler
@pytest.mark.parametrize("kernel", KERNELS)
def test_tensors_on_a_device_take_the_same_way(kernel):
    """What a GPU does, on the CPU: cases of torch tensors, references in torch."""
    pytest.importorskip("torch")
    heads, head_dim = ((5, 1), LATENT_KEY_DIM) if kernel in grid.LATENT else ((8, 2), 64)
    point = Point(kernel, "float16", heads, head_dim, 16, grid.RAGGED)
    outcome = grid.tried(point, OnDevice("cpu"))
    assert outcome.passes, outcome


@needs_compiler
def test_the_program_says_what_came_of_each_point(tmp_path, capsys):
    target = tmp_path / "grid.json"
    arguments = ["--subset", "--dtype", "float16", "--head-dim", "64", "--kernel", "decode_attention"]
    assert grid.main(["--device", "shim", *arguments, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["summary"][0]["points"] == len(found["points"]) > 1
    assert found["device"]["device"] == "shim"
    assert all(point["passes"] and 0 < point["error"] <= point["tolerance"] for point in found["points"])
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:4] == ["decode_attention", "float16", str(len(found["points"])), "0"]


@pytest.mark.slow
@needs_compiler
def test_a_planted_bug_is_found(tmp_path, capsys, monkeypatch):
    gpu_cases.plant_attention(monkeypatch, "row < tokens.end;", "row < tokens.end - 1;")
    target = tmp_path / "grid.json"
    arguments = ["--subset", "--dtype", "float16", "--head-dim", "96", "--kernel", "decode_attention"]
    assert grid.main(["--device", "shim", *arguments, "--json", str(target)]) == 1
    assert "FAILED Point(kernel='decode_attention', dtype='float16'" in capsys.readouterr().out
    assert json.loads(target.read_text())["summary"][0]["failed"] > 0


@needs_compiler
@pytest.mark.parametrize("kernel", ["reshape_and_cache", "copy_blocks", "swap_blocks", "reshape_and_cache_fp8"])
def test_a_kernel_that_does_nothing_is_found(kernel, monkeypatch):
    monkeypatch.setattr(cache, kernel.removesuffix("_fp8"), lambda *_, **__: None)
    (failed,) = failures([Point(kernel, "float16", (8, 2), 64, 16, grid.RAGGED)])
    assert failed.error > 0.1


@needs_compiler
def test_a_kernel_that_leaves_its_output_alone_is_found(monkeypatch):
    """The output holds NaNs, which are no error to be compared."""
    idle = SimpleNamespace(launch=lambda: None)
    monkeypatch.setattr("fragmeter.gpu.ops.paged_attention.prepare", lambda *_, **__: idle)
    (failed,) = failures([Point("decode_attention", "float16", (8, 2), 64, 16, grid.RAGGED)])
    assert (failed.error, failed.fault) == (None, "the error is nan")


@needs_compiler
def test_what_a_kernel_raises_is_its_outcome_and_the_rest_goes_on(monkeypatch):
    point = Point("decode_attention", "float16", (7, 2), 64, 16, grid.RAGGED)
    (failed,) = failures([point, Point("copy_blocks", "float16", (8, 2), 64, 16, grid.RAGGED)])
    assert failed.point is point
    assert failed.fault.startswith("SettingError: num_heads = 7")


def test_without_a_gpu_one_line_says_why(monkeypatch, capsys):
    def none(name: str) -> None:
        raise UserError("no GPU to work with: no driver")

    monkeypatch.setattr(devices, "open", none)
    assert grid.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "fragmeter: no GPU to work with: no driver\n"


def test_nothing_asked_for_is_no_success(capsys):
    """Of the subset no prefill is in fp32 with head_dim 80."""
    arguments = ["--subset", "--kernel", "prefill_attention", "--dtype", "float32", "--head-dim", "80"]
    assert grid.main(["--device", "shim", *arguments]) == 2
    assert "no point of the grid is all that is asked for" in capsys.readouterr().err


def test_without_a_compiler_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert grid.main(["--device", "shim", "--subset"]) == 2
    assert capsys.readouterr().err == (
        "fragmeter: kernels cannot be built for the CPU: no C++ compiler; install g++, or name a compiler in CXX\n"
    )


@needs_compiler
def test_an_interrupted_run_keeps_the_points_done(tmp_path, monkeypatch, capsys):
    """Ctrl-C at the fifth point, where every second one is kept."""
    done = []

    def tried(point: Point, make) -> grid.Outcome:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(point)
        return grid.Outcome(point, 0.0, None, 0.0)

    monkeypatch.setattr(grid, "tried", tried)
    monkeypatch.setattr(grid, "KEPT_EVERY", 2)
    target = tmp_path / "grid.json"
    assert grid.main(["--device", "shim", "--subset", "--json", str(target)]) == 130
    found = json.loads(target.read_text())
    assert len(found["points"]) == sum(row["points"] for row in found["summary"]) == 4


def test_standard_output_is_no_file(capsys):
    assert grid.main(["--device", "shim", "--json", "-"]) == 2
    assert capsys.readouterr().err == "fragmeter: json = '-': standard output has the text; name a file\n"
