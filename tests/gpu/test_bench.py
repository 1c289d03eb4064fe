"""The benchmark and the copy ceiling: the same way on the CPU as on a GPU, small."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fragmeter.gpu.bench import __main__ as bench
from fragmeter.gpu.bench import ceiling, copies
from fragmeter.gpu.bench import rows as bench_rows
from fragmeter.gpu.bench.shapes import BLOCK_SIZE, Caches, Shape, lacking, sets_of
from fragmeter.gpu.bench.table import line, shares
from fragmeter.gpu.bench.ways import WAYS, Unable
from fragmeter.gpu.devices import devices
from fragmeter.gpu.ops.prepared import Call

SHAPE = Shape(2, 64, 4, 2, 64, torch.float32)
CPU = devices.open("cpu")


def test_caches_are_disjoint_scattered_and_hold_what_is_asked_for():
    caches = Caches(SHAPE, CPU, cold_bytes=5 * SHAPE.kv_bytes - 1)
    blocks = caches.block_tables.flatten().tolist()
    assert SHAPE.kv_bytes == 2 * 2 * 64 * 2 * 64 * 4
    assert caches.sets == 5 and sets_of(SHAPE, 1) == 1
    assert sum(cache.numel() * 4 for cache in (caches.keys, caches.values)) == 5 * SHAPE.kv_bytes
    assert sorted(blocks) == list(range(5 * 2 * 64 // BLOCK_SIZE)) != blocks


def test_all_ways_compute_the_same_of_each_set():
    caches = Caches(SHAPE, CPU, cold_bytes=2 * SHAPE.kv_bytes)
    keys, values = WAYS["gather"](CPU, caches)(1)
    for gathered, cache in ((keys, caches.keys), (values, caches.values)):
        assert torch.equal(gathered, cache[caches.block_tables[1].flatten().long()])
    # torch takes the pool as it lies; so does our kernel by tables in order.
    caches.block_tables = caches.block_tables.flatten().sort().values.view_as(caches.block_tables)
    ours, dense = (WAYS[name](CPU, caches) for name in ("fragmeter", "torch"))
    for place in range(3):
        assert torch.allclose(ours(place), dense(place).view(2, 4, 64), atol=1e-5)
    assert not torch.equal(ours(0).clone(), ours(1))


def flashinfer(factor: float):
    """A FlashInfer that computes with torch, and not quite right for any factor but one."""

    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores, backend):
            assert (layout, backend) == ("NHD", "fa2")

        def plan(self, starts, blocks, last, heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type):
            assert starts.tolist() == [0, 4, 8] and last.tolist() == [16, 16] and page_size == 16
            self.tables = blocks.view(2, 4)

        def run(self, query, caches):
            out, lens = torch.empty_like(query), torch.tensor([64, 64], dtype=torch.int32)
            CPU.run(Call("decode_attention", (out, query, *caches), (self.tables, lens, 16, 64)))
            return out * factor

    return SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)


@pytest.mark.parametrize(("factor", "why"), [(1, None), (1.1, "its result is another (relative L2 1.0e-01)")])
def test_flashinfer_is_timed_where_it_computes_the_same(factor, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(factor))
    (row,) = bench_rows.bench(CPU, [SHAPE], rounds=2)
    assert row["flashinfer"].get("why") == why
    assert bool(row["flashinfer"]["us"]) is (why is None)


def test_without_flashinfer_the_rest_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    (row,) = bench_rows.bench(CPU, [SHAPE], rounds=2)
    assert row["flashinfer"]["us"] is None and "cannot be imported" in row["flashinfer"]["why"]
    assert row["fragmeter"]["bytes_per_s"] == pytest.approx(SHAPE.kv_bytes / row["fragmeter"]["us"] * 1e6)


def test_what_does_not_fit_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(type(CPU), "free_bytes", lambda _: 1.1 * SHAPE.kv_bytes)
    assert lacking(SHAPE, CPU, 1) == "0.0 GB of caches, room for 0.0 GB"
    (row,) = bench_rows.bench(CPU, [SHAPE], rounds=2)
    assert line(row).endswith("left out: " + row["left_out"])


@pytest.mark.slow
def test_a_kernel_that_fails_is_reported_and_is_a_failure(monkeypatch, tmp_path, capsys):
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access\nwas encountered")

    monkeypatch.setattr(devices.CpuDevice, "_decode_attention", broken)
    monkeypatch.setitem(bench_rows.PLANS, "cpu", bench_rows.Plan((), (1,), (64,), ((2, 2),), 64, torch.float32, 1))
    assert bench.main(["--device", "cpu"]) == 1
    assert "failed: an illegal memory access was encountered" in capsys.readouterr().out


@pytest.mark.slow
def test_flashinfer_is_timed_after_all_others(monkeypatch, tmp_path, capsys):
    """It may compile for minutes: what is known by then is in the file."""
    known = []

    def plan(wrapper, *tables, **dtypes):
        known.append([sorted(row) for row in json.loads((tmp_path / "bench.json").read_text())["rows"]])
        raise FileNotFoundError("no compiler")

    library = flashinfer(1)
    library.__spec__ = object()
    monkeypatch.setattr(library.BatchDecodeWithPagedKVCacheWrapper, "plan", plan)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(bench_rows.PLANS, "cpu", bench_rows.Plan((), (1,), (64, 128), ((2, 2),), 64, torch.float32, 1))
    assert bench.main(["--device", "cpu", "--json", str(tmp_path / "bench.json")]) == 0
    assert all({"fragmeter", "torch", "gather"} <= set(row) for row in known[0])
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["flashinfer"]["why"] for row in rows] == ["no compiler"] * 2


@pytest.mark.slow
def test_our_rows_are_complete_before_another_library_runs(monkeypatch, tmp_path):
    """A library that ends the process, as one that breaks the CUDA context may."""

    def fatal(*_: object) -> None:
        raise SystemExit(9)

    monkeypatch.setitem(WAYS, "torch", fatal)
    monkeypatch.setitem(bench_rows.PLANS, "cpu", bench_rows.Plan((), (1, 2), (64,), ((2, 2),), 64, torch.float32, 1))
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--json", str(tmp_path / "bench.json")])
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["fragmeter"]["us"] > 0 for row in rows)


@pytest.mark.slow
def test_ours_and_others_are_measured_apart(monkeypatch, tmp_path):
    monkeypatch.setitem(bench_rows.PLANS, "cpu", bench_rows.Plan((), (1,), (64,), ((2, 2),), 64, torch.float32, 1))
    for passes, ways in (("ours", {"fragmeter"}), ("others", {"torch", "gather"})):
        assert bench.main(["--device", "cpu", "--passes", passes, "--json", str(tmp_path / "bench.json")]) == 0
        found = json.loads((tmp_path / "bench.json").read_text())
        (row,) = found["rows"]
        assert {*row} & {*WAYS} == ways and found["device_after"] == found["device"] == CPU.describe()
        assert line(row).split()[5] == ("-" if passes == "others" else f"{row['fragmeter']['us']:.1f}")


def test_a_gpus_first_rows_are_those_that_are_published_elsewhere():
    shapes = [*bench_rows.PLANS["cuda"].shapes()]
    first = [(shape.batch, shape.context, shape.heads, shape.kv_heads, shape.head_dim) for shape in shapes[:4]]
    assert first == [(batch, context, 32, 8, 128) for batch, context in ((1, 1024), (8, 4096), (32, 4096), (128, 4096))]
    assert len(set(shapes)) == len(shapes)
    assert [shape.latent_dim for shape in shapes[4:]] == [512, 512] + [None] * (len(shapes) - 6)
    assert [shape.batch for shape in shapes if shape.fp8] == [8, 32, 128] == [shape.batch for shape in shapes[6:9]]
    latent = shapes[5]
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.latent_dim) == (128, 1, 576, 512)
    assert latent.kv_bytes == 128 * 4096 * 576 * 2


def test_latent_attention_reads_values_from_keys(monkeypatch):
    """torch and FlashInfer compute the same."""
    shape = Shape(2, 64, 8, 1, 96, torch.float32, latent_dim=64)
    caches = Caches(shape, CPU, cold_bytes=1)
    assert caches.keys.nbytes == shape.kv_bytes and caches.values.data_ptr() == caches.keys.data_ptr()
    caches.block_tables = caches.block_tables.flatten().sort().values.view_as(caches.block_tables)
    scores = torch.einsum("bhd,bcd->bhc", caches.query, caches.keys.view(2, 64, 96)) * 96**-0.5
    wanted = torch.einsum("bhc,bcd->bhd", scores.softmax(-1), caches.keys.view(2, 64, 96)[..., :64])
    assert torch.allclose(WAYS["torch"](CPU, caches)(0).view(2, 8, 64), wanted, atol=1e-5)
    assert torch.allclose(WAYS["fragmeter"](CPU, caches)(0), wanted, atol=1e-5)

    class Wrapper:
        def __init__(self, workspace):
            pass

        def plan(self, rows, starts, blocks, held, heads, latent, rotary, page, causal, scale, *dtypes):
            assert (rows.tolist(), starts.tolist(), held.tolist()) == ([0, 1, 2], [0, 4, 8], [64, 64])
            assert (heads, latent, rotary, page, causal) == (8, 64, 32, 16, False) and len(blocks) == 8
            self.scale = scale

        def run(self, query, query_rotary, keys, keys_rotary):
            held, turned = (part.reshape(2, 64, -1) for part in (keys, keys_rotary))
            scores = query @ held.transpose(1, 2) + query_rotary @ turned.transpose(1, 2)
            return (scores * self.scale).softmax(-1) @ held

    library = SimpleNamespace(mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper))
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    assert torch.allclose(WAYS["flashinfer"](CPU, caches)(0), wanted, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_kernel_computes_the_latent_shape():
    """A part of the shape that a GPU times, through the kernel's CPU build."""
    shape = Shape(2, 64, 16, 1, 576, torch.bfloat16, latent_dim=512)
    caches = Caches(shape, CPU, cold_bytes=2 * shape.kv_bytes)
    found, wanted = (WAYS["fragmeter"](device, caches)(1).double() for device in (devices.open("shim"), CPU))
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-2


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_kernel_computes_the_shape_in_fp8(monkeypatch):
    """Half the bytes; each head's keys and values times its scales. Others do not compete."""
    shape = Shape(2, 64, 8, 2, 64, torch.bfloat16, fp8=True)
    assert shape.kv_bytes == 2 * 2 * 64 * 2 * 64 and shape.as_dict()["kv_dtype"] == "float8_e4m3fn"
    caches = Caches(shape, CPU, cold_bytes=2 * shape.kv_bytes)
    assert caches.keys.nbytes + caches.values.nbytes == 2 * shape.kv_bytes
    found = WAYS["fragmeter"](devices.open("shim"), caches)(1).double()
    keys, values = (
        cache.double() * scale[:, None]
        for cache, scale in zip((caches.keys, caches.values), caches.scales, strict=True)
    )
    wanted = torch.empty(2, 8, 64, dtype=torch.float64)
    sizes = caches.context_lens, BLOCK_SIZE, shape.context
    layer = (wanted, caches.query.double(), keys, values)
    CPU.run(Call("decode_attention", layer, (caches.block_tables[1], *sizes)))
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-2
    first = caches.block_tables[0].flatten().long()
    assert torch.equal(WAYS["gather"](CPU, caches)(0)[0], caches.keys.view(torch.uint8)[first])
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(1))
    for other, reason in (("torch", "no attention over caches of fp8"), ("flashinfer", "one scale for all heads")):
        with pytest.raises(Unable, match=reason):
            WAYS[other](CPU, caches)


