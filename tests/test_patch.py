"""The model continues with the replacement of a patch, at every tap and in every mode. All else is unchanged, bit for
bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from fnmatch import fnmatchcase

import pytest
import torch
from small import (
    MEMORIES,
    RATIO,
    SHALLOW,
    assert_same,
    build,
    mostly_nightly,
    random_tokens,
    training_cases,
    variant,
)
from torch import Tensor

import gsm
from gsm.analysis.interventions import without_stage, without_state
from gsm.layers.attention import Attention, CrossAttention
from gsm.layers.block import Block
from gsm.models.base import LanguageModel
from gsm.observe import tap
from gsm.tape import Tapes

T = 17
QUICK = ("gsm", "gsm-writer=delta", "gsm-writer=multi_slot", "baseline-pool", "yoco", "hybrid")
FIXED = "position"
# Patterns of taps that nothing comes after, since a part leaves out what passes there. In the two-pass form a site
# reads the streams themselves.
IDLE = {
    "gsm-writer=encoder_only": ["stage/*"],
    "gsm-writer=retrieval_only": ["state/e", "encoder/3/*"],
    "gsm-residual=mhc_two_pass": ["*/stream/after"],
    "baseline-residual=mhc_two_pass": ["*/stream/after"],
}
# Attention with other weights sums in another order, and so do gradients of what others read too: of keys and values of
# several layers, and of a stream from which a cache is made.
REORDERED = re.compile(r".*/(weights|key|value|stream)")
# Taps of tensors that affect only the next call, and nothing later in the same call.
HANDED_ON = re.compile(r"(encoder|decoder)/\d+/state")


def taps(model: LanguageModel, token_BT: Tensor) -> dict[str, Tensor]:
    """Return the tensors of all taps of a call, by name."""
    with torch.no_grad(), gsm.record() as seen:
        model(token_BT)
    return dict(seen)


def step(model: LanguageModel, token_BT: Tensor) -> list[Tensor]:
    """Return the loss of a training step and all gradients. Each step draws the same random numbers."""
    torch.manual_seed(0)
    model.zero_grad()
    out = model(token_BT, targets=token_BT.roll(-1, 1))
    (out.loss + sum(out.losses.values())).backward()
    return [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@torch.no_grad()
def read(model: LanguageModel, token_BT: Tensor, capacity: int | None, chunk: int = 7) -> Tensor:
    """Logits of the last positions: of the prompt's last, read in chunks, and of six that are decoded."""
    out = model.prefill(token_BT[:, :-6], model.start(len(token_BT), capacity), chunk=chunk)
    logits = [out.logits]
    for token_B1 in token_BT[:, -6:].split(1, dim=1):
        out = model(token_B1, memory=out.memory)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("case", mostly_nightly(training_cases(), *QUICK, "gsm-indexer_training=score_bias"))
def test_an_identity_patch_changes_nothing(case: str):
    """Bit for bit, also in gradients; what changes an order of summation, in the last digits."""
    model, token_BT = build(case, geometry=SHALLOW), random_tokens(2, T)
    names = taps(model, token_BT)
    model.train()
    want = step(model, token_BT), *(read(model.eval(), token_BT, capacity) for capacity in (None, T))
    for exact in (True, False):
        with gsm.patch([name for name in names if (not REORDERED.fullmatch(name)) == exact] or "hidden", lambda x: x):
            got = step(model.train(), token_BT), *(read(model.eval(), token_BT, capacity) for capacity in (None, T))
        for a, b in zip([*got[0], *got[1:]], [*want[0], *want[1:]], strict=True):
            assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", mostly_nightly(training_cases(), *QUICK))
