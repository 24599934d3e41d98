"""A training run from its header to its summary."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gsm.callbacks.interruption import Interrupted
from gsm.callbacks.latest import Latest
from gsm.callbacks.metrics_file import MetricsFile
from gsm.callbacks.summary import Summary
from gsm.callbacks.tensorboard import TensorBoard
from gsm.callbacks.throughput import callbacks
from gsm.data.adaptation import RulerData
from gsm.data.module import TextData
from gsm.data.state_tracking import StateTracking
from gsm.data.synthetic import SyntheticData
from gsm.distributed import ranks, shards
from gsm.distributed.sharded import Sharded
from gsm.eval import overlap, tracking
from gsm.eval.ngrams import ngram_bits_per_byte
from gsm.models.base import LanguageModel
from gsm.runs import report, trainers, weights
from gsm.runs.command_line import again
from gsm.runs.estimate import refuse_endless
from gsm.runs.folder import Start, locked, prepare, sequences_a_step
from gsm.runs.load import (
    CheckpointError,
    instantiate,
    instantiate_data,
    instantiate_model,
    load_weights,
    read_checkpoint,
    refusals,
)
from gsm.runs.state import refuse_other_state
from gsm.task import LanguageModeling
from gsm_kernels import explain

NGRAMS = {"unigram": 1, "bigram": 2, "five_gram": 5}
OVERLAP_SEQUENCES = 16  # of each length
Data = TextData | SyntheticData | RulerData
MOST_COUNTED = 50_000_000  # tokens: beyond, counting 5-grams takes longer than one wants to wait at the end of a run


@dataclass(frozen=True)
class Run:
    """Everything a training run is made of."""

    config: Mapping[str, Any]
    data: Data
    model: LanguageModel
    task: LanguageModeling
    trainer: lightning.Trainer
    summary: Summary


def train(config: Mapping[str, Any]) -> dict[str, Any]:
    """Trains as a composed configuration says (``gsm.runs.compose.compose``) and returns what ``summary.json`` holds.

    Leaves in ``config["folder"]``: ``checkpoints/last.ckpt`` and ``best.ckpt``, TensorBoard events, ``metrics.csv`` and
    ``summary.json``.

    Raises:
        ConfigError: a part refuses its values, a step takes more memory than there is, the checkpoint to go on from is
            of another configuration, of other data or of steps of other sizes, the one to start from holds another
            model, or another process trains in the same folder.
        FloatingPointError: the loss or its gradient is not finite any more.
        OSError: a file cannot be written; the error names it.
        SystemExit: a signal has interrupted it, with 128 + the signal's number, or another rank is gone, with what to
            do; the same call then goes on.
    """
    leads = ranks.rank() == 0
    long = refuse_endless(config)
    data = functools.cache(functools.partial(open_data, config))
    with contextlib.ExitStack() as held:

        def decide() -> Start:
            if leads:
                held.enter_context(locked(Path(config["folder"])))
            return prepare(config, leads, lambda: data().fingerprint())

        trainers.meet(config)
        start = ranks.agreed(decide)  # one rank looks and moves: another would meet a folder that is half moved
        run = assemble(config, start, data())
        if leads:
            taken = weights.told(config["start_from"]) if config.get("start_from") and not start.checkpoint else ""
            print(report.header(run, " ".join(filter(None, [start.sentence, taken, long]))), flush=True)
        _fit(run, start)
        return _conclude(run) if leads else dict(run.summary.facts)


def open_data(config: Mapping[str, Any]) -> Data:
    """The data of a run, ready to be read. Raises ConfigError where it is missing, damaged or too little."""
    path = config.get("start_from")
    data = instantiate_data(config["data"], weights.tokenizer(path) if path else None)
    with refusals("data"):
        data.prepare_data()
        data.setup("fit")
    return data


def assemble(config: Mapping[str, Any], start: Start | None = None, data: Data | None = None) -> Run:
    """Builds all parts, the loggers as of where the run starts.

    The weights follow from the seed alone, whatever else has drawn random numbers before.
    """
    _quiet()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    data = data or open_data(config)
    model = instantiate_model(config, config["seed"])
    path = config.get("start_from")
    if path and not (start and start.checkpoint):
        weights.take(model, path, config)
    task = LanguageModeling(
        model,
        instantiate(config["optimizer"], "optimizer"),
        config=config,
        tokenizer=data.tokenizer.to_state() if data.tokenizer else None,
        fingerprint=data.fingerprint(),
        origin=start.origin if start else None,
        started_from=weights.digest(path),
        token_bytes_V=torch.from_numpy(data.token_bytes_V) if isinstance(data, TextData) else None,
        measures_accuracy=data.measures_accuracy,
        compile=config["compile"],
    )
    summary = Summary(Path(config["folder"]) / "summary.json", _facts(config, data, model))
    trainer = trainers.build(config, model, summary)
    trainers.refuse_divided(trainer, task)
    if start and start.checkpoint:
        refuse_other_state(start.checkpoint, task, trainer, config["trainer"].get("precision"))
        _refuse_other_steps(start, config, trainer.world_size)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | TensorBoard):
                logger.rewind(start.step)
    return Run(config, data, model, task, trainer, summary)


def _refuse_other_steps(start: Start, config: Mapping[str, Any], world: int) -> None:
    here = sequences_a_step(config, world)
    if start.sequences not in (None, here):
        raise CheckpointError(
            f"{start.checkpoint} was trained in steps of {start.sequences} sequences, but here they have {here}, "
            f"data.batch_size x trainer.accumulate_grad_batches on {world} ranks, and their place in the data would be "
            f"another: let them be {start.sequences} together, or resume=never"
        )


def _fit(run: Run, start: Start) -> None:
    """Trains and validates; the last step is validated and saved like any other that is."""
    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        with ranks.before_lightning_kills(lambda gone: say(_abandoned(run, gone))):
            run.trainer.fit(run.task, datamodule=run.data, ckpt_path=start.checkpoint, weights_only=True)
        if "val/loss" not in run.trainer.callback_metrics:  # went on from a checkpoint of the last step
            run.trainer.validate(run.task, datamodule=run.data, verbose=False)
    except SystemExit as stop:
        if run.trainer.is_global_zero:
            print(_farewell(run), flush=True)
        raise SystemExit(_code(stop)) from stop
    except shards.Broken as error:
        raise CheckpointError(
            f"{error}; resume=PATH goes on from another checkpoint, resume=never starts over"
        ) from error
    except RuntimeError as error:
        gone = ranks.gone(error)
        if not gone:
            raise
        first = min(set(range(run.trainer.world_size)) - set(gone))
        raise SystemExit(_abandoned(run, gone) if run.trainer.global_rank == first else 1) from error


def _code(stop: SystemExit) -> int:
    """What a shell shows for the signal; one that came before training began, Lightning has handled in its own way."""
    if isinstance(stop, Interrupted):
        return 128 + stop.signal
    return 128 + (signal.SIGTERM if isinstance(stop, SIGTERMException) else signal.SIGINT)


def _abandoned(run: Run, gone: list[int]) -> str:
    """What the others have to say when ranks have ended without a word: what is left, and what to type to go on."""
    who = f"rank {', '.join(map(str, gone))} of {run.trainer.world_size} has" if gone else "a rank has"
    last = next((c.path for c in callbacks(run.trainer) if isinstance(c, Latest)), None)
    left = "there is no checkpoint yet; to begin anew:"
    if last and last.is_file():
        step = ""
        with contextlib.suppress(CheckpointError):  # its parts may be on their way out; that a rank is lost comes first
            step = f", of step {read_checkpoint(last, mmap=True)['global_step']}"
        left = f"the last checkpoint is {report.shown(last)}{step}; to go on:"
    return (
        f"error: {who} ended (by a signal, for lack of memory, or with an error above); {left}\n  {again(saved=True)}"
    )


def _farewell(run: Run) -> str:
    """The last words of a run that was interrupted: what is left of it, and what to type to go on."""
    step = run.trainer.global_step
    steps = [c.saved for c in callbacks(run.trainer) if isinstance(c, Latest) and c.saved is not None]
    if not steps and step == 0:
        return "\ninterrupted before a step was done; nothing was saved"
    if not steps:
        return f"\ninterrupted at step {step} of {run.trainer.max_steps}; nothing was saved; once more:\n  {again()}"
    saved = "and saved" if max(steps) == step else f"saved at step {max(steps)}"
    return f"\ninterrupted at step {step} of {run.trainer.max_steps}, {saved}; to go on:\n  {again(saved=True)}"


def _conclude(run: Run) -> dict[str, Any]:
    """What is found out after training: sizes of the memory, n-gram models, a sample; printed, added to the summary."""
    status = "finished" if run.trainer.global_step >= run.trainer.max_steps else "stopped"
    if isinstance(run.trainer.strategy, Sharded):  # the other ranks have their shares of the model, and are leaving
        whole = instantiate_model(run.config)
        load_weights(whole, read_checkpoint(run.config["callbacks"]["latest"]["path"]))
        run = replace(run, model=whole)
    run.model.to(run.trainer.strategy.root_device).eval()
    with torch.no_grad():
        found = {"device": report.device(run), **_memory(run), **_ngrams(run), "overlap": _overlap(run)}
        found["by_length"] = _by_length(run)
        facts = run.summary.add(run.trainer, status=status, **found)
        _log_overlap(run, facts["overlap"])
        sample = report.sample(run.model, run.data) if run.config["sample"] and isinstance(run.data, TextData) else None
    print(report.conclusion(run, facts, sample), flush=True)
    return facts


def _facts(config: Mapping[str, Any], data: Data, model: LanguageModel) -> dict[str, Any]:
    """What a summary says before anything was measured."""
    return {
        "experiment": config["name"],
        "arm": str(config["arm"]),
        "seed": config["seed"],
        "start_from": config.get("start_from"),
        "model": config["choices"]["model"],
        "size": config["choices"]["size"],
        "choices": config["choices"],
        "parameters": model.parameter_report().total,
        "data": data.description(),
        "fingerprint": data.fingerprint(),
        "kernels": explain(),
    }


def _memory(run: Run) -> dict[str, Any]:
    """Bytes that the model keeps after reading one context: of its decoder's state, in all but bookkeeping, by kind."""
    tokens_BT = run.data.validation_set[0]["tokens"][None].to(run.trainer.strategy.root_device)
    memory = run.model.prefill(tokens_BT, run.model.start(1)).memory
    assert memory is not None  # one was given
    sizes = memory.breakdown()
    return {
        "state_bytes": run.model.state_bytes(memory),
        "cache_bytes": memory.cache_bytes(),
        "memory_bytes": sizes,
        "memory_after_tokens": tokens_BT.shape[1],
    }


