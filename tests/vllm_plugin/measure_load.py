"""Prints how much memory vLLM takes while it loads a checkpoint: ``python measure_load.py SMALL LARGE``.

A small model is loaded first, so that what every model needs (code, buffers of the first call) is there. Printed is, in
bytes and as JSON, what this process has at most while the large one is loaded, and when it is gone, less what it had
before; pages of files do not count.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

from run_models import answers
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class _MeasuredLoader(DefaultModelLoader):
    """vLLM's loader, watched."""

    found: list[dict[str, int]] = []  # noqa: RUF012  # one for the process

    def load_model(self, *arguments: object, **options: object) -> object:
        before, ended, seen = _own_bytes(), threading.Event(), [0]

        def watch() -> None:
            while not ended.wait(0.002):
                seen.append(_own_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            return super().load_model(*arguments, **options)
        finally:
            ended.set()
            watcher.join()
            self.found.append({"peak": max(seen) - before, "after": _own_bytes() - before})


if __name__ == "__main__":
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader("safetensors")(_MeasuredLoader)
    for folder in sys.argv[1:]:
        before = _own_bytes()
        answers(folder, [[5, 6, 7]], 1, {"enforce_eager": True, "load_format": "safetensors"})
        cleanup_dist_env_and_memory()
        gc.collect()
    print("MEASURED " + json.dumps(_MeasuredLoader.found[-1] | {"left": _own_bytes() - before}))
