"""What an operator has of a server that runs, as readings of it and what it says of itself.

--metrics, addresses         /metrics several times, /v1/models, /version
--prometheus, an address     its series of the last ``--window``
--log                        the periodic lines, and the start in front of them
a file to any of the three   recognised by its text

door -> Seen(readings, about) -> served_load -> ServerMetrics       as of saved metrics
                              -> serve_line -> ServeLine            where no line is given
"""

from __future__ import annotations

import ast
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...sim.types.user_files import text_of
from ..measured import prometheus, server_log
from ..measured.get import get, get_json, is_address
from ..measured.scrapes import SGLANG, Readings, Samples, Scrape, of_replica, readings_of
from ..measured.server_metrics import ServerMetrics
from ..sglang_server.line import words_of
from ..vllm_serve.deployments import flag_words
from ..vllm_serve.log import VERSION_LINE

#: Scrapes of an address, and seconds between two.
_SCRAPES, _BETWEEN_S = 6, 1.0
#: The arguments in a log's start, and its engine's model.
_GIVEN = re.compile(r"non-default args: (\{.*\})")
_MODEL = re.compile(r"LLM engine \(v[^)]*\) with config: .*?\bmodel='([^']*)'")
#: Of SGLang: its arguments with the defaults that it resolved, and one of them.
_SERVER_ARGS = re.compile(r"server_args=ServerArgs\((.*)\)")
_ARGUMENT = re.compile(r"\b(\w+)=('[^']*'|\"[^\"]*\"|[\w.+-]+)(?=,|$)")
#: A log of a start has one of these lines.
_STARTS = re.compile(r"KV cache size: \d|# (?:GPU|CUDA) blocks: |Available KV cache memory: |\bmax_total_num_tokens=\d")
#: Arguments that say where the server listens, and not what it serves.
_OWN = frozenset(("model", "model_tag", "api_key", "host", "port", "served_model_name"))


@dataclass(frozen=True)
class About:
    """What a server says of itself beside its readings; None for what it does not say.

    Attributes:
        model: Checkpoint: a name on the hub or a path.
        served_name: Name in requests.
        max_model_len: Longest sequence in tokens.
        vllm: Release.
        arguments: Arguments of its start that are no defaults; None where they are not known.
        log: Text of its log, if it begins with a start.
    """

    model: str | None = None
    served_name: str | None = None
    max_model_len: int | None = None
    vllm: str | None = None
    arguments: Mapping[str, Any] | None = None
    log: str | None = None


@dataclass(frozen=True)
class Seen:
    """Readings of a server, and what it says of itself."""

    readings: Readings
    about: About = About()


def opened(metrics: str | None, of_prometheus: str | None, log: str | None, window: str | None) -> Seen | None:
    """What the only given door shows; None without one.

    Args:
        metrics: A file, or addresses with commas between.

    Raises:
        SettingError: Several are given, an address does not answer, or ``window`` has nothing to apply to.
        UserError: A file cannot be read, or has no readings.
    """
    given = {"metrics": metrics, "prometheus": of_prometheus, "log": log}
    named = {field: text for field, text in given.items() if text is not None}
    if len(named) > 1:
        (first, _), (field, text), *_ = named.items()
        raise SettingError(field, text, f"both it and {first} have the server's readings; give one of them")
    if window is not None and not (of_prometheus is not None and is_address(of_prometheus)):
        raise SettingError("window", window, "is the window of a Prometheus; give its address as prometheus")
    if not named:
        return None
    ((field, text),) = named.items()
    if field == "metrics" and all(map(is_address, addresses := text.split(","))):
        return _scraped(addresses)
    if not is_address(text):
        return _of_file(field, text)
    if field == "log":
        raise SettingError(field, text, "is an address; save the log, as kubectl logs does, and give the file")
    return Seen(prometheus.asked(text, prometheus.window_s(window or "1h")))


def _of_file(field: str, path: str) -> Seen:
    text = text_of(path, field)
    if field == "log":
        return Seen(server_log.readings_of(path, text), _of_log(text))
    if field == "prometheus":
        return Seen(prometheus.readings_of(path, text))
    return Seen(readings_of(path, text))


def _scraped(urls: Sequence[str]) -> Seen:
    """The metrics of addresses, and what the first one's other endpoints say; one that does not have these is no error."""
    addresses = [url.rstrip("/").removesuffix("/metrics").removesuffix("/v1") for url in urls]
    scrapes: list[Scrape] = []
    for count in range(_SCRAPES):
        if count:
            time.sleep(_BETWEEN_S)
        at_s, samples = time.time(), Samples()
        for address in addresses:
            scrape = readings_of(address, get(f"{address}/metrics", "metrics")).scrapes[-1].samples
            samples |= scrape if len(addresses) == 1 else of_replica(scrape, address.partition("://")[2])
        scrapes.append(Scrape(at_s, samples))
    elapsed_s = not_none(scrapes[-1].at_s) - not_none(scrapes[0].at_s)
    return Seen(Readings(", ".join(addresses), scrapes, elapsed_s), _about(addresses[0]))


