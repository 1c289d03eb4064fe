"""The server in a deployment file, as a command line.

    docker compose                 a service with an image or a command of vLLM
    Kubernetes                     a container of any object (Deployment, StatefulSet, Job, LeaderWorkerSet, ...)
    KServe                         InferenceService with vLLM's arguments, and the ServingRuntime beside it; LLMInferenceService
    production-stack, llm-d        values of their charts: modelSpec, modelArtifacts with decode and prefill
    Ray Serve LLM                  an LLMConfig: in llm_configs, in a RayService, or in Python
    vLLM's --config                a mapping of flags

A file is walked for mappings of these shapes, wherever they are, so that templates around them do not matter. Arguments are a list or a
text, and may be a script for a shell. Variables of the container's environment are filled in. GPUs are those that
it requests.

Sources of the keys: docs.docker.com/reference/compose-file, kubernetes.io (Container), kserve.github.io (InferenceService,
LLMInferenceService, ServingRuntime: its arguments come before those of the service, pkg/controller/v1beta1/inferenceservice/utils),
vllm-project/production-stack (helm/values.yaml), llm-d-incubation/llm-d-modelservice (values.yaml), docs.ray.io (Ray Serve LLM), vLLM's
docs/configuration/serve_args.md.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from ...sim.types.errors import SettingError
from .flags import flags, spellings
from .shell import VARIABLE, filled, first_argument, split

#: A line with which a YAML file begins, and no command line does.
_FIRST = re.compile(r"(?:---|[\w./\"'-]+:(?:\s|$)|- \w)")
_SHELLS = ("bash", "sh")
_SCHEMES = re.compile(r"^(?:hf|huggingface)://")
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
#: Keys with a number of servers.
_REPLICAS = ("replicas", "replicaCount", "scale", "num_replicas")
#: What a script with a configuration of Ray Serve LLM has.
_RAY_PYTHON = "LLMConfig("
#: Lists of a pod's containers: their command takes the place of the image's own.
_OF_PODS = ("containers", "initContainers")
#: Values of a file with its anchors written out, at most.
_MOST_VALUES = 100_000
#: Keys of production-stack's ``vllmConfig`` by their flags.
_STACK = {
    "maxModelLen": "max-model-len", "maxNumSeqs": "max-num-seqs", "dtype": "dtype", "tensorParallelSize": "tensor-parallel-size",
    "pipelineParallelSize": "pipeline-parallel-size", "gpuMemoryUtilization": "gpu-memory-utilization",
    "enableChunkedPrefill": "enable-chunked-prefill", "enablePrefixCaching": "enable-prefix-caching", "maxLoras": "max-loras",
}  # fmt: skip
#: Objects of KServe, and ranks of llm-d's and KServe's ``parallelism`` by their flags.
_KSERVE = ("InferenceService", "LLMInferenceService")
_KSERVE_FLAGS = {"--model_id": "--model", "--model-id": "--model", "--model_name": "--served-model-name"}
_KSERVE_OWN = {"--backend", "--enable_docs_url", "--enable-docs-url", "--model_dir", "--tensor_input_names"}
#: Where KServe mounts the model, and its variable with more arguments.
_MOUNTED, _MORE_ARGUMENTS = "/mnt/models", "VLLM_ADDITIONAL_ARGS"
_RANKS = {"tensor": "tensor-parallel-size", "pipeline": "pipeline-parallel-size", "data": "data-parallel-size"}


class Deployed(NamedTuple):
    """A server of a deployment.

    Attributes:
        name: Name of the service or the container.
        line: Its command line, with the environment and the image in front.
        gpus: GPUs that it requests; None if the file does not say.
        replicas: Servers like it that are started, as "3" or "1 to 4"; None if it is one.
        accelerator: The card that it asks for, as Ray names it.
    """

    name: str
    line: str
    gpus: int | None
    replicas: str | None = None
    accelerator: str | None = None


def is_deployment(text: str) -> bool:
    """Whether a text is YAML, or JSON, and no command line."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    first = next(lines, "")
    is_yaml = first.startswith("{") or "\n" in text.strip() and _FIRST.match(first) is not None
    return is_yaml or _RAY_PYTHON in text


