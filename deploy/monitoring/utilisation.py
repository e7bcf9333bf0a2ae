"""Who uses the GPU slots: the roles over time, the idle windows and what was made of them, the parts of a step."""

from __future__ import annotations

from deploy.monitoring.panels import (
    RATE,
    STEPS,
    DashboardSpec,
    PanelSpec,
    Query,
    RowSpec,
    grown,
    lines,
    pick,
    quantiles,
    rate,
    stacked,
)

IN_SLOTS = "=~slot .*"
RECLAIMED = f"{rate('idle_seconds_total', over=STEPS, use='drafting')} / {rate('idle_seconds_total', over=STEPS)}"
PER_SLOT = f"rate({pick('slot_seconds_total', slot=IN_SLOTS)}{RATE})"
GPU_SECONDS = f"sum by (run_id, role) ({PER_SLOT} * on (run_id, slot) group_left () {pick('gpus')})"
POLICY_GPU_SECONDS = f"{rate('slot_seconds_total', slot='policy')} * on (run_id) {pick('policy_gpus')}"
WINDOWS_PER_S, WINDOW_S = (rate(f"idle_window_seconds_{end}", over=STEPS) for end in ("count", "sum"))
STEPS_MADE = grown("steps_total")
SWITCHES, SWITCH_S, SWITCH_BYTES = (
    rate(f"memory_{name}_total", by="switch", over=STEPS) for name in ("switches", "switch_seconds", "switch_bytes")
)

SLOTS = RowSpec(
    "Who uses the slots",
    (
        PanelSpec(
            "Role of every slot",
            "One row per GPU slot, its colour the role that held its lease when Prometheus asked. A role shorter than "
            "the scrape interval may fall between two scrapes: the panel below counts every second.",
            (Query(pick("slot_state"), "{{slot}}"),),
            draw="timeline",
            width=24,
        ),
        stacked("Slots by role", "Slot seconds per second, by what they were used for: it sums to the number of slots.",
                rate("slot_seconds_total", by="role", slot=IN_SLOTS), "{{role}}", width=16),
        PanelSpec("Slots right now", "By role; a role that nobody has is 0.", (Query(pick("slots"), "{{role}}"),),
                  draw="stat"),
        lines("Drafter training by slot", "Share of each slot's time in which it trained the drafter.",
              rate("slot_seconds_total", by="slot", slot=IN_SLOTS, role="drafting"), "{{slot}}", "percentunit"),
        PanelSpec("GPUs in use by role", "GPU seconds per second: slot seconds times the GPUs of a slot, and those of "
                  "the policy trainer. 0 without GPUs.",
                  (Query(GPU_SECONDS, "{{role}}"), Query(POLICY_GPU_SECONDS, "policy trainer")), "short", "stacked",
                  low=0),
        stacked("Policy trainer and reward workers", "Share of the time in which they worked.",
                rate("slot_seconds_total", by="slot", slot="!~slot .*"), "{{slot}}", "percentunit"),
    ),
)  # fmt: skip

WINDOWS = RowSpec(
    "Idle windows",
    (
        lines("Idle time reclaimed", "Of the slot seconds without rollout work inside rollout phases, the share that "
              "trained the drafter.", RECLAIMED, "reclaimed", "percentunit"),
        stacked("Slot time without rollout work", "Slot seconds per second inside rollout phases.",
                rate("idle_seconds_total", by="use"), "{{use}}"),
        lines("Idle windows per minute", "A slot's server ran dry while another one still generated.",
              f"60 * {WINDOWS_PER_S}", "windows", "cpm"),
        quantiles("Length of idle windows", "What the long tail leaves to be used.", "idle_window_seconds", "s"),
        quantiles("Return of a training slot", "From asking a slot that trains the drafter to leave until it was free: "
                  "a micro-step and its handing in.", "slot_return_seconds", "s"),
        lines("Mean idle window", "Seconds.", f"{WINDOW_S} / {WINDOWS_PER_S}",
              "mean", "s"),
    ),
)  # fmt: skip

STEP = RowSpec(
    "Steps",
    (
        PanelSpec("Step", "The policy step under way, and how many there are to be.",
                  (Query(pick("step"), "step"), Query(pick("planned_steps"), "planned")), draw="stat"),
        stacked("Seconds per step by part", "Wall clock; told once a step.",
                f"{grown('step_part_seconds_total', by='part')} / on (run_id) group_left () {STEPS_MADE}",
                "{{part}}", "s"),
        stacked("Phase", "Share of the time by phase.",
                f"avg by (run_id, phase) (avg_over_time({pick('phase')}{RATE}))", "{{phase}}",
                "percentunit"),
        quantiles("Decision latency", "From the moment that a rollout server's answer was there until its next order "
                  "was sent: rising means that the coordinator has more slots than it can serve.", "decision_seconds",
                  "s"),
    ),
)  # fmt: skip

ENERGY = RowSpec(
    "Energy and memory",
    (
        stacked("Power by role", "Of the run's GPUs; only in steps that were metered.",
                rate("energy_joules_total", by="role", over=STEPS), "{{role}}", "watt"),
        stacked("Joules per step by role", "",
                f"{grown('energy_joules_total', by='role')} / on (run_id) group_left () {STEPS_MADE}",
                "{{role}}", "joule"),
        PanelSpec("GPU memory lent out and taken back", "Switches per minute, seconds and bytes of one switch.",
                  (Query(f"60 * {SWITCHES}", "{{switch}} a minute"),
                   Query(f"{SWITCH_S} / {SWITCHES}", "{{switch}}, seconds"),
                   Query(f"{SWITCH_BYTES} / {SWITCHES} / 1e9", "{{switch}}, GB"))),
    ),
)  # fmt: skip

HEALTH = RowSpec(
    "Health",
    (
        lines("Events", "Losses, returns, published drafters and more, within the window for steps.",
              f"{grown('events_total', by='kind')} > 0", "{{kind}}"),
        lines("Coordinators that took over", "From one that died; the counters go on.",
              pick("coordinator_restarts_total"), "restarts"),
        lines("Age of the values", "They are never older; rising means that nobody takes them from the coordinator.",
              f"time() - {pick('read_timestamp_seconds')}", "age", "s"),
        PanelSpec("Run", "", (Query(pick("run_info"), "{{name}}: {{run_id}}"),), draw="stat", width=24),
    ),
)  # fmt: skip

UTILISATION = DashboardSpec(
    "longtail-utilisation",
    "Longtail: utilisation",
    "Who uses the GPU slots, and what becomes of the idle time of the long tail.",
    (SLOTS, WINDOWS, STEP, ENERGY, HEALTH),
)