@pytest.mark.parametrize("measured", [bench, ceiling])
def test_the_kernels_cpu_build_is_not_timed(measured, tmp_path, capsys):
    assert measured.main(["--device", "shim", "--json", str(tmp_path / "none.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("fragmeter: device = 'shim': shows that kernels are right, not how long they take")
    assert not (tmp_path / "none.json").exists()


def test_shares_of_known_peaks_only():
    row = {"fragmeter": {"us": 1.0, "bytes_per_s": 3e12}}
    assert shares(row, {"data_sheet": 4e12, "copy": 3e12}) == {"share_of_data_sheet": 0.75, "share_of_copy": 1.0}
    assert shares(row, {"data_sheet": None, "copy": 6e12}) == {"share_of_copy": 0.5}
    assert shares({"left_out": "too large"}, {"copy": 1.0}) == {}


def test_a_line_has_every_column():
    ways = {way: {"us": us} for way, us in {"torch": 140.0, "gather": 300.0, "flashinfer": None}.items()}
    row = SHAPE.as_dict() | ways | {"fragmeter": {"us": 131.0, "bytes_per_s": 4.1e12}, "share_of_copy": 0.95}
    assert line(row).split() == "2 64 4,2 float32 0.1 131.0 4100.0 - 95% 140.0 300.0 -".split()


def test_the_data_sheet_is_that_of_the_very_device():
    assert copies.data_sheet({"name": "NVIDIA H200"}).memory_bytes_per_s == 4800 * 10**9
    assert copies.data_sheet({"name": "NVIDIA H100 80GB HBM3"}).name == "h100-80gb"
    assert copies.data_sheet({"name": "NVIDIA H100 PCIe"}) is None


def test_the_ceiling_counts_bytes_read_and_written(monkeypatch, tmp_path):
    monkeypatch.setitem(copies.COPY_BYTES, "cpu", 2**20)
    assert ceiling.main(["--device", "cpu", "--json", str(tmp_path / "ceiling.json")]) == 0
    found = json.loads((tmp_path / "ceiling.json").read_text())
    (copy,) = found["copies"]
    assert (copy["copied_bytes"], copy["moved_bytes"]) == (2**20, 2**21)
    assert copy["bytes_per_s"] == pytest.approx(2**21 / copy["us"] * 1e6)
    assert found["data_sheet_bytes_per_s"] is None and found["device"]["versions"]["torch"] == torch.__version__
