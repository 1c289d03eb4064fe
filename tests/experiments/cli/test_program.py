"""The program as a whole: help, version, doctor, traces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fragmeter
from cli_runs import run
from fragmeter.experiments.cli.app import DONE, MISTAKE, app, status
from fragmeter.experiments.cli.help import MOST_USED, TIERED
from fragmeter.experiments.story.reading import story_names
from fragmeter.gpu.devices.probe import GpuReport, probe
from fragmeter.sim.metrics.registry import METRICS
from fragmeter.sim.policy.registry import OPTIONAL, POLICIES
from fragmeter.sim.spec import gpu_names
from fragmeter.sim.spec.model import model_names
from fragmeter.traces import read

VERBS = ["reproduce", "simulate", "sweep", "compare", "validate", "traces", "list", "doctor"]


def printed(capsys: pytest.CaptureFixture, *tokens: object) -> str:
    assert status([str(token) for token in tokens]) == DONE
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_python_dash_m_runs_it_and_says_its_version():
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{fragmeter.__version__}\n", "")


def test_the_version_is_printed_without_loading_the_program():
    code = "import sys; sys.argv[1:] = ['--version']; from fragmeter.__main__ import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    said, loaded = done.stdout.splitlines()
    assert said == fragmeter.__version__
    assert not {"numpy", "cyclopts", "fragmeter.sim"} & set(loaded.split())


def test_a_run_of_drawn_requests_loads_only_what_it_needs():
    """pandas and pyarrow each take longer to load than a small run, and the others a fortieth of it or more."""
    code = (
        "import sys; from fragmeter.experiments.cli.app import status;"
        " status(['simulate', '--num-prompts', '3', '--json', '-']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert not {"pandas", "pyarrow", "plotly", "rich.progress", "urllib.request", "psutil"} & loaded
    parts = {"", ".page", ".page.table", ".data", ".data.answer", ".style", ".style.labels"}
    others = {name for name in loaded if name.startswith(("fragmeter.sim.recording.", "fragmeter.reports"))}
    assert others <= {f"fragmeter.reports{part}" for part in parts}


def test_a_run_of_a_trace_loads_no_pandas(tmp_path):
    """pyarrow, which reads the file, loads pandas for most ways of making a column numpy's."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,7,5\n1,30,4\n")
    code = (
        "import sys; from fragmeter.experiments.cli.app import status;"
        f" status(['simulate', '--trace', {str(trace)!r}, '--json', '-']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["completed"] == 2
    assert "pyarrow" in done.stderr.split() and "pandas" not in done.stderr.split()


def test_help_lists_the_verbs_in_the_order_in_which_they_are_needed(capsys):
    text = printed(capsys, "--help")
    places = [text.index(f"│ {verb} ") for verb in VERBS]
    assert places == sorted(places)
    assert "Start with: fragmeter reproduce all --out results" in text


def test_help_has_the_flags_that_most_use_and_help_all_has_every_flag(capsys):
    """Each flag of the first tier is one of some verb, and a line of every second tier is a flag that a line may have."""
    first = {verb: printed(capsys, verb, "--help") for verb in TIERED}
    whole = {verb: printed(capsys, verb, "--help-all") for verb in TIERED}
    flags = {
        verb: {name for each in app[verb].assemble_argument_collection() for name in each.names} for verb in TIERED
    }
    assert MOST_USED <= set().union(*flags.values())
    assert len(first["simulate"].splitlines()) < 60
    for verb, text in first.items():
        shown = set(re.findall(r"^│ (--[a-z-]+)", text, re.MULTILINE))
        assert shown <= MOST_USED & flags[verb] and f"fragmeter {verb} --help-all" in text
        assert len(text.splitlines()) < len(whole[verb].splitlines()) / 2 + 20
        assert set(re.findall(r"(--[a-z-]+) ", whole[verb])) > shown


def test_plan_explains_both_flags_of_parallelism(capsys):
    text = " ".join(printed(capsys, "plan", "--help-all").replace("│", " ").split())
    assert "GPUs that share each layer." in text and "Pipeline stages." in text


@pytest.mark.parametrize(
    "verb", [[verb] for verb in VERBS[:5]] + [["traces", "stats"], ["list"], ["doctor"]], ids=" ".join
)
def test_every_verb_takes_json(verb, capsys):
    assert "--json" in printed(capsys, *verb, "--help")


def test_simulate_without_a_rate_takes_one_request_a_second(capsys):
    data = json.loads(printed(capsys, "simulate", "--num-prompts", "20", "--json", "-"))
    simulated = json.loads(printed(capsys, "simulate", "--num-prompts", "20", "--request-rate", "1", "--json", "-"))
    assert "so 1 request/s" in data.pop("load") and simulated.pop("load") == "Synthetic sharegpt, 20 requests"
    assert data == simulated
    said = " ".join(printed(capsys, "simulate", "--num-prompts", "20").split())
    assert "Synthetic sharegpt, 20 requests; no arrivals are given, so 1 request/s" in said


class TestList:
    def test_names_what_the_flags_take(self, capsys):
        kinds = {
            "policies": POLICIES | OPTIONAL,
            "models": model_names(),
            "gpus": gpu_names(),
            "metrics": METRICS,
            "stories": story_names(),
        }
        for kind, names in kinds.items():
            rows = json.loads(printed(capsys, "list", kind, "--json", "-"))[kind]
            assert [next(iter(row.values())) for row in rows] == [*names]
            # A long label goes on in a line that begins with blanks.
            shown = [line.split()[0] for line in printed(capsys, "list", kind).splitlines() if line[:1].strip()]
            first = shown.index(next(iter(names)))
            assert shown[first : first + len(rows)] == [*names]

    def test_numbers_of_a_row(self, capsys):
        rows = json.loads(printed(capsys, "list", "models", "--json", "-"))["models"]
        llama = next(row for row in rows if row["model"] == "llama-3.1-8b")
        # 2 tensors x 32 layers x 8 heads x 128 x 2 bytes.
        assert llama["kv_kib_per_token"] == 128 and llama["parameters_billion"] == 8.03 and llama["state_mib"] == 0
        kimi = next(row for row in rows if row["model"] == "kimi-linear-48b-a3b")
        # 20 layers x (3 inputs of a convolution of 3 x 32 x 128 in 16 bits, 32 matrices of 128 x 128 in 32 bits).
        assert kimi["state_mib"] == 20 * (3 * 12_288 * 2 + 32 * 128 * 128 * 4) / 2**20

    def test_the_table_of_models_fits_into_80_characters(self, capsys):
        shown = printed(capsys, "list", "models")
        assert "1,048,576" in shown and "10,485,760" in shown and "nemotron-3-nano-30b-a3b" in shown

    def test_the_help_of_simulate_names_every_gpu(self, capsys):
        text = " ".join(printed(capsys, "simulate", "--help-all").replace("│", " ").split())
        assert all(name in text for name in gpu_names()) and "fragmeter list policies" in text

    def test_another_kind_is_refused(self, capsys):
        assert status(["list", "cards"]) == MISTAKE and "policies" in capsys.readouterr().err


class TestTraces:
    def test_list_names_the_sets_with_their_source(self, capsys):
        text = printed(capsys, "traces", "list")
        assert "alpaca52k_opt" in text and "52,002" in text and "sosp-ae-39/sosp-ae-astra" in text

    def test_list_as_data(self, capsys):
        data = json.loads(printed(capsys, "traces", "list", "--json", "-"))
        assert [entry["rows"] for entry in data["sets"]] == [84_226, 52_002]

    def test_stats(self, tmp_path, capsys):
        trace = tmp_path / "two.csv"
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n1,100,3\n3,2300,5\n")
        text = printed(capsys, "traces", "stats", trace, "--json", tmp_path / "stats.json")
        assert "two: 2 requests" in text
        assert ["mean", "1,200.0", "4.0", "1,204.0"] in [line.split() for line in text.splitlines()]
        assert "0.500 requests/s over 2.0 s" in text
        stats = json.loads((tmp_path / "stats.json").read_text())
        assert (stats["rows"], stats["prompt_tokens"]["mean"], stats["request_rate"]) == (2, 1200.0, 0.5)

    def test_convert(self, tmp_path, capsys):
        source, target = tmp_path / "pairs.jsonl", tmp_path / "pairs.parquet"
        source.write_text('{"input_length": 7, "output_length": 5}\n{"input_length": 9, "output_length": 3}\n')
        # Lines end at 80 columns, and the folder's name has any length.
        assert printed(capsys, "traces", "convert", source, target).split() == [f"{target}:", "2", "requests"]
        assert read(target).prompt_tokens.tolist() == [7, 9]

    @pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".jsonl"])
    def test_what_a_csv_cannot_hold_is_said(self, ending, tmp_path, capsys):
        source, load, target = tmp_path / "mooncake.jsonl", tmp_path / "load.json", tmp_path / f"drawn{ending}"
        rows = (
            {"timestamp": 1000 * row, "input_length": 600, "output_length": 5, "hash_ids": [row % 3, 7]}
            for row in range(100)
        )
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        said = "Left out, as a CSV has no lists: hash_ids, block_tokens"
        assert (said in printed(capsys, "traces", "convert", source, target)) == (ending != ".jsonl")
        printed(capsys, "traces", "synth", source, "--out", load)
        assert (said in printed(capsys, "traces", "sample", load, target)) == (ending != ".jsonl")


