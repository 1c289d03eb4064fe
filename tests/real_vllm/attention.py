"""The attention backend that a release of vLLM chooses, by running its own functions out of their files.

vLLM's modules of backends import CUDA libraries, and older wheels do not install beside the newest. So the functions that decide are taken
out of the files and run: ``get_attn_backend_cls`` and ``check_and_update_config`` of ``platforms/cuda.py`` up to 0.11.0, and since then
``_get_backend_priorities`` with the ``supports_...`` of each backend's class, in the order of ``AttentionBackend.validate_configuration``.
What their files only import (``_SUPPLIED``) stands here, as the newest wheel has it.

    python -m real_vllm.attention 0.33=SITE/vllm 0.32=FOLDER/vllm ... > tests/data/attention_backends.json
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock


class Capability(NamedTuple):
    """vLLM's ``DeviceCapability``."""

    major: int
    minor: int

    def to_int(self) -> int:
        """90 for 9.0."""
        return self.major * 10 + self.minor


class Case(NamedTuple):
    """What the choice depends on.

    Attributes:
        capability: 90 for 9.0.
        heads: Query heads of a rank.
        kv: vLLM's ``kv_cache_dtype``.
        images: Whether image tokens attend in both directions.
    """

    capability: int
    head_dim: int
    heads: int
    kv: str
    latent: bool = False
    sparse: bool = False
    sinks: bool = False
    window: bool = False
    images: bool = False

    @property
    def key(self) -> str:
        """For JSON."""
        flags = [name for name in ("latent", "sparse", "sinks", "window", "images") if getattr(self, name)]
        return " ".join([str(self.capability), str(self.head_dim), str(self.heads), self.kv, *flags])


#: Compute capabilities of the presets.
CAPABILITIES = (70, 75, 80, 86, 89, 90, 100, 103, 120, 121)
_DECODER = "decoder"
#: Flag of code with ``**named``.
_TAKES_ANY = 8


def cases() -> Iterator[Case]:
    """Kinds of models that the presets have, on every compute capability."""
    for capability, kv in product(CAPABILITIES, ("auto", "fp8")):
        for head_dim in (64, 80, 128, 160, 192, 224, 256, 512):
            yield Case(capability, head_dim, 32, kv)
        for head_dim in (128, 256):
            yield Case(capability, head_dim, 16, kv, window=True)
            yield Case(capability, head_dim, 16, kv, window=True, images=True)
        yield Case(capability, 512, 16, kv, images=True)
        yield Case(capability, 64, 64, kv, sinks=True, window=True)
        yield from (Case(capability, 576, heads, kv, latent=True) for heads in (16, 128))
        for size, heads in product((512, 576), (16, 128)):
            yield Case(capability, size, heads, kv, latent=True, sparse=True)


class _Names(SimpleNamespace):
    """Any attribute is its own name, as of ``torch`` and of enumerations."""

    def __getattr__(self, name: str) -> str:
        return name


class _Plain(ast.NodeTransformer):
    """Leaves out annotations and imports, which refer to what is not there."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            each.annotation = None
        kept = [each for each in node.decorator_list if ast.unparse(each) in ("classmethod", "staticmethod")]
        node.decorator_list = list(kept)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    visit_ImportFrom = visit_Import  # type: ignore[assignment]


class _Base:
    """vLLM's ``AttentionBackend``, as far as a choice asks it."""

    supported_dtypes: tuple[str, ...] = ("float16", "bfloat16")
    supported_kv_cache_dtypes: tuple[str, ...] = ("auto", "float16", "bfloat16")

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str) -> bool:
        return not cls.supported_kv_cache_dtypes or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_compute_capability(cls, capability: Capability) -> bool:
        return True

    @classmethod
    def supports_combination(cls, *arguments: object, **named: object) -> str | None:
        return None

    @classmethod
    def _no(cls) -> bool:
        return False

    is_mla = is_sparse = supports_sink = supports_mm_prefix = supports_sliding_window = _no

    @classmethod
    def get_supported_dtypes(cls) -> tuple[str, ...]:
        return cls.supported_dtypes


class _Latent(_Base):
    """``MLACommonBackend``."""

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]


