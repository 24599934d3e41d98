"""Gradients, algebra between variants, and the fixed size of the state."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from small import GEOMETRY, SHALLOW, assert_same, build, random_tokens, reads, training_cases, variant

from gsm.layers.residual import HyperConnection, Streams
from gsm.models.gsm import GSM
from gsm.observe import record


def gradients(model, length=40):
    """Gradients of the language-model loss alone, and of the indexers' loss alone."""
    tokens = random_tokens(2, length)
    out = model.train()(tokens, targets=tokens)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    by_loss = torch.autograd.grad(out.loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    by_index = (
        torch.autograd.grad(out.losses["indexer_kl"], list(parameters.values()), allow_unused=True)
        if "indexer_kl" in out.losses
        else [None] * len(parameters)
    )
    return {name: (a, b) for name, a, b in zip(parameters, by_loss, by_index, strict=True)}


def touched(gradient) -> bool:
    return gradient is not None and gradient.abs().max() > 0


def unread(model) -> str:
    """Return a pattern for the parameters that have no effect because the model's writer does not read their output.

    These are the stages, or the parts of the last layer that only its output depends on. (Its stage also reads its
    normed input and its window.)
    """
    last = SHALLOW.encoder_layers - 1
    behind = (rf"encoder\.blocks\.{last}\.(?!attention_norm|attention\.window)", r"aggregation\.")
    read = reads(model.writer) if isinstance(model, GSM) else (True, True)
    return "|".join(pattern for pattern, one in zip(behind, read, strict=True) if not one) or "nothing"


@pytest.mark.parametrize("case", training_cases())
def test_every_parameter_learns_from_its_own_loss_and_from_no_other(case):
    model = build(case, geometry=SHALLOW)
    for name, (by_loss, by_index) in gradients(model).items():
        if re.match(unread(model), name):
            assert not touched(by_loss), f"{case}: {name} learns although the writer does not read what it makes"
        elif ".indexer." in name:
            training = model.indexer_training
            assert touched(by_loss) == training.by_attention, f"{case}: the language-model loss and {name}"
            assert touched(by_index) == training.by_loss, f"{case}: the indexers' loss and {name}"
        else:
            assert touched(by_loss), f"{case}: {name} does not learn"
            assert not touched(by_index), f"{case}: the indexers' loss reaches {name}"


def test_the_first_mixing_matrix_cannot_learn_because_all_streams_are_equal():
    model = build("gsm-residual=mhc")
    streams = GEOMETRY.dim * 4
    for stack in ("encoder", "decoder"):
        by_loss = gradients(model)[f"{stack}.blocks.0.attention_residual.phi"][0]
        mixing, rest = by_loss[8:].abs().max(), by_loss[:8].abs().max()
        assert by_loss.shape == (24, streams)
        # Not exactly zero: the rounds end with columns that sum to 1 up to the epsilon of the normalisation.
        assert mixing < 1e-6 * rest, f"{stack}: gradient of the mixing rows {mixing:.1e}, of the others {rest:.1e}"


@pytest.mark.parametrize(("case", "learns"), [("gsm", False), ("gsm-decoder_start=streams", True)])
def test_the_decoder_s_first_mixing_matrix_learns_if_its_input_streams_differ(case, learns):
    by_loss = gradients(build(case))["decoder.blocks.0.attention_residual.phi"][0]
    assert (by_loss[8:].abs().max() > 1e-6 * by_loss[:8].abs().max()) == learns


@torch.no_grad()
def test_a_stage_s_query_comes_from_its_layer_s_input_or_output():
    """Behind the last layer that is e."""
    asked = {}
    for case in ("gsm", "gsm-stage_input=after_layer"):
        model, inputs = build(case), []
        *_, stage = model.aggregation
        stage.norm.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0]))
        with record("state/e") as seen:
            model(random_tokens(1, 9))
        asked[case] = inputs[0][..., : GEOMETRY.dim], seen["state/e"]
    (before, _), (after, e) = asked.values()
    assert torch.equal(after, e) and not torch.equal(before, e)


