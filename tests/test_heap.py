"""Training on a CPU keeps the memory that it frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BLOCK = 64 << 20  # bytes
FAULTS = f"""
import resource
import torch
from gsm.training.heap import keep_freed

def faults(blocks):
    counts = []
    for _ in range(blocks):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones({BLOCK} // 4)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[-5:])

before = faults(10)
assert keep_freed()
print(before, faults(20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_block_that_was_freed_is_there_without_page_faults_after_a_while():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 10 < before
