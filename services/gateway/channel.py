"""How control requests reach a running run."""

from __future__ import annotations

from typing import Protocol

from services.coordinator.control import ControlRequest


class ControlChannel(Protocol):
    def send(self, run_id: str, request: ControlRequest) -> str:
        """What the run answered; may block for a while. Raises ControlRefusedError when the run says no,
        ServiceLostError when it cannot be reached, and WaitTimeoutError when it does not answer."""
