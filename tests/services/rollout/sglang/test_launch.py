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
from services.core.types import FinishReason, SamplingParams, ServedVersions, StrategySpan
from services.rollout.service import RolloutService
from services.rollout.sglang.engine import SGLangEngine
from services.rollout.sglang.graphs import CapturedGraphs
from services.rollout.sglang.handle import Asked, Update
from services.rollout.sglang.launch import SGLangHandle, updated
from services.rollout.sglang.plugin import CAPTURE
from services.rollout.sglang.switching import SWITCH
from tests.services.rollout.engines import group, letters, ticking
from tests.services.rollout.sglang.fake import limits_of
from tests.services.rollout.sglang.handles import CHAIN, LENGTH, SAMPLING, STOP, asked, news, wait_until
from tests.services.rollout.sglang.manager import DRAFTER, MODEL, POLICY, Engine, chunk_of
from tests.services.rollout.sglang.standins import GenerateReqInput, RpcReqOutput

# ------------------------------------------------------------------ requests


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_asked_of_sglang(engine: Engine, deterministic: bool) -> None:
    handle = SGLangHandle(engine, "rollout-3", 1, deterministic, 20.0, device="cpu")
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    handle.submit([Asked("1/g#0", (1, 2, 3), SAMPLING, 2**31 + 5), Asked("2/h#0", (4,), greedy, 7)])
    wait_until(lambda: engine.tokenizer_manager.requests)
    wanted = [
        {"temperature": 0.8, "max_new_tokens": 9, "stop_token_ids": [2]},
        {"temperature": 0.0, "max_new_tokens": 4, "stop_token_ids": []},
    ]
    if deterministic:
        wanted = [one | {"sampling_seed": seed} for one, seed in zip(wanted, (5, 7), strict=True)]
    assert engine.tokenizer_manager.requests == [
        GenerateReqInput(
            rid=["1/g#0", "2/h#0"],
            input_ids=[[1, 2, 3], [4]],
            sampling_params=wanted,
            return_logprob=[True, True],
            stream=True,
            extra_key=None,
        )
    ]
    handle.abort_all()
    handle.close()


def test_requests_of_two_windows_are_two_batches(engine: Engine, handle: SGLangHandle) -> None:
    """Which requests find each other's prefixes is a matter of the key, and none is a key of its own."""
    one, two, three, four = (*asked("a", "b"), *asked("c", "d", window=5))
    handle.submit([one, three, two, four])
    handle.submit([])
    handle.submit(asked("e", window=0))
    wait_until(lambda: len(engine.tokenizer_manager.requests) == 3)
    assert [(batch.rid, batch.extra_key) for batch in engine.tokenizer_manager.requests] == [
        (["a", "b"], None),
        (["c", "d"], ["longtail-states/5", "longtail-states/5"]),
        (["e"], ["longtail-states/0"]),
    ]
    for rid in "abcde":
        engine.say(rid, chunk_of([4], STOP))
    wait_until(lambda: handle._news.keys() == set("abcde") and not handle._live)


def test_news_are_told_once_and_the_newest_says_everything(engine: Engine, handle: SGLangHandle) -> None:
    assert handle.poll(0.0) == []
    handle.submit(asked("a", "b"))
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
    assert len(handle._live) == 1, "the other of its batch goes on"
    engine.say("a", chunk_of([5, 6, 7, 8], LENGTH, [0, 1, 1]))
    assert news(handle) == [Update("a", (5, 6, 7, 8), (-0.5, -0.6, -0.7, -0.8), (0, 1, 1), "length")]
    wait_until(lambda: not handle._live)


def test_a_poll_waits_for_the_first_news_and_no_longer(engine: Engine, handle: SGLangHandle) -> None:
    started = time.monotonic()
    assert handle.poll(0.1) == [] and time.monotonic() - started >= 0.1
    handle.submit(asked("a"))
    later = threading.Timer(0.1, lambda: engine.say("a", chunk_of([5])))
    later.start()
    assert [u.rid for u in handle.poll(600.0)] == ["a"], "it does not wait for more than the first, nor for its budget"
    assert handle.poll(-1.0) == [], "a budget that is used up"
    later.join()


def test_chunks_go_on_growing_behind_the_news_that_were_told(engine: Engine, handle: SGLangHandle) -> None:
    """SGLang hands out its own lists, and extends them."""
    handle.submit(asked("a"))
    chunk = chunk_of([5])
    engine.say("a", chunk)
    (first,) = news(handle)
    chunk["output_ids"].append(6)
    assert first.response_ids == (5,)


def test_an_aborted_request_and_one_that_sglang_gave_up(engine: Engine, handle: SGLangHandle) -> None:
    handle.submit(asked("a"))
    wait_until(lambda: "a" in engine.tokenizer_manager.chunks)
    handle.abort("a")
    assert news(handle) == [Update("a", (), (), (), "abort", "Aborted")]