def _platform(case: Case) -> Any:
    own = Capability(*divmod(case.capability, 10))

    def wanted(capability: int | tuple[int, int]) -> tuple[int, int]:
        return divmod(capability, 10) if isinstance(capability, int) else capability

    return SimpleNamespace(
        is_cuda=lambda: True,
        is_xpu=lambda: False,
        is_rocm=lambda: False,
        get_device_capability=lambda *_: own,
        is_device_capability=lambda capability, *_: own == wanted(capability),
        has_device_capability=lambda capability, *_: own >= wanted(capability),
        is_device_capability_family=lambda capability, *_: own.major == capability // 10,
    )


class Release:
    """One release, from its ``vllm`` folder.

    Args:
        minor: Minor number of the release.
    """

    def __init__(self, folder: Path, minor: int) -> None:
        self._folder, self._minor = folder, minor

    def choose(self, case: Case) -> str:
        """vLLM's name of the backend, with the version of FlashAttention; empty where it finds none."""
        scope = self._scope(case)
        before = self._minor < 11 or "_get_backend_priorities" not in _text(self._folder / "platforms" / "cuda.py")
        found = self._by_one_function(case, scope) if before else self._by_priorities(case, scope)
        return f"{found} {self._version(case, scope)}" if found == "FLASH_ATTN" else found

    def _version(self, case: Case, scope: dict[str, Any]) -> int:
        function = scope["get_flash_attn_version"]
        known = {
            "head_size": case.head_dim,
            "head_size_v": case.head_dim,
            "has_sinks": case.sinks,
            "supports_fa4_hd256": True,
        }
        code = function.__code__
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return int(function(**{name: value for name, value in known.items() if name in taken}))

    def _scope(self, case: Case) -> dict[str, Any]:
        """Names that the functions find: those of vLLM's files that are read, and those that they import."""
        platform, scope = _platform(case), {"__builtins__": __builtins__}
        scope |= _supplied(case, platform, self._minor)
        supplied = frozenset(("is_fa_version_supported",))
        for path in ("v1/attention/backends/fa_utils.py", "v1/attention/backends/flashinfer.py"):
            if (self._folder / path).is_file():
                self._define(path, scope, lambda node: isinstance(node, ast.FunctionDef) and node.name not in supplied)
        return scope

    def _define(self, path: str, scope: dict[str, Any], wanted: Any) -> None:
        tree = _tree(self._folder / path)
        nodes = [node for node in tree.body if wanted(node)]
        exec(compile(ast.Module(nodes, []), path, "exec"), scope)

    def _class(self, path: str, name: str, scope: dict[str, Any]) -> Any:
        """A backend's class with what a choice asks it."""
        node = next(
            each for each in _tree(self._folder / path).body if isinstance(each, ast.ClassDef) and each.name == name
        )
        bases = []
        for base in map(ast.unparse, node.bases):
            if base == "AttentionBackend":
                bases.append(_Base)
            elif "MLACommon" in base:
                bases.append(_Latent)
            else:
                own = {each.name for each in _tree(self._folder / path).body if isinstance(each, ast.ClassDef)}
                bases.append(self._class(path if base in own else _FILES[base], base, scope))
        kept = [each for each in node.body if _is_asked(each)]
        body = ast.ClassDef(name, [ast.Name("_Bases", ast.Load())], [], kept or [ast.Pass()], [], type_params=[])
        local = {**scope, "_Bases": type("_Bases", tuple(bases), {})}
        exec(compile(ast.fix_missing_locations(ast.Module([body], [])), path, "exec"), local)
        return local[name]

    def _by_one_function(self, case: Case, scope: dict[str, Any]) -> str:
        """Up to 0.11.0: ``get_attn_backend_cls``, after ``check_and_update_config`` has set the size of blocks."""
        platforms = "platforms/cuda.py"
        node = next(
            each
            for each in _tree(self._folder / platforms).body
            if isinstance(each, ast.ClassDef) and each.name == "CudaPlatformBase"
        )
        methods = [
            each
            for each in node.body
            if isinstance(each, ast.FunctionDef) and each.name in ("get_attn_backend_cls", "check_and_update_config")
        ]
        body = ast.ClassDef("Platform", [], [], methods, [], type_params=[])
        scope["is_attn_backend_supported"] = lambda path, size, dtype, **_: self._older_support(path, size, scope)
        scope["supports_head_size"] = lambda path, size: self._older_support(path, size, scope).head_size
        exec(compile(ast.fix_missing_locations(ast.Module([body], [])), platforms, "exec"), scope)
        platform = type("P", (scope["Platform"],), vars(scope["current_platform"]) | {"device_name": "cuda"})
        for name, function in vars(scope["current_platform"]).items():
            setattr(platform, name, staticmethod(function))
        config = MagicMock()
        config.cache_config.block_size = None
        config.model_config.use_mla = case.latent
        config.model_config.hf_config = SimpleNamespace(**({"index_topk": 1} if case.sparse else {}))
        config.parallel_config.data_parallel_size = 1
        platform.check_and_update_config(config)
        given = {
            "selected_backend": None, "head_size": case.head_dim, "dtype": "bfloat16", "kv_cache_dtype": case.kv,
            "block_size": config.cache_config.block_size, "use_v1": True, "use_mla": case.latent, "has_sink": case.sinks,
            "use_sparse": case.sparse,
        }  # fmt: skip
        code = platform.get_attn_backend_cls.__func__.__code__
        path = platform.get_attn_backend_cls(**{name: given[name] for name in code.co_varnames[1 : code.co_argcount]})
        return _NAMES[path.rpartition(".")[2]]

    def _older_support(self, path: str, size: int, scope: dict[str, Any]) -> Any:
        module, _, name = path.rpartition(".")
        backend = self._class(module.removeprefix("vllm.").replace(".", "/") + ".py", name, scope)
        try:
            backend.validate_head_size(size)
            fits = True
        except ValueError:
            fits = False

        class Found(SimpleNamespace):
            def __bool__(self) -> bool:
                return bool(self.head_size)

        return Found(can_import=True, head_size=fits, dtype=True)

    def _by_priorities(self, case: Case, scope: dict[str, Any]) -> str:
        self._define(
            "platforms/cuda.py",
            scope,
            lambda node: isinstance(node, ast.FunctionDef) and node.name == "_get_backend_priorities",
        )
        function = scope["_get_backend_priorities"]
        own = scope["current_platform"].get_device_capability()
        given = {
            "use_mla": case.latent, "device_capability": own, "num_heads": case.heads, "kv_cache_dtype": case.kv,
            "use_non_causal": False, "head_size": case.head_dim, "use_mm_prefix": case.images,
        }  # fmt: skip
        code = function.__code__
        names = function(**{name: given[name] for name in code.co_varnames[: code.co_argcount]})
        return next((name for name in names if self._is_valid(name, case, own, scope)), "")

    def _is_valid(self, name: str, case: Case, own: Capability, scope: dict[str, Any]) -> bool:
        if name in _COMPOSITES:
            return self._is_valid_composite(_COMPOSITES[name], case, own, scope)
        path = next(
            (
                each
                for each in _PATHS[name]
                if (self._folder / each[0]).is_file() and f"class {each[1]}(" in _text(self._folder / each[0])
            ),
            None,
        )
        return path is not None and self._takes(self._class(*path, scope), case, own, scope)

    def _is_valid_composite(self, path: str, case: Case, own: Capability, scope: dict[str, Any]) -> bool:
        """Of ``create_composite_attention_backend``: the first backend attends to images, the second one to all else."""
        if not (self._folder / path).is_file():
            return False
        tree = _tree(self._folder / path)
        call = next(
            each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and "create_composite" in ast.unparse(each.value)
        )
        assert isinstance(call, ast.Call)
        names = [ast.unparse(each) for each in call.args]
        given = {each.arg: ast.unparse(each.value) for each in call.keywords}
        sizes = ast.literal_eval(given.get("head_sizes", "()"))
        if (sizes and case.head_dim not in sizes) or given.get("device_major", str(own.major)) != str(own.major):
            return False
        general, causal = (
            self._class(path if f"class {name}(" in _text(self._folder / path) else _FILES[name], name, scope)
            for name in names
        )
        return self._takes(general, case, own, scope) and self._takes(causal, case._replace(images=False), own, scope)

    def _takes(self, backend: Any, case: Case, own: Capability, scope: dict[str, Any]) -> bool:
        combination = backend.supports_combination
        given = {
            "head_size": case.head_dim, "dtype": "bfloat16", "kv_cache_dtype": case.kv, "block_size": None,
            "use_mla": case.latent, "has_sink": case.sinks, "use_sparse": case.sparse, "use_mm_prefix": case.images,
            "device_capability": own,
        }  # fmt: skip
        code = combination.__func__.__code__
        taken = (
            given if code.co_flags & _TAKES_ANY else {key: given[key] for key in code.co_varnames[1 : code.co_argcount]}
        )
        asks_windows = "supports_sliding_window" in _text(self._folder / "v1/attention/backends/flash_attn.py")
        return (
            backend.supports_head_size(case.head_dim)
            and backend.supports_kv_cache_dtype(case.kv)
            and not (case.images and self._minor >= 14 and not backend.supports_mm_prefix())
            and backend.is_mla() == case.latent
            and not (case.sinks and not backend.supports_sink())
            and backend.is_sparse() == case.sparse
            and backend.supports_compute_capability(own)
            and not (case.window and asks_windows and not backend.supports_sliding_window())
            and not combination(**taken)
        )


