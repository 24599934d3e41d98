"""Small float64 models for tests: every variant that has a yaml, with parameters far from their initial values.

Sinks, gates and norms start at values that hide mistakes (a sink of zero, a mixing matrix that is uniform), so all of
them are drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import Tensor

from gsm.layers.residual import HyperConnection, Plain
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry
from gsm.models.gsm import GSM
from gsm.paths import ROOT, variants
from gsm.slots.writer.base import StateWriter

GEOMETRY = Geometry(
    vocabulary=23,
    context=48,
    dim=16,
    feed_forward_dim=24,
    experts=4,
    experts_per_token=2,
    encoder_layers=4,
    decoder_layers=4,
    heads=4,
    entry_dim=8,
    rotary_dim=4,
    query_rank=6,
    output_groups=2,
    output_rank=5,
    index_heads=2,
    index_dim=6,
    window=4,
    top_k=3,
    bank_layers=[2, 3],
    stages=[2, 4],
    decoder_full=5,
    decoder_reindex=[7],
    candidate_blocks=1,
)
# No deeper than it takes to have a layer of every kind: window, Full, Reuse, stages on both, Full and Reindex.
SHALLOW = replace(
    GEOMETRY, encoder_layers=3, bank_layers=[2], stages=[2, 3], decoder_layers=2, decoder_full=4, decoder_reindex=[5]
)
W, K, M, RATIO = GEOMETRY.window, GEOMETRY.top_k, GEOMETRY.window + GEOMETRY.top_k, GEOMETRY.encoder_ratio
ROUNDS = 3  # of Sinkhorn: what is tested here holds for any number, and 20 would take most of the time
# Odd and even lengths around the window, the state, K groups of tokens, and beyond everything local.
LENGTHS = (1, 2, 3, W, W + 1, K * RATIO, M, M + 1, 2 * M + 1, 40, 41)


@cache
def variant(group: str, name: str):
    """The partial that a yaml of a group stands for, as the model's constructor receives it."""
    part: Any = OmegaConf.load(ROOT / "configs" / "model" / group / f"{name}.yaml")
    for choice in part.pop("defaults", []):
        for place, chosen in choice.items() if not isinstance(choice, str) else ():
            group, _, key = place.removeprefix("/model/").partition("@")
            part[key] = OmegaConf.load(ROOT / "configs" / "model" / group / f"{chosen}.yaml")
    return instantiate(OmegaConf.create({"size": asdict(GEOMETRY), "part": part}).part, _convert_="all")


def comparators() -> list[str]:
    """The models that are compared with GSM and the baseline (``gsm_recurrent`` is a GSM, and a variant of a slot)."""
    return [name for name in variants("model") if name not in ("gsm", "gsm_recurrent", "baseline")]


def comparator(name: str, geometry: Geometry, **options) -> LanguageModel:
    """The model of a yaml, with the choices in its list of defaults, for a geometry; its queries are not matched, which
    would take most of the time."""
    options = {"query_rank": geometry.query_rank, "recompute": False, **options}
    node: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "model" / f"{name}.yaml"))
    for choice in node.pop("defaults"):
        for place, chosen in choice.items() if isinstance(choice, dict) else ():
            group, _, path = place.partition("@")
            *above, key = (path or group).split(".")
            arguments = node.setdefault(above[0], {}) if above else node
            arguments[key] = variant(group, chosen)
    return get_class(node.pop("_target_"))(**{**without_keys(node), **options, "geometry": geometry})


def without_keys(node: dict) -> dict:
    """Return a node without the keys for Hydra."""
    return {key: value for key, value in node.items() if not key.startswith("_")}


def cases() -> list[str]:
    """All models: GSM as it is and with every other variant of every slot, the baseline likewise and with its pool, and
    the comparators. Variants and comparators stand on a plain residual, since hyper-connections cost most of the time;
    the models as they are have them, and so has one comparator."""
    return [
        "gsm",
        *choices(
            "gsm",
            "encoder_layer",
            "encoder_reading",
            "retriever",
            "stage_input",
            "stage_query",
            "writer",
            "decoder_start",
            "state_reader",
            "residual",
            "feed_forward",
        ),
        "gsm-stages=none",
        "gsm-ratio=3",
        "baseline",
        *choices("baseline", "residual", "feed_forward"),
        "baseline-pool",
        *comparators(),
        "hybrid-residual=mhc",
    ]


def training_cases() -> list[str]:
    """Return ``cases`` and the variants that differ only in training."""
    return [*cases(), *choices("gsm", "indexer_training"), *choices("baseline", "indexer_training")]


