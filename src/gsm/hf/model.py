"""Any model of this project behind the interface of transformers. B sequences, T tokens, R rows, V vocabulary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gsm.config.load import model_of
from gsm.hf.config import GSMConfig
from gsm.hf.memory import Remembered

CODE = "modeling_gsm.py"
# What a folder brings as its code, so that trust_remote_code=True finds this package where it is installed.
REMOTE = """# The code of this model is the package gsm (gsm-playground), which has to be installed.
from gsm.hf import GSMConfig, GSMForCausalLM  # noqa: F401
"""
NOT_HAD = {  # arguments of forward that these models cannot obey, and why
    "inputs_embeds": "they are made of tokens: give input_ids",
    "output_attentions": "attention weights are nowhere written out: gsm.record sees selections, gsm.analysis the rest",
    "output_hidden_states": "they are streams of several kinds: record what you need with gsm.record",
}


class GSMForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model and its head.

    Args:
        config: what it is built from; a part that no yaml names is refused with a ConfigError.

    Attributes:
        model: the model itself, with everything that ``gsm`` can do with it.
    """

    config_class = GSMConfig
    config: GSMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}
    _no_split_modules = ["Block"]
    accepts_loss_kwargs = False  # so that Trainer divides all of the loss, also what indexers and experts lose
    _is_stateful = True  # what a state has read cannot be taken back: no assisted generation

    def __init__(self, config: GSMConfig) -> None:
        super().__init__(config)
        self.model = model_of({"hyper_parameters": {"config": {"model": config.model}}}, "config.json")
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As everywhere in transformers, but weights that do not fit are an error, a ValueError, and no warning."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, found = loaded
        wrong = [str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found[kind]]
        if wrong:
            raise ValueError(
                f"the weights do not fit the model in config.json: {', '.join(sorted(wrong)[:4])}; export them again"
            )
        return (model, found) if output_loading_info else model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Remembered | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with labels their loss, to which training adds that of indexers and experts.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], or with what was read before; 0 for padding, left or right of a sequence.
            position_ids: int64 [B, T] that count from 0; of fresh sequences without a mask, each 0 begins a document.
            past_key_values: of the tokens before these.
            labels: int64 [B, T], of the same positions, -100 for those that do not count.
            use_cache: whether to remember what is read; left out: as the configuration says, outside of training.
            logits_to_keep: the last so many rows, or these; 0: all.

        Raises:
            ValueError: what cannot be had, with the reason.
        """
        for name, reason in NOT_HAD.items():
            if kwargs.get(name) is not None and kwargs.pop(name) is not False:
                raise ValueError(f"{name} cannot be had of these models, for {reason}")
        if input_ids is None:
            raise ValueError("input_ids is missing: int64 [B, T]")
        if past_key_values is not None and not isinstance(past_key_values, Remembered):
            kind = type(past_key_values).__name__
            raise ValueError(f"past_key_values is a {kind}, which these models cannot write to: leave it out")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        memory = self.model.start(len(input_ids)) if use_cache else None
        if past_key_values is not None:  # which is empty to len()
            memory = past_key_values.memory
        out = self.model(
            input_ids,
            documents=_documents(input_ids, attention_mask, position_ids, memory is not None and memory.used > 0),
            memory=memory,
            rows=logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else None,
        )
        hidden_BRD = out.hidden_BRD
        if isinstance(logits_to_keep, Tensor):
            hidden_BRD = hidden_BRD[:, logits_to_keep]
        logits_BRV = out.head(hidden_BRD)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BRV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = loss + sum(out.losses.values()) if self.training else loss
        if out.memory is not None and past_key_values is not None:
            past_key_values.memory = out.memory
        elif out.memory is not None:
            past_key_values = Remembered(out.memory)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BRV, past_key_values=past_key_values)

    def get_input_embeddings(self) -> torch.nn.Module:
        """The table of the tokens."""
        return self.model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """The same table, as the head has it."""
        return self.model.head

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Raises NotImplementedError: other rows make another model."""
        raise NotImplementedError("the vocabulary is a part of the model: train one with size.vocabulary=...")

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Returns the table; raises NotImplementedError for another number of rows."""
        if new_num_tokens not in (None, self.model.vocabulary):
            raise NotImplementedError("the vocabulary is a part of the model: train one with size.vocabulary=...")
        return self.model.embedding

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As everywhere in transformers, and what the folder names as its code."""
        name = CODE.removesuffix(".py")
        self.config.auto_map = {"AutoConfig": f"{name}.GSMConfig", "AutoModelForCausalLM": f"{name}.GSMForCausalLM"}
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / CODE).write_text(REMOTE, encoding="utf-8")

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: every part has drawn its weights when it was made."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, *args: Any
    ) -> None:
        """An empty memory, unless there is one or none is wanted. Raises ValueError for another kind of cache."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation} is for caches of keys and values, "
                "and these models keep states: leave it out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            sequences = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs["past_key_values"] = Remembered(self.model.start(sequences))

    @staticmethod
    def _supports_default_dynamic_cache() -> bool:
        return False


def _documents(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, begun: bool
) -> Tensor | None:
    """int64 [B, T]: 0, and -1 for padding; without a mask a document for every position 0; None: one goes on.

    Raises ValueError for padding inside of a sequence, and for positions that count otherwise.
    """
    length = input_ids.shape[1]
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions, but has to be [B, T] with 0 for padding: what "
                "a row sees follows from the model"
            )
        mask_BT = attention_mask[:, -length:].bool()
        if bool(mask_BT.all()):
            return None
        changes_B = (mask_BT[:, 1:] != mask_BT[:, :-1]).sum(1)
        if bool((changes_B - (~mask_BT[:, 0]).long() > 1).any()):
            raise ValueError("attention_mask has padding inside of a sequence: give it left or right of it")
        return mask_BT.long() - 1
    if position_ids is None or begun:
        return None
    position_BT = position_ids.expand(input_ids.shape)
    document_BT = (position_BT == 0).long().cumsum(1) - 1
    first_BT = torch.where(position_BT == 0, torch.arange(length, device=position_BT.device), 0).cummax(1).values
    counted_BT = torch.arange(length, device=position_BT.device) - first_BT
    if not torch.equal(counted_BT, position_BT):
        raise ValueError("position_ids have to count from 0, and from 0 again where a document begins")
    return document_BT if bool(document_BT.any()) else None
