"""A model that is served: requests, servers, drafts, and what the drafter learns meanwhile."""

from __future__ import annotations

from deploy.monitoring.panels import RATE, DashboardSpec, PanelSpec, Query, RowSpec, lines, stacked


def pick(name: str, where: str = "") -> str:
    return f'longtail_serving_{name}{{model=~"$model"{where}}}'


def rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum by (model{', ' + by if by else ''}) (rate({pick(name, where)}{RATE}))"


def quantiles(title: str, text: str, name: str) -> PanelSpec:
    asked = (0.5, 0.9, 0.99)
    queries = tuple(Query(f"histogram_quantile({q}, {rate(f'{name}_bucket', by='le')})", f"p{q:.0%}") for q in asked)
    return PanelSpec(title, text, queries, "s", low=0)


STEPS = f"({rate('verify_steps_total')} > 0)"

REQUESTS = RowSpec(
    "Requests",
    (
        stacked("Requests per second", "By the status of the answer; 499: the client went away.",
                rate("requests_total", by="code"), "{{code}}", "reqps"),
        quantiles("Time to the end of an answer", "Refusals included.", "request_seconds"),
        quantiles("Time to the first token", "Of streamed answers.", "first_token_seconds"),
        PanelSpec("Under way", "Requests at the API, and answers at the model servers.",
                  (Query(pick("open_requests"), "requests"),
                   Query(f"sum by (model, state) ({pick('answers')})", "answers {{state}}")), low=0),
        lines("Turned away per minute", "Too much waited at the model server that was asked.",
              f"60 * {rate('refused_total', by='server')}", "{{server}}", "cpm"),
        lines("Model servers", "Those that told their figures.", pick("servers"), "servers"),
    ),
)  # fmt: skip

GENERATION = RowSpec(
    "Generation and drafts",
    (
        stacked("Generated tokens per second", "Of answers that came to their end.",
                rate("generated_tokens_total", by="server"), "{{server}}"),
        lines("Acceptance length", "Tokens per verify step, bonus included.",
              f"1 + {rate('accepted_tokens_total')} / {STEPS}", "tokens"),
        PanelSpec("Draft tokens per second", "Proposed, and of these accepted.",
                  (Query(rate("draft_tokens_total"), "proposed"),
                   Query(rate("accepted_tokens_total"), "accepted")), low=0),
    ),
)  # fmt: skip

LEARNING = RowSpec(
    "Versions and learning",
    (
        lines("Versions", "Served by each model server.", pick("version"), "{{server}}, {{weights}}"),
        stacked("Swaps per minute", "Other weights took the place of those served.",
                f"60 * {rate('swaps_total', by='server')}", "{{server}}", "cpm"),
        lines("Trained tokens per second", "Micro-steps of the drafter in idle moments.",
              rate("learn_tokens_total", by="server"), "{{server}}"),
        PanelSpec("Learning per minute", "Micro-steps, comparisons, and versions made and taken over.",
                  tuple(Query(f"60 * {rate(f'learn_{name}_total')}", legend) for name, legend in
                        (("micro_steps", "micro-steps"), ("exams", "comparisons"), ("published", "published"),
                         ("adopted", "taken over"))), "cpm"),
        lines("Gain of the last comparison", "Of what was learned since the served version.", pick("learn_gain"),
              "{{server}}", "percentunit"),
        lines("Kept to learn from", "Bytes of hidden states.", pick("learn_held_bytes"), "{{server}}", "bytes"),
    ),
)  # fmt: skip

SERVING = DashboardSpec(
    "longtail-serving",
    "Longtail: serving",
    "A policy and its drafter behind the OpenAI API.",
    (REQUESTS, GENERATION, LEARNING),
    of="model",
)
