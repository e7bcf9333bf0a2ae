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

import openai
import pytest
from openai import OpenAI
from ray import serve

from deploy.serve_model import application, deploy
from deploy.serving import APPLICATION, MODEL, ServeArguments
from deploy.serving_source import ModelSource, serving_config
from deploy.session import ray_session
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
    args = ServeArguments(source=ModelSource(path=str(run), checkpoint=1), settings=PATIENT, min_replicas=2,
                          max_replicas=2, max_waiting=400)  # fmt: skip
    with (
        ray_session(serving_config(args.source, args.settings), check=False),
        application(args, "127.0.0.1", 0) as port,
    ):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
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


def _served(cluster: Cluster) -> set[str]:
    listed = [cluster.client.models.list().data[0].to_dict()["versions"] for _ in range(10)]
    return {re.sub("-drafter.*", "", str(versions)) for versions in listed}


def test_refusals_keep_their_meaning_across_processes(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt ids"):
        cluster.client.completions.create(prompt=[999], **cluster.ask)
    with pytest.raises(openai.BadRequestError, match="prompt ids"):
        next(iter(cluster.client.completions.create(prompt=[999], stream=True, **cluster.ask)))
