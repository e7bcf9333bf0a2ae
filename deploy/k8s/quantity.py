"""Kubernetes' amounts: 500m, 2, 4Gi."""

from __future__ import annotations

import re

from services.core.errors import ConfigError

_QUANTITY = re.compile(r"^([0-9.]+(?:[eE][-+]?[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
_FACTORS = {
    "m": 1e-3,
    **{unit: 1000.0 ** (i + 1) for i, unit in enumerate("kMGTP")},
    **{f"{unit}i": 1024.0 ** (i + 1) for i, unit in enumerate("KMGTP")},
}


def amount(quantity: str | int | float) -> float:
    match = _QUANTITY.match(str(quantity))
    if match is None:
        raise ConfigError(f"{quantity!r} is not an amount such as 2, 500m or 4Gi")
    return float(match[1]) * _FACTORS.get(match[2] or "", 1.0)
