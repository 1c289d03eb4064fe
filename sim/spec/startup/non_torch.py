"""Memory of a GPU that is neither weights nor activations: CUDA's modules and libraries, NCCL, buffers that ranks share.

vLLM counts what is there after the profiled step and was not at the worker's start. That start is before NCCL's until 0.10, and after it since
0.11 (``init_device`` of ``gpu_worker.py``). Since 0.27 it is all that is consumed beside the weights (``total_consumed`` of
``memory_profiling``), so that three parts of torch's memory count too:

    model runner     the second one: for each of ``max_num_seqs`` a count in 32 bits of each token of the vocabulary (``output_bin_counts`` of its
                     ``Penalties``, "can be very large"), and two masks of a bit, one of them for each draft as well; the drafter's hidden
                     states; with an encoder the embeddings of a step. The first one: the embeddings of a step
    held embedding   the copy of the embedding with which Inductor tries kernels without a compile cache (``activations.py``). It is freed,
                     but torch cannot give the segment back if another tensor is placed in it that stays: cuBLAS's workspace or the
                     experts'. Of 24 boots of text models on one GPU half hold it, within 0.1 GiB of its size

No formula gives the rest: it is read off logs, as the low, the likely and the high GiB by release, link and compute capability. Ranks on Hopper
and later cards with NVLink share buffers of NVLS and of fused all-reduces; others do not, nor do pipeline stages of one rank.

Sources: tools/startups.json; 28 boots of 0.29 and 0.30 on RTX 4090, L4, A6000, A100 and H100 (mondegreens/apron,
kv-budget-residuals.md), which also traced the counts; ``gpu/sample/penalties.py``, ``gpu/structured_outputs.py``, ``gpu/mm/encoder_runner.py``
and ``gpu/spec_decode`` in the wheels of 0.27 to 0.33, ``gpu_model_runner.py`` in that of 0.27.
"""

from __future__ import annotations

from typing import NamedTuple

from ..gpu import GIB, GpuSpec
from .activations import Phases, copied_embedding_bytes, cublas_bytes, phases
from .estimate import Estimate
from .launch import Launch

_ALONE, _PAIR, _PCIE, _NVLINK, _NVLS = "alone", "pcie pair", "pcie", "nvlink", "nvls"
_HOPPER = 9


class Entry(NamedTuple):
    """GiB of one GPU, and what they come from: logged sizes, or (implied) what a logged KV cache leaves beside the parts that are computed."""

    low: float
    likely: float
    high: float
    logs: str


