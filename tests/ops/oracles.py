"""Random packed streams, and the operations as slow loops written from their formulas."""

from __future__ import annotations

import torch
from torch import Tensor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def packed_positions(batch: int, entries: int, seed: int = 0, padding: int = 0) -> Tensor:
    """Positions [B,E] of documents of random lengths that differ between batch rows; row 0 ends in `padding`."""
    rows = []
    for row in range(batch):
        lengths = torch.randint(1, 12, (entries,), generator=seeded(100 * seed + row)).tolist()
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
    """The k keys with the highest values, ties to the lowest key, ascending, -1 at the end."""
    chosen = sorted(sorted(scores, key=lambda slot: (-scores[slot], slot))[:k])
    return chosen + [-1] * (k - len(chosen))


def naive_top_k(query, weight, key, first, last, k, pool=None, block=8) -> Tensor:
    def row(b: int, r: int) -> list[int]:
        scores = naive_scores(query, weight, key, b, r)
        return best({f: float(scores[f]) for f in choosable(first, last, pool, block, b, r)}, k)

    return torch.tensor([[row(b, r) for r in range(query.shape[1])] for b in range(query.shape[0])])


def naive_pool(query, weight, key, first, last, blocks, block=8) -> Tensor:
    def row(b: int, r: int) -> list[int]:
        scores, maxima = naive_scores(query, weight, key, b, r), {}
        for f in choosable(first, last, None, block, b, r):
            ordinal = (f - int(first[b, r])) // block
            maxima[ordinal] = max(maxima.get(ordinal, -torch.inf), float(scores[f]))
        if maxima:
            maxima[max(maxima)] = torch.inf
        return best(maxima, blocks)

    return torch.tensor([[row(b, r) for r in range(query.shape[1])] for b in range(query.shape[0])])


def naive_kl(query, window, position, width, sink, cos, sin, bank, first, last, index, iq, iw, ik, dense, pool, block):
    """(loss, recall) by the formula, row by row; the teacher is detached."""
    losses, recalls, rows = [], [], int((position >= 0).sum())
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
    return sum(losses) / max(rows, 1), torch.tensor(recalls).mean()


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