def test_later_tensors_depend_on_the_replacement_and_gradients_flow_through_the_function(case: str):
    """Every tap is scaled by a number of its own, and the output has a gradient for each number."""
    model, token_BT = build(case, geometry=SHALLOW), random_tokens(2, T)
    whole, seen = model(token_BT).logits, taps(model, token_BT)
    names = [name for name, x in seen.items() if x.is_floating_point() and not HANDED_ON.fullmatch(name)]
    scales = {name: torch.tensor(0.9, dtype=torch.float64, requires_grad=True) for name in names}
    with ExitStack() as stack:
        for name, scale in scales.items():
            stack.enter_context(gsm.patch(name, scale.mul))
        logits = model(token_BT).logits
    gradients = torch.autograd.grad(logits.square().sum(), list(scales.values()), allow_unused=True)
    idle = {name for name, gradient in zip(scales, gradients, strict=True) if gradient is None or gradient == 0}
    assert not [name for name in idle if not any(fnmatchcase(name, pattern) for pattern in IDLE.get(case, ()))]
    assert_same(model(token_BT).logits, whole, "behind the blocks", tolerance=0)


@torch.no_grad()
@pytest.mark.parametrize("case", mostly_nightly(MEMORIES, *QUICK))
@pytest.mark.parametrize("capacity", [None, T + 3])
def test_a_patch_by_position_gives_the_same_result_in_chunks(case: str, capacity: int | None):
    """Patches at all taps scale tensors by a function of the position, or drop the selection of odd positions."""
    model, token_BT = build(case, geometry=SHALLOW), random_tokens(2, T)
    whole = model(token_BT).logits[:, -7:]
    names = [name for name in taps(model, token_BT) if name != FIXED and not HANDED_ON.fullmatch(name)]
    with gsm.record(FIXED) as seen, ExitStack() as stack:
        for name in names:
            stack.enter_context(gsm.patch(name, by_position(name, seen, model)))
        want, got = model(token_BT).logits[:, -7:], read(model, token_BT, capacity)
    assert_same(got, want, case)
    assert not torch.allclose(want, whole)


def by_position(name: str, seen: dict[str, Tensor], model: LanguageModel) -> Callable[[Tensor], Tensor]:
    """Return a function that scales each place of a tap by a function of its position or slot."""
    (layer, _, kind), each = name.rpartition("/"), 1
    mixer = next((part.attention for part in model.modules() if isinstance(part, Block) and part.name == layer), None)
    slots = isinstance(mixer, Attention | CrossAttention) or layer.endswith(("compressed", "selected"))
    if kind in ("key", "value"):
        kind, each = "bank" if slots else kind, getattr(mixer, "steps", 1)
    if name in ("state/entries", "state/key", "state/value"):
        each = model.writer.slots

    def function(x: Tensor) -> Tensor:
        position_BT = seen[FIXED]
        if kind == "latent":  # slots that this call may add
            ratio = model.geometry.encoder_ratio if name.startswith("encoder") else model.geometry.decoder_ratio
            number_E = position_BT[0, 0] // ratio + torch.arange(x.shape[1])
        elif kind == "bank":
            number_E = torch.arange(x.shape[1])
        else:  # rows, or entries: they end with the newest position
            number_E = position_BT[0, -1] + 1 + torch.div(torch.arange(-x.shape[1], 0), each, rounding_mode="floor")
        number_E = number_E.view(1, -1, *[1] * (x.ndim - 2))
        if not x.is_floating_point():
            return x.where(number_E % 2 == 0, -1)
        return x * (1 + 0.3 * torch.sin(number_E.double()))

    return function


@torch.no_grad()
def test_a_patched_recurrent_state_is_the_start_of_the_next_call():
    model, token_BT = build("delta_net"), random_tokens(1, T)
    half = model(token_BT[:, :9], memory=model.start())
    with gsm.patch("decoder/*/state", torch.zeros_like):
        emptied = model(token_BT[:, :9], memory=model.start())
    assert torch.equal(half.logits, emptied.logits), "the call itself has read it already"
    follow = [model(token_BT[:, 9:], memory=out.memory).logits for out in (half, emptied)]
    assert not torch.allclose(*follow)
    states = [cache.state.value_BHRC for cache in emptied.memory.decoder]
    assert states and not any(state_BHRC.any() for state_BHRC in states)


