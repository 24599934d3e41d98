"""Training of any of the models: loss, metrics, optimiser. Nothing here knows what model it trains.

B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from gsm.models.base import LanguageModel
from gsm.optimizer import AdamW

IGNORED = -100  # a target that does not count, as in torch.nn.functional.cross_entropy


class LanguageModeling(lightning.LightningModule):
    """Next-token training of one model.

    Logged every ``trainer.log_every_n_steps`` steps, as means over these steps: ``train/loss``, ``train/perplexity``,
    ``train/<name>`` for every auxiliary loss and metric of the model, ``train/gradient_norm`` and
    ``train/indexer_gradient_norm`` (before clipping), ``train/learning_rate``. Logged after each validation:
    ``val/loss``, ``val/perplexity``, ``val/bits_per_byte``. Losses are in nats per token; means are weighted by the
    number of targets, so a ragged last batch counts for what it holds.
    """

    token_bytes_V: Tensor | None
    broken_step: Tensor

    def __init__(
        self,
        model: LanguageModel,
        optimizer: AdamW,
        *,
        config: Mapping[str, Any] | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        token_bytes_V: Tensor | None = None,
        compile: bool = False,
    ) -> None:
        """
        Args:
            model: what is trained.
            optimizer: settings of the optimiser.
            config: the composed configuration as plain containers; travels in the checkpoint's ``hyper_parameters``.
            tokenizer: the tokenizer's state as plain containers; travels in the checkpoint under ``tokenizer``.
            token_bytes_V: int, bytes that each token stands for; without it no bits per byte are logged.
            compile: run the model through ``torch.compile`` (seconds to minutes for the first steps).
        """
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.tokenizer = dict(tokenizer) if tokenizer else None
        self.save_hyperparameters({"config": dict(config or {})}, logger=False)
        self.register_buffer("token_bytes_V", token_bytes_V, persistent=False)
        self.register_buffer("broken_step", torch.tensor(-1), persistent=False)
        self.val_loss = WeightedMean()
        self.val_bytes = WeightedMean()  # bytes per target
        self._train: dict[str, WeightedMean] = {}
        if compile:
            self.model.compile()

    def training_step(self, batch: Any, _: int) -> dict[str, Tensor]:
        """Cross-entropy plus whatever the model adds to it. Raises FloatingPointError when that is not finite."""
        out, targets_BT = self._run(batch)
        loss = out.loss + sum(out.losses.values())
        self._watch(loss)
        count = (targets_BT != IGNORED).sum()
        for name, value in {"loss": out.loss, **out.losses, **out.metrics}.items():
            self._note(name, value.detach(), count)
        return {"loss": loss, "cross_entropy": out.loss.detach()}

    def on_train_batch_end(self, *_: Any) -> None:
        """Logs the means of the interval that ends here, and lets the last step be validated too."""
        if self.interval_ends():
            self._stop_if_broken()
            means = {f"train/{name}": mean.compute() for name, mean in self._train.items() if mean.update_called}
            means["train/perplexity"] = means["train/loss"].exp()
            self.log_dict({**means, "step": float(self.global_step)})
            for mean in self._train.values():
                mean.reset()
        if self.global_step >= self.trainer.max_steps > 0:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """A model that broke is not worth measuring (nor keeping: checkpoints are written after validation)."""
        self._stop_if_broken()

    def validation_step(self, batch: Any, _: int) -> None:
        """Adds one batch to the means."""
        out, targets_BT = self._run(batch)
        counted_BT = targets_BT != IGNORED
        count = counted_BT.sum()
        self.val_loss.update(out.loss, count)
        if self.token_bytes_V is not None:
            bytes_BT = torch.where(counted_BT, self.token_bytes_V[targets_BT.clamp(min=0)], 0)
            self.val_bytes.update(bytes_BT.sum() / count.clamp(min=1), count)

    def on_validation_epoch_end(self) -> None:
        """Logs the validation set as a whole."""
        loss = self.val_loss.compute()
        values = {"val/loss": loss, "val/perplexity": loss.exp()}
        if self.token_bytes_V is not None:
            values["val/bits_per_byte"] = loss / math.log(2) / self.val_bytes.compute()
        self.log_dict({**values, "step": float(self.global_step)})
        self.val_loss.reset()
        self.val_bytes.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimiser over the model's groups, its learning rate a function of the step."""
        steps = self.trainer.max_steps
        if steps < 1:
            raise ValueError(
                f"trainer.max_steps is {steps}, but the learning rate needs the length of the run: say 1 or more"
            )
        groups = self.model.parameter_groups()
        self._check_groups(groups)
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
        for name, is_indexer in (("gradient_norm", False), ("indexer_gradient_norm", True)):
            groups = [group for group in optimizer.param_groups if group["name"].startswith("indexer") == is_indexer]
            parameters = [p for group in groups for p in group["params"] if p.grad is not None]
            if parameters:
                self._note(name, nn.utils.clip_grad_norm_(parameters, gradient_clip_val or math.inf).detach())
        self._note("learning_rate", torch.tensor(optimizer.param_groups[0]["lr"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts the tokenizer beside the weights: a checkpoint is all that it takes to generate text."""
        checkpoint["tokenizer"] = self.tokenizer

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

    def _note(self, name: str, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Adds a value to the interval's mean of that name."""
        if name not in self._train:
            self._train[name] = WeightedMean().to(self.device)
        self._train[name].update(value, weight)

    def _watch(self, loss: Tensor) -> None:
        """Remembers, on the device, the first step whose loss is not finite; reads it at once where that is free."""
        fine = loss.detach().isfinite() | (self.broken_step >= 0)
        self.broken_step = torch.where(fine, self.broken_step, self.global_step)
        if loss.device.type == "cpu":
            self._stop_if_broken()

    def _stop_if_broken(self) -> None:
        step = int(self.broken_step)
        if step >= 0:
            raise FloatingPointError(
                f"the loss of step {step} is not finite: lower optimizer.learning_rate, which is "
                f"{self.optimizer.learning_rate:g}, lengthen optimizer.warmup_steps, or use trainer.precision=32-true"
            )

    def _check_groups(self, groups: Mapping[str, list[nn.Parameter]]) -> None:
        """Every parameter that is trained stands in exactly one group."""
        grouped = [id(p) for parameters in groups.values() for p in parameters]
        trained = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        missing = sorted(name for key, name in trained.items() if key not in grouped)
        if missing or len(grouped) != len(set(grouped)):
            raise ValueError(
                f"parameter_groups() of {type(self.model).__name__} leaves out {missing} or names a parameter twice"
            )


class WeightedMean(Metric):
    """sum(weight x value) / sum(weight), over updates and over ranks.

    ``torchmetrics.MeanMetric`` either looks for NaN, which makes a GPU wait at every update, or, told not to
    (``nan_strategy="disable"``, version 1.9), forgets the weights.
    """

    full_state_update = False
    is_differentiable = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Adds a scalar that counts ``weight`` times; weight 0 adds nothing."""
        self.total += torch.where(torch.as_tensor(weight, device=value.device) > 0, value * weight, 0)
        self.weight += weight

    def compute(self) -> Tensor:
        """The mean so far; NaN if nothing has counted."""
        return self.total / self.weight
