"""The Serve application with two replicas: one is killed under load, and all swap their weights under load."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deploy.serve_model import application, deploy, swap_to_newer
from deploy.serving import APPLICATION, MODEL, ServeArguments, config_of_server, weights_of
from deploy.serving_learning import build_learner
from deploy.serving_source import ModelSource, checkpoint_of
from deploy.session import ray_session
from services.weights.learning import NewDrafter
from tests.deploy.served_run import make_served_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 300.0
PATIENT = ("coordinator.start_timeout_s=600", "rollout.engine.max_running=8")


@dataclass
class Cluster:
    args: ServeArguments
    client: OpenAI
    run: Path

    @property
    def ask(self) -> dict[str, Any]:
        return {"model": self.run.name, "max_tokens": 24, "temperature": 1.0}

    def process_ids(self) -> set[int]:
        handle = serve.get_deployment_handle(MODEL, app_name=APPLICATION)
        return {handle.process_id.remote().result(timeout_s=WAIT_S) for _ in range(20)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    run = make_served_run(tmp_path_factory.mktemp("serving"))
    args = ServeArguments(source=ModelSource(path=str(run)), settings=PATIENT, min_replicas=2,
                          max_replicas=2, max_waiting=400, learn_to=str(run / "learned"))  # fmt: skip
    with (
        ray_session(config_of_server(args), check=False),
        application(args, "127.0.0.1", 0) as port,
    ):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        deploy(args, ModelSource(path=str(run), checkpoint=1))
        yield Cluster(args, client, run)


def wait_for(condition: Any, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.2)


def test_a_replica_killed_under_load_loses_no_request(cluster: Cluster) -> None:
    """Whole answers are made again elsewhere; a stream that has begun ends with an error, never with a part that looks
    like a whole. Each request has one outcome."""
    begun = threading.Event()

    def whole(number: int) -> str:
        answer = cluster.client.completions.create(prompt=f"{number}+1=", n=1, **cluster.ask)
        begun.set()
        assert answer.choices[0].finish_reason in ("stop", "length")
        return "whole"

    def streamed(number: int) -> str:
        ended = Counter[str]()
        try:
            for chunk in cluster.client.completions.create(prompt=f"{number}+2=", stream=True, **cluster.ask):
                begun.set()
                ended.update(c.finish_reason for c in chunk.choices if c.finish_reason)
        except openai.APIError:
            assert not ended, "an error behind the end"
            return "told to be lost"
        assert ended.total() == 1
        return "streamed"

    victim = min(cluster.process_ids())
    with ThreadPoolExecutor(200) as pool:
        asked: list[Future[str]] = [pool.submit(streamed if k % 4 == 3 else whole, k) for k in range(200)]
        assert begun.wait(WAIT_S)
        os.kill(victim, signal.SIGKILL)
        found = Counter(future.result(WAIT_S) for future in asked)
    assert found["whole"] == 150
    assert found["streamed"] + found["told to be lost"] == 50
    wait_for(lambda: len(cluster.process_ids() - {victim}) == 2, "the lost replica is replaced")


def test_a_swap_under_load_fails_no_request_and_keeps_the_processes(cluster: Cluster) -> None:
    """The client asserts one version per answer; across answers both versions are seen."""
    before, over = set[int](), threading.Event()
    wait_for(lambda: before.update(cluster.process_ids()) or len(before) == 2, "both replicas answer")

    def ask(number: int) -> list[str]:
        seen = []
        while not over.is_set():
            if number % 2:
                answer = cluster.client.completions.create(prompt=f"{number}+3=", n=2, **cluster.ask)
                made_by = {answer.system_fingerprint}
            else:
                chunks = cluster.client.completions.create(prompt=f"{number}+3=", stream=True, **cluster.ask)
                made_by = {c.system_fingerprint for c in chunks}
            assert len(made_by) == 1, f"an answer of {made_by}"
            seen.append(str(made_by.pop()))
        return seen

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, k) for k in range(12)]
        try:
            deploy(cluster.args, ModelSource(path=str(cluster.run), checkpoint=3))
            wait_for(lambda: _served(cluster) == {"policy-3"}, "every replica serves the new version")
        finally:
            over.set()
        seen = Counter(re.sub("-drafter.*", "", made_by) for future in asked for made_by in future.result(WAIT_S))
    assert seen.keys() == {"policy-1", "policy-3"}, seen
    assert cluster.process_ids() <= before, "no replica was started anew"
    wait_for(lambda: cluster.process_ids() == before, "both replicas answer again")


def test_both_servers_tell_their_figures_at_one_place(cluster: Cluster) -> None:
    """One of them was killed before: what is told is of those that live."""
    for number in range(6):
        cluster.client.completions.create(prompt=f"{number}+4=", n=2, **cluster.ask)
    url = str(cluster.client.base_url).removesuffix("/v1/")
    families = {f.name: f for f in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)}
    told = families["longtail_serving_generated_tokens"].samples
    assert len({s.labels["server"] for s in told}) == 2 and sum(s.value for s in told) > 0
    assert families["longtail_serving_servers"].samples[0].value == 2
    learned = families["longtail_serving_learn_held_bytes"].samples
    assert {s.labels["server"] for s in learned} == {s.labels["server"] for s in told}
    assert {s.labels["model"] for f in families.values() for s in f.samples} == {cluster.run.name}


def test_a_version_of_one_server_reaches_the_other(cluster: Cluster) -> None:
    """Whoever put it there: here the test does, in a server's place."""
    weights = weights_of(cluster.args, {"path": str(cluster.run), "checkpoint": 3})
    assert weights.drafter is not None
    shelf = build_learner(config_of_server(cluster.args), cluster.run / "learned")._make_shelf(3, weights.policy)
    assert shelf.put(NewDrafter(999, weights.drafter), 0)
    wait_for(lambda: _fingerprints(cluster) == {"policy-3-drafter-999"}, "both serve it")
    answer = cluster.client.completions.create(prompt="1+4=", **cluster.ask)
    assert answer.system_fingerprint == "policy-3-drafter-999"


def test_a_run_that_goes_on_is_followed(cluster: Cluster) -> None:
    folder, args, before = cluster.run / "checkpoints", cluster.args, cluster.process_ids()
    newest, aside = checkpoint_of(args.source), folder.with_name("aside")
    newest.rename(aside)
    second = checkpoint_of(args.source)
    deploy(args, ModelSource(path=str(cluster.run), checkpoint=2))
    wait_for(lambda: _served(cluster) == {"policy-2"}, "the older one is served")
    assert swap_to_newer(args, second) == second, "nothing new, nothing done"
    aside.rename(newest)
    assert swap_to_newer(args, second) == newest
    wait_for(lambda: _served(cluster) == {"policy-3"}, "every replica serves the newer one")
    assert cluster.process_ids() <= before, "no replica was started anew"


def _fingerprints(cluster: Cluster) -> set[str]:
    return {str(cluster.client.models.list().data[0].to_dict()["versions"]) for _ in range(10)}


def _served(cluster: Cluster) -> set[str]:
    return {re.sub("-drafter.*", "", versions) for versions in _fingerprints(cluster)}


def test_refusals_keep_their_meaning_across_processes(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt ids"):
        cluster.client.completions.create(prompt=[999], **cluster.ask)
    with pytest.raises(openai.BadRequestError, match="prompt ids"):
        next(iter(cluster.client.completions.create(prompt=[999], stream=True, **cluster.ask)))
