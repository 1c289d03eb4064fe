"""Deployment files: the model, the flags, the GPUs and the image of their server are those of its line."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import yaml

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.measured.statements import contradictions, of_line
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.types.errors import UserError
from fragmeter.sim.types.notes import collected_notes

COMPOSE = """
services:
  proxy:
    image: nginx:1.27
    command: ["nginx", "-g", "daemon off;"]
  llm:
    image: vllm/vllm-openai:v0.21.0
    command: >
      --model ${MODEL} --tensor-parallel-size 2
      --max-model-len 8192 --enforce-eager
    environment:
      - MODEL=facebook/opt-13b
      - VLLM_USE_V1=1
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: 2
              capabilities: [gpu]
"""
DEPLOYMENT = """
# A server and its service.
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llm}
spec:
  replicas: 3
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.21.0
          command: ["vllm", "serve", "facebook/opt-13b"]
          args: ["--tensor-parallel-size", "2", "--max-model-len=$(LENGTH)", "--enforce-eager"]
          env:
            - {name: LENGTH, value: "8192"}
            - {name: VLLM_USE_V1, value: "1"}
          resources: {limits: {nvidia.com/gpu: "2"}}
"""
SCRIPT = """
kind: StatefulSet
spec:
  template:
    spec:
      containers:
        - name: server
          image: registry.local/mirror/vllm/vllm-openai:v0.21.0
          env: [{name: VLLM_USE_V1, value: "1"}]
          command: ["/bin/bash", "-c"]
          args:
            - |
              echo ready
              exec vllm serve facebook/opt-13b \\
                --tensor-parallel-size 2 --max-model-len 8192 \\
                --enforce-eager  # as on the other node
          resources: {requests: {nvidia.com/gpu: 2}}
"""
INFERENCE_SERVICE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: opt}
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=opt, --max_model_len=8192, --tensor-parallel-size=2, --enforce-eager, --backend=vllm]
      env: [{name: VLLM_USE_V1, value: "1"}]
      storageUri: hf://facebook/opt-13b
      resources: {limits: {nvidia.com/gpu: "2"}}
"""
LLM_SERVICE = """
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: opt}
spec:
  model: {uri: "hf://facebook/opt-13b", name: facebook/opt-13b}
  parallelism: {tensor: 2}
  router: {route: {}, scheduler: {}}
  template:
    containers:
      - name: main
        env: [{name: VLLM_USE_V1, value: "1"}]
        args: ["--max-model-len=8192", "--enforce-eager"]
        resources: {limits: {nvidia.com/gpu: "2", cpu: "8"}}
"""
STACK = """
servingEngineSpec:
  runtimeClassName: ""
  modelSpec:
    - name: opt
      repository: lmcache/vllm-openai
      tag: v0.3.14
      modelURL: facebook/opt-13b
      replicaCount: 2
      requestGPU: 2
      vllmConfig: {maxModelLen: 8192, tensorParallelSize: 2, extraArgs: ["--enforce-eager"]}
      env: [{name: VLLM_USE_V1, value: "1"}]
      initContainer: {name: wait, image: "lmcache/vllm-openai:latest", command: ["sleep", "1"]}
routerSpec: {repository: lmcache/lmstack-router, extraArgs: ["--session"]}
"""
LLM_D = """
modelArtifacts: {uri: "hf://facebook/opt-13b", size: 40Gi}
routing: {proxy: {image: "ghcr.io/llm-d/llm-d-routing-sidecar:v0.4.0"}}
decode:
  replicas: 2
  parallelism: {tensor: 2, data: 1}
  containers:
    - name: vllm
      image: ghcr.io/llm-d/llm-d-cuda:v0.5.0
      modelCommand: vllmServe
      args: ["--max-model-len=8192", "--enforce-eager"]
      env: [{name: VLLM_USE_V1, value: "1"}]
      resources: {limits: {nvidia.com/gpu: "2"}}
    - {name: agent, image: "busybox:1.36", args: ["sleep", "9"]}
prefill: {create: false}
"""
SERVICE_WITH_RUNTIME = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: opt}
spec:
  predictor:
    minReplicas: 1
    maxReplicas: 4
    model:
      runtime: vllm-runtime
      modelFormat: {name: vLLM}
      args: [--max-model-len=8192, --tensor-parallel-size=2]
      storageUri: hf://facebook/opt-13b
      resources: {limits: {nvidia.com/gpu: "2"}}