@torch.no_grad()
@pytest.mark.parametrize("case", ["gsm", "gsm-writer=multi_slot", "gsm-state_reader=separate_kv"])
def test_attention_weights_of_zero_give_an_output_of_zero(case: str):
    model, token_BT = build(case, geometry=SHALLOW), random_tokens(2, T)
    with without_state(model):
        want = model(token_BT).logits
    with gsm.patch("decoder/*/weights", torch.zeros_like):
        assert_same(model(token_BT).logits, want, "the state")
    with without_stage(model, 1):
        want = model(token_BT).logits
    with gsm.patch("stage/1/weights", torch.zeros_like):
        assert_same(model(token_BT).logits, want, "a stage")


@torch.no_grad()
@pytest.mark.parametrize(
    "case, layer", [("gsm", "encoder/2"), ("gsm", "decoder/4"), ("transformer", "decoder/4"), ("yoco", "decoder/4")]
)
def test_weights_of_invisible_entries_are_ignored(case: str, layer: str):
    """On the sink, on entries before the document, on slots that are not selected, on tokens to come."""
    model, token_BT = build(case, geometry=SHALLOW), random_tokens(1, 9)
    documents = torch.tensor([[0] * 4 + [1] * 5])
    name = f"{layer}/weights"
    with gsm.record(name, "*/top_k") as seen:
        model(token_BT, documents)
    if layer == "encoder/2":
        assert (seen["encoder/2/top_k"] == -1).any() and (seen["encoder/2/top_k"] >= 0).any()
    unseen, sink = seen[name] == 0, torch.zeros_like(seen[name], dtype=torch.bool)
    sink[..., -1] = True
    for mask in (unseen, sink) if case == "gsm" else (unseen,):  # without a sink, the last place is the last row's own
        assert mask.any()
        with gsm.patch(name, lambda w, mask=mask: w.where(~mask, 0)):
            want = model(token_BT, documents).logits
        with gsm.patch(name, lambda w, mask=mask: w.where(~mask, 7)):
            assert_same(model(token_BT, documents).logits, want, name)


@torch.no_grad()
def test_attention_reads_the_replaced_selection():
    """The stage reads it, and so do all parts that reuse a layer's selection; a recording has the replacement."""
    shared, none = (
        build("gsm", geometry=SHALLOW),
        build("gsm", geometry=SHALLOW, retriever=variant("retriever", "window_only")),
    )
    none.load_state_dict(shared.state_dict())
    token_BT = random_tokens(2, T)
    nothing = lambda chosen_BRK: torch.full_like(chosen_BRK, -1)  # noqa: E731
    with gsm.patch("stage/*/top_k", nothing):
        assert_same(shared(token_BT).logits, none(token_BT).logits, "stages that read their window alone")
    with gsm.patch("encoder/2/top_k", nothing), gsm.record("*/top_k", "*/weights") as seen:
        shared(token_BT)
    for name in ("encoder/2", "encoder/3", "stage/1", "stage/2"):
        assert (seen[f"{name}/top_k"] == -1).all()
        assert not seen[f"{name}/weights"][..., SHALLOW.window : -1].any()
    want = dict(seen)
    with gsm.record("*/top_k") as seen:
        shared(token_BT)
    assert (want["encoder/2/top_k"] != seen["encoder/2/top_k"]).any()


def test_a_selection_of_slots_that_a_row_may_not_see_is_refused():
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, T)
    for slot in (99, T // RATIO - 1, -2):
        with (
            pytest.raises(ValueError, match=rf"^encoder/2/top_k .*got {slot}$"),
            gsm.patch("encoder/2/top_k", lambda chosen_BRK, slot=slot: torch.full_like(chosen_BRK, slot)),
        ):
            model(token_BT)


def test_a_patch_of_positions_must_return_them_unchanged():
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, T)
    with gsm.patch("*", lambda x: x):
        model(token_BT)
    with (
        pytest.raises(ValueError, match="^position "),
        gsm.patch("*", lambda x: x + 1),
    ):
        model(token_BT)