def choices(model: str, *slots: str) -> list[str]:
    """Return the variants in these slots that are not the model's defaults."""
    defaults = OmegaConf.load(ROOT / "configs" / "model" / f"{model}.yaml").defaults
    has = {choice for one in defaults if not isinstance(one, str) for choice in one.items()}
    return [f"{model}-{slot}={name}" for slot in slots for name in variants(f"model/{slot}") if (slot, name) not in has]


def writes_its_own_way(name: str) -> bool:
    """Whether a writer does more than ``fuse``, and so may keep something else."""
    return variant("writer", name).func.write is not StateWriter.write


# The cases whose memories differ in what they hold, or in what is read from them: the others share one of these.
MEMORIES = (
    "gsm",
    "gsm-retriever=separate_indexer",
    "gsm-retriever=random_topk",
    "gsm-retriever=dense",
    "gsm-encoder_layer=convolved",
    "gsm-encoder_layer=recurrent",
    "gsm-encoder_reading=window_only",
    "gsm-ratio=3",
    *(f"gsm-writer={name}" for name in variants("model/writer") if writes_its_own_way(name)),
    *(f"gsm-state_reader={name}" for name in variants("model/state_reader") if name != "shared"),
    "gsm-stage_input=after_layer",
    "gsm-decoder_start=streams",
    "gsm-residual=mhc_two_pass",
    "baseline-pool",
    *comparators(),
)


def mostly_slow(cases: Iterable[Any], *quick: Any, mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Return all cases as parameters of a test; the default command runs only the quick ones.

    A tuple stands for several parameters.
    """
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=mark)
        for case in cases
    ]


def mostly_nightly(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all cases as parameters of a test; CI runs the quick ones, and the nightly run all."""
    return mostly_slow(cases, *quick, mark=pytest.mark.nightly)


def build(case: str, *, seed: int = 0, **options) -> LanguageModel:
    """The model of a case, in float64, with all parameters drawn from the seed."""
    family, _, choice = case.partition("-")
    slot, _, name = choice.partition("=")
    geometry = options.pop("geometry", GEOMETRY)
    if slot == "ratio":
        geometry = replace(geometry, encoder_ratio=int(name))
    elif slot == "stages":
        options["stages"] = []
    elif slot == "residual" and name != "plain":  # hyper-connections of any form, with fewer rounds than the yaml's
        options["residual"] = partial(variant(slot, name), sinkhorn_rounds=ROUNDS)
    elif slot not in ("", "pool"):
        options[slot] = variant(slot, name)
    if family == "baseline" and choice != "pool":  # 8 entries: less than these models' banks have
        options.setdefault("candidate_pool", False)
    if slot == "writer":  # M has to be a multiple of the entries that it writes for a position
        count = options[slot].keywords.get("slots", 1)
        options.setdefault("state_size", -(-M // count) * count)
    if slot == "encoder_reading":  # with one that selects nothing, the stages have to
        options.setdefault("retriever", variant("retriever", "separate_indexer"))
    whole = family not in comparators() and slot in ("", "decoder_start", "stage_input")  # of which streams are part
    options.setdefault("residual", partial(HyperConnection, sinkhorn_rounds=ROUNDS) if whole else Plain)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family in comparators():
            model = comparator(family, geometry, **options).double()
        else:
            model = (GSM if family == "gsm" else Baseline)(geometry, **options).double()
        randomise(model)
    return model.eval()


def randomise(model: torch.nn.Module) -> None:
    """Draws every parameter: matrices around their usual size, everything else visibly away from 0 and 1."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("phi"):
                parameter.normal_(std=0.3)
            elif name.endswith("scale"):
                parameter.uniform_(0.5, 1.0)
            elif parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_()
    for buffer in model.buffers():  # steps of the experts' biases: enough of them to change what is chosen
        buffer.random_(-300, 300)


def reads(writer: StateWriter) -> tuple[bool, bool]:
    """Return whether a writer's entries depend on the encoder's output, and whether they depend on the retrieval."""
    encoded, increment = torch.randn(2, 1, 1, GEOMETRY.dim, dtype=torch.float64).requires_grad_()
    z = writer.fuse(encoded, (increment,))
    gradients = torch.autograd.grad(z.sum(), (encoded, increment), allow_unused=True)
    return gradients[0] is not None, gradients[1] is not None


def random_tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """int64 [batch, length]."""
    return torch.randint(GEOMETRY.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-9) -> None:
    """Assert that two tensors are equal up to the tolerance; the error has their largest difference."""
    assert got.shape == want.shape, f"{what}: shapes {list(got.shape)} and {list(want.shape)} differ"
    error = (got - want).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance, f"{what}: largest difference {error:.3e}, allowed {tolerance:.0e}"
