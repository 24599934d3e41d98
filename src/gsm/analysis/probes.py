"""Linear probes: how well a linear map decodes earlier tokens from a model's state. They are fitted by ridge regression
in closed form and tested on held-out sequences, with shuffled labels as a control.

A probe shows that information is present. Whether the model uses it is tested by ``gsm.analysis.interventions``.

B sequences, T positions, R rows, N samples, F features, Y classes, M entries of the state, C their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from gsm.analysis.needles import Questions
from gsm.analysis.state import unrotated
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Recording, record
from gsm.shapes import promoted

TAPS = ("position", "state/*", "decoder/*/state")  # position, so that there is a match in models without a state too
HELD_OUT = 0.25  # fraction of the sequences, or of the samples, for testing


@dataclass(frozen=True)
class Probe:
    """The results of one probe on held-out samples.

    Attributes:
        accuracy: fraction of right labels.
        shuffled: accuracy of a probe that was fitted to shuffled labels.
        chance: accuracy of always answering with the commonest label of the fitted samples.
        fitted, tested: numbers of samples.
        features: number of features.
    """

    accuracy: float
    shuffled: float
    chance: float
    fitted: int
    tested: int
    features: int


def probe(
    feature_NF: Tensor, label_N: Tensor, *, held_out: float = HELD_OUT, ridge: float = 0.1, seed: int = 0
) -> Probe:
    """Fit a linear map with an intercept from features to one-hot labels, and test it.

    Args:
        feature_NF: float; each feature is normalised to mean 0 and variance 1 over the fitted samples.
        label_N: int64, in [0, Y).
        held_out: fraction of the samples for testing, the last ones. Keep the samples of a sequence adjacent.
        ridge: penalty of the squared map, times the number of fitted samples.
        seed: random seed of the shuffled labels.

    Raises:
        ValueError: if there are fewer than two samples for fitting or for testing.
    """
    fitted = len(label_N) - round(held_out * len(label_N))
    if min(fitted, len(label_N) - fitted) < 2:
        raise ValueError(
            f"held_out must leave at least 2 of {len(label_N)} samples for fitting and 2 for testing, got {held_out}"
        )
    feature_NF = promoted(feature_NF)
    mean_F, spread_F = feature_NF[:fitted].mean(dim=0), feature_NF[:fitted].std(dim=0)
    feature_NF = (feature_NF - mean_F) / spread_F.where(spread_F > 0, 1)
    fitted_NF, tested_NF, tested_N = feature_NF[:fitted], feature_NF[fitted:], label_N[fitted:]
    shuffle_N = torch.randperm(fitted, generator=torch.Generator().manual_seed(seed)).to(label_N.device)
    orders = [label_N[:fitted], label_N[:fitted][shuffle_N]]
    target_NX = torch.cat([one_hot(order_N, int(label_N.max()) + 1) for order_N in orders], dim=1).to(fitted_NF.dtype)
    # Features have mean 0, so the intercept is the mean of the targets, the frequency of each label.
    score_NX = tested_NF @ ridge_map(fitted_NF, target_NX, ridge * fitted) + target_NX.mean(dim=0)
    guesses = [score_NY.argmax(dim=1) for score_NY in score_NX.chunk(2, dim=1)]
    guesses.append(torch.bincount(label_N[:fitted]).argmax().expand_as(tested_N))
    accuracy, shuffled, chance = (float((guess_N == tested_N).float().mean()) for guess_N in guesses)
    return Probe(accuracy, shuffled, chance, fitted, len(tested_N), feature_NF.shape[1])


def ridge_map(feature_NF: Tensor, target_NY: Tensor, weight: float) -> Tensor:
    """Return the map X [F, Y] that minimises ||features X - targets||^2 + weight ||X||^2, for targets with mean 0.

    The linear system to solve has as many unknowns as there are features or samples, whichever are fewer.
    """
    samples, features = feature_NF.shape
    target_NY = target_NY - target_NY.mean(dim=0)
    if features <= samples:
        product_FF = feature_NF.T @ feature_NF
        product_FF.diagonal().add_(weight)
        return torch.linalg.solve(product_FF, feature_NF.T @ target_NY)
    product_NN = feature_NF @ feature_NF.T
    product_NN.diagonal().add_(weight)
    return feature_NF.T @ torch.linalg.solve(product_NN, target_NY)


def states(model: LanguageModel, token_BT: Tensor, rows: Sequence[int], chunk: int = 4096) -> dict[str, Tensor]:
    """Return the model's state after some positions as features, [B, R, F] each, by name.

    * GSM: ``z`` of the row; ``entry``, the state entries of the row before rotation; ``state``, all M entries that the
      row sees, with zeros if there are fewer.
    * models with recurrent layers: ``state``, the matrices of all these layers.

    Sequences are read in chunks with a memory, so they may be long.

    Args:
        model: a GSM, or a model with recurrent layers.
        token_BT: int64, sequences of one document each.
        rows: positions in ascending order (R of them).
        chunk: tokens per call.

    Raises:
        ValueError: if the model has no such state, or ``rows`` are not ascending.
    """
    if list(rows) != sorted(set(rows)):
        raise ValueError(f"rows must be in ascending order without repetition, got {list(rows)}")
    memory, read, features = model.start(len(token_BT)), 0, []
    for row in rows:
        with model.evaluating(), record(*TAPS) as seen:
            memory = model.prefill(token_BT[:, read : row + 1], memory, chunk).memory
        assert memory is not None  # as the call had a memory
        features.append(_features(model, seen, row))
        read = row + 1
    return {name: torch.stack([row_features[name] for row_features in features], dim=1) for name in features[0]}


def by_distance(
    model: LanguageModel, token_BT: Tensor, rows: Sequence[int], distances: Sequence[int]
) -> dict[str, dict[int, Probe]]:
    """Return probes for the token at each distance before a row, by name of the features (``states``) and by distance.

    There are B x R samples. The fraction ``HELD_OUT`` of the sequences, with all their rows, is for testing.

    Args:
        model, rows: as in ``states``.
        token_BT: int64. Draw the tokens at random: in a text, near tokens predict far tokens.
        distances: distances in tokens; 0 is the token of the row itself, and the largest is that of the first row.

    Raises:
        ValueError: as ``states``, or if a distance exceeds the position of the first row.
    """
    if max(distances) > min(rows):
        raise ValueError(f"distance must be at most {min(rows)}, the first of rows, got {max(distances)}")
    share = _whole_sequences(token_BT)
    features = {name: value_BRF.flatten(0, 1) for name, value_BRF in states(model, token_BT, rows).items()}
    label = {distance: token_BT[:, [row - distance for row in rows]].flatten() for distance in distances}
    return {
        name: {distance: probe(value_NF, label[distance], held_out=share) for distance in distances}
        for name, value_NF in features.items()
    }


def of_needles(model: LanguageModel, questions: Questions, before: int = 0) -> dict[str, Probe]:
    """Return probes for the value that each question asks for, from the state at its key or before it, by name of the
    features.

    Args:
        model: as in ``states``, trained on the task.
        questions: questions of ``needles.ask``, the same number for every sequence.
        before: distance before the key in tokens. Before the key, the state cannot know which value is asked for.
    """
    key_R, number_N = questions.key_N.unique(return_inverse=True)
    value_N = questions.token_BT[questions.sequence_N, questions.needle_N + 1]
    share = _whole_sequences(questions.token_BT)
    features = states(model, questions.token_BT, (key_R - before).tolist()).items()
    return {
        name: probe(value_BRF[questions.sequence_N, number_N], value_N, held_out=share) for name, value_BRF in features
    }


def _whole_sequences(token_BT: Tensor) -> float:
    """Return the fraction nearest to ``HELD_OUT`` that is a whole number of sequences, at least one."""
    return max(1, round(HELD_OUT * len(token_BT))) / len(token_BT)


def _features(model: LanguageModel, seen: Recording, row: int) -> dict[str, Tensor]:
    if not isinstance(model, GSM):
        layers = [value_BHRC.flatten(1) for name, value_BHRC in seen.items() if name.endswith("/state")]
        if not layers:
            raise ValueError(f"model must have a state, as GSM and recurrent models do, got {type(model).__name__}")
        return {"state": torch.cat(layers, dim=1)}
    each, count = model.writer.slots, min(row + 1, model.writer.positions)
    z_BRD = seen["state/z"]
    position_T = torch.arange(row + 1 - count, row + 1, device=z_BRD.device)
    latent_BEC = unrotated(model, seen, position_T.expand(len(z_BRD), -1))
    missing = model.writer.positions * each - latent_BEC.shape[1]
    state_BMC = pad(latent_BEC, (0, 0, missing, 0))
    return {"z": z_BRD[:, -1], "entry": latent_BEC[:, -each:].flatten(1), "state": state_BMC.flatten(1)}
