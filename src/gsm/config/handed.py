"""The configuration that a process composes for the processes it starts: the runs of an experiment, the ranks of a run.

They train what it has composed, also where a yaml has changed since, or a value is another one at each composition.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf

COMPOSED = "GSM_COMPOSED"  # variable with the configuration, as yaml


def hand_on(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variable of a process that trains by a configuration of plain containers."""
    return {COMPOSED: OmegaConf.to_yaml(OmegaConf.create(dict(config)))}


def handed_on() -> dict[str, Any] | None:
    """Return the configuration that this process got, at the first call; None if it has to compose its own."""
    text = os.environ.pop(COMPOSED, None)
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text))) if text else None
