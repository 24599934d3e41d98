"""Calls as transformers' users make them: logits are those of the same text in one piece, or one sentence refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from short_runs import SIZES

transformers = pytest.importorskip("transformers")

from gsm.hf import GSMConfig, GSMForCausalLM  # noqa: E402
from gsm.hf.memory import MemoryCache  # noqa: E402

IDS = torch.randint(5, 250, (2, 24), generator=torch.Generator().manual_seed(1))
FIRST, NEW = IDS[:, :18], IDS[:, 18:]
ONES = torch.ones(2, 24, dtype=torch.int64)
GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


def mask(start: int = 0, stop: int = 24) -> torch.Tensor:
    """Of two rows: the first all tokens, the second those between the two places."""
    mask_BT = ONES.clone()
    mask_BT[1, :start] = mask_BT[1, stop:] = 0
    return mask_BT


LEFT, RIGHT, HOLE, NOTHING = mask(start=5), mask(stop=15), mask(), mask(stop=0)
HOLE[1, 9:14] = 0
PACKED = torch.cat([torch.arange(15), torch.arange(9)])[None]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return GSMForCausalLM(GSMConfig.of_variant("gsm", "pico", SIZES)).eval().double()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def cache(model: Any, **options: Any) -> Any:
    return model(FIRST, **options).past_key_values


def behind(model: Any, first: dict[str, Any], new: dict[str, Any]) -> torch.Tensor:
    return model(NEW, past_key_values=cache(model, **first), **new).logits


def behind_padding(model: Any) -> torch.Tensor:
    """A chunk that is padding alone in the second row, then its text."""
    memory, mask_BT = MemoryCache(model.model.start(2)), mask(start=20)
    model(FIRST, attention_mask=mask_BT[:, :18], past_key_values=memory)
    return model(NEW, attention_mask=mask_BT, past_key_values=memory).logits


def branch(model: Any) -> torch.Tensor:
    memory = cache(model)
    model(NEW.flip(1), past_key_values=copy.deepcopy(memory))
    return model(NEW, past_key_values=memory).logits


def chosen(model: Any) -> torch.Tensor:
    memory = cache(model, attention_mask=LEFT[:, :18])
    memory.batch_select_indices(torch.tensor([1, 0]))
    return model(NEW.flip(0), attention_mask=LEFT.flip(0), past_key_values=memory).logits.flip(0)


def repeated(model: Any) -> torch.Tensor:
    memory = cache(model, attention_mask=LEFT[:, :18])
    memory.batch_repeat_interleave(2)
    return model(NEW.repeat_interleave(2, 0), past_key_values=memory).logits[::2]


WHOLE, LATER, PACKS = [*IDS], [IDS[0], IDS[1, 5:]], [*IDS[:, 15:]]
PADDED, BEHIND = {"attention_mask": LEFT[:, :18]}, {"position_ids": PACKED[:, :18]}
VALUES: dict[str, tuple[Callable[[Any], torch.Tensor], list[torch.Tensor]]] = {  # calls, and texts with the last logits
    "left": (lambda m: m(IDS, attention_mask=LEFT).logits, LATER),
    "left, float": (lambda m: m(IDS, attention_mask=LEFT.float()).logits, LATER),
    "left, bool": (lambda m: m(IDS, attention_mask=LEFT.bool()).logits, LATER),
    "left and right": (lambda m: m(IDS, attention_mask=mask(5, 15)).logits[1:, :15], [IDS[1, 5:15]]),
    "an empty row with labels": (lambda m: m(IDS, attention_mask=NOTHING, labels=IDS).logits[:1], WHOLE[:1]),
    "packed": (lambda m: m(IDS, position_ids=PACKED).logits, PACKS),
    "packed, mask of ones": (lambda m: m(IDS, position_ids=PACKED, attention_mask=ONES).logits, PACKS),
    "positions at padding": (lambda m: m(IDS, attention_mask=LEFT, position_ids=LEFT.cumsum(1) - 1).logits, LATER),
    "more rows than there are": (lambda m: m(IDS, logits_to_keep=99).logits, WHOLE),
    "chosen rows": (
        lambda m: m(IDS, attention_mask=RIGHT, logits_to_keep=torch.tensor([14])).logits[1:],
        [IDS[1, :15]],
    ),
    "a tuple": (lambda m: m(IDS, return_dict=False, labels=IDS, logits_to_keep=2)[1], WHOLE),
    "behind": (lambda m: behind(m, {}, {}), WHOLE),
    "behind, use_cache=False": (lambda m: behind(m, {}, {"use_cache": False}), WHOLE),
    "behind left, whole mask": (lambda m: behind(m, PADDED, {"attention_mask": LEFT}), LATER),
    "behind left, new mask": (lambda m: behind(m, PADDED, {"attention_mask": ONES[:, :6]}), LATER),
    "behind left, no mask": (lambda m: behind(m, PADDED, {}), LATER),
    "behind padding alone": (behind_padding, [IDS[0], IDS[1, 20:]]),
    "behind, positions": (lambda m: behind(m, {}, {"position_ids": torch.arange(18, 24)}), WHOLE),
    "behind, another document": (lambda m: behind(m, {}, {"position_ids": torch.arange(6)}), [*NEW]),
    "behind packed": (lambda m: behind(m, BEHIND, {}), PACKS),
    "behind packed, then right": (
        lambda m: behind(m, BEHIND, {"attention_mask": mask(stop=22)})[1:, :4],
        [IDS[1, 15:22]],
    ),
    "branches": (branch, WHOLE),
    "chosen sequences": (chosen, LATER),
    "repeated sequences": (repeated, LATER),
}


@pytest.mark.parametrize("call", VALUES)
def test_a_call_gives_the_logits_of_the_text_in_one_piece(call: str, model: Any):
    logits, texts = VALUES[call]
    for row_TV, text in zip(logits(model), texts, strict=True):
        torch.testing.assert_close(row_TV[-1], model.model(text[None]).logits[0, -1], rtol=0, atol=1e-9)


FOREIGN = transformers.StaticCache(config=transformers.LlamaConfig(num_hidden_layers=1), max_cache_len=8)
REFUSED: list[tuple[str, dict[str, Any] | Callable[[Any], Any]]] = [  # arguments behind input_ids, or a call
    ("attention_mask", {"attention_mask": HOLE}),
    ("attention_mask", {"attention_mask": NOTHING}),
    ("attention_mask", {"attention_mask": (1 - LEFT.float()) * -1e9}),
    ("attention_mask", {"attention_mask": torch.ones(2, 1, 24, 24)}),
    ("attention_mask", {"attention_mask": ONES[:1]}),
    ("attention_mask", {"attention_mask": ONES.tolist()}),
    ("attention_mask", lambda m: behind(m, {"attention_mask": RIGHT[:, :18]}, {})),
    ("attention_mask", lambda m: behind(m, {}, {"attention_mask": mask(stop=18).flip(1)})),
    ("attention_mask", lambda m: behind(m, {}, {"attention_mask": LEFT[:, 2:8]})),
    ("attention_mask", lambda m: behind(m, {}, {"attention_mask": ONES[:, :20]})),
    ("position_ids", {"position_ids": torch.arange(3, 27)}),
    ("position_ids", {"attention_mask": LEFT, "position_ids": torch.arange(24)}),
    ("position_ids", {"position_ids": torch.arange(24.0)}),
    ("position_ids", lambda m: behind(m, {}, {"position_ids": torch.arange(24)})),
    ("position_ids", lambda m: behind(m, {}, {"position_ids": torch.arange(19, 25)})),
    ("cache_position", {"cache_position": torch.arange(24)}),
    ("inputs_embeds", {"inputs_embeds": torch.zeros(2, 24, 16)}),
    ("output_attentions", {"output_attentions": True}),
    ("output_hidden_states", {"output_hidden_states": True}),
    ("past_key_values", {"past_key_values": transformers.DynamicCache()}),
    ("past_key_values", {"past_key_values": FOREIGN}),
    ("past_key_values", {"past_key_values": ((torch.zeros(2, 1, 3, 4),) * 2,)}),
    ("past_key_values", lambda m: m(NEW[:1], past_key_values=cache(m))),
    ("labels", {"labels": IDS[:, :5]}),
    ("targets", {"labels": IDS + 300}),
    ("logits_to_keep", {"logits_to_keep": -1}),
    ("tokens", lambda m: m(IDS + 300)),
    ("tokens", lambda m: m(IDS - 300)),
    ("input_ids", lambda m: m(IDS[:, :0])),
    ("input_ids", lambda m: m(IDS[:0])),
    ("input_ids", lambda m: m(IDS[0])),
    ("past_key_values", lambda m: m.generate(IDS, **GREEDY, past_key_values=FOREIGN)),
    ("cache_implementation", lambda m: m.generate(IDS, **GREEDY, cache_implementation="static")),
    ("assisted", lambda m: m.generate(IDS[:1], **GREEDY, assistant_model=m)),
    ("assisted", lambda m: m.generate(IDS[:1], **GREEDY, prompt_lookup_num_tokens=2)),
    (
        "output_hidden_states",
        lambda m: m.generate(IDS, **GREEDY, output_hidden_states=True, return_dict_in_generate=True),
    ),
    ("inputs_embeds", lambda m: m.generate(inputs_embeds=torch.zeros(2, 4, 16), **GREEDY)),
    ("attention_mask", lambda m: m.generate(IDS, attention_mask=RIGHT, **GREEDY)),
    ("attention_mask", lambda m: m.generate(IDS, attention_mask=HOLE, prefill_chunk_size=6, **GREEDY)),
    ("prefill_chunk_size", lambda m: m.generate(IDS, **GREEDY, prefill_chunk_size=0)),
    ("input_ids", lambda m: m.generate(NEW, **GREEDY, past_key_values=cache(m))),
    ("use_cache", lambda m: m.generate(IDS, **GREEDY, past_key_values=cache(m), use_cache=False)),
    ("past_key_values", lambda m: m.generate(IDS, **GREEDY, past_key_values=cache(m), num_beams=2)),
    ("max_length", lambda m: m.generate(IDS, max_length=5)),
    ("checkpointing", lambda m: m.gradient_checkpointing_enable()),
    ("size.vocabulary", lambda m: m.set_output_embeddings(m.model.head)),
    ("size.vocabulary", lambda m: m.resize_token_embeddings(9)),
    ("tie_word_embeddings", lambda m: GSMForCausalLM(GSMConfig.of(m.config.model, tie_word_embeddings=False))),
]


@pytest.mark.parametrize(("key", "call"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
@pytest.mark.filterwarnings("ignore")  # of transformers, before it refuses
def test_a_call_without_an_answer_is_refused_by_its_key(key: str, call: Any, model: Any):
    with pytest.raises((ValueError, NotImplementedError), match=key):
        model(IDS, **call) if isinstance(call, dict) else call(model)


def test_a_prompt_without_tokens_begins_with_the_end_of_text(model: Any):
    """Alone, in a batch of padded prompts, and where there is no prompt at all."""
    begun = model.generate(torch.tensor([[7]]), **GREEDY)[0, 1:]
    options = {**GREEDY, "bos_token_id": 7}
    padded = model.generate(torch.tensor([[0, 0], [5, 6]]), attention_mask=torch.tensor([[0, 0], [1, 1]]), **options)
    for written in (padded[0, 2:], model.generate(**options)[0, 1:], model.generate(IDS[:1, :0], **options)[0, 1:]):
        assert torch.equal(written, begun)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 5}], ids=repr)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_choose_no_token(model: Any, value: float, options: dict[str, Any]):
    """Token 0 was written, by the greedy loop of transformers."""
    broken = copy.deepcopy(model)
    broken.model.norm.weight.fill_(value)
    with pytest.raises(ValueError, match="scores"):
        broken.generate(FIRST, **{**GREEDY, **options})


def test_the_loss_counts_labels_alone(model: Any):
    """Its mean over the labels of this call, or over the number of a whole step; 0 without any."""
    some = torch.where(torch.arange(24) < 9, -100, IDS)
    loss = model(IDS, labels=some).loss
    rows = model(IDS).logits[:, 8:-1]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(rows.flatten(0, 1), IDS[:, 9:].flatten()))
    torch.testing.assert_close(model(IDS, labels=some, num_items_in_batch=60).loss, loss * 30 / 60)
    assert model(IDS, labels=torch.full_like(IDS, -100)).loss == 0


def test_a_model_without_values_has_shapes(model: Any):
    """On the meta device, where no value of a mask could be looked at."""
    assert copy.deepcopy(model).to("meta")(IDS.to("meta"), use_cache=False).logits.shape == (2, 24, 257)
