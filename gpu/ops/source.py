"""The kernels' source: one text per kernel, with the project's own headers inlined.

CuPy's disk cache and the cache of CPU builds use the compiled text as key; they would not notice changes of an included
file.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "kernels"
_INCLUDE = re.compile(r'^#include "(?P<name>[\w./]+)"$')
#: The C++ type of each cache dtype.
SCALARS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
HEAD_DIMS = (64, 80, 96, 112, 120, 128, 160, 192, 256)
#: Caches of fp8 (e4m3): names of the dtype, of which the second is the same bytes in libraries without it; the dtypes of queries
#: over them; and head_dims with rows of whole loads of 16 bytes.
FP8_CACHES = ("float8_e4m3fn", "uint8")
FP8_QUERIES = ("float16", "bfloat16")
FP8_HEAD_DIMS = tuple(head_dim for head_dim in HEAD_DIMS if head_dim % 16 == 0)
#: Rules for a token's slot: from a block table, the same with one look-up a tile, or relative to the sequence's first slot.
SLOT_RULES = ("PagedSlots", "PagedTiles", "ContiguousSlots")
#: ``PagedTiles`` needs blocks of a multiple of so many tokens.
TILE_TOKENS = 16
#: Scalars of a row in shared memory are a multiple of this: the columns of a matrix product.
WIDTH_STEP = 16
#: The same for fp8 on tensor cores, where a load of fragments has two such.
FP8_WIDTH_STEP = 32
#: Warps of a block of the decode kernel.
DECODE_WARPS = 4
#: Shared memory of what a block of the decode kernel has left to do: ``Work`` of ``balance.cuh``, in whole loads.
WORK_BYTES = 32
#: Query heads that a block can serve; larger groups use several blocks. 16-bit types use tensor cores for 8 and 16.
GROUP_TILES = {"float16": (1, 2, 8, 16), "bfloat16": (1, 2, 8, 16), "float32": (1, 2, 4, 8)}
#: Latent attention (MLA): scalars of a cached vector, the first of them that are the value, too, and dtypes.
LATENT_KEY_DIM, LATENT_DIM, LATENT_DTYPES = 576, 512, ("bfloat16", "float16")
#: Query heads of a block of latent attention; 64 need more shared memory than some cards have.
LATENT_HEADS = (16, 32, 64)
#: Tokens of a tile of latent attention, its most stages, and shared memory that CUDA adds to every block.
LATENT_TILE, _LATENT_STAGES, _SYSTEM_SHARED_BYTES = 32, 4, 1024


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel instance.

    Attributes:
        text: The complete source text.
        expression: Its C++ name with template arguments.
    """

    text: str
    expression: str


@functools.cache
def inlined(path: Path) -> str:
    """The text of a source file, with each header of the project in place of its first ``#include``."""
    return "\n".join(_lines(path, set())) + "\n"


def _lines(path: Path, seen: set[Path]) -> list[str]:
    seen.add(path)
    # Compiler messages then name the original file.
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        include = _INCLUDE.match(line)
        if line == "#pragma once":
            lines.append("")
        elif not include:
            lines.append(line)
        else:
            header = path.parent / include["name"]
            lines += [*([] if header in seen else _lines(header, seen)), f'#line {number + 1} "{path.name}"']
    return lines


def decode_attention(dtype: str, head_dim: int, group: int, slots: str = "PagedSlots", *, fp8: bool = False) -> Kernel:
    """Attention of ``group`` query heads per KV head.

    Args:
        dtype: Of the queries, and of the cache unless ``fp8``.
        head_dim: Head dimension.
        group: Query heads per KV head.
        slots: One of :data:`SLOT_RULES`.
        fp8: Whether the cache is of fp8.
    """
    name = "decode_attention_fp8" if fp8 else "decode_attention"
    return attention(f"{name}<{SCALARS[dtype]}, {head_dim}, {group_tile(dtype, group)}, {slots}>")


def reshape_and_cache_fp8(dtype: str) -> Kernel:
    """The kernel that writes keys and values of ``dtype`` into caches of fp8."""
    return Kernel(_kernel_text("reshape_and_cache_fp8"), f"reshape_and_cache_fp8<{SCALARS[dtype]}>")


def _on_tensor_cores(dtype: str, group: int) -> bool:
    return dtype != "float32" and group_tile(dtype, group) >= 8


def group_tile(dtype: str, group: int) -> int:
    """Query heads that one block serves, for ``group`` query heads per KV head."""
    tiles = GROUP_TILES[dtype]
    return next((tile for tile in tiles if tile >= group), tiles[-1])


