"""The energy meter of one machine: samples its GPUs in a background thread into bounded rings.

A GPU's counter may start again from zero (its driver was reloaded). The meter adds up differences, so what it tells
never falls; of the interval with the reset it knows only what the new counter shows, which is a lower bound. Where
there is no counter, power samples are integrated by trapezoids.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque

from services.core.energy import EnergyMethod, EnergyReading, GpuEnergy
from services.core.errors import MeterError, WaitTimeoutError
from services.core.protocols import Clock
from services.energy.reader import EnergyReader

PERIOD_S = 0.2
# Two hours of samples: longer than a step may reasonably take. Older ones are forgotten.
CAPACITY = 36_000
STOP_TIMEOUT_S = 5.0


class GpuTrack:
    """One GPU's ring of (seconds, joules since the start)."""

    def __init__(self, uuid: str, method: EnergyMethod, capacity: int) -> None:
        self._uuid, self._method = uuid, method
        self._ring: deque[tuple[float, float]] = deque(maxlen=capacity)
        self._last: float | None = None
        self._resets = 0
        self.error: str | None = None

    def add(self, at_s: float, value: float) -> None:
        """`value`: joules by the counter, or watts. Times rise; an equal one is a sample too many and is left out."""
        before_s, joules = self._ring[-1] if self._ring else (at_s, 0.0)
        if self._ring and at_s <= before_s:
            return
        last, self._last, self.error = self._last, value, None
        if last is not None:
            joules += self._spent(last, value, at_s - before_s)
        self._ring.append((at_s, joules))

    def _spent(self, last: float, value: float, seconds: float) -> float:
        if self._method == "power":
            return seconds * (last + value) / 2
        if value < last:
            self._resets += 1
            return value
        return value - last

    def energy(self, since_s: float | None) -> GpuEnergy:
        samples = list(self._ring)
        if since_s is not None:  # from the one before, so that the joules at `since_s` can be interpolated
            samples = samples[max(0, bisect_right(samples, since_s, key=lambda s: s[0]) - 1) :]
        times = tuple(at for at, _ in samples)
        return GpuEnergy(self._uuid, self._method, times, tuple(j for _, j in samples), self._resets, self.error)


class EnergyMeter:
    """`start`, then `read` from any thread as often as wanted, then `stop`, which closes the reader."""

    def __init__(
        self, reader: EnergyReader, clock: Clock, period_s: float = PERIOD_S, capacity: int = CAPACITY
    ) -> None:
        self._reader, self._clock, self._period_s = reader, clock, period_s
        self._tracks = {uuid: GpuTrack(uuid, method, capacity) for uuid, method in reader.methods.items()}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)

    def start(self) -> None:
        self.sample()
        self._thread.start()

    def stop(self) -> None:
        """Raises WaitTimeoutError when the thread does not end: a driver call hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise WaitTimeoutError(
                f"the energy meter did not stop within {STOP_TIMEOUT_S:.0f} s: the NVIDIA driver does not answer, see "
                "nvidia-smi"
            )
        self._reader.close()

    def sample(self) -> None:
        """Ask every GPU once. One that cannot be read keeps its samples, and its error until it can be again."""
        with self._lock:
            for uuid, track in self._tracks.items():
                try:
                    value = self._reader.read(uuid)
                except MeterError as error:
                    track.error = str(error)
                else:
                    track.add(self._clock(), value)

    def read(self, since_s: float | None) -> EnergyReading:
        """See EnergyClient.read."""
        self.sample()
        with self._lock:
            gpus = tuple(track.energy(since_s) for track in self._tracks.values())
            return EnergyReading(self._clock(), gpus, dict(self._reader.entries))

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.sample()
