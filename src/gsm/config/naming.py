"""The default name of an arm, or of an experiment: its model, or its yaml, then the overrides that change training.

``python train.py model/writer=gated seed=1`` is the arm ``gsm-writer_gated``. A name is for readers: the address of a
run (``gsm.config.address``) tells it from all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LONGEST = 80  # letters


def name(first: str, overrides: Iterable[str], address: Mapping[str, Any]) -> str:
    """Return ``first`` with the overrides that change training, in a fixed order: those of the model first,
    the weights to start from last.

    Of a path the last word enters; ``start_from=logs/default/gsm-seed0 start_fresh=false`` is ``continues_gsm-seed0``.

    Args:
        first: the model, or the experiment.
        overrides: as they were typed; the last one of a key counts.
        address: the entry of the configuration.
    """
    silent = (*(key for key in address["label"] if key not in ("size", "recipe", "start_from", "runs")),)
    silent += (*address["machine"], *address["watch"], *address["validation"], "seed", "experiment")
    pairs = (word.lstrip("+~").partition("=") for word in overrides)
    values = {key: value for key, _, value in pairs}
    kept = {key: value for key, value in values.items() if not f"{key}.".startswith(tuple(f"{one}." for one in silent))}
    kept.pop("trainer", None)  # where it trains
    for key in kept.keys() & {"start_from", *address["paths"]}:
        kept[key] = Path(kept[key].strip("'\"").replace("/checkpoints/", "-")).name
    if "start_from" in kept and kept.get("start_fresh") == "false":
        kept["continues"] = kept.pop("start_from")
        del kept["start_fresh"]
    if kept.get("model") == first:
        del kept["model"]
    origins = ("continues", "start_from")  # last: they are long, and only the end of a name is cut off
    order = sorted(kept, key=lambda key: (key in origins, not key.startswith("model"), key))
    words = [label(key, kept[key]) for key in order]
    return "-".join([first, *words])[:LONGEST].rstrip("-._")


def label(key: str, value: Any) -> str:
    """Return a value of a configuration as a part of a name: ``optimizer.learning_rate_3e-3``."""
    short = re.sub(r"^model[./]", "", key.replace("/", "."))
    return re.sub(r"[^a-z0-9.-]+", "_", f"{short} {value}".lower()).strip("_")
