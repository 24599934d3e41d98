"""Text files as users have them, for tests: JSON lines, and files packed as their endings say."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

STORIES = [f"Story {number}: größer, 東京.\n\nIt ends.\n" for number in range(40)]


def pack(path: Path, raw: bytes) -> Path:
    """Writes `raw` as the ending of `path` says."""
    if path.suffix == ".zst":
        raw = pytest.importorskip("pyarrow").compress(raw, codec="zstd", asbytes=True)
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(raw))
    return path


def json_lines(texts: list[Any], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts).encode()