@torch.no_grad()
def test_retrieval_does_not_enter_the_decoder_s_residual_if_it_starts_from_the_encoder_s_streams():
    changed = {}
    for case in ("gsm", "gsm-decoder_start=streams"):
        model, tokens, entered = build(case), random_tokens(1, 9), []
        first = model.get_submodule("decoder.blocks.0.attention_norm")
        first.register_forward_pre_hook(lambda _, given, entered=entered: entered.append(given[0]))
        logits = [model(tokens).logits]
        next(iter(model.aggregation)).output.up.weight.normal_()
        logits.append(model(tokens).logits)
        assert not torch.equal(*logits), "the state sees it in any case"
        changed[case] = not torch.equal(*entered)
    assert changed == {"gsm": True, "gsm-decoder_start=streams": False}


def test_encoder_only_with_stages_equals_no_stages():
    with_stages, without = build("gsm-writer=encoder_only"), build("gsm-stages=none")
    shared = {k: v for k, v in with_stages.state_dict().items() if not k.startswith("aggregation.")}
    without.load_state_dict(shared)
    tokens = random_tokens(2, 30)
    assert_same(with_stages(tokens).logits, without(tokens).logits, "encoder_only against no stages")


def test_a_separate_indexer_with_the_layer_s_selection_equals_shared_topk(monkeypatch):
    from gsm.layers.search import Selection
    from gsm.slots.retriever.separate_indexer import SeparateIndexer

    separate, shared = build("gsm-retriever=separate_indexer"), build("gsm-retriever=shared_topk")
    shared.load_state_dict({k: v for k, v in separate.state_dict().items() if ".retriever." not in k})
    tokens = random_tokens(2, 40)
    assert (separate(tokens).logits - shared(tokens).logits).abs().max() > 1e-6, (
        "the two select the same: nothing is tested"
    )
    monkeypatch.setattr(SeparateIndexer, "forward", lambda self, x, view, *more: (Selection(view.chosen_BRK), more[-1]))
    assert_same(separate(tokens).logits, shared(tokens).logits, "separate indexer with the layer's selection")


@pytest.mark.parametrize(("rounds", "tolerance"), [(20, 1e-5), (400, 1e-5)])
@torch.no_grad()
def test_mixing_matrices_are_doubly_stochastic(rounds, tolerance):
    # 20 rounds suffice for moderate coefficients; extreme ones need more (the columns are right after any number of
    # rounds).
    spread = 0.3 if rounds == 20 else 2.0
    site = HyperConnection(8, sinkhorn_rounds=rounds).double()
    site.scale.fill_(1.0)
    site.phi.normal_(std=spread / 32**0.5)
    site.bias.normal_(std=spread)
    value = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    nothing = torch.zeros(2, 5, 8, dtype=torch.float64)
    kept = site.leave(Streams(value, nothing), nothing).value_BTXD
    assert_same(
        kept.sum(dim=2), value.sum(dim=2), "rows sum to 1: the sum over streams passes unchanged", 30 * tolerance
    )
    equal = value[:, :, :1].expand(-1, -1, 4, -1)
    assert_same(
        site.leave(Streams(equal, nothing), nothing).value_BTXD,
        equal,
        "columns sum to 1: equal streams stay equal",
        tolerance,
    )


def test_plain_equals_hyper_connections_at_identity(monkeypatch):
    import gsm.layers.residual as residual

    def identity(streams, update, phi, bias, scale, rounds):
        written = streams + update[:, :, None]
        return written, written[:, :, 0]

    mixed, plain = build("gsm-residual=mhc"), build("gsm-residual=plain")
    plain.load_state_dict({k: v for k, v in mixed.state_dict().items() if "_residual." not in k})
    monkeypatch.setattr(residual, "mhc_boundary", identity)
    tokens = random_tokens(2, 30)
    assert_same(mixed(tokens).logits, plain(tokens).logits, "mHC with A = one-hot, C = 1, M = identity")


@torch.no_grad()
def test_full_reindex_and_reuse_agree_when_everything_is_selected():
    from dataclasses import replace

    everything = replace(GEOMETRY, top_k=40)
    reindex = build("baseline-residual=mhc", geometry=everything)
    reuse = build("baseline-residual=mhc", geometry=replace(everything, decoder_reindex=[]))
    reuse.load_state_dict(
        {k: v for k, v in reindex.state_dict().items() if not k.startswith("decoder.blocks.2.attention.indexer")}
    )
    tokens = random_tokens(1, 30)
    assert_same(reindex(tokens).logits, reuse(tokens).logits, "Reindex against Reuse with top_k over all entries")


