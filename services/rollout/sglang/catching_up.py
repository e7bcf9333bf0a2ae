"""CUDA graphs of the drafter's catching up where the attention is FlashAttention-3.

Behind every verification the drafter computes its one layer once more over what was accepted. SGLang 0.5.17 captures
that for some attention kernels, and FlashAttention is not on its list, though its code for it is there and serves
drafters of several layers (pull requests 36324 and 40762 at SGLang put it there). Without a graph it was over a quarter
of what a round took of the one processor that launches its kernels (a chain of 7 with four requests on an H200: 28 %
of 6 ms), where the GPU waits for that processor.
"""

from __future__ import annotations

from typing import Any

BACKEND = "FlashAttentionBackend"  # SGLang's class, by name: importing it needs kernels that not every GPU has


def capture_catching_up(worker: Any) -> None:
    """Behind SGLang's own capture of the drafter's graphs: the one that it left out, of the same sizes."""
    there = worker.cuda_graph_runner_for_draft_extend is not None  # None: kernel by kernel
    if there or type(worker.draft_extend_attn_backend).__name__ != BACKEND:
        return
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    off = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED) or envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get()
    if not off:
        worker.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(worker)
