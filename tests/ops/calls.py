"""Calls of every operation, in float64, arguments by name: one that is ordinary, and the sizes that have gone wrong.

`CASES[op][case]()` makes one. The first case of each operation is the ordinary one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from oracles import angles, normal, packed_positions, slot_ranges
from torch import Tensor


def attention(
    batch=2, rows=11, entries=17, heads=4, channels=32, pairs=8, width=5, ratio=2, k=4, padding=2, bias=False, seed=0
):
    """Arguments of `attend` and the slot ranges of its bank; k slots drawn at random, some of them -1."""
    position_BE = packed_positions(batch, entries, seed, padding)
    first, last, slots = slot_ranges(position_BE, ratio)
    position = position_BE[:, entries - rows :]
    cos, sin = angles(position, pairs)
    index = torch.randint(-2, max(slots, 1), (batch, rows, k), generator=torch.Generator().manual_seed(seed))
    call = {
        "query_BRHC": normal(batch, rows, heads, channels, seed=seed),
        "window_BEC": normal(batch, entries, channels, seed=seed + 1),
        "position_BR": position,
        "width": width,
        "sink_H": normal(heads, seed=seed + 2),
        "cos_BRP": cos,
        "sin_BRP": sin,
        "bank_BFC": normal(batch, slots, channels, seed=seed + 3),
        "index_BRK": index.clamp(min=-1) if slots else index.clamp(max=-1),
    }
    if bias:
        call["bias_BRK"] = normal(batch, rows, k, seed=seed + 7)
    return call, {"first_BR": first[:, entries - rows :], "last_BR": last[:, entries - rows :]}


def attending(**sizes) -> dict:
    return attention(**sizes)[0]


def band(**sizes) -> dict:
    call, _ = attention(**sizes)
    names = ("query_BRHC", "window_BEC", "position_BR", "width", "sink_H", "cos_BRP", "sin_BRP")
    return {name: call[name] for name in names}


def ranges(
    batch=2, rows=11, slots=17, heads=4, groups=2, channels=8, width=None, padding=2, seed=0, one_document=False
) -> dict:
    """Arguments of `attend_range`: slots are a stream of packed documents, and the rows stand at its end."""
    position = torch.arange(slots).expand(batch, -1) if one_document else packed_positions(batch, slots, seed, padding)
    place = torch.arange(slots)
    reach = position if width is None else position.clamp(max=width - 1)
    last = torch.where(position < 0, 0, place + 1)
    first = torch.where(position < 0, 0, place - torch.minimum(reach, place))
    return {
        "query_BRHC": normal(batch, rows, heads, channels, seed=seed),
        "key_BFGC": normal(batch, slots, groups, channels, seed=seed + 1),
        "value_BFGC": normal(batch, slots, groups, channels, seed=seed + 2),
        "first_BR": first[:, slots - rows :],
        "last_BR": last[:, slots - rows :],
        "width": width,
        "whole": one_document,
    }


def blocks(block=3, chosen=3, **sizes) -> dict:
    """Arguments of `attend_blocks`: those of `attend_range`, and blocks drawn at random, some of which are none. A row
    that is no padding sees its own block."""
    call = ranges(**sizes)
    first, last, groups = call["first_BR"], call["last_BR"], call["key_BFGC"].shape[2]
    own_BR = torch.where(last > first, (last - 1 - first).div(block, rounding_mode="floor"), -1)
    drawn = normal(*first.shape, groups, call["key_BFGC"].shape[1] // block + 1, seed=9).argsort(-1)[..., :chosen]
    drawn = torch.where((drawn < own_BR[..., None, None]) & (normal(*drawn.shape, seed=8) > -1), drawn, -1)
    chosen_BRGN = torch.cat([own_BR[..., None, None].expand(-1, -1, groups, -1), drawn], dim=-1)
    names = ("query_BRHC", "key_BFGC", "value_BFGC", "first_BR", "last_BR")
    return {**{name: call[name] for name in names}, "chosen_BRGN": chosen_BRGN, "block": block}


def integral(call: dict) -> dict:
    """Whole numbers: scores are exact in every dtype, and equal ones are frequent."""
    return {name: x.round() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


def selection(k=4, heads=2, width=8, seed=0, spread=1, **sizes) -> dict:
    """Arguments of `index_top_k`, in whole numbers."""
    call, ranges = attention(seed=seed, k=k, **sizes)
    batch, rows = call["position_BR"].shape
    student = {
        "query_BRJI": normal(batch, rows, heads, width, seed=seed + 4),
        "weight_BRJ": normal(batch, rows, heads, seed=seed + 5),
        "key_BFI": spread * normal(batch, call["bank_BFC"].shape[1], width, seed=seed + 6),
    }
    return {**integral(student), **ranges, "k": k}


def pooled_selection(pool=2, pooled=3, **sizes) -> dict:
    """The same, where each row may choose in some blocks alone, some of which are none."""
    call = selection(**sizes)
    shape = (*call["first_BR"].shape, pool)
    drawn = torch.randint(-1, 4, shape, generator=torch.Generator().manual_seed(sizes.get("seed", 0)))
    return {**call, "pool_BRN": drawn, "block": pooled}


def pool(blocks=2, block=2, **sizes) -> dict:
    """Arguments of `candidate_pool`, in whole numbers."""
    call = selection(**sizes)
    return {**{name: x for name, x in call.items() if name != "k"}, "blocks": blocks, "block": block}


def scoring(**sizes) -> dict:
    chosen = selection(**sizes)
    index = attention(**{name: size for name, size in sizes.items() if name != "width"})[0]["index_BRK"]
    numbers = {name: chosen[name] + normal(*chosen[name].shape, seed=9) / 8 for name in SEARCH}
    return {**numbers, "index_BRK": index}


SEARCH = ("query_BRJI", "weight_BRJ", "key_BFI")


def indexer(dense=True, pool=None, block=8, seed=0, **sizes) -> dict:
    """Arguments of `indexer_kl`: distinct visible slots, as a selection has them: every second that a row sees."""
    call, ranges = attention(seed=seed, **sizes)
    student = scoring(seed=seed, **sizes)
    index = call.pop("index_BRK").fill_(-1)
    for b, r in itertools.product(*map(range, index.shape[:2])):
        slots = torch.arange(int(ranges["first_BR"][b, r]), int(ranges["last_BR"][b, r]), 2)[: index.shape[2]]
        index[b, r, : len(slots)] = slots
    drawn = None
    if pool is not None:
        shape = (*index.shape[:2], pool)
        drawn = torch.randint(-1, 3, shape, generator=torch.Generator().manual_seed(seed))
    options = {"dense": dense, "pool_BRN": drawn, "block": block}
    return {**call, **ranges, "index_BRK": index, **{f"index_{name}": student[name] for name in SEARCH}, **options}


def hyper_connection(batch=2, rows=5, streams=4, width=6, rounds=3, like_a_model=False, seed=0) -> dict:
    """Arguments of `mhc_boundary`; those of a model have numbers as large whatever the width."""
    numbers = 2 * streams + streams * streams
    size = (streams * width) ** -0.5 if like_a_model else 1.0
    return {
        "streams_BRXD": normal(batch, rows, streams, width, seed=seed),
        "update_BRD": normal(batch, rows, width, seed=seed + 1),
        "phi": size * normal(numbers, streams * width, seed=seed + 2),
        "bias": normal(numbers, seed=seed + 3),
        "scale": normal(3, seed=seed + 4),
        "rounds": rounds,
    }


def recurrence(batch=2, tokens=37, heads=2, channels=4, rule=True, decay=True, by_channel=False, seed=0) -> dict:
    """Arguments of `delta_rule`: unit keys, documents of random lengths, padding in row 0 in two places."""
    position = packed_positions(batch, tokens, seed, padding=min(2, tokens - 1))
    position[0, tokens // 2 : tokens // 2 + 3] = -1
    shape = (batch, tokens, heads)
    return {
        "query_BTHC": normal(*shape, channels, seed=seed),
        "key_BTHC": torch.nn.functional.normalize(normal(*shape, channels, seed=seed + 1), dim=-1),
        "value_BTHC": normal(*shape, channels, seed=seed + 2),
        "beta_BTH": 2 * torch.sigmoid(normal(*shape, seed=seed + 3)) if rule else None,
        "log_decay_BTH": -normal(*shape, seed=seed + 4).abs() if decay else None,
        "start_BT": position <= 0,  # at padding, too, where it means nothing
        "live_BT": position >= 0,
        "state_BHCC": normal(batch, heads, channels, channels, seed=seed + 5),
        "scale": 0.7,
        "channel_decay_BTHC": -normal(*shape, channels, seed=seed + 6).abs() if by_channel else None,
    }


def slots(batch=2, tokens=37, heads=2, channels=4, slots=3, seed=0) -> dict:
    """Arguments of `slot_attention`: documents and padding as of `recurrence`; some slots are left alone."""
    call, shape = recurrence(batch, tokens, heads, channels, seed=seed), (batch, tokens, heads, slots)
    write = normal(*shape, seed=seed + 7).relu()
    return {
        **{name: call[name] for name in ("query_BTHC", "key_BTHC", "value_BTHC")},
        "write_BTHM": write,
        "log_decay_BTHM": -normal(*shape, seed=seed + 8).abs() * (write > 0),
        **{name: call[name] for name in ("start_BT", "live_BT")},
        "state_BHMU": normal(batch, heads, slots, 2 * channels, seed=seed + 9),
        "scale": 0.7,
    }


def documents_of_one_token(make, **sizes) -> dict:
    """The arguments of a recurrence where no token knows of another."""
    call = make(tokens=40, **sizes)
    return call | {name: torch.ones_like(call[name]) for name in ("start_BT", "live_BT")}


def norm(*shape: int, eps: float = 1e-6, pairs: int | None = None) -> dict:
    """Arguments of `rms_norm`; with a number of pairs, so many are rotated."""
    call = {"x": normal(*shape), "weight": normal(shape[-1], seed=1), "eps": eps}
    return call if pairs is None else {**call, **turns(*shape, pairs=pairs)}


def turned(*shape: int, pairs: int, inverse: bool = False) -> dict:
    """Arguments of `rotate`."""
    return {"x": normal(*shape), **turns(*shape, pairs=pairs), "inverse": inverse}


def turns(batch: int, rows: int, *_: int, pairs: int) -> dict:
    """Angles of the rows, another one for each."""
    cos, sin = angles(torch.arange(batch * rows).view(batch, rows), pairs)
    return {"cos_BRP": cos, "sin_BRP": sin}


def product(*shape: int, limit: float = 0.7) -> dict:
    return {"gate": 2 * normal(*shape), "up": 2 * normal(*shape, seed=1), "limit": limit}


def grouped(sizes=(3, 0, 5, 1), width=16) -> dict:
    """Arguments of `grouped_linear`: rows of four groups, some of which may be empty."""
    ends = torch.tensor(sizes).cumsum(0).int()
    return {"x_MD": normal(sum(sizes), width), "weight_END": normal(4, 8, width, seed=1), "end_E": ends}


def logits(rows=23, width=7, vocabulary=11, ignored=3, scale=1.0) -> dict:
    """Arguments of `linear_cross_entropy`; the first targets are ignored."""
    target = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(0))
    target[:ignored] = -100
    weight = scale * normal(vocabulary, width, seed=1)
    return {"hidden_ND": normal(rows, width), "weight_VD": weight, "target_N": target}


ATTENDED = {
    "several documents": {},
    "one row of each of three sequences": {"rows": 1, "batch": 3, "entries": 40, "width": 33},
    "as many rows as entries": {"rows": 17, "entries": 17},
    "a window wider than the stream": {"width": 40},
    "a window of one": {"width": 1, "rows": 4},
    "only padding in one row": {"padding": 17},
    "no row": {"rows": 0},
    "tiles that are not full": {"rows": 5, "entries": 71, "width": 50, "heads": 8},
    "more rows than a block": {"rows": 37, "entries": 40, "heads": 2, "width": 18, "k": 7},
    "narrow blocks": {"rows": 33, "entries": 33, "heads": 1, "width": 3},
    "a window longer than a part of a product": {"rows": 9, "entries": 300, "width": 200, "heads": 2, "batch": 1},
    "two channels": {"channels": 2, "pairs": 1, "rows": 3},
    "three heads of 6": {"heads": 3, "channels": 6, "pairs": 2, "k": 5},
    "twelve heads of 20": {"heads": 12, "channels": 20, "pairs": 3, "k": 9},
    "six heads": {"heads": 6, "rows": 4, "k": 3},
    "sixteen heads of 64": {"heads": 16, "channels": 64, "pairs": 4, "rows": 5},
    "more heads than lanes": {"heads": 40, "channels": 16, "rows": 3, "k": 17},
    "64 heads": {"heads": 64, "rows": 2},
    "128 channels, 32 heads": {"channels": 128, "pairs": 16, "heads": 32, "rows": 3},
    "nothing rotated": {"pairs": 0},
    "everything rotated": {"pairs": 16},
}
PICKED = {
    "an empty bank": {"ratio": 50, "rows": 4},
    "no slot selected": {"k": 0, "rows": 4},
    "a bias": {"bias": True, "rows": 4},
    "a bias of an empty bank": {"ratio": 50, "rows": 4, "bias": True},
    "a bias of no slot": {"k": 0, "rows": 4, "bias": True},
    "a bias of more picks than a tile": {"k": 70, "ratio": 1, "rows": 4, "bias": True},
    "a bias of more rows than a block": {"rows": 37, "entries": 40, "heads": 2, "width": 18, "k": 7, "bias": True},
    "a bias for twelve heads": {"heads": 12, "channels": 20, "pairs": 3, "k": 9, "bias": True},
    "a bank that is gathered": {"ratio": 1, "k": 1, "rows": 40, "entries": 43},
}
RANGES = {
    "several documents": {},
    "one row": {"rows": 1},
    "as many rows as slots": {"rows": 17, "padding": 0},
    "one key head": {"groups": 1},
    "a key head for every query head": {"groups": 4},
    "only padding in one row": {"padding": 17},
    "a window": {"width": 5},
    "a window, one row": {"width": 5, "rows": 1},
    "a window of one": {"width": 1},
    "a window wider than the stream": {"width": 40},
    "a window and more rows than a block": {"width": 18, "rows": 37, "slots": 40},
    "a window and padding": {"width": 3, "rows": 33, "slots": 40, "padding": 20},
    "one document": {"one_document": True, "rows": 17},
    "the end of one document": {"one_document": True},
    "one document through a window": {"one_document": True, "rows": 17, "width": 4},
}
BLOCKS = {
    "several documents": {},
    "one row": {"rows": 1},
    "as many rows as slots": {"rows": 17, "padding": 3},
    "one key head": {"groups": 1},
    "a key head for every query head": {"groups": 4},
    "only padding in one row": {"padding": 17},
    "one document": {"one_document": True, "rows": 17},
    "blocks of one slot": {"block": 1},
    "blocks larger than documents": {"block": 16},
    "its own block alone": {"chosen": 0},
}
SEARCHED = {
    "several documents": {"k": 2},
    "fewer slots than k": {"k": 20},
    "one row": {"rows": 1, "k": 2},
    "no bank": {"ratio": 50},
    "no row": {"rows": 0, "padding": 0},
    "a width that is no power of two": {"width": 24, "heads": 5, "rows": 4},
    "one slot per token": {"ratio": 1, "k": 3, "entries": 40, "rows": 30},
    "more rows than a tile": {"ratio": 1, "k": 5, "entries": 80, "rows": 66, "heads": 3, "batch": 1},
    "many slots": {"ratio": 1, "k": 5, "entries": 300, "rows": 6, "heads": 3, "padding": 0},
    "the gate's index heads": {"width": 64, "heads": 8, "ratio": 1, "entries": 40, "rows": 3, "k": 16},
}
SCORED = {
    "several documents": {"rows": 6},
    "one row": {"rows": 1, "padding": 0},
    "no bank": {"ratio": 50, "rows": 2},
    "no row": {"rows": 0, "padding": 0},
    "no slot selected": {"k": 0},
    "more rows than slots": {"rows": 20, "entries": 23, "k": 6, "batch": 1},
    "more places than a tile": {"rows": 3, "k": 40, "width": 24, "heads": 5},
    "many rows": {"rows": 40, "entries": 43, "ratio": 1},
}
LEARNED = {
    "several documents": {"rows": 5},
    "one row": {"rows": 1, "padding": 0},
    "no bank": {"ratio": 50, "rows": 2},
    "no row": {"rows": 0, "padding": 0},
    "the selected slots alone": {"rows": 4, "dense": False},
    "one row's selected slots": {"rows": 1, "padding": 0, "dense": False},
    "a pool": {"ratio": 1, "rows": 12, "entries": 20, "batch": 1, "pool": 2, "block": 3},
    "more slots asked for than there are": {"k": 12, "rows": 3},
    "more rows than a tile": {"rows": 36, "entries": 43, "heads": 2, "ratio": 1, "batch": 1, "padding": 1},
    "a width that is no power of two": {"heads": 20, "channels": 48, "pairs": 3, "rows": 3, "batch": 1},
    "a window wider than a tile": {"width": 70, "rows": 3, "entries": 80, "batch": 1, "padding": 0},
    "selected slots of many rows": {"rows": 36, "entries": 43, "ratio": 1, "batch": 1, "padding": 1, "dense": False},
    "sixteen heads": {"heads": 16, "channels": 64, "rows": 5},
}
STREAMS = {  # a tile of the kernels has 16 tokens forward, 8 and 16 back
    "four streams": {},
    "one round": {"rounds": 1, "batch": 1},
    "twenty rounds": {"rounds": 20, "batch": 1},
    "one stream": {"streams": 1, "width": 16, "rounds": 2},
    "two streams": {"streams": 2, "width": 48, "batch": 1, "rows": 17, "rounds": 2, "like_a_model": True},
    "eight streams": {"streams": 8, "width": 24, "batch": 1, "rows": 3, "rounds": 2, "like_a_model": True},
    "many columns": {"width": 160, "batch": 1, "rows": 9, "rounds": 2, "like_a_model": True},
    "one token": {"width": 32, "batch": 1, "rows": 1},
    "odd sizes": {"batch": 1, "rows": 33, "width": 7},
    "more tokens than a piece": {"rows": 300, "width": 48, "like_a_model": True},
    "no token": {"rows": 0},
}
CHUNKED = (2, 3, 31, 32, 33, 101)  # tokens around the chunks of 32
RULES = {
    " and ".join(name for name, on in kind.items() if on) or "sum": kind
    for on in itertools.product((True, False), repeat=3)
    for kind in [dict(zip(("rule", "decay", "by_channel"), on, strict=True))]
}
TURNED = [  # the ordinary one first; widths that are no power of two, heads, many rows, nothing, no row
    *(((2, 5, 8), 3), ((2, 33, 128), 16), ((1, 3, 4, 64), 32), ((2, 7, 3, 10), 2), ((3, 150, 6), 3)),
    *(((2, 3, 8), 0), ((2, 0, 8), 2), ((1, 2, 2), 1)),
]

Case = Callable[[], dict]


def sizes_of(build: Callable[..., dict], table: dict[str, dict]) -> dict[str, Case]:
    return {case: partial(build, **sizes) for case, sizes in table.items()}


CASES: Mapping[str, Mapping[str, Case]] = {
    "attend": sizes_of(attending, ATTENDED | PICKED),
    "attend_band": sizes_of(
        band,
        ATTENDED | {"programs that come round": {"rows": 40, "entries": 44, "width": 12, "heads": 8, "batch": 1}},
    ),
    "attend_range": sizes_of(ranges, RANGES),
    "attend_blocks": sizes_of(blocks, BLOCKS),
    "index_top_k": sizes_of(selection, SEARCHED)
    | {
        "a pool": partial(pooled_selection, k=3, ratio=1, entries=40, rows=30),
        "scores that seldom tie": partial(selection, k=5, ratio=1, entries=300, rows=6, heads=3, padding=0, spread=100),
        "a pool smaller than k": partial(pooled_selection, k=20, ratio=1, entries=40, rows=4, pool=1, pooled=2),
    },
    "candidate_pool": sizes_of(pool, SEARCHED)
    | {"blocks of three": partial(pool, block=3, ratio=1, entries=40, rows=4)},
    "score_slots": sizes_of(scoring, SCORED),
    "indexer_kl": sizes_of(indexer, LEARNED),
    "mhc_boundary": sizes_of(hyper_connection, STREAMS),
    "rms_norm": {
        str(shape): partial(norm, *shape)
        for shape in ((2, 5, 8), (1, 1, 128), (2, 3, 100), (2, 5, 7), (0, 64), (8,), (33, 128), (2, 33, 4, 65))
    }
    | {"a large eps": partial(norm, 7, 8, eps=0.5), "no eps": partial(norm, 5, 128, eps=0.0)}
    | {"(3, 2048)": partial(norm, 3, 2048), "(2, 8192)": partial(norm, 2, 8192), "(700, 32)": partial(norm, 700, 32)}
    | {f"{shape}, {pairs} pairs turned": partial(norm, *shape, pairs=pairs) for shape, pairs in TURNED},
    "rotate": {f"{shape}, {pairs} pairs": partial(turned, *shape, pairs=pairs) for shape, pairs in TURNED}
    | {"back": partial(turned, 2, 5, 3, 8, pairs=3, inverse=True)},
    "swiglu": {
        str(shape): partial(product, *shape)
        for shape in ((2, 5, 8), (1, 1, 128), (2, 5, 7), (3, 2), (0, 4), (2, 33, 4, 65), (700, 32))
    }
    | {"hardly clamped": partial(product, 2, 5, 8, limit=10.0)},
    "delta_rule": {
        f"{rule}, {tokens} tokens": partial(recurrence, tokens=tokens, **kind)
        for tokens in (23, *CHUNKED)
        for rule, kind in RULES.items()
    }
    | {"documents of one token": partial(documents_of_one_token, recurrence, by_channel=True)},
    "slot_attention": {f"{tokens} tokens": partial(slots, tokens=tokens) for tokens in (23, *CHUNKED)}
    | {"documents of one token": partial(documents_of_one_token, slots)},
    "grouped_linear": {
        str(sizes): partial(grouped, sizes)
        for sizes in ((3, 0, 5, 1), (0, 0, 9, 0), (9, 0, 0, 0), (0, 0, 0, 9), (2, 2, 2, 3))
    },
    "linear_cross_entropy": {
        "some targets ignored": partial(logits, rows=9),
        "all targets ignored": partial(logits, rows=4, ignored=4),
        "no row": partial(logits, rows=0, ignored=0),
        "one word": partial(logits, rows=9, vocabulary=1),
        "64 words": partial(logits, rows=9, vocabulary=64),
        "100 words": partial(logits, rows=9, vocabulary=100),
        "confident and wrong": partial(logits, rows=9, scale=1e4),
    },
}


WHOLE = {"heads": 32, "channels": 128, "pairs": 16, "rows": 150, "entries": 500, "width": 256, "k": 129}
TAUGHT = {"rows": 300, "entries": 420, "heads": 32, "channels": 128, "pairs": 16, "width": 128, "k": 40}
MODELS: dict[str, list[Case]] = {  # calls of a model's sizes, which only a GPU computes in reasonable time
    "attend": [
        partial(attending, **{**WHOLE, "heads": heads, "channels": channels, "bias": channels == 64})
        for heads in (32, 64)
        for channels in (64, 128)
    ],
    "attend_band": [partial(band, **{**WHOLE, "heads": heads}) for heads in (32, 64)],
    "score_slots": [
        partial(scoring, rows=300, entries=420, heads=4, width=width, k=130, ratio=1) for width in (32, 64, 128)
    ],
    "indexer_kl": [
        partial(indexer, **TAUGHT, dense=False),
        *(partial(indexer, **{**TAUGHT, **size}) for size in ({}, {"heads": 64, "ratio": 1}, {"heads": 4})),
    ],
    "mhc_boundary": [
        partial(hyper_connection, rounds=20, like_a_model=True, width=width, rows=rows)
        for width, rows in ((2048, 300), (1024, 2100))
    ],
    "rms_norm": [partial(norm, *shape) for shape in ((16384, 2048), (1000, 128), (301, 1000))],
    "swiglu": [partial(product, 16384, 2048)],
    "linear_cross_entropy": [
        partial(logits, rows=5000, width=256, vocabulary=vocabulary, scale=0.3) for vocabulary in (50304, 50257)
    ],
}


def every_call() -> dict[str, dict]:
    """The ordinary call of every operation."""
    return {op: next(iter(cases.values()))() for op, cases in CASES.items()}


def cast(call: dict, dtype: torch.dtype) -> dict:
    """The call with its floating-point tensors in another dtype."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


def with_leaves(call: dict) -> dict:
    """The call with fresh leaves that require a gradient in place of its floating-point tensors, angles excepted."""
    fixed = ("cos_BRP", "sin_BRP")
    return {
        k: v.detach().clone().requires_grad_(k not in fixed) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in call.items()
    }


def outputs(result) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def probe(result) -> Tensor | int:
    """A scalar that weighs every differentiable output number differently."""
    total = 0
    for seed, out in enumerate(outputs(result)):
        if out.requires_grad:
            total = total + (out.to(torch.float64) * normal(*out.shape, seed=50 + seed)).sum()
    return total


def gradients(function, call: dict) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs, and the gradient of their probe for every floating-point argument (None where nothing flows)."""
    call = with_leaves(call)
    result = function(**call)
    scalar = probe(result)
    if isinstance(scalar, Tensor):
        scalar.backward()
    grads = {k: v.grad for k, v in call.items() if isinstance(v, Tensor) and v.requires_grad}
    return [out.detach() for out in outputs(result)], grads
