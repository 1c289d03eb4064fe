"""``plan --deploy``: what a manifest starts is the recommended fleet, as ``plan --serve`` reads it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from fragmeter.experiments.capacity.answer import Answer, Bill
from fragmeter.experiments.capacity.candidates import Candidate, candidates
from fragmeter.experiments.capacity.manifest import FILES, loadable, manifest
from fragmeter.experiments.capacity.pairs import paired
from fragmeter.experiments.capacity.text import pair_lines
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.sglang_server.start import read_line
from fragmeter.experiments.vllm_serve.deployments import deployed
from fragmeter.experiments.vllm_serve.line import ServeLine, parse_serve
from fragmeter.sim.spec.model import model, model_names, repository
from fragmeter.sim.types.errors import SettingError

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
    line = read_line(str(path))
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
    # Kubernetes sets VLLM_PORT=tcp://... in every pod beside a Service named vllm, unless the pod refuses it; vLLM ends on it.
    assert service["metadata"]["name"] == "vllm" and template["spec"]["enableServiceLinks"] is False
    mounts = {each["name"] for each in template["spec"]["containers"][0]["volumeMounts"]}
    assert mounts <= {each["name"] for each in template["spec"]["volumes"]}
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert "&id" not in (out / FILES["kubernetes"]).read_text()
    planned(out, "compose")
    compose = yaml.safe_load((out / FILES["compose"]).read_text())
    servers = compose["services"].values()
    assert len(servers) == deployment["spec"]["replicas"] > 1
    # ``count`` would give each container the first GPUs of the host.
    ids = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in servers]
    assert sum(ids, []) == [str(each) for each in range(2 * len(servers))]
    ports = [each["ports"][0].split(":")[0] for each in servers]
    assert len(set(ports)) == len(servers)


def pair(decode_card: str = "h100-80gb") -> tuple[Answer, Bill]:
    """Three replicas that prefill, and one that decodes."""
    prefill, decode = (
        one_of("h100-80gb", "2"), one_of(decode_card, "4"),
    )  # fmt: skip
    answer = Answer(paired(prefill, decode), prefill_replicas=3, share=0.75)
    return answer, Bill(4, 10, 4, 1.0, 1.0, {}, None)


def one_of(card: str, ranks: str) -> Candidate:
    line = ServeLine("Qwen/Qwen3-32B", {"max-model-len": "9000"}, version=None)
    (found,) = candidates(line, [card], {"tensor_parallel_size": [ranks]}, "qwen3-32b")
    return found


def commands(documents: list[dict]) -> dict[str, list[str]]:
    """Words of ``vllm serve`` of each role."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]["args"]
        for each in documents
        if each["kind"] == "StatefulSet"
    }


