"""Models, slots, layers and memories refuse a wrong value in a sentence that names the field, the value and the limit.

Configurations and checkpoints: test_configs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import GEOMETRY, build, random_tokens, variant

from gsm.engine import Engine
from gsm.layers.residual import HyperConnection
from gsm.layers.residual_attention import ResidualAttention
from gsm.layers.rope import Rope
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.models.sampling import sample

TOKENS = random_tokens(2, 6)


def forward(**arguments):
    return lambda: build("gsm-writer=additive")(**{"tokens": TOKENS, **arguments})


def geometry(**fields):
    return lambda: replace(GEOMETRY, **fields)


def start(batch, capacity=None):
    return build("gsm-writer=additive").start(batch, capacity)


def generate(prompt, new: Any = 2, **options):
    return lambda: build("gsm-writer=additive").generate(prompt, new, **options)


def prefill(prompt, memory, **options):
    return lambda: build("gsm-writer=additive").prefill(prompt, memory, **options)


@torch.no_grad()
def used(batch, capacity):
    memory = start(batch, capacity)
    return build("gsm-writer=additive")(TOKENS[:batch], memory=memory).memory


def mixer(name, **options):
    return lambda: variant("mixer", name)(GEOMETRY.shape(), geometry=GEOMETRY, name="decoder/1", **options)


def yarn(**options):
    return lambda: Rope(4, base=1e4, factor=2.0, **options)


CASES = {
    "token too large": (
        forward(tokens=TOKENS + 23),
        r"token id \d+ is not allowed because the vocabulary has 23 ids. Use ids from 0 to 22",
    ),
    "token below 0": (forward(tokens=TOKENS - 23), r"token id -\d+ is not allowed because the vocabulary has 23 ids"),
    "empty prompt": (
        forward(tokens=TOKENS[:, :0]),
        r"tokens of shape \[2, 0\] are not allowed because they are an empty prompt",
    ),
    "tokens without a batch": (
        forward(tokens=TOKENS[0]),
        r"tokens of torch.int64 \[6\] .* whole numbers of shape \[batch, length\]",
    ),
    "fractional tokens": (
        forward(tokens=TOKENS.double()),
        "tokens of torch.float64 .* are not allowed because ids are whole numbers",
    ),
    "documents of another length": (
        forward(documents=TOKENS[:, 1:]),
        r"documents of shape \[2, 5\] are not allowed because tokens have the shape \[2, 6\]",
    ),
    "fractional targets": (
        forward(targets=TOKENS.double()),
        "targets of torch.float64 on cpu are not allowed. Use whole numbers on the device of tokens, cpu",
    ),
    "fractional documents": (forward(documents=TOKENS.float()), "documents of torch.float32 on cpu are not allowed"),
    "fractional documents of a prompt": (
        prefill(TOKENS, start(2), documents=TOKENS.float()),
        "documents of torch.float32 on cpu are not allowed",
    ),
    "fractional documents for an engine": (
        lambda: Engine(build("gsm-writer=additive"), batch=2, capacity=8).prefill(TOKENS, TOKENS.float()),
        "documents of torch.float32 on cpu are not allowed",
    ),
    "targets that are true or false": (forward(targets=TOKENS > 3), "targets of torch.bool on cpu are not allowed"),
    "targets of another batch": (
        forward(targets=TOKENS[:1]),
        r"targets of shape \[1, 6\] are not allowed because tokens have the shape \[2, 6\]",
    ),
    "a target that is no token": (
        forward(targets=TOKENS + 23),
        r"target \d+ is not allowed .* Use ids from 0 to 22, or -100 to leave a position out",
    ),
    "no rows": (
        forward(rows=0),
        "rows=0 is not allowed for a call with 6 new positions. Use a number from 1 to 6; below 1 only",
    ),
    "too many rows": (
        forward(rows=7),
        "rows=7 is not allowed for a call with 6 new positions. Use a number from 1 to 6$",
    ),
    "a memory of another batch": (
        forward(memory=start(3)),
        r"memory for a batch of 3 is not allowed because tokens have a batch of 2. Use start\(batch=2\)",
    ),
    "a memory on another device": (
        forward(tokens=TOKENS.to("meta"), memory=start(2)),
        r"memory on cpu is not allowed because tokens are on meta. Use start\(\) after the model was moved",
    ),
    "a capacity of nothing": (lambda: start(1, 0), "capacity=0 is not allowed because it is below 1"),
    "a prompt longer than the capacity": (
        prefill(TOKENS, start(2, 5), chunk=2),
        r"6 more tokens are not allowed because the memory is full: its capacity is 5 tokens, 0 .* start\(capacity=6\)",
    ),
    "a memory that is full": (
        prefill(TOKENS[:, :3], used(2, 8)),
        "3 more tokens are not allowed .* its capacity is 8 tokens, 6 are used",
    ),
    "generation beyond the capacity": (
        generate(TOKENS, new=3, capacity=7),
        "capacity=7 is not allowed because a prompt of 6 tokens and 3 new ones need 8. Use capacity=8 or more",
    ),
    "generation of nothing": (generate(TOKENS, new=0), "max_new_tokens=0 is not allowed because it is below 1"),
    "no prompts": (generate([]), r"prompts=\[\] is not allowed because a batch has at least one prompt"),
    "an empty prompt among others": (
        generate([TOKENS[0], TOKENS[0, :0]]),
        r"prompts\[1\] of torch.int64 \[0\] is not allowed because a prompt is 1-D, of whole numbers and not empty",
    ),
    "prompts of different lengths after others": (
        prefill([TOKENS[0], TOKENS[1, :2]], used(2, None)),
        "prompts of different lengths are not allowed .* this memory has read 6 tokens",
    ),
    "tokens of another library": (
        forward(tokens=TOKENS.numpy()),
        "tokens of type numpy.ndarray is not allowed because it must be a Tensor",
    ),
    "tokens in lists": (
        forward(tokens=[[1, 2]]),
        "tokens of type builtins.list is not allowed because it must be a Tensor",
    ),
    "documents of another library": (
        forward(documents=TOKENS.numpy()),
        "documents of type numpy.ndarray is not allowed",
    ),
    "targets in lists": (forward(targets=[[1]]), "targets of type builtins.list is not allowed"),
    "a memory that is none": (
        forward(memory={}),
        "memory of type builtins.dict is not allowed because it must be a Memory. Use start()",
    ),
    "half a row": (forward(rows=2.5), "rows=2.5 is not allowed because it is a float. Use a whole number"),
    "half a sequence": (lambda: start(2.5), "batch=2.5 is not allowed because it is a float"),
    "a capacity in words": (lambda: start(1, "9"), "capacity='9' is not allowed because it is a str"),
    "a capacity beyond everything": (
        lambda: start(1, 10**15),
        "capacity=1000000000000000 is not allowed because it is above 2,147,483,647",
    ),
    "generation of half a token": (
        generate(TOKENS, new=2.5),
        "max_new_tokens=2.5 is not allowed because it is a float",
    ),
    "a batch of nothing": (lambda: start(0), "batch=0 is not allowed because it is below 1"),
    "memory expanded to nothing": (
        lambda: start(1).expand(0),
        "times=0 is not allowed because a memory has at least one sequence",
    ),
    "prefill in chunks of nothing": (
        prefill(TOKENS, start(2), chunk=0),
        "chunk=0 is not allowed because it is below 1",
    ),
    "generation from nothing": (generate(TOKENS[:, :0]), "they are an empty prompt"),
    "stage past the encoder": (lambda: GSM(GEOMETRY, stages=[2, 6]), r"stages=.* \[6\] lie outside of layers 2 to 4"),
    "stage without a bank": (
        lambda: GSM(GEOMETRY, stages=[1]),
        r"stages=\[1\] is not allowed because window-only layers \[1\] have no bank. Use layers from 2 on",
    ),
    "stages out of order": (lambda: GSM(GEOMETRY, stages=[4, 2]), r"stages=\[4, 2\] .* must ascend"),
    "a state without entries": (lambda: GSM(GEOMETRY, state_size=0), "state_size=0 is not allowed .* at least 1 entry"),
    "bank past the encoder": (geometry(bank_layers=[2, 5]), r"bank_layers=.* \[5\] lie outside of layers 1 to 4"),
    "no bank": (geometry(bank_layers=[]), r"bank_layers=\[\] is not allowed"),
    "groups that do not divide": (geometry(output_groups=3), "output_groups=3 .* must divide heads=4"),
    "rotation wider than the index": (geometry(rotary_dim=8), "rotary_dim=8 .* must fit .* at most 6"),
    "a width of nothing": (geometry(top_k=0), "top_k=0 is not allowed because it must be a whole number of at least 1"),
    "decoder bank in the wrong place": (
        lambda: Baseline(replace(GEOMETRY, decoder_full=6)),
        "decoder_full=6 is not allowed .* first decoder layer, 5",
    ),
    "reindex past the end": (
        lambda: Baseline(replace(GEOMETRY, decoder_reindex=[9])),
        r"decoder_reindex=\[9\] .* \[9\] lie outside of layers 6 to 8",
    ),
    "one hyper-connected stream": (
        lambda: HyperConnection(8, streams=1),
        "streams=1 is not allowed .* Use residual plain",
    ),
    "odd rotation": (lambda: Rope(3, base=1e4), "rotary_dim=3 is not allowed .* even number"),
    "context scaled down": (
        lambda: Rope(4, base=1e4, factor=0.5),
        r"yarn_factor=0.5 is not allowed. Use at least 1 \(1: off\)",
    ),
    "a ramp that ends where it begins": (
        yarn(beta_fast=1.0),
        "yarn_beta_fast=1.0 is not allowed with yarn_beta_slow=1.0",
    ),
    "a ramp that begins at nothing": (yarn(beta_slow=0.0), "yarn_beta_slow=0.0 .* yarn_beta_slow > 0"),
    "a temperature below 0": (
        yarn(mscale=-1.0),
        r"yarn_mscale=-1.0 is not allowed. Use at least 0 \(0: no attention temperature\)",
    ),
    "blocks of one token": (mixer("nsa", block=1), "block=1 is not allowed because it is below 2"),
    "too few blocks": (mixer("nsa", blocks=2), "blocks=2 is not allowed because it is below 3"),
    "a window of nothing": (
        mixer("nsa", window=0),
        "window=0 is not allowed. Use at least 1 token, or null for the size's window",
    ),
    "key heads that do not divide the heads": (
        mixer("nsa", key_value_heads=3),
        "key_value_heads=3 is not allowed because it must divide the 4 query heads",
    ),
    "a mixture of layers on no scale": (
        lambda: ResidualAttention(
            GEOMETRY.shape(), geometry=GEOMETRY, name="encoder/2", first=False, key_value_heads=2, scale=0.0
        ),
        "scale=0.0 is not allowed because weights are divided by it",
    ),
    "a memory of another batch to take over": (
        lambda: start(1, 30).load(start(2, 30)),
        "memory for batch 2 and capacity 30 is not allowed because this one has batch 1 and capacity 30",
    ),
    "a memory of another capacity to take over": (
        lambda: start(1, 30).load(start(1, 31)),
        "memory for batch 1 and capacity 31 is not allowed because this one has batch 1 and capacity 30",
    ),
    "a growing memory to take over": (lambda: start(1, 30).load(start(1)), "capacity None is not allowed"),
    "a growing memory that is to take over another": (
        lambda: start(1).load(start(1, 30)),
        r"load\(\) into a growing memory is not allowed because it never changes",
    ),
    "negative temperature": (
        lambda: sample(torch.zeros(1, 3), -1.0),
        "temperature .* got -1.0",
    ),
    "top_p of nothing": (
        lambda: sample(torch.zeros(1, 3), 1.0, 0.0),
        "top_p .* got 0.0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_what_is_wrong_and_what_is_right(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("other", ["baseline-residual=mhc", "gsm-retriever=separate_indexer"])
def test_a_memory_of_another_model_is_refused(other):
    memory, model = build(other).start(2), build("gsm-retriever=shared_topk")
    with pytest.raises(
        ValueError, match="memory is not allowed because it was made by another model, or by a model with other sizes"
    ):
        model(TOKENS, memory=memory)


@pytest.mark.parametrize("capacity", [None, 40])
def test_a_memory_of_another_size_is_refused(capacity):
    message = r"with other sizes or dtype \(it has shared_state 9 x 8 float64 where this model has shared_state 7 x 8"
    with pytest.raises(ValueError, match=message):
        build("gsm-writer=additive")(TOKENS, memory=build("gsm-writer=additive", state_size=9).start(2, capacity))


def test_a_memory_from_before_a_change_of_dtype_is_refused():
    model = build("gsm-writer=additive")
    memory = model.start(2)
    message = r"it has encoder_window 4 x 8 float64 where this model has encoder_window 4 x 8 float32\)"
    with pytest.raises(ValueError, match=message):
        model.float()(TOKENS, memory=memory)