---
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {name: vllm-runtime}
spec:
  supportedModelFormats: [{name: vLLM, autoSelect: true}]
  containers:
    - name: kserve-container
      image: vllm/vllm-openai:v0.21.0
      command: [python, -m, vllm.entrypoints.openai.api_server]
      args: ["--model=/mnt/models", "--served-model-name={{.Name}}", "--max-model-len=4096", --enforce-eager]
      env: [{name: VLLM_USE_V1, value: "1"}]
      resources: {limits: {nvidia.com/gpu: "1"}}
"""
RAY = """
applications:
- name: llm
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: opt, model_source: facebook/opt-13b}
      accelerator_type: H100
      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192, enforce_eager: true, seed: null}
      deployment_config: {autoscaling_config: {min_replicas: 2, max_replicas: 4}}
      placement_group_config: {bundles: [{GPU: 1, CPU: 8}, {GPU: 1}]}
      runtime_env: {env_vars: {VLLM_USE_V1: "1"}}
"""
RAY_SERVICE = "kind: RayService\nspec:\n  serveConfigV2: |\n" + RAY.strip().replace("\n", "\n    ").join(["    ", "\n"])
RAY_SCRIPT = """
from ray.serve.llm import LLMConfig, build_openai_app

served = LLMConfig(
    model_loading_config=dict(model_id="opt", model_source="facebook/opt-13b"),
    deployment_config=dict(num_replicas=3, ray_actor_options=OPTIONS),
    placement_group_config={"bundles": [{"GPU": 2}]},
    engine_kwargs=dict(tensor_parallel_size=2, max_model_len=8192, enforce_eager=True),
    runtime_env={"env_vars": {"VLLM_USE_V1": "1"}},
)
app = build_openai_app({"llm_configs": [served]})
"""
CONFIG = """
# serve.yaml
model: facebook/opt-13b
tensor-parallel-size: 2
max_model_len: 8192
enforce-eager: true
"""
FILES = {
    "compose": COMPOSE, "Deployment": DEPLOYMENT, "StatefulSet with a script": SCRIPT, "InferenceService": INFERENCE_SERVICE,
    "LLMInferenceService": LLM_SERVICE, "production-stack": STACK, "llm-d": LLM_D, "vLLM's --config": CONFIG,
    "ServingRuntime": SERVICE_WITH_RUNTIME, "Ray": RAY, "RayService": RAY_SERVICE, "LLMConfig": RAY_SCRIPT,
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_deployment_is_its_line(kind):
    line = parse_serve(FILES[kind])
    assert line.model == "facebook/opt-13b"
    assert (line.whole("tensor-parallel-size"), line.whole("max-model-len")) == (2, 8192)
    assert line.switch("enforce-eager") and set(line.flags) - {"enable-prefix-caching"} == {
        "tensor-parallel-size",
        "max-model-len",
        "enforce-eager",
    }
    assert line.gpus == (None if kind == "vLLM's --config" else 2)
    assert line.environment == ({} if kind == "vLLM's --config" else {"VLLM_USE_V1": "1"})
    # The tag of vLLM's own image alone is its release.
    own = ("compose", "Deployment", "StatefulSet with a script", "ServingRuntime")
    assert line.version == ((0, 21) if kind in own else None)


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        ("compose", None),
        ("Deployment", "3"),
        ("StatefulSet with a script", None),
        ("InferenceService", None),
        ("production-stack", "2"),
        ("llm-d", "2"),
        ("ServingRuntime", "1 to 4"),
        ("Ray", "2 to 4"),
        ("RayService", "2 to 4"),
        ("LLMConfig", "3"),
    ],
)
def test_an_answer_says_of_how_many_replicas_it_is_one(kind, replicas):
    with collected_notes() as notes:
        parse_serve(FILES[kind])
    assert (
        notes == []
        if replicas is None
        else [note.split(" starts ")[1].split(" replicas")[0] for note in notes] == [replicas]
    )


def test_a_runtime_is_that_of_the_service_that_names_it():
    """By its name, or by its format where it is the only one; another one is another server."""
    unnamed = SERVICE_WITH_RUNTIME.replace("      runtime: vllm-runtime\n", "")
    assert parse_serve(unnamed) == parse_serve(SERVICE_WITH_RUNTIME)
    service, runtime = SERVICE_WITH_RUNTIME.split("---")
    other = runtime.replace("name: vllm-runtime", "name: other").replace("4096", "1024")
    assert (
        parse_serve(
            f"{service}---{runtime}---{other.replace('name: vLLM', 'name: triton').replace('image: vllm/vllm-openai', 'image: x').replace('python, -m, vllm.entrypoints.openai.api_server', 'x')}"
        ).whole("max-model-len")
        == 8192
    )
    with pytest.raises(UserError, match="has 2 servers"):
        parse_serve(service.replace("runtime: vllm-runtime", "runtime: third") + "---" + runtime)


@pytest.mark.parametrize(("card", "names"), [("h100-80gb", []), ("a100-80gb", ["gpu"])])
def test_the_card_that_ray_asks_for_is_compared(card, names):
    said = of_line(started(parse_serve(RAY.replace("8192", "2048")), card))
    assert [text.split()[1] for text in contradictions(said)] == names


def test_an_error_names_the_file_and_the_line(tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("services:\n  a:\n   image: x\n  b: [1\n c: }\n")
    (tmp_path / "line.txt").write_text(f"vllm serve opt-13b --config {tmp_path / 'broken.yaml'}")
    for file in ("broken.yaml", "line.txt"):
        assert status(["plan", "--gpu", "h100-80gb", "--serve", str(tmp_path / file)]) == MISTAKE
        said = capsys.readouterr().err
        assert str(tmp_path / "broken.yaml") in said and "line 5" in said and said.count("\n") == 1


@pytest.mark.slow
def test_it_is_read_from_its_file(tmp_path, capsys):
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT)
    assert status(["plan", "--gpu", "h100-80gb", "--serve", str(tmp_path / "deployment.yaml")]) != MISTAKE
    (tmp_path / "stack.yaml").write_text(STACK.replace("replicaCount: 2", "lmcacheConfig: {enabled: true}"))
    capsys.readouterr()
    assert status(["plan", "--gpu", "a100-80gb", "--serve", str(tmp_path / "stack.yaml")]) != MISTAKE
    assert "kv-transfer-config" not in capsys.readouterr().out


def test_older_releases_leave_out_what_a_file_turns_off(tmp_path):
    (tmp_path / "serve.yaml").write_text("model: facebook/opt-13b\nenable-prefix-caching: false\n")
    text = f"vllm serve --config {tmp_path / 'serve.yaml'}"
    assert parse_serve(text).flags == {"enable-prefix-caching": False}
    assert parse_serve(text, (0, 11)).flags == {}


def test_a_file_of_flags_gives_way_to_the_line(tmp_path):
    (tmp_path / "serve.yaml").write_text(CONFIG + "middleware: []\ncompilation-config: {since: 2024-01-01}\n")
    line = parse_serve(f"vllm serve --config {tmp_path / 'serve.yaml'} --max-model-len 4096 --no-enforce-eager")
    assert (line.model, line.whole("max-model-len"), line.whole("tensor-parallel-size")) == (
        "facebook/opt-13b",
        4096,
        2,
    )
    assert not line.switch("enforce-eager")


DEFAULTS = """
services:
  llm:
    image: vllm/vllm-openai:${TAG:-v0.21.0}
    command: --model ${MODEL-facebook/opt-13b} --max-model-len ${LENGTH:-2048} --tensor-parallel-size ${RANKS:-2}
    environment: {LENGTH: 1024}