@pytest.mark.parametrize(
    "wrong, gives",
    [(lambda x: x[:, 1:], r"float64 \[1, 16, 8\]"), (lambda x: x.float(), "float32"), (lambda x: None, "a NoneType")],
)
def test_a_replacement_of_another_shape_dtype_or_device_is_refused(wrong: Callable, gives: str):
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, T)
    with (
        pytest.raises(ValueError, match=rf"state/entries .*float64 \[1, 17, 8\] on cpu.*{gives}"),
        gsm.patch("state/entries", wrong),
    ):
        model(token_BT)
    assert torch.isfinite(model(token_BT).logits).all()


def test_an_unknown_name_raises_an_error_with_the_taps_of_the_calls():
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, T)
    with (
        pytest.raises(KeyError, match="'stage/entries'.*state/entries"),
        gsm.patch("stage/entries", abs),
    ):
        model(token_BT)
    with gsm.patch("stage/entries", abs):
        pass


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, T])
def test_a_function_may_modify_its_argument_without_changing_the_memory(capacity: int | None):
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, T)
    want = read(model, token_BT, capacity)
    names = ("state/entries", "encoder/*/bank", "encoder/*/window")
    out = model(token_BT[:, :9], memory=model.start(1, capacity), rows=1)
    before = model(token_BT[:, 9:12], memory=out.memory.clone()).logits
    with gsm.patch(names, torch.Tensor.zero_):
        patched = model(token_BT[:, 9:12], memory=out.memory.clone()).logits
    assert not torch.allclose(patched, before)
    with gsm.patch(names, torch.Tensor.zero_):  # read under a patch, and gone on without
        entered = model.prefill(token_BT[:, :9], model.start(1, capacity)).memory
    bank = entered.encoder[1].bank.entry.value_BFC
    assert bank.any() and entered.state[0].entry_BEC.any()
    assert torch.equal(read(model, token_BT, capacity), want)


@torch.no_grad()
def test_inner_patches_get_outer_results_and_a_recording_has_the_final_replacement():
    x = torch.ones(2)
    with (
        gsm.record() as outer,
        gsm.patch("a/*", lambda x: x + 1),
        gsm.patch("a/b", lambda x: 10 * x),
        gsm.record() as inner,
    ):
        assert torch.equal(tap("a/b", x), 20 * x)
        assert torch.equal(tap("a/c", x), 2 * x)
        assert tap("b", x) is x and tap("b", lambda: x) is None
        assert torch.equal(tap("a/b", lambda: x), 20 * x)
    assert torch.equal(outer["a/b"], inner["a/b"]) and torch.equal(inner["a/b"], 20 * x)
    assert tap("a/b", x) is x and tap("a/b", lambda: pytest.fail("made although nobody listens")) is None
    with pytest.raises(ZeroDivisionError), gsm.patch("a/b", abs):
        raise ZeroDivisionError
    assert tap("a/b", x) is x


@torch.no_grad()
def test_a_patch_of_one_model_does_not_change_other_models():
    one, other, token_BT = build("gsm", geometry=SHALLOW), build("gsm", geometry=SHALLOW, seed=1), random_tokens(1, T)
    want = [model(token_BT).logits for model in (one, other)]
    with without_state(one):
        got = [model(token_BT).logits for model in (one, other)]
    assert not torch.allclose(got[0], want[0]) and torch.equal(got[1], want[1])


@torch.no_grad()
def test_a_patch_of_a_model_that_is_never_called_is_an_error():
    one, other, token_BT = build("gsm", geometry=SHALLOW), build("gsm", geometry=SHALLOW, seed=1), random_tokens(1, T)
    with pytest.raises(ValueError, match="^model "), gsm.patch("hidden", abs, one):
        other(token_BT)
    with gsm.patch("hidden", abs, one):
        pass


