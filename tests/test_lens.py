"""What a model would say after each layer, what its parts add to a logit, and patches swept over layers and places."""

from __future__ import annotations

import pytest
import torch
from small import GEOMETRY, build, random_tokens, variant

import gsm
from gsm.analysis import figures
from gsm.analysis.attention import decoder_heads, entries_back, own_entries, written
from gsm.analysis.lens import TAPS, Lens, attribute, logit_lens, parts_of_output, to_logit
from gsm.analysis.patching import attentions, by_part, layers, margins, prompt_pair, sweep
from gsm.analysis.state import cosines, latents
from gsm.models.gsm import GSM
from gsm.notebook import show_one
from gsm.paths import variants

MODELS = [*variants("model"), *(f"gsm-writer={writer}" for writer in variants("model/writer"))]
MODELS += ["gsm-residual=plain", "gsm-residual=mhc_two_pass", "gsm-decoder_start=streams", "gsm-stages=none"]


@pytest.mark.parametrize("case", MODELS)
def test_the_parts_of_an_output_sum_to_it_and_the_lens_ends_at_the_logits(case: str):
    model, token_T = build(case), random_tokens(1, 20)[0]
    with gsm.record(*TAPS) as seen, torch.no_grad():
        out = model(token_T[None])
    parts = parts_of_output(model, seen)
    assert torch.allclose(torch.stack(list(parts.values())).sum(dim=0), seen["hidden"])
    lens = logit_lens(model, token_T)
    assert len(lens.places) == 1 + GEOMETRY.depth == len(lens.log_probability_LR)
    want_R = out.logits[0, :-1].log_softmax(-1).gather(1, token_T[1:, None])[:, 0]
    assert torch.allclose(lens.log_probability_LR[-1], want_R.float(), atol=1e-5)
    assert torch.equal(lens.best_LR[-1], out.logits[0, :-1].argmax(-1))


