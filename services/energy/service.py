"""The energy meter as a service: it always answers, also where there is nothing to measure or no way to."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.energy import EnergyReading
from services.core.errors import MeterError
from services.core.protocols import Clock
from services.energy.meter import EnergyMeter
from services.energy.reader import OpenReader


class EnergyService:
    def __init__(self, entries: Sequence[str], open_reader: OpenReader, clock: Clock) -> None:
        self._clock = clock
        self._meter: EnergyMeter | None = None
        self._error: str | None = None
        try:
            reader = open_reader(entries)
        except MeterError as error:
            self._error = str(error)
        else:
            if reader is not None:
                self._meter = EnergyMeter(reader, clock)
                self._meter.start()

    def read(self, since_s: float | None) -> EnergyReading:
        """See EnergyClient.read."""
        if self._meter is None:
            return EnergyReading(self._clock(), absent=self._error is None, error=self._error)
        return self._meter.read(since_s)

    def close(self) -> None:
        """Ends the sampling thread."""
        if self._meter is not None:
            self._meter.stop()
            self._meter = None
