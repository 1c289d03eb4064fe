"""Tiers of a prefix cache behind the GPU, as vLLM's ``--kv-transfer-config`` names them: host memory, and tiers behind it.

    GPU  <->  host  <->  fs, obj, ...

Each tier has a capacity, a bandwidth each way and a latency; all of a replica move chunks of the same size. A preset gives what the
configuration does not. Source of the keys: vLLM 0.33, vllm/v1/kv_offload/tiering/spec.py and cpu/spec.py, and LMCache 0.5,
lmcache/v1/config.py, whose settings stand behind ``lmcache.``. vLLM has no capacity, bandwidth and latency of a tier: ``OWN_KEYS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..types.errors import NotSimulated, SettingError
from ..types.ticks import PER_SECOND, PER_US
from ..types.user_files import json_value
from .gpu import GIB

_FIELD = "kv_transfer_config"
#: Keys of a tier that no server reads: GiB of a replica, or of the store where it is shared; GB/s of each replica; microseconds of a
#: copy and of a look-up; whether replicas share it; and when blocks are written, as SGLang's HiCache calls it: ``write_through`` when
#: they are on the host, ``write_back`` when the host evicts them.
OWN_KEYS = ("size_gib", "read_gb_s", "write_gb_s", "latency_us", "shared", "write_policy")
#: Connectors with chunks of LMCache.
_LMCACHE = ("LMCacheConnectorV1", "LMCacheMPConnector")
_CONNECTORS = ("OffloadingConnector", *_LMCACHE)
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
#: Keys of a server that change no block.
_UNREAD = ("kv_role", "engine_id", "kv_buffer_device", "kv_load_failure_policy", "kv_rank", "kv_parallel_size")
#: Keys of vLLM's tiers that change no block: where they are, and their threads.
_PLACES = (
    "type", "root_dir", "n_read_threads", "n_write_threads", "enable_kv_events", "locality", "custom_param", "bucket", "store_config",
    "endpoint_override", "access_key", "secret_key", "session_token", "region", "scheme", "ca_bundle", "prefix",
)  # fmt: skip
#: Values of keys of the host tier that ask for what is simulated.
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "eviction_policy": ("lru",),
    "store_threshold": (0, 1),
    "offload_prompt_only": (True,),
    "sync_load_budget_bytes": (0,),
    "lmcache.local_cpu": (True,),
    "lmcache.save_decode_cache": (False,),
    "lmcache.enable_blending": (False,),
    "lmcache.cache_policy": ("LRU",),
}


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier behind the host.

    Attributes:
        type: vLLM's name of the kind.
        size_bytes: Its capacity; None is without end, as vLLM's are.
        read_bytes_per_s, write_bytes_per_s: Of each replica, one copy after the other.
        latency_ticks: Of a copy before its first byte, and of a look-up.
        shared: Whether all replicas have it together.
        writes_back: Whether blocks are written when the host evicts them, not when they are stored there.
        answers_later: Whether a look-up is answered after the decision that asks, as those of files and objects are.
    """

    type: str
    size_bytes: int | None
    read_bytes_per_s: int
    write_bytes_per_s: int
    latency_ticks: int
    shared: bool = False
    writes_back: bool = False
    answers_later: bool = True

    def ticks(self, size_bytes: int, writes: bool) -> int:
        """Time of a copy."""
        rate = self.write_bytes_per_s if writes else self.read_bytes_per_s
        return self.latency_ticks + -(-size_bytes * PER_SECOND // rate)


_GB = 10**9
#: Tiers by vLLM's type. ``fs`` is an NVMe drive of PCIe 4.0 and ``obj`` an object store behind 100 Gbit/s, both assumed. ``mooncake`` is
#: a pool of host memory of all nodes (measured by Mooncake: 87 GB/s over four links of 200 Gbit/s; the latency is assumed). ``example`` is
#: vLLM's, whose copies take no time: here that of memory.
PRESETS = {
    "fs": TierSpec("fs", None, 6_800_000_000, 4 * _GB, 100 * PER_US),
    "obj": TierSpec("obj", None, 12_500_000_000, 12_500_000_000, 10_000 * PER_US, shared=True),
    "mooncake": TierSpec("mooncake", None, 87 * _GB, 87 * _GB, 50 * PER_US, shared=True),
    "example": TierSpec("example", None, 10**15, 10**15, 0, answers_later=False),
}


@dataclass(frozen=True, slots=True)
class OffloadSpec:
    """What is behind the GPU.

    Attributes:
        host_bytes: Of all ranks; of each where ``of_each_rank``.
        chunk_tokens: Tokens of a chunk; None is one block.
        blocks_per_chunk: The same in blocks.
        chunk_key: The key of ``kv_connector_extra_config`` that has the size of a chunk.
        tiers: Behind the host, in the order in which they are asked.
    """

    host_bytes: int
    of_each_rank: bool = False
    chunk_tokens: int | None = None
    blocks_per_chunk: int = 1
    chunk_key: str = "block_size"
    tiers: tuple[TierSpec, ...] = ()

    def chunk_blocks(self, block_size: int) -> int:
        """Blocks of a chunk.

        Raises:
            SettingError: Its tokens are no whole blocks.
        """
        if self.chunk_tokens is None:
            return self.blocks_per_chunk
        if self.chunk_tokens % block_size:
            raise SettingError(self.chunk_field, self.chunk_tokens, f"must be whole blocks of {block_size} tokens")
        return self.chunk_tokens // block_size

    @property
    def chunk_field(self) -> str:
        """What messages call the size of a chunk."""
        return f"{_FIELD}.{self.chunk_key}"

    @property
    def chunk_value(self) -> int:
        """That size as the user gave it: tokens, or blocks."""
        return self.chunk_tokens or self.blocks_per_chunk


def parse_offloading(text: str | None, size_gib: float, backend: str) -> OffloadSpec | None:
    """What vLLM's flags say of the tiers behind the GPU; None if there is none.

    Args:
        text: ``--kv-transfer-config``.
        size_gib: ``--kv-offloading-size``, which comes before the sizes of the connector's own keys.
        backend: ``--kv-offloading-backend``.

    Raises:
        SettingError: The text is no such object.
        NotSimulated: It asks for something else.
    """
    if not size_gib and backend != "native":
        raise SettingError("kv_offloading_backend", backend, "is read beside --kv-offloading-size only; give that")
    if text is None and not size_gib:
        return None
    given = {} if text is None else transfer_config(text)
    if unknown := sorted(given.keys() - {"kv_connector", "kv_connector_extra_config", *_UNREAD}):
        raise NotSimulated(f"{_FIELD}.{unknown[0]}", given[unknown[0]], "is not simulated", "leave it out")
    native = "OffloadingConnector" if backend == "native" else _LMCACHE[1]
    connector = native if size_gib else given.get("kv_connector")
    if connector not in _CONNECTORS:
        remedy = f"give --kv-offloading-size, or take {', '.join(_CONNECTORS)}; a shared store is a tier of the first"
        raise NotSimulated(f"{_FIELD}.kv_connector", connector, "is not simulated", remedy)
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise SettingError(f"{_FIELD}.kv_connector_extra_config", extra, "must be an object")
    for name, values in _DEFAULTS.items():
        if name in extra and extra[name] not in values:
            raise NotSimulated(f"{_FIELD}.{name}", extra[name], "is not simulated", "leave it out")
    own = int(size_gib * GIB)
    return _of_lmcache(extra, own) if connector in _LMCACHE else _of_vllm(extra, own)


def _of_vllm(extra: Mapping[str, Any], own_bytes: int) -> OffloadSpec:
    known = {"spec_name", "cpu_bytes_to_use", "block_size", "blocks_per_chunk", "secondary_tiers", *_DEFAULTS}
    _refuse_unknown(extra, known)
    if extra.get("spec_name", _SPECS[0]) not in _SPECS:
        raise NotSimulated(f"{_FIELD}.spec_name", extra["spec_name"], "is not simulated", f"take {' or '.join(_SPECS)}")
    tiers = extra.get("secondary_tiers", [])
    if not isinstance(tiers, list) or not all(isinstance(each, dict) for each in tiers):
        raise SettingError(f"{_FIELD}.secondary_tiers", tiers, "must be a list of objects")
    if tiers and extra.get("spec_name") != _SPECS[1]:
        raise SettingError(f"{_FIELD}.spec_name", extra.get("spec_name"), f"must be {_SPECS[1]} beside secondary_tiers")
    if {"block_size", "blocks_per_chunk"} <= extra.keys():
        raise SettingError(f"{_FIELD}.blocks_per_chunk", extra["blocks_per_chunk"], "give this or block_size")
    return OffloadSpec(
        own_bytes or _number(extra, "cpu_bytes_to_use"),
        chunk_tokens=_number(extra, "block_size") if "block_size" in extra else None,
        blocks_per_chunk=_number(extra, "blocks_per_chunk") if "blocks_per_chunk" in extra else 1,
        chunk_key="blocks_per_chunk" if "blocks_per_chunk" in extra else "block_size",
        tiers=tuple(map(_tier, tiers)),
    )


def _of_lmcache(extra: Mapping[str, Any], own_bytes: int) -> OffloadSpec:
    """LMCache with its own settings; 5 GiB of the host for each rank are its default."""
    known = ("chunk_size", "max_local_cpu_size", "local_disk", "max_local_disk_size", "remote_url")
    _refuse_unknown(extra, {f"lmcache.{name}" for name in known} | _DEFAULTS.keys())
    tiers = []
    if extra.get("lmcache.local_disk"):
        # LMCache's default is a disk of 0 GiB.
        sized = {"lmcache.max_local_disk_size": 0.0, **extra}
        tiers.append({"type": "fs", "size_gib": _size(sized, "lmcache.max_local_disk_size", 0.0)})
    if extra.get("lmcache.remote_url"):
        tiers.append({"type": "mooncake"})
    chunk = _number(extra, "lmcache.chunk_size") if "lmcache.chunk_size" in extra else 256
    size = own_bytes or int(_size(extra, "lmcache.max_local_cpu_size", 5.0) * GIB)
    return OffloadSpec(
        size, not own_bytes, chunk_tokens=chunk, chunk_key="lmcache.chunk_size", tiers=tuple(map(_tier, tiers))
    )


def _refuse_unknown(extra: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(extra.keys() - known):
        raise NotSimulated(f"{_FIELD}.{unknown[0]}", extra[unknown[0]], "is not simulated", "leave it out")


def _tier(given: Mapping[str, Any]) -> TierSpec:
    """A tier of ``secondary_tiers``."""
    preset = PRESETS.get(str(given.get("type")))
    if preset is None:
        remedy = f"take {', '.join(PRESETS)}"
        raise NotSimulated(f"{_FIELD}.secondary_tiers.type", given.get("type"), "is not simulated", remedy)
    for name in sorted(given.keys() - {*_PLACES, *OWN_KEYS}):
        raise NotSimulated(f"{_FIELD}.secondary_tiers.{name}", given[name], "is not simulated", "leave it out")
    policy = given.get("write_policy", "write_through")
    if policy not in ("write_through", "write_back"):
        raise SettingError(f"{_FIELD}.secondary_tiers.write_policy", policy, "must be write_through or write_back")
    shared = given.get("shared", preset.shared or given.get("locality") == "REMOTE")
    if not isinstance(shared, bool):
        raise SettingError(f"{_FIELD}.secondary_tiers.shared", shared, "must be true or false")
    size = _size(given, "size_gib", 0.0)
    return TierSpec(
        preset.type,
        int(size * GIB) or preset.size_bytes,
        round(_size(given, "read_gb_s", preset.read_bytes_per_s / _GB) * _GB),
        round(_size(given, "write_gb_s", preset.write_bytes_per_s / _GB) * _GB),
        round(_size(given, "latency_us", preset.latency_ticks / PER_US, least=0.0) * PER_US),
        shared,
        policy == "write_back",
        preset.answers_later,
    )


def transfer_config(text: str) -> dict[str, Any]:
    """The object of ``--kv-transfer-config``.

    Raises:
        SettingError: It is none.
    """
    try:
        given = json_value(text)
    except ValueError as error:
        raise SettingError(_FIELD, text, f"is no JSON ({error})") from None
    if not isinstance(given, dict):
        raise SettingError(_FIELD, text, 'must be an object, as {"kv_connector": "OffloadingConnector"}')
    return given


def _number(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**60 or value != int(value):
        raise SettingError(f"{_FIELD}.{name}", value, "must be a whole number from 1 on")
    return int(value)


def _size(given: Mapping[str, Any], name: str, default: float, least: float = 1e-6) -> float:
    if name not in given:
        return default
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e9:
        place = "" if name.startswith("lmcache.") else "secondary_tiers."
        raise SettingError(f"{_FIELD}.{place}{name}", value, f"must be a number from {least:g} to 1e9")
    return float(value)
