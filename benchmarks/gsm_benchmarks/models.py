"""The models that a benchmark measures: variants of ``configs/model``, as they are, changed, or trained.

An entry of ``models`` is a name, ``gsm``, or a mapping with a name. All other fields of the mapping are optional:

    {name: wide, overrides: ["model.state_size=64"]}                           GSM with another value
    {name: no_pool, overrides: ["model=baseline", "model.candidate_pool=false"]}
    {name: trained, checkpoint: logs/default/gsm-seed0}                      the run there, at its own size

Rows are called by the name. A name of a variant stands for that variant alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gsm import paths
from gsm.config.check import unknown
from gsm.config.compose import compose
from gsm.config.load import build_model, load_model
from gsm.config.stored import digest, read_checkpoint
from gsm.costs.model import Cost, cost
from gsm.errors import ConfigError
from gsm.models.base import LanguageModel

Entry = str | Mapping[str, Any]  # an item of `models`
KEYS = ("name", "overrides", "checkpoint")
ALL = ("gsm", "baseline", "transformer", "yoco", "gated_delta_net")  # the default
PAIR = ("gsm", "baseline")
LIKE = (
    'Write a name, such as gsm, or {name: mine, overrides: ["model.state_size=64"], checkpoint: logs/default/gsm-seed0}'
)


@dataclass(frozen=True)
class Model:
    """A model that is measured.

    Attributes:
        name: of its rows.
        variant: of the group ``model``.
        overrides: as on the command line, without ``model=``.
        checkpoint: the file of its weights; None: random weights.
        digest: of the content of that file.
        trained_size: the size of the run that left the checkpoint.
    """

    name: str
    variant: str
    overrides: tuple[str, ...] = ()
    checkpoint: Path | None = None
    digest: str | None = None
    trained_size: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Its differences from the variant of its name, which a row keeps; with other ones it is another row."""
        parts = {
            "variant": self.variant if self.variant != self.name else None,
            "overrides": list(self.overrides),
            "checkpoint": self.digest,
        }
        return {key: value for key, value in parts.items() if value}

    def build(self, size: str, overrides: Sequence[str] = (), device: str | torch.device = "cpu") -> LanguageModel:
        """Return the model, with random weights of seed 0 or with the weights of its checkpoint."""
        with torch.device(device):
            if self.checkpoint:
                return load_model(self.checkpoint, device, overrides=[*self.overrides, *overrides]).train()
            return build_model(self.variant, size, [*self.overrides, *overrides], seed=0)

    def config(self, size: str) -> dict[str, Any]:
        """Return the configuration with which ``train.py`` trains the variant at this size."""
        return compose([f"model={self.variant}", f"size={size}", *(() if self.checkpoint else self.overrides)])


@lru_cache(maxsize=64)
def known_cost(model: Model, size: str, overrides: tuple[str, ...] = ()) -> Cost:
    """Return the cost of a model of a size, which is built without memory for its weights.

    Raises ValueError as ``cost`` does.
    """
    with torch.device("meta"):
        return cost(build_model(model.variant, size, [*model.overrides, *overrides]))


def read(entries: Sequence[Entry]) -> list[Model]:
    """Return the models of a list of entries.

    Raises:
        ConfigError: no list, a wrong entry, two entries of one name, or a wrong override.
        FileNotFoundError, CheckpointError: as ``load_model``.
    """
    if isinstance(entries, str) or not entries:
        raise ConfigError(f"models must be a list of entries, got {entries!r:.60}. {LIKE}")
    models = [_read(entry, f"models[{place}]") for place, entry in enumerate(entries)]
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise ConfigError(f"models must have each name once, got {', '.join(names)}")
    return models


def one_size(models: Sequence[Model], size: str | None, default: str) -> str:
    """Return the size at which models are measured: that of their checkpoints, else the one given, else the default.

    Raises ConfigError where these disagree.
    """
    sizes = {model.trained_size for model in models if model.trained_size} | ({size} if size else set())
    if len(sizes) > 1:
        raise ConfigError(f"size must be that of all checkpoints, got {', '.join(sorted(sizes))}")
    return next(iter(sizes), default)


def described(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a line on the models of rows that are more than a variant; empty where there is none."""
    lines = [f"{row['model']}: `{_words(row['given'])}`" for row in rows if row.get("given")]
    return "; ".join(dict.fromkeys(lines))


def _words(given: Mapping[str, Any]) -> str:
    variant = [f"model={given['variant']}"] if given.get("variant") else []
    checkpoint = [f"checkpoint {given['checkpoint'][:12]}"] if given.get("checkpoint") else []
    return " ".join([*variant, *given.get("overrides", ()), *checkpoint])


def _read(entry: Any, place: str) -> Model:
    """Return the model of an entry. Raises as ``read`` does."""
    entry = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} must be a name or a mapping, got {entry!r:.60}. {LIKE}")
    for key in entry:
        if key not in KEYS:
            raise unknown("key", f"{place}.{key}", KEYS, place)
    name, overrides, path = entry.get("name"), entry.get("overrides") or [], entry.get("checkpoint")
    words = not isinstance(overrides, str) and all(isinstance(word, str) for word in overrides)
    if not (isinstance(name, str) and re.fullmatch(r"[\w.+-]+", name) and words and isinstance(path, str | None)):
        raise ConfigError(
            f"{place} must have a name without spaces, a list of overrides and a path, got {dict(entry)!r:.99}. {LIKE}"
        )
    if any(word.startswith("size=") for word in overrides):
        raise ConfigError(
            f"{place}.overrides must leave size out, as all models have that of size=, got {list(overrides)}"
        )
    variants = {file.stem for folder in paths.config_folders() for file in (folder / "model").glob("*.yaml")}
    if path is not None:
        model = _trained(name, tuple(overrides), path, place)
    else:
        plain = name if name in variants or not overrides else "gsm"
        chosen = next((word.removeprefix("model=") for word in overrides if word.startswith("model=")), plain)
        model = Model(name, chosen, tuple(word for word in overrides if not word.startswith("model=")))
        model.config("nano")  # a wrong value is refused before anything is measured
    if name in variants and name != model.variant:
        raise ConfigError(f"{place}.name must be {model.variant}, or a name of your own, got {name}")
    return model


def _trained(name: str, overrides: tuple[str, ...], path: str, place: str) -> Model:
    """Return the model of the one run at a path, or below it. Raises as ``read`` does."""
    from gsm.evaluation.checkpoints import checkpoints  # with Lightning, which random weights do not need

    files = checkpoints(path)
    if len(files) > 1:
        runs = ", ".join(str(file.parents[1]) for file in files[:4])
        raise ConfigError(f"{place}.checkpoint must be one run, such as {runs}, got {path} with {len(files)}")
    choices = read_checkpoint(files[0], weights=False)["hyper_parameters"]["config"].get("choices") or {}
    if not (choices.get("size") and choices.get("model")):
        raise ConfigError(f"{place}.checkpoint must be a run of train.py, which records its size, got {path}")
    return Model(name, choices["model"], overrides, files[0], digest(files[0]), choices["size"])
