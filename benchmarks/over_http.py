"""Runs `logitd bench` in process and over HTTP, on a server that it starts with the same settings.

    python -m benchmarks.over_http bench --checkpoint DIRECTORY --threads N [--dtype bfloat16] ...

The flags are the same as for `logitd bench`. Flags that `logitd serve` also has are passed on to
the server. It runs with `--target-gap none`, so that it decodes whole batches like the engine in
process.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.started_server import started_server
from logitd.service.cli.main import logitd, run

SHARED = ("device", "dtype", "threads", "kernels", "kernel_target", "quantize", "kv_cache_dtype")
"""Settings that `logitd bench` and `logitd serve` both have."""


def main(arguments: Sequence[str]) -> int:
    settings: Any = logitd.main(list(arguments), "logitd", standalone_mode=False)
    flags = ["--checkpoint", str(settings.checkpoint.resolve()), "--target-gap", "none"]
    flags += ["--slots", str(max(settings.batches))]
    for name in SHARED:
        flags += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    if (settings.quantize, settings.kv_cache_dtype) != ("none", "auto"):
        flags += ["--max-quantization-loss", "any"]
    with started_server(*flags) as server:
        return run([*arguments, "--url", server.url])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
