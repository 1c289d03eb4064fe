"""A resumed sweep runs a point again after an edit of any file that its result depends on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.points import file_hashes
from fragmeter.sim import settings
from fragmeter.sim.policy import registry
from fragmeter.sim.types import user_code
from paths import ROOT

#: A policy that runs as many sequences as its modules say together.
FILES = {
    "plugged/__init__.py": "from .policy import Capped\n",
    "plugged/policy.py": """
from importlib import import_module

import beside
from beside_too import more as more_of_them
from fragmeter.sim.memory import PagedMemory
from fragmeter.sim.policy import Policy
from fragmeter.sim.types.sequence import CARRY_ON, StepPlan
from . import within

computed = import_module("".join(["comp", "uted"]))


class Capped(Policy):
    name = "capped"

    def memory(self, pool):
        return PagedMemory(pool.num_blocks, pool.block_size, ids=pool.ids)

    def schedule(self, state, transaction):
        from late import more

        cap = more + beside.MORE + more_of_them + within.deeper.MORE + computed.MORE
        if not state.waiting or state.batch_size >= cap:
            return CARRY_ON._replace(valid_until_horizon=False)
        head = state.waiting[0]
        return StepPlan(admitted=(head,), prefill_tokens=head.start_tokens, valid_until_horizon=False)
""",
    "plugged/within/__init__.py": "from ..within import deeper\n",
    "plugged/within/deeper.py": "MORE = 1\n",
    "beside.py": "from besides_that import MORE\n",
    "besides_that.py": "MORE = 1\n",
    "beside_too.py": "more = 1\n",
    "late.py": "more = 1\n",
    "computed.py": "MORE = 1\n",
}
MODULES = {Path(name).parts[0].removesuffix(".py") for name in FILES}
POINT = ["--policy", "plugged:Capped", "--num-prompts", "30", "--request-rate", "9", "--jobs", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the modules of a policy, as the current one; a process of its own would import them anew."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(registry, "_KNOWN", {})
    monkeypatch.setattr(user_code, "_LOADED", {})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


def forget() -> None:
    """As the end of the process that imported the modules."""
    registry._imported_policy.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]


def mean_ttft_ms(out: str) -> float:
    """Of a sweep of one point, in a folder that may hold it already."""
    forget()
    assert status(["sweep", *POINT, "--grid", "seed=1", "--out", out]) == DONE
    [value] = pd.read_parquet(Path(out) / "sweep.parquet")["mean_ttft_ms"]
    return value


@pytest.mark.slow
def test_an_edit_of_any_module_gives_the_new_number(folder):
    """Each edit lets one sequence more run, so that requests wait for less time."""
    modules = [
        "plugged/policy.py",
        "plugged/within/deeper.py",
        "besides_that.py",
        "beside_too.py",
        "late.py",
        "computed.py",
    ]
    found = {"": mean_ttft_ms("out")}
    for edited in modules:
        text = (folder / edited).read_text()
        (folder / edited).write_text(text.replace("= 1\n", "= 2\n").replace("cap = more +", "cap = 1 + more +"))
        found[edited] = mean_ttft_ms("out")
    assert [*found.values()] == sorted({*found.values()}, reverse=True), found
    assert mean_ttft_ms("another") == found[modules[-1]]


@pytest.mark.slow
def test_a_point_without_an_edit_is_kept(folder):
    mean_ttft_ms("out")
    [kept] = (folder / "out" / "points").iterdir()
    document = kept.read_bytes().replace(b'"mean_ttft_ms"', b'"mean_ttft_ms" ')
    kept.write_bytes(document)
    mean_ttft_ms("out")
    assert kept.read_bytes() == document


def test_modules_of_packages_are_no_user_code(folder):
    """Neither Python's, nor numpy's, nor those of fragmeter."""
    forget()
    found = {name.removeprefix("module ") for name in file_hashes(settings(policy="plugged:Capped"))} & {*sys.modules}
    assert {name for name in found if "plugged" not in name} == {"beside", "besides_that", "beside_too", "computed"}


CARD = {
    "name": "mine", "memory_bytes": 25250627584, "memory_gb_per_s": 1008, "fp16_tflops": 165.2, "pcie_gb_per_s": 32,
    "source": "made up",
}  # fmt: skip


def config_of(folder: Path, name: str, **changed: object) -> str:
    """A configuration of a small model in a file."""
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 32000,
        "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(shape | changed))
    return str(path.parent)


def test_a_draft_model_counts(tmp_path):
    drafter = config_of(tmp_path, "drafter")
    drafts = {
        "method": "draft_model", "model": drafter, "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.7, 0.4],
    }  # fmt: skip
    chosen = settings(policy="vllm-v1", speculative_config=json.dumps(drafts))
    before = file_hashes(chosen)
    config_of(tmp_path, "drafter", num_hidden_layers=8)
    assert file_hashes(chosen) != before


def test_the_format_of_the_weights_beside_a_model_counts(tmp_path):
    """A checkpoint of ModelOpt names its format in a file of its own."""
    chosen = settings(model=config_of(tmp_path, "served"))
    beside = tmp_path / "served" / "hf_quant_config.json"
    hashes = []
    for algorithm in ("FP8", "NVFP4"):
        beside.write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        hashes.append(file_hashes(chosen))
    assert hashes[0] != hashes[1]


def test_the_profile_of_a_card_counts(tmp_path):
    profile = (ROOT / "sim" / "cost" / "profiles" / "l40s.json").read_text()
    (tmp_path / "gpu.json").write_text(json.dumps(CARD | {"profile": "profile.json"}))
    found = []
    for text in (profile, f"{profile}\n"):
        (tmp_path / "profile.json").write_text(text)
        found.append(file_hashes(settings(gpu=str(tmp_path / "gpu.json"))))
    assert found[0] != found[1]