@pytest.mark.parametrize("around", [torch.compile, torch.nn.DataParallel, torch.nn.Sequential])
def test_a_wrapper_of_a_model_is_refused_as_the_model(around: Callable):
    """A wrapper's calls are calls of the model inside, so the patch would change nothing."""
    wrapper = around(build("gsm", geometry=SHALLOW))
    with (
        pytest.raises(TypeError, match=f"^model .*{type(wrapper).__name__}"),
        gsm.patch("hidden", abs, wrapper),
    ):
        pytest.fail("the block was entered")


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, T])
def test_a_bank_stores_a_patched_latent_but_no_other_patched_tensor(capacity: int | None):
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, T)

    def kept(*names: str) -> Tensor:
        with gsm.patch(names, torch.zeros_like) if names else nullcontext():
            memory = model.prefill(token_BT, model.start(1, capacity)).memory
        return memory.encoder[1].bank.entry.value_BFC

    assert torch.equal(kept("encoder/2/bank"), kept()) and kept().any()
    assert not kept("encoder/2/latent").any()


def test_gradients_of_a_patched_model_with_recomputation_match_its_forward():
    """Backward stands behind the block, where a second forward would find no patch."""
    token_BT, gradients = random_tokens(2, T), []
    for recompute in (False, True):
        model = build("gsm", geometry=SHALLOW, recompute=recompute).train()
        with gsm.patch(["encoder/*/window", "decoder/*/weights"], lambda x: 0.5 * x):
            loss = model(token_BT, targets=token_BT).loss
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_an_engine_with_recordings_makes_plain_calls_inside_a_patch():
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, 16 + 4)
    engine = gsm.Engine(model, capacity=32, graphs=Tapes(prompts=16))

    def through() -> Tensor:
        engine.reset()
        first = engine.prefill(token_BT[:, :16]).clone()
        return torch.stack([first, *(engine.decode(token_B).clone() for token_B in token_BT[:, 16:].unbind(1))], dim=1)

    whole = model(token_BT).logits[:, 15:]
    assert_same(through(), whole, "recorded")
    with gsm.patch("state/entries", lambda entry_BEC: 0.5 * entry_BEC):
        engine.warm_up()
        want = model(token_BT).logits[:, 15:]
        assert_same(through(), want, "patched")
    assert not torch.allclose(want, whole)
    assert_same(through(), whole, "recorded again")


@torch.no_grad()
def test_a_recording_sees_every_token_of_an_engine():
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, 8)
    engine = gsm.Engine(model, capacity=8)
    read = [engine.decode(token_B).clone() for token_B in token_BT[:, :4].unbind(1)]
    with gsm.record("hidden") as seen:
        read += [engine.decode(token_B).clone() for token_B in token_BT[:, 4:].unbind(1)]
    assert len(seen.all("hidden")) == 4
    assert_same(torch.stack(read, dim=1), model(token_BT).logits, "recorded and plain")


def test_a_compiled_model_can_be_patched_if_graph_breaks_are_allowed():
    class Tapped(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled, replaced = tap("doubled", x * 2), tap("half", lambda: x / 2)
            return doubled + (1 if replaced is None else replaced)

    x = torch.randn(2, 3)
    compiled = torch.compile(Tapped(), backend="aot_eager")
    assert torch.equal(compiled(x), 2 * x + 1)
    with gsm.patch("doubled", torch.zeros_like):
        assert torch.equal(compiled(x), torch.ones(2, 3))
    with gsm.patch("half", lambda x: x):
        assert torch.equal(compiled(x), 2 * x + x / 2)
    assert torch.equal(torch.compile(Tapped(), backend="aot_eager", fullgraph=True)(x), 2 * x + 1)
