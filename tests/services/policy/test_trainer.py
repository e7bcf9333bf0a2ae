from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from services.config.policy import Cispo, CorrectionConfig, Dapo, DrGrpo, Grpo, Gspo, PolicyConfig, Rloo
from services.core.types import FinishReason, SamplingParams, TrainBatch
from services.policy.batch import admit, split_updates
from services.policy.trainer import PolicyTrainer

LENGTHS = [(3, 9), (5, 2), (1, 1), (4, 30), (2, 7), (6, 12), (3, 3), (2, 20)]
ADVANTAGES = (1.0, -1.0, 0.5, -0.25, 2.0, -1.5, 0.3, 0.1)


def trainer(model, aux_layers=(), keep_states=True, **config) -> PolicyTrainer:
    config = {"algorithm": Dapo(), **config}
    ticks = itertools.count()
    return PolicyTrainer(
        model, PolicyConfig(**config), lambda: float(next(ticks)), aux_layers=aux_layers, keep_states=keep_states
    )


def batch(rollouts, advantages=ADVANTAGES) -> TrainBatch:
    return TrainBatch(3, tuple(rollouts), tuple(advantages))


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.fixture
def rollouts(make_rollout):
    return [make_rollout(i, p, r, group=f"g{i // 2}") for i, (p, r) in enumerate(LENGTHS)]


ALGORITHMS = [Grpo(), Grpo(aggregation="token"), DrGrpo(), Dapo(), Gspo(), Cispo(), Rloo()]
CORRECTIONS = [None, CorrectionConfig(), CorrectionConfig(level="geometric", mode="mask", low=0.1, high=10.0)]


@pytest.mark.parametrize("correct", CORRECTIONS, ids=repr)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_gradient_does_not_depend_on_the_split(make_model, rollouts, algorithm, correct) -> None:
    """Micro-batches of any size: same loss, gradient norm and KL, to 1e-6 relative, gradients compared before AdamW."""
    found = []
    for budget in (64, 70, 96, 128, 4096):
        t = trainer(
            make_model(dtype=torch.float64),
            micro_batch_tokens=budget,
            algorithm=algorithm,
            correction=correct,
            kl_coef=0.1,
        )
        with torch.no_grad():
            for p in t.model.parameters():
                p.mul_(1.01)  # away from the reference, so that KL counts
        grads = {}
        t._optimizer.step = lambda t=t, grads=grads: grads.update(  # type: ignore[method-assign]
            g=torch.cat([p.grad.flatten().clone() for p in t._parameters])
        )
        step = t.train_step(batch(rollouts))
        found.append((step.report, grads["g"]))
    reference, gradient = found[-1]
    assert reference.grad_norm > 1e-3 and reference.kl > 0
    for report, other in found[:-1]:
        assert (other - gradient).norm() <= 1e-6 * gradient.norm()
        assert report.loss == pytest.approx(reference.loss, rel=1e-6)
        assert report.grad_norm == pytest.approx(reference.grad_norm, rel=1e-6)
        assert report.kl == pytest.approx(reference.kl, rel=1e-6)


def test_split_in_float32_too(make_model, rollouts) -> None:
    after = []
    for budget in (64, 4096):
        t = trainer(make_model(), micro_batch_tokens=budget)
        after.append(t.train_step(batch(rollouts)).report.grad_norm)
    assert after[0] == pytest.approx(after[1], rel=1e-5)


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_zero_variance_skip_leaves_everything_alone(make_model, rollouts, kl_coef) -> None:
    """Row 42: no gradient, no KL pull, no AdamW momentum, no new version; yet the drafter gets its hidden states."""
    t = trainer(make_model(), kl_coef=kl_coef)
    first = t.train_step(batch(rollouts))  # fills AdamW's momentum
    assert first.report.policy_version == 1
    before = weights(t.model)
    step = t.train_step(batch(rollouts, [0.0] * 8))
    assert torch.equal(weights(t.model), before)
    assert step.report.policy_version == t.version == 1
    assert step.report.loss == 0.0 and step.report.num_tokens == 0 and step.report.zero_variance_fraction == 1.0
    assert any("no rollout carries a learning signal" in w for w in step.report.warnings)
    assert len(step.hidden) == 8 and step.chunk.num_sequences == 8


