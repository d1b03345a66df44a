"""Messages over pipes.

A request is a header and JSON, a reply is a length, JSON, and the bytes that the code wrote. The server reads the
JSON of a request into memory of its own mapping, for the child to decode: what it had on its heap, it would pass on
to the children of later calls.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

LENGTH = struct.Struct("<I")  # of a reply's JSON
_REQUEST = struct.Struct("<IIdQ")  # length of the JSON, most bytes of output, seconds, zero
CANCEL = _REQUEST.pack(0, 0, 0.0, 0)  # end the call in hand
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Request:
    """A request as the server sees it; ``body`` is ``None`` if it cancels.

    Args:
        length: of the JSON.
        max_output_bytes: after which a call is ended.
        timeout: seconds.
    """

    def __init__(self, length: int, max_output_bytes: int, timeout: float) -> None:
        self.max_output_bytes, self.timeout = max_output_bytes, timeout
        self.body = mmap.mmap(-1, length, flags=_PRIVATE) if length else None


def encode_request(message: dict[str, Any]) -> bytes:
    """A request; its ``max_output_bytes`` and ``timeout`` are for the server, the rest for the child."""
    body = json.dumps(message).encode()
    return _REQUEST.pack(len(body), message["max_output_bytes"], message["timeout"], 0) + body


def receive_request(descriptor: int) -> Request | None:
    """Read a request from a blocking descriptor; ``None`` at the end."""
    header = bytearray(_REQUEST.size)
    if not _fill(descriptor, memoryview(header)):
        return None
    length, max_output_bytes, timeout, _ = _REQUEST.unpack(header)
    request = Request(length, max_output_bytes, timeout)
    if request.body is not None:
        with memoryview(request.body) as view:
            if not _fill(descriptor, view):
                return None
    return request


def send_reply(descriptor: int, message: dict[str, Any], *output: memoryview) -> None:
    """Write a reply to a blocking descriptor."""
    body = json.dumps(message).encode()
    for part in (memoryview(LENGTH.pack(len(body)) + body), *output):
        while part:
            part = part[os.write(descriptor, part) :]


def output_buffer(size: int) -> mmap.mmap:
    """Memory that no child gets a copy of."""
    buffer = mmap.mmap(-1, size, flags=_PRIVATE)
    buffer.madvise(mmap.MADV_DONTFORK)
    return buffer


def _fill(descriptor: int, view: memoryview) -> bool:
    while view:
        count = os.readv(descriptor, [view])
        if not count:
            return False
        view = view[count:]
    return True
