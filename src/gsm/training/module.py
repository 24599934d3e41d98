"""Training of any of the models: loss, metrics, optimiser. Nothing here knows what model it trains.

B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import lightning
import torch
from torch import Tensor, nn

from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.training.distributed.sharded import Sharded, undivided
from gsm.training.means import OverTargets, WeightedMean
from gsm.training.optimizer import AdamW, check_groups
from gsm.training.standing import Standing, random_states, restore_random_states
from gsm.training.watch import Broken, Watch, refuse

ENTRIES = "optimizer_entries"  # of a checkpoint: for each optimiser, by parameter, the names of what is kept for it


class LanguageModeling(lightning.LightningModule):
    """Next-token training of one model.

    Logged every ``trainer.log_every_n_steps`` steps, as means over these steps: ``train/loss``, ``train/perplexity``,
    ``train/<name>`` for every auxiliary loss and metric of the model, ``train/gradient_norm`` and
    ``train/indexer_gradient_norm`` (before clipping), ``train/learning_rate``. Logged after each validation:
    ``val/loss``, ``val/perplexity``, ``val/bits_per_byte``. Losses are in nats per token; means are weighted by the
    number of targets, so a ragged last batch counts for what it holds.
    """

    token_bytes_V: Tensor | None

    def __init__(
        self,
        model: LanguageModel,
        optimizer: AdamW,
        *,
        config: Mapping[str, Any] | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        fingerprint: Mapping[str, str | int] | None = None,
        origin: str | None = None,
        started_from: str | None = None,
        token_bytes_V: Tensor | None = None,
        measures_accuracy: bool = False,
        compile: bool = False,
    ) -> None:
        """
        Args:
            model: what is trained.
            optimizer: settings of the optimiser.
            config: the composed configuration as plain containers; travels in the checkpoint's ``hyper_parameters``.
            tokenizer: the tokenizer's state as plain containers; travels in the checkpoint under ``tokenizer``.
            fingerprint: what the data is known by; travels in the checkpoint under ``fingerprint``.
            origin: the checkpoint of another run that this one began with; travels in the checkpoint under ``origin``.
            started_from: the digest of the checkpoint whose weights this run began with; travels in the checkpoint.
            token_bytes_V: bytes that each token stands for; without it no bits per byte are logged.
            measures_accuracy: whether validation also counts how often the likeliest token is the target.
            compile: run the model through ``torch.compile`` (seconds to minutes for the first steps).
        """
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.tokenizer = dict(tokenizer) if tokenizer else None
        self.fingerprint, self.origin = dict(fingerprint) if fingerprint else None, origin
        self.started_from = started_from
        self.save_hyperparameters({"config": dict(config or {})}, logger=False)
        self.register_buffer("token_bytes_V", token_bytes_V, persistent=False)
        self.val_loss = WeightedMean()
        self.val_bytes = WeightedMean()  # bytes per target
        self.val_accuracy = WeightedMean()
        self.measures_accuracy = measures_accuracy
        self._train: dict[str, WeightedMean] = {}
        self._load_LE: Tensor | None = None  # of the step so far
        self._over_targets = OverTargets()
        self._watch = Watch()
        self._standing: Standing | None = None
        self._resumed: Standing | None = None
        self._logged: dict[str, float] = {}
        self._logged_step = -1
        self._is_validated = False
        if compile:
            self.model.compile()

    def configure_model(self) -> None:
        """Divides the model among ranks where that is the strategy."""
        if isinstance(self.trainer.strategy, Sharded):
            self.trainer.strategy.shard(self.model)

    def training_step(self, batch: Any, _: int) -> dict[str, Tensor]:
        """Cross-entropy plus whatever the model adds to it, both by the batch's share of the step's targets.

        Raises FloatingPointError when that is not finite.
        """
        out, targets_BT = self._run(batch)
        count = (targets_BT != IGNORED).sum()
        total = self._over_ranks(count)
        loss = self._weighted(out.loss, count, total) + sum(out.losses.values())
        if self.trainer.accumulate_grad_batches > 1:
            loss = self._over_targets.weigh(loss, total)
        broken = self._watch.loss(loss, batch, self._batch_number, self.global_step)
        if broken and self.trainer.world_size == 1:  # several ranks have to stop at the same place: at their gradients
            self._refuse(broken)
        for name, value in {"loss": out.loss, **out.losses, **out.metrics}.items():
            self._note(name, value.detach(), count)
        if out.load_LE is not None:
            self._load_LE = out.load_LE if self._load_LE is None else self._load_LE + out.load_LE
        return {"loss": loss, "cross_entropy": out.loss.detach()}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the optimiser, then one of the experts' biases, by the loads of all its batches on all ranks.

        Here, since checkpoints may be written in any later hook. Loads are no buffers: a checkpoint between the batches
        of a step must not hold them (the step is begun again), nor a rank's be overwritten by another's.
        """
        super().optimizer_step(*args, **kwargs)
        if self._load_LE is not None:
            self.model.rebalance(self._over_ranks(self._load_LE))
            self._load_LE = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Logs the means of the interval that ends here, and lets the last step be validated too."""
        if self.interval_ends():
            self.stop_if_broken()
            means = {f"train/{name}": mean.compute() for name, mean in self._train.items() if mean.update_called}
            means["train/perplexity"] = means["train/loss"].exp()
            self.report(means)
            for mean in self._train.values():
                mean.reset()
        if self.step_ends():
            self._stand()
        if self.global_step >= self.trainer.max_steps > 0:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """A model that broke is not worth measuring (nor keeping: checkpoints are written after validation)."""
        self.stop_if_broken()

    def validation_step(self, batch: Any, _: int) -> None:
        """Adds one batch to the means."""
        out, targets_BT = self._run(batch)
        counted_BT = targets_BT != IGNORED
        count = counted_BT.sum()
        self.val_loss.update(out.loss, count)
        if self.token_bytes_V is not None:
            bytes_BT = torch.where(counted_BT, self.token_bytes_V[targets_BT.clamp(min=0)], 0)
            self.val_bytes.update(bytes_BT.sum() / count.clamp(min=1), count)
        if self.measures_accuracy:
            predicted_N = out.head(out.hidden_BRD[counted_BT]).argmax(dim=-1)
            right = (predicted_N == targets_BT[counted_BT]).sum()
            self.val_accuracy.update(right / count.clamp(min=1), count)

    def on_validation_epoch_end(self) -> None:
        """Logs the validation set as a whole."""
        loss = self.val_loss.compute()
        values = {"val/loss": loss, "val/perplexity": loss.exp()}
        if self.token_bytes_V is not None:
            values["val/bits_per_byte"] = loss / math.log(2) / self.val_bytes.compute()
        if self.measures_accuracy:
            values["val/accuracy"] = self.val_accuracy.compute()
        self.report(values)
        self.val_loss.reset()
        self.val_bytes.reset()
        self.val_accuracy.reset()
        self._is_validated = True
        if self._standing and self.is_between_steps():  # a validation that drew random numbers is not repeated
            self._standing = replace(self._standing, random=random_states(self.device))

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimiser over the model's groups, its learning rate a function of the step."""
        steps = self.trainer.max_steps
        if steps < 1:
            raise ValueError(
                f"trainer.max_steps is {steps}, but the learning rate needs the length of the run: say 1 or more"
            )
        groups = self.model.parameter_groups()
        check_groups(self.model, groups)
        optimizer = self.optimizer.build(groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.optimizer.factor(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by norm, the indexer on its own: its loss is another one, and must not shrink the model's gradients."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # Lightning leaves it to a fused optimiser's step, which comes after clipping
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._over_targets.correct(parameters, self.trainer.accumulate_grad_batches)
        norms = self.clip(optimizer, gradient_clip_val)
        self._watch.gradients(
            norms if scaler is None else [], self._batch_number, self.global_step
        )  # it skips such steps
        if self.device.type == "cpu":
            self.stop_if_broken()

    def clip(self, optimizer: torch.optim.Optimizer, limit: float | None) -> list[Tensor]:
        """Scales the gradients of each of the two down to a norm of ``limit``; returns the norms they had."""
        norms = []
        for name, is_indexer in (("gradient_norm", False), ("indexer_gradient_norm", True)):
            groups = [group for group in optimizer.param_groups if group["name"].startswith("indexer") == is_indexer]
            parameters = [p for group in groups for p in group["params"] if p.grad is not None]
            if parameters:
                norms.append(undivided(nn.utils.clip_grad_norm_(parameters, limit or math.inf).detach()))
                self._note(name, norms[-1])
        self._note("learning_rate", torch.tensor(optimizer.param_groups[0]["lr"]))
        return norms

    def on_train_start(self) -> None:
        """Goes on where the checkpoint stands: with the same random numbers, and with a validation that is due. The
        loggers, which were rewound, are told what its last step has logged; not earlier, since what is divided among
        ranks is loaded late.

        Of several ranks, all get the random numbers of the one that leads, since it alone writes the checkpoint.
        """
        standing, self._resumed = self._resumed, None
        if standing is None:
            return self._stand()
        self.trainer.fit_loop.restarting = False  # the counters were made straight; nothing is left to be guessed
        restore_random_states(standing.random, self.device)
        for name, pair in standing.means.items():
            self._note(name, torch.zeros((), device=self.device), 0.0)
            if self.trainer.is_global_zero:  # they are sums over all ranks
                self._train[name].total, self._train[name].weight = pair.to(self.device).unbind()
        self._standing = replace(standing, means=self._means())
        if standing.logged:
            self._write(dict(standing.logged), standing.step)
        if standing.validation_due:
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the tokenizer, so that a checkpoint is all that it takes to generate text, and where training stands."""
        checkpoint |= {"tokenizer": self.tokenizer, "fingerprint": self.fingerprint, "origin": self.origin}
        checkpoint |= {"started_from": self.started_from, ENTRIES: _entries(checkpoint)}
        if self._standing is None:
            return
        standing, loops = self._standing, checkpoint["loops"]
        due = bool(self.trainer.validating) and self.is_between_steps() and not self._is_validated
        logged = self._logged if self._logged_step == standing.step else {}
        means = {name: self._over_ranks(pair) for name, pair in standing.means.items()}
        standing = replace(standing, means=means, validation_due=due, logged=logged)
        standing.straighten(loops["fit_loop"])
        checkpoint["standing"] = standing.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes up where training stands, with as many batches to a step as now; an older checkpoint without such an
        entry leaves it to Lightning."""
        if "standing" in checkpoint:
            standing = Standing(**checkpoint["standing"]).divided(self.trainer.accumulate_grad_batches)
            standing.straighten(checkpoint["loops"]["fit_loop"])
            self._standing = self._resumed = standing
            self._is_validated = not standing.validation_due

    def report(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Logs metrics of the step that has just ended, each name once a step.

        Not left to Lightning, which writes them only after the hooks in which checkpoints are: a run that is killed in
        between and resumed would never log them.
        """
        self.log_dict(dict(metrics), logger=False)
        if not self.trainer.sanity_checking:
            self._write({name: float(value) for name, value in metrics.items()}, self.global_step)

    def is_between_steps(self) -> bool:
        """Whether the last batch that was done finished a step."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return self._standing is not None and self._standing.batches == progress.processed  # pyright: ignore[reportAttributeAccessIssue]

    def stop_if_broken(self) -> None:
        """Raises FloatingPointError if the loss or the gradient of a step so far was not finite; a GPU has to wait."""
        broken = self._watch.found()
        if broken:
            self._refuse(broken)

    def step_ends(self) -> bool:
        """Whether the batch that was just done finished a step, rather than being accumulated into a later one."""
        return not self.trainer.fit_loop._should_accumulate()

    def interval_ends(self) -> bool:
        """Whether it finished a step that is logged."""
        step, every = self.global_step, self.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        return self.step_ends() and (step % every == 0 or step == self.trainer.max_steps)

    def _run(self, batch: Any) -> tuple[Any, Tensor]:
        """The model's output on a batch of ``tokens``, ``documents`` and ``targets``, and the targets."""
        return self.model(batch["tokens"], documents=batch["documents"], targets=batch["targets"]), batch["targets"]

    def _weighted(self, loss: Tensor, count: Tensor, total: Tensor) -> Tensor:
        """A rank's mean over ``count`` targets, such that the mean over ranks is that over the ``total`` of all."""
        world = self.trainer.world_size
        return loss if world == 1 else loss * (world * count) / total.clamp(min=1)

    def _over_ranks(self, value: Tensor) -> Tensor:
        """The sum over all ranks. Lightning's own reduction would make the host wait."""
        if self.trainer.world_size > 1:
            value = value.clone()
            torch.distributed.all_reduce(value)
        return value

    def _note(self, name: str, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Adds a value to the interval's mean of that name."""
        if name not in self._train:
            self._train[name] = WeightedMean().to(self.device)
        self._train[name].update(value, weight)

    def _write(self, metrics: dict[str, float], step: int) -> None:
        """Gives loggers what they were not given at this step already."""
        if step != self._logged_step:
            self._logged, self._logged_step = {}, step
        new = {name: value for name, value in metrics.items() if name not in self._logged}
        self._logged |= new
        for logger in self.trainer.loggers if new else []:
            logger.log_metrics(new, step)

    def _stand(self) -> None:
        """Notes where training stands now, at the end of a step."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.total
        done = progress.processed  # pyright: ignore[reportAttributeAccessIssue]
        world = self.trainer.world_size
        self._standing = Standing(self.global_step, done, random_states(self.device), self._means(), world=world)
        self._is_validated = False

    def _means(self) -> dict[str, Tensor]:
        """What this rank's means have added up so far: [2] each, the sum and its weight."""
        return {name: torch.stack([m.total, m.weight]) for name, m in self._train.items() if m.update_called}

    @property
    def _batch_number(self) -> int:
        """The batch at work, counted from 0 over the whole run."""
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    def _refuse(self, broken: Broken) -> NoReturn:
        """Raises FloatingPointError with what was found and what may help."""
        refuse(
            broken,
            self.trainer,
            f"lower optimizer.learning_rate, which is {self.optimizer.learning_rate:g}, lengthen "
            "optimizer.warmup_steps, or use trainer.precision=32-true",
        )


def _entries(checkpoint: Mapping[str, Any]) -> list[dict[int, list[str]]]:
    """What a checkpoint holds of the optimisers, so that what is missing later can be named."""
    states = (state["state"] for state in checkpoint.get("optimizer_states", ()))
    return [{number: sorted(entry) for number, entry in state.items()} for state in states]
