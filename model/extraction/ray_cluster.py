"""Ray cluster: starts Ray on this machine or joins a running cluster, and leaves it again.

`on_ray.py` and `deploy/ray_serve.py` use this module to connect, and start their own workers. Ray
is an optional dependency, imported only inside functions.
"""

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator

from logitd.model.device import available_processors
from logitd.model.extraction.errors import ExtractionError

LOCAL = "local"
CONNECT_SECONDS = 5.0
"""Maximum time, in seconds, to wait until the cluster's address accepts a connection. This is
tested before Ray itself connects."""


@contextlib.contextmanager
def connected(address: str, log: Callable[[str], None]) -> Iterator[None]:
    """Connect to the cluster at `address` until the end of the block.

    `address` is host:port, "auto" for the cluster of this machine, or "local", which starts Ray
    here and stops it at the end of the block. Raises ExtractionError if the cluster cannot be
    joined.
    """
    if address not in (LOCAL, "auto"):
        _require_listener(address)
    # Ray reads both variables when it is imported. Without the first one, an object that is used
    # after the shutdown starts Ray again.
    os.environ |= {"RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    options: dict[str, object] = {"address": address}
    with contextlib.ExitStack() as stack:
        if address == LOCAL:
            log("starting Ray on this machine")
            # Ray listens on every network interface, so it needs a token. Without this variable it
            # would write a token into the user's home. The variable stays set, because Ray reads it
            # once.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # A short path: Ray puts sockets there, and the path of a socket has at most 107 bytes.
            folder = tempfile.TemporaryDirectory("", "logitd-ray-", "/tmp", True)
            options |= {"_temp_dir": stack.enter_context(folder), "include_dashboard": False}
            options |= {"_node_ip_address": "127.0.0.1", "num_cpus": available_processors()}
        # Otherwise Ray prints the death of a worker on stdout, with the result. It has no public
        # setting for this.
        ray._private.worker._worker_logs_enabled = False
        stack.callback(ray.shutdown)
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except (ConnectionError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            raise ExtractionError(f"--ray {address}: {e.__cause__ or e}") from e
        yield


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ExtractionError(
            f"--ray is {address}, but nothing answers there ({error}): set the host:port of a "
            "running `ray start --head` (not ray://), auto, or local"
        ) from error
