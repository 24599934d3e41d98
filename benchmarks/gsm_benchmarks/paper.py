"""What the paper measured, and says of what it measured: Zheng et al., *GSM: Efficient Language Modeling with Shared
Global State*. Devices differ, so what is compared is the ratio of GSM to the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OURS = "gsm"

# The table of training efficiency (section on efficiency), and its protocol in the appendix.
TRAINING: dict[str, Any] = {
    "device": "8 x NVIDIA H800 80GB",
    "what": "1.5B, sequences of 4,096, 4 on each GPU, the same recomputation for both, median of 12 steps after 5",
    "baseline": {"seconds": 2.578, "tokens_per_second": 50833, "peak_gib": 43.54},
    "gsm": {"seconds": 2.462, "tokens_per_second": 53231, "peak_gib": 44.06},
}
# The figure of inference efficiency (section on efficiency), which gives no numbers in its text.
INFERENCE = {
    "device": "NVIDIA H800 80GB",
    "what": "1.5B, bfloat16, batch 1, 64 given tokens, median of 3 runs after 2, 256 to 256K tokens",
}
# What the paper claims of that figure, and whether a ratio of GSM to the baseline is so: faster, or smaller.
CLAIMS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "prefill": ("GSM reads more tokens a second than the baseline at every length", lambda ratio: ratio > 1),
    "decode": ("GSM decodes more tokens a second than the baseline at every length", lambda ratio: ratio > 1),
    "cache": ("GSM's cache is substantially smaller", lambda ratio: ratio < 1),
}
