"""What peers share: the reason why one takes no part, and compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Absent(Exception):
    """Raised by a peer that cannot take part here; the message says why."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for the shapes that come, with a backward that may run more than once."""
    import torch._functorch.config as settings

    settings.donated_buffer = False
    return torch.compile(function, dynamic=False)
