"""Links within one process: what they refuse, how long they wait, and that both sides agree."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

from services.config.weights import WeightsConfig
from services.core.errors import ServiceLostError, TransferError, WaitTimeoutError, WeightError
from services.weights import mapped, rendezvous
from services.weights.link import DeviceFacts, Link, bounded, choose_backend, interface_of
from services.weights.mapped import MappedPair
from services.weights.receive import Inbox
from services.weights.rendezvous import Doorway, Invitation, Offer
from services.weights.send import Outbox

CPU = torch.device("cpu")
HOST = "127.0.0.1"
CONFIG = WeightsConfig(transport="collective", part_bytes=3000, connect_timeout_s=60.0, part_timeout_s=30.0)
PATIENCE_S = 600.0  # more than a test may take: one that waits until it has passed ends as a failure
VERSION = {f"{n}.weight": torch.arange(500.0) + n for n in range(5)}


def nothing() -> None: ...


class Asked:
    """The sender's call, in a thread: a Pending."""

    what = "policy.send"

    def __init__(self, action: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(action,), daemon=True).start()

    def _run(self, action: Callable[[], Any]) -> None:
        try:
            self.future.set_result(action())
        except (TransferError, ServiceLostError, WeightError) as error:
            self.future.set_exception(error)

    def result(self, timeout_s: float) -> Any:
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            raise WaitTimeoutError(f"no answer within {timeout_s} s") from None


class Waiter:
    def wait(self, pending: Any, timeout_s: float) -> list[Any]:
        end_s = time.monotonic() + timeout_s
        while not (ready := [p for p in pending if p.future.done()]) and time.monotonic() < end_s:
            time.sleep(0.01)
        return ready


def inbox(outbox: Outbox, invitations: list[Invitation] | None = None) -> Inbox:
    def ask(offer: Offer, invitation: Invitation) -> Asked:
        if invitations is not None:
            invitations.append(invitation)
        return Asked(lambda: outbox.send(offer.version, invitation))

    return Inbox("rollout-0", HOST, CONFIG, CPU, ask, Waiter())


def fetch(inbox: Inbox, offer: Offer) -> dict[str, torch.Tensor]:
    incoming = inbox.open(offer)
    try:
        return dict(pair for part in incoming.parts() for pair in part)
    finally:
        incoming.close()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def test_a_link_is_kept_for_later_versions() -> None:
    outbox, invitations = Outbox(CONFIG, CPU), list[Invitation]()
    receiver = inbox(outbox, invitations)
    for version in (1, 2, 3):
        tensors = {name: t * version for name, t in VERSION.items()}
        assert same(fetch(receiver, outbox.hold(version, tensors, None)), tensors)
    assert len({i.link_id for i in invitations}) == 1
    assert [i.peer_port == 0 for i in invitations] == [False, True, True]
    assert len({i.transfer_id for i in invitations}) == 3


def test_stopping_early_ends_the_link_and_the_next_transfer_makes_another() -> None:
    outbox, invitations = Outbox(CONFIG, CPU), list[Invitation]()
    receiver = inbox(outbox, invitations)
    offer = outbox.hold(1, VERSION, None)
    incoming = receiver.open(offer)
    assert incoming.num_parts > 2
    next(incoming.parts())
    incoming.close()
    assert same(fetch(receiver, offer), VERSION)
    assert len({i.link_id for i in invitations}) == 2


def test_another_sender_gets_a_link_of_its_own() -> None:
    first, second, invitations = Outbox(CONFIG, CPU), Outbox(CONFIG, CPU), list[Invitation]()
    of = {id(first): first, id(second): second}

    def ask(offer: Offer, invitation: Invitation) -> Asked:
        invitations.append(invitation)
        return Asked(lambda: of[offer.sender].send(offer.version, invitation))

    receiver = Inbox("rollout-0", HOST, CONFIG, CPU, ask, Waiter())
    assert same(fetch(receiver, first.hold(1, VERSION, id(first))), VERSION)
    assert same(fetch(receiver, second.hold(1, VERSION, id(second))), VERSION)
    assert all(i.peer_port for i in invitations)


def test_why_the_sender_failed_is_what_the_receiver_says() -> None:
    def lost(offer: Offer, invitation: Invitation) -> Asked:
        def fail() -> None:
            raise ServiceLostError("policy", "it was killed")

        return Asked(fail)

    outbox, patient = Outbox(CONFIG, CPU), CONFIG.model_copy(update={"connect_timeout_s": PATIENCE_S})
    offer = outbox.hold(1, VERSION, None)
    with pytest.raises(TransferError, match="the sender is lost: it was killed"):
        fetch(Inbox("rollout-0", HOST, patient, CPU, lost, Waiter()), offer)
    outbox.clear()
    with pytest.raises(TransferError, match="policy version 1 is superseded: the next one is being published"):
        fetch(inbox(outbox), offer)
    with pytest.raises(TransferError, match="version 1 is superseded"):
        outbox.copy_of(1)


def test_a_sender_that_never_comes_ends_with_the_time_out() -> None:
    config = CONFIG.model_copy(update={"connect_timeout_s": 0.5})
    silent = threading.Event()
    receiver = Inbox("rollout-0", HOST, config, CPU, lambda o, i: Asked(lambda: silent.wait(PATIENCE_S)), Waiter())
    with pytest.raises(TransferError, match="waiting for the sender to connect did not finish within"):
        fetch(receiver, Outbox(config, CPU).hold(1, VERSION, None))
    silent.set()


