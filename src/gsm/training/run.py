"""A training run, from its configuration to its summary: Trainer, folder, model, data, fit, conclusion.

`train` is the whole path. The functions below it follow in the order in which it calls them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.core.utils import env_override
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from gsm.analysis import overlap
from gsm.config.address import CONFIG, CONTENTS, address, address_of_all_seeds, decisive
from gsm.config.command_line import again, path_text
from gsm.config.handed import hand_on, take_over
from gsm.config.load import instantiate, instantiate_data, instantiate_model, load_weights, refusals
from gsm.config.stored import digest, read_checkpoint
from gsm.data.base import DataModule, require_data_module
from gsm.data.synthetic import UNSEEN, SyntheticData
from gsm.errors import ConfigError
from gsm.evaluation import ngrams
from gsm.evaluation.questions import MEASURES
from gsm.files import read_json, write_json
from gsm.layers.operations import OPS
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.signals import PARENT
from gsm.training import report, weights
from gsm.training.callbacks import find
from gsm.training.callbacks.checkpoints import Latest
from gsm.training.callbacks.interruption import Interrupted
from gsm.training.callbacks.summary import Summary
from gsm.training.callbacks.tensorboard import Hyperparameters
from gsm.training.distributed import ranks
from gsm.training.distributed.sharded import Sharded
from gsm.training.folder import Begin, begin, compared_with_last, finished, held, note
from gsm.training.heap import keep_freed
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm.training.resume import ResumeState
from gsm.training.trainer import build, meet, quiet, refuse_divided
from gsm_kernels import explain

NGRAMS = {"unigram": 1, "bigram": 2, "five_gram": 5}
MOST_COUNTED = 50_000_000  # tokens: with more, counting 5-grams takes too long at the end of a run


@dataclass(frozen=True)
class Parts:
    """All parts of a training run."""

    config: Mapping[str, Any]
    data: DataModule
    model: LanguageModel
    task: LanguageModeling
    trainer: lightning.Trainer
    summary: Summary


@ranks.own_ranks()
def train(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train by a composed configuration (``gsm.config.compose.compose``) and return the content of ``summary.json``.

    The run lies in ``config["folder"]``. A finished run is not trained again; an unfinished one resumes. The folder
    holds ``config.yaml``, ``checkpoints/`` with the last step and the best one, TensorBoard's events, ``metrics.jsonl``
    and ``summary.json``.

    Raises:
        ConfigError: a value is out of range, the data or the first weights of an unfinished run have changed, or the
            checkpoint of ``start_from`` holds another model.
        FloatingPointError: the loss or its gradient is not finite.
        OSError: a file cannot be written; the error names it.
        SystemExit: a signal has interrupted the run; the code is 128 + the signal's number.
    """
    quiet()
    config = take_over() or config
    leads = ranks.rank() == 0
    if leads:  # Lightning may have read another number from a RANK that is left in the environment
        rank_zero_only.rank = 0  # pyright: ignore[reportFunctionMemberAccess]
    meet(config)
    with contextlib.ExitStack() as stack:
        # Rank 0 alone looks for the run, and all train what it has composed.
        config = ranks.agreed(lambda: stack.enter_context(held(config)) if leads else config)
        folder = Path(config["folder"])
        data = functools.cache(lambda: open_data(config))
        if ranks.agreed(lambda: finished(config, lambda: data().fingerprint())):
            return _found(config) if leads else {}
        optimizer, summary = instantiate(config["optimizer"], "optimizer"), Summary(folder / "summary.json")
        trainer = build(config, summary)
        model = build_model(config)  # before data are read: its values may be out of range
        start = ranks.agreed(lambda: begin(config, data().fingerprint()))
        parts = assemble(config, start, data(), model, optimizer, trainer, summary)
        compare_ranks(parts)
        ranks.agreed(lambda: _announce(parts, start) if leads else None)  # an error ends all ranks
        _fit(parts, start)
        return _conclude(parts) if leads else dict(summary.facts)


