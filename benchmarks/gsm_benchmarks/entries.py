"""Which models a benchmark measures: any variant of ``configs/model``, changed in any way, or trained.

An entry of ``models`` is a name, ``gsm``, or a mapping with a name, of which the rest may be left out:

    {name: wide, overrides: [model.state_size=64]}           GSM, as of a command line that names no other variant
    {name: no_pool, overrides: [model=baseline, model.candidate_pool=false]}
    {name: gsm, checkpoint: logs/default}                    what the one run there has trained, of its own size
    {name: no_pool, checkpoint: logs/default/baseline, overrides: [model.candidate_pool=false]}

Rows are called by the name. One that is also a variant's is that variant, whatever else is said of it.
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
from gsm.config.compose import compose, parse
from gsm.config.load import build_model, load_model, model_of, read_checkpoint
from gsm.costs.model import Cost, cost
from gsm.errors import ConfigError
from gsm.experiments import weights
from gsm.models.base import LanguageModel

Entry = str | Mapping[str, Any]  # of `models`
KEYS = ("name", "overrides", "checkpoint")
ALL = ("gsm", "baseline", "transformer", "yoco", "gated_delta_net")  # where a command names none
PAIR = ("gsm", "baseline")
LIKE = "write a name, such as gsm, or {name: mine, overrides: [model.state_size=64], checkpoint: logs/default}"


@dataclass(frozen=True)
class Model:
    """A model that is measured.

    Attributes:
        name: what its rows are called.
        overrides: as on the command line; those of a checkpoint change values of its model.
        variant: of the group ``model``; None: that of its name.
        checkpoint: the file that it is read from; None: its weights are random.
        digest: of that file's content.
        trained_size: the size that the run of the checkpoint has chosen.
    """

    name: str
    overrides: tuple[str, ...] = ()
    variant: str | None = None
    checkpoint: Path | None = None
    digest: str | None = None
    trained_size: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What makes it more than its name, as its rows have it; rows of another one are of another model."""
        checkpoint = {"checkpoint": self.digest} if self.digest else {}
        changed = {"overrides": list(self.overrides)} if self.overrides else {}
        other = {"variant": self.variant} if self.variant not in (None, self.name) else {}
        return {**other, **changed, **checkpoint}

    def build(self, size: str, overrides: Sequence[str] = (), device: str | torch.device = "cpu") -> LanguageModel:
        """The model, with random weights of seed 0 or those of its checkpoint, with more overrides."""
        if self.checkpoint:
            with torch.device(device):
                return load_model(self.checkpoint, device, overrides=[*self.overrides, *overrides]).train()
        with torch.device(device):
            return build_model(self.variant or self.name, size, [*self.overrides, *overrides], seed=0)

    def bare(self, size: str, overrides: Sequence[str] = ()) -> LanguageModel:
        """The same without memory for its weights, on the meta device."""
        with torch.device("meta"):
            if self.checkpoint:
                saved = read_checkpoint(self.checkpoint, mmap=True)
                return model_of(saved, self.checkpoint, overrides=[*self.overrides, *overrides])
            return build_model(self.variant or self.name, size, [*self.overrides, *overrides])

    def config(self, size: str) -> dict[str, Any]:
        """What ``train.py`` would train it with, at this size."""
        own = () if self.checkpoint else self.overrides
        return compose([f"model={self.variant or self.name}", f"size={size}", *own])


def of_row(row: Mapping[str, Any]) -> Model | None:
    """The model of a row; None of one that is more than its name: nothing that a file of results says is composed but
    names of variants, since overrides may name code."""
    names = (row["model"], row.get("size", ""))
    plain = all(isinstance(name, str) and re.fullmatch(r"\w*", name) for name in names)
    return Model(row["model"]) if plain and not row.get("given") else None


@lru_cache(maxsize=64)
def known_cost(model: Model, size: str, overrides: tuple[str, ...] = ()) -> Cost:
    """The cost of a model of a size, which is built without memory for its weights. Raises ValueError as ``cost``."""
    return cost(model.bare(size, overrides))


def read(entries: Sequence[Entry]) -> list[Model]:
    """The models of a list of entries.

    Raises:
        ConfigError: an entry that is none, two of one name, an override or a variant that there is not.
        FileNotFoundError, CheckpointError: as of ``load_model``.
    """
    if isinstance(entries, str) or not entries:
        raise ConfigError(f"models is {entries!r:.60}, but takes a list of one entry or more: [gsm,baseline]; {LIKE}")
    models = [_read(entry, f"models[{place}]") for place, entry in enumerate(entries)]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"models names '{name}' {names.count(name)} times: give each entry a name of its own")
    return models


