"""One stream for capturing all CUDA graphs of an engine that switches.

Each of SGLang 0.5.17's graph runners (verification, draft and catching up, of every depth) captures on a new stream,
and for each stream that does matrix products PyTorch keeps a cuBLAS workspace, 32 MiB on Hopper, for good. The graphs
of an engine share their memory pool and so never run at the same time: one workspace serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CAPTURE = "sglang.srt.distributed.parallel_state.GroupCoordinator.graph_capture"


class _Shared:
    """`stream`: made by the first capture of an engine that shares one."""

    wanted = False
    stream: Any = None


_shared = _Shared()


@contextmanager
def one_stream() -> Iterator[None]:
    """All that is captured meanwhile in this process is captured on the same stream."""
    _shared.wanted = True
    try:
        yield
    finally:
        _shared.wanted, _shared.stream = False, None


def capture_on_it(original: Callable[..., Any], group: Any, context: Any = None, stream: Any = None) -> Any:
    """Around SGLang's `graph_capture`: a caller that brings a context or a stream keeps it."""
    if _shared.wanted and context is None and stream is None:
        _shared.stream = _shared.stream or group.device_module.Stream()
        stream = _shared.stream
    return original(group, context, stream)
