"""A model has the same loss and gradients with ``torch.compile`` as without.

PyTorch 2.11 silently compiles some operations into others without a gradient (``gsm_kernels.device.handed_out``). This
happens in tracing, so these tests generate no code, which would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import SHALLOW, assert_same, build, mostly_nightly, random_tokens
from torch import Tensor
from torch._dynamo.utils import counters

import gsm
from gsm import build_model
from gsm.config.compose import compose
from gsm.errors import ConfigError
from gsm.training.run import train

LENGTH = 41
# Ten seconds each and more: the models and parts with code of their own.
TRACED: dict[str, dict[str, Any]] = {
    "gsm": {},
    "gsm, recomputed": {"recompute": True},
    "gsm-indexer_training=score_bias": {},
    "gsm-feed_forward=moe": {},
    "gsm-writer=delta": {},
    "baseline-pool": {},
    "yoco": {},
    "hybrid": {},
    "kda": {},
    "raven": {},
    "nsa": {},
    "mamba3": {},
}


def loss_and_gradients(
    model: torch.nn.Module, run: Callable[..., Any], device: str = "cpu"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the training loss for two sequences of two documents, and all gradients."""
    torch.manual_seed(0)  # of what is drawn in training
    tokens = random_tokens(2, LENGTH).to(device)
    documents = (torch.arange(LENGTH, device=device) >= LENGTH // 3).long().expand(2, -1)
    model.zero_grad()
    out = run(tokens, documents, targets=tokens.roll(-1, 1))
    loss = out.loss + sum(out.losses.values())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# torch's own tracer instantiates autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("case", mostly_nightly(TRACED, "gsm, recomputed", "gsm-feed_forward=moe"))
def test_a_training_step_compiles_as_one_graph_and_changes_neither_loss_nor_gradients(case):
    model = build(case.partition(",")[0], geometry=SHALLOW, **TRACED[case]).train()
    loss, gradients = loss_and_gradients(model, model)
    torch.compiler.reset()
    compiled_loss, compiled = loss_and_gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert_same(compiled_loss, loss, "loss")
    assert compiled.keys() == gradients.keys() and len(gradients) > 20
    for name, gradient in gradients.items():
        assert_same(compiled[name], gradient, f"gradient of {name}")


# torch's own tracer instantiates autograd.Function and looks for gradients of activations, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), mostly_nightly([("gsm", 5), ("transformer", 2)], ("gsm", 5)))
def test_compiled_block_by_block_blocks_of_a_kind_share_a_graph(name, kinds):
    """A stack's first block is a separate kind, because its input streams are copies. At size nano, GSM's encoder also
    has blocks with their own bank and with another block's bank; the other decoder blocks are one kind."""
    model = build_model(name, "nano", ["model/residual=mhc"], seed=0).train()
    names = model.state_dict().keys()
    loss, gradients = loss_and_gradients(model, model)
    torch.compiler.reset()
    counters.clear()
    model.compile_blocks(backend="aot_eager")
    for _ in range(2):
        compiled_loss, compiled = loss_and_gradients(model, model)
        torch.testing.assert_close(compiled_loss, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(compiled[name], gradient, rtol=1e-3, atol=1e-6, msg=f"gradient of {name}")
    model.eval()
    with torch.no_grad(), gsm.record("*/top_k"):  # as validation and its pictures do
        model(torch.randint(4096, (1, LENGTH)))
    assert counters["stats"]["unique_graphs"] == kinds and not counters["graph_break"]
    assert model.state_dict().keys() == names


def test_compiling_for_a_cpu_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="^compile "):
        train(compose(["data=recall", "size=pico", "trainer=cpu", f"logs={tmp_path}", "compile=true"]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["gsm", "baseline", "transformer"])
def test_code_generated_for_a_gpu_changes_nothing_but_roundings(case):
    model = build(case, geometry=SHALLOW).float().cuda().train()
    loss, gradients = loss_and_gradients(model, model, "cuda")
    torch.compiler.reset()
    compiled_loss, compiled = loss_and_gradients(model, torch.compile(model), "cuda")
    assert abs(compiled_loss - loss) < 1e-4 * loss and compiled.keys() == gradients.keys()
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert (compiled[name] - gradient).norm() < 1e-2 * gradient.norm() + 1e-5 * whole, f"gradient of {name}"