def width(head_dim: int) -> int:
    """Scalars of a row in shared memory: ``head_dim``, padded with zeros to a multiple of :data:`WIDTH_STEP`."""
    return -(-head_dim // WIDTH_STEP) * WIDTH_STEP


def decode_shared_bytes(dtype: str, head_dim: int, group: int, *, fp8: bool = False) -> int:
    """Dynamic shared memory of a block of :func:`decode_attention`: the ring buffers of its warps or their results, and its work."""
    tile = group_tile(dtype, group)
    if _on_tensor_cores(dtype, group):
        row_bytes = -(-head_dim // FP8_WIDTH_STEP) * FP8_WIDTH_STEP if fp8 else width(head_dim) * 2
        used = DECODE_WARPS * 16 * 2 * row_bytes  # keys and values of 16 tokens
    else:
        used = 2 * 16 * 1024  # as FmaDecoder::Ring
    return max(used, DECODE_WARPS * tile * (head_dim + 2) * 4) + WORK_BYTES


@dataclass(frozen=True, slots=True)
class LatentBlock:
    """A block of threads of latent attention; ``latent_attention.cu`` defines the same values.

    Attributes:
        heads: Query heads that it serves.
        stages: Tiles of tokens in its ring: one is read, two with 64 heads, and the others are in flight.
    """

    heads: int
    stages: int

    @property
    def threads(self) -> int:
        return 128 if self.heads == 16 else 256

    @property
    def lag(self) -> int:
        """Tiles by which its outputs are behind its scores."""
        return int(self.heads == 64)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring; and of each head four parts of scores, weights and a factor a tile, and two floats."""
        scores, weights = 4 * 4 * (LATENT_TILE + 8), 2 * (LATENT_TILE + 8) + 4
        ring = self.stages * LATENT_TILE * (2 * LATENT_KEY_DIM + 16)
        return ring + self.heads * (scores + (1 + self.lag) * weights + 8)


def latent_blocks(shared_bytes: int) -> tuple[LatentBlock, ...]:
    """The blocks of latent attention for a device with ``shared_bytes`` on a multiprocessor, by rising ``heads``.

    A block of 16 heads has room for a second one beside it where two stages are enough for that. The others are alone,
    because of their registers.
    """
    blocks = []
    for heads in LATENT_HEADS:
        least = LatentBlock(heads, 2 + (heads == 64))
        room = shared_bytes // 2 if heads == 16 and _fits(least, shared_bytes // 2) else shared_bytes
        fitting = (LatentBlock(heads, stages) for stages in range(_LATENT_STAGES, least.stages - 1, -1))
        blocks += [block for block in fitting if _fits(block, room)][:1]
    return tuple(blocks)


def _fits(block: LatentBlock, shared_bytes: int) -> bool:
    return block.shared_bytes + _SYSTEM_SHARED_BYTES <= shared_bytes


def latent_attention(dtype: str, block: LatentBlock) -> Kernel:
    """Attention over latent vectors (MLA)."""
    return Kernel(
        _kernel_text("latent_attention"), f"latent_attention<{SCALARS[dtype]}, {block.heads}, {block.stages}>"
    )


def merge_latent(dtype: str) -> Kernel:
    """The kernel that merges the partitions of :func:`latent_attention`."""
    return Kernel(_kernel_text("latent_attention"), f"merge_latent<{SCALARS[dtype]}>")


def prefill_attention(dtype: str, head_dim: int, *, fp8: bool = False) -> Kernel:
    """Causal attention of new tokens over a paged cache; ``dtype`` is that of the queries, and of the cache unless ``fp8``."""
    cache = ", Fp8, const float *, const float *" if fp8 else ""
    return Kernel(_kernel_text("prefill"), f"prefill_attention<{SCALARS[dtype]}, {head_dim}{cache}>")


def merge_prefill(dtype: str, head_dim: int) -> Kernel:
    """The kernel that merges the partitions of :func:`prefill_attention`."""
    return Kernel(_kernel_text("prefill"), f"merge_prefill<{SCALARS[dtype]}, {head_dim}>")


def plain(name: str) -> Kernel:
    """A kernel without templates, in the file of its name."""
    return Kernel(_kernel_text(name), name)


def attention(expression: str) -> Kernel:
    """An instance of the attention kernels, by its name in C++."""
    return Kernel(_kernel_text("paged_attention"), expression)


@functools.cache
def _kernel_text(name: str) -> str:
    return inlined(KERNELS / f"{name}.cu")