def compare_ranks(parts: Parts) -> None:
    """Raise ConfigError, on all ranks, if connected ranks differ in their configuration or data."""

    def values() -> dict[str, Any]:
        fingerprint = {f"the data's {key}": value for key, value in parts.data.fingerprint().items()}
        return {**decisive(parts.config), "data.batch_size": parts.config["data"].get("batch_size"), **fingerprint}

    ranks.compare(values)


def build_model(config: Mapping[str, Any]) -> LanguageModel:
    """Build the model. Its weights depend only on the seed, not on earlier random draws.

    Raises ConfigError.
    """
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    return instantiate_model(config, config["seed"])


def open_data(config: Mapping[str, Any]) -> DataModule:
    """Open the data of a run for training. Raises ConfigError if they are missing, damaged or too little."""
    path = config.get("start_from")
    data = instantiate_data(config["data"], weights.tokenizer(path, config["data"]) if path else None)
    with refusals("data"):
        data = require_data_module(data)
        data.prepare_data()
        data.setup("fit")
    return data


def assemble(
    config: Mapping[str, Any],
    start: Begin,
    data: DataModule,
    model: LanguageModel,
    optimizer: AdamW,
    trainer: lightning.Trainer,
    summary: Summary,
) -> Parts:
    """Put the parts together: the weights to start from, and the facts of the summary.

    Raises ConfigError for parts that do not fit together, CheckpointError for a checkpoint of other parts.
    """
    lightning.seed_everything(config["seed"], workers=True, verbose=False)  # opening the data may have drawn
    path = config.get("start_from")
    if path and not start.checkpoint:
        weights.take(model, path, config)
    if path or start.checkpoint:
        data.first_sequence = weights.first_sequence(config, start.checkpoint)
    task = LanguageModeling(
        model,
        optimizer,
        config=config,
        notes={
            "tokenizer": data.tokenizer.to_state() if data.tokenizer else None,
            "fingerprint": dict(data.fingerprint()),
            "started_from": digest(path),
            "first_sequence": data.first_sequence,
        },
        token_bytes_V=None if data.token_bytes_V is None else torch.from_numpy(data.token_bytes_V),
        measures_accuracy=data.measures_accuracy,
        compile=config["compile"],
    )
    size = model.parameter_report().total
    callbacks: list[lightning.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] # undeclared
    about = report.about(config, summary.facts["commit"], isinstance(model, GSM), data.tokenizer is not None)
    metric = "val/accuracy" if data.measures_accuracy else "val/bits_per_byte"
    callbacks.insert(callbacks.index(summary), Hyperparameters(config, size, differing(config), about, metric))
    facts = {
        "experiment": config["name"],
        "arm": str(config["arm"]),
        "seed": config["seed"],
        "address": address(config),
        "settings": address_of_all_seeds(config),
        "start_from": path,
        "model": config["choices"]["model"],
        "size": config["choices"]["size"],
        "choices": config["choices"],
        "parameters": size,
        "data": data.description(),
        "fingerprint": task.notes["fingerprint"],
        "kernels": explain(OPS),
    }
    summary.facts = {**facts, **summary.facts}
    refuse_divided(trainer, task)
    if trainer.strategy.root_device.type == "cpu":
        keep_freed()
    parts = Parts(config, data, model, task, trainer, summary)
    # Ranks that Lightning starts, here or on other nodes, are connected only now.
    callbacks.append(LambdaCallback(setup=lambda trainer, task, stage: compare_ranks(parts)))
    return parts


def differing(config: Mapping[str, Any]) -> list[str]:
    """Return the keys in which the arms of this run's experiment differ; empty outside an experiment."""
    arms = (read_json(Path(config["folder"]).parent / CONTENTS) or {}).get("arms")
    arms = arms if isinstance(arms, Mapping) and config["arm"] in arms else {}
    lines = (line for overrides in arms.values() if isinstance(overrides, list) for line in overrides)
    return list(dict.fromkeys(str(line).partition("=")[0].lstrip("+~/") for line in lines))


