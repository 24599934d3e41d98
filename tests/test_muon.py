"""Muon for matrices, AdamW for the rest, as one optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import SHALLOW, build, mostly_nightly, random_tokens
from torch import nn

from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.training.optimizer import AdamW, MatrixOptimizer, Muon, Together, orthogonal

SETTINGS: dict[str, Any] = {"learning_rate": 3e-3, "warmup_steps": 2, "final_fraction": 0.1, "weight_decay": 0.1}
CASES = ["gsm", "gsm-feed_forward=moe", "baseline", "gated_delta_net"]


def prepared(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(case, geometry=SHALLOW).float().train()
    return model, Muon(**SETTINGS).build(model.parameter_groups())


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    out = model(random_tokens(2, 20), targets=random_tokens(2, 20, seed=2))
    optimizer.zero_grad()
    (out.loss + sum(out.losses.values())).backward()
    optimizer.step()
    return float(out.loss.detach())


def test_one_choice_replaces_the_optimiser_of_any_model():
    for model in ("gsm", "baseline", "transformer"):
        made = instantiate(compose([f"model={model}", "optimizer=muon"])["optimizer"], "optimizer")
        assert isinstance(made, Muon) and made.momentum == 0.9


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_one_group_and_muon_has_the_matrices_of_the_layers(case: str):
    model, optimizer = prepared(case)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(names.values())
    taken = {names[id(p)] for group in optimizer.param_groups if group["name"] == "matrices" for p in group["params"]}
    left = {name for name, p in model.named_parameters() if p.ndim == 2} - taken
    assert all(any(word in name for word in ("embedding", "indexer", "convolution")) for name in left), left
    assert any("feed_forward" in name for name in taken) and not any("embedding" in name for name in taken)


@pytest.mark.parametrize("case", mostly_nightly(CASES, "gsm"))
def test_it_lowers_the_loss(case: str):
    model, optimizer = prepared(case)
    losses = [step(model, optimizer) for _ in range(15)]
    assert losses[-1] < losses[0] - 0.3


def test_a_step_is_as_long_in_every_direction():
    weight = nn.Parameter(torch.randn(12, 8))
    before, size = weight.detach().clone(), 0.2 * 12**0.5
    optimizer = Muon(**{**SETTINGS, "weight_decay": 0.0}).build(
        {"decay": [weight], "no_decay": [nn.Parameter(before[0])]}
    )
    weight.grad = torch.randn(12, 8) @ torch.diag(torch.logspace(-0.5, 0.5, 8))
    optimizer.step()
    lengths = torch.linalg.svdvals(before - weight.detach()) / (3e-3 * size)
    assert 0.5 < float(lengths.min()) and float(lengths.max()) < 1.5


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (16, 16)])
def test_steps_are_those_of_pytorchs_muon_up_to_its_bfloat16(shape: tuple[int, int]):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = MatrixOptimizer([ours], **options), torch.optim.Muon([theirs], **options)
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(shape)
        for optimizer in optimizers:
            optimizer.step()
    step_length = 0.1 * 0.2  # root mean square of one step's entries
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.25 * step_length)
    moments = (optimizer.state_dict()["state"][0]["momentum_buffer"] for optimizer in optimizers)
    assert torch.equal(*moments)


def test_in_bfloat16_steps_are_those_in_float32_up_to_rounding():
    """Matrices of one shape make a stack, and one without a gradient keeps its place."""
    torch.manual_seed(0)
    shapes = [(12, 8), (8, 12), (12, 8), (16, 16), (12, 8)]
    many: list[list[nn.Parameter]] = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2)]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [MatrixOptimizer(ours, half=half, **options) for ours, half in zip(many, (False, True), strict=True)]
    for number in range(5):
        for place, (one, other) in enumerate(zip(*many, strict=True)):
            one.grad = other.grad = None if number == place == 2 else torch.randn(shapes[place])
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(*many, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=0.25 * 0.1 * 0.2)  # of one step's root mean square


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("able", [False, True])
def test_products_are_in_bfloat16_where_run_and_processor_are(half: bool, able: bool, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": able}, raising=False)
    matrix, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    built = Muon(**SETTINGS).build({"decay": [matrix], "no_decay": [bias]}, half=half)
    assert isinstance(built, Together) and isinstance(built.parts[0], MatrixOptimizer)
    assert built.parts[0].half == (half and able)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_iterations_map_singular_values_and_keep_their_vectors(shape: tuple[int, int]):
    matrix = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = 3.4445, -4.775, 2.0315
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonal(matrix, (a, b, c), 5, 1e-7), left @ values.diag() @ right)


def test_it_goes_on_from_a_checkpoint_with_the_same_weights_and_one_schedule(tmp_path: Path):
    def scheduled() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        model, optimizer = prepared("gsm-feed_forward=moe")
        factor = Muon(**SETTINGS).factor
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, 6))

    model, optimizer, schedule = scheduled()
    for number in range(6):
        step(model, optimizer)
        schedule.step()
        assert len({part.param_groups[0]["lr"] for part in optimizer.parts}) == 1  # pyright: ignore
        if number == 2:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "saved")
    again, other, rate = scheduled()
    saved = torch.load(tmp_path / "saved", weights_only=True)
    for name, part in {"model": again, "optimizer": other, "schedule": rate}.items():
        part.load_state_dict(saved[name])
    for _ in range(3):
        step(again, other)
        rate.step()
    assert isinstance(other, Together) and other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_adamw_has_the_groups_it_had():
    groups = AdamW(**SETTINGS).build(build("gsm", geometry=SHALLOW).parameter_groups()).param_groups
    decay = {group["name"]: group["weight_decay"] for group in groups}
    assert decay == {"table_decay": 0.1, "decay": 0.1, "no_decay": 0.0, "indexer_decay": 0.1, "indexer_no_decay": 0.0}
