"""Pictures for notebooks, drawn from taps. Needs matplotlib: ``pip install -e '.[notebook]'``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.eval import plots
from gsm.eval.attention import attention_map, decoder_attention
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Seen

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def describe(seen: Seen) -> str:
    """A line for every tap: its name, its shape, its dtype."""
    width = max(map(len, seen), default=0)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in seen.items()}
    return "\n".join(f"{name:<{width}}  {list(tensor.shape)!s:<20}  {kinds[name]}" for name, tensor in seen.items())


def show_attention(model: GSM, seen: Seen, names: Sequence[str]) -> Figure:
    """One map for each name (``encoder/3``, ``stage/1``, ``decoder/5``): a line a row, a column a position read.

    Each from 0 to its own maximum, on a square-root scale, so that small weights are seen: ``attention_map``.
    """
    figure, axes = plots.figure(len(names), width=3.2, height=3.4, grid=False)
    for axis, name in zip(axes, names, strict=True):
        axis.imshow(attention_map(model, seen, name).sqrt().cpu(), vmin=0, interpolation="nearest")
        axis.set(title=name, xlabel="position that is read")
    axes[0].set_ylabel("position that reads")
    return figure


def show_increments(seen: Seen) -> Figure:
    """Lengths of the encoder's output e, of every stage's increment, and of z, by position."""
    figure, (axis,) = plots.figure(width=7, height=3)
    stages = sorted(name for name in seen if name.endswith("/increment"))
    for name in ("state/e", *stages, "state/z"):
        axis.plot(seen[name][0].norm(dim=-1).cpu(), label=name, linestyle="--" if name == "state/z" else "-")
    axis.set(xlabel="position", ylabel="length of the vector", ylim=(0, None))
    axis.legend(frameon=False)
    return figure


def show_state(model: GSM, seen: Seen) -> Figure:
    """The decoder's attention over the shared state: a line a layer, a column an entry, the sink at the right."""
    weight_LE, first = decoder_attention(model, seen), model.geometry.encoder_layers + 1
    figure, (axis,) = plots.figure(width=7, height=2.2, grid=False)
    picture = axis.imshow(weight_LE.sqrt().cpu(), vmin=0, aspect="auto", interpolation="nearest")
    axis.set(xlabel="entry, from the oldest to the row's own; the sink", ylabel="decoder layer")
    axis.set_yticks(range(len(weight_LE)), [str(first + layer) for layer in range(len(weight_LE))])
    figure.colorbar(picture, label="square root of the weight")
    return figure


@torch.no_grad()
def show_memory(model: LanguageModel, token_T: Tensor, lengths: Sequence[int]) -> Figure:
    """Bytes that the model keeps after reading so many tokens, by kind, one kind upon the other.

    Args:
        model: any model.
        token_T: int64, at least as many as the longest.
        lengths: in tokens, ascending.
    """
    sizes = [model.prefill(token_T[:length], model.start(1)).memory.breakdown() for length in lengths]  # pyright: ignore[reportOptionalMemberAccess]
    figure, (axis,) = plots.figure(width=7, height=3)
    kinds = sorted(sizes[-1], key=lambda kind: sizes[-1][kind] - sizes[0].get(kind, 0))  # what grows lies on top
    axis.stackplot(
        lengths, [[size.get(kind, 0) for size in sizes] for kind in kinds], labels=[k.replace("_", " ") for k in kinds]
    )
    axis.set(xlabel="tokens that were read", ylabel="bytes")
    axis.legend(frameon=False, reverse=True, loc="upper left")
    return figure
