"""Learning: rewards, the policy's health, versions and their publishing, and the drafter's training."""

from __future__ import annotations

from deploy.monitoring.panels import (
    STEPS,
    DashboardSpec,
    PanelSpec,
    Query,
    RowSpec,
    grown,
    lines,
    pick,
    quantile,
    rate,
    stacked,
)

LAG = f"{pick('published_version')} - on (run_id, weights) group_right () {pick('served_version')}"

REWARD = RowSpec(
    "Reward",
    (
        PanelSpec("Reward", "Mean of the last step, and of the last held-out evaluation.",
                  (Query(pick("reward_mean"), "training"), Query(pick("heldout_reward"), "held-out")), width=6),
        lines("Right answers", "Share of the last step's responses.", pick("correct_fraction"), "right", "percentunit",
              width=6),
        PanelSpec("Without a signal", "Groups whose rewards are all equal teach nothing; verifiers that fail are no "
                  "wrong answers.",
                  (Query(pick("zero_variance_fraction"), "groups, share"),
                   Query(grown("reward_errors_total"), "verifier errors")), width=6),
        PanelSpec("Dynamic sampling", "Groups that were sampled, by what became of them; rounds of the last step.",
                  (Query(grown("groups_total", by="fate"), "{{fate}}"), Query(pick("sampling_rounds"), "rounds")),
                  width=6),
    ),
)  # fmt: skip

POLICY = RowSpec(
    "Policy",
    (
        lines("KL", "Nats per token.", pick("kl"), "KL", width=6),
        lines("Entropy", "Nats per token.", pick("entropy"), "entropy", width=6),
        lines("Gradient norm", "Before clipping.", pick("grad_norm"), "norm", width=6),
        lines("Loss", "", pick("policy_loss"), "loss", width=6),
        lines("Trainer against engines", "Mean difference of logprobs before the update, nats: a jump means that "
              "engines and trainer do not compute the same model.", pick("logprob_gap"), "gap", width=12),
        lines("Mismatch, KL", "KL divergence of the engines from the trainer per token, nats.",
              pick("mismatch_kl"), "KL", width=6),
        lines("Surprise", "How much less likely responses were than the policy's own samples are, nats per token.",
              pick("surprise"), "nats", width=6),
        lines("Surprise, errors", "The same in standard errors: a few by chance; tens mean that speculation or weights "
              "are wrong.", pick("surprise_errors"), "errors", width=6),
        lines("Corrected tokens", "Importance weight bounded, or masked out (policy.correction).",
              pick("corrected_fraction"), "share", width=6),
        lines("Staleness", "Policy versions between the oldest rollout of the last step and the policy it trained.",
              pick("rollout_staleness"), "versions", width=12),
    ),
)  # fmt: skip

VERSIONS = RowSpec(
    "Versions",
    (
        lines("Published versions", "", pick("published_version"), "{{weights}}", width=6),
        lines("Versions behind", "What was published minus what a server said in its last report.", LAG,
              "{{slot}}, {{weights}}", width=6),
        PanelSpec("Publishing, 90th percentile", "Until the weights could be fetched; loading until every server "
                  "served them.",
                  (Query(quantile(0.9, "publish_seconds", by="weights"), "{{weights}}"),
                   Query(quantile(0.9, "load_seconds"), "loading")), "s", width=6, low=0),
        lines("Published bytes per second", "", rate("publish_bytes_total", by="weights", over=STEPS), "{{weights}}",
              "Bps", width=6),
    ),
)  # fmt: skip

DRAFTER = RowSpec(
    "Drafter training",
    (
        stacked("Micro-steps per second", "By slot.", rate("drafter_micro_steps_total", by="slot"), "{{slot}}"),
        stacked("Trained tokens per second", "By slot.", rate("drafter_trained_tokens_total", by="slot"), "{{slot}}"),
        stacked("Time in training calls", "Share of each slot's time.", rate("drafter_busy_seconds_total", by="slot"),
                "{{slot}}", "percentunit"),
        lines("Drafter loss", "Mean of the last step's training calls.", pick("drafter_loss"), "loss"),
        lines("Buffer", "Bytes of hidden states at each trainer.", pick("drafter_buffer_bytes"), "{{slot}}, {{place}}",
              "bytes"),
        lines("Sequences in the buffer", "", pick("drafter_buffer_sequences"), "{{slot}}"),
        stacked("Sequences lost per minute", "By cause, over all trainers.",
                f"60 * {rate('drafter_sequences_lost_total', by='cause', over=STEPS)}", "{{cause}}", "cpm"),
        PanelSpec("Hidden states per minute", "Sequences that came with their states, and without.",
                  (Query(f"60 * {rate('hidden_state_sequences_total', over=STEPS)}", "with"),
                   Query(f"60 * {rate('hidden_state_missing_total', over=STEPS)}", "missing or cut short")), "cpm"),
        lines("Hidden states, bytes per second", "", rate("hidden_state_bytes_total", over=STEPS), "bytes", "Bps"),
    ),
)  # fmt: skip

LEARNING = DashboardSpec(
    "longtail-learning",
    "Longtail: learning",
    "What the policy and the drafter learn, and how their versions travel.",
    (REWARD, POLICY, VERSIONS, DRAFTER),
)
