"""Wire: exchanges frames between the two processes. A frame is a JSON object followed by raw bytes.

A frame begins with the lengths of both parts (8 bytes each, little-endian). The raw bytes are an
array of float32 or int64 in C order; the JSON object contains the shape of the array.
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


class Wire:
    """One end of a connected pair of sockets, which sends and receives frames."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, header: Mapping[str, Any], array: Tensor | None = None) -> None:
        """Send a frame. Raises OSError if the other process has ended."""
        text = json.dumps(header).encode()
        payload = memoryview(b"")
        if array is not None:
            payload = memoryview(array.detach().contiguous().numpy().data).cast("B")
        self._end.sendall(HEAD.pack(len(text), len(payload)) + text)
        self._end.sendall(payload)

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], bytearray]:
        """Receive a frame. Raises EOFError if the other process has ended, TimeoutError after
        `seconds`, and ValueError for an invalid frame."""
        deadline = None if seconds is None else time.monotonic() + seconds
        text_bytes, payload_bytes = HEAD.unpack(self._take(HEAD.size, deadline))
        if text_bytes > JSON_BYTES or payload_bytes > PAYLOAD_BYTES:
            raise ValueError(
                f"a frame is too large: {text_bytes} bytes of text and {payload_bytes} bytes of "
                "payload"
            )
        header = json.loads(self._take(text_bytes, deadline))
        if not isinstance(header, dict):
            raise ValueError("a frame without a JSON object")
        return header, self._take(payload_bytes, deadline)

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


def floats(payload: bytearray, shape: list[int]) -> Tensor:
    """The float32 array in a frame's raw bytes. Raises ValueError if the number of elements does
    not fit the shape."""
    flat = torch.frombuffer(payload, dtype=torch.float32) if payload else torch.empty(0)
    try:
        return flat.view(shape)
    except RuntimeError as error:
        raise ValueError(
            f"an array has {flat.numel()} elements, which do not fit the shape {shape}"
        ) from error
