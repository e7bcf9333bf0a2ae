"""`longtail bench policy`: the policy trainer by itself."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploy.cli_shared import config_of, errors_told, interrupt_on_sigterm


def bench_policy(
    config: Annotated[str, typer.Option(help="Whose model, policy trainer and placement to measure.")] = "pocket-demo",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured steps, after one for warm-up.")] = 5,
    groups: Annotated[int, typer.Option(min=1, help="Of rollout.group_size rollouts, in a step.")] = 8,
    median_tokens: Annotated[int, typer.Option(min=1, help="Of a response; the longest fill engine.max_len.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Tokens per second, model FLOPs utilisation and publishing of the policy trainer, on made-up batches."""
    with errors_told():
        resolved = config_of(config, settings or [])
        from deploy.bench_policy import Workload, run_bench

        interrupt_on_sigterm()
        prompt, longest = min(64, resolved.data.max_prompt_tokens), resolved.rollout.engine.max_len
        workload = Workload(groups, resolved.rollout.group_size, prompt, median_tokens, longest)
        result = run_bench(resolved, workload, repeats)
        if as_json:
            print(json.dumps(result))
