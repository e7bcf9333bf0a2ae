from __future__ import annotations

import pytest

from deploy.k8s.quantity import amount
from services.core.errors import ConfigError


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("500m", 0.5), (2, 2.0), ("4Gi", 4 * 2**30), ("1k", 1000.0), ("1.5", 1.5), ("2e3", 2000.0), ("1Ki", 1024.0)],
)
def test_amounts(quantity: str | int, value: float) -> None:
    assert amount(quantity) == value


def test_what_is_no_amount_is_named() -> None:
    with pytest.raises(ConfigError, match="'4 GB' is not an amount"):
        amount("4 GB")