def _is_asked(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith(("supports_", "get_supported_", "is_mla", "is_sparse", "validate_head", "_nvfp4"))
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("supported_")


def _supplied(case: Case, platform: Any, minor: int) -> dict[str, Any]:
    """What vLLM's files import, as the newest wheel has it."""
    own = platform.get_device_capability()

    def flash_version(requires_alibi: bool = False) -> int:
        # ``fa_utils.py`` up to 0.13.
        return 3 if own.major == 9 else 2

    def trtllm(is_prefill: bool = False) -> bool:
        if own == (9, 0) or own.major == 12:
            return minor >= 28 and not is_prefill
        return own == (10, 0) if minor < 14 else own.major == 10

    def flash_mla() -> tuple[bool, str | None]:
        return own.major == 9, None

    def flash_mla_sparse() -> tuple[bool, str | None]:
        return own.major in (9, 10), None

    def flash_supported(version: int) -> bool:
        # FlashAttention 4 is in the wheels since 0.17.
        return {2: own.major >= 8, 3: own.major == 9, 4: minor >= 17 and own.major in (9, 10, 11)}[version]

    names: Any = _Names()
    rotary = case.head_dim - 512 if case.latent else 64
    sizes = {
        "qk_nope_head_dim": 128 if rotary else 256,
        "qk_rope_head_dim": rotary,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "index_topk": 2048,
    }
    text = SimpleNamespace(**sizes, attn_logit_softcapping=None)
    served = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda _: case.heads,
            hf_text_config=text,
            hf_config=text,
            is_mm_prefix_lm=case.images,
            is_diffusion=False,
            rswa_window=None,
        ),
        attention_config=SimpleNamespace(flash_attn_version=None, use_trtllm_attention=None),
        cache_config=SimpleNamespace(cache_dtype=case.kv),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
    )
    return {
        "current_platform": platform, "torch": names, "AttentionBackendEnum": names, "_Backend": names, "logger": MagicMock(),
        "envs": SimpleNamespace(VLLM_ATTENTION_BACKEND=None, VLLM_BATCH_INVARIANT=False, VLLM_FLASH_ATTN_VERSION=None, VLLM_USE_V1=True,
                                VLLM_ALL2ALL_BACKEND="naive", VLLM_USE_TRTLLM_ATTENTION=None),
        "AttentionType": SimpleNamespace(DECODER=_DECODER, ENCODER="e", ENCODER_ONLY="o", ENCODER_DECODER="x"),
        "DeviceCapability": Capability, "MultipleOf": int, "CUDAGraphMode": names,
        "get_flash_attn_version": flash_version, "fa_version_unsupported_reason": lambda version: None,
        "is_fa_version_supported": flash_supported, "_is_fa_version_supported": flash_supported,
        "flash_attn_supports_fp8": lambda: flash_version() == 3, "flash_attn_supports_sinks": lambda: flash_version() == 3,
        "flash_attn_supports_mla": lambda: own.major == 9, "is_flash_attn_varlen_func_available": lambda: True,
        "get_current_vllm_config_or_none": lambda: served, "get_current_vllm_config": lambda: served,
        "_fa4_cute_mla_available": lambda: None, "has_flashinfer_sparse_mla_sm120": lambda: True, "has_flashinfer_sm90_nope_mla": lambda: True,
        "vllm_is_batch_invariant": lambda: False,
        "is_quantized_kv_cache": lambda kv: kv.startswith("fp8"),
        "force_use_trtllm_attention": lambda: None,
        "supports_trtllm_attention": trtllm, "is_flashmla_supported": flash_mla, "is_flashmla_dense_supported": flash_mla,
        "is_flashmla_sparse_supported": flash_mla_sparse, "has_flashinfer": lambda: True, "set_kv_cache_layout": lambda _: None,
    }  # fmt: skip


