"""Handling of a closed terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EIO, errno.EPIPE)  # errors of a closed terminal, and of a pipe without a reader


def outlive() -> None:
    """Make stdout and stderr discard output once the terminal, or the reader of the pipe, is gone.

    A command then continues, and writes the same files. Streams that were replaced are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Lasting(stream.fileno(), "w", closefd=False)
            how = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **how))


class _Lasting(io.FileIO):
    """A file descriptor that becomes ``/dev/null`` when it has lost its reader, also for processes started later."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)
