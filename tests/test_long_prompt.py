"""A prompt of 65,536 tokens on a laptop: the state stays as small as at 1,024, and so does what it takes to read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

READ = """
import json, resource, torch, gsm
torch.manual_seed(0)
# Groups of 8 tokens instead of 2: what takes the time is to choose among the slots of the bank.
model = gsm.build_model("gsm", size="pico", overrides=["size.encoder_ratio=8"], seed=0).eval()
sizes = {}
with torch.no_grad():
    for length in (1_024, 65_536):
        memory = model.prefill(torch.randint(512, (1, length)), model.start(), chunk=4096).memory
        sizes[length] = memory.breakdown()
        assert memory.nbytes() == sum(sizes[length].values())
print(json.dumps({"sizes": sizes, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


@pytest.fixture(scope="module")
def reading() -> dict:
    """Sizes by length, and the peak of the process's memory, from a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_state_and_windows_take_the_same_bytes_at_1k_and_64k(reading):
    short, long = reading["sizes"]["1024"], reading["sizes"]["65536"]
    for kind in ("shared_state", "encoder_window", "bookkeeping"):
        assert short[kind] == long[kind], f"{kind}: {short[kind]} and {long[kind]} bytes"
    assert long["shared_state"] == 12 * 32 * 4  # M entries of width C in float32
    assert long["encoder_bank"] == 64 * short["encoder_bank"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_reading_64k_tokens_in_chunks_stays_under_2_gib(reading):
    assert reading["peak"] < 2 * 2**30, f"{reading['peak'] / 2**30:.2f} GiB"
