"""``config.json`` of any model of this project: the part of the configuration from which the model is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from gsm.config.compose import compose


class GSMConfig(PreTrainedConfig):
    """The configuration of a model.

    Attributes:
        model: the node ``model`` of a configuration, resolved to plain containers, with the name of a class or function
            under every ``_target_``. A model is built from it only if yaml files of the project name all of these.
        vocab_size, hidden_size, num_hidden_layers: for information only; ``model`` defines the model.
        max_position_embeddings: tokens of the training sequences; the model can read longer ones.
    """

    model_type = "gsm"
    keys_to_ignore_at_inference = ["past_key_values"]

    model: dict[str, Any] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    max_position_embeddings: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, node: Mapping[str, Any], context: int | None = None, **more: Any) -> GSMConfig:
        """Return the configuration of a model built from ``node`` and trained on sequences of ``context`` tokens."""
        geometry = node["geometry"]
        sizes = {
            "vocab_size": geometry["vocabulary"],
            "hidden_size": geometry["dim"],
            "num_hidden_layers": geometry["encoder_layers"] + geometry["decoder_layers"],
            "max_position_embeddings": context,
        }
        return cls(model=dict(node), **sizes, **more)

    @classmethod
    def of_variant(cls, name: str = "gsm", size: str = "nano", overrides: Iterable[str] = ()) -> GSMConfig:
        """Return the configuration of a new model; arguments as of ``gsm.build_model``.

        Raises:
            ConfigError: if the configuration is invalid.
        """
        config = compose([f"model={name}", f"size={size}", "arm=model", *overrides])
        return cls.of(config["model"], config["size"]["context"])
