"""The real pool with real processes: what hangs, dies or raises costs its own rollout only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from services.config.reward import RewardConfig
from services.config.schema import ClusterConfig
from services.core.errors import ServiceLostError
from services.core.types import FinishReason, Reward
from services.reward.pool import BATCH, RewardPool, _batches
from services.reward.service import RewardService, build_reward_service
from services.reward.worker import VerifierSpec

RIGHT, WRONG = Reward(1.0, True), Reward(0.0, False)
HANGS = r"\boxed{10^{10^{10}}}"
TIMEOUT_S = 2.0  # for what hangs
PATIENCE_S = 60.0  # for what does not


def service(verifier: str, workers: int = 1, timeout_s: float = PATIENCE_S, marker: str = "#") -> RewardService:
    reward = {"verifier": verifier, "workers": workers, "timeout_s": timeout_s, "answer_marker": marker, "retries": 0}
    return build_reward_service(ClusterConfig.model_validate({"reward": reward}))


@pytest.fixture(scope="module")
def math_service():
    built = service("math")
    yield built
    built.close()
    assert not workers()


def workers() -> list[int]:
    return [p.pid for p in multiprocessing.active_children() if p.name == "pebble_pool_worker"]


def score(built: RewardService, pairs) -> list[Reward]:
    prompts, rollouts = zip(*pairs, strict=True) if pairs else ((), ())
    return built.score(prompts, rollouts)


def test_rewards_come_in_order(math_service, pair):
    pairs = [pair("4", "#4" if i % 3 == 0 else "#5") for i in range(3 * BATCH + 5)]
    assert score(math_service, pairs) == [RIGHT if i % 3 == 0 else WRONG for i in range(len(pairs))]
    assert score(math_service, []) == []


def test_a_hung_verification_costs_only_itself(pair):
    """Row 55: its worker is killed and replaced; the rest of its batch is scored again."""
    others = set(workers())
    hasty_service = service("math", timeout_s=TIMEOUT_S)
    score(hasty_service, [pair("4", "#4")])
    before = set(workers()) - others
    pairs = [pair("4", "#4"), pair("4", HANGS), pair("4", "#5"), pair("4", "#4", FinishReason.LENGTH)]
    rewards = score(hasty_service, pairs)
    assert [rewards[i] for i in (0, 2, 3)] == [RIGHT, WRONG, RIGHT]
    assert not rewards[1].correct and rewards[1].value == 0.0 and "reward.timeout_s = 2 s" in rewards[1].error
    assert hasty_service.errors == 1
    assert score(hasty_service, [pair("4", "#4")]) == [RIGHT]
    assert before and not before & set(workers())
    hasty_service.close()
    assert set(workers()) == others


def test_an_error_is_counted_and_not_a_wrong_answer(math_service, pair):
    errors = math_service.errors
    bad, good = score(math_service, [pair(r"\frac{", "#12"), pair("12", "#12")])
    assert bad.error is not None and bad.error.startswith("ValueError: math-verify cannot read")
    assert good == RIGHT
    assert math_service.errors == errors + 1


def test_works_from_a_thread(math_service, pair):
    """Row 54, as a Ray actor calls it."""
    found: list[list[Reward]] = []
    thread = threading.Thread(target=lambda: found.append(score(math_service, [pair("12", r"\boxed{12}")])))
    thread.start()
    thread.join(timeout=60)
    assert found == [[RIGHT]]


def kill_once_busy(pid: int) -> None:
    """A worker that has nothing to do uses no processor."""
    process = psutil.Process(pid)
    before = process.cpu_times().user
    while process.cpu_times().user < before + 0.2:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


def test_a_worker_killed_while_busy_or_idle_is_replaced(math_service, pair):
    score(math_service, [pair("4", "#4")])
    thread = threading.Thread(target=kill_once_busy, args=(workers()[0],))
    thread.start()
    (reward,) = score(math_service, [pair("4", HANGS)])
    thread.join()
    assert reward.error == "the verifier's process died (exit code -9)"
    score(math_service, [pair("4", "#4")])
    os.kill(workers()[0], signal.SIGKILL)
    time.sleep(0.5)
    assert score(math_service, [pair("4", "#4")]) == [RIGHT]


def test_workers_do_not_load_torch(math_service, pair):
    import torch  # noqa: F401 - the service's process often has it

    score(math_service, [pair("4", "#4")])
    for pid in workers():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def test_task_service_scores_by_the_prompts_task(pair):
    built = service("task", workers=2)
    try:
        good, partial, unknown = score(
            built, [pair("7", "#7.0"), pair("7", "#the 7"), pair("7", "#7", task="no such task")]
        )
    finally:
        built.close()
    assert good == RIGHT
    assert 0 < partial.value < 1 and not partial.correct
    assert unknown.error is not None and "no such task" in unknown.error
    assert built.errors == 1


def test_a_verifier_that_cannot_start_is_a_lost_service(pair):
    pool = RewardPool(
        VerifierSpec(RewardConfig(verifier="function", function="no.such_module")), workers=1, timeout_s=1.0
    )
    try:
        with pytest.raises(ServiceLostError, match="reward pool is lost: its workers cannot start"):
            pool.score([pair("1", "#1")])
    finally:
        pool.close()


def test_a_rollout_of_another_prompt_is_a_bug(math_service, pair):
    prompt, rollout = pair("1", "#1")
    with pytest.raises(AssertionError, match="another prompt"):
        math_service.score([type(prompt)("other", "", (), "1", "t")], [rollout])


def test_batches_cover_everything_once():
    for count in range(70):
        for number in (1, 2, 5):
            batches = _batches(count, number)
            assert [i for batch in batches for i in batch] == list(range(count))
            assert all(0 < len(batch) <= BATCH for batch in batches)


ORPHAN = """
import multiprocessing, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from services.config.reward import RewardConfig
from services.core.types import *
from services.reward.pool import RewardPool
from services.reward.worker import VerifierSpec