def deployed(text: str) -> Deployed:
    """The only server of a deployment file.

    Raises:
        SettingError: The text is neither YAML nor a script of Ray, or has no server of vLLM, or several.
    """
    script = _script(text)
    documents = _documents(text, "serve") if script is None else _llm_configs(script)
    servers = [each for document in _with_runtimes(documents) for each in _servers(document)]
    found = {each.line: each for each in servers}
    if len(found) == 1:
        # Services with one line are replicas.
        one, distinct = servers[-1], {each.name for each in servers}
        return one._replace(replicas=str(len(distinct))) if len(distinct) > 1 and one.replicas is None else one
    if not found:
        remedy = "has no server of vLLM: no image, command or values of it, and no model; paste its vllm serve line"
        raise SettingError("serve", "the deployment", remedy)
    names = ", ".join(each.name for each in found.values())
    raise SettingError("serve", "the deployment", f"has {len(found)} servers of vLLM ({names}); leave one in the file")


def _documents(text: str, field: str) -> list[Any]:
    """The documents of a YAML file.

    Raises:
        SettingError: It is no YAML, or its anchors are endless.
    """
    try:
        documents = list(yaml.safe_load_all(text))
        _require_finite(documents)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        remedy = "is a template; give what helm template prints" if "{{" in text else "correct it"
        mark, said = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise SettingError(field, "YAML", f"cannot be read ({where}{' '.join(said.split())[:120]}); {remedy}") from None
    return documents


def config_flags(text: str) -> dict[str, Any]:
    """The flags in a file of ``vllm serve --config``.

    Raises:
        SettingError: It is no mapping of flags.
    """
    documents = _documents(text, "--config")
    content = documents[0] if len(documents) == 1 else None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingError("--config", "YAML", "is no mapping of flags; correct it, or paste its contents as flags")
    return content


def flag_words(name: str, value: Any) -> list[str]:
    """A flag of a configuration as words of a command line."""
    flag = f"--{name.replace('_', '-').removeprefix('--')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list):
        return [flag, *map(str, value)] if value else []
    return [f"{flag}={json.dumps(value, default=str) if isinstance(value, dict) else value}"]


def _require_finite(content: Any) -> None:
    """Refuse anchors that stand in themselves, or make a few lines endless.

    Raises:
        ValueError: There are more than ``_MOST_VALUES`` values with all anchors written out.
    """
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if not isinstance(node, list | dict):
            return 1
        if id(node) not in sizes:
            # Within itself it counts as endless.
            sizes[id(node)] = _MOST_VALUES
            sizes[id(node)] = 1 + sum(map(size, node.values() if isinstance(node, dict) else node))
        return sizes[id(node)]

    if size(content) > _MOST_VALUES:
        raise ValueError(f"its anchors stand for more than {_MOST_VALUES:,} values")


def _servers(document: Any) -> Iterator[Deployed]:
    """The servers anywhere in a document."""
    if isinstance(document, dict) and _is_config(document):
        content = dict(document)
        words = [word for name, value in content.items() if name != "model" for word in flag_words(name, value)]
        yield Deployed("config", shlex.join(["vllm", "serve", document["model"], *words]), None)
        return
    seen: set[int] = set()
    waiting: list[tuple[str, Any, Mapping[str, Any]]] = [("server", document, {})]
    while waiting:
        name, node, around = waiting.pop()
        # Anchors make one object stand in many places.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, list):
            waiting += [(name, each, around) for each in reversed(node)]
        elif isinstance(node, dict):
            around = _around(node, around)
            server = _server(str(node.get("name", name)), node, around, of_pod=name in _OF_PODS)
            if server is not None:
                yield server
            elif not _is_stack(node):
                waiting += [(str(key), _within(key, each), around) for key, each in reversed(node.items())]


def _is_config(document: Mapping[Any, Any]) -> bool:
    """Whether most names are flags; the others are refused as flags that no release has."""
    if not isinstance(document.get("model"), str) or not all(isinstance(name, str) for name in document):
        return False
    names = [name.replace("_", "-").removeprefix("no-") for name in document]
    return 2 * sum(name in flags() or name in spellings() for name in names) >= len(names)


def _within(key: Any, value: Any) -> Any:
    """A value, or what the text of a RayService's ``serveConfigV2`` says."""
    return _documents(value, key) if key == "serveConfigV2" and isinstance(value, str) else value


def _is_stack(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("modelURL"), str)