class CudaError(RuntimeError):
    """As CuPy's CUDARuntimeError: the status is an attribute."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def cupy(devices: list[bytes] | CudaError) -> SimpleNamespace:
    """A CuPy that finds these devices, or fails so."""

    def count() -> int:
        if isinstance(devices, CudaError):
            raise devices
        return len(devices)

    runtime = SimpleNamespace(
        getDeviceCount=count, getDeviceProperties=lambda at: {"name": devices[at], "totalGlobalMem": 80 << 30}
    )
    return SimpleNamespace(__version__="13.6.0", cuda=SimpleNamespace(runtime=runtime))


GPUS = {
    "no driver": (
        CudaError(35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient"),
        GpuReport(
            "no-driver",
            "CuPy 13.6.0: no driver, or one too old for this CuPy: drivers below 580 take CUDA 12, extra gpu12 and torch of cu126 (CUDA status 35)",
            35,
        ),
    ),
    "no device": (
        CudaError(100, "cudaErrorNoDevice: no CUDA-capable device is detected"),
        GpuReport("no-device", "CuPy 13.6.0: a driver, but no device (CUDA status 100)", 100),
    ),
    "none visible": ([], GpuReport("no-device", "CuPy 13.6.0: a driver, but no device")),
    "another error": (
        CudaError(2, "cudaErrorMemoryAllocation: out of memory"),
        GpuReport("failed", "CuPy 13.6.0: cudaErrorMemoryAllocation: out of memory (CUDA status 2)", 2),
    ),
    "two devices": (
        [b"NVIDIA H200", b"NVIDIA A100"],
        GpuReport(
            "ready",
            "CuPy 13.6.0: NVIDIA H200, NVIDIA A100",
            devices=("NVIDIA H200", "NVIDIA A100"),
            memory_bytes=(80 << 30, 80 << 30),
        ),
    ),
}


def doctored(folder: Path, monkeypatch: pytest.MonkeyPatch, **missing: object) -> dict[str, dict]:
    """What doctor says of every part, with modules replaced."""
    for name, module in missing.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert status(["doctor", "--json", str(folder / "doctor.json")]) == DONE
    parts = json.loads((folder / "doctor.json").read_text())["parts"]
    for part in parts:
        assert (part["remedy"] is None) is part["works"], part
        assert "\n" not in part["found"]
    return {part["name"]: part for part in parts}


class TestDoctor:
    @pytest.mark.parametrize(("devices", "report"), GPUS.values(), ids=GPUS)
    def test_says_what_the_gpu_is_or_why_there_is_none(self, devices, report, monkeypatch, tmp_path):
        gpu = doctored(tmp_path, monkeypatch, cupy=cupy(devices))["GPU"]
        assert probe() == report
        assert (gpu["works"], gpu["found"]) == (report.state == "ready", report.text)

    def test_the_simulator_and_its_reports_work_without_everything_else(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CXX", "no-such-compiler")
        parts = doctored(tmp_path, monkeypatch, cupy=None, torch=None, scipy=None, flashinfer=None)
        built = ["compiled core"] if parts["compiled core"]["works"] else []
        assert [name for name, part in parts.items() if part["works"]] == ["simulator", *built, "reports"]
        assert parts["CPU kernels"]["remedy"] == "install g++, or name a compiler in CXX"
        assert parts["compile gate"]["remedy"] == "pip install -e '.[kernels]' in the checkout"
        assert (parts["torch"]["works"], parts["torch"]["found"]) == (False, "not installed")
        assert "gpu12 for CUDA 12" in parts["CuPy"]["remedy"]
        assert "extra: gpu" in parts["GPU"]["found"]

    def test_what_is_installed_and_broken_does_not_work(self, monkeypatch, tmp_path):
        """A file that lacks a module of its own, and a library that lacks one of the system's."""
        (tmp_path / "torch.py").write_text("import sympy_of_torch\n")
        (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.13: cannot open\\nshared object')\n")
        for name in ("torch", "flashinfer"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        parts = doctored(tmp_path, monkeypatch)
        assert parts["torch"]["found"] == "lacks sympy_of_torch"
        assert parts["FlashInfer"]["found"] == "cannot be imported: libcudart.so.13: cannot open shared object"

    def test_says_what_torch_is_built_for(self, monkeypatch, tmp_path):
        for cuda, found in {None: "2.13.0, built for the CPU only", "13.0": "2.13.0, built for CUDA 13.0"}.items():
            torch = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda))
            assert doctored(tmp_path, monkeypatch, torch=torch)["torch"]["found"] == found

    @pytest.mark.parametrize(
        ("cuda", "sees_it", "remedy"),
        [
            ("13.0", True, None),
            ("13.0", False, "it does not see the GPU: install its build for the driver's CUDA"),
            (None, False, "there is a GPU: install torch's build for CUDA (pytorch.org says how)"),
        ],
    )
    def test_beside_a_gpu_torch_must_see_it(self, cuda, sees_it, remedy, monkeypatch, tmp_path):
        torch = SimpleNamespace(
            __version__="2.13.0",
            version=SimpleNamespace(cuda=cuda),
            cuda=SimpleNamespace(is_available=lambda: sees_it),
        )
        parts = doctored(tmp_path, monkeypatch, torch=torch, cupy=cupy([b"NVIDIA H200"]))
        assert parts["GPU"]["works"]
        assert parts["torch"]["remedy"] == remedy

    def test_tells_people_what_helps(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        lines = printed(capsys, "doctor").splitlines()
        place = lines.index("no   FlashInfer    not installed")
        assert lines[place + 1].strip() == "optional, on a GPU: pip install flashinfer-python"
        assert any(line.startswith("yes  simulator     fragmeter ") for line in lines)

    def test_says_that_cupy_is_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert probe().state == "no-cupy"

    def test_says_that_cupy_is_broken(self, monkeypatch):
        def broken(name: str) -> None:
            raise ImportError("libcudart.so.13: cannot open shared object file")

        monkeypatch.setattr("fragmeter.gpu.devices.probe.importlib.import_module", broken)
        assert probe() == GpuReport(
            "failed", "CuPy cannot be imported: libcudart.so.13: cannot open shared object file"
        )

    def test_lists_every_package_and_the_extra_that_needs_it(self, capsys):
        found = json.loads(printed(capsys, "doctor", "--json", "-"))
        packages = {package["name"]: package for package in found["packages"]}
        assert packages["numpy"]["extra"] is None and packages["numpy"]["found"]
        assert packages["pytest"]["extra"] == "test" and packages["torch"]["extra"] == "torch"
        assert found["fragmeter"] == fragmeter.__version__


def no_memory() -> None:
    raise MemoryError  # as C and Python do


@pytest.mark.parametrize(
    ("allocate", "found"), [(lambda: np.empty(2**50), " (Unable to allocate 8.00 PiB"), (no_memory, "; ask")]
)
def test_more_than_the_memory_holds_is_refused(allocate, found, monkeypatch, capsys):
    monkeypatch.setattr("fragmeter.experiments.runs.inputs.synthetic_pairs", lambda *_: allocate())
    assert status(["simulate"]) == MISTAKE
    error = capsys.readouterr().err
    assert error.startswith(f"fragmeter: more memory than this machine has{found}")
    assert error.endswith("ask for fewer requests, or for less time\n") and error.count("\n") == 1
