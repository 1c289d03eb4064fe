"""Prices of GPUs: a JSON or TOML file that the user edits.

    currency = "USD"
    [per_gpu_hour]
    h200 = 4.59

``facts/prices.json`` has examples, each with source and date. Where a GPU of a plan has no price, bills cannot be compared: the plan
counts GPUs, and costs are GPU-hours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ...sim.types.errors import SettingError
from ...sim.types.user_files import json_value, text_of, toml_value

#: Seconds of an hour, and number of tokens that a price refers to.
HOUR_S, MILLION = 3600, 1_000_000
#: Largest price of one GPU for an hour, in any currency.
MOST_PRICE = 10**12
#: Origin of the prices in the package.
EXAMPLES = "examples"
#: The currency of a plan that counts GPUs.
GPU_HOURS = "GPU-hours"


@dataclass(frozen=True)
class Prices:
    """Prices of one GPU for an hour.

    Attributes:
        origin: The price file, or a note that the prices are examples.
        currency: That of the prices; ``GPU_HOURS`` where GPUs are counted.
        sources: Source of each price, if the file gives one.
        missing: GPUs of the plan without a price. If there are any, GPUs are counted.
    """

    origin: str
    currency: str
    per_gpu_hour: dict[str, float]
    sources: dict[str, str]

    missing: tuple[str, ...] = ()

    def for_gpus(self, names: Iterable[str]) -> Prices:
        """The prices for a plan with these GPUs; it counts GPUs if one of them has none."""
        missing = tuple(dict.fromkeys(name for name in names if name not in self.per_gpu_hour))
        return replace(self, currency=GPU_HOURS, missing=missing) if missing else self

    def of(self, gpu: str) -> float:
        """Price of one GPU for an hour; 1 where GPUs are counted."""
        return 1.0 if self.missing else self.per_gpu_hour[gpu]

    def line(self) -> str:
        """Where the prices are from; or which are missing, and how to give them."""
        if not self.missing:
            return f"Prices: {self.origin}{', to be edited (--prices)' if self.origin == EXAMPLES else ''}."
        content = json.dumps({"per_gpu_hour": dict.fromkeys(self.missing, 2.5)})
        return (
            f"Prices: none of {' and '.join(self.missing)} ({self.origin}), so that candidates are ranked by GPUs, and costs are"
            f" GPU-hours. For bills write prices for an hour into a file, such as {content}, and give it with --prices."
        )

    def as_dict(self) -> dict[str, dict[str, float | str | None]]:
        """Price and source of each GPU; None of those without."""
        named = (*self.per_gpu_hour, *self.missing)
        return {name: {"price": self.per_gpu_hour.get(name), "source": self.sources.get(name)} for name in named}


def prices(path: Path | None) -> Prices:
    """The prices in a file; None takes the examples.

    Raises:
        SettingError: The file cannot be read, or a price is not a positive number.
    """
    if path is None:
        text = resources.files(__package__).joinpath("facts/prices.json").read_text("utf-8")
        return _checked(json_value(text), EXAMPLES)
    try:
        text = text_of(path, "prices")
        found = toml_value(text) if path.suffix == ".toml" else json_value(text)
    except ValueError as error:
        raise SettingError(
            "prices", str(path), f"is neither JSON nor TOML ({' '.join(str(error).split())}); correct it"
        ) from None
    return _checked(found, str(path))


def _checked(found: Any, origin: str) -> Prices:
    listed = found.get("per_gpu_hour") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise SettingError("prices", origin, "must have per_gpu_hour, a price for each GPU, such as h200 = 4.59")
    sources = found.get("sources", {})
    if not isinstance(sources, dict):
        raise SettingError("prices", origin, f"sources is {sources!r}; it must name the source of each GPU's price")
    currency = found.get("currency", "USD")
    if not isinstance(currency, str) or not currency.strip():
        raise SettingError("prices", origin, f"currency is {currency!r}; it must be a name, such as EUR")
    for gpu, price in listed.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= MOST_PRICE:
            remedy = f"a price must be a number above 0, and at most {MOST_PRICE:,}"
            raise SettingError("prices", origin, f"{gpu} costs {price!r}; {remedy}")
    return Prices(origin, currency, dict(listed), dict(sources))
