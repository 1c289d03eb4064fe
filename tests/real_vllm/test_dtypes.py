"""The dtype of a model on a card, and the dtypes that a method of quantisation takes, by vLLM's own code."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.config import model as theirs
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim

from fragmeter.experiments.vllm_serve import formats
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.kv_layers import AttentionLayer

_SUPPORTED = {
    "t4": [torch.float16, torch.float32],
    "rtx-4090": [torch.bfloat16, torch.float16, torch.float32],
}
_MODELS = ["qwen2.5-1.5b", "gemma-3-1b", "google/gemma-2-2b", "gemma-3-12b"]


class _Platform(SimpleNamespace):
    """What the resolution asks of a platform."""

    def is_cpu(self) -> bool:
        return False

    def get_device_name(self) -> str:
        return "a card"

    def get_device_capability(self) -> None:
        return None


@pytest.mark.parametrize("card", [*_SUPPORTED])
@pytest.mark.parametrize("given", ["auto", "half", "float16", "bfloat16", "float", "float32"])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bytes_of_an_element_are_those_of_vllms_dtype(card, given, own, monkeypatch):
    monkeypatch.setattr(theirs, "current_platform", _Platform(supported_dtypes=_SUPPORTED[card]))
    monkeypatch.setattr(
        theirs.ModelArchConfigConvertorBase, "get_torch_dtype", classmethod(lambda cls, *args, **more: own)
    )
    for name in _MODELS:
        launch = started(parse_serve(f"vllm serve {name} --max-model-len 1024 --dtype {given}"), card).launch
        config = SimpleNamespace(model_type=launch.model.model_type)
        try:
            dtype = theirs._get_and_verify_dtype("", config, given, is_pooling_model=False)
        except ValueError as error:
            assert formats.refused_format(launch) == str(error)
            continue
        assert launch.element_bytes == dtype.itemsize
        # The worker refuses bfloat16 later (``check_if_supports_dtype``).
        is_refused = dtype == torch.bfloat16 and card == "t4"
        assert (formats.refused_format(launch) is not None) == is_refused


@pytest.mark.parametrize(("heads", "head_size"), [(8, 128), (1, 256), (4, 64)])
def test_a_page_in_nvfp4_has_the_bytes_of_vllm(heads, head_size):
    layer = AttentionLayer(num_kv_heads=heads, head_size=head_size, dtype="nvfp4")
    assert layer.page_bytes(16) == 16 * heads * 2 * nvfp4_kv_cache_full_dim(head_size)


def _methods() -> dict[str, list[str]]:
    """The dtypes of each method, read from the source: its packages are not all installed."""
    found = {}
    for path in (Path(vllm.__file__).parent / "model_executor/layers/quantization").rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ClassDef):
                returned = {
                    part.name: ast.unparse(last.value)
                    for part in each.body
                    if isinstance(part, ast.FunctionDef)
                    and isinstance(last := part.body[-1], ast.Return)
                    and last.value
                }
                if {"get_name", "get_supported_act_dtypes"} <= returned.keys():
                    dtypes = returned["get_supported_act_dtypes"].replace("torch.half", "torch.float16")
                    found[returned["get_name"].strip("'")] = dtypes.strip("[]").split(", ")
    return found


def test_methods_take_the_dtypes_that_their_source_says():
    methods = _methods()
    names = {"awq": "auto_awq", "awq_marlin": "auto_awq", "gptq": "auto_gptq", "gptq_marlin": "auto_gptq"}
    compared = [name for name in formats._ACTIVATIONS if names.get(name, name) in methods]
    assert {"awq", "gptq", "fp8", "modelopt_fp4", "mxfp4"} <= {*compared}
    for name in compared:
        assert [*formats._ACTIVATIONS[name]] == methods[names.get(name, name)]