"""


def test_a_variable_without_a_value_has_its_default():
    line = parse_serve(DEFAULTS)
    assert (line.model, line.version) == ("facebook/opt-13b", (0, 21))
    assert (line.whole("max-model-len"), line.whole("tensor-parallel-size")) == (1024, 2)


def test_json_is_a_deployment_as_well():
    assert parse_serve(json.dumps(next(iter(yaml.safe_load_all(SCRIPT))))) == parse_serve(SCRIPT)


@pytest.mark.parametrize("script", [False, True])
def test_kserve_adds_arguments_and_mounts_the_model(script):
    more = "env: [{name: VLLM_ADDITIONAL_ARGS, value: '--max-model-len 8192 --enforce-eager'}]"
    text = LLM_SERVICE.replace('env: [{name: VLLM_USE_V1, value: "1"}]', more)
    text = text.replace('        args: ["--max-model-len=8192", "--enforce-eager"]\n', "")
    if script:
        command = "command: [bash, -c, 'vllm serve /mnt/models -tp 2 ${VLLM_ADDITIONAL_ARGS}']"
        text = text.replace("- name: main", f"- name: main\n        {command}")
    line = parse_serve(text)
    assert (line.model, line.whole("max-model-len"), line.whole("tensor-parallel-size")) == (
        "facebook/opt-13b",
        8192,
        2,
    )
    assert line.switch("enforce-eager") and line.environment == {}


@pytest.mark.parametrize(
    ("values", "caches"), [("maxNumSeqs: 8", False), ("enablePrefixCaching: true", True), ("", None)]
)
def test_production_stack_caches_only_if_its_values_say_so(values, caches):
    line = parse_serve(STACK.split("vllmConfig")[0] + f"vllmConfig: {{{values}}}\n")
    assert line.flags.get("enable-prefix-caching") is caches


@pytest.mark.parametrize("command", ["[sleep, infinity]", "[vllm, bench, serve, --model, m]", "[bash, worker.sh]"])
def test_a_pod_that_runs_another_command_of_vllms_image_is_no_server(command):
    other = f"        - {{name: other, image: 'vllm/vllm-openai:v0.21.0', command: {command}}}\n"
    assert parse_serve(DEPLOYMENT + other) == parse_serve(DEPLOYMENT)


def test_the_gpus_of_a_group_of_nodes_are_those_of_all():
    text = DEPLOYMENT.replace("  template:\n", "  leaderWorkerTemplate:\n    size: 4\n    leaderTemplate:\n", 1)
    assert (
        parse_serve(text.replace("    spec:", "      spec:").replace("      containers:", "        containers:")).gpus
        == 8
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (CONFIG + "max-num-sequences: 3\n", "--max-num-sequences: no release of vLLM"),
        (CONFIG + "3: 4\n", "has no server of vLLM"),
        (CONFIG + "speculative-config: &a {method: *a}\n", "its anchors stand for more than"),
        ("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefgh")
        ), "its anchors stand for more than"),
        (CONFIG.replace("8192", "{{ .Values.length }} {{- x }}"), "helm template"),
        ("services:\n  web: {image: nginx}\n", "has no server of vLLM"),
        (COMPOSE + "  second:\n    image: vllm/vllm-openai\n    command: --model facebook/opt-66b\n", "has 2 servers of vLLM (llm, second)"),
        ("services:\n  llm: [\n", "cannot be read"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "has no server of vLLM"),
        ("- " * 3000 + "x\ny: z\n", ""),
    ],
)  # fmt: skip
def test_what_has_no_single_server_is_refused(text, complaint):
    with pytest.raises(UserError) as error:
        parse_serve(text)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_more_ranks_than_gpus_are_a_contradiction(tmp_path, capsys):
    deployment = DEPLOYMENT.replace("  replicas: 3\n", "").replace('"2"}}', '"1"}}')
    (tmp_path / "deployment.yaml").write_text(deployment)
    assert status(["plan", "--gpu", "h100-80gb", "--serve", str(tmp_path / "deployment.yaml")]) == DONE
    assert capsys.readouterr().out.startswith("Contradiction: gpus is 2 by the line, 1 by its deployment.")
    # A node of several has its own GPUs alone.
    shared = '"--data-parallel-size=4", "--data-parallel-size-local=1", "--tensor-parallel-size"'
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT.replace('"--tensor-parallel-size"', shared))
    assert status(["plan", "--gpu", "h100-80gb", "--serve", str(tmp_path / "deployment.yaml")]) == DONE
    assert "Contradiction" not in capsys.readouterr().out
