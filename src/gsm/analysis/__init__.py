"""Tools to look into a trained model: the content of its state, the sources of it, and the effect of removing it.

    rollout          which source positions reach each entry of the state, and by which way, from attention alone
    attribution      the same from gradients and from replaced tokens, and how well the three agree
    interventions    a model without some entries, bank slots or a stage's retrieval, inside a ``with`` block
    patching         which layer, stage, slot and entry carries an answer, by parts of one call put into another
    lens             what the model would say after each layer, and what each part adds to a logit
    needles          where needles lie, how many are answered by depth and length, and which removals break an answer
    probes           how well a linear map still reads a token from some distance back, with a shuffled control
    attention        where attention goes: over a text, over the state, how far back, and to sinks
    overlap          the share of the stages' selection that the encoder selects too
    state            properties of the shared state: its entries, their lengths and cosines, its effective rank
    figures          small functions that draw all of this on given axes

Every function takes a model and tokens and gives tensors or small dataclasses; none needs Lightning or Hydra. The
notebooks 01 to 10 use these functions.
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
