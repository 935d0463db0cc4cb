"""Wire: exchanges frames between the two processes. A frame is a JSON object and an array.

A frame begins with the lengths of its two parts (8 bytes each, little-endian). The first part is a
JSON list: the object, the dtype of the array ("float32" or "int64") and its shape. The second part
is the array in C order. A frame without an array has an empty one.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEAD = struct.Struct("<QQ")
JSON_BYTES, PAYLOAD_BYTES = 2**24, 2**36
"""Maximum sizes of the two parts of a frame, in bytes."""
DTYPES = {"float32": torch.float32, "int64": torch.int64}


class Wire:
    """One end of a connected pair of sockets, which sends and receives frames."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, header: Mapping[str, Any], array: Tensor | None = None) -> None:
        """Send a frame. Raises OSError if the other process has ended."""
        array = torch.empty(0) if array is None else array.detach().contiguous()
        dtype = str(array.dtype).removeprefix("torch.")
        text = json.dumps([header, dtype, list(array.shape)]).encode()
        self._end.sendall(HEAD.pack(len(text), array.nbytes) + text)
        if array.numel():
            self._end.sendall(memoryview(array.numpy().data).cast("B"))

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], Tensor]:
        """Receive a frame. Raises EOFError if the other process has ended, TimeoutError after
        `seconds`, and ValueError for an invalid frame."""
        deadline = None if seconds is None else time.monotonic() + seconds
        text_bytes, payload_bytes = HEAD.unpack(self._take(HEAD.size, deadline))
        if text_bytes > JSON_BYTES or payload_bytes > PAYLOAD_BYTES:
            raise ValueError(
                f"a frame is too large: {text_bytes} bytes of text and {payload_bytes} bytes of "
                "payload"
            )
        text, payload = (self._take(count, deadline) for count in (text_bytes, payload_bytes))
        try:
            header, dtype, shape = json.loads(text)
            empty = torch.empty(0, dtype=DTYPES[dtype])
            array = torch.frombuffer(payload, dtype=empty.dtype) if payload else empty
            return dict(header), array.view(shape)
        except (TypeError, KeyError, RuntimeError) as error:
            raise ValueError(f"an invalid frame: {error}") from error

    def close(self) -> None:
        self._end.close()

    def _take(self, count: int, deadline: float | None) -> bytearray:
        whole = bytearray(count)
        rest = memoryview(whole)
        while rest:
            if deadline is not None:
                self._end.settimeout(max(0.001, deadline - time.monotonic()))
            taken = self._end.recv_into(rest)
            if not taken:
                raise EOFError
            rest = rest[taken:]
        return whole