def _overlap(run: Run) -> dict[str, Any] | None:
    """How much of what the stages select the encoder has selected too; None where they do not select."""
    if not overlap.selects_for_itself(run.model):
        return None
    sequences = functools.partial(run.data.of_length, most=OVERLAP_SEQUENCES)
    return overlap.by_length(run.model, sequences, run.data.context)


def _by_length(run: Run) -> dict[str, Any] | None:
    """How often a model that keeps track of states knows the last one, by group and length; None for other data."""
    data = run.data
    if not (isinstance(data, SyntheticData) and isinstance(data.task, StateTracking)):
        return None
    return tracking.by_length(run.model, data.task, data.context, data.validation_sequences)


def _log_overlap(run: Run, found: Mapping[str, Any] | None) -> None:
    """Gives the loggers, which training has closed, the number that the summary has under this name."""
    if run.trainer.is_global_zero and found and found["mean"] is not None:
        for logger in run.trainer.loggers:
            logger.log_metrics({"overlap/mean": found["mean"]}, run.trainer.global_step)
            logger.finalize("success")


def _ngrams(run: Run) -> dict[str, float | None]:
    """Bits per byte of n-gram models counted on exactly the tokens that this run has consumed."""
    sequences = run.trainer.global_step * sequences_a_step(run.config, run.trainer.world_size)
    data = run.data
    if not (run.config["ngrams"] and isinstance(data, TextData) and sequences * data.context <= MOST_COUNTED):
        return {f"{name}_bits_per_byte": None for name in NGRAMS}
    consumed, validation = list(data.consumed(sequences)), list(data.validation())
    size = {"vocabulary": data.tokenizer.vocabulary, "bytes_per_token": data.bytes_per_token}
    return {
        f"{name}_bits_per_byte": ngram_bits_per_byte(consumed, validation, order=order, **size)
        for name, order in NGRAMS.items()
    }


def _quiet() -> None:
    """Leaves out what Lightning tells everybody; its warnings about the run at hand stay."""
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
        "lightning.pytorch.accelerators.cuda",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).propagate = False  # it prints by itself; Hydra's logger would say it again
    for message in ("Checkpoint directory .* exists and is not empty", ".*LeafSpec.* is deprecated"):
        warnings.filterwarnings("ignore", message=message)
