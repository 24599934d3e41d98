"""Global state models: language models whose decoder layers all read one shared state of fixed size.

Importing this package is cheap: PyTorch, Hydra and Lightning are loaded when one of the names below is first used.

    model = gsm.build_model("gsm", size="nano", overrides=["model/retriever=separate_indexer"])
    model = gsm.load_model("logs/default/gsm-seed0")
    print(gsm.taps(model))                                   # the names of what can be recorded and patched
    with gsm.record("stage/*") as seen:
        model(tokens)                                        # or model("def "), if it has learned from text
    with gsm.patch("state/entries", lambda entry_BEC: 0 * entry_BEC):
        model(tokens)
    gsm.explore(model, tokens[0]).save("explorer.html")      # or a text

``gsm.notebook`` has pictures for notebooks, and ``gsm.analysis`` the analyses of a trained model.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsm import analysis as analysis
    from gsm import notebook as notebook
    from gsm.config.load import build_model, load_model, load_tokenizer
    from gsm.engine import Engine
    from gsm.explorer import explore
    from gsm.explorer.words import tokens
    from gsm.observe import patch, record, taps

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "__version__",
    "build_model",
    "explore",
    "load_model",
    "load_tokenizer",
    "patch",
    "record",
    "taps",
    "tokens",
]

# OpenMP's threads spin for milliseconds while they wait for each other. On a busy machine this makes two threads slower
# than one. A short spin costs a quiet machine little. GNU's OpenMP reads the variable when PyTorch is imported.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"

_HOMES = {
    "Engine": "gsm.engine",
    "build_model": "gsm.config.load",
    "explore": "gsm.explorer",
    "load_model": "gsm.config.load",
    "load_tokenizer": "gsm.config.load",
    "patch": "gsm.observe",
    "record": "gsm.observe",
    "taps": "gsm.observe",
    "tokens": "gsm.explorer.words",
}
_PACKAGES = ("analysis", "notebook")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, and cache it."""
    if name in _PACKAGES:
        return import_module(f"gsm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gsm' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
