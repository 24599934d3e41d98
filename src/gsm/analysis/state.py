"""Properties of the shared state, from recorded taps: its norm, its entries before rotation, and its effective rank.

B sequences, T positions, R rows, E entries, J entries of a position, C width of an entry.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gsm.models.gsm import GSM
from gsm.observe import Recording
from gsm.shapes import last_rows, promoted
from gsm_kernels import rotate


def latents(model: GSM, seen: Recording) -> Tensor:
    """Return the entries of the state before rotation, [B, E, C], so that equal content at different positions gives
    equal vectors. The parts of the state are concatenated.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory (``position``, and ``state/<part>`` of all parts, with the
            paper's reader ``state/entries``).
    """
    entries = seen[f"state/{model.writer.parts[0].name}"].shape[1]
    return unrotated(model, seen, last_rows(seen["position"], entries // model.writer.slots))


def unrotated(model: GSM, seen: Recording, position_BT: Tensor) -> Tensor:
    """Return the last entries, written at the positions ``position_BT`` of their documents, before rotation, [B, E, C].
    The values at padding are undefined."""
    angles = model.writer.rope(position_BT.clamp(min=0), model.embedding.weight.dtype)
    cos_BEP, sin_BEP = (x.repeat_interleave(model.writer.slots, dim=1) for x in angles)
    parts = []
    for name, rotated in model.writer.parts:
        entry_BEC = last_rows(seen[f"state/{name}"], cos_BEP.shape[1])
        parts.append(rotate(entry_BEC, cos_BEP, sin_BEP, inverse=True) if rotated else entry_BEC)
    return torch.cat(parts, dim=-1)


def cosines(first_EC: Tensor, second_FC: Tensor | None = None) -> Tensor:
    """Return the cosine similarity of every entry of one state with every entry of another (None: of the same), [E, F].
    Use ``latents`` to compare contents independently of positions."""
    second_FC = first_EC if second_FC is None else second_FC
    return normalize(promoted(first_EC), dim=-1) @ normalize(promoted(second_FC), dim=-1).T


def effective_rank(value_EC: Tensor) -> float:
    """Return the effective rank of E vectors (Roy and Vetterli, 2007): from 1, if all are parallel, to min(E, C).

    This is the exponential of the entropy of the singular values, divided by their sum; 0 if all are zero.
    """
    singular_N = torch.linalg.svdvals(promoted(value_EC))
    share_N = singular_N / singular_N.sum().clamp(min=torch.finfo(singular_N.dtype).tiny)
    return float(torch.special.entr(share_N).sum().exp()) if bool(share_N.any()) else 0.0


def state_facts(model: GSM, seen: Recording) -> dict[str, float]:
    """Return two metrics of a call without a memory, by name; padding is left out.

    ``state/norm`` is the mean norm of z over all rows. (The norm of entries is about constant, as they are normed.)
    ``state/effective_rank`` is that of the state at the last row of each sequence, the mean over sequences.
    """
    z_BRD, latent_BEC, writer = seen["state/z"], latents(model, seen), model.writer
    counted_BR = last_rows(seen["position"], z_BRD.shape[1]) >= 0
    facts = {"state/norm": float(promoted(z_BRD[counted_BR]).norm(dim=-1).mean())} if counted_BR.any() else {}
    seen_B = (seen["position"][:, -1] + 1).clamp(max=writer.positions) * writer.slots
    states = [latent_EC[-count:] for latent_EC, count in zip(latent_BEC, seen_B.tolist(), strict=True) if count]
    ranks = [effective_rank(state_EC) for state_EC in states]
    return facts | ({"state/effective_rank": sum(ranks) / len(ranks)} if ranks else {})