#: From which minor version on, by what links the ranks and the least compute capability, until a later version has an entry of that kind.
SIZES: tuple[tuple[int, dict[tuple[str, int], Entry]], ...] = (
    (0, {
        (_ALONE, 0): Entry(0.0, 0.02, 0.13, "0.02 RTX 4090 (0.10); implied: 0.04 to 0.06 A100 (0.10.1)"),
        (_ALONE, 9): Entry(0.07, 0.13, 0.15, "0.07 H100 (0.10.2); 0.13 as since 0.11"),
        (_PAIR, 0): Entry(0.05, 0.2, 0.75, "as of more ranks"),
        (_PCIE, 0): Entry(0.05, 0.2, 0.75, "0.21 8 x L40S (0.10.2)"),
        (_NVLINK, 0): Entry(0.05, 0.2, 1.0, "implied: 0.07 2 x A100, 0.1 4 x A100 on four nodes (0.10.1)"),
        (_NVLS, 9): Entry(1.0, 1.6, 2.2, "1.38 2 x H200, 1.84 4 x H100 (0.10.2); implied: 2.2 4 x H100 (0.9 or 0.10)"),
    }),
    (11, {
        (_ALONE, 0): Entry(0.0, 0.02, 0.13, "implied: 0 to 0.1 RTX 3050 (0.11), A100 40 GB (0.15.1), RTX 3090 (0.17.1)"),
        (_ALONE, 9): Entry(0.02, 0.13, 0.15, "0.13 to 0.14 in eight boots of H100 (0.11)"),
        (_PAIR, 0): Entry(0.05, 0.2, 0.75, "implied: 0.04 2 x L40S (0.16), 0 2 x 8.9 (0.17)"),
        (_NVLINK, 0): Entry(0.05, 0.2, 1.0, "as up to 0.10; implied: 0.8 4 x A800 (0.13)"),
        (_NVLS, 9): Entry(0.4, 0.55, 1.9, "0.54 and 0.55 2 x H100 (0.11); the most is 0.10's"),
    }),
    (18, {
        (_ALONE, 0): Entry(0.05, 0.13, 0.3, "implied: 0.15 V100 (0.18), 0.14 L40S (0.18), 0.1 A40 (0.26)"),
        (_ALONE, 9): Entry(0.07, 0.22, 0.3, "0.22 H100 (0.26), 0.07 on 15.55 GiB (0.26); implied: 0.24 to 0.26 H100 (0.19, nine runs)"),
        (_PAIR, 0): Entry(0.05, 0.2, 0.75, "implied: 0.2 2 x RTX 3090 (0.21)"),
        (_PCIE, 0): Entry(0.05, 0.2, 0.75, "implied: 0.22 4 x L40S (0.19)"),
        (_NVLINK, 0): Entry(0.05, 0.2, 1.0, "implied: 0.5 4 x A100 (0.22)"),
        (_NVLS, 9): Entry(0.4, 2.1, 2.3, "2.06 to 2.21 in 13 boots of one image on 2 and 4 x H100 (0.19); implied: 2.2 4 x H100 (0.20), 2.3 8 x H200"
                          " (0.21), 0.4 8 x H200 (0.19.1)"),
    }),
    (22, {
        (_NVLS, 9): Entry(0.4, 0.8, 2.2, "0.6 4 x H100 (0.26, vllm-project/vllm#48601), 0.95 4 x GB200 (0.26); the most is 0.18's"),
    }),
    (27, {
        (_ALONE, 0): Entry(0.05, 0.11, 0.16, "0.05 to 0.16 in 14 boots of RTX 4090, L4, A6000, A100 (0.29, 0.30)"),
        (_ALONE, 9): Entry(0.21, 0.3, 0.39, "0.21 to 0.39 in boots of H100 (0.29, 0.30) and RTX 5090 (0.28)"),
        (_PAIR, 0): Entry(0.02, 0.2, 0.6, "implied: 0.2 2 x RTX 3090 (0.27), 0.04 2 x RTX PRO 6000 (0.27.1), 0.45 2 x RTX 5090 (0.27)"),
        (_PCIE, 0): Entry(0.5, 0.85, 1.2, "implied: 0.83 and 0.84 4 x L4, 0.6 as four stages (0.29), 1.1 4 x RTX PRO 6000 (0.27)"),
        (_NVLINK, 0): Entry(0.05, 0.1, 0.8, "0.05 and 0.1 in boots of 2 x A100 (0.29)"),
        (_NVLS, 9): Entry(0.5, 1.3, 1.6, "implied: 1.43 4 x H200 (0.28 or 0.29); the least is 0.18's"),
    }),
)  # fmt: skip
#: GiB that engines which exchange tokens of experts take beside that, by logs of two, three and four engines on L4s under 0.29 (implied: 1.5, 1.45 and
#: 1.65); faster links have no log.
_EXCHANGE_PCIE, _EXCHANGE = (0.5, 1.5, 1.8), (0.0, 0.0, 1.5)


def link(gpu: GpuSpec, ranks: int) -> str:
    """What links the ranks: "alone", "pcie pair", "pcie" of more, "nvlink", or "nvls" where the switches of NVLink can add up (compute
    capability 9 and later). Two ranks on PCIe have kernels of vLLM's own that reduce, more have NCCL's."""
    if ranks == 1:
        return _ALONE
    if not gpu.has_nvlink:
        return _PAIR if ranks == 2 else _PCIE
    return _NVLS if (gpu.major or 0) >= 9 else _NVLINK


#: GiB by which unified memory changes what a profile finds: the engine's own memory on the CPU, which is in it (vLLM takes what the operating
#: system calls available), and other programs, either way. Nine starts on DGX Sparks have, beside their logged weights, -2.9, -2.4, -2.1, 0.4, 1.9,
#: 2.7, 3.0, 4.5 and 5.6; three of one line alone differ by 3.4.
_SHARED = (-2.4, 1.9, 4.5)
#: GiB that are in use when a worker starts: the driver and CUDA's context, with several ranks NCCL's (since 0.11; the logs on PCIe are of two
#: servers of four RTX PRO 6000), of unified memory the operating system's. A GeForce or an RTX PRO may show a desktop (30.2 to 30.5 of 31.4 to 31.8 GiB are free on RTX 5090; one RTX 3090 had
#: 1.7 GiB of others beside CUDA's context, TheBuccaneer/vllm-offload-profiles).
_ONE, _SEVERAL_PCIE, _SEVERAL, _UNIFIED = (0.17, 0.51, 0.65), (0.5, 0.99, 1.2), (0.5, 1.55, 2.2), (4.0, 9.4, 17.0)
_MOST_BESIDE_A_DESKTOP = 1.7
#: The first release that counts all that is consumed.
_FIRST_CONSUMED = (0, 27)
#: Formats of which all layers are multiplied by kernels of vLLM's own.
_OWN_KERNELS = ("awq", "gptq", "w4a16", "w4a16-g32")