_NAMES = {
    "FlashAttentionBackend": "FLASH_ATTN", "FlashInferBackend": "FLASHINFER", "TritonAttentionBackend": "TRITON_ATTN",
    "FlexAttentionBackend": "FLEX_ATTENTION", "XFormersBackend": "XFORMERS", "TritonMLABackend": "TRITON_MLA",
    "FlashMLABackend": "FLASHMLA", "CutlassMLABackend": "CUTLASS_MLA", "FlashInferMLABackend": "FLASHINFER_MLA",
    "FlashAttnMLABackend": "FLASH_ATTN_MLA", "FlashMLASparseBackend": "FLASHMLA_SPARSE",
}  # fmt: skip
_V1, _MLA = "v1/attention/backends/", "v1/attention/backends/mla/"
#: Files and classes of each backend, the newest first.
_PATHS = {
    "FLASH_ATTN": [(_V1 + "flash_attn.py", "FlashAttentionBackend")],
    "FLASHINFER": [(_V1 + "flashinfer.py", "FlashInferBackend")],
    "TRITON_ATTN": [(_V1 + "triton_attn.py", "TritonAttentionBackend")],
    "FLEX_ATTENTION": [(_V1 + "flex_attention.py", "FlexAttentionBackend")],
    "TURBOQUANT": [(_V1 + "turboquant_attn.py", "TurboQuantAttentionBackend")],
    "FLASH_ATTN_MLA": [(_MLA + "flashattn_mla.py", "FlashAttnMLABackend")],
    "FLASHMLA": [(_MLA + "flashmla.py", "FlashMLABackend")],
    "FLASHINFER_MLA": [(_MLA + "flashinfer_mla.py", "FlashInferMLABackend")],
    "TOKENSPEED_MLA": [(_MLA + "tokenspeed_mla.py", "TokenspeedMLABackend")],
    "CUTLASS_MLA": [(_MLA + "cutlass_mla.py", "CutlassMLABackend")],
    "TRITON_MLA": [(_MLA + "triton_mla.py", "TritonMLABackend")],
    "FLASHMLA_SPARSE": [(_MLA + "flashmla_sparse.py", "FlashMLASparseBackend")],
    "FLASH_ATTN_MLA_SPARSE": [(_MLA + "flashattn_mla_sparse.py", "FlashAttnMLASparseBackend")],
    "FLASH_ATTN_MLA_SPARSE_FA4": [(_MLA + "flashattn_mla_sparse.py", "FlashAttnMLASparseFA4Backend")],
    "FLASHINFER_MLA_SPARSE": [
        (_MLA + "flashinfer_mla_sparse.py", "FlashInferMLASparseTRTLLMBackend"),
        (_MLA + "flashinfer_mla_sparse.py", "FlashInferMLASparseBackend"),
    ],
    "FLASHINFER_MLA_SPARSE_SM120": [(_MLA + "flashinfer_mla_sparse.py", "FlashInferMLASparseSM120Backend")],
    "FLASHINFER_MLA_SPARSE_SM90": [(_MLA + "flashinfer_mla_sparse_sm90.py", "FlashInferMLASparseSM90Backend")],
}  # fmt: skip
_COMPOSITES = {"TRITON_FLASH_ATTN": _V1 + "triton_flash_attn.py", "TRITON_FLASHINFER": _V1 + "triton_flashinfer.py"}
_FILES = {name: path for each in _PATHS.values() for path, name in each}


@cache
def _text(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def _tree(path: Path) -> ast.Module:
    return _Plain().visit(ast.parse(_text(path)))


def main() -> None:
    """Write the choices of the releases that are given as JSON: by case, the releases at which the choice changes."""
    releases = {}
    for argument in sys.argv[1:]:
        release, _, folder = argument.partition("=")
        releases[int(release.split(".")[1])] = Release(Path(folder), int(release.split(".")[1]))
    found: dict[str, dict[str, str]] = {}
    for case in cases():
        last: str | None = None
        for minor in sorted(releases):
            chosen = releases[minor].choose(case)
            if chosen != last:
                found.setdefault(case.key, {})[str(minor)] = chosen
            last = chosen
    json.dump({"releases": sorted(releases), "choices": found}, sys.stdout, indent=0, sort_keys=False)


if __name__ == "__main__":
    main()