class TestApart:
    def test_kubernetes_has_both_roles_and_a_proxy_that_names_each_replica(self):
        documents = list(yaml.safe_load_all(manifest("kubernetes", *pair(), "Qwen/Qwen3-32B", (0, 33))))
        kinds = [(each["kind"], each["metadata"]["name"]) for each in documents]
        assert kinds == [
            ("StatefulSet", "vllm-prefill"), ("Service", "vllm-prefill"), ("StatefulSet", "vllm-decode"),
            ("Service", "vllm-decode"), ("Deployment", "vllm"), ("Service", "vllm"),
        ]  # fmt: skip
        pods = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "StatefulSet"]
        assert [each["enableServiceLinks"] for each in pods] == [False, False]
        sizes = [each["spec"]["replicas"] for each in documents if each["kind"] == "StatefulSet"]
        gpus = [
            each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
            for each in documents
            if each["kind"] == "StatefulSet"
        ]
        assert (sizes, gpus) == ([3, 1], [2, 4])
        for name, ranks in (("vllm-prefill", "2"), ("vllm-decode", "4")):
            line = parse_serve(shlex.join(["vllm", "serve", *commands(documents)[name]]))
            assert line.flags["tensor-parallel-size"] == ranks and line.flags["max-model-len"] == "9000"
        for each in documents:
            if each["kind"] == "Service":
                [owner] = [
                    one
                    for one in documents
                    if one["kind"] != "Service" and one["metadata"]["name"] == each["metadata"]["name"]
                ]
                assert each["spec"]["selector"] == owner["spec"]["template"]["metadata"]["labels"]
            else:
                # Required by apps/v1: a StatefulSet names its Service, and a selector its pods.
                assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
                assert each["kind"] == "Deployment" or each["spec"]["serviceName"] == each["metadata"]["name"]
        [proxy] = documents[4]["spec"]["template"]["spec"]["containers"]
        words = shlex.split(proxy["command"][2])
        at = words.index("--prefiller-hosts")
        assert words[at + 1 : at + 4] == [f"vllm-prefill-{place}.vllm-prefill" for place in range(3)]
        assert words[words.index("--decoder-hosts") + 1] == "vllm-decode-0.vllm-decode"
        assert "/v0.33.0/" in proxy["command"][2]

    def test_a_pair_of_two_cards_chooses_its_nodes_and_is_not_one_host(self):
        documents = list(yaml.safe_load_all(manifest("kubernetes", *pair("h200"), "Qwen/Qwen3-32B", None)))
        nodes = [
            each["spec"]["template"]["spec"]["nodeSelector"] for each in documents if each["kind"] == "StatefulSet"
        ]
        assert nodes == [{"gpu": "h100-80gb"}, {"gpu": "h200"}]
        with pytest.raises(SettingError, match="two kinds of cards; give kubernetes"):
            manifest("compose", *pair("h200"), "Qwen/Qwen3-32B", None)

    def test_compose_gives_each_replica_its_gpus_and_ports(self):
        text = manifest("compose", *pair(), "Qwen/Qwen3-32B", (0, 33))
        services = yaml.safe_load(text)["services"]
        assert [*services] == ["prefill-0", "prefill-1", "prefill-2", "decode-0", "proxy"] and "&id" not in text
        servers = [services[name] for name in services if name != "proxy"]
        ids = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in servers]
        assert sum(ids, []) == [str(each) for each in range(10)] and [len(each) for each in ids] == [2, 2, 2, 4]
        ports = [each["command"][each["command"].index("--port") + 1] for each in servers]
        handshakes = [each["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in servers]
        assert ports == ["8100", "8101", "8102", "8200"] and len(set(handshakes)) == 4
        words = shlex.split(services["proxy"]["entrypoint"][2])
        at = words.index("--prefiller-ports")
        assert words[at + 1 : at + 4] == ports[:3] and words[words.index("--decoder-ports") + 1] == ports[3]

    def test_the_roles_are_those_of_the_two_lines_in_the_text(self):
        documents = list(yaml.safe_load_all(manifest("kubernetes", *pair(), "Qwen/Qwen3-32B", None)))
        for line, words in zip(pair_lines(pair()[0], "Qwen/Qwen3-32B"), commands(documents).values(), strict=True):
            given = shlex.split(line)[3:]
            assert {*given} <= {*words} and json.loads(words[-1]) == json.loads(given[-1])


def test_a_short_name_is_started_as_the_repository_of_its_shape():
    """vLLM knows no preset: each is named by a repository, of which the same model is read."""
    named = {name: loadable(name) for name in model_names() if repository(name) is not None}
    assert {*model_names()} - {*named} == {"llama-13b", "toy-llama", "toy-opt"}
    for name, found in named.items():
        ours, theirs = model(name), model(found)
        assert "/" in found and (ours.num_layers, ours.hidden_size, ours.vocab_size, ours.head_dim) == (
            theirs.num_layers, theirs.hidden_size, theirs.vocab_size, theirs.head_dim,
        )  # fmt: skip
    assert [loadable(name) for name in ("qwen3-32b", "llama-3.3-70b")] == [
        "Qwen/Qwen3-32B",
        "meta-llama/Llama-3.3-70B-Instruct",
    ]


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
