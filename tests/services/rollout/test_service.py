"""The rollout server: epochs, reports, strategies by name, and the service as config builds it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from services.config.schema import ClusterConfig, DataConfig, ModelConfig, NativeEngine, RolloutConfig, RolloutSampling
from services.config.speculation import AdaptiveSelector, FixedSelector, SpeculationConfig, StrategyConfig
from services.core.errors import ConfigError, RequestError, StaleEpochError, WeightError
from services.core.gain import Workload
from services.core.selector import SelectorState
from services.core.types import SamplingParams, ServedVersions
from services.models.tokenizer import character_tokenizer
from services.rollout.service import RolloutService, build_rollout_service
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import GREEDY, check_all, group

CHARACTERS = "abcdefghijklmnopqrstuvwxyz=#"
MODEL = tiny_model("qwen3", 32, 0, 2.0)
EAGLE = StrategyConfig(drafter="eagle", depth=2, num_draft_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(path)
    character_tokenizer(CHARACTERS).save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


def config(folder: Path, strategy: StrategyConfig = EAGLE, **speculation: object) -> ClusterConfig:
    return ClusterConfig(
        model=ModelConfig(path=str(folder), device="cpu"),
        data=DataConfig(max_prompt_tokens=16),
        rollout=RolloutConfig(
            group_size=2, engine=NativeEngine(max_running=4, max_len=48), sampling=RolloutSampling(max_tokens=16)
        ),
        speculation=SpeculationConfig(selector=FixedSelector(strategy=strategy), **speculation),  # type: ignore[arg-type]
    )


@pytest.fixture
def service(folder: Path) -> RolloutService:
    built = build_rollout_service(config(folder), 3)
    built.open_epoch(1)
    built.load_policy(0, tensors_of(MODEL), 1)
    built.load_drafter(0, random_drafter(spec_of(MODEL)), 1)
    return built


def drain(service: RolloutService, epoch: int, budget_s: float = 0.0) -> tuple[dict, int]:
    """Advance until nothing is left: the rollouts by id, and the sum of new_tokens over all reports."""
    found, tokens = {}, 0
    for _ in range(500):
        report = service.advance(budget_s, epoch)
        tokens += report.new_tokens
        assert not {r.rollout_id for r in report.finished} & found.keys()
        found |= {r.rollout_id: r for r in report.finished}
        if not report.running and not report.waiting:
            return found, tokens
    raise AssertionError("the service does not come to an end")


@pytest.mark.parametrize("budget_s", [0.0, 0.01, 60.0])
def test_reports_count_every_token_once(service: RolloutService, budget_s: float) -> None:
    works = [group((1, 5 + n, 9), 2, SamplingParams(max_tokens=3 + 4 * n), first_seed=n) for n in range(4)]
    service.submit(works, 1)
    found, tokens = drain(service, 1, budget_s)
    assert len(found) == 8 and tokens == sum(len(r.response_ids) for r in found.values())
    assert all(r.server == "rollout-3" for r in found.values())


def test_a_report_tells_what_runs_and_waits(service: RolloutService) -> None:
    service.submit([group((1, 2, n), 2) for n in range(3, 6)], 1)
    report = service.advance(0.0, 1)
    assert len(report.running) == 4 and report.waiting == 2 and not report.finished
    assert report.new_tokens == sum(r.num_tokens for r in report.running) >= 4
    assert all(r.acceptance.verify_steps == 1 for r in report.running)
    assert report.strategy == "eagle_2_1_3" and report.versions == ServedVersions(0, 0) and report.busy_s > 0
    found, _ = drain(service, 1, 60.0)
    check_all(MODEL, found)
    idle = service.advance(0.0, 1)
    assert (idle.finished, idle.running, idle.waiting, idle.new_tokens) == ((), (), 0, 0)


def test_work_that_comes_with_an_order_to_advance_runs_at_once(service: RolloutService) -> None:
    works = [group((1, 2, n), 2) for n in range(3, 5)]
    with pytest.raises(StaleEpochError):
        service.submit_and_advance(works, 0.0, 0)
    assert service.advance(0.0, 1).new_tokens == 0, "refused work was queued"
    report = service.submit_and_advance(works, 0.0, 1)
    assert len(report.running) == 4 and report.new_tokens >= 4
    found, _ = drain(service, 1, 60.0)
    check_all(MODEL, found)


def test_work_that_comes_twice_runs_once(service: RolloutService) -> None:
    works = [group((1, 2, n), 2) for n in range(3, 6)]
    service.submit(works, 1)
    service.submit(works[1:], 1)
    found, _ = drain(service, 1)
    assert len(found) == 6
    service.submit(works[:1], 1)  # told, so it may be wanted again
    again, _ = drain(service, 1)
    assert len(again) == 2
    service.submit(works[:1], 1)
    service.advance(0.0, 1)
    back = service.withdraw([f"{works[0].group_id}#0"], 1)
    service.submit([replace(works[0].subset({0}), partials=back)], 1)  # handed back, so it may return
    found, _ = drain(service, 1)
    assert len(found) == 2
    check_all(MODEL, found)


@pytest.mark.parametrize("epoch", [-1, 0, 2])
def test_messages_of_another_epoch_are_refused_and_do_nothing(service: RolloutService, epoch: int) -> None:
    service.submit([group((1, 2, 3), 2)], 1)
    other = tiny_model("qwen3", 32, 1, 2.0)
    for call in (
        lambda: service.submit([group((4, 5), 1)], epoch),
        lambda: service.advance(0.0, epoch),
        lambda: service.load_policy(9, tensors_of(other), epoch),
        lambda: service.load_drafter(9, random_drafter(spec_of(MODEL), seed=9), epoch),
        lambda: service.set_strategy("off", epoch),
    ):
        with pytest.raises(StaleEpochError, match=f"epoch {epoch} at a server in epoch 1: renew the lease"):
            call()
    found, _ = drain(service, 1)
    check_all(MODEL, found)
    assert len(found) == 2 and all(r.policy_versions == (0,) for r in found.values())


def test_a_new_epoch_drops_what_ran_and_keeps_the_weights(service: RolloutService) -> None:
    service.submit([group((1, 2, n), 2) for n in range(3, 6)], 1)
    service.advance(0.0, 1)
    assert service.open_epoch(1) == ServedVersions(0, 0)
    assert len(service.advance(0.0, 1).running) == 4, "the same epoch again drops nothing"
    assert service.open_epoch(2) == ServedVersions(0, 0)
    report = service.advance(0.0, 2)
    assert (report.running, report.waiting, report.new_tokens) == ((), 0, 0)
    with pytest.raises(StaleEpochError, match="older than this server's 2"):
        service.open_epoch(1)
    service.submit([group((1, 2, 3), 2)], 2)
    found, tokens = drain(service, 2)
    check_all(MODEL, found)
    assert tokens == 2 * GREEDY.max_tokens


def test_nothing_is_served_before_an_epoch_is_opened(folder: Path) -> None:
    built = build_rollout_service(config(folder), 0)
    with pytest.raises(StaleEpochError):
        built.submit([group((1, 2), 1)], 0)
    assert built.open_epoch(0) == ServedVersions(None, None)


def test_one_bad_group_keeps_its_whole_message_out(service: RolloutService) -> None:
    """Otherwise the sender, who sees an error, would send the good ones twice."""
    with pytest.raises(RequestError):
        service.submit([group((1, 2), 2), group((1, 99), 2), group((3, 4), 2)], 1)
    assert service.advance(0.0, 1).waiting == 0 and not service.advance(0.0, 1).running


def test_strategies_go_by_name(service: RolloutService) -> None:
    work = [group((1, 2, 3), 2, SamplingParams(temperature=0.0, max_tokens=12))]
    for name, expected in (("off", "off"), ("eagle_2_1_3", "eagle_2_1_3"), (None, "eagle_2_1_3")):
        service.set_strategy(name, 1)
        service.submit(work, 1)
        report = service.advance(60.0, 1)
        assert report.strategy == expected
        assert all(r.acceptance.steps_by_strategy.keys() == {expected} for r in report.finished)
        check_all(MODEL, {r.rollout_id: r for r in report.finished})
    with pytest.raises(ConfigError, match=r"'eagle_9_1_10' is not configured: one of off, eagle_2_1_3"):
        service.set_strategy("eagle_9_1_10", 1)


def test_refused_loads_keep_what_is_served(service: RolloutService) -> None:
    with pytest.raises(WeightError):
        service.load_policy(1, {}, 1)
    with pytest.raises(WeightError):
        service.load_drafter(1, tensors_of(MODEL), 1)
    assert service.advance(0.0, 1).versions == ServedVersions(0, 0)
    assert service.load_policy(2, tensors_of(MODEL), 1) == ServedVersions(2, 0)
    assert service.load_drafter(5, random_drafter(spec_of(MODEL)), 1) == ServedVersions(2, 5)


def test_row_18_the_threshold_reaches_the_engine_only_when_lossy_is_allowed(folder: Path) -> None:
    """accept_threshold tiny: every draft is accepted, so a chain of 2 always commits 3 tokens."""

    def accepted(**speculation: object) -> float:
        built = build_rollout_service(config(folder, **speculation), 0)
        built.open_epoch(0)
        built.load_policy(0, tensors_of(MODEL), 0)
        built.load_drafter(0, random_drafter(spec_of(MODEL)), 0)
        built.submit([group((1, 2, 3), 4, SamplingParams(max_tokens=15))], 0)
        found, _ = drain(built, 0, 60.0)
        stats = [r.acceptance for r in found.values()]
        return sum(a.num_accepted_tokens for a in stats) / sum(a.proposed for a in stats)

    lossy = accepted(acceptance="threshold", accept_threshold=1e-9, allow_lossy=True)
    assert lossy > 0.95 > accepted()
    assert accepted(acceptance="exact", accept_threshold=1e-9, allow_lossy=True) == accepted()


def test_text_is_decoded_by_the_models_tokenizer(service: RolloutService) -> None:
    service.submit([group((1, 4, 5), 1, SamplingParams(max_tokens=16, stop_token_ids=(2,)))], 1)
    (r,) = drain(service, 1)[0].values()
    letters = {i + 4: c for i, c in enumerate(CHARACTERS)}
    assert r.text == "".join(letters[i] for i in r.response_ids if i > 3)


WITHOUT_WEIGHTS = [StrategyConfig(), StrategyConfig(drafter="suffix", depth=3, num_draft_tokens=4)]


@pytest.mark.parametrize("strategy", WITHOUT_WEIGHTS, ids=lambda s: s.drafter)
def test_services_without_a_drafter(folder: Path, strategy: StrategyConfig) -> None:
    built = build_rollout_service(config(folder, strategy), 0)
    built.open_epoch(0)
    built.load_policy(0, tensors_of(MODEL), 0)
    built.submit([group((1, 2, 3), 3), group((1, 2, 3), 3, name="again")], 0)
    found, _ = drain(built, 0)
    check_all(MODEL, found)
    assert all(r.drafter_versions == () for r in found.values())


def test_bfloat16_runs(folder: Path) -> None:
    low = config(folder).model_copy(update={"model": ModelConfig(path=str(folder), device="cpu", dtype="bfloat16")})
    built = build_rollout_service(low, 0)
    built.open_epoch(0)
    built.load_policy(0, {k: v.to(torch.bfloat16) for k, v in tensors_of(MODEL).items()}, 0)
    built.load_drafter(0, random_drafter(spec_of(MODEL)), 0)
    built.submit([group((1, 2, 3), 2, SamplingParams(max_tokens=9))], 0)
    found, tokens = drain(built, 0)
    assert tokens == 18 and all(x <= 0 for r in found.values() for x in r.rollout_logprobs)


@pytest.mark.parametrize("budget_s", [0.0, 60.0])
def test_reports_tell_which_strategy_ran_when(service: RolloutService, budget_s: float) -> None:
    service.submit([group((1, 5 + n, 9), 2, SamplingParams(max_tokens=9), first_seed=n) for n in range(2)], 1)
    spans, tokens, ended = [], 0, False
    while not ended:
        report = service.advance(budget_s, 1)
        assert all(-report.busy_s <= s.start_s <= s.end_s <= 0.0 for s in report.spans), "before the report's end"
        assert sum(s.tokens for s in report.spans) == report.new_tokens
        spans, tokens = [*spans, *report.spans], tokens + report.new_tokens
        ended = not report.running
    assert {(s.strategy, s.reason) for s in spans} == {("eagle_2_1_3", "the only one configured")}
    assert spans[0].running_first == 4 and sum(s.verify_steps for s in spans) >= sum(s.rounds for s in spans)
    service.set_strategy("off", 1)
    service.submit([group((1, 2, 3), 2)], 1)
    (forced,) = service.advance(0.0, 1).spans
    assert (forced.strategy, forced.reason, forced.off_s) == ("off", "forced", None)


def test_rounds_of_an_older_epoch_are_not_told(service: RolloutService) -> None:
    service.submit([group((1, 2, 3), 2)], 1)
    service.withdraw([], 1)
    service._engine.step(0.0)  # a round that no report told before the slot was leased anew
    service.open_epoch(2)
    assert service.advance(0.0, 2).spans == ()


def test_a_server_that_calibrated_predicts_and_tells_only_rounds_of_work(folder: Path) -> None:
    base = config(folder)
    adaptive = AdaptiveSelector(strategies=(EAGLE,), calibrate_s=0.3)
    built = build_rollout_service(
        base.model_copy(update={"speculation": base.speculation.model_copy(update={"selector": adaptive})}), 0
    )
    work = Workload((12, 3, 9, 16), 2, 4.0, 4, 1.0)
    built.open_epoch(1)
    built.load_policy(0, tensors_of(MODEL), 1)
    before = built.predict_gain(work)
    assert before is not None and before.ratio == 1.0, "no drafter is loaded: OFF alone"
    built.load_drafter(0, random_drafter(spec_of(MODEL)), 1)
    built.submit([group((1, 2, 3), 2, SamplingParams(max_tokens=30))], 1)
    report = built.advance(60.0, 1)
    assert sum(s.tokens for s in report.spans) == report.new_tokens and all(s.predicted for s in report.spans)
    after = built.predict_gain(work)
    assert after is not None and after.on_s <= after.off_s * 1.001 and after.off_s > 0


def test_a_selector_without_models_predicts_nothing(service: RolloutService) -> None:
    assert service.predict_gain(Workload((12, 3), 2, 4.0, 4, 1.0)) is None
    assert service.selector_state() is None, "it learns nothing either"


def test_a_new_process_goes_on_with_the_selector_of_the_one_before_and_does_not_calibrate(folder: Path) -> None:
    base = config(folder)
    adaptive = AdaptiveSelector(strategies=(EAGLE,), calibrate_s=0.2)
    settings = base.model_copy(update={"speculation": base.speculation.model_copy(update={"selector": adaptive})})
    first, second, other = (build_rollout_service(settings, slot) for slot in (0, 0, 1))
    assert first.open_epoch(1) is not None and first.selector_state() is None, "it has not begun"
    loaded(first)
    first.submit([group((1, 2, 3), 2, SamplingParams(max_tokens=30))], 1)
    first.advance(60.0, 1)
    state = first.selector_state()
    assert state is not None and state.learned["measured"] and state.place.startswith("native on cpu, float32")
    second.open_epoch(1)
    assert second.restore_selector(SelectorState(**json.loads(json.dumps(asdict(state)))), 1)
    loaded(second)
    assert second.selector_state() == SelectorState(**json.loads(json.dumps(asdict(state)))), "it measured again"
    with pytest.raises(StaleEpochError):
        second.restore_selector(state, 0)
    other.open_epoch(1)
    assert not other.restore_selector(replace(state, place="native on another card"), 1)
    loaded(other)
    assert other.selector_state() != state


def loaded(built: RolloutService) -> None:
    built.load_policy(0, tensors_of(MODEL), 1)
    built.load_drafter(0, random_drafter(spec_of(MODEL)), 1)