def test_where_nobody_has_a_use_for_the_states_a_step_trains_alike_and_yields_none(make_model, rollouts) -> None:
    half = [*ADVANTAGES[:4], 0.0, 0.0, 0.0, 0.0]
    both = []
    for ever, now in ((True, True), (True, False), (False, True)):
        t = trainer(make_model(), keep_states=ever)
        step = t.train_step(replace(batch(rollouts, half), keep_states=now))
        both.append((weights(t.model), step.report.loss, step.report.grad_norm, step.report.policy_version))
        assert len(step.hidden) == step.chunk.num_sequences == (8 if ever and now else 0)
    for other in both[1:]:
        assert torch.equal(both[0][0], other[0]) and both[0][1:] == other[1:]
    assert (step.chunk.num_tokens, step.chunk.num_bytes, step.chunk.num_missing) == (0, 0, 0)


def test_zero_variance_keep_feels_kl_and_fills_the_denominator(make_model, rollouts) -> None:
    t = trainer(make_model(), kl_coef=0.5, zero_variance="keep")
    with torch.no_grad():
        t.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    step = t.train_step(batch(rollouts, [0.0] * 8))
    assert step.report.kl > 0 and step.report.grad_norm > 0 and step.report.policy_version == 1
    assert step.report.num_tokens == sum(r for _, r in LENGTHS) and step.report.zero_variance_fraction == 1.0
    half = [*ADVANTAGES[:4], 0.0, 0.0, 0.0, 0.0]
    kept = trainer(make_model(), zero_variance="keep").train_step(batch(rollouts, half)).report
    skipped = trainer(make_model(), zero_variance="skip").train_step(batch(rollouts, half)).report
    tokens = sum(r for _, r in LENGTHS)
    share = sum(r for _, r in LENGTHS[:4]) / tokens
    assert kept.loss == pytest.approx(skipped.loss * share, rel=1e-4)
    assert kept.zero_variance_fraction == skipped.zero_variance_fraction == 0.5


def test_responses_that_were_continued_elsewhere_are_trained_on_whole(make_model, rollouts) -> None:
    """Row 50, with off-policy masking on: every token has its place in the mask, whoever generated it."""
    moved = [replace(r, policy_versions=(0, 1), drafter_versions=(0, 2)) for r in rollouts]
    correction = {"mode": "mask", "level": "sequence", "low": 0.0, "high": 1e9}
    found = [trainer(make_model(), correction=correction).train_step(batch(some)).report for some in (rollouts, moved)]
    assert found[1].num_tokens == sum(r for _, r in LENGTHS)
    assert (found[0].loss, found[0].grad_norm) == (found[1].loss, found[1].grad_norm)


@pytest.mark.parametrize("spoil", ["abort", "nan"])
def test_nothing_left_to_train_on(make_model, make_rollout, spoil) -> None:
    """Row 45: every rollout unusable: loss 0, no NaN, a warning, the policy untouched."""
    change = {"finish_reason": FinishReason.ABORT} if spoil == "abort" else {"rollout_logprobs": (math.nan,) * 6}
    t = trainer(make_model())
    before = weights(t.model)
    step = t.train_step(batch([make_rollout(i, **change) for i in range(2)], [1.0, -1.0]))
    report = step.report
    assert (report.loss, report.grad_norm, report.num_tokens, report.policy_version) == (0.0, 0.0, 0, 0)
    assert all(math.isfinite(x) for x in (report.kl, report.entropy, report.logprob_gap, report.clip_fraction))
    assert any(w.startswith("dropped 2 of 2") for w in report.warnings)
    assert torch.equal(weights(t.model), before) and step.hidden == []


def test_every_rollout_truncated_is_no_reason_to_divide_by_zero(make_model, make_rollout) -> None:
    cut = [make_rollout(i, finish_reason=FinishReason.LENGTH) for i in range(2)]
    report = trainer(make_model()).train_step(batch(cut, [1.0, -1.0])).report
    assert math.isfinite(report.loss) and report.num_tokens == 12 and report.policy_version == 1


def test_tokens_outside_the_trainers_filter_are_masked(make_model, make_rollout) -> None:
    """A token the trainer's own top-k leaves out has logprob -inf: finite loss, counted, not in logprob_gap."""
    rollouts = [make_rollout(i, sampling=SamplingParams(top_k=1)) for i in range(4)]
    t = trainer(make_model(), kl_coef=0.1)
    report = t.train_step(batch(rollouts, [1.0, -1.0, 1.0, -1.0])).report
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm) and math.isfinite(report.logprob_gap)
    assert any("outside the trainer's top-k" in w for w in report.warnings)
    assert torch.isfinite(weights(t.model)).all()


