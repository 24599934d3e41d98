"""Plain PyTorch attention over a band: the code of `attend` with no bank to read."""

from ..attend.reference import attend_band

__all__ = ["attend_band"]