def _around(node: Mapping[str, Any], around: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an object says of the containers in it: its model, ranks and nodes."""
    found = dict(around)
    spec = node.get("spec")
    if node.get("kind") in _KSERVE and isinstance(spec, dict):
        model = spec.get("model")
        found["kserve"] = True
        if isinstance(model, dict) and isinstance(model.get("uri"), str):
            found["model"] = _SCHEMES.sub("", model["uri"])
        found["parallelism"] = spec.get("parallelism")
    artifacts = node.get("modelArtifacts")
    if isinstance(artifacts, dict) and isinstance(artifacts.get("uri"), str):
        found["model"] = _SCHEMES.sub("", artifacts["uri"])
    if isinstance(group := node.get("leaderWorkerTemplate"), dict):
        found["nodes"] = _whole(group.get("size"))
    if isinstance(node.get("parallelism"), dict) and "containers" in node:
        found["parallelism"] = node["parallelism"]
    found["replicas"] = _replicas(node) or found.get("replicas")
    return found


def _replicas(node: Mapping[str, Any]) -> str | None:
    """Servers that an object starts, or between how many it scales; None if it does not say, or it is one."""
    ray = node.get("deployment_config")
    for holder in (node, node.get("deploy"), ray, ray.get("autoscaling_config") if isinstance(ray, dict) else None):
        if not isinstance(holder, dict):
            continue
        counts = [_whole(holder[key]) for key in _REPLICAS if key in holder]
        lower = next((_whole(holder[key]) for key in ("minReplicas", "min_replicas") if key in holder), None)
        upper = next((_whole(holder[key]) for key in ("maxReplicas", "max_replicas") if key in holder), None)
        fewest = counts[0] if counts else lower
        if upper is not None and upper > (fewest or 1):
            return f"{1 if fewest is None else fewest} to {upper}"
        if fewest is not None:
            return str(fewest) if fewest > 1 else None
    return None


def _with_runtimes(documents: list[Any]) -> list[Any]:
    """The documents, with each runtime of KServe in the services that run it: a service and its runtime are one server."""
    flat = [each for document in documents for each in _items(document)]
    runtimes = {
        str(_at(each, "metadata", "name")): each
        for each in flat
        if _at(each, "kind") in ("ServingRuntime", "ClusterServingRuntime")
    }
    found, taken = [], []
    for each in flat:
        own = _at(each, "spec", "predictor", "model")
        is_service = _at(each, "kind") == "InferenceService" and isinstance(own, dict)
        runtime = _runtime_of(own, runtimes) if is_service else None
        if own is None or runtime is None:
            found.append(each)
            continue
        taken.append(runtime)
        predictor = each["spec"]["predictor"] | {"model": _merged(own, runtime)}
        found.append(each | {"spec": each["spec"] | {"predictor": predictor}})
    return [each for each in found if not any(each is runtime for runtime in taken)]


def _items(document: Any) -> list[Any]:
    """The objects of a document, which may be a list of them as kubectl prints it."""
    items = _at(document, "items")
    return items if _at(document, "kind") == "List" and isinstance(items, list) else [document]


def _at(node: Any, *keys: str) -> Any:
    """The value under keys; None where one is not there."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _runtime_of(service: Mapping[str, Any], runtimes: Mapping[str, Any]) -> Any:
    """The runtime in the file that a service names, or the only one for its format; None without one."""
    if service.get("runtime"):
        return runtimes.get(str(service["runtime"]))
    wanted = _at(service, "modelFormat", "name")
    fitting = []
    for each in runtimes.values():
        formats = _at(each, "spec", "supportedModelFormats")
        if wanted is not None and any(_at(form, "name") == wanted for form in formats if isinstance(formats, list)):
            fitting.append(each)
    return fitting[0] if len(fitting) == 1 else None


def _merged(service: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    """A service's container: that of the runtime, with what the service says in place of it, and its arguments behind."""
    containers = _at(runtime, "spec", "containers")
    containers = [each for each in containers if isinstance(each, dict)] if isinstance(containers, list) else []
    named = [each for each in containers if each.get("name") == "kserve-container"] or containers[:1]
    base = named[0] if named else {}
    merged = base | {key: value for key, value in service.items() if value is not None}
    for key in ("args", "env"):
        parts = [each[key] for each in (base, service) if isinstance(each.get(key), list)]
        if len(parts) == 2:
            merged[key] = [*parts[0], *parts[1]]
    return merged


def _server(name: str, node: Mapping[str, Any], around: Mapping[str, Any], of_pod: bool) -> Deployed | None:
    """The server that a mapping is; None for any other mapping."""
    if _is_stack(node):
        return _of_stack(name, node, around)
    if isinstance(node.get("model_loading_config"), dict):
        return _of_ray(node, around)
    environment = _environment(node.get("environment", node.get("env")))
    image = filled(node["image"], environment) if isinstance(node.get("image"), str) else ""
    words = [*_words(node.get("entrypoint", node.get("command"))), *_words(node.get("args"))]
    if "entrypoint" in node:
        words += _words(node.get("command"))
    model = around.get("model") or _storage(node, around)
    if around.get("kserve"):
        environment.setdefault(_MORE_ARGUMENTS, "")
        words = _of_kserve(words, model)
    starts = first_argument(words) is not None
    if around.get("kserve") and not starts:
        words.append(f"${_MORE_ARGUMENTS}")
    words = [each for word in words for each in _expanded(word, environment)]
    if of_pod and node.get("command") and not starts:
        return None
    is_container = bool({"resources", "modelFormat"} & node.keys() or image or words)
    of_chart = node.get("modelCommand") == "vllmServe" or "vllm" in str(node.get("name", ""))
    is_template = is_container and (model is not None and (around.get("kserve") or of_chart) or "modelFormat" in node)
    if not (starts or "vllm" in image or is_template):
        return None
    if not starts:
        if not (model or _names_model(words)):
            return None
        front = ["vllm", "serve", *([model] if model and not _names_model(words) else [])]
        words = [*front, *words, *_ranks(around, words)]
    gpus = _gpus(node)
    gpus = None if gpus is None else gpus * (around.get("nodes") or 1)
    line = shlex.join([*_assigned(environment), *([image] if image else []), *words])
    return Deployed(name, line, gpus, around["replicas"])


def _of_ray(node: Mapping[str, Any], around: Mapping[str, Any]) -> Deployed | None:
    """The server of an LLMConfig; None for one of another engine."""
    loading = node["model_loading_config"]
    name, source = loading.get("model_id"), loading.get("model_source")
    model = source if isinstance(source, str) else name
    if not isinstance(model, str) or str(node.get("llm_engine", "vllm")).lower() != "vllm":
        return None
    given = node.get("engine_kwargs")
    flags = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if isinstance(node.get("lora_config"), dict):
        flags.setdefault("enable_lora", True)
    words = [word for key, value in flags.items() for word in flag_words(str(key), value)]
    served = [f"--served-model-name={name}"] if name not in (None, model) else []
    assigned = _assigned(_environment(_at(node, "runtime_env", "env_vars")))
    bundles = _at(node, "placement_group_config", "bundles")
    counts = [_whole(_at(each, "GPU")) or 0 for each in bundles] if isinstance(bundles, list) else []
    line = shlex.join([*assigned, "vllm", "serve", _SCHEMES.sub("", model), *served, *words])
    card = node.get("accelerator_type")
    return Deployed(
        str(name or model), line, sum(counts) or None, around["replicas"], card if isinstance(card, str) else None
    )


def _script(text: str) -> ast.Module | None:
    """A script with an LLMConfig; None for any other text."""
    if _RAY_PYTHON not in text:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _llm_configs(script: ast.Module) -> list[Any]:
    """The LLMConfigs of a script, as far as they are written out."""
    calls = (each for each in ast.walk(script) if isinstance(each, ast.Call))
    return [_written(each) for each in calls if ast.unparse(each.func).rpartition(".")[2] == "LLMConfig"]


def _written(node: ast.expr) -> Any:
    """The value of an expression of constants, lists, dictionaries and calls with keywords; None for any other."""
    if isinstance(node, ast.Call):
        return {each.arg: _written(each.value) for each in node.keywords if each.arg is not None}
    if isinstance(node, ast.Dict):
        pairs = ((_written(key), _written(value)) for key, value in zip(node.keys, node.values, strict=True) if key)
        return {key: value for key, value in pairs if isinstance(key, str)}
    if isinstance(node, ast.List | ast.Tuple):
        return [_written(each) for each in node.elts]
    return node.value if isinstance(node, ast.Constant) else None


def _of_stack(name: str, node: Mapping[str, Any], around: Mapping[str, Any]) -> Deployed:
    config = node.get("vllmConfig") if isinstance(node.get("vllmConfig"), dict) else {}
    assert config is not None
    if config:
        # Its template turns caching off where the values do not turn it on.
        config = {"enablePrefixCaching": False} | config
    words = [word for key, flag in _STACK.items() if key in config for word in flag_words(flag, config[key])]
    if node.get("enableLoRA") or config.get("enableLoRA"):
        words.append("--enable-lora")
    words += _words(config.get("extraArgs"))
    if isinstance(cache := node.get("lmcacheConfig"), dict) and cache.get("enabled"):
        words += flag_words("kv-transfer-config", {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    assigned = _assigned(_environment(node.get("env")))
    image = f"{node['repository']}:{node['tag']}" if node.get("repository") and node.get("tag") else ""
    line = shlex.join([*assigned, *([image] if image else []), "vllm", "serve", str(node["modelURL"]), *words])
    return Deployed(name, line, _whole(node.get("requestGPU")), around["replicas"])


def _words(value: Any) -> list[str]:
    """Arguments: a list, or a text that a shell would split."""
    if isinstance(value, str):
        try:
            return split(value)
        except ValueError:
            return []
    words = [str(each) for each in value if not isinstance(each, dict | list)] if isinstance(value, list) else []
    for place, word in enumerate(words):
        if word.rsplit("/", 1)[-1] in _SHELLS and place + 2 < len(words) and words[place + 1].endswith("c"):
            return [*words[:place], *_words(words[place + 2])]
    # A list may begin with the shell's option, its command being elsewhere; and an item may be a script.
    return [each for word in words for each in (_words(word) if "\n" in word or "vllm serve" in word else [word])]


def _names_model(words: list[str]) -> bool:
    return bool(words and not words[0].startswith("-")) or any(word.split("=")[0] == "--model" for word in words)


def _environment(value: Any) -> dict[str, str]:
    """Variables: a mapping, a list of ``NAME=VALUE``, or a list of mappings with ``name`` and ``value``."""
    if isinstance(value, dict):
        return {str(name): str(each) for name, each in value.items() if not isinstance(each, dict | list)}
    found = {}
    for each in value if isinstance(value, list) else []:
        if isinstance(each, str) and "=" in each:
            name, _, text = each.partition("=")
            found[name] = text
        elif isinstance(each, dict) and "name" in each and "value" in each:
            found[str(each["name"])] = str(each["value"])
    return found


def _assigned(environment: Mapping[str, str]) -> list[str]:
    """vLLM's own variables and those that hide GPUs, as a shell assigns them."""
    names = (key for key in environment if key.startswith("VLLM_") or key.endswith("_VISIBLE_DEVICES"))
    return [f"{key}={environment[key]}" for key in names if key != _MORE_ARGUMENTS]


def _expanded(word: str, environment: Mapping[str, str]) -> list[str]:
    """The words for one word: those of a variable that has several arguments, or none."""
    text = filled(word, environment)
    return _words(text) if VARIABLE.fullmatch(word) and (not text or text.startswith("-")) else [text]


def _storage(node: Mapping[str, Any], around: Mapping[str, Any]) -> str | None:
    """The model of an InferenceService's predictor."""
    uri = node.get("storageUri")
    return _SCHEMES.sub("", uri) if around.get("kserve") and isinstance(uri, str) and _SCHEMES.match(uri) else None


def _of_kserve(words: list[str], model: str | None) -> list[str]:
    """Arguments of KServe's runtime as those of vLLM, with the model in place of the folder where KServe mounts it."""
    named = ((*word.partition("="), word) for word in words)
    words = [
        f"{_KSERVE_FLAGS[name]}={value}" if name in _KSERVE_FLAGS else word
        for name, _, value, word in named
        if name not in _KSERVE_OWN
    ]
    mounted = (_MOUNTED, f"--model={_MOUNTED}")
    return [
        word.rstrip("/").replace(_MOUNTED, model) if model and word.rstrip("/") in mounted else word for word in words
    ]


def _ranks(around: Mapping[str, Any], words: list[str]) -> list[str]:
    given = around.get("parallelism")
    if not isinstance(given, dict) or any("parallel-size" in word for word in words):
        return []
    ranks = {flag: _whole(given.get(name)) for name, flag in _RANKS.items()}
    return [f"--{flag}={ranks[flag]}" for flag in ranks if (ranks[flag] or 1) > 1]


def _gpus(node: Mapping[str, Any]) -> int | None:
    """GPUs that a container requests."""
    resources = node.get("resources")
    for kind in ("limits", "requests"):
        amounts = resources.get(kind) if isinstance(resources, dict) else None
        for name in _GPUS:
            if isinstance(amounts, dict) and name in amounts:
                return _whole(amounts[name])
    devices: Any = node.get("deploy")
    for key in ("resources", "reservations", "devices"):
        devices = devices.get(key) if isinstance(devices, dict) else None
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict):
            ids = device.get("device_ids")
            return len(ids) if isinstance(ids, list) else _whole(device.get("count"))
    return None


def _whole(value: Any) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None
