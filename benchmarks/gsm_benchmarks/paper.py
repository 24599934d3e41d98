"""What the paper measured: Zheng et al., *GSM: Efficient Language Modeling with Shared Global State*. Its figure of
inference efficiency gives no numbers. Devices differ, so what is compared is the ratio of GSM to the baseline."""

from __future__ import annotations

from typing import Any

OURS = "gsm"

# The table of training efficiency (section 4.3), and its protocol (appendix A.3).
TRAINING: dict[str, Any] = {
    "device": "8 x NVIDIA H800 80GB",
    "what": "1.5B, sequences of 4,096, 4 on each GPU, the same recomputation for both, median of 12 steps after 5",
    "baseline": {"seconds": 2.578, "tokens_per_second": 50833, "peak_gib": 43.54},
    "gsm": {"seconds": 2.462, "tokens_per_second": 53231, "peak_gib": 44.06},
}
