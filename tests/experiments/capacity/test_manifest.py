"""``plan --deploy``: what a manifest starts is the recommended fleet, as ``plan --serve`` reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fragmeter.experiments.capacity.manifest import FILES
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.vllm_serve.deployments import deployed
from fragmeter.experiments.vllm_serve.line import read_serve

PLAN = [
    "plan", "--model", "Qwen/Qwen3-32B", "--gpu", "h100-80gb", "--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.85",
    "--goodput", "ttft:300", "tpot:60", "--request-rate", "200", "--input-len", "300", "--output-len", "30", "--num-prompts", "100",
    "--seeds", "1",
]  # fmt: skip


def planned(out: Path, form: str) -> dict:
    assert status([*PLAN, "--out", str(out), "--deploy", form]) == DONE
    return json.loads((out / "plan.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["compose", "kubernetes"])
def test_a_manifest_is_read_as_the_recommended_fleet(form, tmp_path, capsys):
    plan = planned(tmp_path / "plan", form)
    path = tmp_path / "plan" / FILES[form]
    assert str(path.name) in capsys.readouterr().out
    replicas = plan["candidates"][0]["bill"]["replicas"]
    found = deployed(path.read_text())
    assert (found.gpus, int(found.replicas or 1)) == (2, replicas) and replicas > 1
    line = read_serve(str(path))
    assert line.model == "Qwen/Qwen3-32B" and line.flags["tensor-parallel-size"] == "2"
    assert line.flags["gpu-memory-utilization"] == "0.85"
    given = plan["candidates"][0]["settings"]
    for name in ("max-num-seqs", "max-num-batched-tokens", "max-model-len"):
        assert int(line.flags[name]) == given[name.replace("-", "_")]


def test_each_object_has_what_its_schema_requires(tmp_path):
    """Required fields of the Compose specification, and of apps/v1 Deployment and v1 Service; no name is an alias."""
    out = tmp_path / "plan"
    planned(out, "kubernetes")
    deployment, service = yaml.safe_load_all((out / FILES["kubernetes"]).read_text())
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    mounts = {each["name"] for each in template["spec"]["containers"][0]["volumeMounts"]}
    assert mounts <= {each["name"] for each in template["spec"]["volumes"]}
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert "&id" not in (out / FILES["kubernetes"]).read_text()
    planned(out, "compose")
    compose = yaml.safe_load((out / FILES["compose"]).read_text())
    [server] = compose["services"].values()
    [device] = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and device["count"] == 2
    first, last = server["ports"][0].split(":")[0].split("-")
    assert int(last) - int(first) + 1 == server["deploy"]["replicas"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "deploy = 'compose': has no place; give --out"),
        (
            ["--model", "toy-llama", "--out", "plan"],
            "deploy = 'toy-llama': is no name that vLLM loads; name the model as org/name",
        ),
    ],
)
def test_what_has_no_manifest_is_refused_before_the_search(more, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = [token for token in PLAN if not more or token not in ("--model", "Qwen/Qwen3-32B")]
    assert status([*tokens, "--deploy", "compose", *more]) == MISTAKE
    assert says in capsys.readouterr().err
