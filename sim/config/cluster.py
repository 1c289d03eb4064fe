"""The configuration of a cluster: replicas, routers, and the transfer of KV caches between replicas."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ..types.bounds import Replicas
from ..types.errors import SettingError
from .settings import Settings, setting_error

ROUTERS = ("round-robin", "least-outstanding-tokens", "kv-aware", "prefix-affine", "vllm-dp")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Cluster:
    """Identical replicas behind a router.

    Attributes:
        num_replicas: Number of replicas that prefill and decode.
        router: Choice of the replica for a request: the next in turn ("round-robin"); the fewest outstanding tokens of
            prompts and outputs ("least-outstanding-tokens"); the most room in the KV cache ("kv-aware"); the
            longest prefix received before, as long as loads are even ("prefix-affine"); or as vLLM divides requests among the
            engines of --data-parallel-size ("vllm-dp").
        cache_threshold: Share of a prompt that a replica must have received for prefix-affine to choose it.
        balance_abs_threshold: prefix-affine chooses the least busy replica if the busiest has more than this many
            requests more,
        balance_rel_threshold: and more than this many times as many.
        prefill_replicas: Number of replicas that only prefill; needs --decode-replicas.
        decode_replicas: Number of replicas that only decode; needs --prefill-replicas.
        decode_router: Choice of the decode replica for a prefilled request.
        kv_transfer_bandwidth: Bandwidth of the link of each prefill replica, in GB/s (10**9 bytes).
        kv_transfer_latency: Latency added to each transfer, in milliseconds.
    """

    num_replicas: Replicas = 1
    router: str = "round-robin"
    cache_threshold: Annotated[float, Field(ge=0, le=1)] = 0.3
    balance_abs_threshold: Annotated[int, Field(ge=0, le=2**31)] = 64
    balance_rel_threshold: Annotated[float, Field(ge=0, le=1e6)] = 1.5
    prefill_replicas: Replicas | None = None
    decode_replicas: Replicas | None = None
    decode_router: str = "least-outstanding-tokens"
    kv_transfer_bandwidth: Annotated[float, Field(gt=0, le=1e9)] = 50.0
    kv_transfer_latency: Annotated[float, Field(ge=0, le=1e6)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        for field in ("router", "decode_router"):
            if getattr(self, field) not in ROUTERS:
                raise SettingError(field, getattr(self, field), f"one of {', '.join(ROUTERS)}")
        pair = {"prefill_replicas": self.prefill_replicas, "decode_replicas": self.decode_replicas}
        for field, other in (tuple(pair), tuple(reversed(pair))):
            if pair[field] is None and pair[other] is not None:
                raise SettingError(field, None, f"goes with {other} = {pair[other]}; give both or neither")
        if self.disaggregated and self.num_replicas != 1:
            remedy = "cannot be combined with prefill_replicas and decode_replicas; leave it out"
            raise SettingError("num_replicas", self.num_replicas, remedy)
        for field in ("decode_router", "kv_transfer_bandwidth", "kv_transfer_latency"):
            if not self.disaggregated and getattr(self, field) != getattr(Cluster, field):
                remedy = "applies only to prefill_replicas and decode_replicas; give both, or leave it out"
                raise SettingError(field, getattr(self, field), remedy)
        if self.decode_router == "prefix-affine":
            raise SettingError("decode_router", self.decode_router, "nothing is cached where requests only decode")
        return self

    @property
    def disaggregated(self) -> bool:
        """Whether requests are prefilled on one replica and decoded on another."""
        return self.prefill_replicas is not None

    @property
    def size(self) -> int:
        """Total number of replicas."""
        return self.num_arriving + (self.decode_replicas or 0)

    @property
    def num_arriving(self) -> int:
        """Number of replicas that requests arrive at: those that prefill."""
        return self.prefill_replicas or self.num_replicas

    def decode_settings(self, settings: Settings) -> Settings:
        """Settings of the replicas that only decode, where those of the others are ``settings``."""
        return settings

    def as_dict(self) -> dict[str, Any]:
        """Every setting, for ``run.json``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Pair(Cluster):
    """Replicas that prefill beside others that decode, on a card and with ranks of their own.

    Attributes:
        decode: Settings of the replicas that only decode, of the same policy, model and KV-cache format; the prefix cache is not read.
    """

    decode: Settings = Settings()

    def decode_settings(self, settings: Settings) -> Settings:
        """See ``Cluster``.

        Raises:
            SettingError: The KV cache of a prompt is another on the two sides, or engines share experts.
        """
        for name in ("policy", "model", "kv_cache_dtype"):
            of_prefill, own = (each.as_dict().get(name) for each in (settings, self.decode))
            if own != of_prefill:
                raise SettingError(
                    name, own, f"is {of_prefill} where prompts are computed; the KV cache must be the same"
                )
        for each in (settings, self.decode):
            if each.data_parallel_size > 1:
                remedy = "cannot be combined with settings of their own for prefill and decode; leave it out"
                raise SettingError("data_parallel_size", each.data_parallel_size, remedy)
        return self.decode

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"decode": self.decode.as_dict()}


def cluster(**fields: Any) -> Cluster:
    """A cluster from plain values.

    Raises:
        SettingError: A field is unknown or its value cannot be; the text names it.
    """
    try:
        return Cluster(**fields)
    except ValidationError as error:
        raise setting_error(error) from None
