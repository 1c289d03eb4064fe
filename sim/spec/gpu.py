"""GPUs by the figures of their data sheets, not measured: presets, and GPUs that a user describes in a JSON file.

    {"name": "my-gpu", "memory_bytes": 25250627584, "memory_gb_per_s": 1008, "fp16_tflops": 165.2, "fp8_tflops": 330.3,
     "int8_tops": 660.6, "fp4_tflops": null, "pcie_gb_per_s": 32, "nvlink_gb_per_s": null, "l2_mib": null, "architecture": null, "compute_capability": 8.9, "profile": null,
     "source": "data sheet of ..."}

The presets (``data/gpus.json``) are a list of such objects.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from dataclasses import dataclass
from functools import cache
from importlib import resources
from os.path import basename, dirname, isfile, join
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ..types.errors import SettingError
from ..types.user_files import content_of
from ..types.validation import complaint

GB, TFLOPS = 10**9, 10**12
GIB = 1 << 30
#: Limits of the figures of a file: outside of them a figure is in another unit. No text, and no true or false.
Memory = Annotated[int, Field(ge=GIB, le=2**44, strict=True)]
Bandwidth = Annotated[float, Field(ge=50, le=1e6, strict=True, allow_inf_nan=False)]
Link = Annotated[float, Field(ge=1, le=1e5, strict=True, allow_inf_nan=False)]
Tflops = Annotated[float, Field(ge=1, le=1e6, strict=True, allow_inf_nan=False)]
Capability = Annotated[float, Field(ge=5, lt=20, strict=True)]
CacheMib = Annotated[int, Field(ge=1, le=4096, strict=True)]
Multiprocessors = Annotated[int, Field(ge=1, le=1024, strict=True)]
#: GB/s from which a card of compute capability 8 or more has stacked memory: the A100 has 1,555, an RTX 3090 936. An RTX 5090 has 1,792, and
#: so has an RTX PRO 6000, with 4-bit formats; no card with these and stacked memory has less than 7,700.
_LEAST_OF_HBM = 1500
#: The achieved shares of an architecture that is not known (``sim.cost.shares``).
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU.

    Attributes:
        architecture: Its row of ``sim.cost.shares.SHARES``: what kernels reach of the data sheet.
        memory_bytes: Total memory as the driver reports it; less than the nominal size.
        memory_bytes_per_s: Memory bandwidth.
        fp16_flops_per_s: Dense fp16 / bf16 tensor-core throughput.
        pcie_bytes_per_s, nvlink_bytes_per_s: Bandwidth to the host and to other GPUs, in one direction. GPUs without
            NVLink reach others over PCIe.
        source: Source of the figures.
        fp8_flops_per_s, int8_flops_per_s, fp4_flops_per_s: Dense tensor-core throughput in these formats; None if the GPU
            has none.
        l2_bytes: L2 cache; None where it is not known. Kernels are timed by repeating a call, which finds a smaller KV cache in it; in
            a step the KV of the other layers comes between.
        multiprocessors: Streaming multiprocessors; None where they are not known.
        path: File that describes it; None for a preset.
        profile: Path of a file with its operations, as ``fragmeter calibrate`` writes it; None for the profile of the
            package, if it has one.
        compute_capability: NVIDIA's, as 89 for 8.9, by which vLLM chooses its kernels; None for another vendor's card. Of a file without
            it, what the number formats and the bandwidth suggest.
        unified_memory: Whether the CPU uses the same memory.
    """

    name: str
    architecture: str
    memory_bytes: int
    memory_bytes_per_s: int
    fp16_flops_per_s: int
    pcie_bytes_per_s: int
    nvlink_bytes_per_s: int
    source: str
    fp8_flops_per_s: int | None = None
    int8_flops_per_s: int | None = None
    fp4_flops_per_s: int | None = None
    l2_bytes: int | None = None
    path: str | None = None
    profile: str | None = None
    compute_capability: int | None = None
    multiprocessors: int | None = None
    unified_memory: bool = False

    def quantized_flops_per_s(self, quantization: str) -> int | None:
        """Dense throughput with weights in a number format; None if kernels of this format multiply in 16 bits."""
        rates = {"fp8": self.fp8_flops_per_s, "int8": self.int8_flops_per_s, "nvfp4": self.fp4_flops_per_s}
        # Units for scales of small groups came with those for 4 bits; others run vLLM's Marlin kernels.
        rates["mxfp8"] = self.fp8_flops_per_s if self.fp4_flops_per_s else None
        return rates.get(quantization)

    @property
    def major(self) -> int | None:
        """Major number of the compute capability: 8 (Ampere, Ada), 9 (Hopper), 10 (Blackwell), 12 (RTX Blackwell, GB10)."""
        return None if self.compute_capability is None else self.compute_capability // 10

    @property
    def has_nvlink(self) -> bool:
        """Whether ranks are linked by more than PCIe."""
        return self.nvlink_bytes_per_s > self.pcie_bytes_per_s

    @property
    def is_blackwell(self) -> bool:
        """Whether it is of the data-centre cards of Blackwell."""
        return self.major == 10

    @property
    def is_data_centre(self) -> bool:
        """Whether it is an A100, of Hopper or of the data-centre Blackwell: stacked memory, an L2 cache in two partitions that each keep
        what their own multiprocessors read, and 164 KiB of shared memory or more in each multiprocessor."""
        return self.compute_capability in (80, 90, 100, 103)

    def field(self, name: str) -> str:
        """A field in the words of an error: with the file, if the GPU is of one."""
        return name if self.path is None else f"{basename(self.path)}: {name}"

    @property
    def setting(self) -> str:
        """Its value of ``--gpu``."""
        return self.path or self.name


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class _Sheet:
    """A GPU as JSON has it; a null or missing ``nvlink_gb_per_s`` is no NVLink."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    memory_bytes: Memory
    memory_gb_per_s: Bandwidth
    fp16_tflops: Tflops
    fp8_tflops: Tflops | None = None
    int8_tops: Tflops | None = None
    fp4_tflops: Tflops | None = None
    pcie_gb_per_s: Link
    nvlink_gb_per_s: Link | None = None
    l2_mib: CacheMib | None = None
    multiprocessors: Multiprocessors | None = None
    architecture: str | None = None
    compute_capability: Capability | None = None
    unified_memory: bool = False
    profile: str | None = None
    source: Annotated[str, Field(min_length=1)]

    def spec(self, path: str | None = None) -> GpuSpec:
        """The GPU of a file; a relative path of a profile is relative to its folder."""
        folder = dirname(path or "")
        link = self.pcie_gb_per_s if self.nvlink_gb_per_s is None else self.nvlink_gb_per_s
        return GpuSpec(
            name=self.name,
            architecture=self.architecture or UNKNOWN,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=round(self.memory_gb_per_s * GB),
            fp16_flops_per_s=round(self.fp16_tflops * TFLOPS),
            pcie_bytes_per_s=round(self.pcie_gb_per_s * GB),
            nvlink_bytes_per_s=round(link * GB),
            source=self.source,
            fp8_flops_per_s=None if self.fp8_tflops is None else round(self.fp8_tflops * TFLOPS),
            int8_flops_per_s=None if self.int8_tops is None else round(self.int8_tops * TFLOPS),
            fp4_flops_per_s=None if self.fp4_tflops is None else round(self.fp4_tflops * TFLOPS),
            l2_bytes=None if self.l2_mib is None else self.l2_mib * 2**20,
            path=path,
            profile=None if self.profile is None else join(folder, self.profile),
            compute_capability=self._capability(is_file=path is not None),
            multiprocessors=self.multiprocessors,
            unified_memory=self.unified_memory,
        )

    def _capability(self, is_file: bool) -> int | None:
        """The compute capability; of a file without one, that of the NVIDIA cards with these number formats and this bandwidth."""
        if self.compute_capability is not None:
            return round(10 * self.compute_capability)
        if not is_file:
            return None
        has_hbm = self.memory_gb_per_s >= _LEAST_OF_HBM
        if self.fp4_tflops is not None:
            return 100 if self.memory_gb_per_s >= 2 * _LEAST_OF_HBM else 120
        if self.fp8_tflops is not None:
            return 90 if has_hbm else 89
        return 80 if has_hbm else 86


_SHEET = TypeAdapter(_Sheet)


@cache
def _presets() -> dict[str, GpuSpec]:
    rows: list[Any] = json.loads(resources.files(__package__).joinpath("data/gpus.json").read_text("utf-8"))
    return {row["name"]: _SHEET.validate_python(row).spec() for row in rows}


def gpu_names() -> list[str]:
    """Names of the presets."""
    return list(_presets())


def gpu(name_or_path: str) -> GpuSpec:
    """The preset of that name, or the GPU of a JSON file.

    Raises:
        SettingError: There is no such preset, or the file has a name of a preset or a figure that cannot be.
        UserError: The file cannot be read.
    """
    if name_or_path in _presets():
        return _presets()[name_or_path]
    if not name_or_path.endswith(".json") and not isfile(name_or_path):
        raise SettingError("gpu", name_or_path, f"one of {', '.join(_presets())}, or a JSON file of a GPU")
    file = basename(name_or_path)
    try:
        found = _SHEET.validate_json(content_of(name_or_path, "gpu").removeprefix(BOM_UTF8))
    except ValidationError as error:
        raise complaint(file, error, "file of a GPU") from None
    if found.name in _presets():
        raise SettingError(f"{file}: name", found.name, "is a preset of the package; give the GPU another name")
    return found.spec(name_or_path)
