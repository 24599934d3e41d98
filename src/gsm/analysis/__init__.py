"""Tools to analyse a trained model: what its state contains, where this comes from, and what happens without it.

    rollout          from attention weights: which positions reach each entry of the state, and by which stage
    attribution      the same from gradients and from replaced tokens, and how well the three methods agree
    interventions    run a model without some state entries, bank slots or a stage's retrieval
    patching         activation patching: which layers, stages, slots and entries carry an answer
    lens             the prediction after each layer, and what each part of the model adds to a logit
    needles          needle questions: accuracy by depth and length, and which removals break an answer
    probes           how well a linear map decodes earlier tokens from the state, with a shuffled control
    attention        where attention goes: over a text, over the state, by distance, and to sinks
    overlap          the fraction of the stages' selections that the encoder selects too
    state            properties of the shared state: its entries, their norms and cosines, its effective rank
    figures          functions that draw all of this on given axes

The functions take a model and tokens, or a recording of a call (``gsm.record``), and return tensors or small
dataclasses. They need neither Lightning nor Hydra. The notebooks 01 to 10 use them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

_MODULES = tuple(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    """Import a module of this package at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gsm.analysis' has no attribute {name!r}; it offers {', '.join(_MODULES)}")
    return import_module(f"gsm.analysis.{name}")


def __dir__() -> list[str]:
    return list(_MODULES)
