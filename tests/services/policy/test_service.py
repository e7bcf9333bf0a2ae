from __future__ import annotations

import pytest
import torch

from services.config.drafter import DrafterConfig
from services.config.placement import PlacementConfig
from services.config.policy import PolicyConfig
from services.config.schema import ClusterConfig, ModelConfig, RolloutConfig, SGLangEngine
from services.config.speculation import FixedSelector, SpeculationConfig, eagle_chain
from services.core.errors import BatchError, ConfigError, DataError, GpuMemoryError, WeightError
from services.core.types import TrainBatch
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.target import TargetModel, target_names
from services.policy.service import build_policy_service

DRAFTS = SpeculationConfig(selector=FixedSelector(strategy=eagle_chain(2)))


def service(folder, speculation=DRAFTS, **policy):
    return build_policy_service(
        ClusterConfig(
            model=ModelConfig(path=str(folder)), policy=PolicyConfig(threads=1, **policy), speculation=speculation
        )
    )


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", False), ("llama", True)])
def test_publish_brings_exactly_what_engines_load(model_folder, kind, tied) -> None:
    folder = model_folder(kind, tied)
    version, tensors = service(folder).publish()
    spec = model_spec(read_config(folder))
    assert version == 0 and tensors.keys() == target_names(spec).keys()
    assert ("lm_head.weight" in tensors) is not tied
    TargetModel(spec, 16, torch.device("cpu"), torch.float32).load(tensors)


def test_published_tensors_are_copies_of_one_version(model_folder, make_rollout) -> None:
    built = service(model_folder(), learning_rate=0.01)
    _, before = built.publish()
    kept = {name: t.clone() for name, t in before.items()}
    batch = TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0))
    report, chunk, hidden = built.train_step(batch)
    version, after = built.publish()
    assert report.policy_version == version == built.version == 1
    assert chunk.policy_version == hidden[0].policy_version == 0
    assert all(torch.equal(before[n], kept[n]) for n in kept), "training wrote into published tensors"
    assert any(not torch.equal(after[n], kept[n]) for n in kept)
    assert all(t.device.type == "cpu" and not t.requires_grad for t in after.values())


def test_without_a_drafter_to_learn_from_them_no_states_are_kept(model_folder, make_rollout) -> None:
    """Nor is anything computed for their sake: rollouts without an advantage are passed over."""
    batch = TrainBatch(1, (make_rollout(0), make_rollout(1), make_rollout(2)), (1.0, -1.0, 0.0))
    counts = [len(service(model_folder(), s).train_step(batch)[2]) for s in (DRAFTS, SpeculationConfig())]
    assert counts == [3, 0]


def test_a_diverged_policy_is_not_published(model_folder) -> None:
    built = service(model_folder())
    with torch.no_grad():
        built._trainer.model.model.norm.weight[0] = float("nan")
    with pytest.raises(WeightError, match="NaN"):
        built.publish()


def test_bfloat16_keeps_float32_weights_and_publishes_bfloat16(model_folder, make_rollout) -> None:
    config = ClusterConfig(
        model=ModelConfig(path=str(model_folder()), dtype="bfloat16", device="cpu"),
        policy=PolicyConfig(threads=1),
        speculation=DRAFTS,
    )
    built = build_policy_service(config)
    report, _, hidden = built.train_step(TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0)))
    assert report.policy_version == 1 and hidden[0].hidden.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in built._trainer.model.parameters())
    assert all(t.dtype == torch.bfloat16 for t in built.publish()[1].values())


def test_reference_model_only_when_asked_for(model_folder) -> None:
    folder = model_folder()
    assert service(folder)._trainer._reference is None
    assert service(folder, kl_coef=0.1)._trainer._reference is not None


def test_missing_model_folder_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match="no model at"):
        service(tmp_path / "nowhere")


