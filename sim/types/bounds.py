"""Types of settings with their bounds.

The bounds are far beyond any real machine, and within the range of int64 ticks and tables.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=2**31)]
Blocks = Annotated[int, Field(ge=1, le=2**26)]
BlockSize = Annotated[int, Field(ge=1, le=65_536)]
Gibibytes = Annotated[float, Field(ge=0, le=65_536)]
Scale = Annotated[float, Field(ge=1e-3, le=1e3)]
Seconds = Annotated[float, Field(ge=0, le=8.0e6)]