def _about(address: str) -> About:
    try:
        models = get_json(f"{address}/v1/models", "metrics")
        first = next(each for each in models["data"] if not each.get("parent"))
        model, name, longest = (first.get(key) for key in ("root", "id", "max_model_len"))
    except (SettingError, LookupError, TypeError, AttributeError, StopIteration):
        model = name = longest = None
    try:
        release = str(get_json(f"{address}/version", "metrics")["version"])
    except (SettingError, LookupError, TypeError):
        release = None
    is_length = isinstance(longest, int) and not isinstance(longest, bool) and longest > 0
    return About(model and str(model), name and str(name), longest if is_length else None, _release(release))


def _of_log(text: str) -> About:
    arguments = None
    # The last start counts.
    for found in _GIVEN.finditer(text):
        try:
            value = ast.literal_eval(found[1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        arguments = value if isinstance(value, dict) else arguments
    for found in _SERVER_ARGS.finditer(text):
        arguments = dict(_resolved(found[1]))
    model = next((found[1] for found in reversed(list(_MODEL.finditer(text)))), None)
    if arguments is not None and model is None:
        model = next((arguments[name] for name in ("model_tag", "model", "model_path") if name in arguments), None)
    releases = list(VERSION_LINE.finditer(text))
    release = f"{releases[-1][1]}.{releases[-1][2]}" if releases else None
    return About(
        model=None if model is None else str(model),
        vllm=release,
        arguments=arguments,
        log=text if _STARTS.search(text) else None,
    )


def _resolved(text: str) -> Iterator[tuple[str, Any]]:
    """Arguments of SGLang's server; those with a value that is no literal are left out."""
    for name, value in _ARGUMENT.findall(text):
        try:
            yield name, ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue


def _release(text: str | None) -> str | None:
    """A release as the command line takes it; None for a build between releases."""
    found = re.match(r"v?(\d{1,4}\.\d{1,4})(?:\.\d{1,4})?", text or "")
    return None if found is None else found[1]


def serve_line(about: About, metrics: ServerMetrics) -> tuple[str, list[str]]:
    """The command line that a server's own words make, and a sentence for each thing that is assumed.

    Raises:
        UserError: Nothing says which model it serves.
    """
    model = about.model or metrics.model_name
    if model is None:
        raise UserError("serve: is missing, and nothing says which model is served; give the server's line")
    if metrics.server == SGLANG:
        line = shlex.join(
            [
                "python",
                "-m",
                "sglang.launch_server",
                "--model-path",
                model,
                *words_of({**(about.arguments or {}), "model_path": None}),
            ]
        )
        return line, [] if about.arguments is not None else [_assumed(line, ["all else by SGLang's defaults"])]
    if about.arguments is not None:
        given = {str(name): value for name, value in about.arguments.items() if name not in _OWN and value is not None}
        words = [word for name, value in given.items() for word in flag_words(name, value)]
        return shlex.join(["vllm", "serve", model, *words]), []
    words = [word for name, value in _known(about, metrics) for word in flag_words(name, value)]
    line = shlex.join(["vllm", "serve", model, *words])
    assumed = ["max-num-batched-tokens, ranks and quantization as by vLLM's defaults and the checkpoint"]
    if metrics.running_limit is None:
        assumed.insert(0, "max-num-seqs by vLLM's default")
    return line, [_assumed(line, assumed)]


def _assumed(line: str, what: Sequence[str]) -> str:
    return (
        f"Assumed, as no --serve is given: {line}; {', '.join(what)}. The line with which the server was started, or its"
        " start-up log, settles that."
    )


def _known(about: About, metrics: ServerMetrics) -> Iterator[tuple[str, Any]]:
    """Flags that the metrics and the endpoints know."""
    if about.max_model_len is not None:
        yield "max-model-len", about.max_model_len
    config = metrics.config
    if config.get("gpu_memory_utilization"):
        yield "gpu-memory-utilization", config["gpu_memory_utilization"]
    if config.get("num_gpu_blocks_override") not in (None, "", "None"):
        yield "num-gpu-blocks-override", config["num_gpu_blocks_override"]
    if config.get("cache_dtype", "auto") not in ("auto", ""):
        yield "kv-cache-dtype", config["cache_dtype"]
    if metrics.running_limit is not None:
        yield "max-num-seqs", round(metrics.running_limit)
