"""The handle on a running SGLang engine, over a stand-in with SGLang's asynchronous face."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.core.errors import BatchError, ConfigError, WaitTimeoutError
from services.core.selector import SelectorState
from services.core.types import FinishReason, ServedVersions, StrategySpan
from services.rollout.service import RolloutService
from services.rollout.sglang.engine import SGLangEngine
from services.rollout.sglang.graphs import CapturedGraphs
from services.rollout.sglang.handle import Update
from services.rollout.sglang.launch import SGLangHandle, updated
from services.rollout.sglang.plugin import CAPTURE
from services.rollout.sglang.switching import SWITCH
from tests.services.rollout.engines import group, letters, ticking
from tests.services.rollout.sglang.fake import limits_of
from tests.services.rollout.sglang.handles import CHAIN, LENGTH, SAMPLING, STOP, news, wait_until
from tests.services.rollout.sglang.manager import DRAFTER, MODEL, POLICY, Engine, chunk_of
from tests.services.rollout.sglang.standins import GenerateReqInput, RpcReqOutput

# ------------------------------------------------------------------ requests


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_asked_of_sglang(engine: Engine, deterministic: bool) -> None:
    handle = SGLangHandle(engine, "rollout-3", 1, deterministic, 20.0, device="cpu")
    handle.submit("1/g#0", (1, 2, 3), SAMPLING, seed=2**31 + 5)
    wait_until(lambda: engine.tokenizer_manager.requests)
    wanted = {"temperature": 0.8, "max_new_tokens": 9, "stop_token_ids": [2]}
    wanted |= {"sampling_seed": 5} if deterministic else {}
    assert engine.tokenizer_manager.requests["1/g#0"] == GenerateReqInput(
        rid="1/g#0", input_ids=[1, 2, 3], sampling_params=wanted, return_logprob=True, stream=True
    )
    assert engine.tokenizer_manager.requests["1/g#0"].extra_key is None
    handle.submit("2/g#0", (1, 2, 3), SAMPLING, 0, window=5)
    wait_until(lambda: "2/g#0" in engine.tokenizer_manager.requests)
    assert engine.tokenizer_manager.requests["2/g#0"].extra_key == "longtail-states/5"
    handle.abort_all()
    handle.close()


def test_news_are_told_once_and_the_newest_says_everything(engine: Engine, handle: SGLangHandle) -> None:
    assert handle.poll(0.0) == []
    handle.submit("a", (1, 2), SAMPLING, 0)
    handle.submit("b", (1, 3), SAMPLING, 0)
    engine.say("a", chunk_of([5]))
    engine.say("a", chunk_of([5, 6, 7], histogram=[0, 1]))
    engine.say("b", chunk_of([9]))
    wait_until(lambda: len(handle._news) == 2 and len(handle._news["a"].response_ids) == 3)
    assert sorted(handle.poll(0.0), key=lambda u: u.rid) == [
        Update("a", (5, 6, 7), (-0.5, -0.6, -0.7), (0, 1)),
        Update("b", (9,), (-0.9,)),
    ]
    assert handle.poll(0.0) == []
    engine.say("b", chunk_of([9, 2], STOP, [1]))
    assert news(handle) == [Update("b", (9, 2), (-0.9, -0.2), (1,), "stop")]
    wait_until(lambda: handle._live.keys() == {"a"})


def test_a_poll_waits_for_the_first_news_and_no_longer(engine: Engine, handle: SGLangHandle) -> None:
    started = time.monotonic()
    assert handle.poll(0.1) == [] and time.monotonic() - started >= 0.1
    handle.submit("a", (1, 2), SAMPLING, 0)
    later = threading.Timer(0.1, lambda: engine.say("a", chunk_of([5])))
    later.start()
    assert [u.rid for u in handle.poll(600.0)] == ["a"], "it does not wait for more than the first, nor for its budget"
    assert handle.poll(-1.0) == [], "a budget that is used up"
    later.join()


def test_chunks_go_on_growing_behind_the_news_that_were_told(engine: Engine, handle: SGLangHandle) -> None:
    """SGLang hands out its own lists, and extends them."""
    handle.submit("a", (1, 2), SAMPLING, 0)
    chunk = chunk_of([5])
    engine.say("a", chunk)
    (first,) = news(handle)
    chunk["output_ids"].append(6)
    assert first.response_ids == (5,)


def test_an_aborted_request_and_one_that_sglang_gave_up(engine: Engine, handle: SGLangHandle) -> None:
    handle.submit("a", (1, 2), SAMPLING, 0)
    wait_until(lambda: "a" in engine.tokenizer_manager.chunks)
    handle.abort("a")
    assert news(handle) == [Update("a", (), (), (), "abort", "Aborted")]


@pytest.mark.parametrize("error", [ValueError("the input is too long"), RuntimeError("broken")], ids=str)
def test_an_exception_in_a_requests_task_is_news_of_it(engine: Engine, handle: SGLangHandle, error: Exception) -> None:
    """Nobody else would ever hear of the request again."""
    engine.tokenizer_manager.trouble.generate_error = error
    handle.submit("a", (1, 2), SAMPLING, 0)
    assert news(handle) == [Update("a", (), (), finish="abort", message=f"{type(error).__name__}: {error}")]
    assert not handle._live


def test_abort_all_returns_when_nothing_is_left_and_drops_the_news(engine: Engine, handle: SGLangHandle) -> None:
    handle.abort_all()
    for n in range(6):
        handle.submit(f"{n}/g", (1, 2), SAMPLING, 0)
    engine.say("2/g", chunk_of([5]))
    handle.abort_all()
    assert not handle._live and handle.poll(0.0) == [] and not engine.tokenizer_manager.chunks
    handle.submit("7/g", (1, 2), SAMPLING, 0)
    engine.say("7/g", chunk_of([4], LENGTH))
    assert [u.rid for u in news(handle)] == ["7/g"]


def test_abort_all_is_asked_again_until_it_is_heard(engine: Engine, handle: SGLangHandle) -> None:
    """A request that reaches SGLang behind the abort is not hit by it."""
    engine.tokenizer_manager.trouble.deaf = True
    handle.submit("a", (1, 2), SAMPLING, 0)
    threading.Timer(0.2, lambda: setattr(engine.tokenizer_manager.trouble, "deaf", False)).start()
    handle.abort_all()
    assert engine.tokenizer_manager.calls.count(("abort", "*")) >= 2 and not handle._live


def test_an_abort_that_is_never_heard_runs_out(engine: Engine, hasty: SGLangHandle) -> None:
    engine.tokenizer_manager.trouble.deaf = True
    hasty.submit("a", (1, 2), SAMPLING, 0)
    with pytest.raises(
        WaitTimeoutError,
        match=r"rollout-3: SGLang did not finish dropping all requests within 0 s: see its log, or raise "
        r"coordinator\.call_timeout_s",
    ):
        hasty.abort_all()
    engine.tokenizer_manager.trouble.deaf = False
    hasty._timeout_s = 60.0
    hasty.abort_all()


def test_chunks_become_updates() -> None:
    told = updated(Update("a", (), ()), chunk_of([5, 6]))
    assert told == Update("a", (5, 6), (-0.5, -0.6))
    assert updated(told, chunk_of([5, 6, 7], LENGTH, [0, 2])) == Update(
        "a", (5, 6, 7), (-0.5, -0.6, -0.7), (0, 2), "length"
    )
    abort = {"type": "abort", "message": "no room", "status_code": 503}
    assert updated(Update("a", (), ()), chunk_of([], abort)) == Update("a", (), (), (), "abort", "no room")
    bare = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": None}}}
    assert updated(Update("a", (), ()), bare) == Update("a", (), (), (), "abort", "")


class _Counting(list[tuple[float, int, None]]):
    """Entries that count how many of them were handed out one by one."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        _Counting.looked += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Any:
        _Counting.looked += len(self)
        return super().__iter__()