if __name__ == "__main__":
    pool = RewardPool(VerifierSpec(RewardConfig(verifier="math")), workers=1, timeout_s={timeout})
    prompt = Prompt("id", "", (), "4", "t")
    def score(text):
        pool.score([(prompt, Rollout("g", "id", 0, 0, (), (), (), text, FinishReason.STOP, SamplingParams(), (), (),
                                     AcceptanceStats()))])
    score("#4")
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    if {busy}:
        threading.Thread(target=score, args=({text!r},)).start()
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_workers_do_not_outlive_a_killed_service(tmp_path, busy):
    """Busy in one C call, no Python runs in the worker: there the CPU limit ends it."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN.format(root=str(Path.cwd()), busy=busy, text=HANGS, timeout=TIMEOUT_S), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    (pid,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 90
    while _alive(pid):
        assert time.monotonic() < deadline, f"worker {pid} outlived its service"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def flaky(tmp_path, monkeypatch):
    """A module of the user's whose verifier fails on "#again" the first `failures` times, whatever process runs it."""

    def make(failures: int) -> None:
        (tmp_path / "flaky_rewards.py").write_text(
            "import pathlib\n"
            f"COUNT = pathlib.Path({str(tmp_path / 'count')!r})\n"
            "def score(prompt, rollout):\n"
            "    if 'again' not in rollout.text: return 0.5\n"
            "    with COUNT.open('a') as file: file.write('x')\n"
            f"    if len(COUNT.read_text()) <= {failures}: raise ConnectionError('the judge is away')\n"
            "    return True\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "flaky_rewards", raising=False)

    return make


@pytest.mark.parametrize(("failures", "retries", "right"), [(1, 1, True), (2, 1, False), (2, 2, True), (1, 0, False)])
def test_a_failed_verification_is_tried_again(flaky, pair, failures, retries, right):
    flaky(failures)
    reward = {"verifier": "function", "function": "flaky_rewards.score", "retries": retries, "timeout_s": 10.0}
    built = build_reward_service(ClusterConfig.model_validate({"reward": reward}))
    try:
        good, again = score(built, [pair("1", "#1"), pair("1", "#again")])
    finally:
        built.close()
    assert good == Reward(0.5, False)
    assert again == RIGHT if right else (again.error is not None and "the judge is away" in again.error)
    assert built.errors == (not right)
