"""Messages over pipes: a length and that many bytes of JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER = struct.Struct("<I")
CANCEL = HEADER.pack(0)  # an empty frame: end the call in hand


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one frame to a blocking descriptor."""
    frame = memoryview(encode(message))
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int) -> dict[str, Any] | None:
    """Read one frame from a blocking descriptor; ``{}`` is an empty one, ``None`` the end."""
    header = _read(descriptor, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if length == 0:
        return {}
    body = _read(descriptor, length)
    message: dict[str, Any] | None = None if body is None else json.loads(body)
    return message


def _read(descriptor: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
