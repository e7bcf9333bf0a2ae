"""Two streams for capturing all CUDA graphs of an engine that switches: one for the target's, one for the drafter's.

Each of SGLang 0.5.17's graph runners (verification, draft and catching up, of every depth) captures on a new stream,
and for each stream that does matrix products PyTorch keeps a cuBLAS workspace, 32 MiB on Hopper, for good. The graphs
of an engine share their memory pool and so never run at the same time: a workspace can serve many.

But not all. What a graph leaves behind lies in that pool, in memory that graphs captured before it on the same stream
may use between their kernels. The draft probabilities must outlive the verification, which runs between the draft and
whoever reads them: captured on the verification's stream they may lie where it computes, and drafts are then accepted
by whatever it wrote there. Target and drafter never share memory on streams of their own. Two graphs of the drafter in
a row do no harm: the one's results are read before the other starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from services.rollout.sglang.catching_up import capture_catching_up

CAPTURE = "sglang.srt.distributed.parallel_state.GroupCoordinator.graph_capture"
CAPTURE_DRAFTER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs"


class _Shared:
    """`streams`: made by the first capture for target and for drafter (True) of an engine that shares them."""

    def __init__(self) -> None:
        self.wanted = self.drafter = False
        self.streams: dict[bool, Any] = {}


_shared = _Shared()


@contextmanager
def shared_streams() -> Iterator[None]:
    """All that is captured meanwhile in this process is captured on the target's stream or on the drafter's."""
    _shared.wanted = True
    try:
        yield
    finally:
        _shared.wanted, _shared.streams = False, {}


def capture_shared(original: Callable[..., Any], group: Any, context: Any = None, stream: Any = None) -> Any:
    """Around SGLang's `graph_capture`: a caller that brings a context or a stream keeps it."""
    if _shared.wanted and context is None and stream is None:
        if _shared.drafter not in _shared.streams:
            _shared.streams[_shared.drafter] = group.device_module.Stream()
        stream = _shared.streams[_shared.drafter]
    return original(group, context, stream)


def capture_drafter(original: Callable[..., None], worker: Any) -> None:
    """Around the capture of all the drafter's graphs of one depth."""
    _shared.drafter = True
    try:
        original(worker)
        capture_catching_up(worker)
    finally:
        _shared.drafter = False
