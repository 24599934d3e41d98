"""A training run from its header to its summary."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gsm.config.command_line import again, shown
from gsm.config.load import (
    CheckpointError,
    instantiate,
    instantiate_data,
    instantiate_model,
    load_weights,
    read_checkpoint,
    refusals,
)
from gsm.data.base import DataModule, with_defaults
from gsm.data.capacity import Capacity
from gsm.data.recall import Paraphrase
from gsm.data.state_tracking import StateTracking
from gsm.data.synthetic import UNSEEN, SyntheticData
from gsm.errors import ConfigError
from gsm.evaluation import ngrams, overlap, questions, tracking
from gsm.experiments import pace, report, trainers, weights
from gsm.experiments.asked import differing
from gsm.experiments.estimate import refuse_endless
from gsm.experiments.folder import Start, locked, prepare, sequences_a_step
from gsm.experiments.jobs import leaving_with_this
from gsm.experiments.state import refuse_other_state
from gsm.files import read_json
from gsm.models.base import LanguageModel
from gsm.training.callbacks import find
from gsm.training.callbacks.checkpoints import Latest
from gsm.training.callbacks.interruption import Interrupted
from gsm.training.callbacks.summary import Summary
from gsm.training.distributed import ranks, shards
from gsm.training.distributed.sharded import Sharded
from gsm.training.heap import keep_freed
from gsm.training.module import LanguageModeling
from gsm_kernels import explain

NGRAMS = {"unigram": 1, "bigram": 2, "five_gram": 5}
MOST_COUNTED = 50_000_000  # tokens: beyond, counting 5-grams takes longer than one wants to wait at the end of a run


@dataclass(frozen=True)
class Run:
    """Everything a training run is made of."""

    config: Mapping[str, Any]
    data: DataModule
    model: LanguageModel
    task: LanguageModeling
    trainer: lightning.Trainer
    summary: Summary


def train(config: Mapping[str, Any]) -> dict[str, Any]:
    """Trains as a composed configuration says (``gsm.config.compose.compose``) and returns what ``summary.json`` holds.

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
    trainers.quiet()
    leads = ranks.rank() == 0
    data = functools.cache(functools.partial(open_data, config))
    with contextlib.ExitStack() as held:

        def decide() -> Start:
            if leads:
                held.enter_context(locked(Path(config["folder"])))
            return prepare(config, leads, lambda: data().fingerprint(), world)

        trainers.meet(config)
        world = trainers.world_size(config)
        long = refuse_endless(config, world)  # as is a step that cannot be divided: before anything is read or moved
        start = ranks.agreed(decide)  # one rank looks and moves: another would meet a folder that is half moved
        if start.finished:
            if leads:
                print(start.sentence, flush=True)
            return read_json(Path(config["folder"]) / "summary.json") or {}
        takes = pace.told(pace.seconds(config, start.step, world)) if leads else ""
        run = assemble(config, start, data())  # seeds anew: timing draws random numbers
        if leads:
            said = [start.sentence, long]
            if config.get("start_from") and not start.checkpoint:
                said.append(weights.told(config["start_from"]))
            if start.checkpoint and not run.data.resumes:
                said.append("Its data begin anew, since they do not say how to go on (see gsm.data.base).")
            note = " ".join(filter(None, said))
            print(report.header(config, run.summary.facts, run.trainer, run.data, takes, note), flush=True)
        _fit(run, start)
        return _conclude(run) if leads else dict(run.summary.facts)


def open_data(config: Mapping[str, Any]) -> DataModule:
    """The data of a run, ready to be read. Raises ConfigError where it is missing, damaged or too little."""
    path = config.get("start_from")
    data = instantiate_data(config["data"], weights.tokenizer(path) if path else None)
    with refusals("data"):
        data = with_defaults(data)
        data.prepare_data()
        data.setup("fit")
    return data


