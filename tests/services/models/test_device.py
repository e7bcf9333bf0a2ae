from __future__ import annotations

import pytest
import torch

from services.models.device import tensor_cores


@pytest.mark.parametrize("before", ["highest", "medium"])
@pytest.mark.parametrize(("device", "inside"), [("cuda", "high"), ("cpu", None)])
def test_the_precision_of_matrices_is_changed_on_a_gpu_alone_and_for_a_while(
    before: str, device: str, inside: str | None
) -> None:
    torch.set_float32_matmul_precision(before)
    try:
        with pytest.raises(ZeroDivisionError), tensor_cores(torch.device(device)):
            assert torch.get_float32_matmul_precision() == (inside or before)
            _ = 1 / 0
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")