def test_a_receiver_that_is_not_there_ends_at_once() -> None:
    outbox = Outbox(CONFIG, CPU)
    outbox.hold(1, VERSION, None)
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    absent = Invitation("rollout-3", "x", "y", HOST, port, port, DeviceFacts(None, ""))
    with pytest.raises(TransferError, match=r"connecting to rollout-3 at 127\.0\.0\.1 failed: .*refused"):
        outbox.send(1, absent)
    known = Invitation("rollout-3", "x", "y", HOST, 0, 0, DeviceFacts(None, ""))
    with pytest.raises(TransferError, match="rollout-3 knows a link that is gone here"):
        outbox.send(1, known)


def test_strangers_at_the_doorway_are_sent_away() -> None:
    doorway = Doorway(HOST, 60.0)
    _, port = doorway.ports
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(doorway._accept)
        for line in (b"GET / HTTP/1.1\r\n\r\n", b'{"link_id": "another"}\n', b"[1]\n"):
            with socket.create_connection((HOST, port), timeout=60) as stranger:
                stranger.sendall(line)
                with suppress(ConnectionResetError):  # what it said was not read to its end
                    assert stranger.recv(1) == b""
        with socket.create_connection((HOST, port), timeout=60) as right:
            greeting = {"link_id": doorway.link_id, "gpu": "GPU-1", "nccl": "2.28"}
            right.sendall(json.dumps(greeting).encode() + b"\n")
            assert right.recv(1) == b"\n"
            _, facts = waiting.result(60)
            assert facts == DeviceFacts("GPU-1", "2.28")
    doorway.close()


def test_a_look_ends_a_wait() -> None:
    ended = threading.Event()

    def gone() -> None:
        raise TransferError("gone")

    with pytest.raises(TransferError, match="gone"):
        bounded(lambda: ended.wait(PATIENCE_S), PATIENCE_S, gone, "waiting")
    with pytest.raises(TransferError, match="waiting did not finish within 0 s"):
        bounded(lambda: ended.wait(PATIENCE_S), 0.1, nothing, "waiting")
    ended.set()
    assert bounded(lambda: 5, PATIENCE_S, nothing, "five") == 5


def test_the_other_side_closing_is_noticed_before_any_time_out() -> None:
    here, there = socket.socketpair()
    ended = threading.Event()

    class Group:
        def recv(self, *_: Any) -> Any:
            return self

        def wait(self, *_: Any) -> None:
            ended.wait(PATIENCE_S)

    link = Link("gloo", Group(), 1, CPU, here)
    assert link.alive
    threading.Timer(0.2, there.close).start()
    with pytest.raises(TransferError, match="the other side closed the connection"):
        link.receive(10, PATIENCE_S, nothing)
    assert not link.alive
    ended.set()


def test_nccl_only_between_two_gpus_that_speak_it_alike_and_mapped_memory_on_one() -> None:
    one, two, none = DeviceFacts("a", "2.28.9"), DeviceFacts("b", "2.28.9"), DeviceFacts(None, "")
    wanted = {(one, two): "nccl", (one, one): "ipc", (one, DeviceFacts("a", "2.27.5")): "ipc"}
    for left, right in ((one, none), (none, none), (one, DeviceFacts("b", "2.27.5")), *wanted):
        assert choose_backend(left, right) == choose_backend(right, left) == wanted.get((left, right), "gloo")


def test_where_no_memory_may_be_mapped_both_sides_go_through_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("CUDA error: invalid device context")

    monkeypatch.setattr(rendezvous, "choose_backend", lambda *_: "ipc")
    for broken in (None, "mapped", "exported"):
        with monkeypatch.context() as here:
            if broken is not None:
                here.setattr(mapped, broken, refused)
            outbox, started = Outbox(CONFIG, CPU), time.monotonic()
            receiver = inbox(outbox)
            for version in (1, 2):
                assert same(fetch(receiver, outbox.hold(version, VERSION, None)), VERSION)
            assert receiver._link is not None and receiver._link.backend == ("ipc" if broken is None else "gloo")
            assert time.monotonic() - started < CONFIG.connect_timeout_s / 2, (
                "the other side is told, and waits for no time-out"
            )


def test_a_look_at_the_other_side_takes_nothing_that_is_meant_for_a_transfer() -> None:
    here, there = socket.socketpair()
    pairs = MappedPair(here, CPU), MappedPair(there, CPU)
    link = Link("ipc", pairs[1], 1, CPU, there)
    here.setblocking(False)
    buffer, sent = mapped.room(5000, CPU), torch.arange(5000).to(torch.uint8)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(pairs[1].recv, buffer, 60.0)
        for _ in range(20):
            assert link.alive
            time.sleep(0.005)
        pairs[0].send(sent, 60.0)
        coming.result(60)
    assert torch.equal(buffer, sent)
    here.close()
    assert not link.alive


def test_the_interface_of_an_address() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                assert interface_of(address.address.partition("%")[0]) == name
    assert interface_of("203.0.113.9") is None
