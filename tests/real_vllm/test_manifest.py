"""The manifest of prefill and decode apart (``plan --deploy``), beside the installed vLLM: its connector, roles and variables."""

from __future__ import annotations

import json
import os

import pytest
from vllm import envs
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from fragmeter.experiments.capacity.manifest import _HANDSHAKE, _HANDSHAKE_PORT
from fragmeter.experiments.capacity.pairs import ROLES, transfer_config


@pytest.mark.parametrize("role", ROLES)
def test_vllm_takes_the_connector_and_the_role_of_each_side(role):
    config = KVTransferConfig(**json.loads(transfer_config(role)))
    assert (config.is_kv_producer, config.is_kv_consumer) == ((True, False) if role == "prefill" else (False, True))
    assert config.kv_connector in KVConnectorFactory._registry


def test_the_variables_of_the_handshake_are_those_that_vllm_reads(monkeypatch):
    # An engine that another test started keeps the values of then.
    envs.disable_envs_cache()
    assert not {f"{_HANDSHAKE}_HOST", f"{_HANDSHAKE}_PORT"} & os.environ.keys()
    assert envs.VLLM_NIXL_SIDE_CHANNEL_PORT == _HANDSHAKE_PORT
    monkeypatch.setenv(f"{_HANDSHAKE}_PORT", "5607")
    monkeypatch.setenv(f"{_HANDSHAKE}_HOST", "10.0.0.7")
    assert (envs.VLLM_NIXL_SIDE_CHANNEL_PORT, envs.VLLM_NIXL_SIDE_CHANNEL_HOST) == (5607, "10.0.0.7")
