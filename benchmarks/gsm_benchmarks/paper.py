"""What the paper measured: Zheng et al., *GSM: Efficient Language Modeling with Shared Global State*, its section on
computational efficiency and the appendix on efficiency measurement. Devices differ, so what is compared is the ratio of
GSM to the baseline."""

from __future__ import annotations

from typing import Any

OURS = "gsm"
SIZE = "1p5b"  # the only size that it has timed

# The table of training efficiency (section 4.3), and how it was measured (appendix A.3). Which activations were
# recomputed is not said, only that both models recompute the same; with all of them ours would take 46.0 and 42.7 GiB
# (`benchmark=plan`).
TRAINING: dict[str, Any] = {
    "device": "8 x NVIDIA H800 80GB",
    "what": "1.5B, sequences of 4,096, 4 on each GPU, the same recomputation for both, median of 12 steps after 5",
    "how": {"batch_size": 4, "warm_up": 5, "steps": 12},
    "devices": 8,
    "baseline": {"seconds": 2.578, "tokens_per_second": 50833, "peak_gib": 43.54},
    "gsm": {"seconds": 2.462, "tokens_per_second": 53231, "peak_gib": 44.06},
}
# The figure of inference efficiency gives no numbers; the text says of every length which of the two is ahead.
INFERENCE: dict[str, Any] = {
    "device": "one NVIDIA H800 80GB",
    "what": "1.5B, trained weights, bfloat16, batch 1, CUDA Graphs, median of 3 runs after 2, 64 given tokens",
    "how": {"batch_size": 1, "warm_up": 2, "runs": 3, "steps": 64},
    "lengths": [256 << n for n in range(11)],  # 256 to 256K; that they are doubled from one to the next is our reading
    "gsm / baseline": {"prefill": "above 1", "decode": "above 1", "cache": "below 1"},
}
