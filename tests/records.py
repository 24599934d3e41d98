"""Folders of finished runs as training leaves them, without the training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gsm.config.address import CONFIG, address, address_of_all_seeds
from gsm.experiments.table import list_trial
from gsm.paths import ROOT

ADDRESS = yaml.safe_load((ROOT / "configs/train.yaml").read_text())["address"]


def write_run(
    experiment: Path, arm: str, seed: int, config: Mapping[str, Any] | None = None, part: str = "", **summary: Any
) -> Path:
    """Write the configuration and the summary of a run into its folder in ``logs/<name>``, and return the folder."""
    label = "-".join(filter(None, [arm, f"seed{seed}", part]))
    composed = {"arm": arm, "seed": seed, **(config or {}), "folder": str(experiment / label), "address": ADDRESS}
    folder = experiment / f"{label}-{address(composed)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(yaml.safe_dump({**composed, "folder": str(folder)}))
    facts = {"status": "finished", "model": "gsm", "arm": arm, "seed": seed, "settings": address_of_all_seeds(composed)}
    (folder / "summary.json").write_text(json.dumps({**facts, **summary}))
    return folder


def write_trial(experiment: Path, arm: str, seed: int, **parts: Mapping[str, Any]) -> dict[str, Path]:
    """Write runs after one another, each from its arguments of `write_run`, and list them as an experiment does."""
    folders = {part: write_run(experiment, arm, seed, part=part, **given) for part, given in parts.items()}
    list_trial(experiment, {"arm": arm, "seed": seed, "runs": {part: run.name for part, run in folders.items()}})
    return folders


def change(folder: Path, **summary: Any) -> None:
    """Change facts in the summary of a run."""
    file = folder / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **summary}))
