"""Models, parts and analyses refuse a wrong value by its key. Data: test_data_refusals; yamls: test_configs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from small import GEOMETRY, build, random_tokens, variant
from torch import nn

from gsm.analysis import probes
from gsm.analysis.interventions import without_stage
from gsm.analysis.rollout import state_routes
from gsm.cache.memory import Memory
from gsm.costs.model import cost
from gsm.engine import Engine
from gsm.layers.experts import MixtureOfExperts
from gsm.layers.indexer_training import KL
from gsm.layers.key_value import KeyValue
from gsm.layers.residual import HyperConnection
from gsm.layers.residual_attention import ResidualAttention
from gsm.layers.rope import Rope
from gsm.layers.sliding_window import SlidingWindow
from gsm.models.baseline import Baseline
from gsm.models.decoder_only import DecoderOnly
from gsm.models.gsm import GSM
from gsm.models.sampling import sample
from gsm.observe import record
from gsm.slots.encoder_layer import Attention, Recurrent
from gsm.training.callbacks.selection import DenseFirst
from gsm.training.distributed.sharded import Sharded
from gsm.training.optimizer import AdamW, Muon

TOKENS = random_tokens(2, 6)
MODEL = "gsm-writer=additive"
GIVEN: dict[str, Any] = {"shape": GEOMETRY.shape(), "geometry": GEOMETRY, "name": "encoder/2"}


def forward(**arguments: Any) -> Callable[[], object]:
    return lambda: build(MODEL)(**{"tokens": TOKENS, **arguments})


def geometry(**fields: Any) -> Callable[[], object]:
    return partial(replace, GEOMETRY, **fields)


def start(batch: Any, capacity: Any = None, **options: Any) -> Memory:
    return build(MODEL, **options).start(batch, capacity)


def starts(batch: Any, capacity: Any = None) -> Callable[[], object]:
    return partial(start, batch, capacity)


def generate(prompt: Any, new: Any = 2, **options: Any) -> Callable[[], object]:
    return lambda: build(MODEL).generate(prompt, new, **options)


def prefill(prompt: Any, memory: Memory, **options: Any) -> Callable[[], object]:
    return lambda: build(MODEL).prefill(prompt, memory, **options)


@torch.no_grad()
def used(batch: int, capacity: int | None) -> Memory:
    memory = start(batch, capacity)
    return build(MODEL)(TOKENS[:batch], memory=memory).memory


def mixer(name: str, **options: Any) -> Callable[[], object]:
    return lambda: variant("mixer", name)(**GIVEN, **options)


def yarn(**options: Any) -> Callable[[], object]:
    return partial(Rope, 4, **{"base": 1e4, "factor": 2.0, **options})


def gsm(**options: Any) -> Callable[[], object]:
    return partial(GSM, GEOMETRY, **options)


def stack(*layers: str) -> Callable[[], object]:
    mixers = {"window": SlidingWindow, "all": variant("mixer", "attention")}
    return partial(DecoderOnly, GEOMETRY, mixers=mixers, layers=layers)


def experts(**options: Any) -> Callable[[], object]:
    return partial(MixtureOfExperts, 8, 12, **{"experts": 6, "chosen": 2, **options})


def optimizer(**options: Any) -> Callable[[], object]:
    usual = {"learning_rate": 1e-3, "warmup_steps": 2, "final_fraction": 0.1, "weight_decay": 0.1}
    return partial(Muon if {"momentum", "iterations", "adamw_factor"} & {*options} else AdamW, **{**usual, **options})


def routes(case: str, **call: Any) -> None:
    model: Any = build(case)
    with torch.no_grad(), record("*") as seen:
        model(random_tokens(1, 30), **call)
    state_routes(model, seen)


def costs(case: str, *call: Any, **options: Any) -> None:
    cost(build(case, **options)).forward_flops(*call)


def costs_of_a_mixer_without_any() -> None:
    model: Any = build("transformer")
    model.decoder.blocks[1].attention = nn.Identity()
    cost(model)


CALLS = [  # of a model
    ("tokens", forward(tokens=TOKENS + 23)),
    ("tokens", forward(tokens=TOKENS - 23)),
    ("tokens", forward(tokens=TOKENS[:, :0])),
    ("tokens", forward(tokens=TOKENS[0])),
    ("tokens", forward(tokens=TOKENS.double())),
    ("tokens", forward(tokens=TOKENS.numpy())),
    ("tokens", forward(tokens=[[1, 2]])),
    ("documents", forward(documents=TOKENS[:, 1:])),
    ("documents", forward(documents=TOKENS.float())),
    ("documents", forward(documents=TOKENS.numpy())),
    ("documents", prefill(TOKENS, start(2), documents=TOKENS.float())),
    ("documents", lambda: Engine(build(MODEL), batch=2, capacity=8).prefill(TOKENS, TOKENS.float())),
    ("documents", prefill([TOKENS[0], TOKENS[1, :2]], used(2, None))),
    ("targets", forward(targets=TOKENS.double())),
    ("targets", forward(targets=TOKENS > 3)),
    ("targets", forward(targets=TOKENS[:1])),
    ("targets", forward(targets=TOKENS + 23)),
    ("targets", forward(targets=[[1]])),
    ("rows", forward(rows=0)),
    ("rows", forward(rows=7)),
    ("rows", forward(rows=2.5)),
    ("rows", forward(rows=-3, targets=TOKENS, memory=start(2))),
    ("memory", forward(memory=start(3))),
    ("memory", forward(tokens=TOKENS.to("meta"), memory=start(2))),
    ("memory", forward(memory={})),
    ("memory", forward(memory=build("baseline-residual=mhc").start(2))),
    ("memory", forward(memory=build("gsm-retriever=separate_indexer").start(2))),
    ("memory", forward(memory=start(2, state_size=9))),
    ("memory", forward(memory=start(2, 40, state_size=9))),
    ("memory", lambda: build(MODEL).float()(TOKENS, memory=start(2))),
    ("memory", lambda: build("delta_product")(TOKENS, memory=build("delta_net").start(2))),
    ("capacity", starts(1, 0)),
    ("capacity", starts(1, "9")),
    ("capacity", starts(1, 10**15)),
    ("capacity", prefill(TOKENS, start(2, 5), chunk=2)),
    ("capacity", prefill(TOKENS[:, :3], used(2, 8))),
    ("capacity", generate(TOKENS, new=3, capacity=7)),
    ("capacity", lambda: Engine(build(MODEL), capacity=None)),  # type: ignore[arg-type]
    ("capacity", lambda: start(1).load(start(1, 30))),
    ("other", lambda: start(1, 30).load(start(2, 30))),
    ("other", lambda: start(1, 30).load(start(1, 31))),
    ("other", lambda: start(1, 30).load(start(1))),
    ("batch", starts(0)),
    ("batch", starts(2.5)),
    ("times", lambda: start(1).expand(0)),
    ("chunk", prefill(TOKENS, start(2), chunk=0)),
    ("max_new_tokens", generate(TOKENS, new=0)),
    ("max_new_tokens", generate(TOKENS, new=2.5)),
    ("prompts", generate([])),
    ("prompts[1]", generate([TOKENS[0], TOKENS[0, :0]])),
    ("tokens", generate(TOKENS[:, :0])),
    *((name, generate([1, 2], **{name: None})) for name in ("temperature", "top_p")),
    ("temperature", generate([1, 2], temperature="1")),
    ("temperature", lambda: sample(torch.zeros(1, 3), -1.0)),
    ("top_p", lambda: sample(torch.zeros(1, 3), 1.0, 0.0)),
    ("token_B", lambda: Engine(build(MODEL), capacity=20).decode(3)),  # type: ignore[arg-type]
]
PARTS = [
    ("stages", gsm(stages=[2, 6])),
    ("stages", gsm(stages=[1])),
    ("stages", gsm(stages=[4, 2])),
    ("state_size", gsm(state_size=0)),
    ("state_size", gsm(state_size=1, writer=variant("writer", "delta"))),
    ("model.writer.slots", gsm(writer=variant("writer", "multi_slot"))),
    ("bank_layers", geometry(bank_layers=[2, 5])),
    ("bank_layers", geometry(bank_layers=[])),
    ("output_groups", geometry(output_groups=3)),
    ("rotary_dim", geometry(rotary_dim=8)),
    ("top_k", geometry(top_k=0)),
    ("decoder_full", lambda: Baseline(replace(GEOMETRY, decoder_full=6))),
    ("decoder_reindex", lambda: Baseline(replace(GEOMETRY, decoder_reindex=[9]))),
    ("streams", partial(HyperConnection, 8, streams=1)),
    ("rotary_dim", partial(Rope, 3, base=1e4)),
    ("yarn_factor", yarn(factor=0.5)),
    ("yarn_beta_fast", yarn(beta_fast=1.0)),
    ("yarn_beta_fast", yarn(beta_slow=0.0)),
    ("yarn_mscale", yarn(mscale=-1.0)),
    ("yarn_original", yarn()),
    ("layers", stack("windw")),
    ("layers", stack()),
    ("layers", stack("all")),
    ("layers", stack(*["all", "window"] * 5)),
    ("window", partial(SlidingWindow, **GIVEN, window=0)),
    ("key_value_heads", partial(KeyValue, GEOMETRY.shape(), 3)),
    ("scale", partial(ResidualAttention, **GIVEN, first=False, key_value_heads=2, scale=0.0)),
    ("block", mixer("nsa", block=1)),
    ("blocks", mixer("nsa", blocks=2)),
    ("window", mixer("nsa", window=0)),
    ("key_value_heads", mixer("nsa", key_value_heads=3)),
    ("largest_beta", mixer("delta_net", largest_beta=2.5)),
    ("steps", mixer("delta_product", steps=0)),
    ("convolution", mixer("linear_attention", convolution=0)),
    ("slots", mixer("gsa", slots=0)),
    ("damping", mixer("gsa", damping=0.0)),
    ("top_k", mixer("raven", top_k=9)),
    ("rotated", mixer("mamba3", rotated=3)),
    ("heads", lambda: Recurrent(variant("mixer", "gated_delta_net"), heads=0)),
    ("roles", lambda: Recurrent(variant("mixer", "gated_delta_net"), roles=[])),
    ("roles", lambda: Recurrent(variant("mixer", "gated_delta_net"), roles=["reuse", "full"])),
    ("feed_forward_convolution", partial(Attention, feed_forward_convolution=0)),
    ("feed_forward_convolution", lambda: build("delta_net", feed_forward_convolution=1025)),
    ("chosen", experts(chosen=7)),
    ("chosen", experts(chosen=0)),
    ("feed_forward_dim", experts(chosen=4)),
    ("model.indexer_training.beyond", lambda: KL(beyond="all")),  # type: ignore[arg-type]
    ("until", partial(DenseFirst, -0.1, 0.2)),
    ("until", partial(DenseFirst, 0.8, 0.3)),
    *((name, optimizer(**{name: -1})) for name in ("learning_rate", "final_fraction", "weight_decay", "warmup_steps")),
    ("decay_fraction", optimizer(decay_fraction=1.5)),
    ("schedule", optimizer(schedule="cosin")),
    ("betas", optimizer(betas=(0.9, 1.0))),
    ("momentum", optimizer(momentum=1.0)),
    ("iterations", optimizer(iterations=0)),
    ("adamw_factor", optimizer(adamw_factor=-1.0)),
    ("gathered", lambda: Sharded(gathered="float8")),  # type: ignore[arg-type]
]
MEASURES = [  # of a model
    ("rows", partial(routes, "gsm", rows=1)),
    ("encoder_layer", partial(routes, "gsm-encoder_layer=recurrent")),
    ("stage", lambda: without_stage(build("gsm-residual=plain"), 3).__enter__()),  # type: ignore[arg-type]
    ("distance", lambda: probes.by_distance(build("gsm"), TOKENS, [4], [5])),
    ("model", lambda: probes.states(build("transformer"), TOKENS, [3])),
    ("Linear", partial(costs, "gsm", 1, feed_forward=lambda dim, hidden_dim: nn.Linear(dim, dim))),
    ("Identity", costs_of_a_mixer_without_any),
    ("candidate_blocks", partial(costs, "baseline-pool")),
    *(("tokens", partial(costs, MODEL, *call)) for call in ((0, None, 0), (4, 5, 0), (4, None, -1))),
]


@pytest.mark.parametrize(("key", "call"), [*CALLS, *PARTS, *MEASURES], ids=lambda x: x if isinstance(x, str) else None)
def test_a_wrong_value_is_refused_by_its_key(key: str, call: Callable[[], object]):
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}(?![\w.])"):
        call()


def test_a_memory_of_another_size_is_told_from_this_one():
    with pytest.raises(ValueError, match=r"shared_state 9 x 8 float64 .* shared_state 7 x 8"):
        build(MODEL)(TOKENS, memory=start(2, state_size=9))
