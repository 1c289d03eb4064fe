"""How a benchmark's client sent its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.table import shown

#: Larger than any benchmark's value, in seconds or in requests.
MOST_VALUE = 1e12
#: Servers by the beginning of the ``backend`` or ``framework`` that a client's file names. "openai" may be any, and "vllm" is the default
#: of vLLM's own client.
_SERVERS = {
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "tgi": "Text Generation Inference",
    "tensorrt": "TensorRT-LLM",
    "trt": "TensorRT-LLM",
    "lmdeploy": "LMDeploy",
}
#: Burstiness of gaps that are all equal.
EVEN = 1e6


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientLoad:
    """How a client sent its requests, and to which model.

    Attributes:
        duration_s: Time from the client's start to its end; None if the file has no value.
        request_rate: Target rate in requests/s, inf for all at once; None if the file has no value.
        burstiness: Burstiness of the gaps between requests.
        max_concurrency: Maximum number of requests in flight at the client; None for no limit.
        model_id: Name of the model; None if the file has no value.
        server: The server, by the protocol that the client used; None if it may be any.
    """

    duration_s: float | None
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    model_id: str | None
    server: str | None = None


def client_load(path: str | PathLike[str], about: Mapping[str, Any]) -> ClientLoad:
    """The load in a client's words, which are those of ``vllm bench serve``.

    Raises:
        TraceError: A value is not a number above 0.
    """

    def number(name: str) -> float | None:
        value = about.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < MOST_VALUE:
            raise TraceError(path, None, name, shown(value), "must be a number above 0; fetch the file again", "row")
        return value

    limit = number("max_concurrency")
    return ClientLoad(
        duration_s=number("duration"),
        # vLLM writes the text "inf", SGLang the number.
        request_rate=inf if about.get("request_rate") in ("inf", inf) else number("request_rate"),
        burstiness=number("burstiness") or 1.0,
        max_concurrency=None if limit is None else int(limit),
        model_id=about["model_id"] if isinstance(about.get("model_id"), str) else None,
        server=_server(about.get("backend")),
    )


def _server(backend: object) -> str | None:
    # Dynamo's are such as dynamo-sglang.
    name = str(backend).lower().removeprefix("dynamo-").replace("_", "")
    return next((server for start, server in _SERVERS.items() if name.startswith(start)), None)
