"""GPUs by the figures of their data sheets, not measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..types.errors import SettingError

GB, TFLOPS = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU.

    Attributes:
        architecture: Its row of ``sim.cost.shares.SHARES``: what kernels reach of the data sheet.
        memory_bytes: Total memory as the CUDA driver reports it; less than the nominal size.
        memory_bytes_per_s: Memory bandwidth.
        fp16_flops_per_s: Dense fp16 / bf16 tensor-core throughput.
        pcie_bytes_per_s, nvlink_bytes_per_s: Bandwidth to the host and to other GPUs, in one direction. GPUs without
            NVLink reach others over PCIe.
        source: Source of the figures.
    """

    name: str
    architecture: str
    memory_bytes: int
    memory_bytes_per_s: int
    fp16_flops_per_s: int
    pcie_bytes_per_s: int
    nvlink_bytes_per_s: int
    source: str


def _source(sheet: str, memory: str) -> str:
    figures = f"data sheet, not measured: {sheet}, dense fp16, links halved to one direction"
    return f"{figures}; memory_bytes as {memory} reports it"


_A100 = {"fp16_flops_per_s": 312 * TFLOPS, "pcie_bytes_per_s": 32 * GB, "nvlink_bytes_per_s": 300 * GB}
_HOPPER = {"fp16_flops_per_s": 989 * TFLOPS, "pcie_bytes_per_s": 64 * GB, "nvlink_bytes_per_s": 450 * GB}

_GPUS = {
    spec.name: spec
    for spec in (
        GpuSpec(
            name="a100-40gb",
            architecture="a100",
            memory_bytes=42_298_834_944,
            memory_bytes_per_s=1_555 * GB,
            source=_source("NVIDIA A100 Tensor Core GPU, SXM4 40 GB", "deviceQuery"),
            **_A100,
        ),
        GpuSpec(
            name="a100-80gb",
            architecture="a100",
            memory_bytes=84_987_740_160,
            memory_bytes_per_s=2_039 * GB,
            source=_source("NVIDIA A100 Tensor Core GPU, SXM4 80 GB", "deviceQuery"),
            **_A100,
        ),
        GpuSpec(
            name="h100-80gb",
            architecture="h100",
            memory_bytes=85_028_896_768,
            memory_bytes_per_s=3_350 * GB,
            source=_source("NVIDIA H100 Tensor Core GPU, SXM5 80 GB", "deviceQuery"),
            **_HOPPER,
        ),
        GpuSpec(
            name="h200",
            architecture="h200",
            memory_bytes=150_109_880_320,
            memory_bytes_per_s=4_800 * GB,
            source=_source("NVIDIA H200 Tensor Core GPU, SXM5 141 GB", "torch.cuda.get_device_properties"),
            **_HOPPER,
        ),
        GpuSpec(
            name="rtx-4090",
            architecture="rtx-4090",
            memory_bytes=25_250_627_584,
            memory_bytes_per_s=1_008 * GB,
            fp16_flops_per_s=165_200 * GB,
            pcie_bytes_per_s=32 * GB,
            nvlink_bytes_per_s=32 * GB,
            source=_source("NVIDIA Ada GPU Architecture, GeForce RTX 4090, fp32 accumulate, no NVLink", "torch"),
        ),
        GpuSpec(
            name="rtx-pro-6000",
            architecture="rtx-pro-6000",
            # 94.97 GiB in torch's messages.
            memory_bytes=101_973_260_000,
            memory_bytes_per_s=1_792 * GB,
            fp16_flops_per_s=503_800 * GB,
            pcie_bytes_per_s=64 * GB,
            nvlink_bytes_per_s=64 * GB,
            source=_source("NVIDIA RTX PRO 6000 Blackwell, fp32 accumulate, no NVLink", "torch"),
        ),
    )
}


def gpu_names() -> list[str]:
    """Names of the presets."""
    return list(_GPUS)


def gpu(name: str) -> GpuSpec:
    """The preset of that name.

    Raises:
        SettingError: There is none.
    """
    if name not in _GPUS:
        raise SettingError("gpu", name, f"one of {', '.join(_GPUS)}")
    return _GPUS[name]
