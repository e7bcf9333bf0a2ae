"""Rollout and speculation: tokens, lengths and the tail, acceptance by strategy and bucket."""

from __future__ import annotations

from deploy.monitoring.panels import (
    STEPS,
    DashboardSpec,
    PanelSpec,
    Query,
    RowSpec,
    lines,
    pick,
    quantiles,
    rate,
    stacked,
)

BY = "strategy, bucket"
SPECULATIVE = rate("verify_steps_total", by=BY, strategy="!=off")
ACCEPTANCE = f"1 + {rate('accepted_tokens_total', by=BY)} / ({SPECULATIVE} > 0)"
P50, P99 = (pick("step_response_tokens", stat=stat) for stat in ("p50", "p99"))

GENERATION = RowSpec(
    "Generation",
    (
        stacked("Tokens per second", "Response tokens by slot.", rate("generated_tokens_total", by="slot"), "{{slot}}"),
        PanelSpec("Rollouts under way", "Of the phase: running at a server, and queued.",
                  (Query(pick("rollouts"), "{{state}}"),), draw="stacked", low=0),
        stacked("Rollouts finished per minute", "By how they ended; told once a step.",
                f"60 * {rate('rollouts_finished_total', by='reason', over=STEPS)}", "{{reason}}", "cpm"),
        lines("Tokens per second of work", "Response tokens by second inside the server's calls.",
              f"{rate('generated_tokens_total', by='slot')} / ({rate('server_busy_seconds_total', by='slot')} > 0)",
              "{{slot}}"),
        stacked("Prefilled tokens per second", "Computed before a first new token.",
                rate("prefill_tokens_total", by="slot"), "{{slot}}"),
        lines("Cut responses", "Share of the last step's responses that reached the length limit.",
              pick("truncated_fraction"), "cut", "percentunit"),
    ),
)  # fmt: skip

LENGTHS = RowSpec(
    "Response lengths and the long tail",
    (
        PanelSpec("Lengths of the last step", "Tokens.", (Query(pick("step_response_tokens"), "{{stat}}"),), low=0),
        lines("Tail ratio", "99th percentile over the median of a step's responses: the longer the tail, the more idle "
              "time for the drafter.", f"{P99} / ignoring (stat) {P50}", "p99 / p50"),
        quantiles("Response lengths", "Over the steps of the window, by buckets of powers of two.",
                  "response_tokens", "short"),
    ),
)  # fmt: skip

SPECULATION = RowSpec(
    "Speculation",
    (
        lines("Acceptance length by strategy and bucket", "Tokens per verify step, bonus included; the bucket is the "
              "number of requests that ran at the server.", ACCEPTANCE, "{{strategy}}, {{bucket}} running", width=12),
        PanelSpec("Live drafter against the first one", "Acceptance length: by the engine in the last step, and by a "
                  "forward pass over its rollouts for the live and the frozen first drafter.",
                  (Query(pick("step_acceptance_length"), "measured"),
                   Query(pick("offline_acceptance_length"), "{{drafter}}, offline")), width=12),
        stacked("Steps by strategy", "Verify steps of requests per second; decode steps without a draft are off. It "
                "shows what the selector picked, weighted by requests.",
                rate("verify_steps_total", by=BY), "{{strategy}}, {{bucket}} running"),
        lines("Acceptance rate", "Accepted through proposed draft tokens.",
              f"{rate('accepted_tokens_total', by='bucket')} / ({rate('draft_tokens_total', by='bucket')} > 0)",
              "{{bucket}} running", "percentunit"),
        lines("Drafter version served", "By server; acceptance changes where it moves.",
              pick("served_version", weights="drafter"), "{{slot}}"),
        stacked("Rounds by strategy", "Rounds per second by what was chosen for them; longtail explain says why.",
                rate("strategy_rounds_total", by="slot, strategy"), "{{slot}}: {{strategy}}", width=12),
        PanelSpec("Gain over plain decoding", "How many times as long a step's rounds would have taken with OFF: "
                  "predicted before the step from the lengths of the one before, and as it came out. Only a selector "
                  "that predicts times tells it.",
                  (Query(pick("predicted_gain"), "predicted"), Query(pick("achieved_gain"), "achieved")), width=12),
    ),
)  # fmt: skip

ROLLOUT = DashboardSpec(
    "longtail-rollout",
    "Longtail: rollout and speculation",
    "What the rollout servers generate, how long the tail is, and what the drafter brings.",
    (GENERATION, LENGTHS, SPECULATION),
)