@torch.no_grad()
def test_a_pool_that_holds_everything_is_a_no_op():
    from dataclasses import replace

    wide = replace(GEOMETRY, candidate_blocks=8)
    with_pool, without = build("baseline-pool", geometry=wide), build("baseline-residual=plain", geometry=wide)
    narrow = build("baseline-pool")
    tokens = random_tokens(1, 60)
    assert_same(with_pool(tokens).logits, without(tokens).logits, "a pool of 64 entries for 60 tokens")
    assert (narrow(tokens).logits - without(tokens).logits).abs().max() > 1e-6, (
        "a pool of 8 entries changes nothing: not applied?"
    )


@torch.no_grad()
def test_breakdown_counts_every_reachable_storage_once():
    import gc

    model = build("gsm-retriever=separate_indexer")
    memory = model.prefill(random_tokens(2, 50), model.start(2), chunk=16).memory
    reachable, queue, seen = {}, [memory], set()
    while queue:
        node = queue.pop()
        if id(node) in seen or isinstance(node, type):
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            storage = node.untyped_storage()
            reachable[storage.data_ptr()] = storage.nbytes()
        else:
            queue += [
                n
                for n in gc.get_referents(node)
                if isinstance(n, torch.Tensor | tuple | dict) or hasattr(n, "__dataclass_fields__")
            ]
    assert memory.nbytes() == sum(reachable.values())


def test_variants_can_be_built_without_a_configuration():
    model = GSM(GEOMETRY, retriever=variant("retriever", "separate_indexer"), state_size=9, stages=[3])
    assert model.state_size == 9 and model.aggregation.layers == (3,)


@pytest.mark.parametrize("block", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_logits_computed_after_a_block_use_the_modes_of_the_call(block):
    """They raised PyTorch's own errors, or had a gradient."""
    model, tokens = build("transformer").float(), random_tokens(1, 6)
    with block():
        out = model(tokens)
        want = out.logits
    assert torch.equal(out.logits, want) and out.logits.requires_grad == want.requires_grad


def step(model, optimizer=torch.optim.AdamW, **options) -> None:
    optimizer(model.parameters(), 1e-3, **options).step()


def changed_in_place(model) -> None:
    with torch.no_grad():
        model.head.weight *= 1.1


@pytest.mark.parametrize(
    "change", [step, partial(step, fused=True), partial(step, optimizer=torch.optim.SGD), changed_in_place]
)
def test_logits_are_read_before_the_head_changes(change):
    """They were computed by the new head from the output of the old body."""
    model, tokens = build("transformer"), random_tokens(2, 9)
    out = model(tokens, targets=tokens)
    out.loss.backward()
    assert out.logits.shape == (2, 9, model.vocabulary), "the model is still the same"
    change(model)
    with pytest.raises(RuntimeError, match="logits"):
        _ = out.logits
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_logits_of_other_weights_are_read_inside_the_call_with_them():
    """`functional_call` gives the head its own weight back before it returns."""
    model, tokens = build("transformer"), random_tokens(2, 9)
    weights = {name: parameter.detach() * 1.1 for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match="logits"):
        _ = torch.func.functional_call(model, weights, (tokens,)).logits


@pytest.mark.parametrize("assign", [True, False])
def test_a_model_from_the_meta_device_has_one_weight_for_embedding_and_head(assign):
    """Trained, the two went apart; saved and loaded, it was another model."""
    state, model = build("transformer").state_dict(), build("transformer").to("meta")
    assert (model if assign else model.to_empty(device="cpu")).load_state_dict(state, assign=assign)
    assert model.head.weight is model.embedding.weight and not model.head.weight.is_meta
    with pytest.raises(ValueError, match="^head.weight"):
        model.load_state_dict(state | {"head.weight": state["head.weight"] + 1})


def test_a_memory_of_inference_mode_is_refused_while_gradients_are_recorded():
    model, tokens = build("transformer"), random_tokens(1, 6)
    with torch.inference_mode():
        memory = model(tokens, memory=model.start()).memory
    with pytest.raises(ValueError, match="^memory"):
        model(tokens, memory=memory)


# torch's own tracer instantiates autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_model_takes_a_growing_memory():
    model, tokens = build("transformer", geometry=SHALLOW), random_tokens(1, 12)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        memory = compiled(tokens[:, :8], memory=model.start()).memory
        after = compiled(tokens[:, 8:], memory=memory).logits
        assert torch.allclose(after, model(tokens).logits[:, 8:])