@torch.no_grad()
@pytest.mark.parametrize("streams", ["plain", "mhc"])
@pytest.mark.parametrize("case", [*variants("model"), "gsm-writer=multi_slot", "gsm-encoder_layer=recurrent"])
def test_heads_and_entries_of_the_state_sum_to_what_an_attention_adds(case: str, streams: str):
    model, token_T = build(case, residual=variant("residual", streams)), random_tokens(1, 20)[0]
    found = attribute(model, token_T, 3, 5)
    with gsm.record("hidden", "*/stream/between") as seen:
        model(token_T[None])
    of_attention = []
    layers = [layer for layer in found.layers if not layer.startswith("stage/")]
    for layer in layers:
        with gsm.patch(f"{layer}/attention", torch.zeros_like), gsm.record(f"{layer}/stream/between") as without:
            model(token_T[None])
        added_1D = seen[f"{layer}/stream/between"][:, -1] - without[f"{layer}/stream/between"][:, -1]
        of_attention.append(to_logit(model, added_1D, seen["hidden"][0, -1], 3, 5)[0])
    of_attention_L = torch.stack(of_attention)
    if streams == "plain":
        of_parts_L = torch.tensor([found.by_part[f"{layer}/attention"] for layer in layers]).double()
        assert torch.allclose(of_attention_L, of_parts_L, atol=1e-6)
    assert len(of_attention_L) == GEOMETRY.depth and of_attention_L.abs().min() > 1e-6
    assert found.by_head_LH.shape[1] > 1
    by_layer = dict(zip(found.layers, found.by_head_LH.sum(dim=1), strict=True))
    assert torch.allclose(torch.stack([by_layer[layer] for layer in layers]), of_attention_L, atol=1e-6)
    if isinstance(model, GSM):
        assert found.by_entry_LE is not None
        assert found.by_entry_LE.shape == (GEOMETRY.decoder_layers, model.state_size + 1)
        assert list(found.readers) == layers[-GEOMETRY.decoder_layers :]
        assert torch.allclose(found.by_entry_LE.sum(dim=1), of_attention_L[-GEOMETRY.decoder_layers :], atol=1e-6)
        assert found.by_entry_LE[:, -1].abs().max() < 1e-12, "a sink has no entry"
    else:
        assert found.by_entry_LE is None
    assert sum(found.by_part.values()) == pytest.approx(found.total, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", ["gsm-residual=plain", "transformer"])
def test_a_head_is_what_the_stream_loses_without_it(case: str):
    model, token_T = build(case), random_tokens(1, 20)[0]
    found = attribute(model, token_T, 3, 5)
    with gsm.record("hidden", "*/stream/between", "state/*") as seen:
        model(token_T[None])

    def drop(x_BRHC: torch.Tensor) -> torch.Tensor:
        x_BRHC[:, :, 1] = 0
        return x_BRHC

    for layer, part_H in zip(found.layers, found.by_head_LH, strict=True):
        if layer == "stage/1":
            continue  # stage 2 reads what it adds
        place = "state/z" if layer == "stage/2" else f"{layer}/stream/between"
        with gsm.patch(f"{layer}/heads", drop), gsm.record(place) as without:
            model(token_T[None])
        lost_1D = seen[place][:, -1] - without[place][:, -1]
        assert torch.allclose(to_logit(model, lost_1D, seen["hidden"][0, -1], 3, 5)[0], part_H[1], atol=1e-9)


@pytest.mark.parametrize("case", ["gsm", *(f"gsm-writer={writer}" for writer in variants("model/writer"))])
def test_heads_of_a_stage_sum_to_what_it_adds(case: str):
    model, token_T = build(case), random_tokens(1, 20)[0]
    found = attribute(model, token_T, 3, 5)
    by_layer = dict(zip(found.layers, found.by_head_LH.sum(dim=1).tolist(), strict=True))
    by_stage = {name: by_layer[name] for name in ("stage/1", "stage/2")}
    assert by_stage == pytest.approx({name: found.by_part[name] for name in by_stage}, abs=1e-6)
    assert list(by_layer)[4:6] == list(by_stage), "between encoder and decoder"
    if case != "gsm-writer=encoder_only":
        assert min(map(abs, by_stage.values())) > 1e-6


def test_stages_add_nothing_to_a_decoder_that_starts_from_the_encoder():
    found = attribute(build("gsm-decoder_start=streams"), random_tokens(1, 20)[0], 3)
    assert not [name for name in found.layers if name.startswith("stage/")]


@pytest.mark.parametrize("case", ["gsm-residual=plain", "gsm-writer=multi_slot", "transformer"])
def test_a_sweep_begins_at_the_changed_token_and_ends_at_the_answer(case: str):
    model, clean_T = build(case), random_tokens(1, 20)[0]
    corrupted_T = clean_T.clone()
    corrupted_T[15] = (clean_T[15] + 1) % model.vocabulary
    pair = prompt_pair(clean_T, corrupted_T, 3, 5)
    taps = {"embedding": "embedding", **layers(model), "hidden": "hidden"}
    share_SP = sweep(model, pair, taps, range(13, 20))
    assert torch.allclose(share_SP[0], torch.eye(7)[2].double()), "the embedding of the changed token is all"
    assert torch.allclose(share_SP[-1], torch.eye(7)[6].double()), "and so is the output at the answer"
    assert share_SP[:, :2].abs().max() < 1e-9, "nothing differs before the changed token"
    assert 0 < float(share_SP[1:-1, 2:].abs().max())
    if case.startswith("gsm"):
        entries = sweep(model, pair, {"entries": "state/entries"}, range(15, 20))
        assert float(entries.abs().max()) > 1e-6, "entries behind the changed token are read by the answer"


@pytest.mark.parametrize("case", ["gsm-residual=plain", "gsm-writer=multi_slot", "transformer"])
def test_a_swept_head_is_one_head_of_one_layer(case: str):
    model, clean_T = build(case), random_tokens(1, 20)[0]
    corrupted_T = clean_T.clone()
    corrupted_T[15] = (clean_T[15] + 1) % model.vocabulary
    pair, taps = prompt_pair(clean_T, corrupted_T, 3, 5), attentions(model)
    stages = ["stage/1", "stage/2"] if isinstance(model, GSM) else []
    assert [name for name in taps if name.startswith("stage/")] == stages
    share_SH, by_whole = sweep(model, pair, taps, heads=range(4)), by_part(model, pair, taps)
    assert share_SH.shape == (GEOMETRY.depth + len(stages), 4) and float(share_SH.abs().min()) > 1e-9
    added = [
        name.replace("/heads", "/increment" if name.startswith("stage/") else "/attention") for name in taps.values()
    ]
    assert by_whole == pytest.approx(by_part(model, pair, dict(zip(taps, added, strict=True)))), "all heads"
    with gsm.record(taps[(name := list(taps)[2])]) as seen, torch.no_grad():
        model(clean_T[None])

    def put(x_BRHC: torch.Tensor) -> torch.Tensor:
        x_BRHC[:, :, 1] = seen[taps[name]][:, :, 1]
        return x_BRHC

    with gsm.patch(taps[name], put), torch.no_grad():
        log_V = model(corrupted_T[None]).logits[0, -1].log_softmax(-1)
    clean, base = margins(model, pair)
    assert float(share_SH[2, 1]) == pytest.approx(float((log_V[3] - log_V[5] - base) / (clean - base)), abs=1e-9)
    share_SPH = sweep(model, pair, taps, [14, 15, 19], [0, 1, 2, 3])
    assert share_SPH.shape == (len(taps), 3, 4)
    assert share_SPH[:, 0].abs().max() < 1e-9, "nothing differs before the changed token"
    assert share_SPH[:, 1:].abs().amax() > 1e-6
    assert torch.allclose(share_SPH[-1, 2], share_SH[-1]), "the last layer is read by its own row alone"


@pytest.mark.parametrize("columns", [figures.LETTERED, figures.LETTERED + 1])
def test_cells_have_letters_where_they_fit(columns: int):
    pytest.importorskip("matplotlib")
    number_LR, words = torch.zeros(2, columns), ["word"] * columns
    one = Lens(("embedding", "decoder/1"), number_LR, number_LR, number_LR.long())
    axes = show_one(figures.lens, one, words, [words, words]).axes[0]
    assert len(axes.texts) == (2 * columns if columns == figures.LETTERED else 0)


def test_refusals_of_a_sweep():
    model, token_T = build("gsm"), random_tokens(1, 20)[0]
    with pytest.raises(ValueError, match=r"^corrupted_T .* 20 .* got 19$"):
        prompt_pair(token_T, token_T[1:], 3, 5)
    with pytest.raises(ValueError, match=r"^corrupted_T .* differ"):
        prompt_pair(token_T, token_T, 3, 5)
    pair = prompt_pair(token_T, (token_T + 1) % model.vocabulary, 3, 5)
    assert margins(model, pair)[0] != margins(model, pair)[1]
    with pytest.raises(ValueError, match=r"^taps .* 20 tokens, got encoder/2/latent"):
        sweep(model, pair, {"bank": "encoder/2/latent"}, [3])
    for tap, head in (("encoder/2/stream", 0), ("encoder/2/heads", 4), ("encoder/2/heads", -1)):
        with pytest.raises(ValueError, match=f"^taps .* got {tap}"):
            sweep(model, pair, {"one": tap}, heads=[head])
    for places in ({}, {"positions": []}, {"heads": []}, {"positions": [-1]}, {"positions": [20]}):
        with pytest.raises(ValueError, match="^positions "):
            sweep(model, pair, layers(model), **places)


def test_heads_of_one_row_and_their_mean_and_cosines_of_entries():
    model, token_BT = build("gsm"), random_tokens(1, 20)
    with gsm.record() as seen, torch.no_grad():
        model(token_BT)
    row_LHE = decoder_heads(model, seen, row=-2)
    assert torch.equal(row_LHE[0], seen["decoder/5/weights"][0, 18].float())
    assert torch.equal(row_LHE, decoder_heads(model, seen, row=18))
    assert torch.allclose(decoder_heads(model, seen).sum(dim=-1), torch.ones(4, 4))
    latent_EC = latents(model, seen)[0]
    cosine_EE = cosines(latent_EC)
    assert torch.allclose(cosine_EE.diag(), torch.ones(20).double()) and torch.allclose(cosine_EE, cosine_EE.T)
    assert torch.allclose(cosines(latent_EC, -latent_EC), -cosine_EE)


@pytest.mark.parametrize("case", ["gsm", "gsm-writer=multi_slot", "gsm-state_reader=state_and_window"])
def test_a_column_of_the_decoders_heads_has_the_token_that_wrote_its_entry(case: str):
    """With several entries a position, every entry had the name of a token of its own."""
    pytest.importorskip("matplotlib")
    model, words = build(case), [f"w{place}" for place in range(20)]
    with gsm.record() as seen, torch.no_grad():
        model(random_tokens(1, 20))
    weight_LHE = decoder_heads(model, seen, row=-1)
    back_W = entries_back(model, "decoder/5", weight_LHE.shape[2] - 1)
    axes = show_one(figures.state_heads, weight_LHE, back_W, range(5, 9), words).axes[0]
    slots, own = model.writer.slots, own_entries(model, "decoder/5")
    want = [word for word in words[-model.writer.positions :] for _ in range(slots)] + words[20 - own :] + ["sink"]
    assert (slots > 1) == ("multi_slot" in case) and (own > 0) == ("window" in case)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == want


def test_places_of_a_window_before_the_first_token_have_no_name():
    assert written(["a", "b"], torch.tensor([1, 1, 0, 0, 2, 1, 0])) == ["a", "a", "b", "b", "", "a", "b"]


def test_a_token_stands_at_the_middle_of_its_entries():
    pytest.importorskip("matplotlib")
    axes = show_one(figures.cosines, torch.zeros(4, 6), ["a", "b"], ["c", "d", "e"]).axes[0]
    assert axes.get_yticks().tolist() == [0.5, 2.5] and axes.get_xticks().tolist() == [0.5, 2.5, 4.5]


def test_pictures_of_signed_numbers_have_the_scale_that_is_asked_for():
    pytest.importorskip("matplotlib")
    for value in (0.5, 2.0):
        one = (figures.signed, torch.tensor([[value, -0.1]]), ["row"], ["a", "b"], "share")
        assert show_one(*one).axes[0].images[0].get_clim() == (-value, value)
        axes, bar = show_one(*one, highest=1).axes
        assert axes.images[0].get_clim() == (-1, 1)
        assert axes.images[0].colorbar.extend == ("both" if value > 1 else "neither"), "values beyond the scale"
        assert bar.get_ylabel() == "share"