def _announce(parts: Parts, start: Begin) -> None:
    """Note the configuration, and print the run."""
    config, sentences = parts.config, []
    if start.own:
        sentences.append(f"Going on with the unfinished run in {path_text(config['folder'])}, step {start.step}.")
    elif start.checkpoint:
        sentences.append(f"Training on from {path_text(start.checkpoint)}, step {start.step}.")
    elif config["start_from"]:
        sentences.append(weights.describe_start(config["start_from"]))
    if start.checkpoint and not parts.data.resumes:
        sentences.append("Its data start from the beginning: this data module cannot resume (see gsm.data.base).")
    if not start.own and (Path(config["folder"]) / CONFIG).is_file():
        sentences.append("An earlier attempt saved no step, so the run starts from the beginning.")
    elif not start.own:
        sentences.append(compared_with_last(config))
    note(config)
    sentence = " ".join(filter(None, sentences))
    print(report.header(config, parts.summary.facts, parts.trainer, parts.data, sentence), flush=True)


def _fit(parts: Parts, start: Begin) -> None:
    """Train and validate. The last step is validated and saved, too.

    Raises SystemExit after a signal, once it has printed how to continue, and ConfigError for settings that Lightning
    rejects.
    """
    trainer = parts.trainer
    for latest in find(trainer, Latest):
        latest.saved = start.step if start.own else None
    for state in find(trainer, ResumeState):
        state.goes_on = start.own

    def say_farewell() -> None:
        if trainer.is_global_zero:
            print(_farewell(parts), flush=True)

    try:
        # Ranks that Lightning starts leave with this process, or they would look for a killed leader for half an hour.
        with env_override({PARENT: str(os.getpid()), **hand_on(parts.config)}):
            trainer.fit(parts.task, datamodule=parts.data, ckpt_path=start.checkpoint, weights_only=True)
        if start.checkpoint and not start.own and start.step >= trainer.max_steps:
            # Lightning has skipped all hooks: there is no curve and no saved step yet.
            trainer.validate(parts.task, datamodule=parts.data, verbose=False)
            for latest in find(trainer, Latest):
                latest.save(trainer)
    except MisconfigurationException as error:  # Lightning checks some arguments only when it has the data
        raise ConfigError(f"trainer: {error}") from error
    except SystemExit as stop:
        if isinstance(stop, Interrupted) and not stop.at_once:
            # On all ranks: srun ends the others as soon as one of them has ended. The leading one may be gone.
            with contextlib.suppress(RuntimeError):
                ranks.agreed(say_farewell, patience=ranks.ENDING)
        else:
            say_farewell()
        raise SystemExit(_exit_code(stop)) from stop


def _exit_code(stop: SystemExit) -> int:
    """Return 128 + the number of the signal. A signal that came before training began has no number from Lightning."""
    if isinstance(stop, Interrupted) and isinstance(stop.code, int):
        return stop.code
    return 128 + (signal.SIGTERM if isinstance(stop, SIGTERMException) else signal.SIGINT)


def _farewell(parts: Parts) -> str:
    """Return the sentence for an interrupted run: its step, its checkpoint, and the command to continue."""
    step = parts.trainer.global_step
    saved = max((latest.saved for latest in find(parts.trainer, Latest) if latest.saved is not None), default=None)
    if saved is None and step == 0:
        return "\ninterrupted before a step was done; nothing was saved"
    if saved is None:
        return f"\ninterrupted at step {step} of {parts.trainer.max_steps}; nothing was saved; once more:\n  {again()}"
    where = "and saved" if saved == step else f"saved at step {saved}"
    return f"\ninterrupted at step {step} of {parts.trainer.max_steps}, {where}; to go on:\n  {again()}"