def test_no_logprob_of_a_long_response_is_looked_at_twice() -> None:
    chunk, told = chunk_of([]), Update("a", (), ())
    entries = chunk["meta_info"]["output_token_logprobs"] = _Counting()
    for token in range(1, 400):
        chunk["output_ids"].append(token)
        entries.append((-token / 10, token, None))
        told = updated(told, chunk)
    assert told == updated(Update("a", (), ()), chunk_of(list(range(1, 400))))
    assert _Counting.looked == 399


# ------------------------------------------------------------------ memory, life, all together


def test_memory_is_released_and_resumed_whole(engine: Engine, handle: SGLangHandle) -> None:
    handle.switch_memory(True)
    handle.switch_memory(False)
    assert engine.tokenizer_manager.calls == [("release", None), ("resume", None)], "no tags: all there is"


def test_close_ends_the_thread_and_the_engine(engine: Engine) -> None:
    handle = SGLangHandle(engine, "rollout-3", 1, False, 60.0, device="cpu")
    thread = handle._thread
    assert thread.is_alive() and thread.daemon and "rollout-3" in thread.name
    handle.submit("a", (1, 2), SAMPLING, 0)
    wait_until(lambda: handle._live)
    task = handle._live["a"]
    handle.close()
    assert not thread.is_alive() and engine.shut_down and not engine.loop.is_running()
    assert task.cancelled(), "not left to the garbage collector"


