"""Where a run tells what it waits for: stderr, so that stdout stays the command's answer."""

from __future__ import annotations

from rich.console import Console

CONSOLE = Console(stderr=True, markup=False, highlight=False)
# How often to say what a start waits for: an SGLang engine takes minutes to compile its kernels.
START_NEWS_S = 15.0
