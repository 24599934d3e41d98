"""A mixture of experts: the destination and weight of each row, and the balancing of loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small import GEOMETRY, assert_same, build, random_tokens
from test_task import Bigram, a_batch, fit, make_task, make_trainer
from torch import Tensor
from torch.nn.functional import silu, softplus

from gsm.layers.experts import Experts, MixtureOfExperts
from gsm.layers.feed_forward import SwiGLU
from gsm.models.balancing import layers_with_experts

DIM, HIDDEN, EXPERTS, CHOSEN = 8, 12, 6, 2
MOE = "gsm-feed_forward=moe"
pytestmark = pytest.mark.usefixtures("float64")


def layer(**options) -> MixtureOfExperts:
    made = MixtureOfExperts(DIM, HIDDEN, **{"experts": EXPERTS, "chosen": CHOSEN, **options})
    made.nudges_E.random_(-300, 300)
    return made


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, DIM)


@torch.no_grad()
def written_out(layer: MixtureOfExperts, x_D: Tensor) -> Tensor:
    """The output for one row, by the equations."""

    def expert(gate, up, down):
        return down @ (silu((gate @ x_D).clamp(max=10)) * (up @ x_D).clamp(-10, 10))

    score = [softplus(w_D @ x_D).sqrt() for w_D in layer.router.weight]
    lifted = [float(s) + 0.001 * int(n) for s, n in zip(score, layer.nudges_E, strict=True)]
    chosen = sorted(range(EXPERTS), key=lambda e: -lifted[e])[: layer.chosen]
    total = sum(score[e] for e in chosen) if len(chosen) > 1 else 1.0
    own, shared = layer.experts, layer.shared
    y_D = expert(shared.gate.weight, shared.up.weight, shared.down.weight)
    for e in chosen:
        y_D = y_D + 1.5 * score[e] / total * expert(own.gate[e], own.up[e], own.down[e])
    return y_D


@pytest.mark.parametrize("chosen", [1, CHOSEN])
def test_every_row_gets_the_sum_of_the_experts_that_it_chose_and_of_the_shared_one(chosen):
    mixture, x_BRD = layer(chosen=chosen), 3 * rows(2, 7)
    want = torch.stack([written_out(mixture, x_D) for x_D in x_BRD.flatten(0, 1)]).view_as(x_BRD)
    assert_same(mixture(x_BRD).update_BRD, want, "the equations", 1e-12)


def sent(mixture: MixtureOfExperts, x_BRD: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Chosen experts and weights of every row, [N, K], as the experts are given them."""
    seen: list[Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(Experts, "forward", lambda self, x, chosen, weight: seen.extend((chosen, weight)) or x)
        mixture(x_BRD)
    return seen[0], seen[1]


def test_a_bias_changes_the_choice_of_experts_and_no_weight(monkeypatch):
    mixture, x_BRD = layer(), rows(2, 30)
    score_NE = mixture.router(x_BRD).flatten(0, 1)
    choices = []
    for nudges in ([0] * EXPERTS, [700] * EXPERTS, [0, 0, 10_000, 0, 0, 0]):
        mixture.nudges_E.copy_(torch.tensor(nudges))
        chosen_NK, weight_NK = sent(mixture, x_BRD, monkeypatch)
        kept_NK = score_NE.gather(-1, chosen_NK)
        assert_same(weight_NK, 1.5 * kept_NK / kept_NK.sum(-1, keepdim=True), f"weights under {nudges}", 1e-12)
        choices.append(chosen_NK)
    assert torch.equal(choices[0], choices[1]), "the same bias for all experts changes nothing"
    assert (choices[2] == 2).any(-1).all() and not (choices[0] == 2).any(-1).all()


def test_biases_balance_the_loads_of_similar_rows():
    mixture, x_BRD = layer(bias_step=0.02).train(), rows(1, 256) + 2 * rows(1, 1)
    mixture.nudges_E.zero_()
    busiest = []
    for _ in range(100):
        load_E = mixture(x_BRD).balance.load_E
        busiest.append(float(load_E.max() / load_E.double().mean()))
        mixture.rebalance(load_E)
    assert busiest[0] > 2 and max(busiest[-10:]) < 1.2, f"{busiest[0]:.2f} to {busiest[-1]:.2f}"


def test_the_loss_balances_loads_through_the_router_s_weights():
    mixture, x_BRD = layer(balance_weight=1.0).train(), rows(1, 256) + 2 * rows(1, 1)
    mixture.nudges_E.zero_()
    optimizer = torch.optim.SGD([mixture.router.weight], lr=2.0)
    first = mixture(x_BRD).balance
    for _ in range(60):
        optimizer.zero_grad()
        mixture(x_BRD).balance.loss.backward()
        optimizer.step()
    last = mixture(x_BRD).balance
    assert first.load_E.max() > 1.5 * last.load_E.max(), f"{first.load_E.tolist()} to {last.load_E.tolist()}"
    assert 1 <= last.loss < 1.01 < first.loss


def test_a_step_moves_every_bias_towards_the_mean_load():
    mixture = layer()
    mixture.nudges_E.zero_()
    mixture.rebalance(torch.tensor([4, 4, 4, 4, 1, 7]))
    mixture.rebalance(torch.tensor([0, 5, 4, 4, 4, 1]))
    assert mixture.nudges_E.tolist() == [1, -1, -1, -1, 0, 0]


def test_biases_survive_a_cast_to_bfloat16_and_are_saved():
    mixture = layer()
    mixture.nudges_E.fill_(1000)
    half = mixture.bfloat16()
    half.rebalance(torch.tensor([0, 2, 1, 1, 1, 1]))
    assert half.nudges_E.tolist() == [1001, 999, 1000, 1000, 1000, 1000]
    assert torch.equal(half.state_dict()["nudges_E"], half.nudges_E)


def test_padding_counts_neither_in_the_loads_nor_in_the_loss():
    mixture, x_BRD = layer(balance_weight=1.0).train(), rows(2, 9)
    want = mixture(x_BRD[:1, 4:], torch.arange(5)[None]).balance
    position_BR = torch.stack([torch.tensor([-1] * 4 + [0, 1, 2, 3, 4]), torch.full((9,), -1)])
    got = mixture(x_BRD, position_BR).balance
    assert torch.equal(got.load_E, want.load_E) and got.load_E.sum() == 5 * CHOSEN
    assert_same(got.loss, want.loss, "the loss of the one sequence that is not padding", 1e-12)


def test_the_loss_is_taken_sequence_by_sequence():
    mixture, x_BRD = layer(balance_weight=1.0).train(), rows(2, 9) + 2 * rows(2, 1)
    each = [mixture(x_BRD[b : b + 1]).balance.loss for b in (0, 1)]
    assert_same(mixture(x_BRD).balance.loss, sum(each) / 2, "mean of two sequences", 1e-12)
    score_RE = mixture.router(x_BRD)[0]
    share_E = (score_RE / score_RE.sum(-1, keepdim=True)).mean(0)
    load_E = mixture(x_BRD[:1]).balance.load_E
    assert_same(each[0], (EXPERTS / (CHOSEN * 9) * load_E * share_E).sum(), "sum of f P", 1e-12)


def test_gradients_are_those_of_the_function():
    experts = Experts(3, 2, 4, limit=10.0)
    chosen_NK = torch.tensor([[0, 3], [3, 1], [0, 1], [1, 3], [3, 0]])  # nobody chose the third
    x_ND, weight_NK = torch.randn(5, 3, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    weights = [p.detach().clone().requires_grad_() for p in experts.parameters()]

    def run(x_ND, weight_NK, *weights):
        named = dict(zip(("gate", "up", "down"), weights, strict=True))
        return torch.func.functional_call(experts, named, (x_ND, chosen_NK, weight_NK))

    assert torch.autograd.gradcheck(run, (x_ND, weight_NK, *weights))


def test_under_autocast_scores_stay_wide_and_products_do_not():
    mixture, x_BRD = layer().float().train(), rows(2, 9).float()
    want = mixture(x_BRD)
    with torch.autocast("cpu", torch.bfloat16):
        assert mixture.router(x_BRD).dtype == torch.float32
        got = mixture(x_BRD)
    assert got.update_BRD.dtype == torch.bfloat16
    assert torch.equal(got.balance.load_E, want.balance.load_E)
    torch.testing.assert_close(got.update_BRD.float(), want.update_BRD, rtol=0, atol=0.02)


def test_scores_far_below_zero_have_finite_gradients():
    mixture = layer().float()
    x_BRD = (-1e4 * mixture.router.weight.detach()[:1]).view(1, 1, DIM).requires_grad_()
    mixture(x_BRD).update_BRD.sum().backward()
    assert mixture.router(x_BRD).min() < 1e-9 and x_BRD.grad.isfinite().all()


def test_a_row_uses_as_many_weights_as_a_dense_feed_forward_and_the_router():
    mixture, dense = layer(), SwiGLU(DIM, HIDDEN)
    assert mixture.products().multiply_adds == dense.products().multiply_adds + EXPERTS * DIM
    assert mixture.inactive_weights() == (EXPERTS - CHOSEN) * 3 * DIM * HIDDEN // (CHOSEN + 1)


@pytest.mark.parametrize("case", [MOE, "baseline-feed_forward=moe"])
def test_a_model_counts_every_row_once_however_often_it_runs(case):
    tokens, outputs = random_tokens(2, 20), []
    for recompute in (False, True):
        model = build(case, recompute=recompute).train()
        out = model(tokens, targets=tokens)
        (out.loss + sum(out.losses.values())).backward()
        outputs.append((out, {name: p.grad for name, p in model.named_parameters()}))
    (plain, gradients), (again, again_gradients) = outputs
    assert torch.equal(plain.load_LE, again.load_LE)
    assert plain.load_LE.sum(-1).tolist() == [2 * 20 * GEOMETRY.experts_per_token] * GEOMETRY.depth
    for name, gradient in gradients.items():
        assert_same(again_gradients[name], gradient, f"gradient of {name}", 1e-12)


def test_a_model_reports_expert_loads_and_rebalances_each_layer_by_its_own():
    model, tokens = build(MOE).train(), random_tokens(2, 20)
    out = model(tokens)
    busiest = [float(out.metrics[f"expert_load/layer{i + 1}"]) for i in range(GEOMETRY.depth)]
    assert busiest == (out.load_LE.max(-1).values / out.load_LE.double().mean(-1)).tolist()
    assert float(out.metrics["expert_load"]) == pytest.approx(sum(busiest) / len(busiest))
    before = [layer.nudges_E.clone() for layer in layers_with_experts(model)]
    model.rebalance(out.load_LE)
    for layer, nudges_E, load_E in zip(layers_with_experts(model), before, out.load_LE, strict=True):
        assert torch.equal(layer.nudges_E - nudges_E, torch.sign(load_E.double().mean() - load_E).long())


def test_outside_of_training_nothing_is_counted():
    out = build(MOE)(random_tokens(1, 5))
    assert out.load_LE is None and "balance" not in out.losses and not out.metrics


def test_the_balance_loss_has_a_gradient_in_routers_and_below_but_in_no_expert_of_the_last_layer():
    model, tokens = build(MOE).train(), random_tokens(2, 20)
    model(tokens).losses["balance"].backward()
    last = f"decoder.blocks.{GEOMETRY.decoder_layers - 1}.feed_forward"
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            assert parameter.grad.abs().max() > 0, name
        if name.startswith((f"{last}.experts", f"{last}.shared")):
            assert parameter.grad is None or not parameter.grad.any(), name


class Routed(Bigram):
    """A bigram model with a layer of two experts; the first token of a batch sets their loads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        out = super().forward(tokens, documents, targets)
        out.load_LE = torch.stack([tokens[0, 0], torch.ones_like(tokens[0, 0])])[None] if self.training else None
        return out

    def rebalance(self, load_LE: Tensor) -> None:
        self.seen.append(load_LE[0].tolist())


def test_experts_are_rebalanced_after_each_step_by_the_loads_of_all_its_batches(tmp_path):
    model, batches = Routed(), [a_batch(seed=seed) for seed in range(5)]
    fit(make_trainer(tmp_path, 3, accumulate_grad_batches=2, limit_val_batches=1), make_task(model), batches)
    first = [int(batch["tokens"][0, 0]) for batch in batches]
    assert model.seen == [[first[0] + first[1], 2], [first[2] + first[3], 2], [first[4], 1]]