def test_rollout_logprobs_stay_frozen_over_inner_epochs(make_model, sample_rollout) -> None:
    """Row 48: the first epoch's ratio is 1; with old = new.detach() the second's would be too and nothing clips."""
    model = make_model()
    rollouts = [sample_rollout(model, i, 4, 12, "g", SamplingParams()) for i in range(4)]
    t = trainer(model, inner_epochs=3, learning_rate=0.02, algorithm=Dapo(clip_low=0.01, clip_high=0.01))
    ratios = []
    step = t._learn

    def spy(one, first):
        clipped, before = first.tally.clipped, t._score(t._scorer, one.pack).logprobs.detach()
        step(one, first)
        ratios.append(((before - one.pack.rollout_logprobs).exp(), first.tally.clipped - clipped))

    t._learn = spy  # type: ignore[method-assign]
    t.train_step(batch(rollouts, [1.0, -1.0, 0.5, -0.5]))
    torch.testing.assert_close(ratios[0][0], torch.ones(48), atol=1e-4, rtol=0)
    assert ratios[0][1] == 0
    assert (ratios[1][0] - 1).abs().max() > 0.01 and ratios[1][1] > 0


@pytest.mark.parametrize("aux_layers", [(), (0, 1)])
def test_states_of_a_policy_that_computes_in_halves_are_halves(make_model, rollouts, aux_layers) -> None:
    """As an engine has them; in float32 they would hold the same values in twice the memory."""
    exact, step = (
        PolicyTrainer(make_model(), PolicyConfig(), lambda: 0.0, compute, aux_layers).train_step(batch(rollouts))
        for compute in (None, torch.bfloat16)
    )
    for half, whole in zip(step.hidden, exact.hidden, strict=True):
        assert half.inputs.dtype == half.hidden.dtype == torch.bfloat16 and whole.hidden.dtype == torch.float32
        assert (half.inputs - whole.inputs).norm() < 0.03 * whole.inputs.norm()
    assert step.chunk.num_bytes < 0.6 * exact.chunk.num_bytes


