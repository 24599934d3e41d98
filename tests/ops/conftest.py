"""Watch the kernels that tests in this folder launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sanitizer

from gsm_kernels import launch
from gsm_kernels.device import triton_version


@pytest.fixture(autouse=True)
def sane() -> Iterator[None]:
    """Kernels that a test launches make none of the errors that Triton's interpreter does not feel."""
    if not launch.INTERPRETED or triton_version() is None:
        yield
        return
    with sanitizer.watching() as report:
        yield
    assert not report.findings, str(report)