def test_a_rollout_server_over_the_handle(engine: Engine, handle: SGLangHandle) -> None:
    """Adapter, handle, hooks and loader together: news in pieces, a load under way, a cut at the stop id."""
    service = RolloutService(
        SGLangEngine(handle, limits_of(MODEL, CHAIN), {3: CHAIN}, letters, ticking()), {}, ticking()
    )
    service.open_epoch(1)
    service.load_policy(0, POLICY, 1)
    service.load_drafter(0, DRAFTER, 1)
    service.submit([group((1, 2), 2, SAMPLING, name="g")], 1)
    one, two = "1/g#0", "2/g#1"
    engine.say(one, chunk_of([5, 6, 7], histogram=[0, 1]))
    wait_until(lambda: one in handle._news)
    report = service.advance(0.0, 1)
    (running,) = report.running
    assert report.waiting == 1 and running.rollout_id == "g#0" and running.num_tokens == 3
    assert running.acceptance.histogram == (0, 1)
    assert service.load_policy(1, POLICY, 1) == ServedVersions(1, 0)
    engine.say(one, chunk_of([5, 6, 7, 2, 8], STOP, [0, 2]))
    engine.say(two, chunk_of([4, 4, 4, 4, 4, 4, 4, 4, 4], LENGTH, [0, 0, 0, 2]))
    wait_until(lambda: handle._news.keys() == {one, two})
    first, second = sorted(service.advance(0.0, 1).finished, key=lambda r: r.index)
    assert first.response_ids == (5, 6, 7, 2) and first.finish_reason is FinishReason.STOP
    assert first.rollout_logprobs == (-0.5, -0.6, -0.7, -0.2) and first.policy_versions == (0, 1)
    assert first.acceptance.histogram == (1, 1), "the last step's token behind the stop was never emitted"
    assert len(second.response_ids) == 9 and second.acceptance.acceptance_length == 4
    assert service.advance(0.0, 1).running == ()


# ------------------------------------------------------------------ hidden states


def keep_some(engine: Engine, handle: SGLangHandle) -> None:
    handle.load("policy", 0, POLICY)
    handle.capture_states(100_000)
    capture = getattr(engine.send_to_rpc.scheduler.draft_worker.draft_worker, CAPTURE)
    capture.prefill(["a"], [0], [2], 0, torch.ones(2, 3), torch.tensor([5, 6]), torch.tensor([7]))


def test_states_come_out_of_the_scheduler(engine: Engine, handle: SGLangHandle) -> None:
    keep_some(engine, handle)
    captured = handle.take_states()
    assert captured.rids == ("a",) and captured.behind.tolist() == [6, 7] and captured.engine == "SGLang 0.5.17"
    assert handle.take_states().rids == ()
    handle.capture_states(0)
    with pytest.raises(BatchError, match=r"rollout-3: SGLang could not hand over .* no memory was set aside"):
        handle.take_states()