def used_at_start(launch: Launch) -> Estimate:
    """What is in use on each GPU before weights are loaded, as logged or by what logs of other servers have."""
    if launch.used_at_start_bytes is not None:
        return Estimate(*[launch.used_at_start_bytes] * 3)
    ranks, sizes = launch.num_gpus * launch.deployment.data_parallel, _ONE
    if launch.gpu.unified_memory:
        sizes = _UNIFIED
    elif ranks > 1 and launch.release.since >= (0, 11):
        sizes = _SEVERAL if launch.gpu.has_nvlink else _SEVERAL_PCIE
    low, likely, high = sizes
    if launch.gpu.name.startswith("rtx-"):
        high = max(high, _MOST_BESIDE_A_DESKTOP)
    return Estimate(*(round(size * GIB) for size in (low, likely, high)))


def non_torch_bytes(launch: Launch, layers: range, last: bool) -> Estimate:
    """What is outside of torch on each GPU of a pipeline stage, since 0.27 with what torch holds beside the weights.

    Args:
        last: Whether the stage samples.
    """
    found = _libraries(launch)
    if launch.release.since < _FIRST_CONSUMED:
        return found
    kept, copied = _runner_bytes(launch, last), 0
    if layers.start == 0 and not launch.is_compiled:
        copied = copied_embedding_bytes(launch)
    likely = _held_bytes(launch, phases(launch, layers, last), copied) if copied else 0
    return Estimate(found.low + kept, found.likely + kept + likely, found.high + kept + copied)


def _libraries(launch: Launch) -> Estimate:
    """What CUDA, its libraries and NCCL hold."""
    ranks = launch.num_gpus * launch.deployment.data_parallel
    sizes = {kind: entry for since, some in SIZES if (0, since) <= launch.release.since for kind, entry in some.items()}
    linked, major = link(launch.gpu, ranks), launch.gpu.major or 0
    if linked == _NVLS and launch.tensor_parallel * launch.deployment.data_parallel == 1:
        linked = _NVLINK
    least = max(least for name, least in sizes if name == linked and least <= major)
    parts = [sizes[linked, least][:3]]
    if launch.gpu.unified_memory:
        parts.append(_SHARED)
    if launch.model.experts and launch.deployment.data_parallel > 1 and launch.release.since >= _FIRST_CONSUMED:
        parts.append(_EXCHANGE if launch.gpu.has_nvlink else _EXCHANGE_PCIE)
    low, likely, high = map(sum, zip(*parts, strict=True))
    buffers = launch.all_to_all_bytes if launch.model.experts else 0
    return Estimate(*(round(size * GIB) + buffers for size in (low, likely, high)))


def _runner_bytes(launch: Launch, last: bool) -> int:
    """What the model runner allocates after the weights, and keeps."""
    model, sequences = launch.model, launch.max_num_seqs
    embeddings = launch.element_bytes * launch.max_num_batched_tokens * model.hidden_size
    if not launch.second_runner:
        return embeddings
    drafts = 0 if launch.speculative is None else launch.speculative.num_speculative_tokens
    kept = embeddings if model.encoder else 0
    if drafts and last:
        kept += embeddings * (1 + (model.encoder is not None))
    return kept + (4 * sequences * (model.vocab_size + (2 + drafts) * -(-model.vocab_size // 32)) if last else 0)


def _held_bytes(launch: Launch, profile: Phases, copied: int) -> int:
    """What torch likely keeps of the segment of the embedding's copy, beside the activations.

    The experts' workspace is placed in it if it fits; it is among the activations, unless compilation is their peak. Else it is kept where cuBLAS's
    workspace does not fit a freed output of the embedding. The first matrix product allocates that. On Hopper and later cards both
    outputs are in use by then, unless kernels of vLLM's own multiply all matrices of the layers, so that the output head is the first.
    Right for 22 of 24 boots.
    """
    if 0 < profile.workspace <= copied:
        return copied if profile.peak == profile.compilation else copied - profile.workspace
    output = launch.element_bytes * launch.max_num_batched_tokens * launch.model.hidden_size
    is_held = output < cublas_bytes(launch.gpu)
    if (launch.gpu.major or 0) >= _HOPPER:
        is_held = is_held or launch.deployment.quantization not in _OWN_KERNELS
    return copied if is_held else 0
