"""Named random streams from one seed: extra draws from one stream leave all other streams unchanged."""

from __future__ import annotations

import hashlib

import numpy as np

from ...sim.types.errors import SettingError


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator of the stream ``name``: the child of ``SeedSequence(seed)`` keyed by the name's SHA-256.

    The same seed and name give the same numbers in every process (Python's ``hash`` would not).

    Raises:
        SettingError: the seed is negative.
    """
    if seed < 0:
        raise SettingError("seed", seed, "must be 0 or more")
    key = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    sequence = np.random.SeedSequence(seed, spawn_key=tuple(key.tolist()))
    return np.random.Generator(np.random.PCG64(sequence))
