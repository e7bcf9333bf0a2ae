"""Commands of a policy team and their answers, without Ray."""

from __future__ import annotations

import threading

import pytest

from actors.mailbox import Mailbox
from services.core.errors import BatchError, ServiceLostError

BOXES = ["a", "b"]
WAIT_S = 120.0


def test_a_command_is_done_when_all_have_answered_and_says_what_the_first_said() -> None:
    mailbox = Mailbox(BOXES)
    future = mailbox.post(BOXES, "step", "arguments")
    first, second = mailbox.take("a", 0.0), mailbox.take("b", 0.0)
    assert first is not None and first == second and (first.method, first.arguments) == ("step", "arguments")
    mailbox.answer("b", first.number, ("theirs",))
    assert not future.done()
    mailbox.answer("a", first.number, ("ours", 2))
    assert future.result(0) == ("ours", 2)


def test_every_box_gets_its_commands_in_order_and_no_others() -> None:
    mailbox = Mailbox(BOXES)
    for method in ("one", "two"):
        mailbox.post(BOXES, method, None)
    mailbox.post(["b"], "alone", None)
    taken = {box: [c.method for c in iter(lambda box=box: mailbox.take(box, 0.0), None)] for box in BOXES}
    assert taken == {"a": ["one", "two"], "b": ["one", "two", "alone"]}


def test_a_refusal_is_the_answer_and_what_the_others_say_later_is_nothing() -> None:
    mailbox = Mailbox(BOXES)
    future = mailbox.post(BOXES, "step", None)
    command = mailbox.take("a", 0.0)
    assert command is not None
    mailbox.refuse(command.number, BatchError("no ids"))
    mailbox.answer("b", command.number, (1,))
    mailbox.refuse(command.number, BatchError("no ids either"))
    with pytest.raises(BatchError, match=r"no ids$"):
        future.result(0)
    later = mailbox.post(["a"], "step", None)
    again = mailbox.take("a", 0.0)
    assert again is not None
    mailbox.answer("a", again.number, (3,))
    assert later.result(0) == (3,)


def test_with_the_group_everything_open_and_later_is_lost_for_the_first_reason() -> None:
    mailbox = Mailbox(BOXES)
    half, whole = mailbox.post(BOXES, "step", None), mailbox.post(["b"], "send", None)
    command = mailbox.take("a", 0.0)
    assert command is not None
    mailbox.answer("a", command.number, (1,))
    mailbox.close(ServiceLostError("policy", "worker 1 died"))
    mailbox.close(ServiceLostError("policy", "its worker team ended"))
    for future in (half, whole, mailbox.post(BOXES, "publish", None)):
        with pytest.raises(ServiceLostError, match="worker 1 died"):
            future.result(0)


def test_many_threads_lose_no_answer() -> None:
    mailbox = Mailbox(BOXES)

    def serve(box: str) -> None:
        while (command := mailbox.take(box, WAIT_S)) is not None and command.method != "end":
            mailbox.answer(box, command.number, (box, command.arguments))

    threads = [threading.Thread(target=serve, args=(box,), daemon=True) for box in BOXES]
    for thread in threads:
        thread.start()
    futures = [mailbox.post(BOXES, "step", n) for n in range(500)]
    assert [future.result(WAIT_S) for future in futures] == [("a", n) for n in range(500)]
    mailbox.post(BOXES, "end", None)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
