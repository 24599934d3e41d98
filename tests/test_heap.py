"""Training on a CPU keeps the memory that it frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BLOCK = 64 << 20  # bytes
FAULTS = f"""
import resource, sys
import torch
from gsm.training.heap import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
faults = []
for _ in range(60):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({BLOCK} // 4)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[-10:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_block_that_was_freed_is_there_without_page_faults_after_a_while():
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["keep"] < 10 < faults["leave"], faults
