"""Random packed streams, and every operation as a slow loop written from its formula, with ordinary autograd.

`ORACLES` gives the loop of an operation; it takes the values of a call, in their order.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def packed_positions(batch: int, entries: int, seed: int = 0, padding: int = 0) -> Tensor:
    """Positions [B,E] of documents of random lengths that differ between batch rows; row 0 ends in `padding`."""
    rows = []
    for row in range(batch):
        lengths = torch.randint(1, 12, (max(entries, 1),), generator=seeded(100 * seed + row)).tolist()
        rows.append(torch.cat([torch.arange(length) for length in lengths])[:entries])
    position = torch.stack(rows)
    position[0, entries - padding :] = -1
    return position


def slot_ranges(position_BE: Tensor, ratio: int) -> tuple[Tensor, Tensor, int]:
    """first, last [B,E] of a bank with one slot per finished group of `ratio` tokens, and its number of slots."""
    finished = ((position_BE >= 0) & ((position_BE + 1) % ratio == 0)).long().cumsum(1)
    last = torch.where(position_BE < 0, 0, finished)
    return last - (position_BE + 1) // ratio, last, int(finished.max())


def angles(position_BR: Tensor, pairs: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    frequency = 10.0 ** -torch.arange(pairs, dtype=torch.float64)
    angle = position_BR.clamp(min=0)[..., None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x_C: Tensor, cos_P: Tensor, sin_P: Tensor, sign: int = 1) -> Tensor:
    """One vector rotated pair by pair."""
    pairs = cos_P.shape[0]
    kept_C, rotated_C = x_C.split([x_C.shape[0] - 2 * pairs, 2 * pairs])
    a_P, b_P = rotated_C.reshape(pairs, 2).unbind(1)
    c_P, s_P = cos_P, sign * sin_P
    return torch.cat([kept_C, torch.stack((a_P * c_P - b_P * s_P, a_P * s_P + b_P * c_P), dim=1).flatten()])


def naive_rotation(x, cos_BRP, sin_BRP, inverse=False) -> Tensor:
    """Pair by pair; heads are optional."""
    rows = x[:, :, None] if x.ndim == 3 else x
    places = itertools.product(*map(range, rows.shape[:3]))
    out = [turned(rows[b, r, h], cos_BRP[b, r], sin_BRP[b, r], -1 if inverse else 1) for b, r, h in places]
    return torch.stack(out).view(x.shape) if out else x.clone()


def naive_norm(x, weight, eps, cos_BRP=None, sin_BRP=None) -> Tensor:
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed if cos_BRP is None else naive_rotation(normed, cos_BRP, sin_BRP)


def sees(position_BR: Tensor, entries: int, width: int, batch: int, row: int) -> list[int]:
    """Stream places that a row's window holds."""
    place = entries - position_BR.shape[1] + row
    position = int(position_BR[batch, row])
    return [i for i in range(entries) if position >= 0 and place - min(position, width - 1) <= i <= place]


def naive_attend(query, window, position, width, sink, cos, sin, bank=None, index=None, bias=None) -> Tensor:
    out = torch.zeros_like(query)
    rows = []
    for b in range(query.shape[0]):
        for r in range(query.shape[1]):
            seen = [window[b, i] for i in sees(position, window.shape[1], width, b, r)]
            picked = [] if index is None else [(k, slot) for k, slot in enumerate(index[b, r].tolist()) if slot >= 0]
            added = [0.0] * len(seen) + [0.0 if bias is None else bias[b, r, k] for k, _ in picked]
            seen += [bank[b, slot] for _, slot in picked]
            for h in range(query.shape[2]):
                q = turned(query[b, r, h], cos[b, r], sin[b, r])
                logit = [q @ entry / query.shape[3] ** 0.5 + extra for entry, extra in zip(seen, added, strict=True)]
                weight = [torch.exp(one) for one in logit]
                total = sum(weight, torch.exp(sink[h]))
                mixed = sum((w * entry for w, entry in zip(weight, seen, strict=True)), torch.zeros_like(q)) / total
                rows.append(turned(mixed, cos[b, r], sin[b, r], -1))
    return torch.stack(rows).view(out.shape) if rows else out


def naive_scores(query, weight, key, b: int, r: int) -> list[Tensor]:
    heads = range(query.shape[2])
    return [sum(weight[b, r, j] * torch.relu(query[b, r, j] @ k) for j in heads) for k in key[b]]


