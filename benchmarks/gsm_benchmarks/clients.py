"""Time our models beside a model from transformers: DeepSeek-V4 with the same widths, or Llama with the same number of
parameters and layers.

Both run in one process, in float32, with random weights, and take turns: a step of training (forward, backward,
clipping, AdamW), prefill to the last position's logits with the memory ready, and decoding after a prompt.

Llama gets our width, depth, vocabulary and heads. Its keys and values have the number of heads of its queries. Its
feed-forward is as wide as needed for the number of our parameters. It attends by PyTorch's SDPA.

DeepSeek-V4 gets our vocabulary, width, depth, heads, entries and their rotated channels, query and output ranks,
window, index heads, K, four residual streams with 20 rounds of Sinkhorn, the clamped SwiGLU, and the tied embedding.
The remaining differences are between V4 and V4.1, which the baseline follows, and in the library's way to compute:

* Every layer behind the window-only ones pools a bank of its own, over groups that overlap (two projections of width
  2C), pools index keys of its own likewise, and searches them. The baseline's layers share three banks.
* All banks have the encoder's ratio; the baseline's decoder has an entry for every token.
* Hyper-connections read for the site that they stand at, not for the next, and a mixer of its own ends the stack;
  queries are normed for each head.
* The feed-forward is a mixture of experts: here one expert that is always chosen, and the shared one, of half the width
  each, which together are the dense one.
* Indexers learn nothing, while a step of the baseline includes their loss.
* Attention forms the weights of all pairs, under a mask; prefill computes every row of every layer.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsm.config.load import instantiate
from gsm.engine import Engine
from gsm.models.base import LanguageModel
from gsm.models.geometry import Geometry
from gsm.training.heap import keep_freed
from gsm.training.optimizer import AdamW
from gsm_kernels import explain

from . import machine, models, results
from .models import Entry, Model
from .models import read as read_models
from .results import Asked, Row, quartiles, read, table
from .timing import WARM_UP, Run, spread, take_turns

WORK = ("step", "prefill", "decode")
DECODED = 16  # tokens of a lap
CLIP = 1.0
HEAD = (
    "what", "ours: ms (quartiles)", "theirs: ms (quartiles)", "theirs / ours: of the medians (quartiles of rounds)",
    "by processor time", "kept, GiB: ours, theirs",
)  # fmt: skip


class Ours:
    """A model of this project. Its loss includes the indexers'."""

    def __init__(self, model: LanguageModel):
        self.model, self.chosen = model, explain()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by how they are decayed."""
        return self.model.parameter_groups()

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return cross-entropy and the other losses of the model."""
        out = self.model(tokens_BT, targets=targets_BT)
        return torch.stack([out.loss, *out.losses.values()]).sum()

    def prefill(self, tokens_BT: Tensor, room: int) -> tuple[Tensor, Any]:
        """Logits of the last position, [B, 1, V], and an engine with room for more tokens, as in ``generate.py``."""
        engine = Engine(self.model, batch=len(tokens_BT), capacity=tokens_BT.shape[1] + room)
        return engine.prefill(tokens_BT)[:, None], engine

    def decode(self, token_B1: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Logits of one more token, [B, 1, V], and the engine after it."""
        return memory.decode(token_B1[:, 0])[:, None], memory


class Theirs:
    """A model of the library's. Its cache grows.

    Args:
        model: the model.
        chosen: its implementations.
    """

    def __init__(self, model: Any, chosen: Mapping[str, str]):
        self.model, self.chosen = model, chosen

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters that are decayed, and that are not."""
        parameters = list(self.model.parameters())
        return {
            "decay": [p for p in parameters if p.ndim > 1],
            "no_decay": [p for p in parameters if p.ndim < 2],
        }

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy."""
        targets_BT = targets_BT.contiguous()
        return self.model(input_ids=tokens_BT, labels=targets_BT, shift_labels=targets_BT, use_cache=False).loss

    @torch.no_grad()
    def prefill(self, tokens_BT: Tensor, room: int) -> tuple[Tensor, Any]:
        """Logits of the last position, [B, 1, V], and a cache, which grows."""
        return self._read(tokens_BT, None)

    @torch.no_grad()
    def decode(self, token_B1: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Logits of one more token, [B, 1, V], and the cache, which is changed."""
        return self._read(token_B1, memory)

    def _read(self, tokens_BT: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(input_ids=tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:], out.past_key_values


class DeepseekV4(Theirs):
    """The library's DeepSeek-V4.

    Args:
        geometry: its widths and depths.
        parameters: not looked at.
        changes: fields of the library's configuration, see ``configuration``.
    """

    def __init__(self, geometry: Geometry, parameters: int = 0, **changes: Any):
        model = library().DeepseekV4ForCausalLM(configuration(geometry, **changes))
        config = model.config
        super().__init__(model, {"attention": config._attn_implementation, "experts": config._experts_implementation})


class Llama(Theirs):
    """The library's Llama.

    Args:
        geometry: gives width, depth, vocabulary and heads. The layers are a plain stack.
        parameters: number of parameters, met as closely as the width of the feed-forward allows.

    Raises:
        ValueError: with fewer parameters than it needs for a feed-forward of one channel.
    """

    def __init__(self, geometry: Geometry, parameters: int):
        dim, depth = geometry.dim, geometry.depth
        remaining = geometry.vocabulary * dim + depth * (4 * dim * dim + 2 * dim) + dim
        width = round((parameters - remaining) / (3 * depth * dim))
        if width < 1:
            raise ValueError(f"a Llama of {depth} layers, {dim} wide, has more than {parameters:,} parameters")
        config = library().LlamaConfig(
            vocab_size=geometry.vocabulary,
            hidden_size=dim,
            intermediate_size=width,
            num_hidden_layers=depth,
            num_attention_heads=geometry.heads,
            num_key_value_heads=geometry.heads,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        super().__init__(library().LlamaForCausalLM(config), {"attention": "sdpa"})


CLIENTS: dict[str, Any] = {"deepseek_v4": DeepseekV4, "llama": Llama}


def library() -> Any:
    """Return the library. Raises ModuleNotFoundError, with the remedy, where it is missing or too old."""
    remedy = "which is not installed: pip install -c constraints.txt -e '.[clients]'"
    try:
        transformers = import_module("transformers")
        if not hasattr(transformers, "DeepseekV4ForCausalLM"):
            remedy = f"and {transformers.__version__} is too old: pip install -c constraints.txt -e '.[clients]'"
            raise ModuleNotFoundError("no DeepseekV4ForCausalLM")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the model to compare with is in transformers >= 5.23, {remedy}") from error
    return transformers


def configuration(geometry: Geometry, **changes: Any) -> Any:
    """Return the library's configuration that comes nearest to a geometry; ``changes`` replace single fields.

    Raises:
        ValueError: for a feed-forward width that is odd, or a YaRN factor, which is not taken over.
    """
    if geometry.feed_forward_dim % 2 or geometry.yarn_factor != 1:
        raise ValueError(
            f"feed_forward_dim {geometry.feed_forward_dim} must be even and yarn_factor {geometry.yarn_factor} be 1 "
            "for a comparison with DeepSeek-V4; choose another size"
        )
    roles = [*geometry.encoder_roles(), *["bank"] * geometry.decoder_layers]
    sparse = "compressed_sparse_attention"
    fields = {
        "vocab_size": geometry.vocabulary,
        "hidden_size": geometry.dim,
        "num_hidden_layers": geometry.depth,
        "num_attention_heads": geometry.heads,
        "head_dim": geometry.entry_dim,
        "partial_rotary_factor": geometry.rotary_dim / geometry.entry_dim,
        "rope_theta": geometry.rope_base,
        "compress_rope_theta": geometry.bank_rope_base,
        "q_lora_rank": geometry.query_rank,
        "o_groups": geometry.output_groups,
        "o_lora_rank": geometry.output_rank,
        "sliding_window": geometry.window,
        "layer_types": ["sliding_attention" if role == "window" else sparse for role in roles],
        "compress_rates": {sparse: geometry.encoder_ratio, "heavily_compressed_attention": 128},
        "index_n_heads": geometry.index_heads,
        "index_head_dim": geometry.index_dim,
        "index_topk": geometry.top_k,
        "mlp_layer_types": ["moe"] * geometry.depth,
        "moe_intermediate_size": geometry.feed_forward_dim // 2,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",  # the model has no other
    }
    return library().DeepseekV4Config(**{**fields, **changes})


@dataclass(frozen=True)
class Job:
    """A measurement: a model beside a client, their size, the number of sequences and of tokens in each, the kind of
    work (``step``, ``prefill`` or ``decode``), and the largest numbers of rounds and seconds."""

    of: Model
    client: str
    size: str
    batch: int
    context: int
    work: str
    rounds: int
    seconds: float

    @property
    def name(self) -> str:
        """The name of its row."""
        beside = "" if self.client == "deepseek_v4" else f" beside {self.client}"
        return f"{self.of.name} {self.size}{beside}, {self.batch} x {self.context}, {self.work}"

    def about(self) -> dict[str, Any]:
        """Return the constants of its row; ``tokens`` is the number of tokens that a lap decodes."""
        about = {"model": self.of.name, "client": self.client, "size": self.size, "batch_size": self.batch}
        tokens = DECODED if self.work == "decode" else 1
        return {**about, "context": self.context, "work": self.work, "dtype": "float32", "tokens": tokens}


def run(
    models: Sequence[Entry] = ("baseline",),
    sizes: Sequence[str] = ("nano", "tiny"),
    contexts: Sequence[int] = (1024, 4096),
    work: Sequence[str] = WORK,
    client: str = "deepseek_v4",
    batch_size: int = 1,
    rounds: int = 5,
    seconds: float = 60.0,
    **asked: Any,
) -> Path:
    """Measure each pair, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/clients.yaml and configs/benchmark.yaml.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: a value out of range, or a file of another benchmark.
        Exception: the first that a row raised, once the others were measured.
    """
    how = Asked(**asked)
    if how.results:
        return _show(Path(how.results))
    if min(batch_size, rounds, *contexts) < 1 or not set(work) <= set(WORK):
        raise ValueError(
            f"batch_size {batch_size}, rounds {rounds}, contexts {list(contexts)}: give 1 or more; "
            f"work {list(work)}: there are {', '.join(WORK)}"
        )
    if client not in CLIENTS:
        raise ValueError(f"client={client} is not allowed because it is unknown. Use {' or '.join(CLIENTS)}.")
    where = machine.chosen(how.device)
    file = how.open("clients", where)
    file.facts["versions"] |= {"transformers": library().__version__}
    pairs = [(size, model) for size in sizes for model in read_models(models) if model.trained_size in (None, size)]
    rows = {}
    for (size, model), context, task in itertools.product(pairs, contexts, work):
        job = Job(model, client, size, batch_size, context, task, rounds, seconds)
        rows[job.name], file.given[job.name] = (job.about(), partial(measure, job, where)), model.given
    return file.fill(rows, {"rounds": rounds, "seconds": seconds}, show=_show)


def measure(job: Job, device: torch.device) -> dict[str, Any]:
    """Return the row of one pair and one kind of work, as plain containers."""
    gc.collect()  # the memory of the row before
    row = machine.in_memory(lambda: _measured(job, device))
    if row is not None:
        return row
    ways = f"batch_size={job.batch // 2}" if job.batch > 1 else f"contexts=[{max(1, job.context // 2)}]"
    return {"failed": f"out of memory with {job.batch} x {job.context} tokens; try {ways}"}


def _measured(job: Job, device: torch.device) -> dict[str, Any]:
    """Return the properties of a pair, and its times."""
    config = job.of.config(job.size)
    geometry: Geometry = instantiate(config["size"], "size")
    ours = Ours(job.of.build(job.size, device=device))
    with torch.device(device):
        theirs = CLIENTS[job.client](geometry, sum(p.numel() for p in ours.model.parameters()))
    pair: dict[str, Ours | Theirs] = {"ours": ours, "theirs": theirs}
    parameters = {who: sum(p.numel() for p in side.model.parameters()) for who, side in pair.items()}
    row: dict[str, Any] = {"parameters": parameters, "chosen": {who: side.chosen for who, side in pair.items()}}
    tokens_BT = torch.randint(geometry.vocabulary, (job.batch, job.context + 1), device=device)
    if job.work == "step":
        row["kept_gib"] = {who: kept_bytes(side, tokens_BT) / 2**30 for who, side in pair.items()}
        optimizer = instantiate(config["optimizer"], "optimizer")
        runs = {who: training_step(side, optimizer, tokens_BT) for who, side in pair.items()}
    else:
        make = {"prefill": _prefill, "decode": _decode}[job.work]
        runs = {who: make(side, tokens_BT[:, :-1], job.rounds) for who, side in pair.items()}
    return {**row, **paired(runs, device, job.rounds, job.seconds)}


def training_step(contender: Ours | Theirs, optimizer: AdamW, tokens_BT: Tensor) -> Run:
    """Return one step of training on tokens, each the target of the token before it. Freed memory stays with the
    process, as in ``train.py``, for both models."""
    keep_freed()
    contender.model.train()
    adamw = optimizer.build(contender.groups())

    def step() -> None:
        contender.loss(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(contender.model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()

    return step


def paired(runs: Mapping[str, Run], device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the times of ``ours`` and of ``theirs``, and their ratio in each round: by the clock, and on a CPU also by
    processor time. The two take turns; the first round does not count."""
    for run in runs.values():
        run()
    laps = take_turns(runs, device, rounds, seconds)
    compared = _compared({who: [lap.wall for lap in laps[who]] for who in runs}, "")
    if device.type == "cpu":
        compared |= _compared({who: [lap.processor for lap in laps[who]] for who in runs}, "processor_")
    return compared


def _compared(times: Mapping[str, Sequence[float]], clock: str) -> dict[str, Any]:
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
    spreads = {f"{clock}{who}_ms": spread(laps)._asdict() for who, laps in times.items()}
    return {**spreads, f"{clock}ratio": spread(ratios)._asdict()}


def kept_bytes(contender: Ours | Theirs, tokens_BT: Tensor) -> int:
    """Return the bytes that the forward pass of a step keeps for the backward pass, without parameters."""
    contender.model.train()
    return machine.saved_bytes(
        lambda: contender.loss(tokens_BT[:, :-1], tokens_BT[:, 1:]), contender.model.parameters()
    )


def _prefill(contender: Ours | Theirs, tokens_BT: Tensor, rounds: int) -> Run:
    contender.model.eval()
    return lambda: contender.prefill(tokens_BT, DECODED)


def _decode(contender: Ours | Theirs, tokens_BT: Tensor, rounds: int) -> Run:
    """Decode on and on from the end of a prompt, so that all laps have nearly its length."""
    contender.model.eval()
    _, memory = contender.prefill(tokens_BT, room=(1 + WARM_UP + rounds) * DECODED)

    def lap() -> None:
        nonlocal memory
        for _ in range(DECODED):
            _, memory = contender.decode(tokens_BT[:, -1:], memory)

    return lap


def _show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path, "work")
    rows = content["rows"]
    sizes = {f"{row['model']} {row['size']}": row["parameters"] for row in rows.values() if "parameters" in row}
    counts = "; ".join(f"{name} {both['ours']:,}, theirs {both['theirs']:,}" for name, both in sizes.items())
    threads = f"{content['threads']} threads, float32." if "threads" in content else "float32."
    opening = f"{results.measured_on(content)} {threads}"
    about = models.described(rows.values())
    cells = [_cells(*row) for row in rows.items()]
    return results.publish(path, opening, f"Parameters: {counts}.", about, table(HEAD, cells))


def _cells(name: str, row: Row) -> tuple[str, ...]:
    sizes = ", ".join(f"{row['kept_gib'][who]:.2f}" for who in ("ours", "theirs")) if "kept_gib" in row else ""
    if row.get("failed"):
        return name, f"failed: {row['failed']}", "", "", "", sizes
    both = (quartiles(row[f"{who}_ms"], row["tokens"]) for who in ("ours", "theirs"))
    ratio, processor = _ratio(row, ""), _ratio(row, "processor_") if "processor_ratio" in row else ""
    title = f"{name}{' a token' if row['work'].startswith('decode') else ''}"
    return title, *both, ratio, processor, sizes


def _ratio(row: Row, clock: str) -> str:
    """Return the client's time over ours: the ratio of the medians, and the quartiles of the ratios of rounds."""
    theirs, ours = (row[f"{clock}{who}_ms"]["median"] for who in ("theirs", "ours"))
    rounds = row[f"{clock}ratio"]
    return f"{theirs / ours:.4g} ({rounds['low']:.4g} to {rounds['high']:.4g})"