def assemble(config: Mapping[str, Any], start: Start | None = None, data: DataModule | None = None) -> Run:
    """Builds all parts, the loggers as of where the run starts.

    The weights follow from the seed alone, whatever else has drawn random numbers before.
    """
    trainers.quiet()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    data, start = data or open_data(config), start or Start()
    model, path = instantiate_model(config, config["seed"]), config.get("start_from")
    if path and not start.checkpoint:
        weights.take(model, path, config)
    task = LanguageModeling(
        model,
        instantiate(config["optimizer"], "optimizer"),
        config=config,
        notes={
            "tokenizer": data.tokenizer.to_state() if data.tokenizer else None,
            "fingerprint": dict(data.fingerprint()),
            "origin": start.origin,
            "started_from": weights.begins(config),
        },
        token_bytes_V=None if data.token_bytes_V is None else torch.from_numpy(data.token_bytes_V),
        measures_accuracy=data.measures_accuracy,
        compile=config["compile"],
    )
    facts = {
        "experiment": config["name"],
        "arm": str(config["arm"]),
        "seed": config["seed"],
        "start_from": path,
        "model": config["choices"]["model"],
        "size": config["choices"]["size"],
        "choices": config["choices"],
        "parameters": model.parameter_report().total,
        "data": data.description(),
        "fingerprint": task.notes["fingerprint"],
        "kernels": explain(),
    }
    summary = Summary(Path(config["folder"]) / "summary.json", facts)
    trainer = trainers.build(config, task, summary, differing(config))
    if trainer.strategy.root_device.type == "cpu":
        if config["compile"]:
            raise ConfigError(
                "compile is true, but on a CPU that takes minutes and a step is hardly faster for it: "
                "leave compile=false, and see `python -m gsm_kernels` for what makes it fast"
            )
        keep_freed()
    if start.checkpoint:
        refuse_other_state(start.checkpoint, task, trainer, config["trainer"].get("precision"))
        for logger in trainer.loggers:
            if callable(rewind := getattr(logger, "rewind", None)):
                rewind(start.step)
    return Run(config, data, model, task, trainer, summary)


def _fit(run: Run, start: Start) -> None:
    """Trains and validates; the last step is validated and saved like any other that is."""
    trainer, folder = run.trainer, Path(run.config["folder"]).resolve()
    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        with ranks.before_lightning_kills(lambda gone: say(_abandoned(run, gone))), leaving_with_this():
            trainer.fit(run.task, datamodule=run.data, ckpt_path=start.checkpoint, weights_only=True)
        moved = start.checkpoint and folder not in start.checkpoint.resolve().parents
        if moved and start.step >= trainer.max_steps:  # nothing was left to train, and this run has no curve yet
            trainer.validate(run.task, datamodule=run.data, verbose=False)
    except SystemExit as stop:

        def tell() -> None:
            if trainer.is_global_zero:
                print(_farewell(run), flush=True)

        if isinstance(
            stop, Interrupted
        ):  # all ranks are here; srun ends those that are left once one of them has ended
            with contextlib.suppress(RuntimeError):  # one that waits for the leading rank may find it gone
                ranks.agreed(tell, patience=ranks.ENDING)
        else:
            tell()
        raise SystemExit(_code(stop)) from stop
    except shards.Broken as error:
        raise CheckpointError(
            f"{error}; resume=PATH goes on from another checkpoint, resume=never starts over"
        ) from error
    except RuntimeError as error:
        gone = ranks.gone(error)
        if not gone:
            raise
        first = min(set(range(trainer.world_size)) - set(gone))
        raise SystemExit(_abandoned(run, gone) if trainer.global_rank == first else 1) from error


def _code(stop: SystemExit) -> int:
    """What a shell shows for the signal; one that came before training began, Lightning has handled in its own way."""
    if isinstance(stop, Interrupted):
        return 128 + stop.signal
    return 128 + (signal.SIGTERM if isinstance(stop, SIGTERMException) else signal.SIGINT)


def _abandoned(run: Run, gone: list[int]) -> str:
    """What the others have to say when ranks have ended without a word: what is left, and what to type to go on."""
    who = f"rank {gone[0]} of {run.trainer.world_size} has" if gone else "a rank has"
    if len(gone) > 1:  # the others may be waiting for it
        who = f"one of ranks {', '.join(map(str, gone))}, of {run.trainer.world_size} in all, has"
    last = next((one.path for one in find(run.trainer, Latest)), None)
    left = "there is no checkpoint yet; to begin anew:"
    if last and last.is_file():
        step = ""
        with contextlib.suppress(CheckpointError):  # its parts may be on their way out; that a rank is lost comes first
            step = f", of step {read_checkpoint(last, mmap=True)['global_step']}"
        left = f"the last checkpoint is {shown(last)}{step}; to go on:"
    return (
        f"error: {who} ended (by a signal, for lack of memory, or with an error above); {left}\n  {again(saved=True)}"
    )


def _farewell(run: Run) -> str:
    """The last words of a run that was interrupted: what is left of it, and what to type to go on."""
    step = run.trainer.global_step
    saved = max((one.saved for one in find(run.trainer, Latest) if one.saved is not None), default=None)
    if saved is None and step == 0:
        return "\ninterrupted before a step was done; nothing was saved"
    if saved is None:
        return f"\ninterrupted at step {step} of {run.trainer.max_steps}; nothing was saved; once more:\n  {again()}"
    where = "and saved" if saved == step else f"saved at step {saved}"
    return f"\ninterrupted at step {step} of {run.trainer.max_steps}, {where}; to go on:\n  {again(saved=True)}"


