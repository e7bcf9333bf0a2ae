"""The core protocols over Ray actor handles.

Tensors are results of actor tasks (`num_returns`), so the coordinator owns the references and they outlive the actor
that made them; they are passed as top-level arguments, so Ray resolves them at the receiver. Everything else is a
control message and is checked for smuggled tensors, on the way out and on the way back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from services.core.checkpoints import CheckpointNote
from services.core.control import refuse_tensors
from services.core.errors import BlobLostError, LongtailError, ServiceLostError, WaitTimeoutError
from services.core.gain import Workload
from services.core.protocols import Blob, Pending
from services.core.selector import SelectorState
from services.core.types import GroupWork, HiddenStateChunk, Prompt, Rollout, TrainBatch
from services.weights.rendezvous import Invitation, Offer

CONTROL = "control"  # the concurrency group of calls that overtake
WORKERS = "workers"  # that of the calls by which a policy team's workers fetch their work
TRANSFERS = "transfers"  # that of the policy trainer's calls that hand out what is published, while it trains
READY_TIMEOUT_S = 10.0  # for what is known to be ready
ANY_INTERFACE = ("0.0.0.0", "::", "")


def published_size(offers: bool, weights: str, blob: Blob) -> int | None:
    """Bytes of a version that is ready: of its offer where policies are offered, else in the object store; None when
    Ray does not tell."""
    if offers and weights == "policy":
        offer: Offer = ray.get(blob, timeout=READY_TIMEOUT_S)
        return offer.manifest.num_bytes
    size = ray.experimental.get_object_locations([blob]).get(blob, {}).get("object_size")
    return None if size is None else int(size)


def reachable_host(bound: str) -> str:
    """The address at which others find what this process serves on `bound`."""
    return str(ray.util.get_node_ip_address()) if bound in ANY_INTERFACE else bound


class _News:
    """How many calls of this process have been answered."""

    def __init__(self) -> None:
        self.count = 0
        self._more = threading.Condition()

    def tell(self) -> None:
        with self._more:
            self.count += 1
            self._more.notify_all()

    def wait(self, count: int, timeout_s: float) -> None:
        """Until there are more than `count`."""
        with self._more:
            self._more.wait_for(lambda: self.count != count, timeout_s)


_NEWS = _News()


class _Bell:
    """Rung from a thread of Ray's when a call is answered: `rung_s` is when. Apart from the call, which is so free at
    once when nobody wants its answer any more."""

    __slots__ = ("rung_s",)

    def __init__(self) -> None:
        self.rung_s: float | None = None

    def ring(self, _: Future[Any]) -> None:
        self.rung_s = time.monotonic()
        _NEWS.tell()


class RayCall:
    """A call and its control answer. Losing the actor, in whatever way Ray says it, is ServiceLostError."""

    def __init__(self, ref: Any, name: str, method: str) -> None:
        self._future: Future[Any] = ref.future()
        self._name = name
        self.what = f"{name}.{method}"
        self.bell = _Bell()
        self._future.add_done_callback(self.bell.ring)

    @property
    def answered_s(self) -> float | None:
        return self.bell.rung_s

    def result(self, timeout_s: float) -> Any:
        wait([self._future], timeout_s)
        if not self._future.done():
            raise WaitTimeoutError(f"{self.what} did not answer within {timeout_s:.0f} s: see the actor's log")
        try:
            answer = self._future.result()
        except RayActorError as error:  # ActorDiedError and ActorUnavailableError are kinds of it
            raise ServiceLostError(self._name, " ".join(str(error).split())[:300]) from None
        except RayTaskError as error:
            if isinstance(error.cause, LongtailError):
                raise error.cause from None
            if isinstance(error.cause, ObjectLostError):
                raise BlobLostError(
                    f"{self.what} was given tensors that are lost with the machine that held them"
                ) from None
            raise
        except ObjectLostError:
            raise ServiceLostError(self._name, f"the answer of {self.what} is lost with its machine") from None
        refuse_tensors(answer, f"answer of {self.what}")
        return answer


class RayWaiter:
    """Is told of answers instead of asking Ray for them: with a thousand calls under way one `ray.wait` takes longer
    than all that the coordinator does with an answer. Looking whether they are rung is two attributes each, and nothing
    is put down with them. `sleep` passes the time when nothing is outstanding but a timer is."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep

    def wait(self, pending: Sequence[RayCall], timeout_s: float) -> list[RayCall]:
        if not pending:
            self._sleep(timeout_s)
            return []
        deadline = time.monotonic() + timeout_s
        while True:
            count = _NEWS.count  # before looking: what is answered from here on is more
            ready = [call for call in pending if call.bell.rung_s is not None]
            left = deadline - time.monotonic()
            if ready or left <= 0:
                return ready
            _NEWS.wait(count, left)


class _Client:
    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def process_id(self) -> RayCall:
        return self._control("process_id")

    def _control(self, method: str, *args: Any) -> RayCall:
        refuse_tensors(args, f"{self.name}.{method}")
        return self._call(method, *args)

    def _call(self, method: str, *args: Any) -> RayCall:
        return RayCall(getattr(self._handle, method).remote(*args), self.name, method)

    def _refs(self, method: str, count: int, *args: Any) -> list[Any]:
        refs: list[Any] = getattr(self._handle, method).options(num_returns=count).remote(*args)
        return refs

    def _with_blob(self, method: str, *args: Any) -> tuple[RayCall, Blob]:
        answer, blob = self._refs(method, 2, *args)
        return RayCall(answer, self.name, method), Blob(blob)


