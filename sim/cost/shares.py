"""Shares of the data-sheet throughput that kernels reach, and latencies that no data sheet states.

The shares are published measurements, mid-points where a range is given, or medians over published operation
tables; each applies to one architecture or card. None of them is measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import median

from ..spec.gpu import UNKNOWN, GpuSpec
from ..types.errors import SettingError

PUBLISHED = "published measurements, share of the data-sheet roofline"
TABULATED = "median over the operation table of its profile, share of the data-sheet roofline"
ASSUMED = "assumed, not measured"
# No published share is of a recurrence: its bytes are given what decode attention reaches, its flops what GEMMs do.
RECURRENCE = "data sheet of the GPU; decode attention's share of its bandwidth and GEMMs' of its flops, assumed"

# Shortest decode-attention call: published, 11 to 12 us on all three architectures.
ATTENTION_FLOOR_US = 11.5
# Beside GEMMs and attention: norm, rotary positions, cache write; or norm, convolution, recurrence.
KERNELS_PER_MIXER = 3
# Beside GEMMs: norm, activation.
KERNELS_PER_MLP = 2
# Shortest calls of vLLM 0.24's kernels in aiconfigurator-core's tables (of the A100 0.14's), medians over the profiles of cards: a kernel that takes
# no longer than its launch; GEMMs in 16 bits, and with weights and activations in 8 or 4; all routed experts of a layer, of the
# shape with the shortest call in each number format. To these the time of what a call reads or computes is added, as its fits do (q of about 1).
SMALL_KERNEL_US = 1.8
GEMM_US = 3.8
QUANTISED_GEMM_US = 5.8
EXPERTS_US = 25.6
# One mixing of the hidden states of a layer's part (hyper-connections of DeepSeek V4), before and behind it: the shortest calls of both.
HYPER_CONNECTION_US = 12.7
FLOORS = "shortest calls in aiconfigurator-core's tables of vLLM's kernels, median over cards"
HOST_US = 500.0
ALL_REDUCE_LATENCY_US = 10.0
# Without NVLink, and without a table of the card.
PCIE_LATENCY_US = 20.0
PCIE_SHARE = 0.5
# Between nodes: 400 Gbit/s a GPU.
GPUS_PER_NODE = 8
NETWORK_BYTES_PER_S = 50e9
NETWORK_LATENCY_US = 20.0
# From one pipeline stage to the next, over the same links.
HOP_LATENCY_US = 10.0
LINK_SHARE = 0.8
# One copy a layer and a side (K, V) of each block: SOSP'23 Fig 19a, least squares, over OPT-13B's 80 copies.
COPY_OUT_US = 1.92
COPY_IN_US = 3.22


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of the data-sheet bandwidth or flops.

    Attributes:
        gemm_bandwidth: GEMMs of at most 64 tokens, bound by reading the weights.
        gemm_flops: GEMMs of at least 1,024 tokens.
        decode_bandwidth: Decode attention, mean of 32 sequences of 4k and 128 of 1k (32 heads, 8 KV heads).
        prefill_1k_flops, prefill_4k_flops: Attention over one prompt of 1,024 and of 4,096 tokens.
    """

    gemm_bandwidth: float
    gemm_flops: float
    decode_bandwidth: float
    prefill_1k_flops: float
    prefill_4k_flops: float

    def prefill_factors(self) -> tuple[float, float]:
        """``(a, b)`` such that a prompt takes as long as ``a * pairs + b * tokens`` pairs would at full flops.

        Solved so that both published points come out: no single share says what short prompts waste.
        """
        short, long = 1024, 4096
        short_pairs, long_pairs = short * (short + 1) / 2, long * (long + 1) / 2
        short_time, long_time = short_pairs / self.prefill_1k_flops, long_pairs / self.prefill_4k_flops
        per_pair = (long_time - 4 * short_time) / (long_pairs - 4 * short_pairs)
        return per_pair, (short_time - per_pair * short_pairs) / short


PUBLISHED_SHARES = {
    "a100": Shares(0.695, 0.88, 0.70, 0.28, 0.49),
    "h100": Shares(0.825, 0.805, 0.85, 0.24, 0.53),
    "h200": Shares(0.77, 0.775, 0.79, 0.25, 0.52),
}
SHARES = PUBLISHED_SHARES | {
    # Reached by the layers that their profiles are fitted to (tools/profiles/fit_layers.py prints them).
    "rtx-4090": Shares(0.872, 0.96, 0.88, 0.481, 0.724),
    "rtx-pro-6000": Shares(0.785, 0.729, 0.756, 0.279, 0.46),
    # Reached by the kernels that their profiles are fitted to (``fit_profiles`` prints them); means of b200 and gb200, and of
    # b300 and gb300.
    "l40s": Shares(0.772, 0.611, 0.78, 0.313, 0.49),
    "b200": Shares(0.742, 0.66, 0.821, 0.128, 0.355),
    "b300": Shares(0.731, 0.734, 0.804, 0.151, 0.44),
}


#: The median of each share over the known architectures.
ASSUMED_SHARES = Shares(*(median(getattr(known, field.name) for known in SHARES.values()) for field in fields(Shares)))


#: Share of the 8-bit flops over the share of the 16-bit flops that GEMMs reach, fp8 with activations quantised in the call:
#: medians over 7,905 GEMMs of 1,024 tokens or more with n and k from 1,024 in aiconfigurator-core's tables (``fit_profiles``
#: prints them). That of rtx-4090 is the L40S's, of the same generation. Other architectures have the median.
EIGHT_BIT_SHARES = {
    "h100": 0.532, "h200": 0.573, "rtx-4090": 0.685, "l40s": 0.685, "rtx-pro-6000": 0.84, "b200": 0.513, "b300": 0.493,
}  # fmt: skip
#: The same of nvfp4.
FOUR_BIT_SHARES = {"rtx-pro-6000": 0.694, "b200": 0.47, "b300": 0.303}


def speedup(gpu: GpuSpec, quantization: str) -> float:
    """Flops of GEMMs with quantised weights over those in 16 bits.

    1 for formats of the weights alone, which kernels unpack to 16 bits: awq, gptq and mxfp4, and fp8, mxfp8, int8 and nvfp4 on
    GPUs without such units (vLLM's Marlin kernels).
    """
    rate = gpu.quantized_flops_per_s(quantization)
    if rate is None:
        return 1.0
    known = FOUR_BIT_SHARES if quantization == "nvfp4" else EIGHT_BIT_SHARES
    share = known.get(gpu.architecture, median(known.values()))
    return max(1.0, share * rate / gpu.fp16_flops_per_s)


def speedup_source(faster: float) -> str:
    """Source of the flops of GEMMs with quantised weights that no table has."""
    return f"that of 16 bits with {faster:.3f} times the flops: data sheet, and shares of tables of other cards; not measured"


def shares_of(architecture: str, field: str = "architecture") -> Shares:
    """The shares of an architecture; of an unknown one, those that are assumed.

    Args:
        field: Where it is given, for the error.

    Raises:
        SettingError: There is no such architecture.
    """
    if architecture == UNKNOWN:
        return ASSUMED_SHARES
    if architecture not in SHARES:
        raise SettingError(field, architecture, f"of a GPU's file must be one of {', '.join(SHARES)}, or left out")
    return SHARES[architecture]


def origin(architecture: str) -> str:
    """Where the shares of an architecture come from, for the source of a coefficient."""
    if architecture == UNKNOWN:
        return "median share of the known architectures, assumed"
    return PUBLISHED if architecture in PUBLISHED_SHARES else TABULATED