def one_size(models: Sequence[Model], size: str | None, default: str) -> str:
    """The size at which models are measured: that of their checkpoints, else the one given, else the default.

    Raises ConfigError where these disagree.
    """
    for model in models:
        if model.trained_size is None:
            continue
        if size not in (None, model.trained_size):
            raise ConfigError(
                f"size is {size}, but the checkpoint of '{model.name}' is of size {model.trained_size}: leave out "
                "size, or that model"
            )
        size = model.trained_size
    return size or default


def at_sizes(models: Sequence[Model], sizes: Sequence[str], key: str) -> list[tuple[str, Model]]:
    """Every size with every model of it: those that were trained are of one. Raises ConfigError where it is none of
    the sizes, which ``key`` lists."""
    for model in models:
        if model.trained_size not in (None, *sizes):
            raise ConfigError(
                f"{key} is {', '.join(sizes)}, but the checkpoint of '{model.name}' is of size {model.trained_size}: "
                f"add {model.trained_size} to {key}"
            )
    return [(size, model) for size in sizes for model in models if model.trained_size in (None, size)]


def described(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line on the models of rows that are more than their name; empty where there is none."""
    said = [f"{row['model']}: `{_told(row['given'])}`" for row in rows if row.get("given")]
    return "; ".join(dict.fromkeys(said))


def _told(given: Mapping[str, Any]) -> str:
    variant = [f"model={given['variant']}"] if given.get("variant") else []
    checkpoint = [f"checkpoint {given['checkpoint'][:12]}"] if given.get("checkpoint") else []
    return " ".join([*variant, *given.get("overrides", ()), *checkpoint])


def _read(entry: Any, place: str) -> Model:
    """One entry. Raises as ``read`` does."""
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} is {entry!r:.60}: {LIKE}")
    for key in entry:
        if key not in KEYS:
            raise unknown("key", f"{place}.{key}", KEYS, place)
    name, overrides, checkpoint = (entry.get(key) for key in KEYS)
    if not (isinstance(name, str) and re.fullmatch(r"[\w.+-]+", name)):
        raise ConfigError(f"{place}.name is {name!r:.60}, but takes one word of letters, digits and _ . + -: {LIKE}")
    words = [] if overrides is None else overrides
    if isinstance(words, str) or not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{place}.overrides is {overrides!r:.60}, but takes a list: [model.state_size=64]")
    if not isinstance(checkpoint, str | None):
        raise ConfigError(f"{place}.checkpoint is {checkpoint!r:.60}, but takes the path of a run or of a file")
    parsed = parse(words)
    for one in parsed:
        if one.key_or_group == "size":
            raise ConfigError(f"{place}.overrides has '{one.input_line}': all models are of one size, give size=")
    known = {file.stem for folder in paths.config_folders() for file in (folder / "model").glob("*.yaml")}
    if checkpoint:
        return _trained(name, tuple(words), checkpoint, place, known)
    if not words and name not in known:
        raise unknown("variant", name, known, "the group 'model'")
    if not words:
        return Model(name)
    rest = [str(one.input_line) for one in parsed if one.key_or_group != "model"]
    own = [f"model={name}"] if name in known and len(rest) == len(parsed) else []
    variant = compose([*own, *words])["choices"]["model"]
    _same(name, variant, place, known)
    return Model(name, tuple(rest), variant)


def _trained(name: str, overrides: tuple[str, ...], path: str, place: str, known: set[str]) -> Model:
    """The model of the one run at a path, or below it. Raises as ``read`` does."""
    from gsm.evaluation.checkpoints import checkpoints  # with Lightning, which a model with random weights does without

    files = checkpoints(path)
    if len(files) > 1:
        runs = ", ".join(str(file.parents[1]) for file in files[:4])
        raise ConfigError(f"{place}.checkpoint is {path}, below which there are {len(files)} runs: name one, of {runs}")
    choices = read_checkpoint(files[0], mmap=True)["hyper_parameters"]["config"].get("choices") or {}
    if not (choices.get("size") and choices.get("model")):
        raise ConfigError(f"{place}.checkpoint is {path}, which names no model and size: only runs of train.py do")
    _same(name, choices["model"], place, known)
    digest = weights.digest(files[0])
    model = Model(name, overrides, choices["model"], files[0], digest, choices["size"])
    model.bare(choices["size"])  # refuses, before anything is measured, what does not fit the code
    return model


def _same(name: str, variant: str, place: str, known: set[str]) -> None:
    """Raises ConfigError for the name of one variant on a model of another."""
    if name in known and name != variant:
        raise ConfigError(f"{place}.name is {name}, but this is a {variant}: give it a name that is no other model's")