class RayRolloutClient(_Client):
    def open_epoch(self, epoch: int) -> RayCall:
        return self._control("open_epoch", epoch)

    def submit(self, work: Sequence[GroupWork], epoch: int) -> RayCall:
        return self._control("submit", work, epoch)

    def withdraw(self, rollout_ids: Sequence[str], epoch: int) -> RayCall:
        return self._control("withdraw", rollout_ids, epoch)

    def advance(self, budget_s: float, epoch: int) -> RayCall:
        return self._control("advance", budget_s, epoch)

    def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> RayCall:
        return self._control("submit_and_advance", work, budget_s, epoch)

    def load_policy(self, version: int, blob: Blob, epoch: int) -> RayCall:
        return self._call("load_policy", version, blob, epoch)

    def load_drafter(self, version: int, blob: Blob, epoch: int) -> RayCall:
        return self._call("load_drafter", version, blob, epoch)

    def set_strategy(self, name: str | None, epoch: int) -> RayCall:
        return self._control("set_strategy", name, epoch)

    def take_states(self, step: int, epoch: int) -> tuple[Pending[HiddenStateChunk], Blob]:
        return self._with_blob("take_states", step, epoch)

    def switch_memory(self, release: bool, epoch: int) -> RayCall:
        return self._control("switch_memory", release, epoch)

    def predict_gain(self, work: Workload) -> RayCall:
        return self._control("predict_gain", work)

    def selector_state(self) -> RayCall:
        return self._control("selector_state")

    def restore_selector(self, state: SelectorState, epoch: int) -> RayCall:
        return self._control("restore_selector", state, epoch)


class RayDrafterClient(_Client):
    def initial_state(self) -> tuple[RayCall, Blob]:
        return self._with_blob("initial_state")

    def prepare(self, state: Blob) -> RayCall:
        return self._call("prepare", state)

    def begin(self, state: Blob, epoch: int, lane: int) -> RayCall:
        return self._call("begin", state, epoch, lane)

    def load_target_head(self, policy_version: int, blob: Blob) -> RayCall:
        return self._call("load_target_head", policy_version, blob)

    def add_chunk(self, chunk: HiddenStateChunk, blob: Blob) -> RayCall:
        return self._call("add_chunk", chunk, blob)

    def train(self, budget_s: float, epoch: int) -> RayCall:
        return self._control("train", budget_s, epoch)

    def interrupt(self, epoch: int) -> RayCall:
        """In a thread of its own at the actor: its other calls run one after the other."""
        method = self._handle.interrupt.options(concurrency_group=CONTROL)
        return RayCall(method.remote(epoch), self.name, "interrupt")

    def snapshot(self, epoch: int) -> tuple[Pending[int], Blob]:
        return self._with_blob("snapshot", epoch)

    def held(self) -> tuple[Pending[int], Blob]:
        return self._with_blob("held")

    def merge(self, states: Sequence[Blob], micro_steps: Sequence[int]) -> tuple[Pending[int], Blob]:
        return self._with_blob("merge", tuple(micro_steps), *states)

    def checkpoint(self, state: Blob) -> RayCall:
        return self._call("checkpoint", state)

    def export(self, state: Blob) -> tuple[Pending[int], Blob]:
        return self._with_blob("export", state)

    def estimate(self, drafters: dict[str, Blob], blob: Blob) -> RayCall:
        return self._call("estimate", tuple(drafters), blob, *drafters.values())


class RayPolicyClient(_Client):
    """`offers`: servers fetch a published policy themselves (`weights.transport: collective`)."""

    def __init__(self, name: str, handle: Any, offers: bool = False) -> None:
        super().__init__(name, handle)
        self._offers = offers

    def train_step(self, batch: TrainBatch) -> tuple[Pending[Any], Pending[Any], Blob]:
        refuse_tensors(batch, f"{self.name}.train_step")
        report, chunk, blob = self._refs("train_step", 3, batch)
        return RayCall(report, self.name, "train_step"), RayCall(chunk, self.name, "train_step"), Blob(blob)

    def steps_done(self) -> RayCall:
        return self._control("steps_done")

    def publish(self) -> tuple[Pending[int], Blob, Blob]:
        if self._offers:
            version, offer, head = self._refs("offer", 3)
            return RayCall(version, self.name, "offer"), Blob(offer), Blob(head)
        pending, weights = self._with_blob("publish")
        return pending, weights, weights

    def switch_memory(self, release: bool) -> RayCall:
        return self._control("switch_memory", release)

    def copy_of(self, version: int) -> tuple[Pending[int], Blob]:
        method = self._handle.copy_of.options(num_returns=2, concurrency_group=TRANSFERS)
        answer, blob = method.remote(version)
        return RayCall(answer, self.name, "copy_of"), Blob(blob)

    def restored(self) -> tuple[Pending[CheckpointNote | None], Blob, Blob]:
        note, live, served = self._refs("restored", 3)
        return RayCall(note, self.name, "restored"), Blob(live), Blob(served)

    def checkpoint(self, note: CheckpointNote, live: Blob | None, served: Blob | None) -> RayCall:
        refuse_tensors(note, f"{self.name}.checkpoint")
        return self._call("checkpoint", note, live, served)

    def flush(self, timeout_s: float) -> RayCall:
        return self._control("flush", timeout_s)


def ask_for_transfer(offer: Offer, invitation: Invitation) -> RayCall:
    """A rollout server's call to the policy trainer, in the trainer's threads for that."""
    method = offer.sender.send.options(concurrency_group=TRANSFERS)
    return RayCall(method.remote(offer.version, invitation), "policy", "send")


class RayEnergyClient(_Client):
    def read(self, since_s: float | None) -> RayCall:
        return self._control("read", since_s)


class RayRewardClient(_Client):
    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> RayCall:
        return self._control("score", prompts, rollouts)
