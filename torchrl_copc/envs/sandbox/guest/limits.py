"""Limits of the process that runs the code."""

from __future__ import annotations

import mmap
import resource

SCRATCH_BYTES = 16 << 20
SCRATCH_INODES = 1024
OPEN_FILES = 64
THREADS = 32
_OUR_PROCESSES = 3  # bubblewrap's first process, the server, and the code's main thread


def address_space_in_use() -> int:
    """Bytes of address space this process has, by trial: the sandbox has no ``/proc`` to read it from."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 46
    try:
        while high - low > mmap.PAGESIZE:
            middle = (low + high) // 2
            resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
            try:
                mmap.mmap(-1, mmap.PAGESIZE).close()
                high = middle
            except (OSError, MemoryError):
                low = middle
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


def apply(address_space: int, *, threads: int | None) -> None:
    """Set the limits; none can be raised again.

    Args:
        address_space: bytes, those already in use included.
        threads: that the code may start; the limit holds for all processes of this user in this user namespace,
            so ``None`` where that is the host's.
    """
    values = {
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_FSIZE: 2 * SCRATCH_BYTES,  # a full scratch is met first
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_CORE: 0,
    }
    if threads is not None:
        values[resource.RLIMIT_NPROC] = threads + _OUR_PROCESSES
    for kind, value in values.items():
        resource.setrlimit(kind, (value, value))
