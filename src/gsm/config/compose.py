"""Compose configurations from Python, and check those of the command line."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from gsm import paths
from gsm.config import naming
from gsm.config.address import CONFIG, noted, placed
from gsm.config.check import NAMED_PARTS, PLACES, ConfigError, check, check_place, unknown
from gsm.config.options import groups_of, listing, reference
from gsm.config.trust import vetted
from gsm.models.schedule import local_reach

# Values of data.task.gap that stand for a distance: just farther than GSM carries information without a bank, than GSM
# with the writer `delta` does (its state carries more), or than both GSM and the baseline do.
REACHES = ("beyond_gsm", "beyond_delta", "beyond_baseline")
NEEDED = ("model", "size", "data", "optimizer", "recipe", "trainer")  # groups that every run has a variant of
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)  # one word of Hydra's grammar, which knows no letters beyond ASCII
WORDS = {"null", "true", "false", "nan", "inf"}  # values of that grammar rather than names


def compose(
    overrides: Iterable[str] = (), directories: Sequence[Path] = (), script: str = "train", digest: str | None = None
) -> dict[str, Any]:
    """Return the configuration of ``python train.py``, resolved, as plain containers.

    Args:
        overrides: words as on the command line: ``["model=baseline", "size=tiny", "model.state_size=64"]``.
        directories: folders of yaml files in addition to ``configs/`` and the folders in GSM_CONFIGS.
        script: name of the script's yaml in ``configs/``.
        digest: hash of the yamls (`gsm.paths.digest`): several compositions with one digest read the same yamls. None:
            the yamls as they are now.

    Raises:
        ConfigError: an unknown key or variant, a value of the wrong type, or yamls that no longer have this digest.
    """
    folders = tuple(paths.config_folders(directories))
    try:
        composed = _hydra(tuple(overrides), folders, script, digest or paths.digest(folders))
    except (HydraException, YAMLError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return _as_job(composed, folders, script)


def finish(config: DictConfig, folders: Sequence[Path], script: str = "train") -> dict[str, Any]:
    """Resolve a composed configuration, check it, and note the choice of every group under ``choices``, and the
    ``overrides``.

    ``HydraConfig`` has to be set, as it is inside a job. Raises ConfigError.
    """
    job = HydraConfig.get()
    choices = {group: choice for group, choice in job.runtime.choices.items() if not group.startswith("hydra/")}
    groups, overrides = groups_of(folders), parse(job.overrides.task)
    for override in overrides:
        if "." in override.key_or_group and (group := override.key_or_group.replace(".", "/")) in groups:
            variants = ", ".join(sorted(groups[group]))
            raise ConfigError(f"{group} must be one of {variants}, chosen with {group}=, got {override.input_line}")
    for group in NEEDED if script == "train" else ():
        if config.get(group) is None:
            raise ConfigError(f"{group} must be given, got null")
    if "experiment" in config and choices.get("experiment"):
        raise ConfigError(
            f"experiment/{choices['experiment']}.yaml must begin with the line '# @package _global_', in UTF-8 without "
            "a byte-order mark"
        )
    plain = _resolve(config)
    _fill_in(plain)
    if script == "train":
        plain |= {group: plain.get(group) or {} for group in NAMED_PARTS}  # a run may have none
    check(plain, _reference(script, tuple(folders), paths.digest(folders)))
    for key in PLACES if script == "train" else ():
        if not (key == "arm" and plain["arms"] is not None):  # of an experiment, it picks some
            check_place(key, plain[key])
    plain |= {"choices": choices, "overrides": list(job.overrides.task)}
    return _placed(plain, [one.key_or_group for one in overrides]) if script == "train" else plain


def _placed(config: dict[str, Any], overrides: Collection[str]) -> dict[str, Any]:
    """Return the configuration of a run with its folder, and with the origin of its weights. Raises ConfigError."""
    for key in ("folder", "origin"):
        if key in overrides:
            raise ConfigError(
                f"{key} must be left out, as it follows from other keys; choose the place with logs= and name="
            )
    if config["start_from"] and not config["origin"]:
        from gsm.config.stored import origin  # it imports PyTorch, too slow for the error of a misspelt word

        try:
            config["start_from"], config["origin"] = origin(config["start_from"])
        except FileNotFoundError as error:  # a run whose parent is gone stays what it is
            path, files = config["start_from"], Path(config["folder"]).parent.glob(f"*/{CONFIG}")
            beside = [noted(file.parent) for file in files]
            known = {
                run["start_from"]: run["origin"] for run in beside if f"{run.get('start_from')}-".startswith(f"{path}-")
            }
            if len(known) != 1:
                raise ConfigError(f"start_from must be a checkpoint, got {path}: {error}") from error
            ((config["start_from"], config["origin"]),) = known.items()
    return placed(config)


@functools.lru_cache(maxsize=8)
def _reference(script: str, folders: tuple[Path, ...], digest: str) -> dict[str, Any]:
    """Return `reference`, read again when a yaml has changed."""
    return reference(script, folders)


def refuse_unnamed(config: Mapping[str, Any], directories: Sequence[Path] = ()) -> None:
    """Raise ConfigError for a model or data with a part that no yaml names: its checkpoint could not be loaded."""
    for part in ("model", "data"):
        if not isinstance(config.get(part), Mapping):
            continue
        try:
            vetted(config[part], part, directories)
        except ConfigError as error:
            raise ConfigError(f"{error}; add a yaml for this part, or its checkpoint cannot be loaded") from error


def from_job(config: DictConfig) -> dict[str, Any]:
    """Return the configuration of the running Hydra job, resolved and checked. Raises ConfigError."""
    script, folders = HydraConfig.get().job.config_name or "train", folders_of(HydraConfig.get())
    finished = finish(config, folders, script)
    if script == "train":
        refuse_unnamed(finished, folders)
    return finished


def folders_of(job: HydraConf) -> list[Path]:
    """Return the folders of yaml files of a Hydra job, the project's first."""
    folders = [Path(source.path) for source in job.runtime.config_sources if source.schema == "file"]
    return list(dict.fromkeys([paths.configs(), *folders]))


