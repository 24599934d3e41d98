"""Properties of the shared state, from taps: its lengths, its entries before their rotation, and its effective rank.

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
    """Return the entries of the state as they were before their rotation, [B, E, C]: equal content is equal here
    wherever it stands. Entries of several parts lie side by side.

    Args:
        model: the model that was recorded.
        seen: one call without a memory (``position``, and ``state/<part>`` of all parts: ``state/entries``).
    """
    entries = seen[f"state/{model.writer.parts[0].name}"].shape[1]
    return unrotated(model, seen, last_rows(seen["position"], entries // model.writer.slots))


def unrotated(model: GSM, seen: Recording, position_BT: Tensor) -> Tensor:
    """The last entries, that were written at these document-local positions, before their rotation, [B, E, C]; of
    padding anything."""
    angles = model.writer.rope(position_BT.clamp(min=0), model.embedding.weight.dtype)
    cos_BEP, sin_BEP = (x.repeat_interleave(model.writer.slots, dim=1) for x in angles)
    parts = []
    for name, rotated in model.writer.parts:
        entry_BEC = last_rows(seen[f"state/{name}"], cos_BEP.shape[1])
        parts.append(rotate(entry_BEC, cos_BEP, sin_BEP, inverse=True) if rotated else entry_BEC)
    return torch.cat(parts, dim=-1)


def cosines(first_EC: Tensor, second_FC: Tensor | None = None) -> Tensor:
    """Return the cosine of every entry of one state with every entry of another, or of the same, [E, F]; of
    ``latents``, it tells how alike the contents are."""
    second_FC = first_EC if second_FC is None else second_FC
    return normalize(promoted(first_EC), dim=-1) @ normalize(promoted(second_FC), dim=-1).T


def effective_rank(value_EC: Tensor) -> float:
    """How many directions a set of vectors uses evenly (Roy and Vetterli, 2007): from 1, all parallel, to min(E, C).

    The exponential of the entropy of the singular values, taken as shares of their sum; 0 where all are zero.
    """
    singular_N = torch.linalg.svdvals(promoted(value_EC))
    share_N = singular_N / singular_N.sum().clamp(min=torch.finfo(singular_N.dtype).tiny)
    return float(torch.special.entr(share_N).sum().exp()) if bool(share_N.any()) else 0.0


def state_facts(model: GSM, seen: Recording) -> dict[str, float]:
    """Return ``state/norm``, the mean length of z over all rows, and ``state/effective_rank`` of the state that the
    last row of each sequence sees, a mean over sequences. It takes one call without a memory; padding does not count.

    The length is that of z, from which entries are made: their own is fixed by a norm.
    """
    z_BRD, latent_BEC, writer = seen["state/z"], latents(model, seen), model.writer
    counted_BR = last_rows(seen["position"], z_BRD.shape[1]) >= 0
    facts = {"state/norm": float(promoted(z_BRD[counted_BR]).norm(dim=-1).mean())} if counted_BR.any() else {}
    seen_B = (seen["position"][:, -1] + 1).clamp(max=writer.positions) * writer.slots
    states = [latent_EC[-count:] for latent_EC, count in zip(latent_BEC, seen_B.tolist(), strict=True) if count]
    ranks = [effective_rank(state_EC) for state_EC in states]
    return facts | ({"state/effective_rank": sum(ranks) / len(ranks)} if ranks else {})