def choosable(first, last, pool, block: int, b: int, r: int) -> list[int]:
    slots = range(int(first[b, r]), int(last[b, r]))
    return [f for f in slots if pool is None or (f - int(first[b, r])) // block in pool[b, r].tolist()]


def best(scores: dict[int, float], k: int) -> list[int]:
    """The k keys with the highest values above -inf, ties to the lowest key, ascending, -1 at the end."""
    scores = {key: score for key, score in scores.items() if score > -torch.inf}
    chosen = sorted(sorted(scores, key=lambda slot: (-scores[slot], slot))[:k])
    return chosen + [-1] * (k - len(chosen))


def naive_top_k(query, weight, key, first, last, k, pool=None, block=8) -> Tensor:
    def row(b: int, r: int) -> list[int]:
        scores = naive_scores(query, weight, key, b, r)
        return best({f: scores[f].item() for f in choosable(first, last, pool, block, b, r)}, k)

    return chosen_by(row, query, k)


def naive_pool(query, weight, key, first, last, blocks, block=8) -> Tensor:
    def row(b: int, r: int) -> list[int]:
        scores, maxima = naive_scores(query, weight, key, b, r), {}
        for f in choosable(first, last, None, block, b, r):
            ordinal = (f - int(first[b, r])) // block
            maxima[ordinal] = max(maxima.get(ordinal, -torch.inf), scores[f].nan_to_num(-torch.inf, torch.inf).item())
        if maxima:
            maxima[max(maxima)] = torch.inf
        return best(maxima, blocks)

    return chosen_by(row, query, blocks)


def chosen_by(row, query_BRJI: Tensor, k: int) -> Tensor:
    batch, rows = query_BRJI.shape[:2]
    chosen = [row(b, r) for b, r in itertools.product(range(batch), range(rows))]
    return torch.tensor(chosen, dtype=torch.int64).view(batch, rows, k)


def naive_slot_scores(query_BRJI, weight_BRJ, key_BFI, index_BRK) -> Tensor:
    score = torch.zeros(index_BRK.shape, dtype=torch.float64)
    for b, r, k in (index_BRK >= 0).nonzero().tolist():
        score[b, r, k] = naive_scores(query_BRJI, weight_BRJ, key_BFI, b, r)[index_BRK[b, r, k]]
    return score


def naive_kl(query, window, position, width, sink, cos, sin, bank, first, last, index, iq, iw, ik, dense, pool, block):
    """(loss, recall) by the formula, row by row; the teacher is detached, and a selection alone has no recall."""
    losses, recalls, rows = [torch.zeros((), dtype=torch.float64)], [], int((position >= 0).sum())
    for b, r in [(b, r) for b in range(query.shape[0]) for r in range(query.shape[1]) if position[b, r] >= 0]:
        slots = choosable(first, last, pool, block, b, r) if dense else [f for f in index[b, r].tolist() if f >= 0]
        if not slots:
            continue
        near = [window[b, i] for i in sees(position, window.shape[1], width, b, r)]
        mass = torch.zeros(len(slots), dtype=torch.float64)
        for h in range(query.shape[2]):
            q = turned(query[b, r, h], cos[b, r], sin[b, r]) / query.shape[3] ** 0.5
            far = torch.stack([torch.exp(q @ bank[b, f]) for f in slots])
            mass += (far / (far.sum() + sum(torch.exp(q @ entry) for entry in near) + torch.exp(sink[h]))).detach()
        teacher = mass / mass.sum()
        scores = naive_scores(iq, iw, ik, b, r)
        model = torch.log_softmax(torch.stack([scores[f] for f in slots]), 0)
        losses.append((teacher * (teacher.log() - model)).sum())
        recalls.append(sum(p for p, f in zip(teacher.tolist(), slots, strict=True) if f in index[b, r].tolist()))
    recall = torch.tensor(recalls).mean() if dense else torch.tensor(torch.nan)
    return sum(losses) / max(rows, 1), recall


def naive_mhc(streams_BRXD, update_BRD, phi, bias, scale, rounds=20, eps=1e-6, hc_eps=1e-6):
    """(streams, mixed) with ordinary autograd, tokens first."""
    streams, update = streams_BRXD, update_BRD
    count = streams.shape[2]
    flat = streams.flatten(2)
    number = (flat / (flat.square().mean(-1, keepdim=True) + eps).sqrt()) @ phi.T
    read = torch.sigmoid(scale[0] * number[..., :count] + bias[:count]) + hc_eps
    write = 2 * torch.sigmoid(scale[1] * number[..., count : 2 * count] + bias[count : 2 * count])
    logit = scale[2] * number[..., 2 * count :] + bias[2 * count :]
    mix = torch.softmax(logit.unflatten(-1, (count, count)), -1) + hc_eps
    mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    left = write[..., None] * update[:, :, None] + torch.einsum("brjk,brjd->brkd", mix, streams)
    return left, torch.einsum("brk,brkd->brd", read, left)


def naive_range(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width=None, whole=False) -> Tensor:
    out, shared = [], query_BRHC.shape[2] // key_BFGC.shape[2]
    for b, r, h in itertools.product(*map(range, query_BRHC.shape[:3])):
        seen = slice(int(first_BR[b, r]), int(last_BR[b, r]))
        key, value = key_BFGC[b, seen, h // shared], value_BFGC[b, seen, h // shared]
        weight = torch.exp(key @ query_BRHC[b, r, h] / query_BRHC.shape[3] ** 0.5)
        out.append(weight / weight.sum() @ value if len(weight) else 0 * query_BRHC[b, r, h])
    return torch.stack(out).view(query_BRHC.shape)


def naive_blocks(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, chosen_BRGN, block) -> Tensor:
    out, shared = [], query_BRHC.shape[2] // key_BFGC.shape[2]
    for b, r, h in itertools.product(*map(range, query_BRHC.shape[:3])):
        chosen = set(chosen_BRGN[b, r, h // shared].tolist())
        first, last = int(first_BR[b, r]), int(last_BR[b, r])
        seen = [slot for slot in range(first, last) if (slot - first) // block in chosen]
        key, value = key_BFGC[b, seen, h // shared], value_BFGC[b, seen, h // shared]
        weight = torch.exp(key @ query_BRHC[b, r, h] / query_BRHC.shape[3] ** 0.5)
        out.append(weight / weight.sum() @ value if seen else 0 * query_BRHC[b, r, h])
    return torch.stack(out).view(query_BRHC.shape)


def naive_delta_rule(
    query, key, value, beta, log_decay, start, live, state, scale, by_channel
) -> tuple[Tensor, Tensor]:
    """The recurrence with one matrix at a time, I - beta k k^T among them."""
    out, after = torch.zeros_like(query), state.clone()
    eye = torch.eye(key.shape[-1], dtype=key.dtype)
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[2])):
        S = state[b, h]
        for t in range(query.shape[1]):
            if not live[b, t]:
                continue
            k, v = key[b, t, h], value[b, t, h]
            S = torch.zeros_like(S) if start[b, t] else S
            S = S if log_decay is None else log_decay[b, t, h].exp() * S
            S = S if by_channel is None else torch.diag(by_channel[b, t, h].exp()) @ S
            strength = 1 if beta is None else beta[b, t, h]
            S = (S if beta is None else (eye - strength * torch.outer(k, k)) @ S) + strength * torch.outer(k, v)
            out[b, t, h] = scale * (query[b, t, h] @ S)
        after[b, h] = S
    return out, after


def naive_slot_attention(query, key, value, write, log_decay, start, live, state, scale):
    """Slot by slot, each a key and a value."""
    out, after, channels = torch.zeros_like(query), state.clone(), query.shape[-1]
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[2])):
        slots = [(row[:channels], row[channels:]) for row in state[b, h]]
        for t in range(query.shape[1]):
            if not live[b, t]:
                continue
            if start[b, t]:
                slots = [(0 * k, 0 * v) for k, v in slots]
            left, strength = log_decay[b, t, h].exp(), write[b, t, h]
            slots = [
                (left[m] * k + strength[m] * key[b, t, h], left[m] * v + strength[m] * value[b, t, h])
                for m, (k, v) in enumerate(slots)
            ]
            weight = [(scale * query[b, t, h] @ k).exp() for k, _ in slots]
            out[b, t, h] = sum(w * v for w, (_, v) in zip(weight, slots, strict=True)) / sum(weight)
        after[b, h] = torch.stack([torch.cat(slot) for slot in slots])
    return out, after


def naive_grouped(x_MD, weight_END, end_E) -> Tensor:
    group = [next(e for e, end in enumerate(end_E.tolist()) if m < end) for m in range(len(x_MD))]
    return torch.stack([weight_END[e] @ x for e, x in zip(group, x_MD, strict=True)])


def naive_cross_entropy(hidden_ND, weight_VD, target_N) -> Tensor:
    """All logits at once, through PyTorch's own loss; zero where all targets are ignored."""
    total = F.cross_entropy(hidden_ND @ weight_VD.T, target_N, reduction="sum")
    return total / (target_N >= 0).sum().clamp(min=1)


ORACLES = {
    "attend": naive_attend,
    "attend_band": naive_attend,
    "attend_range": naive_range,
    "attend_blocks": naive_blocks,
    "index_top_k": naive_top_k,
    "candidate_pool": naive_pool,
    "score_slots": naive_slot_scores,
    "indexer_kl": naive_kl,
    "mhc_boundary": naive_mhc,
    "rms_norm": naive_norm,
    "rotate": naive_rotation,
    "swiglu": lambda gate, up, limit: F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit),
    "delta_rule": naive_delta_rule,
    "slot_attention": naive_slot_attention,
    "grouped_linear": naive_grouped,
    "linear_cross_entropy": naive_cross_entropy,
}
