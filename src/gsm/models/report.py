"""The parameter counts of a model: total, active for one token, and by part."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from gsm.models.balancing import layers_with_experts

# The first pattern that matches a parameter's name decides. The tied head is counted once, as the embedding.
_PARTS = (
    ("embedding", r"^embedding\."),
    ("aggregation stages", r"^aggregation\."),
    ("state writer", r"^writer\."),
    ("hyper-connections", r"_residual\."),
    ("indexers", r"\.indexer\."),
    ("bank compressors", r"\.compressor\."),
    ("window entries", r"\.attention\.window\."),
    ("convolutions", r"\.convolution\."),
    (
        "recurrence",
        r"\.attention\.(key|value|beta|decay\w*|step|blend|angle|skip|key_bias|step_bias|gate|router)(\.|$)",
    ),
    ("query, output, sink", r"\.attention\.(query|output|sink)"),
    ("keys and values", r"(\.attention|^)\.?key_value\."),
    ("routed experts", r"\.feed_forward\.experts\."),
    ("feed-forward", r"\.feed_forward\."),
    ("norms", r"norm\.weight$"),
    ("attention, other", r"\.attention\."),  # parts that only one kind of mixer has
    ("other", r""),
)


@dataclass(frozen=True)
class ParameterReport:
    """Parameter counts.

    Attributes:
        total: all parameters, tied ones once.
        active: parameters used for one token, that is, without the experts that it is not routed to.
        parts: parameters by name of the part; they sum to ``total``.
    """

    total: int
    active: int
    parts: dict[str, int]

    def __str__(self) -> str:
        rows = [f"{name:<22}{count:>15,}{count / self.total:>8.1%}" for name, count in self.parts.items()]
        return "\n".join([*rows, f"{'total':<22}{self.total:>15,}", f"{'active':<22}{self.active:>15,}"])


def count_parameters(model: nn.Module) -> ParameterReport:
    """Count a model's parameters: total, active for one token, and by part (``other`` for names that match none)."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = next(part for part, pattern in _PARTS if re.search(pattern, name))
        parts[part] = parts.get(part, 0) + parameter.numel()
    total = sum(parts.values())
    inactive_weights = sum(layer.inactive_weights() for layer in layers_with_experts(model))
    return ParameterReport(total, total - inactive_weights, parts)
