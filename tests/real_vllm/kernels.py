"""The kernels of linear layers and experts that a release of vLLM chooses, by running its own modules as on a GPU.

The release's package is imported beside the newest wheel's dependencies. Its platform says that it is CUDA of a given compute capability. Of
what is not here, the compiled functions say what their C++ says for CUDA 13 (``csrc/.../scaled_mm_entry.cu``), and the packages that the wheel
requires on a GPU (FlashInfer, Humming; DeepGEMM is in it since 0.20) say that they are installed.

    python -m real_vllm.kernels FOLDER > CHOICES       one release, of which FOLDER/vllm is the package
    python -m real_vllm.kernels --merge 0.33=CHOICES 0.32=CHOICES ... > tests/data/kernel_choices.json

With ``--asked`` before these the choices are those of experts where the user names kernels (``tests/data/kernels_asked.json``, without cases in
which no release heeds that).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import _lru_cache_wrapper
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

#: The choices where a user asks for nothing.
CHOICES = Path(__file__).parents[1] / "data" / "kernel_choices.json"
#: Compute capabilities of the presets.
CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 120, 121)
#: Number formats of linear layers; fp8 with a scale a row and column (compressed-tensors), a tensor (ModelOpt), or a block, or of 16-bit weights that
#: vLLM converts.
LINEAR = ("fp8", "fp8-tensor", "fp8-block", "fp8-online", "int8", "awq", "w4a16", "w4a16-g32", "nvfp4", "mxfp8")
#: Inputs and outputs of a rank.
SHAPES = ((4096, 4096), (3584, 2368), (2368, 3584), (4096, 2400))
EXPERTS = (
    "16",
    "fp8",
    "fp8-tensor",
    "fp8-block",
    "fp8-online",
    "int8",
    "awq",
    "w4a16",
    "w4a16-g32",
    "mxfp4",
    "nvfp4",
    "mxfp8",
)
#: How ranks divide experts: by slices; whole ones; whole ones over engines, with vLLM's default exchange of tokens.
DIVISIONS = ("tp", "ep", "dp-ep")
#: What a user asks for: ``--moe-backend`` or environment variables.
_FLASHINFER_BY = ("VLLM_USE_FLASHINFER_MOE_FP16", "VLLM_USE_FLASHINFER_MOE_FP8", "VLLM_USE_FLASHINFER_MOE_FP4")
ASKED = (
    *(
        f"moe-backend={name}"
        for name in (
            "triton", "deep_gemm", "cutlass", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "marlin",
            "humming", "triton_unfused", "flashinfer_trtllm_afp8", "flashinfer_cutlass_afp8",
        )
    ),
    *(f"{name}={value}" for name in _FLASHINFER_BY for value in (0, 1)),
    *(f"{name}=1 VLLM_FLASHINFER_MOE_BACKEND={value}" for name in _FLASHINFER_BY for value in ("throughput", "latency")),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=0", "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=1",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1", "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS=1",
    "VLLM_MXFP4_USE_MARLIN=0", "VLLM_MXFP4_USE_MARLIN=1", "VLLM_USE_DEEP_GEMM=0", "VLLM_USE_DEEP_GEMM=1",
    "VLLM_MOE_USE_DEEP_GEMM=0", "VLLM_TEST_FORCE_FP8_MARLIN=1",
)  # fmt: skip
#: Packages that the wheel has or requires on a GPU, or that older ones import and the newest does not.
_ABSENT = frozenset(("flashinfer", "humming", "deep_gemm", "gguf", "triton_kernels", "tilelang", "quack", "compressed_tensors"))  # fmt: skip
_INSTALLED = frozenset(("deep_gemm", "humming", "triton_kernels", "tilelang", "cutedsl"))
_COMPILED = tuple(
    f"vllm.{name}" for name in ("_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn")
)


class Case(NamedTuple):
    """What the choice depends on.

    Attributes:
        capability: 90 for 9.0.
        form: One of ``LINEAR`` or ``EXPERTS``.
        inputs, outputs: Of a linear layer.
        division: One of ``DIVISIONS``, of experts.
        asked: One of ``ASKED``, of experts.
    """

    capability: int
    form: str
    inputs: int = 0
    outputs: int = 0
    division: str = ""
    asked: str = ""

    @property
    def key(self) -> str:
        """For JSON."""
        size = f"{self.inputs}x{self.outputs}" if self.inputs else self.division
        return " ".join(filter(None, [str(self.capability), self.form, size, self.asked]))


def cases(asked: bool = False) -> Iterator[Case]:
    """All, or those in which the user asks for kernels."""
    if asked:
        for parts in product(CAPABILITIES, EXPERTS, DIVISIONS, ASKED):
            yield Case(*parts[:2], division=parts[2], asked=parts[3])
        return
    for capability in CAPABILITIES:
        for form, (inputs, outputs) in product(LINEAR, SHAPES):
            # Groups of 128 inputs do not end within a rank (``startup.shards``).
            if inputs % 128 == 0 or form not in ("awq", "w4a16", "fp8-block"):
                yield Case(capability, form, inputs, outputs)
        for form, division in product(EXPERTS, DIVISIONS):
            yield Case(capability, form, division=division)


class _Kind(type):
    """A class with every attribute."""

    def __getattr__(cls, name: str) -> SimpleNamespace:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(value=name)


class _Any(ModuleType):
    """A module with every name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = _Kind(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        absent = name.partition(".")[0] in _ABSENT or ".".join(name.split(".")[:2]) in _COMPILED
        return ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Any(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Release:
    """The release that ``import vllm`` finds, in a process of its own."""

    def __init__(self) -> None:
        os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
        sys.meta_path.insert(0, _Finder())
        self._capability = CAPABILITIES[0]
        platforms, cuda = (importlib.import_module(f"vllm.{name}") for name in ("platforms", "platforms.cuda"))
        version = importlib.import_module("vllm.platforms.interface").DeviceCapability
        own = self

        class Cuda(cuda.NonNvmlCudaPlatform):  # type: ignore[misc]
            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                return version(*divmod(own._capability, 10))

            @classmethod
            def get_device_name(cls, device_id: int = 0) -> str:
                return "GPU"

            @classmethod
            def get_device_total_memory(cls, device_id: int = 0) -> int:
                return 80 << 30

        platforms._current_platform = Cuda()
        self._install()
        self._linear = importlib.import_module("vllm.model_executor.kernels.linear")
        self._keys = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
        self._config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        self._served = importlib.import_module("vllm.config.vllm")

    def _install(self) -> None:
        """Everything that a GPU server has is there."""
        flashinfer = importlib.import_module("vllm.utils.flashinfer")
        imports = importlib.import_module("vllm.utils.import_utils")
        for name in ("has_flashinfer", "has_flashinfer_cubin", "has_nvidia_artifactory"):
            setattr(flashinfer, name, lambda: True)
        for name in [each for each in vars(imports) if each.startswith("has_")]:
            installed = name.removeprefix("has_") in _INSTALLED
            setattr(imports, name, lambda *_, found=installed: found)
        operations = importlib.import_module("vllm._custom_ops")
        operations.cutlass_scaled_mm_supports_fp8 = lambda capability: capability >= 89
        operations.cutlass_scaled_mm_supports_block_fp8 = lambda capability: capability >= 90
        operations.cutlass_scaled_mm_supports_fp4 = lambda capability: 100 <= capability < 130
        operations.cutlass_group_gemm_supported = lambda capability: 90 <= capability < 110

    def choose(self, case: Case) -> str:
        """vLLM's class of a linear layer, or its name of the backend of experts; what it raised where it finds none."""
        if case.capability != self._capability:
            self._capability = case.capability
            self._forget()
        variables = dict(each.split("=") for each in case.asked.split() if each.startswith("VLLM"))
        with patch.object(self._served, "_current_vllm_config", _SERVED), patch.dict(os.environ, variables):
            try:
                return _short(self._experts_of(case) if case.division else self._linear_of(case))
            except (ValueError, NotImplementedError, KeyError):
                return ""

    def _forget(self) -> None:
        """What was found out of the last card."""
        for each in gc.get_objects():
            if isinstance(each, _lru_cache_wrapper):
                each.cache_clear()
        for module in [each for name, each in sys.modules.items() if name.startswith("vllm.")]:
            for name, function in (
                ("CUTLASS_FP8_SUPPORTED", "cutlass_fp8_supported"),
                ("CUTLASS_BLOCK_FP8_SUPPORTED", "cutlass_block_fp8_supported"),
            ):
                if name in vars(module):
                    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.w8a8_utils")
                    setattr(module, name, getattr(utils, function)())

    def _linear_of(self, case: Case) -> str:
        import torch
        from vllm.scalar_type import scalar_types

        linear, form = self._linear, case.form
        if form == "nvfp4":
            chosen = getattr(linear, "init_nvfp4_linear_kernel", None)
            if chosen is None:
                utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.nvfp4_utils")
                return str(utils.select_nvfp4_linear_backend().value)
            return type(chosen()).__name__
        if form == "mxfp8":
            return type(_call(linear.init_mxfp8_linear_kernel, weight_shape=(case.outputs, case.inputs))).__name__
        if form == "int8":
            found = linear.Int8ScaledMMLinearLayerConfig
            given = {"is_channelwise": True, "is_static_input_scheme": False, "input_symmetric": True}
            possible, quantization = linear._POSSIBLE_INT8_KERNELS, "int8_w8a8"
        elif form.startswith("fp8"):
            found = linear.FP8ScaledMMLinearLayerConfig
            weights, activations = self._fp8_keys(form)
            given = {
                "weight_quant_key": weights, "activation_quant_key": activations, "input_dtype": torch.bfloat16,
                "out_dtype": torch.bfloat16, "weight_shape": (case.outputs, case.inputs),
            }  # fmt: skip
            # Below that capability ``CompressedTensorsConfig`` takes its scheme W8A16.
            unpacked = form == "fp8" and case.capability < 89
            name = "FP8_BLOCK" if form == "fp8-block" else "WFP8A16" if unpacked else "FP8"
            possible, quantization = getattr(linear, f"_POSSIBLE_{name}_KERNELS"), name.lower()
        else:
            shape = (case.inputs, case.outputs)
            config = _made(
                linear.MPLinearLayerConfig,
                full_weight_shape=shape, partition_weight_shape=shape, act_type=torch.bfloat16,
                weight_type=scalar_types.uint4 if form == "awq" else scalar_types.uint4b8,
                group_size=32 if form.endswith("g32") else 128, zero_points=form == "awq", has_g_idx=False,
            )  # fmt: skip
            return str(linear.choose_mp_linear_kernel(config).__name__)
        chosen = _call(
            linear.choose_scaled_mm_linear_kernel,
            config=_made(found, **given),
            possible_kernels=possible,
            quantization=quantization,
        )
        return str(chosen.__name__)

    def _fp8_keys(self, form: str, of_experts: bool = False) -> tuple[Any, Any]:
        keys = self._keys
        return {
            "fp8": (getattr(keys, "kFp8StaticChannelSym", None) or keys.kFp8StaticTokenSym, keys.kFp8DynamicTokenSym),
            "fp8-online": (
                keys.kFp8StaticTensorSym,
                keys.kFp8DynamicTensorSym if of_experts else keys.kFp8DynamicTokenSym,
            ),
            "fp8-tensor": (keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym),
            "fp8-block": (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym),
        }[form]

    def _experts_of(self, case: Case) -> str:
        form, keys, config = case.form, self._keys, self._moe_config(case)
        layers = "vllm.model_executor.layers.fused_moe.oracle"
        name = {"16": "unquantized", "awq": "int_wna16", "w4a16": "int_wna16", "w4a16-g32": "int_wna16"}.get(form, form)
        module = importlib.import_module(f"{layers}.{name.partition('-')[0]}")
        if form == "16":
            found = module.select_unquantized_moe_backend(config)
        elif form.startswith("fp8"):
            found = module.select_fp8_moe_backend(
                config, *self._fp8_keys(form, of_experts=True), allow_vllm_cutlass=form == "fp8"
            )
        elif form == "nvfp4":
            found = module.select_nvfp4_moe_backend(config, keys.kNvfp4Static, keys.kNvfp4Dynamic)
        elif form == "mxfp4":
            found = getattr(module, "select_gpt_oss_mxfp4_moe_backend", module.select_mxfp4_moe_backend)(config)
        elif name == "int_wna16":
            found = self._int4_experts(module, config, form)
        else:
            found = getattr(module, f"select_{form}_moe_backend")(config)
        return str(found[0].value)

    def _int4_experts(self, module: Any, config: Any, form: str) -> Any:
        keys, group = self._keys, 32 if form.endswith("g32") else 128
        key = getattr(keys, "kInt4Static32" if group == 32 else "kInt4Static", None) or keys.kInt4Static
        names = ("AutoAWQConfig", "auto_awq") if form == "awq" else ("AutoGPTQConfig", "auto_gptq")
        try:
            owner = importlib.import_module(f"vllm.model_executor.layers.quantization.{names[1]}")
            quant = getattr(owner, names[0]).__new__(getattr(owner, names[0]))
            vars(quant).update(group_size=group, desc_act=False, weight_bits=4, pack_factor=8, zero_point=form == "awq")
        except ImportError:
            quant = None
        given = {
            "config": config, "weight_key": key, "weight_bits": 4, "quant_config": quant, "may_have_zp": form == "awq",
            "may_have_bias": False, "allow_tile_padding": True, "has_zp": form == "awq",
        }  # fmt: skip
        return _call(module.select_wna16_moe_backend, **given)

    def _moe_config(self, case: Case) -> Any:
        import torch

        own, gpt_oss = self._config, case.form == "mxfp4"
        engines = 8 if case.division.startswith("dp") else 1
        ranks = 1 if case.division == "tp" else 8
        parallel = _made(
            own.FusedMoEParallelConfig,
            tp_size=1, pcp_size=1, dp_size=engines, ep_size=ranks, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
            use_ep=ranks > 1, all2all_backend="allgather_reducescatter", enable_eplb=False,
        )  # fmt: skip
        activation = importlib.import_module("vllm.model_executor.layers.fused_moe.activation").MoEActivation
        experts = 128 if gpt_oss else 256
        return _made(
            own.FusedMoEConfig,
            num_experts=experts, experts_per_token=4 if gpt_oss else 8, hidden_dim=2880 if gpt_oss else 4096,
            intermediate_size=2880 if gpt_oss else 2048, intermediate_size_per_partition=2880 if gpt_oss else 2048,
            num_local_experts=experts // ranks, num_logical_experts=experts, device="cuda",
            activation=activation.SWIGLUOAI if gpt_oss else activation.SILU,
            routing_method=own.RoutingMethodType.Renormalize,
            moe_parallel_config=parallel, in_dtype=torch.bfloat16, has_bias=gpt_oss,
            router_logits_dtype=torch.bfloat16,
            moe_backend=case.asked.removeprefix("moe-backend=") if case.asked.startswith("moe") else "auto",
        )  # fmt: skip


_SERVED = SimpleNamespace(
    model_config=SimpleNamespace(
        hf_config=SimpleNamespace(model_type="llama"),
        hf_text_config=SimpleNamespace(model_type="llama"),
        quantization_config=None,
        enforce_eager=False,
    ),
    kernel_config=SimpleNamespace(linear_backend="auto", moe_backend="auto", linear_backend_per_quant=None),
    parallel_config=SimpleNamespace(all2all_backend="allgather_reducescatter"),
    compilation_config=SimpleNamespace(mode=3),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    lora_config=None,
)


#: Beginnings of vLLM's classes, the longest first, and names as of its backends of experts.
_NAMES = {
    "FlashInferFp8DeepGEMM": "FLASHINFER_DEEPGEMM", "FlashInferCutlass": "FLASHINFER_CUTLASS", "FlashInferCuteDsl": "FLASHINFER_CUTEDSL",
    "FlashInferCutedsl": "FLASHINFER_CUTEDSL", "FlashInferFP8": "FLASHINFER", "DeepGemm": "DEEPGEMM", "Cutlass": "CUTLASS",
    "Marlin": "MARLIN", "Machete": "MACHETE", "Humming": "HUMMING", "Triton": "TRITON",
}  # fmt: skip


def _short(name: str) -> str:
    if "Kernel" not in name:
        return name.upper().replace(" ", "_")
    return next((short for start, short in _NAMES.items() if name.startswith(start)), name)


def _call(function: Callable[..., Any], **given: Any) -> Any:
    code = function.__code__
    return function(
        **{name: given[name] for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name in given}
    )


def _made(kind: Any, **given: Any) -> Any:
    """A data class from those values that it has."""
    names = {each.name: each for each in fields(kind) if each.init}
    lacking = [
        name for name, each in names.items() if name not in given and each.default is each.default_factory is MISSING
    ]
    assert not lacking, lacking
    return kind(**{name: value for name, value in given.items() if name in names})


def main() -> None:
    """Write the choices of a release, or merge those of several: by case, the releases at which the choice changes."""
    words = sys.argv[1:]
    asked = words[0] == "--asked"
    words = words[asked:]
    if words[0] != "--merge":
        sys.path.insert(0, words[0])
        release = Release()
        json.dump({case.key: release.choose(case) for case in cases(asked)}, sys.stdout, indent=0)
        return
    given = dict(each.split("=") for each in words[1:])
    releases = sorted(
        (int(name.split(".")[1]), json.loads(Path(path).read_text("utf-8"))) for name, path in given.items()
    )
    default = json.loads(CHOICES.read_text("utf-8")) if asked else None
    found: dict[str, dict[str, str]] = {}
    for case in cases(asked):
        plain = " ".join(case.key.split()[:3])
        if default and all(choices[case.key] == stored(default, plain, minor) for minor, choices in releases):
            continue
        last: str | None = None
        for minor, choices in releases:
            if choices[case.key] != last:
                last = found.setdefault(case.key, {})[str(minor)] = choices[case.key]
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(by_release)}" for key, by_release in found.items())
    sys.stdout.write(f'{{"releases": {[minor for minor, _ in releases]}, "choices": {{\n{lines}\n}}}}\n')


def stored(facts: dict[str, Any], key: str, minor: int) -> str:
    """The choice of a release in a file of choices."""
    changes = [chosen for since, chosen in facts["choices"][key].items() if int(since) <= minor]
    return str(changes[-1])


if __name__ == "__main__":
    main()
