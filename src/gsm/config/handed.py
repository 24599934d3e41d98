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


def take_over() -> dict[str, Any] | None:
    """Return the configuration that this process got, and take it out of the environment: no process that this one
    starts is to get it. None if there is none, or not any more: the process composes its own."""
    text = os.environ.pop(COMPOSED, None)
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text))) if text else None