def searchpath_word(directories: Sequence[Path]) -> str:
    """Return the override that gives Hydra the user's own folders."""
    return "hydra.searchpath=" + quoted([f"file://{folder}" for folder in directories])


def quoted(value: Any) -> str:
    """Return a value as an override on the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    plain = not isinstance(value, str | Path) or (PLAIN.fullmatch(text) and text not in WORDS)
    return text if plain else QuotedString(text=text, quote=Quote.single).with_quotes()


def _as_job(composed: DictConfig, folders: Sequence[Path], script: str) -> dict[str, Any]:
    """Return the configuration finished as inside of its job: it refers to Hydra's node. Raises ConfigError."""
    state = HydraConfig.instance()
    before = state.cfg
    try:
        state.set_config(composed)
        return finish(composed, folders, script)
    finally:
        state.cfg = before


def _hydra(words: tuple[str, ...], folders: tuple[Path, ...], script: str, digest: str) -> DictConfig:
    """Return the configuration that Hydra composes, with its own node. Raises HydraException, YAMLError, ValueError.

    Hydra reads some thirty files for a choice of variants, so each choice is composed once and cached. Plain values,
    ``key=value``, are set in a copy of it. Hydra composes anything else anew.
    """
    parsed, groups = OverridesParser.create().parse_overrides(list(words)), groups_of(folders)
    key = (folders, digest, script, os.getcwd())
    values = [one for one in parsed if one.key_or_group not in groups]
    if all(one.type is OverrideType.CHANGE and not _is_special(one) for one in values):
        choices = tuple(str(one.input_line) for one in parsed if one.key_or_group in groups)
        composed = copy.deepcopy(_composed(choices, *key))
        try:
            for one in values:
                OmegaConf.update(composed, one.key_or_group, one.value())
        except OmegaConfBaseException:
            pass  # Hydra meets it below, and has the words for it
        else:
            composed.hydra.overrides.task = list(words)
            return composed
    return copy.deepcopy(_composed(words, *key))


def _is_special(override: Override) -> bool:
    return override.is_sweep_override() or override.is_hydra_override() or override.package is not None


@functools.lru_cache(maxsize=64)
def _composed(words: tuple[str, ...], folders: tuple[Path, ...], digest: str, script: str, here: str) -> DictConfig:
    """Compose these words, and restore the global state of Hydra.

    ``digest`` and ``here`` are keys of the cache: a yaml may change, and relative folders depend on the current one.
    """
    if digest != paths.digest(folders):
        raise ConfigError("yaml files have changed since this command began: run it again")
    register_resolvers()
    search = [searchpath_word(folders[1:])] if folders[1:] else []
    main, runtime = GlobalHydra.instance(), JobRuntime.instance()
    before, job = main.hydra, dict(runtime.conf)
    main.clear()  # inside a job Hydra is at work already, and there is only one
    try:
        with hydra.initialize_config_dir(str(paths.configs()), job_name=script, version_base="1.3"):
            return hydra.compose(script, [*words, *search], return_hydra_config=True)
    finally:
        GlobalHydra.set_instance(main)  # initialize_config_dir leaves an empty copy in its place
        main.hydra = before
        for key, value in job.items():  # and changes the job's name, too
            runtime.set(key, value)


