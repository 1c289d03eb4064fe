"""The lines of prefill and decode apart, beside the installed vLLM: its connector and roles."""

from __future__ import annotations

import json

import pytest
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from fragmeter.experiments.capacity.pairs import ROLES, transfer_config


@pytest.mark.parametrize("role", ROLES)
def test_vllm_takes_the_connector_and_the_role_of_each_side(role):
    config = KVTransferConfig(**json.loads(transfer_config(role)))
    assert (config.is_kv_producer, config.is_kv_consumer) == ((True, False) if role == "prefill" else (False, True))
    assert config.kv_connector in KVConnectorFactory._registry
