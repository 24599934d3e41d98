"""A prompt of 65,536 tokens is read in chunks under 2 GiB, on a laptop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

READ = """
import resource, torch, gsm
torch.manual_seed(0)
# Groups of 8 tokens instead of 2, because the search among the slots takes most of the time.
model = gsm.build_model("gsm", size="pico", overrides=["size.encoder_ratio=8"], seed=0).eval()
with torch.no_grad():
    out = model.prefill(torch.randint(512, (1, 65_536)), model.start(), chunk=4096)
assert out.memory.used == 65_536
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_reading_64k_tokens_in_chunks_stays_under_2_gib() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.splitlines()[-1])
    assert peak < 2 << 30, f"{peak / 2**30:.2f} GiB"