def test_an_engine_that_cannot_keep_states_says_so(engine: Engine, handle: SGLangHandle) -> None:
    engine.send_to_rpc.scheduler.draft_worker = None
    with pytest.raises(
        ConfigError, match=r"rollout-3: only an engine with an EAGLE drafter.*set drafter\.states: policy"
    ):
        handle.capture_states(100_000)


def test_states_that_never_come_are_not_waited_for_for_ever(engine: Engine, hasty: SGLangHandle) -> None:
    """And the late answer is nobody else's."""
    keep_some(engine, hasty)
    engine.tokenizer_manager.trouble.hang = "rpc"
    with pytest.raises(WaitTimeoutError, match=r"rollout-3: SGLang did not finish handing over the hidden states"):
        hasty.take_states()
    engine.tokenizer_manager.trouble.hang = ""
    hasty._timeout_s = 60.0
    engine.send_to_rpc.answers.append(RpcReqOutput(success=False, message="late"))
    assert hasty.take_states().rids == ()
    with pytest.raises(BatchError, match="late"):
        engine.send_to_rpc.send = lambda message: engine.send_to_rpc.answers.append(  # type: ignore[method-assign]
            RpcReqOutput(success=False, message="late")
        )
        hasty.take_states()


# ------------------------------------------------------------------ strategies


class Switched:
    """A switch as far as its calls go."""

    def __init__(self) -> None:
        span = StrategySpan(1.0, 2.0, "eagle_3_1_4", "pays", 3, 0.9, 12, 30, 4, 4, 2.5, 3.0)
        self.place = ""
        self.captured = {d: CapturedGraphs(d, 8 >> d, 3, 100 + d, 200 + d, 0.5) for d in (0, 3)}
        self.forced: list[int | None] = []
        self.decider = SimpleNamespace(force=self.forced.append, take_spans=lambda: (span,))


def test_forced_depths_choices_and_graphs_pass_through_the_scheduler(engine: Engine, handle: SGLangHandle) -> None:
    switch, worker = Switched(), engine.send_to_rpc.scheduler.draft_worker
    setattr(worker, SWITCH, switch)
    handle.force_depth(3)
    handle.force_depth(None)
    assert switch.forced == [3, None]
    (span,) = handle.take_spans()
    assert (span.strategy, span.reason, span.tokens, span.expected) == ("eagle_3_1_4", "pays", 30, 12.0)
    with pytest.raises(ConfigError, match=r"rollout-3: depth 5 is not among the captured ones: see rollout"):
        handle.force_depth(5)


def test_what_the_selector_learned_passes_through_the_scheduler(engine: Engine, handle: SGLangHandle) -> None:
    assert handle.selector_state() is None
    assert not handle.restore_selector(SelectorState("here", {})), "an engine that keeps its strategy"
    switch, given = Switched(), list[SelectorState]()
    switch.place = "here"
    switch.decider.selector_state = lambda place: SelectorState(place, {"kind": "adaptive", "x": [1.5, None]})
    switch.decider.restore_selector = lambda state, place: given.append(state) or state.place == place
    setattr(engine.send_to_rpc.scheduler.draft_worker, SWITCH, switch)
    state = handle.selector_state()
    assert state == SelectorState("here", {"kind": "adaptive", "x": [1.5, None]})
    assert handle.restore_selector(state) and given == [state]
    assert not handle.restore_selector(SelectorState("there", {}))


def test_an_engine_that_keeps_its_strategy_refuses_and_tells_nothing(engine: Engine, handle: SGLangHandle) -> None:
    with pytest.raises(ConfigError, match="depth 0 is not among the captured ones"):
        handle.force_depth(0)
    assert handle.take_spans() == () and handle.graphs() == ()


def test_choices_that_cannot_be_told_are_an_error(engine: Engine, handle: SGLangHandle) -> None:
    engine.send_to_rpc.send = lambda message: engine.send_to_rpc.answers.append(  # type: ignore[method-assign]
        RpcReqOutput(success=False, message="no such method")
    )
    with pytest.raises(BatchError, match="could not tell which strategies ran: no such method"):
        handle.take_spans()
