"""Models by the name of a repository: presets, the hub's local cache, and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.spec import model
from fragmeter.sim.spec.model import origin, published_formats
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.notes import collected_notes
from fragmeter.sim.types.optional import not_none

REVISION = "0123456789abcdef0123456789abcdef01234567"
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 700,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
#: As ModelOpt 0.29 wrote ``hf_quant_config.json``.
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.29"},
    "quantization": {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}
#: Parameters of published checkpoints in billions, without encoders and without layers for multi-token prediction.
PUBLISHED = {
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706, "qwen3-0.6b": 0.596, "qwen3-14b": 14.768, "qwen3-8b": 8.191, "qwen3-32b": 32.762, "qwen3-235b-a22b": 235.094,
    "qwen3-coder-480b-a35b": 480.155, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.1-405b": 405.853,
    "llama-4-maverick": 400.7, "gemma-3-1b": 1.000, "gemma-3-12b": 11.766, "phi-4": 14.660, "mistral-7b-v0.3": 7.248,
    "mistral-nemo-12b": 12.248, "mistral-small-24b": 23.572, "mixtral-8x22b": 140.62, "gpt-oss-20b": 20.915,
    "kimi-k2": 1026.4, "minimax-m2.5": 228.7, "glm-4.5": 352.8, "glm-4.5-air": 106.85, "nemotron-h-56b": 56.3,
    "codellama-34b": 33.744,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("qwen3-32b", ["Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8-Static-PerTensor"]),
        ("meta-llama/Llama-3.1-70B-Instruct", ["nvidia/Llama-3.1-70B-Instruct-FP8"]),
        # Of the base model no other is known; one that is quantised is a format itself.
        ("llama-3.1-70b", []),
        ("Qwen/Qwen3-32B-FP8", []),
        ("deepseek-v3", []),
    ],
)
def test_checkpoints_in_other_formats_have_the_same_name_and_shape(name, others):
    assert published_formats(name) == others


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert model(name).num_params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.002)


@pytest.mark.parametrize(
    ("repository", "name", "quantization"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", None),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b", None),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", None),
        ("meta-llama/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", None),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b", None),
        ("google/gemma-3-12b-it", "gemma-3-12b", None),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3", "fp8"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "fp8"),
        ("zai-org/GLM-5", "glm-5", None),
        ("zai-org/GLM-5.3-FP8", "zai-org/GLM-5.3-FP8", "fp8"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5", "w4a16-g32[expert]"),
        ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-NVFP4", "nvfp4[mlp,shared,expert]"),
        ("nvidia/Qwen3.6-27B-NVFP4", "nvidia/Qwen3.6-27B-NVFP4", "fp8[mixer]+nvfp4[mlp,head]"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "Qwen/Qwen3-32B-FP8-Static-PerTensor", "fp8"),
        ("facebook/opt-13b", "opt-13b", None),
    ],
)
def test_repositories_with_stored_facts(repository, name, quantization):
    found = model(repository)
    assert (found.name, found.quantization) == (name, quantization)
    assert model(found.name) == found


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(REVISION)
    return tmp_path


def test_the_local_cache(cache, tmp_path):
    assert (model("org/tiny").name, model("org/tiny").num_layers) == ("org/tiny", 3)
    load = ["--num-prompts", "2", "--num-gpu-blocks-override", "100", "--out", str(tmp_path / "out")]
    assert status(["simulate", "--model", "org/tiny", "--policy", "vllm-v1", *load]) == DONE
    sources = json.loads((tmp_path / "out" / "run.json").read_text())["replica"]["sources"]
    digest = hashlib.sha256(json.dumps(TINY).encode()).hexdigest()
    where = f"org/tiny on the Hugging Face hub, revision {REVISION}"
    assert sources["model"] == f"{where}, config.json with SHA-256 {digest}"


def test_a_folder_of_that_name_comes_first(cache, tmp_path, monkeypatch):
    folder = tmp_path / "here" / "org" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 5}))
    monkeypatch.chdir(tmp_path / "here")
    assert model("org/tiny").num_layers == 5


def test_offline(cache, capsys):
    assert status(["simulate", "--model", "org/other", "--num-prompts", "2"]) == MISTAKE
    said = capsys.readouterr().err
    assert "model = 'org/other': is no preset, no stored file is of it, and it is not in the local cache" in said
    assert said.endswith(
        "HF_HUB_OFFLINE forbids to download it: unset it, or name the folder of its config.json by --model FOLDER\n"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("foobar/llama-3.1-8b", "llama-3.1-8b"),
        ("foobar/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b"),
        ("RedHatAI/Qwen3-32B-quantized.w4a16", "qwen3-32b"),
        ("nvidia/Llama-3.1-8B-Instruct-FP4", "llama-3.1-8b"),
        ("Qwen/gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    ],
)
def test_a_name_without_a_file_is_not_taken_for_another(name, alike, cache, capsys):
    """Its config.json counts, and without one it is refused: shape, length and number formats are unknown."""
    assert status(["simulate", "--model", name, "--num-prompts", "2"]) == MISTAKE
    said = capsys.readouterr().err
    assert said.startswith(f"fragmeter: model = '{name}': is no preset, no stored file is of it")
    assert f"--model {alike} has nearly its name" in said and "--model FOLDER" in said
    assert said.count("\n") == 1
    (cache / "models--org--tiny").rename(cache / f"models--{name.replace('/', '--')}")
    assert (model(name).name, model(name).num_layers) == (name, 3)


@pytest.mark.parametrize("name", ["tiiuae/Falcon-H1-34B", "org/falcon-h1-7b-FP8", "falcon-h1"])
def test_a_model_that_is_not_simulated_says_why_without_a_network(name, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert status(["plan", "--gpu", "h200", "--serve", f"vllm serve {name}"]) == MISTAKE
    said = capsys.readouterr().err
    assert said.startswith("fragmeter: model_type = 'falcon_h1': has attention and Mamba side by side in every layer")
    assert name in said and said.count("\n") == 1


def test_a_path_that_is_not_here_is_no_preset():
    with pytest.raises(SettingError, match="is no file or folder here; .* --model llama-3.1-8b$"):
        model("/models/Llama-3.1-8B-Instruct")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
    ],
)
def test_a_short_name_with_one_match_is_taken_and_said(name, taken):
    with collected_notes() as said:
        assert model(name).name == taken
    assert said[0] == f"Model: {taken}, the only known one that {name} may stand for."
    assert origin(name) == origin(taken) or taken in not_none(origin(name))


def test_an_ambiguous_short_name_is_refused_with_its_matches():
    with pytest.raises(SettingError) as refused:
        model("llama-3.1-8b-instruct")
    both = "meta-llama/Llama-3.1-8B-Instruct or meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert str(refused.value) == f"model = 'llama-3.1-8b-instruct': may be {both}; give one of these"


@pytest.mark.parametrize("name", ["llama-3.3-70b-fp8", "llama-3.1-405b-awq", "mixtral-8x7b-instruct"])
def test_a_suffix_of_a_name_is_never_left_out(name):
    """A checkpoint of another format or training is not the one that is known."""
    with pytest.raises(SettingError, match="the model of nearly that name"):
        model(name)


def test_every_preset_is_found_by_its_repository():
    """But for three of which the stored file says something else: without an encoder, or in other number formats."""
    presets = json.loads(resources.files("fragmeter.sim.spec").joinpath("data/models.json").read_text("utf-8"))
    named = {preset: config["_name_or_path"] for preset, config in presets.items() if "_name_or_path" in config}
    apart = {preset: model(name).name for preset, name in named.items() if model(name).name != preset}
    assert len(named) > 80 and set(apart) == {"nemotron-3.5-30b-a3b", "minimax-m3", "step-3.7-flash"}
    assert all(model(preset).slot_bytes() == model(name).slot_bytes() for preset, name in apart.items())


def test_an_unknown_architecture_names_the_key_that_is_not_plain(cache, capsys):
    snapshot = cache / "models--org--tiny" / "snapshots" / REVISION
    (snapshot / "config.json").write_text(json.dumps(TINY | {"model_type": "foo_moe", "moe_intermediate_size": 64}))
    assert status(["simulate", "--model", "org/tiny", "--num-prompts", "2"]) == MISTAKE
    said = capsys.readouterr().err
    assert said.startswith("fragmeter: moe_intermediate_size = 64: a mixture of experts is not understood in org/tiny")
    assert "'foo_moe'" in said and said.count("\n") == 1


def test_a_name_that_is_no_repository_lists_the_presets():
    with pytest.raises(SettingError, match="one of opt-13b, .*, or a path to a config.json"):
        model("gpt-5")


#: Set when a hub that is asked for ``org/stuck`` may answer.
ANSWER = threading.Event()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of one file needs."""

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        file = self.path.rpartition("/")[2]
        body = json.dumps(TINY if file == "config.json" else MODELOPT).encode()
        if self.path.startswith("/org/stuck"):
            ANSWER.wait(30)
        errors = {"/org/gated": (403, "GatedRepo"), "/org/missing": (404, "RepoNotFound")}
        if file == "hf_quant_config.json" and not self.path.startswith("/org/tiny-NVFP4"):
            errors |= {"/": (404, "EntryNotFound")}
        for path, (code, error) in errors.items():
            if self.path.startswith(path):
                self.send_response(code)
                self.send_header("X-Error-Code", error)
                self.send_header("X-Error-Message", f"{error} by this hub")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(200)
        for name, value in {
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "X-Repo-Commit": REVISION,
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    ANSWER.set()
    server.shutdown()


def asked(endpoint: str, home: Path, name: str, **more: str) -> tuple[int, str]:
    """Exit status and output of ``plan --serve`` for a model; in a process, as the endpoint is read at import."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "COLUMNS": "1000", **more}
    line = f"vllm serve {name} --max-model-len 512"
    command = [sys.executable, "-m", "fragmeter", "plan", "--gpu", "h200", "--serve", line]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_download_and_then_the_cache(hub, tmp_path):
    code, printed = asked(hub, tmp_path, "org/tiny")
    assert code == 0 and "It starts: org/tiny on 1 x h200" in printed
    assert (tmp_path / "hub" / "models--org--tiny" / "snapshots" / REVISION / "config.json").exists()
    code, printed = asked("http://127.0.0.1:9", tmp_path, "org/tiny", HF_HUB_OFFLINE="1")
    assert code == 0 and "It starts: org/tiny" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-NVFP4", "tiny-NVFP4-in-the-cache"])
def test_the_file_of_modelopt_is_downloaded(name, hub, tmp_path):
    """Also beside a ``config.json`` that another program put into the cache, where the name says a format."""
    snapshot = tmp_path / "hub" / f"models--org--{name}" / "snapshots" / REVISION
    if name.endswith("cache"):
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(TINY))
        (refs := snapshot.parents[1] / "refs").mkdir()
        (refs / "main").write_text(REVISION)
    code, printed = asked(hub, tmp_path, f"org/{name}")
    assert code == 0 and f"It starts: org/{name} on 1 x h200" in printed
    # The file asks for a KV cache of 8 bits, which holds twice the tokens of 16.
    found = re.search(r"KV cache of ([\d,]+) blocks", printed.replace("\n", " "))
    assert found is not None and 22_200_000 < int(found[1].replace(",", "")) < 22_600_000
    assert json.loads((snapshot / "hf_quant_config.json").read_text()) == MODELOPT


@pytest.mark.slow
def test_a_format_that_only_the_name_says_is_refused(hub, tmp_path):
    code, printed = asked(hub, tmp_path, "org/other-W4A16")
    assert code == 2 and printed.count("\n") == 1
    assert printed.startswith(
        "fragmeter: quantization = None: org/other-W4A16 says W4A16 by its name, and has neither quantization_config in config.json"
        " nor hf_quant_config.json: give one of them, or --quantization"
    )
    code, printed = asked(hub, tmp_path, "org/other-W4A16 --quantization awq")
    assert code == 0 and "--model org/other-W4A16 --gpu h200 --quantization awq" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "org/gated",
            "its repository is gated: accept its terms at HUB/org/gated and log in by hf auth login or HF_TOKEN",
        ),
        ("org/missing", "the hub has no such repository, or it is private: check the name"),
    ],
)
def test_what_the_hub_refuses_is_one_line(name, reason, hub, tmp_path):
    code, printed = asked(hub, tmp_path, name)
    assert code == 2 and printed.count("\n") == 1
    assert f"model = '{name}': is no preset" in printed and reason.replace("HUB", hub) in printed
    assert printed.endswith(", or name the folder of its config.json by --model FOLDER\n")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line(hub, tmp_path):
    code, printed = asked(hub, tmp_path, "org/stuck", HF_HUB_ETAG_TIMEOUT="1")
    assert code == 2 and printed.count("\n") == 1
    assert "model = 'org/stuck': is no preset" in printed
    assert f"{hub} does not answer (timed out): connect to a network, or name the folder of its" in printed


def test_the_cache_says_more_than_the_suffix_of_a_name(cache):
    snapshot = cache / "models--nvidia--Llama-3.1-8B-Instruct-FP8"
    (cache / "models--org--tiny").rename(snapshot)
    form = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (snapshot / "snapshots" / REVISION / "config.json").write_text(json.dumps(TINY | {"quantization_config": form}))
    found = model("nvidia/Llama-3.1-8B-Instruct-FP8")
    assert (found.num_layers, found.quantization, found.kv_dtype) == (3, "fp8", "fp8")


def test_the_cache_comes_before_stored_facts(cache):
    assert model("Qwen/Qwen3-8B").num_layers == 36
    (cache / "models--org--tiny").rename(cache / "models--Qwen--Qwen3-8B")
    assert (model("Qwen/Qwen3-8B").num_layers, model("qwen3-8b").num_layers) == (3, 36)
    assert "revision" in origin("Qwen/Qwen3-8B")


@pytest.mark.parametrize("name", ["tiny-FP8", "tiny.w8a8", "org/tiny-gptq-int4", "tiny_mxfp4", "tiny-NVFP4-v2"])
def test_a_folder_with_a_format_in_its_name(name, tmp_path, capsys):
    """Refused, unless the files or a flag say the format; null says 16 bits."""
    path = tmp_path / name / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(TINY))
    run = ["simulate", "--policy", "vllm-v1", "--model", str(path.parent), "--gpu", "h200", "--num-prompts", "2"]
    assert status(run) == MISTAKE
    said = capsys.readouterr().err
    assert "quantization = None: " in said and " by its name" in said and said.count("\n") == 1
    assert status([*run, "--quantization", "fp8"]) == DONE
    path.write_text(json.dumps(TINY | {"quantization_config": None}))
    assert status(run) == DONE and model(path.parent).quantization is None


@pytest.mark.parametrize("name", ["tiny-BF16", "fp8ish", "w4a16x", "tiny-14b-it", "qwen-4bx"])
def test_other_names_say_no_format(name, tmp_path):
    path = tmp_path / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    assert model(path).named_format is None


def test_sources_of_shapes(cache, tmp_path):
    path = tmp_path / "here" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert origin(str(path.parent)) == f"config.json with SHA-256 {digest}"
    assert origin("glm-5") is None
    assert origin("zai-org/GLM-5.1-FP8") == (
        "config.json of zai-org/GLM-5.1-FP8: aiconfigurator-core (PyPI),"
        " aiconfigurator_core/model_configs/zai-org--GLM-5.1-FP8_config.json, 0.12.0, read 2026-11-28"
    )


@pytest.mark.slow
def test_no_network_is_one_line(hub, tmp_path):
    code, printed = asked("http://127.0.0.1:9", tmp_path, "org/tiny")
    assert code == 2 and printed.count("\n") == 1 and "urlopen" not in printed
    assert "http://127.0.0.1:9 does not answer ([Errno 111] Connection refused): connect to a network" in printed