def register_resolvers() -> None:
    """Register the functions that yaml files may call.

    * ``${root:}``: the folder of the repository, or the current one where there is none;
    * ``${own_configs:}``: the folders of yaml files in GSM_CONFIGS, for Hydra's search path;
    * ``${home:path}``: the path with ``~`` expanded;
    * ``${quoted:path}``: the path as an override of Hydra has it;
    * ``${named:experiment}``, ``${named:arm}``: their default names, see ``gsm.config.naming``;
    * ``${variants:group,first,without,...}``: arms of an experiment, one for each variant of a group, so that a new
      yaml is one more arm; the first one named leads, the others named are left out;
    * ``${options:script}``: the list of choices in ``--help``.
    """
    OmegaConf.register_new_resolver("root", lambda: str(paths.runs_home()), replace=True)
    OmegaConf.register_new_resolver(
        "own_configs", lambda: [f"file://{folder}" for folder in paths.config_folders()[1:]], replace=True
    )
    OmegaConf.register_new_resolver("home", paths.at_home, replace=True)
    OmegaConf.register_new_resolver("quoted", quoted, replace=True)
    OmegaConf.register_new_resolver("variants", _variants, replace=True)
    OmegaConf.register_new_resolver("options", _options, replace=True)
    OmegaConf.register_new_resolver("named", _named, replace=True)


def _fill_in(config: dict[str, Any]) -> None:
    """Replace words in a configuration by numbers that follow from its size and its model.

    * ``model.stages=all``: the encoder layers that read a bank, on which a stage may stand;
    * ``data.task.gap``: ``beyond_gsm``, ``beyond_baseline`` or ``beyond_delta``, see `REACHES`.
    """
    size, model = config.get("size"), config.get("model")
    if not (isinstance(size, dict) and isinstance(model, dict)):
        return
    if model.get("stages") == "all":
        model["stages"] = list(range(min(size["bank_layers"]), size["encoder_layers"] + 1))
    task = (config.get("data") or {}).get("task")
    if isinstance(task, dict) and isinstance(task.get("gap"), str):
        task["gap"] = _gap(task["gap"], size, model)


def _gap(word: str, size: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Return the distance, in positions, beyond which only a bank reaches. Raises ConfigError for an unknown word."""
    if word not in REACHES:
        raise ConfigError(f"data.task.gap must be a number of tokens, {' or '.join(REACHES)}, got {word}")
    chosen = model.get("state_size")
    entries = chosen if chosen and isinstance(chosen, int) else size["window"] + size["top_k"]  # as with `width` below
    window = (model.get("state_reader") or {}).get("window", 1)  # of each layer of GSM's decoder, beside the state
    width = (model.get("encoder_layer") or {}).get("feed_forward_convolution", 1)
    convolved = width - 1 if isinstance(width, int) else 0  # `check` raises for any other type
    return local_reach(
        encoder_layers=size["encoder_layers"],
        decoder_layers=size["decoder_layers"] if word == "beyond_baseline" else 0,
        window=size["window"],
        state_size=entries,
        reach=(entries - 1 if word == "beyond_delta" else 0)
        + size["decoder_layers"] * (window - 1)
        + size["encoder_layers"] * convolved,
    )


def _named(what: str, _root_: DictConfig) -> str:
    """Return the default name of an experiment, or of its arm. Overrides enter the arm's name for one run, and the
    experiment's name where its runs are arms of its own."""
    job = _root_.get("hydra") or HydraConfig.get()  # a sweep asks before it has a job
    first = str(job.runtime.choices.get("model" if what == "arm" else "experiment") or "default")
    if (what == "arm") == (_root_.get("arms") is not None):
        return first
    typed = cast(list, OmegaConf.to_container(job.overrides.task))  # an override may refer to ${arm}
    return naming.name(first, typed, cast(dict, OmegaConf.to_container(_root_.address)))


def _variants(group: str, first: str, *without: str, _root_: DictConfig) -> dict[str, list[str]]:
    names = groups_of(folders_of(_root_.get("hydra") or HydraConfig.get())).get(group, set())
    for name in (first, *without):
        if name not in names:
            raise unknown("variant", name, names, f"the group '{group}'")
    return {name: [f"{group}={name}"] for name in [first, *sorted(names - {first, *without})]}


def _options(script: str) -> str:
    """Return the list in ``--help``; Hydra makes a template of it, in which a dollar has to stand twice."""
    return listing(script, folders_of(HydraConfig.get()), HydraConfig.get().runtime.choices).replace("$", "$$")


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Return plain containers without Hydra's own node. Raises ConfigError for a missing value or broken reference."""
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        plain = cast(dict, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} must be given: {error.full_key}=... on the command line") from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{error.full_key or 'the configuration'} must have a value: {reason}") from error
    return {str(key): paths.at_home(value) for key, value in plain.items()}


def parse(overrides: Iterable[str]) -> list[Override]:
    """Return the parsed overrides without those of Hydra itself. Raises ConfigError for a word that is no override."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(str(error)) from error
    return [override for override in parsed if not override.is_hydra_override()]
