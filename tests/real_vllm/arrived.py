"""vLLM's engine core as a replica that decodes prompts computed elsewhere, of which a KV connector brings the blocks at admission, or as
one that prefills them.

``ArrivedKV`` answers as a connector whose KV is there, in a buffer of the host: all tokens of a prompt but the last one, once, loaded
within the step that admits the request. ``SentKV`` has nothing, and what it sends is there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from fragmeter.sim.policy.server import CONSUMER, PRODUCER
from fragmeter.sim.real_vllm import core
from tools.live.step_log import Served

from . import ours, server, speculation
from .workloads import Case


class ArrivedKV(KVConnectorBase_V1, SupportsHMA):
    """See the module; the scheduler's side alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        arrived = request.num_prompt_tokens - 1 - num_computed_tokens
        return (0 if request.request_id in self._asked else arrived), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._asked.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **given: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *given: Any, **others: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class SentKV(ArrivedKV):
    """See the module."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False


def serve(case: Case, asynchronous: bool = False) -> Served:
    """What the installed vLLM does with a case, with or without drafts."""
    with _connected(ArrivedKV, CONSUMER):
        return _serve(case, asynchronous)


def _serve(case: Case, asynchronous: bool) -> Served:
    if "speculative_config" in case.options:
        return speculation.serve(case, asynchronous)[0]
    return server.serve(case, asynchronous)


def serve_prefills(case: Case, asynchronous: bool) -> Served:
    """The same of a replica that prefills."""
    with _connected(SentKV, PRODUCER):
        return _serve(case, asynchronous)


@contextmanager
def _connected(connector: type[ArrivedKV], role: str) -> Iterator[None]:
    transfer = KVTransferConfig(
        kv_connector=connector.__name__, kv_connector_module_path=connector.__module__, kv_role=role
    )
    handshake = mock.Mock(return_value=[None])
    with (
        mock.patch.object(core, "VllmConfig", partial(VllmConfig, kv_transfer_config=transfer)),
        mock.patch.object(server.Recorder, "get_kv_connector_handshake_metadata", handshake, create=True),
    ):
        yield


def comparable(served: Served) -> Served:
    """What a connector brings counts as a hit there."""
    return served._replace(steps=[step._replace(hits=()) for step in served.steps])


def serve_ours(case: Case, asynchronous: bool = False) -> Served:
    """What our engine does with sequences that come with all but the last token of their prompts."""
    with ours.side(CONSUMER):
        return ours.serve(case, asynchronous)


def serve_our_prefills(case: Case, asynchronous: bool) -> Served:
    """What our engine does as a replica that prefills."""
    with ours.side(PRODUCER):
        return ours.serve(case, asynchronous)
