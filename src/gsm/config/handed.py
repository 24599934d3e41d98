"""The configuration that a process hands to the processes it starts: the runs of an experiment, the ranks of a run.

So they train the configuration that it has composed, even if a yaml changes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf

COMPOSED = "GSM_COMPOSED"  # variable with the configuration, as yaml


def hand_on(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variable that hands a configuration of plain containers to a process."""
    return {COMPOSED: OmegaConf.to_yaml(OmegaConf.create(dict(config)))}


def take_over() -> dict[str, Any] | None:
    """Return the configuration from the parent process; None without one, and at a second call.

    It is removed from the environment, so that processes started here do not inherit it."""
    text = os.environ.pop(COMPOSED, None)
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text))) if text else None