def _conclude(parts: Parts) -> dict[str, Any]:
    """Measure the trained model, print the conclusion, and add the measurements to the summary.

    The measurements are the sizes of the memory, the bits per byte of n-gram models, the overlap of selections, and the
    task's own measure. The conclusion also has a sample.
    """
    trainer, data, config = parts.trainer, parts.data, parts.config
    why = None  # signals raise, so only a callback can have ended the run before its last step
    if trainer.global_step < trainer.max_steps:
        said = [f": {part.stopping_reason_message}" for part in find(trainer, EarlyStopping)]
        why = f"a callback ended it at step {trainer.global_step} of {trainer.max_steps}{''.join(said)}"
    if isinstance(trainer.strategy, Sharded):  # the other ranks end now, so this one loads the whole model
        whole = instantiate_model(config)
        load_weights(whole, read_checkpoint(config["folder"]))
        parts = replace(parts, model=whole)
    model = parts.model.to(trainer.strategy.root_device).eval()
    facts: dict[str, Any] = {**dict.fromkeys(MEASURES), "overlap": None}
    with torch.no_grad():
        facts |= {"device": report.device(trainer), **_memory(parts), **_ngrams(data, config, trainer.global_step)}
        if data.context and overlap.selects_for_itself(model):
            sequences: Callable[[int], Any] = functools.partial(data.of_length, most=overlap.SEQUENCES)
            facts["overlap"] = overlap.measure(model, sequences, data.context)
        if isinstance(data, SyntheticData) and (key := getattr(data.task, "measured", None)):
            how = (data.context, data.validation_sequences, UNSEEN[data.held_out])
            facts[key] = MEASURES[key].measure(model, data.task, *how)
        if facts["overlap"] and facts["overlap"]["mean"] is not None:
            for logger in trainer.loggers:  # logged after the last step: a run that is interrupted here measures again
                logger.log_metrics({"val/overlap/mean": facts["overlap"]["mean"]}, trainer.global_step + 1)
                logger.finalize("success")
        summary = parts.summary.add(
            trainer, status="finished", reason=why, **facts
        )  # written last: until then the run is unfinished
        is_text = data.tokenizer is not None and data.token_bytes_V is not None
        sample = report.sample(model, data) if config["sample"] and is_text else None
    print(report.conclusion(Path(config["folder"]), summary, sample, data.tokenizer is not None), flush=True)
    return summary


def _found(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a finished run, and add n-gram models to it that ``ngrams=true`` asks for."""
    folder = Path(config["folder"])
    summary = read_json(folder / "summary.json") or {}
    print(f"The run in {path_text(folder)} is finished already (remove the folder to train it again).", flush=True)
    if config["ngrams"] and not summary.get("ngrams"):
        summary |= _ngrams(open_data(config), config, summary["steps"])
        write_json(folder / "summary.json", summary)
    return summary


def _memory(parts: Parts) -> dict[str, Any]:
    """Return the bytes of the memory after one context: the decoder's state, all but bookkeeping, and by kind."""
    tokens_BT = next(parts.data.validation())["tokens"][None].to(parts.trainer.strategy.root_device)
    memory = parts.model.prefill(tokens_BT, parts.model.start(1)).memory
    assert memory is not None  # prefill returns the memory that it was given
    return {
        "state_bytes": parts.model.state_bytes(memory),
        "cache_bytes": memory.cache_bytes(),
        "memory_bytes": memory.breakdown(),
        "memory_after_tokens": tokens_BT.shape[1],
    }


def _ngrams(data: DataModule, config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the bits per byte of n-gram models, counted on exactly the tokens that a run has consumed."""
    sequences = steps * config["global_batch"]
    few = config["ngrams"] and data.tokenizer and sequences * data.context <= MOST_COUNTED
    consumed = data.consumed(sequences) if few else None
    if consumed is None or data.tokenizer is None or data.bytes_per_token is None:
        return {"ngrams": config["ngrams"], **{f"{name}_bits_per_byte": None for name in NGRAMS}}
    trained, validation = list(consumed), list(data.validation())
    size = {"vocabulary": data.tokenizer.vocabulary, "bytes_per_token": data.bytes_per_token}
    counted = {name: ngrams.measure(trained, validation, order=order, **size) for name, order in NGRAMS.items()}
    return {"ngrams": True, **{f"{name}_bits_per_byte": bits for name, bits in counted.items()}}