@pytest.mark.parametrize(("drafter", "width"), [({}, None), ({"method": "eagle3"}, 96)])
def test_aux_states_are_collected_for_eagle3_only(model_folder, make_rollout, drafter, width) -> None:
    config = ClusterConfig(
        model=ModelConfig(path=str(model_folder(layers=5)), dtype="bfloat16", device="cpu"),
        policy=PolicyConfig(threads=1),
        drafter=DrafterConfig(**drafter),
        speculation=DRAFTS,
        rollout=RolloutConfig(engine=SGLangEngine()),
        placement=PlacementConfig(gpus_per_slot=1, policy_gpus=1),
    )
    _, _, hidden = build_policy_service(config).train_step(
        TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0))
    )
    assert len(hidden) == 2
    for h in hidden:
        if width is None:
            assert h.aux is None
        else:
            assert h.aux.shape == (len(h.input_ids), width) and h.aux.dtype == torch.bfloat16


def test_a_target_too_shallow_for_eagle3_is_told(model_folder) -> None:
    config = ClusterConfig(model=ModelConfig(path=str(model_folder())), drafter=DrafterConfig(method="eagle3"))
    with pytest.raises(ConfigError, match=r"has 2 layers: set drafter\.method: eagle"):
        build_policy_service(config)


def test_a_step_is_trained_on_once(model_folder, make_rollout) -> None:
    """A coordinator that took over may not know what was applied before it."""
    built = service(model_folder())
    batch = TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0))
    assert built.steps_done == 0
    built.train_step(batch)
    with pytest.raises(BatchError, match="has trained on step 1"):
        built.train_step(batch)
    built.train_step(TrainBatch(2, (make_rollout(0), make_rollout(1)), (0.0, 0.0)))
    assert built.steps_done == 2 and built.version == 1, "no signal: the step counts, the version stays"


@pytest.mark.parametrize("thrifty", [False, True])
def test_a_step_that_does_not_fit_the_gpu_says_what_makes_it_smaller(model_folder, make_rollout, thrifty) -> None:
    settings = {"activation_checkpointing": thrifty, "reshard_after_forward": thrifty, "micro_batch_tokens": 512}
    built = service(model_folder(), **settings)

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 334.00 MiB. GPU 0 has 139.80 GiB.")

    built._trainer.model.model.norm.register_forward_pre_hook(full)
    with pytest.raises(
        GpuMemoryError, match=r"micro_batch_tokens \(512\).*policy_workers \(CUDA out of memory\)"
    ) as told:
        built.train_step(TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0)))
    for setting in ("activation_checkpointing: true", "reshard_after_forward: true"):
        assert (setting in str(told.value)) is not thrifty
    assert built.steps_done == built.version == 0


def colocated(folder, resident=False):
    return build_policy_service(
        ClusterConfig(
            model=ModelConfig(path=str(folder), device="cpu"),
            policy=PolicyConfig(threads=1, learning_rate=0.01),
            placement=PlacementConfig(policy="colocated", resident=resident),
        )
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_colocated_policy_begins_away_and_publishes_from_there_what_a_split_one_does(
    model_folder, make_rollout, tied
) -> None:
    folder = model_folder("qwen3", tied)
    away, there = colocated(folder), service(folder, learning_rate=0.01)
    batch = TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0))
    for _ in range(2):
        assert away.switch_memory(True) is None, "it is away"
        mine, theirs = away.publish(), there.publish()
        assert mine[0] == theirs[0] and mine[1].keys() == theirs[1].keys()
        assert all(torch.equal(mine[1][name], theirs[1][name]) for name in mine[1])
        back = away.switch_memory(False)
        assert back is not None and not back.released and back.num_bytes > 0 and back.seconds >= 0
        if not away.steps_done:
            away.train_step(batch)
            there.train_step(batch)
        assert away.switch_memory(True).released


def test_a_resident_policy_stays_where_it_is(model_folder, make_rollout) -> None:
    stays = colocated(model_folder(), resident=True)
    assert stays.switch_memory(False) is None
    assert stays.train_step(TrainBatch(1, (make_rollout(0), make_rollout(1)), (1.0, -1.0)))[0].policy_version == 1


def test_no_room_on_the_shared_gpu_is_said_with_its_remedy(model_folder) -> None:
    built = colocated(model_folder())

    def full() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    built._trainer.residence.come_back = full
    with pytest.raises(GpuMemoryError, match=r"lower rollout\.engine\.mem_fraction.*CUDA out of memory"):
        built.switch_memory(False)
