"""Asking the energy meters at the end of each step. A meter that does not answer costs the step its figures, not the
run: it is told as an event, the step's energy is None, and a meter that failed often is not asked again.

A meter has the clock of its own machine. Each answer bounds the difference: the meter looked at its clock between our
question and its answer, so the middle of the round trip is right to half of it. The best bound seen is kept; as two
clocks drift apart, it widens with age.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.coordinator.calls import Calls
from services.coordinator.energy import EnergyCurve, energy_by_role
from services.core.energy import EnergyClient, GpuEnergy, GpuName
from services.core.errors import ServiceLostError
from services.core.protocols import Clock
from services.core.types import RunEvent, SlotSpan

CALL_TIMEOUT_S = 3.0
MAX_FAILURES = 3  # one after another
# Seconds that may be missing at either end of a step: a few sampling periods and the uncertainty of the clocks.
SLACK_S = 1.0
DRIFT = 1e-4  # seconds per second by which two monotonic clocks part at worst


@dataclass(frozen=True, slots=True)
class Alignment:
    """Our clock is the meter's plus `offset_s`, to within `error_s` as of `at_s` (our clock)."""

    offset_s: float
    error_s: float
    at_s: float

    @classmethod
    def of(cls, asked_s: float, answered_s: float, meter_s: float) -> Alignment:
        middle = (asked_s + answered_s) / 2
        return cls(middle - meter_s, (answered_s - asked_s) / 2, answered_s)

    def error_at(self, now_s: float) -> float:
        return self.error_s + DRIFT * (now_s - self.at_s)

    def better(self, newer: Alignment) -> Alignment:
        """The sharper bound; the newer one when the two cannot both be true: the meter is on another clock now."""
        known_s = self.error_at(newer.at_s)
        moved = abs(newer.offset_s - self.offset_s) > newer.error_s + known_s
        return newer if moved or newer.error_s <= known_s else self


class _Meter:
    def __init__(self, client: EnergyClient) -> None:
        self.client = client
        self.aligned: Alignment | None = None
        self.failures = 0
        self.resets: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of one machine: curves in run seconds by uuid, and the uuids of its GPUs' names."""

    curves: Mapping[str, EnergyCurve]
    names: Mapping[GpuName, str]


class _NoFigure(Exception):
    """This step's energy cannot be told; the reason goes into an event."""

    def __init__(self, meter: _Meter, reason: str) -> None:
        super().__init__(reason)
        self.meter, self.reason = meter, reason


class Metering:
    """`users`: the GPUs of each holder of spans ("slot 0", "policy"). `clock` is the timeline's: run seconds.

    `begin` and `end` enclose what is measured; spans in between go to `span`.
    """

    def __init__(
        self,
        meters: Sequence[EnergyClient],
        users: Mapping[str, Sequence[GpuName]],
        calls: Calls,
        clock: Clock,
        tell: Callable[[str, str, str], RunEvent],
    ) -> None:
        self._meters = [_Meter(m) for m in meters]
        self._users = users
        self._calls, self._clock, self._tell = calls, clock, tell
        self._spans: list[SlotSpan] = []
        self._start_s: float | None = None
        self.methods: set[str] = set()  # of the GPUs that were measured: "counter", "power"

    def span(self, span: SlotSpan) -> None:
        if self._start_s is not None:
            self._spans.append(span)

    def begin(self) -> None:
        if self._meters:
            self._spans, self._start_s = [], self._clock()

    def end(self, open_spans: Sequence[SlotSpan]) -> dict[str, float] | None:
        """Joules by role since `begin`; None without meters, and when one of them failed. `open_spans`: those that go
        on. Waits for each meter no longer than its time-out."""
        start_s, self._start_s = self._start_s, None
        if start_s is None or not self._meters:
            return None
        end_s = self._clock()
        try:
            asked = {meter: self._ask(meter, start_s, end_s) for meter in self._meters}
            parts = [part for part in asked.values() if part is not None]
            missing = [meter for meter, part in asked.items() if part is None]
            if not parts:  # no NVIDIA driver anywhere, so there never will be a figure
                self._meters = []
                return None
            if missing:
                raise _NoFigure(missing[0], "its machine has no NVIDIA driver, others have one")
        except _NoFigure as problem:
            self._failed(problem)
            return None
        curves = {uuid: curve for part in parts for uuid, curve in part.curves.items()}
        names = {name: uuid for part in parts for name, uuid in part.names.items()}
        users = {who: {names[n] for n in gpus if n in names} for who, gpus in self._users.items()}
        return energy_by_role(curves, [*self._spans, *open_spans], users, start_s, end_s)

    # ------------------------------------------------------------------ one meter

    def _ask(self, meter: _Meter, start_s: float, end_s: float) -> _Measured | None:
        """None where there is no driver. Raises _NoFigure."""
        client, aligned = meter.client, meter.aligned
        since_s = None if aligned is None else start_s - aligned.offset_s - SLACK_S
        asked_s = self._clock()
        try:
            reading = self._calls.wait_for(client.name, client.read(since_s), CALL_TIMEOUT_S)
        except ServiceLostError as error:
            if error.name != client.name:
                raise
            meter.aligned = None  # one that returns may be on another clock
            raise _NoFigure(meter, error.reason) from None
        if reading.absent:
            return None
        if reading.error is not None:
            raise _NoFigure(meter, reading.error)
        meter.aligned = self._align(meter, Alignment.of(asked_s, self._clock(), reading.now_s))
        curves = {gpu.uuid: self._curve(meter, gpu, start_s, end_s) for gpu in reading.gpus}
        for gpu in reading.gpus:
            self._note(meter, gpu)
        meter.failures = 0
        return _Measured(curves, {GpuName(client.name, entry): uuid for entry, uuid in reading.entries.items()})

    def _align(self, meter: _Meter, newer: Alignment) -> Alignment:
        best = newer if meter.aligned is None else meter.aligned.better(newer)
        if best.error_at(newer.at_s) > SLACK_S:
            raise _NoFigure(meter, f"its clock is known to {best.error_at(newer.at_s):.1f} s only: the network is slow")
        return best

    def _curve(self, meter: _Meter, gpu: GpuEnergy, start_s: float, end_s: float) -> EnergyCurve:
        assert meter.aligned is not None
        curve = EnergyCurve([t + meter.aligned.offset_s for t in gpu.times_s], gpu.joules)
        if not curve.covers(start_s, end_s, SLACK_S):
            why = gpu.error or "the meter has no samples of a part of the step: it was restarted, or the step was long"
            raise _NoFigure(meter, f"{gpu.uuid}: {why}")
        return curve

    def _note(self, meter: _Meter, gpu: GpuEnergy) -> None:
        self.methods.add(gpu.method)
        if gpu.resets > meter.resets.get(gpu.uuid, 0):
            self._tell("energy_reset", meter.client.name, f"{gpu.uuid}: the counter restarted; a lower bound until now")
        meter.resets[gpu.uuid] = gpu.resets

    def _failed(self, problem: _NoFigure) -> None:
        meter = problem.meter
        meter.failures += 1
        message = f"no energy figures for this step: {problem.reason}"
        if meter.failures >= MAX_FAILURES:
            self._meters = []  # a sum over the others would pass for the whole
            message += f"; failed {MAX_FAILURES} times in a row, energy is not measured any more"
        self._tell("energy_missing", meter.client.name, message)


def method_word(methods: set[str]) -> str | None:
    """How it was measured, for the summary: "counter", "power", or both."""
    return " and ".join(sorted(methods)) or None
