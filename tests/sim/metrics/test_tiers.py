"""Tiers behind the host: what a configuration asks for, what a store keeps, and what replicas share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core_loads import turns
from engine_runs import LONG_MODEL
from family_runs import CopyCost
from fragmeter.sim.cluster.run import simulate_cluster
from fragmeter.sim.cluster.summary import cluster_summary
from fragmeter.sim.config.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.prefix.tiers import Store
from fragmeter.sim.metrics.cache_bounds import cache_summary
from fragmeter.sim.metrics.kv_offloading import kv_offloading
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.spec.tiers import OffloadSpec, TierSpec, parse_offloading
from fragmeter.sim.types.errors import SettingError

_FAST = {"read_gb_s": 1e7, "write_gb_s": 1e7, "latency_us": 0}


def config(*tiers: dict[str, Any], **extra: Any) -> str:
    spec = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [*tiers]} if tiers else {}
    return json.dumps({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": spec | extra})


def of_lmcache(extra: dict[str, Any]) -> str:
    return json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra})


def chosen(**more: Any) -> Any:
    return settings(
        policy="vllm-v1", model=LONG_MODEL, block_size=4, max_model_len=96, outside_ms=0, max_num_seqs=4,
        num_gpu_blocks_override=20, **{"kv_offloading_size": 0.05} | more,
    )  # fmt: skip


def test_a_configuration_is_read_as_the_servers_read_it():
    assert parse_offloading(None, 0.0, "native") is None
    assert parse_offloading(None, 2.0, "native") == OffloadSpec(2 * GIB)
    assert parse_offloading(config(cpu_bytes_to_use=10), 0.0, "native") == OffloadSpec(10)
    # As in vLLM the size of the flag comes first.
    assert parse_offloading(config(cpu_bytes_to_use=10, block_size=64), 1.0, "native") == OffloadSpec(
        GIB, chunk_tokens=64
    )
    tier = TierSpec("fs", GIB, 10**9, 4 * 10**9, 0, shared=True)
    given = {"type": "fs", "root_dir": "/kv", "locality": "REMOTE", "size_gib": 1, "read_gb_s": 1, "latency_us": 0}
    found = parse_offloading(config(given), 1.0, "native")
    assert found is not None and found.tiers == (tier,)
    assert tier.ticks(10**9, False) == 10**12 and tier.ticks(10**9, True) == 10**12 // 4
    lmcache = {"lmcache.local_disk": "/kv", "lmcache.max_local_disk_size": 2}
    found = parse_offloading(of_lmcache(lmcache), 0.0, "native")
    assert found is not None and (found.host_bytes, found.of_each_rank, found.chunk_tokens) == (5 * GIB, True, 256)
    assert [(each.type, each.size_bytes) for each in found.tiers] == [("fs", 2 * GIB)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"kv_transfer_config = '\[\]': must be an object, as [^\n]+"),
        (
            '{"kv_connector": "NixlConnector"}',
            "kv_transfer_config.kv_connector = 'NixlConnector': is not simulated; give --kv-offloading-size, or take [^\n]+",
        ),
        (
            config({"type": "p2p"}, cpu_bytes_to_use=1),
            r"kv_transfer_config.secondary_tiers.type = 'p2p': is not simulated; take fs, [^\n]+",
        ),
        (
            config({"type": "fs", "backpressure": {}}, cpu_bytes_to_use=1),
            r"[^\n]+backpressure = {}: is not simulated; leave it out",
        ),
        (
            config({"type": "fs", "read_gb_s": 0}, cpu_bytes_to_use=1),
            r"[^\n]+read_gb_s = 0: must be a number from [^\n]+",
        ),
        (
            config(eviction_policy="arc", cpu_bytes_to_use=1),
            r"[^\n]+eviction_policy = 'arc': is not simulated; leave it out",
        ),
        (of_lmcache({"lmcache.local_disk": "/kv"}), r"[^\n]+config.lmcache.max_local_disk_size = 0.0: must be [^\n]+"),
        (of_lmcache({"lmcache.chunk_size": "x"}), r"[^\n]+config.lmcache.chunk_size = 'x': must be [^\n]+"),
        (config(), r"[^\n]+cpu_bytes_to_use = None: must be a whole number from 1 on"),
        (config(block_size=6, cpu_bytes_to_use=GIB), r"[^\n]+block_size = 6: must be whole blocks of 4 tokens"),
    ],
)
def test_what_is_no_configuration_or_not_simulated_is_refused(text: str, message: str):
    with pytest.raises(SettingError, match=f"^{message}$"):
        simulate(chosen(kv_transfer_config=text, kv_offloading_size=0), turns(0))


def test_a_backend_without_a_size_is_refused():
    """vLLM reads the backend beside the size only: such a server offloads nothing."""
    with pytest.raises(SettingError, match="^kv_offloading_backend = 'lmcache': [^\n]+; give that$"):
        simulate(chosen(kv_offloading_backend="lmcache", kv_offloading_size=0), turns(0))


@pytest.mark.slow
def test_replicas_find_what_others_wrote_to_a_tier_that_they_share():
    found = {}
    for shared in (False, True):
        tier = {"type": "fs", "shared": shared, **_FAST}
        run = simulate_cluster(
            chosen(kv_transfer_config=config(tier)), turns(1), Cluster(num_replicas=2, router="round-robin"), CopyCost()
        )
        found[shared] = cluster_summary(run)["kv_offloading"]["tiers"]["1:fs"]
        stores = {id(part.replica.memory.transfers.behind[0].store) for part in run.runs}
        assert len(stores) == 2 - shared
        own = [kv_offloading(part)["tiers"]["1:fs"]["hit_tokens"] for part in run.runs]
        assert found[shared]["hit_tokens"] == sum(own)
        together = cluster_summary(run, divided=True)
        assert found[shared]["hit_rate"] == sum(own) / together["kv_offloading"]["queried_tokens"]
        # The replicas' hosts are equally large, and each is divided; a tier that is shared is left out.
        worth, parts = together["cache_worth"], [cache_summary(part) for part in run.runs]
        for name, share in worth["host"]["slot_seconds"].items():
            assert share == pytest.approx(sum(part["host"]["slot_seconds"][name] for part in parts))
        assert 0 < sum(worth["host"]["pool_pct"].values()) <= 100
        assert [*worth["tiers"]] == ([] if shared else ["1:fs"])
    # Turns of a session alternate between the replicas.
    assert found[True]["hit_tokens"] > found[False]["hit_tokens"] > 0
    assert found[True]["stored_blocks"] < found[False]["stored_blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_leaps_change_nothing_beside_tiers(blocks: int):
    text = config({"type": "example", "size_gib": 0.08, **_FAST}, {"type": "fs", **_FAST}, blocks_per_chunk=blocks)
    for seed in range(3):
        fast, slow = (
            simulate(chosen(kv_transfer_config=text, kv_offloading_size=0.1, leap=leap), turns(seed), CopyCost())
            for leap in (True, False)
        )
        assert kv_offloading(fast) == kv_offloading(slow)
        assert fast.log.end_ticks == slow.log.end_ticks


class StoreMachine(RuleBasedStateMachine):
    """A store beside a list in the order of eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.now = Store(5, 1), 0
        # Name, when it is written, and readers; the next to be evicted first.
        self.kept: list[list[int]] = []

    def _use(self, name: int) -> list[int]:
        entry = next(each for each in self.kept if each[0] == name)
        self.kept.remove(entry)
        self.kept.append(entry)
        return entry

    @rule(names=st.lists(st.integers(1, 9), unique=True, max_size=4), ticks=st.integers(0, 3))
    def write(self, names: list[int], ticks: int) -> None:
        missing = self.store.place(names, self.now)
        expected = [name for name in names if all(name != each[0] for each in self.kept)]
        for name in names:
            if name not in expected:
                self._use(name)
        for entry in [each for each in self.kept if each[1] <= self.now and not each[2]]:
            if len(self.kept) + len(expected) > 5:
                self.kept.remove(entry)
        expected = expected[: 5 - len(self.kept)]
        assert missing == expected
        self.store.write(missing, self.now, self.now + ticks)
        self.kept += [[name, self.now + ticks, 0] for name in expected]

    @rule(place=st.integers(0, 4))
    def begin_read(self, place: int) -> None:
        ready = [each[0] for each in self.kept if each[1] <= self.now]
        if ready:
            name = ready[place % len(ready)]
            self.store.begin_read([name], self.now)
            self._use(name)[2] += 1

    @rule(place=st.integers(0, 4))
    def end_read(self, place: int) -> None:
        read = [each for each in self.kept if each[2]]
        if read:
            self.store.end_read([read[place % len(read)][0]])
            read[place % len(read)][2] -= 1

    @rule(ticks=st.integers(1, 4))
    def wait(self, ticks: int) -> None:
        self.now += ticks

    @invariant()
    def same(self) -> None:
        assert self.store.used_blocks == len(self.kept) <= 5
        for name in range(1, 10):
            assert self.store.has(name, self.now) == any(each[0] == name and each[1] <= self.now for each in self.kept)


TestStore = pytest.mark.slow(StoreMachine.TestCase)
TestStore.settings = hypothesis_settings(max_examples=25, stateful_step_count=30, deadline=None)
