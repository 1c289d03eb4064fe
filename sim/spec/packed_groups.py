"""Groups of layers with pages of several sizes, as vLLM 0.33 packs them (``_get_packed_kv_cache_groups``).

A block holds the pages of one group side by side, so that pages need no common size: only the group with the most bytes fills it.
GLM-5.3-Flash on 4 ranks, 34 states (S), 11 latent vectors (L), 11 keys of the indexer (K) and 11 rings (R):

    1. bucket    layers of one kind and block size, whatever their pages     S x 34   (L K) x 11   R x 11
    2. repeats   layers of a group, of each size of page: the number above those of buckets of several sizes (11) that
                 fills the groups of all buckets best                        12: S in 3 groups
    3. cap       states must not make a block longer than the attention groups do: 11 pages of states fit beside each other
                 in 11 L and 11 K, so S in 4 groups                          9  9  8  8
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..types.errors import SimulationFault


def packed_groups(kinds: Sequence[Hashable], page_bytes: Sequence[int], fixed: Sequence[bool]) -> list[tuple[int, ...]]:
    """The layers of each group.

    Args:
        kinds: For each layer what it must have in common with others in its group.
        page_bytes: For each layer the bytes of its page.
        fixed: For each layer whether it keeps a state, or a ring, instead of tokens.

    Raises:
        SimulationFault: A kind is to be divided and has not as many layers of each size, or fewer than groups. Layers
            would be in no group; states of several sizes are several kinds, as in vLLM.
    """
    buckets: dict[Hashable, list[int]] = {}
    for layer, kind in enumerate(kinds):
        buckets.setdefault(kind, []).append(layer)
    by_size = [_by_size(bucket, page_bytes) for bucket in buckets.values()]
    # Buckets with as many layers of each size are a repeating pattern.
    balanced = [len({len(layers) for layers in sizes.values()}) == 1 for sizes in by_size]
    repeats = [max(map(len, sizes.values())) for sizes in by_size]
    whole = [most for sizes, most, even in zip(by_size, repeats, balanced, strict=True) if even and len(sizes) > 1]
    each = (
        _best_divisor([most for most, even in zip(repeats, balanced, strict=True) if even], max(whole)) if whole else 0
    )
    numbers = [-(-most // each) if even and each else 1 for most, even in zip(repeats, balanced, strict=True)]
    keeps_state = [fixed[bucket[0]] for bucket in buckets.values()]
    block_bytes = max(
        sum(page * -(-len(layers) // (len(layers) if state else number)) for page, layers in sizes.items())
        for sizes, number, state in zip(by_size, numbers, keeps_state, strict=True)
    )
    groups: list[tuple[int, ...]] = []
    for (kind, bucket), sizes, number, state in zip(buckets.items(), by_size, numbers, keeps_state, strict=True):
        if state:
            fitting = max(1, block_bytes // page_bytes[bucket[0]])
            number = max(number, -(-len(bucket) // fitting))
        if number == 1:
            groups.append(tuple(bucket))
            continue
        counts = {size: len(layers) for size, layers in sizes.items()}
        if len(set(counts.values())) > 1 or min(counts.values()) < number:
            text = ", ".join(f"{count} of {size:,} bytes" for size, count in counts.items())
            raise SimulationFault(
                f"{number} groups of layers of the kind {kind}, which has pages of several sizes: {text}"
            )
        pattern = list(zip(*sizes.values(), strict=True))
        groups += [tuple(layer for repeat in pattern[at::number] for layer in repeat) for at in range(number)]
    return groups


def _by_size(bucket: list[int], page_bytes: Sequence[int]) -> dict[int, list[int]]:
    sizes: dict[int, list[int]] = {}
    for layer in bucket:
        sizes.setdefault(page_bytes[layer], []).append(layer)
    return sizes


def _best_divisor(counts: Sequence[int], least: int) -> int:
    """The number from ``least`` on to multiples of which the counts are raised with the fewest additions; the largest of several."""
    most = max(counts)
    return min(
        range(least, max(least, most) + 1), key=lambda divisor: (sum(-count % divisor for count in counts), -divisor)
    )
