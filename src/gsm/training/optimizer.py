"""The optimiser: AdamW in groups, or Muon for matrices and AdamW for the rest; and a learning rate that is a function
of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gsm.errors import ConfigError, within
from gsm.provenance import multiplies_bfloat16
from gsm.shapes import promoted


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), linear warm-up, then one of `SCHEDULES`.

    Attributes:
        learning_rate: peak learning rate.
        warmup_steps: steps of linear warm-up; never more than a quarter of the run, so that very short runs learn too.
        final_fraction: learning rate of the last step, as a fraction of the peak.
        weight_decay: decay of all groups except groups with a name that ends in ``no_decay``.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        schedule: course of the rate after the warm-up: ``cosine``, ``linear`` or ``wsd``.
        decay_fraction: fraction of all steps, at the end, in which ``wsd`` falls; 0: never. The others ignore it.
    """

    learning_rate: float
    warmup_steps: int
    final_fraction: float
    weight_decay: float
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    schedule: str = "cosine"
    decay_fraction: float = 0.2

    shardable: ClassVar[bool] = True  # whether a rank that has its share of every parameter can take a step

    def __post_init__(self) -> None:
        within(0, 1000, learning_rate=self.learning_rate)
        within(0, 1, final_fraction=self.final_fraction, decay_fraction=self.decay_fraction)
        within(0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        if self.schedule not in SCHEDULES:
            names = ", ".join(SCHEDULES)
            raise ConfigError(f"schedule must be {names}, got {self.schedule}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be two numbers in [0, 1), such as [0.9, 0.95], got {list(self.betas)}")

    def build(self, groups: Mapping[str, Sequence[nn.Parameter]], half: bool = False) -> torch.optim.Optimizer:
        """Build an optimiser with one named parameter group for each entry of ``groups``, without frozen parameters.

        Args:
            groups: parameters by the name of their group.
            half: whether the model computes in bfloat16; then the optimiser may, too.
        """
        return self._adamw(groups, self.learning_rate)

    def _adamw(self, groups: Mapping[str, Sequence[nn.Parameter]], rate: float) -> torch.optim.Optimizer:
        described = self._described(groups)
        fused = all(p.device.type in ("cpu", "cuda") for group in described for p in group["params"])
        betas = (float(self.betas[0]), float(self.betas[1]))
        return torch.optim.AdamW(described, lr=rate, betas=betas, eps=self.eps, fused=fused)

    def _described(self, groups: Mapping[str, Sequence[nn.Parameter]]) -> list[dict[str, Any]]:
        return [
            {"params": trained, "name": name, "weight_decay": 0.0 if name.endswith("no_decay") else self.weight_decay}
            for name, parameters in groups.items()
            if (trained := [p for p in parameters if p.requires_grad])
        ]

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the peak learning rate at ``step`` (counted from 0) of ``steps``."""
        warmup = min(self.warmup_steps, steps // 4)
        if step < warmup:
            return (step + 1) / warmup
        decaying = min(self.decay_fraction * steps, steps - warmup)
        height = SCHEDULES[self.schedule](step - warmup, max(1, steps - 1 - warmup), decaying)
        return self.final_fraction + (1 - self.final_fraction) * height


def cosine(step: int, last: int, decaying: float) -> float:
    """Return half a wave from 1 to 0, at ``step`` after the warm-up; ``last`` is the last step."""
    return (1 + math.cos(math.pi * min(1.0, step / last))) / 2


def linear(step: int, last: int, decaying: float) -> float:
    """Return a straight line from 1 to 0."""
    return 1 - min(1.0, step / last)


def wsd(step: int, last: int, decaying: float) -> float:
    """Return 1 (stable), and in the last ``decaying`` steps a straight line to 0 (decay)."""
    return min(1.0, max(0, last - step) / decaying) if decaying else 1.0


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {"cosine": cosine, "linear": linear, "wsd": wsd}


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon (Jordan et al., 2024) for the matrices of the layers, AdamW for everything else, in one schedule.

    A step of Muon has singular values near 1, unless the gradient's are tiny. Scaled by 0.2 sqrt(max(rows, columns))
    it is about as long as AdamW's step (Liu et al., 2025): learning rate and weight decay mean the same for both.

    Left to AdamW: the embedding, which is the head too; norms, sinks, scales and biases; the filters of convolutions;
    indexers, which have a loss of their own; and weights of three dimensions, experts and grouped projections:
    ``torch.optim.Muon`` takes matrices only, and one by one, thousands of small experts would be thousands of chains
    of small products.

    It needs whole matrices, so it does not work with ``trainer=fsdp``, which divides them among ranks.

    Attributes:
        momentum: decay rate of Muon's moment.
        iterations: iterations of Newton and Schulz, towards singular values of 1.
        adamw_factor: learning rate of AdamW's share over that of Muon. The logs show Muon's.
    """

    momentum: float = 0.95
    iterations: int = 5
    adamw_factor: float = 1.0

    shardable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum}")
        within(1, 99, iterations=self.iterations)
        within(0, 1000, adamw_factor=self.adamw_factor)

    def build(self, groups: Mapping[str, Sequence[nn.Parameter]], half: bool = False) -> torch.optim.Optimizer:
        """Give the matrices of the group ``decay`` to Muon, and all else to AdamW."""
        matrices = [p for p in groups["decay"] if p.ndim == 2]
        taken = {id(p) for p in matrices}
        rest = {name: [p for p in parameters if id(p) not in taken] for name, parameters in groups.items()}
        muon = MatrixOptimizer(
            self._described({"matrices": matrices}),
            lr=self.learning_rate,
            momentum=self.momentum,
            ns_steps=self.iterations,
            adjust_lr_fn="match_rms_adamw",
            half=half and multiplies_bfloat16(),
        )
        return Together(muon, self._adamw(rest, self.adamw_factor * self.learning_rate))


