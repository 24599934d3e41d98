"""Keep freed memory in the C library."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h
OLDER = 1 << 25  # bytes: the largest value that older releases take for the second
BLOCK, UNUSED = 1 << 30, (1 << 31) - 1  # bytes: smallest block of the system; most that is kept


def keep_freed() -> bool:
    """Keep freed memory for the next allocation, in this process, until it ends.

    By default glibc gives large blocks back to the system, and the next step gets them page by page, each filled with
    zeros: a fifth of the time of a step on 16,384 tokens. In return a process holds more than it uses (there 13 %).

    Returns:
        whether it does; other C libraries have no such choice.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    threshold_set = mallopt(M_MMAP_THRESHOLD, BLOCK) or mallopt(M_MMAP_THRESHOLD, OLDER)
    return bool(mallopt(M_TRIM_THRESHOLD, UNUSED) and threshold_set)
