"""What the two rollout engines cannot have, each with its remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.engine_args import engine_arg_problems
from services.config.load import load_config
from services.config.schema import SGLangEngine
from services.core.errors import ConfigError

SGLANG = ("rollout.engine.type=sglang", "placement={gpus_per_slot: 1, policy_gpus: 1}")


def strategy(
    drafter: str,
    depth: int,
    topk: int = 1,
    nodes: int | None = None,
    sampled: bool = False,
    budget: int | None = None,
) -> str:
    nodes = depth + 1 if nodes is None else nodes
    return (
        f"speculation.selector.strategy={{drafter: {drafter}, depth: {depth}, topk: {topk}, "
        f"num_draft_tokens: {nodes}, sampled: {str(sampled).lower()}, budget: {budget or 'null'}}}"
    )


def mistakes(*overrides: str) -> list[str]:
    """One a line; none when the configuration is possible."""
    try:
        load_config(overrides=overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
        return lines if len(lines) == 1 else lines[1:]
    return []


# ------------------------------------------------------------------ SGLang


@pytest.mark.parametrize(
    "chosen",
    [
        strategy("eagle", 3, sampled=True),
        strategy("eagle", 3),
        strategy("eagle", 3, 4, 12),
        strategy("ngram", 4),
        strategy("ngram", 4, 3, 10),
        "speculation.selector={type: fixed}",
        "speculation.selector={type: beg_mab, buckets: [{strategies: [{drafter: eagle, depth: 5, "
        "num_draft_tokens: 6}, {drafter: eagle, depth: 2, num_draft_tokens: 3}]}, {min_running: 4, strategies: [{}]}]}",
    ],
)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_what_sglang_runs(chosen: str, method: str) -> None:
    assert mistakes(*SGLANG, chosen, f"drafter.method={method}") == []


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        ([strategy("suffix", 4)], "'suffix' is the native engine's", "take 'ngram' with rollout.engine.type: sglang"),
        ([strategy("hybrid", 2, 1, 8)], "'hybrid' is the native engine's", "take 'eagle'"),
        ([strategy("eagle", 3, budget=2)], "budget in a strategy is the native engine's", "leave it out"),
        ([strategy("eagle", 3, 2, 6, sampled=True)], "samples drafts in chains only", "set topk: 1, or sampled: false"),
        (
            [strategy("eagle", 3, sampled=True), "rollout.engine.deterministic=true"],
            "deterministic needs argmax drafts",
            "set sampled: false in the strategy",
        ),
        (
            [
                "speculation.selector={type: beg_mab, buckets: "
                "[{strategies: [{}, {drafter: eagle, depth: 3, topk: 2, num_draft_tokens: 6, sampled: false}]}]}"
            ],
            "switches between EAGLE chains of several depths and OFF",
            "one strategy with speculation.selector.type: fixed",
        ),
        (
            [
                "speculation.selector={type: beg_mab, buckets: "
                "[{strategies: [{}, {drafter: ngram, depth: 3, num_draft_tokens: 4}]}]}"
            ],
            "switches between EAGLE chains of several depths and OFF",
            "one strategy with speculation.selector.type: fixed",
        ),
        (
            [
                "speculation.selector={type: beg_mab, buckets: [{strategies: "
                "[{drafter: eagle, depth: 2, num_draft_tokens: 3}, "
                "{drafter: eagle, depth: 3, num_draft_tokens: 4, sampled: false}]}]}"
            ],
            "samples the drafts of all its strategies or of none",
            "set sampled alike in all of them",
        ),
        (["rollout.sampling.top_k=5"], "logprobs without top_k", "use the native engine"),
        (["rollout.sampling.top_p=0.9"], "logprobs without top_k", "use the native engine"),
        (["rollout.sampling.min_p=0.1"], "logprobs without top_k", "use the native engine"),
        (
            ["speculation={acceptance: threshold, allow_lossy: true}"],
            "'threshold' is the native engine's",
            "leave it at 'exact' with SGLang",
        ),
        (["run.compare_prompts=8"], "with a fixed one does not", "set it to 0"),
        (
            ["rollout.engine.max_len=900", "rollout.engine.kv_tokens=900"],
            "kv_tokens 900 cannot hold one request of max_len 900",
            "raise kv_tokens or lower max_len",
        ),
        (["rollout.engine.max_len=700"], "does not fit rollout.engine.max_len = 700", "raise max_len to 768"),
        (["rollout.engine.max_running=7"], "exceeds rollout.engine.max_running 7", "raise max_running"),
        (
            ["rollout.engine.tp=2"],
            "an SGLang engine with tp 2 needs GPUs in its slot",
            "set placement.gpus_per_slot to tp",
        ),
        (["placement.gpus_per_slot=0"], "an SGLang engine with tp 1 needs GPUs", "below 1 when slots share a GPU"),
        (["placement.gpus_per_slot=1.5"], "placement.gpus_per_slot 1.5: Ray hands out parts of one GPU", "round it"),
    ],
)
def test_what_sglang_cannot_have(overrides: list[str], problem: str, remedy: str) -> None:
    (line,) = mistakes(*SGLANG, *overrides)
    assert problem in line and remedy in line


STATES = "drafter.states=engine"


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        ([], "needs a strategy with drafter 'eagle'", "or set drafter.states: policy"),
        ([*SGLANG], "needs a strategy with drafter 'eagle'", "or set drafter.states: policy"),
        ([*SGLANG, strategy("ngram", 3)], "needs a strategy with drafter 'eagle'", "or set drafter.states: policy"),
        (
            [*SGLANG, strategy("eagle", 3), "drafter.method=eagle3"],
            "an eagle3 drafter keeps the states of the aux layers",
            "set drafter.states: policy",
        ),
    ],
)
def test_engines_that_keep_no_states(overrides: list[str], problem: str, remedy: str) -> None:
    (line,) = mistakes(*overrides, STATES)
    assert problem in line and remedy in line


def test_an_sglang_engine_with_an_eagle_drafter_keeps_states() -> None:
    assert mistakes(*SGLANG, strategy("eagle", 3), STATES, "rollout.engine.capture_bytes=2000000") == []
    assert mistakes(*SGLANG, strategy("eagle", 3, 2, 6), STATES) == []


def test_slots_may_share_a_gpu_and_one_may_have_several() -> None:
    assert mistakes(*SGLANG, "placement.gpus_per_slot=0.4") == []
    assert mistakes(*SGLANG, "rollout.engine.tp=2", "placement.gpus_per_slot=2") == []
    assert mistakes("rollout.engine.type=sglang", "placement.mode=local") == [], "Ray places nothing there"


def test_deterministic_argmax_drafts_run() -> None:
    assert mistakes(*SGLANG, strategy("eagle", 3), "rollout.engine.deterministic=true") == []
    assert mistakes(*SGLANG, strategy("ngram", 3, sampled=True), "rollout.engine.deterministic=true") == []


def test_every_problem_is_told_at_once() -> None:
    lines = mistakes(
        *SGLANG,
        strategy("suffix", 4),
        "rollout.sampling.top_p=0.9",
        "rollout.engine.engine_args={dtype: half, tp_size: 2}",
    )
    assert len(lines) == 4


# ------------------------------------------------------------------ engine_args


@pytest.mark.parametrize(
    "name",
    [
        "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "speculative_algorithm",
        "speculative_use_rejection_sampling", "model_path", "tp_size", "dp_size", "pp_size", "max_running_requests",
        "context_length", "mem_fraction_static", "max_total_tokens", "attention_backend", "random_seed",
        "enable_deterministic_inference", "skip_tokenizer_init", "stream_interval", "incremental_streaming_output",
        "preferred_sampling_params", "enable_memory_saver", "enable_weights_cpu_backup",
        "enable_draft_weights_cpu_backup", "base_gpu_id", "custom_weight_loader", "custom_sigquit_handler",
        "load_format", "dtype",
    ],
)  # fmt: skip
def test_row_18_nothing_slips_in_through_engine_args(name: str) -> None:
    """A lossy threshold would bias every rollout, and another name of a setting would contradict the tree."""
    (line,) = mistakes(*SGLANG, f"rollout.engine.engine_args={{{name}: 0.9}}")
    assert (
        f"rollout.engine.engine_args.{name} is decided by the rest of the configuration" in line and "remove it" in line
    )
    assert mistakes(*SGLANG, f"rollout.engine.engine_args={{{name}: 0.9}}", "speculation.allow_lossy=true"), (
        "not even then"
    )


@given(st.text(st.characters(categories=["Ll", "Nd"], include_characters="_"), max_size=20))
def test_row_18_every_speculative_argument_is_refused(rest: str) -> None:
    assert len(list(engine_arg_problems([f"speculative_{rest}", "chunked_prefill_size"]))) == 1


def test_other_arguments_of_the_engine_are_handed_on() -> None:
    overrides = [*SGLANG, "rollout.engine.engine_args={chunked_prefill_size: 2048, log_level: info, page_size: 16}"]
    engine = load_config(overrides=overrides).rollout.engine
    assert isinstance(engine, SGLangEngine) and engine.engine_args["chunked_prefill_size"] == 2048


# ------------------------------------------------------------------ the native engine


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        ([strategy("ngram", 3)], "drafter 'ngram' is SGLang's", "take 'suffix' with the native engine"),
        (
            [strategy("eagle", 3), "drafter.method=eagle3"],
            "does not run EAGLE-3",
            "needs rollout.engine.type: sglang; or set drafter.method: eagle",
        ),
        ([strategy("hybrid", 2, 1, 8), "drafter.method=eagle3"], "does not run EAGLE-3", "set drafter.method: eagle"),
    ],
)
def test_what_the_native_engine_cannot_have(overrides: list[str], problem: str, remedy: str) -> None:
    (line,) = mistakes(*overrides)
    assert problem in line and remedy in line


def test_what_only_the_native_engine_runs() -> None:
    assert mistakes(strategy("suffix", 4)) == []
    assert mistakes(strategy("hybrid", 2, 1, 8)) == mistakes(strategy("eagle", 5, budget=2)) == []
    assert mistakes(strategy("eagle", 3, 2, 6, sampled=True), "rollout.sampling.top_p=0.9") == []
    assert mistakes(strategy("suffix", 4), "drafter.method=eagle3") == [], "nothing drafts with it"


def test_a_checkpoint_folder_is_the_same_for_every_process() -> None:
    (line,) = mistakes("drafter.checkpoint_dir=kept")
    assert "drafter.checkpoint_dir" in line and "give an absolute path" in line
    assert mistakes("drafter.checkpoint_dir=/shared/kept") == []


# ------------------------------------------------------------------ weights


def test_a_transfer_gives_up_before_its_server_is_taken_for_lost() -> None:
    collective = "weights.transport=collective"
    assert mistakes(collective) == []
    (problem,) = mistakes(collective, "weights.part_timeout_s=40")
    assert "coordinator.lease_s 30 ends before a stuck transfer does (40 s)" in problem and "raise lease_s" in problem
    assert mistakes(collective, "weights.connect_timeout_s=40", "coordinator.lease_s=60") == []
    (problem,) = mistakes(collective, "placement.mode=local")
    assert "connects processes" in problem and "set weights.transport: object_store" in problem
    assert mistakes("weights.part_timeout_s=40", "placement.mode=local") == []


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        (["placement={mode: local, policy_workers: 2}"], "placement.mode: local has none", "set placement.mode: ray"),
        (["placement={policy_workers: 2, policy_gpus: 0.5}"], "policy_gpus 0.5: each of 2", "set it to 1"),
        (["placement={policy_workers: 4, policy_gpus: 2}"], "policy_gpus 2: each of 4", "or to 0 for CPUs"),
        (["placement={policy_workers: 2, policy_cpus: 0}"], "placement.policy_cpus 0", "set it above 0"),
        (["policy.optimizer_offload=true"], "makes room on a GPU", "or give the policy a GPU"),
    ],
)  # fmt: skip
def test_what_policy_workers_cannot_have(overrides: list[str], problem: str, remedy: str) -> None:
    (line,) = mistakes(*overrides)
    assert problem in line and remedy in line


def test_policy_workers_on_cpus_and_gpus() -> None:
    assert mistakes("placement.policy_workers=3") == []
    assert mistakes(*SGLANG, "placement={policy_workers: 4, policy_cpus: 0}", "policy.optimizer_offload=true") == []
    assert not load_config().policy_in_team
    assert load_config(overrides=["placement.policy_workers=2"]).policy_in_team
    offloaded = load_config(overrides=["placement={policy_gpus: 0.5}", "policy.optimizer_offload=true"])
    assert offloaded.policy_in_team, "a team of one"


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        (["gpus_per_slot: 0.5"], "shares a GPU between a slot and a policy worker", "or both to 0 for CPUs"),
        (["policy_gpus: 0.5"], "shares a GPU between a slot and a policy worker", "or both to 0 for CPUs"),
        (["gpus_per_slot: 1", "policy_gpus: 0.5"], "more than the one GPU", "for one to 0.6 and 0.4"),
        (["gpus_per_slot: 0.3", "policy_gpus: 0.3", "policy_workers: 2"], "which NCCL refuses", "make them 1 together"),
        (["gpus_per_slot: 0.4", "policy_gpus: 0.4"], "2 slots of 0.4 GPU two could come to one", "above 0.5"),
        (["gpus_per_slot: 0.5", "policy_gpus: 0.5", "policy_workers: 2"], "could come to one", "above 0.5"),
        (["gpus_per_slot: 0.6", "policy_gpus: 0.4", "policy_workers: 3"], "more than the 2 slots", "num_servers"),
    ],
)
def test_a_colocated_policy_shares_one_gpu_with_each_slot(overrides: list[str], problem: str, remedy: str) -> None:
    (told,) = mistakes("placement={policy: colocated, " + ", ".join(overrides) + "}")
    assert problem in told and remedy in told


def test_a_colocated_policy_needs_servers_that_let_go() -> None:
    shared = ("rollout.engine.type=sglang", "placement={policy: colocated, gpus_per_slot: 0.6, policy_gpus: 0.4}")
    (told,) = mistakes(*shared)
    assert "set rollout.engine.release_memory: true" in told
    for transport in ("object_store", "collective"):
        assert mistakes(*shared, "rollout.engine.release_memory=true", f"weights.transport={transport}") == []
    resident = (*shared[:1], shared[1].replace("}", ", resident: true}"))
    assert mistakes(*resident) == [], "or a GPU with room for both"
    (told,) = mistakes(*resident, "rollout.engine.release_memory=true")
    assert "leave it false and set placement.resident: true" in told
    (told,) = mistakes("placement.resident=true")
    assert "placement.policy: colocated" in told
    on_one = "placement={policy: colocated, gpus_per_slot: 0.3, policy_gpus: 0.3}"
    assert mistakes(shared[0], on_one, "rollout.engine.release_memory=true") == [], "two slots and the policy on one"
    assert mistakes("placement={policy: colocated, policy_workers: 3}") == [], "CPUs are not shared like that"
    assert (
        mistakes(
            *shared[:1],
            "rollout.engine.release_memory=true",
            "placement={policy: colocated, gpus_per_slot: 0.6, policy_gpus: 0.4, policy_workers: 2}",
        )
        == []
    )