class MatrixOptimizer(torch.optim.Muon):
    """``torch.optim.Muon`` with float32 products on a CPU.

    PyTorch's iterations multiply in bfloat16, for which most laptops have no instructions: they need ten times as long
    as for float32. On a CPU a step has Nesterov's momentum and the length of ``match_rms_adamw``; on other devices it
    is PyTorch's.

    Args:
        args, options: those of ``torch.optim.Muon``.
        half: bfloat16 on a CPU, too, in stacks of matrices of one shape: one by one, small matrices take longer in
            bfloat16 than in float32.
    """

    def __init__(self, *args: Any, half: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.half = half

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step."""
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = evaluated(closure)
        for group in self.param_groups:
            how = group["ns_coefficients"], group["ns_steps"], group["eps"]
            for weights in self._stacks([p for p in group["params"] if p.grad is not None]):
                updates = [self._moved(weight, group["momentum"]) for weight in weights]
                if self.half:
                    updates = orthogonal(torch.stack(updates), *how, torch.bfloat16)
                else:
                    updates = [orthogonal(update, *how) for update in updates]
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))
        return loss

    def _stacks(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the weights that are updated together."""
        if not self.half:
            return [[weight] for weight in weights]
        stacks: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            stacks.setdefault(weight.shape, []).append(weight)
        return list(stacks.values())

    def _moved(self, weight: Tensor, momentum: float) -> Tensor:
        """Update the moment of a weight, and return the gradient with Nesterov's momentum."""
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        moment = state["momentum_buffer"]
        moment.lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(moment, momentum)


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of an optimiser's closure, computed with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def orthogonal(
    matrix: Tensor, coefficients: Sequence[float], iterations: int, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1 (Newton and Schulz), or a
    stack of them for a stack.

    ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``, from ``X = matrix / max(|matrix|, eps)``; products in ``dtype``
    (None: in at least float32).
    """
    a, b, c = coefficients
    x, tall = promoted(matrix), matrix.shape[-2] > matrix.shape[-1]
    x = x.mT if tall else x
    x = (x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)).to(dtype or x.dtype)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(iterations):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def check_groups(model: nn.Module, groups: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Raise ValueError unless every parameter that is trained stands in exactly one group."""
    grouped = [id(p) for parameters in groups.values() for p in parameters]
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    missing = sorted(name for key, name in trained.items() if key not in grouped)
    if missing or len(grouped) != len(set(grouped)):
        raise ValueError(
            f"parameter_groups() of {type(model).__name__} leaves out {missing} or names a parameter twice"
        )


def keep_names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Give an optimiser the names of its parameters: its state is saved and loaded by them."""
    names = {id(parameter): name for name, parameter in named}
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    optimizer.register_load_state_dict_pre_hook(by_name)


def by_name(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state, which has parameters by name, in PyTorch's form: by their numbers in this optimiser.

    A hook for ``load_state_dict``, which itself compares neither names nor shapes.

    Raises ConfigError for the state of other parameters.
    """
    kept, state = {group["name"]: group for group in saved["param_groups"]}, saved["state"]
    named = {
        name: p
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    unlike = [name for name in state if name not in named]
    for group in optimizer.param_groups:
        unlike += set(group["param_names"]) ^ set(kept.get(group["name"], {"param_names": []})["param_names"])
    unlike += [
        f"{entry} of {name}"
        for name, entries in state.items()
        for entry, x in entries.items()
        if name in named and x.shape not in ((), named[name].shape)
    ]
    if unlike:
        names = ", ".join(sorted(unlike)[:3])
        raise ConfigError(f"the optimiser's state is of another model: {len(unlike)} entries differ, such as {names}")
    numbers = {name: number for number, name in enumerate(named)}
    groups = [
        {**kept[group["name"]], "params": [numbers[name] for name in group["param_names"]]}
        | {"param_names": group["param_names"]}
        for group in optimizer.param_groups
    ]
    return {"state": {numbers[name]: entries for name, entries in state.items()}, "param_groups": groups}


class Together(torch.optim.Optimizer):
    """Several optimisers as one: groups and states are shared, so that schedules, clipping and checkpoints see all.

    Args:
        parts: optimisers of different parameters.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of each."""
        loss = evaluated(closure)
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the states of all."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
