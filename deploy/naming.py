"""How a run's actors are called in Ray, so that others can find them: `longtail-<run id>-<actor>` in one namespace."""

from __future__ import annotations

import secrets

NAMESPACE = "longtail"


def actor_name(run_id: str, actor: str) -> str:
    """`actor` as in the handles: coordinator, rollout-0, ... Names of different runs never meet (pitfall 66)."""
    return f"longtail-{run_id}-{actor}"


def nameless_run_id() -> str:
    """For what uses a run's actors without a run folder: benchmarks and tests."""
    return f"nameless-{secrets.token_hex(4)}"
