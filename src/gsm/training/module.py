"""Training of any of the models: loss, metrics, optimiser. Nothing here depends on the kind of model.

B sequences, T positions, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from gsm.data.base import next_tokens
from gsm.models.base import LanguageModel, Output
from gsm.models.checks import IGNORED
from gsm.training.distributed.sharded import Sharded, undivided
from gsm.training.means import Means, OverBatches
from gsm.training.optimizer import AdamW, check_groups, keep_names
from gsm.training.resume import ends_interval


class LanguageModeling(lightning.LightningModule):
    """Next-token training of one model.

    Logged every ``trainer.log_every_n_steps`` steps, as means over these steps: ``train/loss``, ``train/perplexity``,
    ``train/<name>`` for every auxiliary loss and metric of the model, ``train/gradient_norm`` and
    ``train/indexer_gradient_norm`` (before clipping), ``train/learning_rate``. Logged after each validation:
    ``val/loss``, ``val/perplexity``, ``val/bits_per_byte``, ``val/accuracy``. Losses are in nats per token; means are
    weighted by the number of targets, so a shorter last batch counts for less.

    A metric of one's own is one line: ``self.log("train/mine", value)`` in ``training_step``, or
    ``pl_module.log(...)`` in a callback.

    Args:
        model: the model to train.
        optimizer: settings of the optimiser.
        config: the composed configuration as plain containers; travels in the checkpoint's ``hyper_parameters``.
        notes: plain containers that are added to every checkpoint, such as the tokenizer's state.
        token_bytes_V: bytes that each token stands for; without it no bits per byte are logged.
        measures_accuracy: whether validation also counts how often the likeliest token is the target.
        compile: run the model's blocks through ``torch.compile`` (seconds to minutes for the first steps).
    """

    token_bytes_V: Tensor | None

    def __init__(
        self,
        model: LanguageModel,
        optimizer: AdamW,
        *,
        config: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        token_bytes_V: Tensor | None = None,
        measures_accuracy: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.optimizer, self.measures_accuracy = model, optimizer, measures_accuracy
        self.save_hyperparameters({"config": dict(config or {})}, logger=False)
        self.notes = dict(notes or {})
        self.register_buffer("token_bytes_V", token_bytes_V, persistent=False)
        self.train_means, self.val_means = Means(), Means()  # means over a logging interval, over a validation
        self._over_targets, self._over_rows = OverBatches(), OverBatches()
        # 0 x the sum of all losses, and of all gradient norms, since the last look: NaN where one was not finite.
        self._broken: dict[str, Tensor] = {}
        self._load_LE: Tensor | None = None  # loads of the experts in the step so far
        self.compiles = compile
        if compile:
            self.model.compile_blocks()

    def configure_model(self) -> None:
        """Divide the model among ranks where that is the strategy."""
        if isinstance(self.trainer.strategy, Sharded):
            self.trainer.strategy.shard(self.model)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimiser over the model's groups, its learning rate a function of the step."""
        steps = self.trainer.max_steps
        if steps < 1:
            raise ValueError(
                f"trainer.max_steps must be at least 1, as the learning rate needs the length of the run, got {steps}"
            )
        groups = self.model.parameter_groups()
        check_groups(self.model, groups)
        optimizer = self.optimizer.build(groups, half=self.trainer.precision == "bf16-mixed")
        keep_names(optimizer, self.named_parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.optimizer.factor(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the rate of the first step: a checkpoint has the rate of its own run, which may have another length."""
        for configured in self.trainer.lr_scheduler_configs:
            schedule = configured.scheduler
            if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
                groups = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
                for group, peak, factor in groups:
                    group["lr"] = peak * factor(schedule.last_epoch)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Output, Tensor]:
        """Return the model's output on a batch, and its targets int64 [B, T].

        Where ranks divide sequences, both are of the pieces of this rank.

        Args:
            batch: int64 [B, T] each: ``tokens``; optionally ``targets`` (-100 is ignored; default: the next token of
                the same document) and ``documents`` (default: a sequence is one document).
        """
        tokens_BT, document_BT, target_BT = batch["tokens"], batch.get("documents"), batch.get("targets")
        if target_BT is None:
            target_BT = next_tokens(tokens_BT, document_BT)
        arguments = {"tokens": tokens_BT, "documents": document_BT, "targets": target_BT}
        if self._context is not None:
            return self._context.call(self.model, **arguments)
        return self.model(**arguments), target_BT

    def training_step(self, batch: Mapping[str, Tensor], _: int) -> dict[str, Tensor]:
        """Return ``loss``, cross-entropy plus the losses of the model, and ``cross_entropy``: scalars, nats a token.

        Cross-entropy is weighted by the batch's share of the step's targets, the indexers' loss by its share of the
        rows that are no padding. So a step is the same however it is divided among batches and ranks.

        Raises FloatingPointError if the loss is not finite and a single CPU process trains.
        """
        out, target_BT = self(batch)
        count, rows = (target_BT != IGNORED).sum(), (batch.get("documents", batch["tokens"]) >= 0).sum()
        all_targets, all_rows = self._sum_over_ranks(torch.stack([count, rows]))
        losses, accumulates = dict(out.losses), self.trainer.accumulate_grad_batches > 1
        indexers = losses.pop("indexer_kl", None)
        loss = self._of_ranks(out.loss, count, all_targets) + sum(losses.values())
        if accumulates:
            loss = self._over_targets.weigh(loss, all_targets)
        if indexers is not None:
            indexers = self._of_ranks(indexers, rows, all_rows)
            loss = loss + (self._over_rows.weigh(indexers, all_rows) if accumulates else indexers)
        self._note("loss", loss)
        if self.trainer.world_size == 1 and loss.device.type == "cpu":  # several ranks have to stop at the same place
            self._refuse_broken(f"loss of step {self.global_step}", loss.detach())
        self.train_means.update("train/loss", out.loss, count)
        for name, value in {**out.losses, **out.metrics}.items():
            self.train_means.update(f"train/{name}", value, rows)
        if (load_LE := out.load_LE) is not None:
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE
        return {"loss": loss, "cross_entropy": out.loss.detach()}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by norm, those of indexers separately: their loss must not shrink the model's gradients."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # Lightning leaves it to a fused optimiser's step, which comes after clipping
        batches = self.trainer.accumulate_grad_batches
        by_targets, by_rows = (over.correction(batches) for over in (self._over_targets, self._over_rows))
        for group in optimizer.param_groups:  # an indexer without a loss of its own learns by the cross-entropy
            factor = by_rows if by_rows is not None and group["name"].startswith("indexer") else by_targets
            for parameter in group["params"] if factor is not None else ():
                if parameter.grad is not None:
                    parameter.grad *= factor
        norms = self.clip(optimizer, gradient_clip_val)
        for norm in norms if scaler is None else ():  # a scaler skips steps that are not finite
            self._note("gradient norm", norm)
            if self.device.type == "cpu":
                self._refuse_broken(f"gradient norm of step {self.global_step}", norm)

    def clip(self, optimizer: torch.optim.Optimizer, limit: float | None) -> list[Tensor]:
        """Scale the gradients of the model, and those of the indexers, down to a norm of ``limit`` each (None: keep
        them); return the norms before."""
        norms = []
        for name, is_indexer in (("gradient_norm", False), ("indexer_gradient_norm", True)):
            groups = [group for group in optimizer.param_groups if group["name"].startswith("indexer") == is_indexer]
            parameters = [p for group in groups for p in group["params"] if p.grad is not None]
            if parameters:
                norms.append(clip_norm(parameters, limit or math.inf))
                self.train_means.update(f"train/{name}", norms[-1])
        rate = torch.full((), optimizer.param_groups[0]["lr"], device=self.device)
        self.train_means.update("train/learning_rate", rate)
        return norms

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Do a step of the optimiser, then update the experts' biases by the loads of all its batches on all ranks."""
        super().optimizer_step(*args, **kwargs)
        if self._load_LE is not None:
            self.model.rebalance(self._sum_over_ranks(self._load_LE))
            self._load_LE = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Log the means at the end of a logging interval, and stop after the last step, so that it is validated too.

        Raises FloatingPointError, on all ranks, where a loss or a gradient of the interval was not finite.
        """
        if ends_interval(self.trainer):
            self._refuse_broken_since()
            means = self.train_means.compute()
            self._log_step({**means, "train/perplexity": means["train/loss"].exp()})
        if self.global_step >= self.trainer.max_steps > 0:
            self.trainer.should_stop = True

    def validation_step(self, batch: Mapping[str, Tensor], _: int) -> None:
        """Add a batch's loss, bytes and accuracy to the means of validation."""
        out, target_BT = self(batch)
        counted_BT = target_BT != IGNORED
        count = counted_BT.sum()
        self.val_means.update("val/loss", out.loss, count)
        if self.token_bytes_V is not None:
            bytes_BT = torch.where(counted_BT, self.token_bytes_V[target_BT.clamp(min=0)], 0)
            self.val_means.update("val/bytes_per_token", bytes_BT.sum() / count.clamp(min=1), count)
        if self.measures_accuracy:
            predicted_N = out.head(out.hidden_BRD[counted_BT]).argmax(dim=-1)
            right = (predicted_N == target_BT[counted_BT]).sum()
            self.val_means.update("val/accuracy", right / count.clamp(min=1), count)

    def on_validation_epoch_end(self) -> None:
        """Log the validation set as a whole."""
        means = self.val_means.compute()
        bytes_per_token, loss = means.pop("val/bytes_per_token", None), means["val/loss"]
        if bytes_per_token is not None:
            means["val/bits_per_byte"] = loss / math.log(2) / bytes_per_token
        self._log_step({**means, "val/perplexity": loss.exp()})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the notes. Raises FloatingPointError as `on_train_batch_end` does: a model that broke is not saved."""
        self._refuse_broken_since()
        checkpoint |= self.notes

    def _note(self, name: str, value: Tensor) -> None:
        """Note whether a number is finite, without a look at it: a GPU would have to be waited for."""
        self._broken[name] = 0 * value.detach() + self._broken.get(name, 0)

    def _refuse_broken_since(self) -> None:
        """Raise FloatingPointError, on all ranks, unless all numbers since the last look were finite."""
        for name, value in self._broken.items():
            self._refuse_broken(f"{name} of a step up to {self.global_step}", self._sum_over_ranks(value))
        self._broken.clear()

    def _refuse_broken(self, name: str, value: Tensor) -> None:
        """Raise FloatingPointError unless the number is finite."""
        if not bool(value.isfinite()):
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            raise FloatingPointError(
                f"training cannot go on because the {name} is not finite. Use a lower optimizer.learning_rate (it was "
                f"at {rate:g}), more optimizer.warmup_steps or trainer.precision=32-true; no checkpoint has this step"
            )

    def _log_step(self, metrics: Mapping[str, Tensor]) -> None:
        """Log metrics of the step that has just ended, at its number; by default Lightning counts steps from 0."""
        self.log_dict({**metrics, "step": torch.tensor(float(self.global_step), dtype=torch.float64)})

    @property
    def _context(self) -> Any:
        """The ranks that divide the sequences of this rank (None: it has whole ones)."""
        strategy = self.trainer.strategy if self._trainer is not None else None
        return strategy.sequences if isinstance(strategy, Sharded) else None

    def _of_ranks(self, mean: Tensor, count: Tensor, total: Tensor) -> Tensor:
        """Scale this rank's mean by its share of ``total``, so that averaging over the ranks gives the mean of all."""
        world = self.trainer.world_size
        return mean if world == 1 else mean * (world * count) / total.clamp(min=1)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks; unlike Lightning's ``reduce``, this makes no host wait for its GPU."""
        if self.trainer.world_size > 1:
            value = value.clone()
            torch.distributed.all_reduce(value)
        return value


def clip_norm(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to a norm of ``limit`` in all; return the norm they had. Ranks may divide them in several
    ways."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    parts = [
        undivided(nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])).detach()
        for some in by_mesh.values()
    ]
    norm = torch.stack(parts).norm() if len(parts) > 1 else parts[0]
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, limit, norm)
    return norm
