"""``plan --deploy``: the manifest of the recommended fleet, for Docker Compose or Kubernetes.

    compose      a service of each replica, with GPUs of its own on one host (``count`` would give all of them the first ones)
    kubernetes   a Deployment with so many replicas, and a Service that divides requests among them

Prefill and decode apart follow vLLM's guide of NixlConnector (docs/features/nixl_connector_usage.md of 0.33): replicas by role, each with
its own address for the handshake, and in front the proxy of that guide, which the container fetches at its start. On one host the
ports differ; in Kubernetes each role is a StatefulSet, as the proxy takes the name of every replica.

Both start the model as the plan names it: the line's name, or the repository that a preset stands for. Engines that share experts need an
address of each engine, which a plan does not choose: they are refused.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...sim.spec.model import repository
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from .answer import Answer, Bill
from .candidates import Candidate
from .pairs import ROLES, transfer_config
from .text import flags_of

Form = Literal["compose", "kubernetes"]
#: Name of the file of each form in the folder of a plan.
FILES: dict[Form, str] = {"compose": "compose.yaml", "kubernetes": "kubernetes.yaml"}
_IMAGE, _PORT, _NAME = "vllm/vllm-openai", 8000, "vllm"
#: On one host, of the first replica of each role, and of the first handshake (``VLLM_NIXL_SIDE_CHANNEL_PORT``).
_ROLE_PORTS, _HANDSHAKE_PORT = {"prefill": 8100, "decode": 8200}, 5600
_HANDSHAKE = "VLLM_NIXL_SIDE_CHANNEL"
_PROXY = (
    "https://raw.githubusercontent.com/vllm-project/vllm/{}/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
)
#: Label of the nodes with a card, where a fleet has two.
_CARD = "gpu"
_Object = dict[str, Any]


class _Servers(NamedTuple):
    """Equal replicas.

    Attributes:
        name: Of the role, or of all.
        arguments: Of ``vllm serve``.
        gpus: Of one replica.
        card: Their GPU.
    """

    name: str
    arguments: list[str]
    gpus: int
    replicas: int
    card: str


def manifest(form: Form, answer: Answer, bill: Bill, model: str, version: tuple[int, ...] | None) -> str:
    """The manifest, as YAML.

    Args:
        model: What the server loads (``loadable``).
        version: vLLM's release, if it is stated; else the latest image.

    Raises:
        SettingError: Engines share experts, or Compose would need two hosts.
    """
    # Here, as a plan without a manifest does without it.
    import yaml

    if answer.candidate.engines > 1:
        raise SettingError("deploy", form, "writes no fleets of engines that share experts")
    tag = "latest" if version is None else f"v{'.'.join(map(str, (*version, 0)[:3]))}"
    image, proxy = f"{_IMAGE}:{tag}", _PROXY.format("main" if version is None else tag)
    fleet = _fleet(answer, bill, model)
    if form == "compose" and len({each.card for each in fleet}) > 1:
        raise SettingError("deploy", form, "starts one host, and the fleet has two kinds of cards; give kubernetes")
    documents = _compose(image, proxy, fleet) if form == "compose" else _kubernetes(image, proxy, fleet)
    # Copies, as YAML names what stands twice.
    return yaml.safe_dump_all([json.loads(json.dumps(each)) for each in documents], sort_keys=False, width=1000)


def loadable(model: str) -> str:
    """The name by which vLLM loads a model: a given repository or path, or the repository that a short name stands for.

    Raises:
        SettingError: It is a preset of no published model, or unknown.
    """
    if "/" in model or Path(model).exists():
        return model
    found = repository(model)
    if found is None:
        raise SettingError("deploy", model, "is no name that vLLM loads; name the model as org/name")
    return found


def _fleet(answer: Answer, bill: Bill, model: str) -> list[_Servers]:
    """The servers of a fleet: of one kind, or those that prefill and those that decode."""
    one, prefill = answer.candidate, answer.prefill_replicas
    if prefill is None:
        return [_servers(_NAME, one, bill.replicas, model)]
    sides = zip(ROLES, (one, one.decode or one), (prefill, bill.replicas - prefill), strict=True)
    return [
        _servers(role, each, count, model, ["--kv-transfer-config", transfer_config(role)])
        for role, each, count in sides
    ]


def _servers(name: str, candidate: Candidate, replicas: int, model: str, more: Sequence[str] = ()) -> _Servers:
    arguments = ["--model", candidate.checkpoint or model, *_flags(candidate), *more]
    return _Servers(name, arguments, candidate.num_gpus, replicas, candidate.started.launch.gpu.name)


def _flags(candidate: Candidate) -> list[str]:
    """The words of the recommended flags, and of the others of the line."""
    chosen = not_none(candidate.settings)
    if chosen.policy != "vllm-v1":
        raise SettingError("deploy", chosen.policy, "is no scheduler of vLLM 1; plan with --policy vllm-v1")
    given = chosen.as_dict()
    for name in ("watermark", "speculative_config"):
        if given.get(name):
            raise SettingError(
                "deploy", given[name], f"has {name}, which the manifest would need in vLLM's own words; leave it out"
            )
    words = shlex.split(flags_of(candidate))
    for name, value in candidate.started.line.flags.items():
        if not {f"--{name}", f"--no-{name}"} & {*words}:
            words += [f"--{name}", value] if isinstance(value, str) else [f"--{'' if value else 'no-'}{name}"]
    return words


def _proxy_command(url: str, port: int, addresses: Sequence[Sequence[tuple[str, int]]]) -> list[str]:
    """A shell that fetches the proxy and starts it in front of the addresses of each role."""
    words = ["--host", "0.0.0.0", "--port", str(port)]
    for name, some in zip(("prefiller", "decoder"), addresses, strict=True):
        words += [f"--{name}-hosts", *(host for host, _ in some), f"--{name}-ports", *(str(each) for _, each in some)]
    fetch = f"import urllib.request as u; u.urlretrieve('{url}', '/tmp/proxy.py')"
    return ["sh", "-c", f'python3 -c "{fetch}" && exec python3 /tmp/proxy.py {shlex.join(words)}']


def _compose(image: str, proxy: str, fleet: Sequence[_Servers]) -> list[_Object]:
    services: _Object = {}
    apart = len(fleet) > 1
    addresses: list[list[tuple[str, int]]] = []
    gpu = 0
    for servers in fleet:
        addresses.append([])
        for place in range(servers.replicas):
            ids = [str(each) for each in range(gpu, gpu + servers.gpus)]
            device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            service = {
                "image": image,
                "command": servers.arguments,
                "ipc": "host",
                "volumes": ["huggingface:/root/.cache/huggingface"],
                "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
                "deploy": {"resources": {"reservations": {"devices": [device]}}},
            }
            if apart:
                port = _ROLE_PORTS[servers.name] + place
                addresses[-1].append(("localhost", port))
                service["network_mode"] = "host"
                service["command"] = [*servers.arguments, "--port", str(port)]
                service["environment"] = {
                    "HF_TOKEN": "${HF_TOKEN:-}",
                    f"{_HANDSHAKE}_PORT": str(_HANDSHAKE_PORT + len(services)),
                }
            else:
                service["ports"] = [f"{_PORT + place}:{_PORT}"]
            services[f"{servers.name}-{place}" if apart or servers.replicas > 1 else servers.name] = service
            gpu += servers.gpus
    if apart:
        command = _proxy_command(proxy, _PORT, addresses)
        services["proxy"] = {"image": image, "entrypoint": command, "network_mode": "host", "depends_on": [*services]}
    return [{"services": services, "volumes": {"huggingface": {}}}]


def _kubernetes(image: str, proxy: str, fleet: Sequence[_Servers]) -> list[_Object]:
    if len(fleet) == 1:
        [servers] = fleet
        pod = _pod(_container(servers, image), {})
        return [_controller("Deployment", _NAME, servers.replicas, pod), _service(_NAME)]
    cards, documents, addresses = {each.card for each in fleet}, [], []
    for servers in fleet:
        name = f"{_NAME}-{servers.name}"
        container = _container(servers, image)
        container["env"] = [{"name": f"{_HANDSHAKE}_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
        pod = _pod(container, {"nodeSelector": {_CARD: servers.card}} if len(cards) > 1 else {})
        more = {"serviceName": name, "podManagementPolicy": "Parallel"}
        documents += [
            _controller("StatefulSet", name, servers.replicas, pod, more),
            _service(name, {"clusterIP": "None"}),
        ]
        addresses.append([(f"{name}-{place}.{name}", _PORT) for place in range(servers.replicas)])
    ahead = {
        "name": _NAME,
        "image": image,
        "command": _proxy_command(proxy, _PORT, addresses),
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/healthcheck", "port": _PORT}},
    }
    return [*documents, _controller("Deployment", _NAME, 1, {"containers": [ahead]}), _service(_NAME)]


def _container(servers: _Servers, image: str) -> _Object:
    return {
        "name": _NAME,
        "image": image,
        "args": servers.arguments,
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {"nvidia.com/gpu": servers.gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _pod(container: _Object, more: _Object) -> _Object:
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    # The Service vllm would set VLLM_PORT to an address, which vLLM refuses (envs.py, get_vllm_port).
    return {**more, "enableServiceLinks": False, "containers": [container], "volumes": volumes}


def _controller(kind: str, name: str, replicas: int, pod: _Object, more: _Object | None = None) -> _Object:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            **(more or {}),
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _service(name: str, more: _Object | None = None) -> _Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {**(more or {}), "selector": {"app": name}, "ports": [{"port": _PORT, "targetPort": _PORT}]},
    }
