"""The logit lens (nostalgebraist, 2020): the prediction after each layer, by final norm and head on the residual
stream. And direct logit attribution (Elhage et al., 2021): what each part of the model adds to a logit.

    stream --attention--> between --feed-forward--> after = stream of the next layer ... hidden --norm, head--> logits

The parts are differences of the residual stream before and after a module, so they sum to the output exactly. With
several residual streams, they are differences of their read-out, which include the effect of mixing the streams.

    embedding, encoder/1/attention, encoder/1/feed_forward ..    up to the encoder's output e
    writer, stage/1, stage/2                                     from e to z, if the decoder starts from z
    decoder/5/attention, decoder/5/feed_forward ..               up to the output

B sequences, R rows, L places of the stream, D model width, H heads, E entries of the state and the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Recording, patch, record
from gsm.shapes import last_rows, promoted
from gsm.slots.decoder_start import State

TAPS = ("embedding", "*/stream/between", "*/stream/after", "state/e", "stage/*/increment", "hidden")


@dataclass(frozen=True)
class Lens:
    """The predictions of a logit lens for the rows of one sequence.

    Attributes:
        places: ``embedding``, ``encoder/1``, ..., ``decoder/8``: the prediction is made after the layer of this name.
        log_probability_LR: log-probability of the targets, in nats.
        shuffled_LR: the same for the targets in shuffled order, as a control.
        best_LR: int64, the likeliest tokens.
    """

    places: tuple[str, ...]
    log_probability_LR: Tensor
    shuffled_LR: Tensor
    best_LR: Tensor


@torch.no_grad()
def logit_lens(
    model: LanguageModel, token_T: Tensor, rows: Sequence[int] | None = None, target_R: Tensor | None = None
) -> Lens:
    """Return the predictions after the embedding and after each layer.

    Args:
        model: any model.
        token_T: int64, one document.
        rows: positions; None: all but the last, or all if ``target_R`` is given.
        target_R: int64, the target of each row; None: the next token.
    """
    rows = range(len(token_T) - (target_R is None)) if rows is None else rows
    row_R = torch.tensor(list(rows), device=token_T.device)
    target_R = token_T[row_R + 1] if target_R is None else target_R
    shuffled_R = target_R[torch.randperm(len(row_R), generator=torch.Generator().manual_seed(0)).to(row_R.device)]
    logs, shuffled, best = [], [], []
    with model.evaluating(), record("embedding", "*/stream/after") as seen:
        model.forward(token_T[None])
        for x_BRD in (seen["embedding"], *(seen[f"{layer}/stream/after"] for layer in layer_names(seen))):
            log_RV = model.head(model.norm(x_BRD[0, row_R])).float().log_softmax(dim=-1)
            logs.append(log_RV.gather(1, target_R[:, None])[:, 0])
            shuffled.append(log_RV.gather(1, shuffled_R[:, None])[:, 0])
            best.append(log_RV.argmax(dim=-1))
    return Lens(("embedding", *layer_names(seen)), torch.stack(logs), torch.stack(shuffled), torch.stack(best))


def layer_names(seen: Recording) -> list[str]:
    """Return the layers with a recorded stream in the order of computation: ``encoder/1``, ..., ``decoder/8``."""
    names = {name.removesuffix("/stream/after") for name in seen if name.endswith("/stream/after")}
    return sorted(names, key=lambda name: int(name.rpartition("/")[2]))


def parts_of_output(model: LanguageModel, seen: Recording) -> dict[str, Tensor]:
    """Return what each part adds to the output of the last layer, [B, R, D]; their sum is the tap ``hidden``.

    Args:
        model: the recorded model.
        seen: a recording of one call for all rows (``TAPS``).
    """
    hidden_BRD = promoted(seen["hidden"])
    rows = hidden_BRD.shape[1]
    before_BRD, parts = last_rows(promoted(seen["embedding"]), rows), {}
    parts["embedding"] = before_BRD
    for layer in layer_names(seen):
        if isinstance(model, GSM) and layer == next(iter(model.decoder)).name:
            between = _parts_of_start(model, seen, before_BRD)
            parts |= between
            before_BRD = sum(between.values(), before_BRD)
        for part, place in {"attention": "between", "feed_forward": "after"}.items():
            after_BRD = last_rows(promoted(seen[f"{layer}/stream/{place}"]), rows)
            parts[f"{layer}/{part}"] = after_BRD - before_BRD
            before_BRD = after_BRD
    return parts


def _parts_of_start(model: GSM, seen: Recording, e_BRD: Tensor) -> dict[str, Tensor]:
    """Return the parts between the encoder's output e and z: what the writer adds without any stage, then what each
    stage adds, in their order. Empty if the decoder does not start from z."""
    if not isinstance(model.decoder_start, State):
        return {}
    names = [f"stage/{stage}" for stage, _ in enumerate(model.aggregation, 1)]
    increments, before_BRD, parts = [seen[f"{name}/increment"] for name in names], e_BRD, {}
    for count, name in enumerate(["writer", *names]):
        given = (x if number < count else torch.zeros_like(x) for number, x in enumerate(increments))
        z_BRD = last_rows(promoted(model.writer.fuse(seen["state/e"], tuple(given))), e_BRD.shape[1])
        parts[name], before_BRD = z_BRD - before_BRD, z_BRD
    return parts


def to_logit(model: LanguageModel, part_ND: Tensor, hidden_D: Tensor, token: int, other: int | None = None) -> Tensor:
    """Return what parts of an output add to the logit of a token, [N]. The final norm divides each part by the root
    mean square of the whole output.

    Args:
        model: any model.
        part_ND: N parts of a row's output, such as those of ``parts_of_output``.
        hidden_D: the whole output, the sum of all parts.
        token: the token.
        other: a token whose logit is subtracted; None: none.
    """
    head_VD, scale = cast(Tensor, model.head.weight), (promoted(hidden_D).square().mean() + model.norm.eps).rsqrt()
    direction_D = head_VD[token] - (0 if other is None else head_VD[other])
    return promoted(part_ND) @ promoted(direction_D * model.norm.weight) * scale


@dataclass(frozen=True)
class Attribution:
    """What each part of a model adds to the logit of a token, or to its difference from that of another token.

    Heads and entries are counted in their order, each as what it adds to those before it. The order matters only where
    they do not simply add up: under a writer's gate, and with ``mhc_two_pass``.

    Attributes:
        by_part: by name of ``parts_of_output``; the sum is ``total``.
        by_head_LH: by head of each layer's attention (or recurrence), and of each stage's if the decoder starts from z.
            Without the mixing of residual streams, the heads of a layer sum to its attention; the heads of a stage
            always sum to the stage. What a writer changes in e is the part ``writer``, also if it drops e. A layer with
            fewer heads has zeros at the end.
        layers: names of the L layers and stages of ``by_head_LH``, in the order of computation.
        by_entry_LE: by entry of the state, from old to new, and the sink (0), in each decoder layer; None for models
            without a state.
        readers: names of the L layers of ``by_entry_LE``.
        total: the logit, or the difference, that the model computes.
    """

    by_part: dict[str, float]
    by_head_LH: Tensor
    layers: tuple[str, ...]
    by_entry_LE: Tensor | None
    readers: tuple[str, ...]
    total: float

    def __str__(self) -> str:
        names = sorted(self.by_part, key=lambda name: -abs(self.by_part[name]))[:8]
        lines = [f"{name:<24}{self.by_part[name]:8.3f}" for name in names]
        return "\n".join(
            [*lines, f"{'sum of all parts':<24}{sum(self.by_part.values()):8.3f}   logit {self.total:.3f}"]
        )


@torch.no_grad()
def attribute(model: LanguageModel, token_T: Tensor, token: int, other: int | None = None) -> Attribution:
    """Attribute a logit of the last row to the parts of the model.

    Args:
        model: any model.
        token_T: int64, one document.
        token: the token.
        other: a token whose logit is subtracted; None: none.
    """
    with model.evaluating():
        with record(*TAPS, "*/heads", "decoder/*/weights") as seen:
            logit_V = model.forward(token_T[None]).logits[0, -1].float()
        to = partial(to_logit, model, hidden_D=seen["hidden"][0, -1], token=token, other=other)
        parts = parts_of_output(model, seen)
        by_part = dict(zip(parts, to(torch.stack([x[0, -1] for x in parts.values()])).tolist(), strict=True))
        names = [name.removesuffix("/attention") for name in parts]
        layers = tuple(name for name in names if f"{name}/heads" in seen)  # a user's layers may have no heads
        by_head = [to(_by_one(model, f"{layer}/heads", token_T, seen)) for layer in layers]
        readers = tuple(name for name in layers if isinstance(model, GSM) and name.startswith("decoder/"))
        by_entry = [to(_by_one(model, f"{layer}/weights", token_T, seen)) for layer in readers]
    by_head_LH = pad_sequence(by_head, batch_first=True) if layers else logit_V.new_zeros(0, 0)
    by_entry_LE = pad_sequence(by_entry, batch_first=True, padding_side="left") if readers else None
    total = logit_V[token] - (0 if other is None else logit_V[other])
    return Attribution(by_part, by_head_LH, layers, by_entry_LE, readers, float(total))


def _by_one(model: LanguageModel, tap: str, token_T: Tensor, seen: Recording) -> Tensor:
    """Return what an attention adds to the stream, or that of a stage to z, by head [H, D] if ``tap`` is its ``heads``,
    or by entry [E, D] if it is its ``weights``. In one call, sequence n of the batch keeps the first n heads or
    entries. The stages behind a stage add nothing then, as in ``parts_of_output``."""
    layer, _, part = tap.rpartition("/")
    count = seen[tap].shape[2 if part == "heads" else 3]

    def keep_first(x_BRHX: Tensor) -> Tensor:
        kept_BX = torch.ones(count + 1, count, dtype=x_BRHX.dtype, device=x_BRHX.device).tril(-1)
        return x_BRHX * (kept_BX[:, None, :, None] if part == "heads" else kept_BX[:, None, None])

    increments, added = [name for name in seen if name.endswith("/increment")], f"{layer}/stream/between"
    behind = []
    if layer.startswith("stage/"):
        behind, added = increments[increments.index(f"{layer}/increment") + 1 :], "state/z"
    with ExitStack() as stack:
        for name in behind:
            stack.enter_context(patch(name, torch.zeros_like, model))
        stack.enter_context(patch(tap, keep_first, model))
        kept = stack.enter_context(record(added))
        model.forward(token_T.expand(count + 1, -1))
    return promoted(kept[added][:, -1]).diff(dim=0)
