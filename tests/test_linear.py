"""Maps of one input as one product, the grouped product without transposed copies, and the operations of a decoded
token."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import together as together_on_ranks
from small import build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import gsm
from gsm.config.load import build_model
from gsm.layers.linear import GroupedLinear, Linear, concatenated, side_by_side, together
from gsm_kernels import launch, using


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(16, 8), Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return concatenated(x, *self.one_input)

    @property
    def one_input(self) -> tuple[Linear, Linear]:
        return self.first, self.second


class Products(TorchDispatchMode):
    """Counts operations on tensors by name, without views and memory without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("aten::") and not func.is_view and "empty" not in name and "_unsafe_view" not in name:
            self.names.append(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def products(part: Two, x: Tensor) -> int:
    """Return the number of products of ``together``, which must be right."""
    with Products() as counted:
        got = together(x, *part.one_input)
    for one, want in zip(got, (part.first(x), part.second(x)), strict=True):
        torch.testing.assert_close(one, want)
        assert one.shape == want.shape
    torch.testing.assert_close(concatenated(x, *part.one_input), torch.cat(got, dim=-1))
    return sum(name in ("mm", "mv", "addmm") for name in counted.names)


def joined(model: nn.Module) -> int:
    """Return the number of storages that hold more than one parameter."""
    places = Counter(x.untyped_storage().data_ptr() for x in model.parameters())
    return sum(count > 1 for count in places.values())


@torch.no_grad()
def test_maps_of_one_row_are_one_product() -> None:
    part, row = Two().double(), torch.randn(1, 1, 16, dtype=torch.float64)
    before, parameters = copy.deepcopy(part.state_dict()), dict(part.named_parameters())
    assert products(part, row) == 2, "the weights are apart"
    side_by_side(part)
    assert all(x is parameters[name] for name, x in part.named_parameters())
    assert all(torch.equal(x, before[name]) and x.is_contiguous() for name, x in part.state_dict().items())
    assert products(part, row) == 1
    assert products(part, torch.randn(1, 3, 16, dtype=torch.float64)) == 2, "pieces would be strided"
    place = part.first.weight.data_ptr()
    side_by_side(part)
    assert part.first.weight.data_ptr() == place, "recordings hold addresses"


@torch.no_grad()
def test_the_joint_product_follows_its_weights() -> None:
    part, row = Two(), torch.randn(1, 1, 16)
    side_by_side(part)
    part.second.weight.mul_(3)
    assert products(part, row) == 1
    part.load_state_dict(Two().state_dict())
    assert products(part, row) == 1
    part.first.weight = nn.Parameter(torch.randn(8, 16))
    assert products(part, row) == 2
    side_by_side(part)
    assert products(part, row) == 1
    assert products(part.double(), row.double()) == 2, "a cast separates them"
    assert products(copy.deepcopy(part), row.double()) == 2
    side_by_side(part)
    part.first.register_forward_hook(lambda *call: call[-1].neg())
    assert products(part, row.double()) == 2, "a hook would be skipped"


class Halved(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


@torch.no_grad()
def test_a_part_with_another_forward_is_called() -> None:
    part, row = Two(), torch.randn(1, 1, 16)
    part.first = Halved(16, 8)
    side_by_side(part)
    assert joined(part) == 1 and products(part, row) == 2


@torch.no_grad()
def test_autocast_lowers_a_weight_once() -> None:
    part, row = Two(), torch.randn(1, 1, 16)
    side_by_side(part)
    with Products() as counted, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            together(row, *part.one_input)
    assert counted.names.count("_to_copy") == 2 + 2 * 3, "two weights once, and the row for each product"


def divided(folder: Path) -> None:
    """On a rank: a step after a forward, whose weights FSDP2 keeps gathered."""
    losses = []
    for moves in (False, True):
        torch.manual_seed(0)
        part, row = Two(), torch.ones(1, 1, 16)
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for _ in range(3):
            loss = part(row).square().sum()
            if moves:
                side_by_side(part)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    (folder / "losses").write_text(json.dumps(losses))


def test_weights_that_fsdp_gathers_stay(processes: Any, tmp_path: Path) -> None:
    """Moved, they would keep their values, whatever the optimiser does."""
    assert together_on_ranks(processes, 1, divided, tmp_path) == [0]
    losses = json.loads((tmp_path / "losses").read_text())
    assert losses[:3] == losses[3:] and len(set(losses)) == 3


def test_weights_side_by_side_learn_as_before() -> None:
    one, other = Two(), Two()
    other.load_state_dict(one.state_dict())
    side_by_side(other)
    x = torch.randn(1, 1, 16)
    for part in (one, other):
        (part.first(x).sum() * part.second(x).square().sum()).backward()
        torch.optim.SGD(part.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        assert products(other, x) == 1


def test_weights_made_in_inference_mode_stay() -> None:
    with torch.inference_mode():
        part = Two()
    places = [x.data_ptr() for x in part.parameters()]
    side_by_side(part)
    assert [x.data_ptr() for x in part.parameters()] == places


@pytest.mark.parametrize("rows", [(1, 1), (2, 7)])
def test_grouped_product(rows: tuple[int, int]) -> None:
    part = GroupedLinear(3, 24, 5).double()
    x = torch.randn(*rows, 24, dtype=torch.float64, requires_grad=True)
    want = torch.einsum("brgi,goi->brgo", x.unflatten(-1, (3, 8)), part.weight).flatten(-2)
    torch.testing.assert_close(part(x), want)
    with torch.no_grad():
        torch.testing.assert_close(part(x), want)
    assert torch.autograd.gradcheck(lambda x, _: part(x), (x, part.weight))


def test_a_model_decodes_the_same_with_weights_side_by_side() -> None:
    model = build("gsm").eval()
    tokens = torch.randint(model.vocabulary, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(tokens).logits[:, -1]
        memory = model(tokens[:, :-1], memory=model.start()).memory
        assert joined(model) > 1
        torch.testing.assert_close(model(tokens[:, -1:], memory=memory).logits[:, -1], want)


def test_an_engine_joins_weights_that_were_separated() -> None:
    model = build("gsm").eval()
    engine = gsm.Engine(model, capacity=40)
    engine.prefill(torch.arange(5)[None])
    want = engine.decode(torch.tensor([1])).clone()
    mark = engine.memory.clone()
    for x in model.parameters():
        x.data = x.data.clone()
    assert not joined(model)
    engine.decode(torch.tensor([2]))
    engine.load(mark)
    engine.reset()
    engine.prefill(torch.arange(5)[None])
    assert torch.equal(engine.decode(torch.tensor([1])), want)
    assert joined(model) > 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_operations_of_a_decoded_token() -> None:
    """On a GPU each of them is a launch, in Triton or in PyTorch; their number is the time of a token. Recompute the
    limit if a part is added on purpose."""
    model, token = build_model("gsm", "nano", ["size.streams=4"], seed=0).bfloat16().eval(), torch.zeros(1, 1).long()
    launched: list[object] = []
    with using("triton"), launch.launching(lambda *call: launched.append(call[0])), torch.no_grad():
        memory = model(torch.zeros(1, 64).long(), memory=model.start(1, 256), rows=1).memory
        launched.clear()
        with Products() as counted:
            _ = model(token, memory=memory, rows=1).logits
    assert counted.names.count("mm") <= 56
    assert len(launched) + len(counted.names) <= 317
