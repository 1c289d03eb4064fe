"""``plan --deploy``: the manifest of the recommended fleet, for Docker Compose or Kubernetes.

    compose      a service of vLLM with the replicas' GPUs and flags; Compose gives each replica a port of the range
    kubernetes   a Deployment with so many replicas, and a Service that divides requests among them

Both start the model as the plan names it: the line's name, or the repository that a preset stands for. A fleet that is divided into prefill
and decode, and engines that share experts, need a connector or an address of each engine, which a plan does not choose: they are refused.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

from ...sim.spec.model import preset_config
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from .answer import Answer, Bill
from .text import flags_text

Form = Literal["compose", "kubernetes"]
#: Name of the file of each form in the folder of a plan.
FILES: dict[Form, str] = {"compose": "compose.yaml", "kubernetes": "kubernetes.yaml"}
_IMAGE, _PORT, _NAME = "vllm/vllm-openai", 8000, "vllm"


def manifest(form: Form, answer: Answer, bill: Bill, model: str, version: tuple[int, ...] | None) -> str:
    """The manifest, as YAML.

    Args:
        model: What the server loads (``loadable``).
        version: vLLM's release, if it is stated; else the latest image.

    Raises:
        SettingError: The fleet is not one of equal servers.
    """
    # Here, as a plan without a manifest does without it.
    import yaml

    if answer.prefill_replicas is not None or answer.candidate.engines > 1:
        raise SettingError("deploy", form, "writes fleets of equal replicas; this one is divided, or shares experts")
    tag = "latest" if version is None else f"v{'.'.join(map(str, (*version, 0)[:3]))}"
    arguments = ["--model", model, *_flags(answer)]
    make = _compose if form == "compose" else _kubernetes
    documents = make(f"{_IMAGE}:{tag}", arguments, answer.candidate.num_gpus, bill.replicas)
    return yaml.safe_dump_all(documents, sort_keys=False, width=1000)


def loadable(model: str) -> str:
    """The name by which vLLM loads a model: that of a preset's repository, or the given repository or path.

    Raises:
        SettingError: It is a short name without a repository.
    """
    if "/" in model or Path(model).exists():
        return model
    try:
        repository = preset_config(model).get("_name_or_path")
    except KeyError:
        repository = None
    if repository is None:
        raise SettingError("deploy", model, "is no name that vLLM loads; name the model as org/name")
    return str(repository)


def _flags(answer: Answer) -> list[str]:
    """The words of the recommended flags, and of the others of the line."""
    chosen = not_none(answer.candidate.settings)
    if chosen.policy != "vllm-v1":
        raise SettingError("deploy", chosen.policy, "is no scheduler of vLLM 1; plan with --policy vllm-v1")
    given = chosen.as_dict()
    for name in ("watermark", "speculative_config"):
        if given.get(name):
            raise SettingError(
                "deploy", given[name], f"has {name}, which the manifest would need in vLLM's own words; leave it out"
            )
    words = shlex.split(flags_text(answer))
    for name, value in answer.candidate.started.line.flags.items():
        if not {f"--{name}", f"--no-{name}"} & {*words}:
            words += [f"--{name}", value] if isinstance(value, str) else [f"--{'' if value else 'no-'}{name}"]
    return words


def _compose(image: str, arguments: list[str], gpus: int, replicas: int) -> list[dict[str, Any]]:
    device = {"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}
    service = {
        "image": image,
        "command": arguments,
        "ipc": "host",
        "ports": [f"{_PORT}-{_PORT + replicas - 1}:{_PORT}" if replicas > 1 else f"{_PORT}:{_PORT}"],
        "volumes": ["huggingface:/root/.cache/huggingface"],
        "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
        "deploy": {"replicas": replicas, "resources": {"reservations": {"devices": [device]}}},
    }
    return [{"services": {_NAME: service}, "volumes": {"huggingface": {}}}]


def _kubernetes(image: str, arguments: list[str], gpus: int, replicas: int) -> list[dict[str, Any]]:
    labels = {"app": _NAME}
    container = {
        "name": _NAME,
        "image": image,
        "args": arguments,
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": _NAME, "labels": {**labels}},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {**labels}},
            "template": {"metadata": {"labels": {**labels}}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        "spec": {"selector": labels, "ports": [{"port": _PORT, "targetPort": _PORT}]},
    }
    return [deployment, service]