def test_hidden_states_come_from_the_same_forward_before_the_update(make_model, make_rollout) -> None:
    model = make_model()
    rollouts = [make_rollout(i, p, r, group=f"g{i // 2}") for i, (p, r) in enumerate(LENGTHS)]
    advantages = (*ADVANTAGES[:6], 0.0, 0.0)  # the last group is skipped by the loss
    expected = []
    with torch.no_grad():
        for r in rollouts:
            ids = torch.tensor([(*r.prompt_ids, *r.response_ids)])
            expected.append(model.model(input_ids=ids, use_cache=False).last_hidden_state[0])
    t = trainer(model, inner_epochs=2, micro_batch_tokens=64)
    seen = []
    handle = model.model.register_forward_hook(lambda m, i, o: seen.append(o.last_hidden_state.shape[:2].numel()))
    step = t.train_step(batch(rollouts, advantages))
    handle.remove()
    for h, e, r in zip(step.hidden, expected, rollouts, strict=True):
        torch.testing.assert_close(h.hidden, e, atol=1e-4, rtol=1e-4)
        assert h.input_ids.tolist() == [*r.prompt_ids, *r.response_ids]
        assert h.loss_mask.tolist() == [False] * len(r.prompt_ids) + [True] * len(r.response_ids)
        assert h.policy_version == 0 and not h.hidden.requires_grad
        assert h.hidden.untyped_storage().nbytes() == h.hidden.numel() * 4, "a clone, not a view of the pack"
    tokens = sum(p + r for p, r in LENGTHS)
    assert step.chunk.num_tokens == tokens and step.chunk.num_sequences == 8 and step.chunk.policy_version == 0
    assert step.chunk.num_bytes == sum(h.num_bytes for h in step.hidden) and step.chunk.step == 3
    # no extra forward: trained packs run twice (two inner epochs), the skipped group's once
    (trained,), skipped = t._packs(admit(batch(rollouts, advantages), 24, PolicyConfig()))
    assert len(seen) == 2 * len(trained) + len(skipped)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_aux_states_come_from_the_same_forward_before_the_update(make_model, make_rollout, kind) -> None:
    """EAGLE-3: transformers' own hidden_states of the layers above, sequence by sequence, skipped groups included."""
    model = make_model(kind, layers=5)
    rollouts = [make_rollout(i, p, r, group=f"g{i // 2}") for i, (p, r) in enumerate(LENGTHS)]
    advantages = (*ADVANTAGES[:6], 0.0, 0.0)  # the last group is skipped by the loss
    expected = []
    with torch.no_grad():
        for r in rollouts:
            ids = torch.tensor([(*r.prompt_ids, *r.response_ids)])
            states = model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
            expected.append((states[-1][0], torch.cat([states[k + 1][0] for k in (0, 1, 3)], -1)))
    t = trainer(model, (0, 1, 3), inner_epochs=2, micro_batch_tokens=64)
    hooks = [len(layer._forward_hooks) for layer in model.model.layers]  # output_hidden_states leaves transformers' own
    seen = []
    handle = model.model.register_forward_hook(lambda m, i, o: seen.append(1))
    step = t.train_step(batch(rollouts, advantages))
    handle.remove()
    for h, (hidden, aux) in zip(step.hidden, expected, strict=True):
        torch.testing.assert_close(h.hidden, hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(h.aux, aux, atol=1e-4, rtol=1e-4)
        assert h.policy_version == 0 and not h.aux.requires_grad
        assert h.aux.untyped_storage().nbytes() == h.aux.numel() * 4, "a clone, not a view of the pack"
    tokens = sum(p + r for p, r in LENGTHS)
    assert step.chunk.num_bytes == tokens * (8 + 1 + 4 * 4 * 32), "id, mask, four states of 32 floats"
    (trained,), skipped = t._packs(admit(batch(rollouts, advantages), 24, PolicyConfig()))
    assert len(seen) == 2 * len(trained) + len(skipped), "no extra forward"
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks


def test_collecting_aux_states_leaves_the_update_alone(make_model, rollouts) -> None:
    after = []
    for aux_layers in ((), (0, 1, 2)):
        t = trainer(make_model(layers=4), aux_layers)
        t.train_step(batch(rollouts))
        after.append(weights(t.model))
    assert torch.equal(*after)


def test_aux_states_that_are_not_finite_stay_from_the_drafter(make_model, rollouts) -> None:
    """The last hidden state is finite even where a layer below it has overflowed: the norm hides it."""
    t = trainer(make_model(layers=4), (0, 1, 2))
    collect = t._collect

    def spoil(one, scores, first):
        scores.aux[0, 0, 0] = math.inf
        collect(one, scores, first)

    t._collect = spoil  # type: ignore[method-assign]
    step = t.train_step(batch(rollouts))
    assert len(step.hidden) == step.chunk.num_sequences == 7
    assert any("hidden states of 1 rollouts are not finite" in w for w in step.report.warnings)


def test_logprob_gap_alarm(make_model, sample_rollout) -> None:
    model = make_model()
    rollouts = [sample_rollout(model, i, 4, 10, "g", SamplingParams(temperature=0.7, top_p=0.9)) for i in range(4)]
    good = trainer(make_model()).train_step(batch(rollouts, [1.0, -1.0, 0.5, -0.5])).report
    assert good.logprob_gap < 1e-4 and not any("logprob_gap" in w for w in good.warnings)
    stale = trainer(make_model(seed=1)).train_step(batch(rollouts, [1.0, -1.0, 0.5, -0.5])).report
    assert stale.logprob_gap > 0.05 and any("logprob_gap" in w for w in stale.warnings)


def test_credit_moves_the_policy_the_right_way(make_model, sample_rollout) -> None:
    model = make_model()
    rollouts = [sample_rollout(model, i, 4, 8, "g", SamplingParams()) for i in range(4)]
    t = trainer(model, learning_rate=2e-3)
    for expected in range(1, 9):
        step = t.train_step(batch(rollouts, [1.0, 1.0, -1.0, -1.0]))
        assert step.report.policy_version == expected
    now = []
    with torch.no_grad():
        for r in rollouts:
            ids = torch.tensor([(*r.prompt_ids, *r.response_ids)])
            dist = model(input_ids=ids, use_cache=False).logits[0, 3:-1].log_softmax(-1)
            now.append(dist.gather(-1, ids[0, 4:, None]).mean() - sum(r.rollout_logprobs) / 8)
    assert min(now[:2]) > 0 > max(now[2:])


def test_non_finite_gradient_changes_nothing(make_model, rollouts) -> None:
    t = trainer(make_model())
    before = weights(t.model)
    t.model.model.norm.weight.register_hook(lambda g: g * math.nan)
    step = t.train_step(batch(rollouts))
    assert torch.equal(weights(t.model), before) and step.report.policy_version == 0
    assert any("gradient was not finite" in w for w in step.report.warnings)


@pytest.mark.parametrize(("step", "left"), [(1, 1.0), (3, 0.5), (4, 0.25), (5, 0.0), (9, 0.0)])
def test_learning_rate_falls_linearly_by_the_step(make_model, rollouts, step, left) -> None:
    """By the step of the batch: a trainer that is new at step 4, as after a resume, uses step 4's rate."""
    moved = []
    for decay in (0, 4):
        t = trainer(make_model(), learning_rate=0.01, decay_steps=decay)
        before = weights(t.model)
        t.train_step(TrainBatch(step, tuple(rollouts), ADVANTAGES))
        moved.append(float((weights(t.model) - before).norm()))
    assert moved[1] == pytest.approx(left * moved[0], rel=1e-3, abs=1e-9)


def test_several_updates_per_step_learn_from_parts_and_collect_before_the_first(make_model, rollouts) -> None:
    """Two updates over halves are two trainers' steps over the halves; states and mismatch are of the policy before."""
    both = trainer(make_model(), updates_per_step=2)
    step = both.train_step(batch(rollouts))
    one = trainer(make_model())
    whole = one.train_step(batch(rollouts))
    assert step.report.policy_version == 1 and len(step.hidden) == 8
    for a, b in zip(step.hidden, whole.hidden, strict=True):
        torch.testing.assert_close(a.hidden, b.hidden, atol=1e-5, rtol=1e-5)
    assert step.report.logprob_gap == pytest.approx(whole.report.logprob_gap, rel=1e-5)
    assert step.report.entropy == pytest.approx(whole.report.entropy, rel=1e-5)
    apart = trainer(make_model())
    parts = split_updates(admit(batch(rollouts), 24, PolicyConfig()), 2)
    for part in parts:
        apart.train_step(batch([rollouts[i] for i in part], [ADVANTAGES[i] for i in part]))
    assert len(parts) == 2
    torch.testing.assert_close(weights(both.model), weights(apart.model), atol=1e-6, rtol=1e-5)
    assert (weights(both.model) - weights(one.model)).abs().max() > 1e-5


def test_a_correction_takes_the_ratio_against_the_trainers_own_policy(make_model, sample_rollout) -> None:
    """An engine off by a constant 0.3 nats: without correction the clip sees it; with it, the ratio begins at 1, the
    weight is e^0.3 and both are told."""
    model = make_model()
    drawn = [sample_rollout(model, i, 4, 12, "g", SamplingParams()) for i in range(4)]
    off = [replace(r, rollout_logprobs=tuple(p - 0.3 for p in r.rollout_logprobs)) for r in drawn]
    gains = [1.0, -1.0, 0.5, -0.5]
    plain = trainer(make_model()).train_step(batch(off, gains)).report
    assert plain.clip_fraction > 0.3 and plain.corrected_fraction == 0.0
    assert plain.mismatch_kl == pytest.approx(math.exp(0.3) - 1 - 0.3, rel=1e-3)
    for high, cut in ((2.0, 0.0), (1.2, 1.0)):
        right = trainer(make_model(), correction=CorrectionConfig(high=high)).train_step(batch(off, gains)).report
        assert right.clip_fraction == 0.0 and right.corrected_fraction == cut
        true = trainer(make_model()).train_step(batch(drawn, gains)).report
        assert right.grad_norm == pytest.approx(true.grad_norm * min(math.exp(0.3), high), rel=1e-3)


def test_rejected_responses_leave_no_trace(make_model, rollouts) -> None:
    masked = CorrectionConfig(level="geometric", mode="mask", low=0.999999, high=1.000001)
    t = trainer(make_model(), correction=masked)
    report = t.train_step(batch(rollouts)).report
    assert (report.loss, report.grad_norm, report.corrected_fraction) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("many", [{"inner_epochs": 2}, {"updates_per_step": 2}])
def test_rloo_is_on_policy(many) -> None:
    with pytest.raises(ValueError, match="learns on-policy only"):
        PolicyConfig(algorithm=Rloo(), **many)
