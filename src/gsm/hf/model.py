"""A transformers model around any model of this project. B sequences, T tokens, R rows, V token ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from gsm.config.load import model_of
from gsm.hf.config import GSMConfig
from gsm.hf.documents import documents, joined_mask
from gsm.hf.memory import MemoryCache
from gsm.models.checks import IGNORED
from gsm.models.sampling import require_finite

CODE = "modeling_gsm.py"
# The code file in an exported folder. With trust_remote_code=True, transformers runs it to import this package.
REMOTE = """# The code of this model is the package gsm (gsm-playground), which must be installed.
from gsm.hf import GSMConfig, GSMForCausalLM  # noqa: F401
"""
UNSUPPORTED = {  # arguments of forward that these models do not support: reason and remedy
    "inputs_embeds": "the model reads tokens; use input_ids",
    "output_attentions": "attention weights are never materialised; use gsm.record for selections, or gsm.analysis",
    "output_hidden_states": "there are streams of several kinds; use gsm.record for the ones you need",
}
FIXED = "the vocabulary is a part of the model; train another one with size.vocabulary=..."
ONE_DEVICE = (
    "device_map must put the model on one device, as its parts read each other's weights; use {'': 'cpu'} or one GPU, "
    "with dtype=torch.bfloat16 if it is too small, got "
)


class GSMForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model of this project with the interface of transformers.

    Args:
        config: its configuration.

    Attributes:
        model: the ``gsm`` model, which all functions of ``gsm`` take.

    Raises:
        ConfigError: if the configuration names a class or function that no yaml of the project names.
        ValueError: if ``tie_word_embeddings`` is False.
    """

    config_class = GSMConfig
    config: GSMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}
    _no_split_modules = ["Block"]
    accepts_loss_kwargs = False  # Trainer then scales the whole loss, including that of indexers and experts
    _is_stateful = True  # a state cannot be rewound, so there is no assisted generation

    def __init__(self, config: GSMConfig) -> None:
        super().__init__(config)
        if not config.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be True, as head and embedding share their weight, got False")
        self.model = model_of({"hyper_parameters": {"config": {"model": config.model}}}, "config.json")
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model as transformers does, but with errors instead of warnings.

        Raises:
            ValueError: if the weights do not fit the model, or ``device_map`` puts them on several devices.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, report = loaded
        wrong = [str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind]]
        if wrong:
            raise ValueError(
                f"weights must fit the model in config.json, got misfits: {', '.join(sorted(wrong)[:4])}; export again"
            )
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if len(places) > 1 or "disk" in places:
            raise ValueError(f"{ONE_DEVICE}{' and '.join(sorted(places))}")
        return (model, report) if output_loading_info else model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits, the cache and, with labels, the loss.

        In training the loss includes those of indexers and experts.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], or [B, U + T] with the U tokens read before; 1 for tokens, 0 for padding, which is
                on the left of the tokens of a row, or on the right after the last of them.
            position_ids: int64 [B, T], positions in documents, which continue those of the tokens read before. A
                document begins at each 0.
            past_key_values: cache of the tokens read before. The call changes it; pass a copy.deepcopy to keep it.
            labels: int64 [B, T], the ids at the same positions (they are shifted here); -100 for positions without a
                loss. If all are -100, the loss is 0.
            use_cache: whether to return a cache; default: as in the configuration, and False in training.
            logits_to_keep: number of last rows to return logits for, or indices of rows; 0: all.

        Raises:
            ValueError: if an argument is invalid or not supported; the message names it and the reason.
        """
        num_items = kwargs.pop("num_items_in_batch", None)
        self._check_call(input_ids, attention_mask, position_ids, labels, past_key_values, logits_to_keep, kwargs)
        assert input_ids is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        memory, before_BU = self.model.start(len(input_ids)) if use_cache else None, None
        if past_key_values is not None:  # not by truth value: its len() is 0
            memory, before_BU = past_key_values.memory, past_key_values.mask_BT
        length = input_ids.shape[1]
        whole_BT = joined_mask(input_ids, attention_mask, memory.used if memory else 0, before_BU)
        mask_BT = None if whole_BT is None else whole_BT[:, -length:]
        if mask_BT is not None and past_key_values is None and labels is None and not bool(mask_BT.any(1).all()):
            raise ValueError(
                "attention_mask must have a 1 in every row, got a row of 0; let that row begin with the end of text"
            )
        target_BT = None if labels is None else torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        last = logits_to_keep if isinstance(logits_to_keep, int) else 0
        out = self.model(
            input_ids,
            documents=documents(input_ids, mask_BT, position_ids, memory),
            targets=target_BT,
            memory=memory,
            rows=min(last, length) if last and labels is None else None,
        )
        rows = slice(-last, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loss = out.loss
        if loss is not None and target_BT is not None:
            loss = loss if num_items is None else loss * (target_BT != IGNORED).sum() / num_items
            loss = loss + sum(out.losses.values()) if self.training else loss
        if out.memory is not None:
            past_key_values = MemoryCache(out.memory) if past_key_values is None else past_key_values
            past_key_values.memory, past_key_values.mask_BT = out.memory, whole_BT
        logits_BRV = out.head(out.hidden_BRD[:, rows])
        return CausalLMOutputWithPast(loss=loss, logits=logits_BRV, past_key_values=past_key_values)

    def _check_call(
        self,
        input_ids: Any,
        attention_mask: Any,
        position_ids: Any,
        labels: Any,
        past_key_values: Any,
        logits_to_keep: Any,
        others: dict[str, Any],
    ) -> None:
        """Raise ValueError if an argument of ``forward`` has a wrong type or shape, or is not supported."""
        wanted = {name: getattr(self.config, name, None) for name in ("output_attentions", "output_hidden_states")}
        for name, value in {**wanted, **{name: value for name, value in others.items() if value is not None}}.items():
            if value is not None and value is not False:
                reason = UNSUPPORTED.get(name, "forward has no such argument")
                raise ValueError(f"{name} must be left out: {reason}")
        tensors = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        for name, value in {"input_ids": input_ids, **tensors}.items():
            if not isinstance(value, Tensor) and (value is not None or name == "input_ids"):
                raise ValueError(f"{name} must be a tensor [B, T], got {value!r:.40}")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids must have the shape [B, T] with at least one token, got {list(input_ids.shape)}; with a "
                "cache, generate() takes the whole text, or new tokens with the attention_mask of the whole text"
            )
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels must have the shape of input_ids, {list(input_ids.shape)}, got {list(labels.shape)}"
            )
        if not isinstance(logits_to_keep, int | Tensor) or isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be a number of rows, or 0 for all, got {logits_to_keep}")
        _check_cache(past_key_values, len(input_ids))
        if hasattr(self, "_hf_hook") and any(weight.is_meta for weight in self.parameters()):
            raise ValueError(f"{ONE_DEVICE}offloaded weights")

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the token embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the head, whose weight is that of the embedding."""
        return self.model.head

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Raise NotImplementedError, because the vocabulary is fixed."""
        raise NotImplementedError(FIXED)

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> None:
        """Raise NotImplementedError, because the vocabulary is fixed."""
        self.set_input_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the embedding.

        Raises:
            NotImplementedError: if ``new_num_tokens`` differs from the present number.
        """
        if new_num_tokens not in (None, self.model.vocabulary):
            raise NotImplementedError(FIXED)
        return self.model.embedding

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, and write the code file that imports this package."""
        name = CODE.removesuffix(".py")
        self.config.auto_map = {"AutoConfig": f"{name}.GSMConfig", "AutoModelForCausalLM": f"{name}.GSMForCausalLM"}
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / CODE).write_text(REMOTE, encoding="utf-8")

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing, because the constructors have already initialised the weights."""

    def _prepare_model_inputs(
        self, inputs: Tensor | None, bos_token_id: Any, model_kwargs: dict[str, Any]
    ) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Prepare the prompts for ``generate``: rows without a token begin with the bos token.

        Raises:
            ValueError: if there is padding on the right, where new tokens follow, or no bos token for an empty row.
        """
        parent: Any = super()
        ids, name, model_kwargs = parent._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        if ids.ndim == 2 and not ids.shape[1] and model_kwargs.get("past_key_values") is None:
            ids, mask = ids.new_zeros(len(ids), 1), ids.new_zeros(len(ids), 1)
        if isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
            empty_B = (mask == 0).all(1)
            if bool(((mask[:, -1] == 0) & ~empty_B).any()):
                raise ValueError(
                    "attention_mask must have padding on the left, as new tokens follow on the right; use "
                    "padding_side='left' of the tokenizer"
                )
            if bos_token_id is None:
                raise ValueError("bos_token_id must be given for a prompt without any token, such as the end of text")
            ids, mask = ids.clone(), mask.clone()
            ids[empty_B, -1], mask[empty_B, -1] = bos_token_id, 1
            model_kwargs["attention_mask"] = mask
        return ids, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, *args: Any
    ) -> None:
        """Make an empty cache, unless there is one or ``use_cache`` is False.

        Raises:
            ValueError: if another type of cache is requested, or an argument for the cache is invalid.
        """
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "cache_implementation must be left out, as these models have states instead of keys and values, got "
                f"{generation_config.cache_implementation}"
            )
        sequences = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        cache = model_kwargs.get("past_key_values")
        _check_cache(cache, sequences)
        if cache is not None and generation_config.use_cache is False:
            raise ValueError("use_cache must be True with past_key_values, got False")
        if generation_config.prefill_chunk_size is not None and generation_config.prefill_chunk_size < 1:
            raise ValueError(f"prefill_chunk_size must be at least 1, got {generation_config.prefill_chunk_size}")
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = MemoryCache(self.model.start(sequences))

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the logits processors of transformers, preceded by a check for finite scores.

        Without the check, greedy decoding would return token 0 for NaN. With ``remove_invalid_values`` the check is
        left out, because transformers then replaces non-finite scores.
        """
        parent: Any = super()
        processors = parent._get_logits_processor(generation_config, *args, **kwargs)
        if not generation_config.remove_invalid_values:
            processors.insert(0, _finite)
        return processors


def _finite(input_ids: Tensor, scores_BV: Tensor) -> Tensor:
    """Return the scores of the next token unchanged.

    Raises:
        ValueError: if the best score of a sequence is not finite.
    """
    require_finite(scores_BV.amax(-1))
    return scores_BV


def _check_cache(cache: Any, batch: int) -> None:
    """Raise ValueError unless the cache is a ``MemoryCache`` with ``batch`` sequences, or None."""
    if cache is None:
        return
    if not isinstance(cache, MemoryCache):
        raise ValueError(f"past_key_values must be a MemoryCache, or left out, got a {type(cache).__name__}")
    if cache.batch_size != batch:
        raise ValueError(
            f"past_key_values must have {batch} sequences, as input_ids has, got {cache.batch_size}; use "
            "batch_select_indices() or batch_repeat_interleave() of the cache"
        )
