"""Every metric of a run, and of a model that is served: what dashboards show, rules read and tests compare with. Plain
data.

Names follow Prometheus: base units, `_total` behind what only grows. Rates, shares and ratios are left to queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
SECONDS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
LATENCY = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TOKENS = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` are names whose values `labels.py` fixes, beside the run's id, which every series has; `unit` of one
    sample; `buckets` are a histogram's bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, labels: tuple[str, ...] = (), unit: str = "") -> Metric:
    return Metric(f"longtail_{name}_total", "counter", text, labels, unit)


def _gauge(name: str, text: str, labels: tuple[str, ...] = (), unit: str = "") -> Metric:
    return Metric(f"longtail_{name}", "gauge", text, labels, unit)


def _histogram(name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = SECONDS) -> Metric:
    return Metric(f"longtail_{name}", "histogram", text, labels, name.rpartition("_")[2], buckets)


RUN = (
    _gauge("run_info", "1; the run's name as a label.", ("name",)),
    _gauge("read_timestamp_seconds", "When these values were read, Unix time: they are never older.", unit="seconds"),
    _gauge("phase", "1 for the phase under way, 0 for the others.", ("phase",)),
    _gauge("step", "The policy step under way."),
    _gauge("planned_steps", "Policy steps that the run is to make."),
    _counter("steps", "Policy steps finished."),
    _counter("step_part_seconds", "Wall clock of finished steps by part; drafter training is inside rollout.",
             ("part",), "seconds"),
    _counter("coordinator_restarts", "Coordinators that took over from one that died."),
    _counter("events", "Events by kind: losses, returns, published drafters.", ("kind",)),
)  # fmt: skip

SLOTS = (
    _counter("slot_seconds", "Seconds that a slot, the policy trainer or the reward workers spent in a role.",
             ("slot", "role"), "seconds"),
    _gauge("slot_state", "A slot's role as a number: 0 idle, 1 rollout, 2 draining, 3 drafting, 4 policy, 5 lost.",
           ("slot",)),
    _gauge("slots", "Slots in a role right now.", ("role",)),
    _gauge("gpus", "GPUs that a slot asks for; 0 on CPU.", ("slot",)),
    _gauge("policy_gpus", "GPUs that the policy trainer asks for."),
    _counter("idle_seconds", "Slot seconds without rollout work while a step's rollouts are generated, by their use.",
             ("use",), "seconds"),
    _histogram("idle_window_seconds", "How long a slot had nothing to generate while another one still did."),
    _histogram("slot_return_seconds", "From asking a slot that trains the drafter to leave until it was free."),
    _counter("energy_joules", "Joules of the run's GPUs by role, of steps with figures.", ("role",), "joules"),
    _counter("memory_switches", "Releases and resumes of GPU memory: by rollout servers, by a colocated policy.",
             ("holder", "switch")),
    _counter("memory_switch_seconds", "Seconds that they took.", ("holder", "switch"), "seconds"),
    _counter("memory_switch_bytes", "Bytes of GPU memory that changed hands.", ("holder", "switch"), "bytes"),
)  # fmt: skip

ROLLOUT = (
    _gauge("rollouts", "Rollouts of the phase under way: running at a server, or queued.", ("state",)),
    _counter("rollouts_finished", "Rollouts of recorded steps by how they ended.", ("reason",)),
    _counter("generated_tokens", "Response tokens that a slot's server generated.", ("slot",), "tokens"),
    _counter("prefill_tokens", "Tokens computed before a first new one.", ("slot",), "tokens"),
    _histogram("decision_seconds", "From the moment that a rollout server's answer was there until its next order was "
               "sent.", buckets=LATENCY),
    _counter("server_busy_seconds", "Seconds inside calls of a rollout server.", ("slot",), "seconds"),
    _histogram("response_tokens", "Lengths of the responses of recorded steps.", buckets=TOKENS),
    _gauge("step_response_tokens", "Median, 99th percentile and maximum of the last step's responses.", ("stat",),
           "tokens"),
    _gauge("truncated_fraction", "Share of the last step's responses that were cut at the length limit."),
    _counter("verify_steps", "Verify steps of requests, decode steps without a draft under off. The bucket goes by the "
             "requests that ran at the server in the interval of a report.", ("strategy", "bucket")),
    _counter("strategy_rounds", "Rounds of a slot's server by the strategy that was chosen for them.",
             ("slot", "strategy")),
    _gauge("predicted_gain", "Seconds of the last step's rounds with OFF over those with the selector's choice, as "
           "predicted before the step."),
    _gauge("achieved_gain", "Seconds that OFF would have taken for the last step's tokens, as the selector predicts, "
           "over the seconds of their rounds."),
    _counter("accepted_tokens", "Draft tokens accepted, bonus excluded.", ("strategy", "bucket"), "tokens"),
    _counter("draft_tokens", "Draft tokens proposed.", ("bucket",), "tokens"),
    _gauge("step_acceptance_length", "Tokens per verify step of the last step, bonus included."),
    _gauge("offline_acceptance_length", "The same by a forward pass over the last step's rollouts.", ("drafter",)),
)  # fmt: skip

POLICY = (
    _gauge("reward_mean", "Mean reward of the last step."),
    _gauge("correct_fraction", "Share of the last step's responses that were right."),
    _gauge("heldout_reward", "Mean reward of the last held-out evaluation."),
    _counter("reward_errors", "Rollouts whose verifier failed."),
    _gauge("zero_variance_fraction", "Share of the last step's groups without a signal."),
    _counter("groups", "Groups of recorded steps: trained on, or dropped by dynamic sampling.", ("fate",)),
    _gauge("sampling_rounds", "Rounds that sampled the last step's groups; 1 without dynamic sampling."),
    _gauge("policy_loss", "Policy loss of the last step."),
    _gauge("kl", "KL of the last step, nats per token."),
    _gauge("entropy", "Entropy of the policy in the last step, nats per token."),
    _gauge("grad_norm", "Norm of the last step's gradient before clipping."),
    _gauge("logprob_gap", "Mean difference of the trainer's and the engines' logprobs, nats: a mismatch alarm."),
    _gauge("mismatch_kl", "KL divergence of the engines from the trainer per token before the update, estimated."),
    _gauge("surprise", "Nats per token beyond the entropy; not 0 where something else than the policy chose tokens."),
    _gauge("surprise_errors", "The same in standard errors: a few by chance, tens when speculation is not lossless."),
    _gauge("corrected_fraction", "Share of the loss's tokens whose importance weight was bounded or masked."),
    _gauge("published_version", "The newest version that was published.", ("weights",)),
    _gauge("served_version", "The version that a server says it serves.", ("slot", "weights")),
    _gauge("rollout_staleness", "Policy versions between the oldest rollout of the last step and the policy trained."),
    _histogram("publish_seconds", "From asking for a version until its weights could be fetched.", ("weights",)),
    _counter("publish_bytes", "Bytes of published versions, where the transport tells their size.", ("weights",),
             "bytes"),
    _histogram("load_seconds", "From the first load of published versions until every server served them."),
)  # fmt: skip

DRAFTER = (
    _counter("drafter_micro_steps", "Micro-steps of a slot's drafter trainer.", ("slot",)),
    _counter("drafter_trained_tokens", "Tokens that it trained on.", ("slot",), "tokens"),
    _counter("drafter_busy_seconds", "Seconds inside its training calls.", ("slot",), "seconds"),
    _gauge("drafter_loss", "Drafter loss, mean of the last step's training calls."),
    _gauge("drafter_buffer_bytes", "Hidden states in a trainer's buffer.", ("slot", "place"), "bytes"),
    _gauge("drafter_buffer_sequences", "Sequences in a trainer's buffer.", ("slot",)),
    _counter("drafter_sequences_lost", "Sequences that left a buffer or never got in, by cause.", ("cause",)),
    _counter("hidden_state_sequences", "Sequences whose hidden states went to the drafter trainers."),
    _counter("hidden_state_bytes", "Bytes of hidden states that went to the drafter trainers.", unit="bytes"),
    _counter("hidden_state_missing", "Rollouts that came without their hidden states, or with a part of them."),
)  # fmt: skip

_SERVER = ("model", "server")
# Of `longtail serve`: each sample has the model's name in place of a run's id, and its labels take any value.
SERVING: tuple[Metric, ...] = (
    _counter("serving_requests", "Requests that ended, by the status of the answer; 499: the client went away.",
             ("model", "code")),
    _gauge("serving_open_requests", "Requests under way.", ("model",)),
    _histogram("serving_request_seconds", "From a request to the end of its answer, refusals included.", ("model",)),
    _histogram("serving_first_token_seconds", "From a request to the first token of its streamed answer.", ("model",)),
    _gauge("serving_servers", "Model servers that told their figures for this scrape.", ("model",)),
    _gauge("serving_answers", "Answers at a model server: running, or waiting.", (*_SERVER, "state")),
    _counter("serving_refused", "Requests that found too much waiting at a model server.", _SERVER),
    _counter("serving_generated_tokens", "Tokens of answers that came to their end.", _SERVER, "tokens"),
    _counter("serving_draft_tokens", "Draft tokens proposed for them.", _SERVER, "tokens"),
    _counter("serving_accepted_tokens", "Of these accepted, bonus excluded.", _SERVER, "tokens"),
    _counter("serving_verify_steps", "Verify steps of these answers.", _SERVER),
    _counter("serving_swaps", "Times that other weights took the place of those served.", _SERVER),
    _gauge("serving_version", "The version that a model server serves.", (*_SERVER, "weights")),
    _counter("serving_learn_micro_steps", "Micro-steps of the drafter in idle moments.", _SERVER),
    _counter("serving_learn_tokens", "Tokens that they trained on.", _SERVER, "tokens"),
    _counter("serving_learn_exams", "Comparisons of what was learned with what is served.", _SERVER),
    _counter("serving_learn_published", "Drafters that a server found better and made a version of.", _SERVER),
    _counter("serving_learn_adopted", "Versions of other servers that a server took over.", _SERVER),
    _gauge("serving_learn_held_bytes", "Hidden states of answers that are kept to learn from.", _SERVER, "bytes"),
    _gauge("serving_learn_gain", "By how much longer what was learned is accepted, by the last comparison.", _SERVER),
)  # fmt: skip

METRICS: tuple[Metric, ...] = (*RUN, *SLOTS, *ROLLOUT, *POLICY, *DRAFTER)
BY_NAME = {metric.name: metric for metric in METRICS}


def sample_names(metric: Metric) -> tuple[str, ...]:
    """The names that a scrape shows and a query may use."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{end}" for end in ("bucket", "sum", "count"))
    return (metric.name,)