def _conclude(run: Run) -> dict[str, Any]:
    """Measures what is left after training: sizes of the memory, n-gram models, overlap, a sample; prints it and adds
    it to the summary."""
    trainer, data, config = run.trainer, run.data, run.config
    status = "finished" if trainer.global_step >= trainer.max_steps else "stopped"
    if isinstance(trainer.strategy, Sharded):  # the other ranks have their shares of the model, and are leaving
        whole = instantiate_model(config)
        load_weights(whole, read_checkpoint(config["callbacks"]["latest"]["path"]))
        run = replace(run, model=whole)
    model = run.model.to(trainer.strategy.root_device).eval()
    with torch.no_grad():
        found = {"device": report.device(trainer), **_memory(run), **_ngrams(run), "overlap": _overlap(run)}
        found |= _tested(model, data)
        if found["overlap"] and found["overlap"]["mean"] is not None:
            for logger in trainer.loggers:  # after the last step, so that a run that is cut off here measures it again
                logger.log_metrics({"val/overlap/mean": found["overlap"]["mean"]}, trainer.global_step + 1)
                logger.finalize("success")
        facts = run.summary.add(trainer, status=status, **found)  # the last that is written: what is cut off goes on
        is_text = data.tokenizer is not None and data.token_bytes_V is not None
        sample = report.sample(model, data) if config["sample"] and is_text else None
    print(report.conclusion(Path(config["folder"]), facts, sample, data.tokenizer is not None), flush=True)
    return facts


def _tested(model: LanguageModel, data: DataModule) -> dict[str, Any]:
    """What tasks are tested with besides: words by group and length, answers by kind of question, and by kind and load;
    None for others."""
    found: dict[str, Any] = {"by_length": None, "by_question": None, "by_load": None}
    if isinstance(data, SyntheticData):
        how = (data.context, data.validation_sequences, UNSEEN[data.held_out])
        if isinstance(data.task, StateTracking):
            found["by_length"] = tracking.measure(model, data.task, *how)
        elif isinstance(data.task, Paraphrase):
            found["by_question"] = questions.measure(model, data.task.apart(), *how)
        elif isinstance(data.task, Capacity):
            loads = data.task.apart()
            found["by_load"] = {kind: questions.measure(model, tasks, *how) for kind, tasks in loads.items()}
    return found


def _memory(run: Run) -> dict[str, Any]:
    """Bytes that the model keeps after reading one context: of its decoder's state, in all but bookkeeping, by kind."""
    tokens_BT = next(run.data.validation())["tokens"][None].to(run.trainer.strategy.root_device)
    memory = run.model.prefill(tokens_BT, run.model.start(1)).memory
    assert memory is not None  # one was given
    return {
        "state_bytes": run.model.state_bytes(memory),
        "cache_bytes": memory.cache_bytes(),
        "memory_bytes": memory.breakdown(),
        "memory_after_tokens": tokens_BT.shape[1],
    }


def _overlap(run: Run) -> dict[str, Any] | None:
    """How much of what the stages select the encoder has selected too; None where they do not select."""
    if not run.data.context or not overlap.selects_for_itself(run.model):
        return None
    sequences: Callable[[int], Any] = functools.partial(run.data.of_length, most=overlap.SEQUENCES)
    return overlap.measure(run.model, sequences, run.data.context)


def _ngrams(run: Run) -> dict[str, float | None]:
    """Bits per byte of n-gram models counted on exactly the tokens that this run has consumed."""
    data, steps = run.data, run.trainer.global_step
    sequences = steps * (sequences_a_step(run.config, ranks.sharing(run.trainer)[0]) or 0)
    few = run.config["ngrams"] and data.tokenizer and sequences * data.context <= MOST_COUNTED
    consumed = data.consumed(sequences) if few else None
    if consumed is None or data.tokenizer is None or data.bytes_per_token is None:
        return {f"{name}_bits_per_byte": None for name in NGRAMS}
    trained, validation = list(consumed), list(data.validation())
    size = {"vocabulary": data.tokenizer.vocabulary, "bytes_per_token": data.bytes_per_token}
    return {
        f"{name}_bits_per_byte": ngrams.measure(trained, validation, order=order, **size)
        for name, order in NGRAMS.items()
    }
