"""The warm-up in small: every family, both drafter methods, both number formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.cli_shared import PRESETS_DIR
from deploy.warmup import run_warmup
from deploy.warmup_lessons import positions_for
from deploy.warmup_rollouts import collect_states
from deploy.warmup_target import Example, _accumulate, new_model, padded_runs, store_as, trace_examples, train_target
from services.config.load import load_config
from services.config.schema import ClusterConfig
from services.config.warmup import WarmupConfig
from services.core.errors import ConfigError
from services.core.types import AcceptanceStats, Prompt, Rollout, SamplingParams
from services.data.tasks import generate_problems
from services.data.traces import CHARACTERS, chain_sum_trace
from services.drafter.state import read_drafter
from services.models.files import read_config, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.models.target import TargetModel, target_names
from services.models.tokenizer import EOS, Tokenizer, character_tokenizer, load_tokenizer

torch.set_num_threads(1)
CPU = torch.device("cpu")
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "steps": 3, "tokens_per_step": 512, "micro_batch_tokens": 256, "drafter_steps": 2, "drafter_rollouts": 6,
    "eval_prompts": 8, "max_running": 32,
}  # fmt: skip


def tiny_config(dtype: str = "float32", **warmup: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": dtype, "device": "cpu"},
            "data": {
                "source": {"type": "reasoning_gym", "task": "chain_sum", "template": "{expression}=", "size": 60,
                           "terms": {"median": 3, "sigma": 0.5, "min": 2, "max": 5}},
                "max_prompt_tokens": 64, "heldout_fraction": 0.3,
            },
            "rollout": {"engine": {"type": "native", "max_running": 8, "max_len": 96}, "sampling": {"max_tokens": 24}},
            "reward": {"verifier": "exact"},
            "policy": {"threads": 1},
            "drafter": {"unroll": 2, "pack_tokens": 64},
            "run": {"name": "tiny-warmup"},
            "warmup": TINY | warmup,
        }
    )  # fmt: skip


def tokenizer_at(folder: Path) -> Tokenizer:
    return Tokenizer(character_tokenizer(CHARACTERS), folder, (EOS,))


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("llama", "bfloat16"), ("qwen2", "bfloat16")])
def test_target_and_drafters_come_out_whole(tmp_path: Path, kind: str, dtype: str) -> None:
    config = tiny_config(dtype, model_type=kind, drafter_methods=["eagle", "eagle3"])
    lines: list[str] = []
    result = run_warmup(config, tmp_path, lines.append)
    spec = model_spec(read_config(tmp_path / "target"))
    tensors = read_tensors(tmp_path / "target")
    wanted = getattr(torch, dtype)
    assert spec.model_type == kind and {t.dtype for t in tensors.values()} == {wanted}
    TargetModel(spec, 32, CPU, wanted).load(tensors)
    assert result.parameters == sum(t.numel() for t in tensors.values())
    for name, folder in (("eagle", "drafter"), ("eagle3", "drafter-eagle3")):
        drafter = read_drafter(
            tmp_path / folder, drafter_method(config.drafter.model_copy(update={"method": name}), spec)
        )
        assert {t.dtype for t in drafter.values()} == {wanted}
    assert [d.method for d in result.drafters] == ["eagle", "eagle3"]
    assert all(d.acceptance_length >= 1 for d in result.drafters)
    assert load_tokenizer(str(tmp_path / "target")).eos_token_ids == (EOS,)
    assert json.loads((tmp_path / "warmup.json").read_text())["parameters"] == result.parameters
    assert "EAGLE-3: acceptance length" in (tmp_path / "README.md").read_text()
    assert load_config(tmp_path / "warmup.yaml") == config
    assert all(line.startswith("[") and " s] " in line for line in lines) and any("target step 3/3" in x for x in lines)


def test_same_seed_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = tiny_config()
        run_warmup(config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}), tmp_path / name)
    for part in ("target", "drafter"):
        a, b, c = (read_tensors(tmp_path / name / part) for name in "abc")
        assert all(torch.equal(a[k], b[k]) for k in a)
        assert not all(torch.equal(a[k], c[k]) for k in a)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_padded_runs_cover_everything_within_the_budget(lengths: list[int], tokens: int) -> None:
    lengths = sorted(lengths)
    runs = list(padded_runs(lengths, tokens))
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))
    for run in runs:
        size = (run.stop - run.start) * max(lengths[run])
        assert size <= tokens or run.stop - run.start == 1


def rollout_of(example: Example) -> Rollout:
    prompt, response = example.ids[: example.prompt_len], example.ids[example.prompt_len :]
    return Rollout(
        group_id="0", prompt_id="0", index=0, seed=0, prompt_ids=prompt, response_ids=response,
        rollout_logprobs=(0.0,) * len(response), text="", finish_reason="stop", sampling=SamplingParams(),
        policy_versions=(0,), drafter_versions=(), acceptance=AcceptanceStats(),
    )  # fmt: skip


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = Random(seed)
    return [Example(tuple(rng.randrange(4, 40) for _ in range(rng.randrange(6, 40))), 4) for _ in range(count)]


def test_the_gradient_does_not_depend_on_the_micro_batches() -> None:
    torch.manual_seed(0)
    model, batch, gradients = new_model(WarmupConfig(**TINY), 64, 128), examples(12), []
    for tokens in (64, 10_000):
        model.zero_grad()
        loss = _accumulate(model, batch, tokens, torch.autocast("cpu", enabled=False))
        gradients.append([loss, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_learns(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = WarmupConfig(**TINY | {"steps": 12, "tokens_per_step": 256, "learning_rate": 3e-2})
    model, losses, few = new_model(config, 64, 128), [], examples(4)
    endless = (e for _ in range(10_000) for e in few)
    train_target(model, endless, config, dtype, lambda _step, loss: losses.append(float(loss)))
    assert losses[-1] < losses[0] - 0.8
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_storing_leaves_the_rotary_frequencies_alone() -> None:
    model = new_model(WarmupConfig(**TINY), 64, 128)
    before = model.model.rotary_emb.inv_freq.clone()
    store_as(model, torch.bfloat16)
    assert model.dtype == torch.bfloat16 and torch.equal(model.model.rotary_emb.inv_freq, before)


def test_traces_are_encoded_as_the_tokenizer_would(tmp_path: Path) -> None:
    tokenizer = tokenizer_at(tmp_path)
    texts = ["12 + 7 - 35=", "3 - 44=", "1 + 1 + 1 + 1="]
    prompts = [Prompt(str(i), t, tuple(tokenizer.render(t, False)), "", "chain_sum", {}) for i, t in enumerate(texts)]
    rng, stream = Random("7/warmup"), trace_examples(prompts, tokenizer, 7)
    for _ in range(3):
        for prompt in rng.sample(prompts, len(prompts)):
            example = next(stream)
            trace = tokenizer.encode(chain_sum_trace(prompt.text, rng))
            assert example == Example((*prompt.token_ids, *trace, EOS), len(prompt.token_ids))


@pytest.mark.parametrize("aux_layers", [(), (0, 1, 2)])
def test_states_do_not_depend_on_their_neighbours(aux_layers: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = new_model(WarmupConfig(**TINY), 64, 128).eval()
    rollouts = [rollout_of(e) for e in examples(7)]
    together = collect_states(model, rollouts, aux_layers, 10_000)
    for rollout, state in zip(rollouts, together, strict=True):
        alone = collect_states(model, [rollout], aux_layers, 1)[0]
        assert tuple(state.input_ids.tolist()) == (*rollout.prompt_ids, *rollout.response_ids)
        assert state.loss_mask.tolist() == [False] * 4 + [True] * len(rollout.response_ids)
        assert (state.inputs - alone.inputs).abs().max() < 1e-4 and (state.hidden - alone.hidden).abs().max() < 1e-4
        assert state.inputs.shape[1] == 32 * max(1, len(aux_layers))


# -- the preset and the command


def test_the_reasoner_is_what_a_serving_engine_wants() -> None:
    config = load_config("reasoner-warmup", presets_dir=PRESETS_DIR)
    w = config.warmup
    assert config.model.dtype == "bfloat16" and w.head_dim == 64 and w.num_heads * w.head_dim == w.hidden_size
    model = new_model(w.model_copy(update={"num_layers": 1}), 64, 2048)
    spec = replace(model_spec(model.config.to_dict()), num_layers=w.num_layers)
    assert 25e6 < sum(torch.Size(shape).numel() for shape in target_names(spec).values()) < 30e6


@pytest.mark.parametrize("preset", ["reasoner-warmup", "reasoner-long-warmup"])
def test_the_reasoners_longest_problems_fit(preset: str, tmp_path: Path) -> None:
    config = load_config(preset, presets_dir=PRESETS_DIR)
    source = config.data.source
    longest = source.terms.model_copy(update={"min": source.terms.max})
    problems = generate_problems(source.model_copy(update={"terms": longest, "size": 60}), 3)
    tokenizer, rng = tokenizer_at(tmp_path), Random(0)
    assert max(len(tokenizer.render(p.text, False)) for p in problems) <= config.data.max_prompt_tokens
    assert max(len(chain_sum_trace(p.text, rng)) + 1 for p in problems) <= config.rollout.sampling.max_tokens


def test_the_long_reasoners_responses_have_a_long_tail() -> None:
    """A run draws nothing that the model was not warmed up on: worked sums with a 99th percentile of 8 medians or
    more."""
    warm, run = (load_config(n, presets_dir=PRESETS_DIR) for n in ("reasoner-long-warmup", "reasoner-e2e"))
    drawn, known = run.data.source.terms, warm.data.source.terms
    assert known.min <= drawn.min and drawn.max <= known.max
    alike = {"size": 1, "terms": known}
    assert warm.data.source.model_copy(update=alike) == run.data.source.model_copy(update=alike)
    assert warm.data.max_prompt_tokens == run.data.max_prompt_tokens and warm.data.seed != run.data.seed
    assert warm.rollout.sampling.max_tokens == run.rollout.sampling.max_tokens
    rng = Random(0)
    problems = generate_problems(run.data.source.model_copy(update={"size": 3000}), 0)
    lengths = sorted(len(chain_sum_trace(p.text, rng)) + 1 for p in problems)
    assert lengths[2970] > 8 * lengths[1500] and lengths[2970] > 2500
    longest = positions_for(warm.rollout.engine.max_len)
    assert longest >= run.rollout.engine.max_len + 8, "and the places for draft tokens, with which SGLang begins"


@pytest.mark.parametrize(("max_len", "positions"), [(768, 2048), (1984, 2048), (1985, 4096), (5312, 8192)])
def test_a_new_model_has_positions_for_rollouts_and_what_is_drafted_behind_them(max_len: int, positions: int) -> None:
    assert positions_for(max_len) == positions


def test_new_drafters_for_a_kept_target(tmp_path: Path) -> None:
    """The target's file stays byte for byte, and the card still says how it was made; the drafter is another one when
    the seed is."""
    config = tiny_config()
    first = run_warmup(config, tmp_path)
    target, drafter = (tmp_path / part / "model.safetensors" for part in ("target", "drafter"))
    before = target.read_bytes(), drafter.read_bytes()
    again = run_warmup(config, tmp_path, keep_target=True)
    assert target.read_bytes() == before[0]
    assert (again.target_seconds, again.device) == (first.target_seconds, first.device)
    assert again.heldout_pass_rate == first.heldout_pass_rate
    run_warmup(config.model_copy(update={"run": config.run.model_copy(update={"seed": 5})}), tmp_path, keep_target=True)
    assert target.read_bytes() == before[0] and drafter.read_bytes() != before[1]


def test_keeping_a_target_needs_one(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["warmup", "reasoner-warmup", "--out", str(tmp_path), "--keep-target"])
    assert done.exit_code == 2 and "leave --keep-target out" in done.stderr


def test_a_folder_must_be_named_for_all_but_the_pocket_model() -> None:
    done = CliRunner().invoke(app, ["warmup", "reasoner-warmup"])
    assert done.exit_code == 2 and "with --out" in done.stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("warmup.num_heads=5", "num_heads 5 is no multiple of num_kv_heads 4"),
        ("warmup.drafter_methods=[eagle, eagle]", "names one twice"),
        ("warmup={model_type: llama, num_heads: 12}", "hidden_size 512 of a Llama must be a multiple of num_heads 12"),
    ],
)
def test_impossible_networks_are_refused(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config("reasoner-warmup", overrides=[setting], presets_dir=PRESETS_DIR)
