"""One small, ordinary call of every operation: arguments by name, for the checks that all of them must pass."""

from __future__ import annotations

import torch
from oracles import angles, normal, packed_positions, slot_ranges
from torch import Tensor


def attention(batch=2, rows=11, entries=17, heads=4, channels=32, pairs=8, width=5, ratio=2, k=4, padding=2, seed=0):
    """Arguments of `attend` and the slot ranges of its bank, float64; k slots drawn at random, some of them -1."""
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
    return call, {"first_BR": first[:, entries - rows :], "last_BR": last[:, entries - rows :]}


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
    own = first.shape[1] == call["key_BFGC"].shape[1]
    return {**{name: call[name] for name in names}, "chosen_BRGN": chosen_BRGN, "block": block, "own": own}


def selection(k=4, heads=2, width=8, seed=0, **sizes) -> dict:
    call, ranges = attention(seed=seed, k=k, **sizes)
    batch, rows = call["position_BR"].shape
    return {
        "query_BRJI": normal(batch, rows, heads, width, seed=seed + 4),
        "weight_BRJ": normal(batch, rows, heads, seed=seed + 5),
        "key_BFI": normal(batch, call["bank_BFC"].shape[1], width, seed=seed + 6),
        **ranges,
        "k": k,
    }


def scoring(**sizes) -> dict:
    chosen = selection(**sizes)
    names = ("query_BRJI", "weight_BRJ", "key_BFI")
    return {**{name: chosen[name] for name in names}, "index_BRK": attention(**sizes)[0]["index_BRK"]}


def indexer(seed=0, **sizes) -> dict:
    call, ranges = attention(seed=seed, **sizes)
    chosen = selection(seed=seed, **sizes)
    student = {f"index_{name}": chosen[name] for name in ("query_BRJI", "weight_BRJ", "key_BFI")}
    index = call.pop("index_BRK")
    return {**call, **ranges, "index_BRK": index, **student}


def hyper_connection(batch=2, rows=5, streams=4, width=6, seed=0) -> dict:
    numbers = 2 * streams + streams * streams
    return {
        "streams_BRXD": normal(batch, rows, streams, width, seed=seed),
        "update_BRD": normal(batch, rows, width, seed=seed + 1),
        "phi": normal(numbers, streams * width, seed=seed + 2),
        "bias": normal(numbers, seed=seed + 3),
        "scale": normal(3, seed=seed + 4),
    }


def recurrence(batch=2, tokens=37, heads=2, channels=4, rule=True, decay=True, by_channel=False, seed=0) -> dict:
    """Arguments of `delta_rule`, float64: unit keys, documents of random lengths, padding in row 0 in two places."""
    position = packed_positions(batch, tokens, seed, padding=min(2, tokens - 1))
    position[0, tokens // 2 : tokens // 2 + 3] = -1
    shape = (batch, tokens, heads)
    return {
        "query_BTHC": normal(*shape, channels, seed=seed),
        "key_BTHC": torch.nn.functional.normalize(normal(*shape, channels, seed=seed + 1), dim=-1),
        "value_BTHC": normal(*shape, channels, seed=seed + 2),
        "beta_BTH": 2 * torch.sigmoid(normal(*shape, seed=seed + 3)) if rule else None,
        "log_decay_BTH": -normal(*shape, seed=seed + 4).abs() if decay else None,
        "start_BT": position == 0,
        "live_BT": position >= 0,
        "state_BHCC": normal(batch, heads, channels, channels, seed=seed + 5),
        "scale": 0.7,
        "channel_decay_BTHC": -normal(*shape, channels, seed=seed + 6).abs() if by_channel else None,
    }


def slots(batch=2, tokens=37, heads=2, channels=4, slots=3, seed=0) -> dict:
    """Arguments of `slot_attention`, float64: documents and padding as of `recurrence`; some slots are left alone."""
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


def convolved(batch=2, tokens=13, stored=2, channels=5, width=4, padding=2, before=0, seed=0) -> dict:
    """Arguments of `short_convolution`, float64: documents of random lengths, padding in row 0 in two places, and in
    front of what is stored so many tokens more that are not."""
    position = packed_positions(batch, before + stored + tokens, seed, padding)[:, before + stored :]
    position[0, tokens // 2 : tokens // 2 + padding] = -1
    return {
        "seen_BEC": normal(batch, stored + tokens, channels, seed=seed),
        "weight": normal(channels, width, seed=seed + 1),
        "position_BT": position,
    }


def every_call() -> dict[str, dict]:
    pooled = {k: v for k, v in selection().items() if k != "k"}
    hyper = hyper_connection()
    target = torch.tensor([3, -100, 0, 6, 6, 1])
    return {
        "attend": attention()[0],
        "attend_band": band(),
        "attend_range": ranges(),
        "attend_blocks": blocks(),
        "index_top_k": selection(),
        "candidate_pool": {**pooled, "blocks": 2, "block": 2},
        "score_slots": scoring(),
        "indexer_kl": indexer(),
        "pool_groups": {
            "value_BSC": normal(2, 9, 4, seed=1),
            "gate_BSC": normal(2, 9, 4, seed=2),
            "end_BF": torch.tensor([[1, 3, 8], [2, 6, -1]]),
            "ratio": 2,
        },
        "mhc_boundary": {**hyper, "rounds": 3},
        "rms_norm": {"x": normal(2, 5, 8), "weight": normal(8, seed=1)},
        "swiglu": {"gate": normal(2, 5, 8), "up": normal(2, 5, 8, seed=1), "limit": 0.7},
        "short_convolution": convolved(),
        "delta_rule": recurrence(by_channel=True),
        "slot_attention": slots(),
        "grouped_linear": {
            "x_MD": normal(9, 4),
            "weight_END": normal(4, 5, 4, seed=1),
            "end_E": torch.tensor([3, 3, 8, 9], dtype=torch.int32),  # the second group is empty
        },
        "linear_cross_entropy": {"hidden_ND": normal(6, 5), "weight_VD": normal(7, 5, seed=1), "target_N": target},
    }


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


def probe(result) -> Tensor:
    """A scalar that weighs every differentiable output number differently."""
    total = 0
    for seed, out in enumerate(outputs(result)):
        if out.requires_grad:
            total = total + (out.to(torch.float64) * normal(*out.shape, seed=50 + seed)).sum()
    return total


def gradients(function, call: dict) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradient of their probe for every floating-point argument (None where nothing flows)."""
    call = with_leaves(call)
    result = function(**call)
    scalar = probe(result)
    if isinstance(scalar, Tensor):
        scalar.backward()
    grads = {k: v.grad for k, v in call.items() if isinstance(v, Tensor) and v.requires_grad}
    return [out.detach() for out in outputs(result)], grads
