"""What a policy trainer offers: the weights of its version, and what drafter trainers take from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.config.weights import WeightsConfig
from services.core.errors import TransferError, WeightError
from services.policy.publisher import Publisher
from services.weights.send import Outbox
from tests.services.policy.test_service import service

HEAD = ("model.embed_tokens.weight", "lm_head.weight")


def test_an_offer_is_of_the_published_weights(model_folder: Callable[[], Path]) -> None:
    built = service(model_folder())
    publisher = Publisher(built, Outbox(WeightsConfig(), built.device), HEAD)
    version, tensors = built.publish()
    told, offer, head = publisher.offer("sender")
    assert told == offer.version == version and offer.sender == "sender"
    assert offer.manifest.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    assert head.keys() == {name for name in HEAD if name in tensors}
    assert all(torch.equal(t, tensors[name]) for name, t in head.items())
    copy = publisher.copy_of(version)
    assert copy.keys() == tensors.keys() and all(torch.equal(t, tensors[name]) for name, t in copy.items())
    with pytest.raises(TransferError, match="superseded"):
        publisher.copy_of(version + 1)


def test_a_diverged_policy_is_not_offered(model_folder: Callable[[], Path]) -> None:
    built = service(model_folder())
    publisher = Publisher(built, Outbox(WeightsConfig(), built.device), HEAD)
    publisher.offer("sender")
    next(built._trainer.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(WeightError, match="NaN"):
        publisher.offer("sender")
    with pytest.raises(TransferError, match="the next one is being published"):
        publisher.copy_of(0)