def test_an_abort_of_one_leaves_the_others_of_its_batch(engine: Engine, handle: SGLangHandle) -> None:
    handle.submit(asked("1/g", "2/g", "3/g"))
    wait_until(lambda: len(engine.tokenizer_manager.chunks) == 3)
    handle.abort("2/g")
    assert news(handle) == [Update("2/g", (), (), (), "abort", "Aborted")]
    for rid in ("1/g", "3/g"):
        engine.say(rid, chunk_of([5, 2], STOP))
        assert news(handle) == [Update(rid, (5, 2), (-0.5, -0.2), (), "stop")]
    wait_until(lambda: not handle._live)
    assert engine.tokenizer_manager.calls == [("abort", "2/g")]


@pytest.mark.parametrize("error", [ValueError("the input is too long"), RuntimeError("broken")], ids=str)
def test_an_exception_in_a_batchs_task_is_news_of_all(engine: Engine, handle: SGLangHandle, error: Exception) -> None:
    """Nobody else would ever hear of the requests again."""
    engine.tokenizer_manager.trouble.generate_error = error
    handle.submit(asked("a", "b"))
    wait_until(lambda: len(handle._news) == 2 and not handle._live)
    said = f"{type(error).__name__}: {error}"
    assert handle.poll(0.0) == [Update(rid, (), (), finish="abort", message=said) for rid in "ab"]


def test_what_fails_in_the_middle_ends_what_has_not_ended(engine: Engine, handle: SGLangHandle) -> None:
    """SGLang ends a batch's stream with the first error of one of its requests, and may go on with the others."""
    handle.submit(asked("a", "b", "c"))
    engine.say("a", chunk_of([5, 2], STOP))
    assert news(handle) == [Update("a", (5, 2), (-0.5, -0.2), (), "stop")]
    engine.say("b", chunk_of([6]))
    assert [(u.rid, u.finish) for u in news(handle)] == [("b", None)]
    engine.say("c", ValueError("lost"))
    wait_until(lambda: len(handle._news) == 2 and not handle._live)
    assert handle.poll(0.0) == [Update(rid, (), (), finish="abort", message="ValueError: lost") for rid in "bc"]
    wait_until(lambda: engine.tokenizer_manager.calls == [("abort", "b"), ("abort", "c")])


def test_abort_all_returns_when_nothing_is_left_and_drops_the_news(engine: Engine, handle: SGLangHandle) -> None:
    handle.abort_all()
    for n in range(0, 6, 2):
        handle.submit(asked(f"{n}/g", f"{n + 1}/g"))
    engine.say("2/g", chunk_of([5]))
    engine.say("5/g", chunk_of([5], STOP))
    handle.abort_all()
    assert not handle._live and handle.poll(0.0) == [] and not engine.tokenizer_manager.chunks
    handle.submit(asked("7/g"))
    engine.say("7/g", chunk_of([4], LENGTH))
    assert [u.rid for u in news(handle)] == ["7/g"]


def test_abort_all_is_asked_again_until_it_is_heard(engine: Engine, handle: SGLangHandle) -> None:
    """A request that reaches SGLang behind the abort is not hit by it."""
    engine.tokenizer_manager.trouble.deaf = True
    handle.submit(asked("a"))
    threading.Timer(0.2, lambda: setattr(engine.tokenizer_manager.trouble, "deaf", False)).start()
    handle.abort_all()
    assert engine.tokenizer_manager.calls.count(("abort", "*")) >= 2 and not handle._live


def test_an_abort_that_is_never_heard_runs_out(engine: Engine, hasty: SGLangHandle) -> None:
    engine.tokenizer_manager.trouble.deaf = True
    hasty.submit(asked("a"))
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
    handle.submit(asked("a", "b"))
    handle.submit(asked("c"))
    wait_until(lambda: len(engine.tokenizer_manager.chunks) == 3)
    tasks = list(handle._live)
    handle.close()
    assert not thread.is_alive() and engine.shut_down and not engine.loop.is_running()
    assert len(tasks) == 2 and all(t.cancelled() for t in tasks), "not left to the garbage collector"


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


def test_prompts_of_one_call_go_to_sglang_together_and_siblings_behind_them(
    engine: Engine, handle: SGLangHandle
) -> None:
    """Its scheduler would compute the first prompt of several requests alone, and the others wait for that; of one
    request, it would compute the same prompt for each sibling."""
    service = RolloutService(
        SGLangEngine(handle, limits_of(MODEL, CHAIN), {3: CHAIN}, letters, ticking()), {}, ticking()
    )
    service.open_epoch(1)
    service.submit([group((1, 2), 2, SAMPLING, name="g"), group((3, 4, 5), 1, SAMPLING, name="h")], 1)
    service.submit([group((6,), 1, SAMPLING, name="i")], 1)
    wait_until(lambda: len(engine.tokenizer_manager.requests) == 3)
    first, second, third = engine.tokenizer_manager.requests
    assert first.rid == ["1/g#0", "3/h#0"] and first.input_ids == [[1, 2], [3, 4, 5]]
    assert second.rid == ["2/g#1"] and second.input_ids == [[1, 2]]
    assert third.rid == ["4/i#0"] and third.input_ids == [[6]]
    service.open_epoch(2)
    assert not handle._live


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
