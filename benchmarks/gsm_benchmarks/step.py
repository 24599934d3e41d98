"""How fast models train and decode beside transformers' Llama of as many parameters and layers, on a CPU.

All models take turns in one process, in float32 and in bfloat16, with random weights and tokens. A step of training is
forward, backward, clipping and the optimiser with which ``train.py`` trains the size, for Llama as for ours; bfloat16
is autocast. A decoded token follows a prompt, from an engine or with the library's own cache; bfloat16 is that of
weights and memory.

Llama has the width, depth, vocabulary and heads of the size, as many heads of keys and values, a tied embedding, and a
feed-forward as wide as needed for the parameters of the first model. It is as the library ships it, with SDPA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsm.config.load import instantiate
from gsm.engine import Engine
from gsm.errors import within
from gsm.models.geometry import Geometry
from gsm.training.heap import keep_freed

from . import machine, models, results, training
from .models import Entry, Model, one_size
from .models import read as read_models
from .results import Asked, Row, mark, quartiles, read, table
from .timing import Moment, spread, take_turns

MODELS = ("gsm", {"name": "mhc", "overrides": ["size.streams=4"]}, "baseline", "transformer")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LLAMA, DECODED = "llama", 16  # tokens of a lap of decoding
HEAD = (
    "model", "parameters", "step: tokens/s", "ms (quartiles)", "x Llama (quartiles of rounds)", "by processor time",
    "decoding: tokens/s", "ms a token (quartiles)", "x Llama (quartiles of rounds)", "by processor time",
)  # fmt: skip


def run(
    models: Sequence[Entry] = MODELS,
    size: str | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    batch_size: int = 4,
    context: int | None = None,
    rounds: int = 15,
    seconds: float = 120.0,
    **asked: Any,
) -> Path:
    """Measure all models in turns, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/step.yaml and configs/benchmark.yaml.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: a value out of range, another device than a CPU, or a file of another benchmark.
    """
    how = Asked(**asked)
    if how.results:
        return _show(Path(how.results))
    within(1, batch_size=batch_size, context=context, rounds=rounds)
    if not set(dtypes) <= set(DTYPES):
        raise ValueError(f"dtypes must be a list of {' and '.join(DTYPES)}, got {list(dtypes)}")
    where = machine.chosen(how.device)
    if where.type != "cpu":
        raise ValueError(f"device must be cpu, got {where.type}")
    keep_freed()  # as in train.py
    chosen = read_models(models)
    size = one_size(chosen, size, "nano")
    file = how.open("step", where)
    file.facts["versions"] |= {"transformers": import_module("transformers").__version__}
    protocol = {"size": size, "batch_size": batch_size, "rounds": rounds, "seconds": seconds}
    protocol["context"] = context or chosen[0].config(size)["data"]["context"]
    contenders = {
        f"{name} {size}, {dtype}, threads: {torch.get_num_threads()}": (name, dtype)
        for dtype, name in itertools.product(dtypes, [*(model.name for model in chosen), LLAMA])
    }
    file.given |= {row: model.given for row, (name, _) in contenders.items() for model in chosen if model.name == name}
    about = {
        row: {"model": name, "dtype": dtype, "protocol": protocol, "decoded": DECODED}
        for row, (name, dtype) in contenders.items()
    }
    with file.showing(_show):
        if file.left(about, protocol):
            with file.measuring(about):
                made = measure({model.name: model for model in chosen}, contenders, protocol, where)
                for row in contenders:
                    file.add(row, {**about[row], **made[row]})
    return file.path


def measure(
    chosen: Mapping[str, Model], contenders: Mapping[str, tuple[str, str]], protocol: Row, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Return the measured part of every row, as plain containers.

    Args:
        chosen: the models by name.
        contenders: the model and the dtype of each row; a name that is not among the models is Llama.
        protocol: the size, and how is measured.
        device: a CPU.
    """
    size, batch, context = protocol["size"], protocol["batch_size"], protocol["context"]
    first = next(iter(chosen.values()))
    config = first.config(size)
    count = sum(p.numel() for p in first.build(size).parameters())
    tokens_BT = torch.randint(config["size"]["vocabulary"], (batch, context + 1))
    rows: dict[str, dict[str, Any]] = {}
    steps, decoding = {}, {}
    for row, (name, dtype) in contenders.items():
        job = training.Job(chosen.get(name, first), size, False, batch, context, 0, 0)
        trained, decoded = (
            chosen[name].build(size) if name in chosen else llama(instantiate(config["size"], "size"), count)
            for _ in range(2)
        )
        half, decoded = dtype == "bfloat16", decoded.to(DTYPES[dtype]).eval().requires_grad_(False)
        room = (1 + protocol["rounds"]) * DECODED
        if name in chosen:
            steps[row] = training.step_of(trained, job, device, half)
            decoding[row] = _decoding(decoded, tokens_BT[:1, :-1], room)
        else:
            steps[row] = _llama_step(trained, job, tokens_BT, half)
            decoding[row] = _llama_decoding(decoded, tokens_BT[:1, :-1])
        rows[row] = {"parameters": sum(p.numel() for p in trained.parameters())}
    for part, runs in {"step": steps, "decode": decoding}.items():
        for run in runs.values():
            run()
        laps = take_turns(runs, device, protocol["rounds"], protocol["seconds"])
        for row, (_, dtype) in contenders.items():
            beside = next(other for other, who in contenders.items() if who == (LLAMA, dtype))
            rows[row][part] = _times(laps[row], laps[beside])
    return rows


def _times(laps: Sequence[Moment], llama: Sequence[Moment]) -> dict[str, Any]:
    """Return the milliseconds of a lap, and Llama's over these in each round: by the wall, and in processor time."""
    clocks = {"": [lap.wall for lap in laps], "processor_": [lap.processor for lap in laps]}
    theirs = {"": [lap.wall for lap in llama], "processor_": [lap.processor for lap in llama]}
    times: dict[str, Any] = {f"{clock}ms": spread(ours)._asdict() for clock, ours in clocks.items()}
    for clock, ours in clocks.items():
        times[f"{clock}ratio"] = spread(b / a for a, b in zip(ours, theirs[clock], strict=True))._asdict()
    return times


def llama(geometry: Geometry, parameters: int) -> Any:
    """Return the library's Llama of a size, with this number of parameters as closely as the width of the feed-forward
    allows.

    Raises ValueError with fewer parameters than it needs for a feed-forward of one channel.
    """
    transformers, dim, depth = import_module("transformers"), geometry.dim, geometry.depth
    remaining = geometry.vocabulary * dim + depth * (4 * dim * dim + 2 * dim) + dim
    width = round((parameters - remaining) / (3 * depth * dim))
    if width < 1:
        raise ValueError(f"a Llama of {depth} layers, {dim} wide, has more than {parameters:,} parameters")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=geometry.vocabulary,
            hidden_size=dim,
            intermediate_size=width,
            num_hidden_layers=depth,
            num_attention_heads=geometry.heads,
            num_key_value_heads=geometry.heads,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=True,
        )
    )


def _llama_step(model: Any, job: training.Job, tokens_BT: Tensor, half: bool) -> Callable[[], None]:
    """Return one step of training on tokens, each the target of the token before it."""
    layers = list(model.model.layers.parameters())
    groups = {
        "table_decay": list(model.model.embed_tokens.parameters()),
        "decay": [p for p in layers if p.ndim > 1],
        "no_decay": [*(p for p in layers if p.ndim < 2), *model.model.norm.parameters()],
    }
    optimizer, targets_BT = job.optimizer().build(groups, half=half), tokens_BT[:, 1:].contiguous()
    model.train()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            given = {"labels": targets_BT, "shift_labels": targets_BT, "use_cache": False}
            loss = model(input_ids=tokens_BT[:, :-1], **given).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _decoding(model: Any, prompt_BT: Tensor, room: int) -> Callable[[], None]:
    """Return a lap of decoding, on and on from the end of a prompt."""
    engine = Engine(model, batch=len(prompt_BT), capacity=prompt_BT.shape[1] + room)
    engine.warm_up()
    engine.prefill(prompt_BT)

    def lap() -> None:
        for _ in range(DECODED):
            engine.decode(prompt_BT[:, -1])

    return lap


def _llama_decoding(model: Any, prompt_BT: Tensor) -> Callable[[], None]:
    """Return the same for Llama, whose cache grows."""

    def read(tokens_BT: Tensor, cache: Any) -> Any:
        with torch.no_grad():
            return model(input_ids=tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    cache = read(prompt_BT, None)

    def lap() -> None:
        for _ in range(DECODED):
            read(prompt_BT[:, -1:], cache)

    return lap


def _show(path: Path) -> Path:
    """Publish the tables of a file of results, one for each dtype and number of threads."""
    content = read(path, "decoded")
    alike: dict[str, list[Row]] = {}
    for row in content["rows"].values():
        alike.setdefault(repr((row["dtype"], row["protocol"], mark(row))), []).append(row)
    sections = []
    for rows in alike.values():
        how = rows[0]["protocol"]
        sections += [
            f"## {how['size']}, {rows[0]['dtype']}, threads: {rows[0]['threads']}",
            f"A step has {how['batch_size']} x {how['context']} tokens; a token follows {how['context']} and more.",
            table(HEAD, map(_cells, rows)),
        ]
    return results.publish(path, results.measured_on(content), models.described(content["rows"].values()), *sections)


def _cells(row: Row) -> tuple[str, ...]:
    if row.get("failed"):
        return row["model"], f"failed: {row['failed']}"
    step, decode, how = row["step"], row["decode"], row["protocol"]
    token = {key: value / row["decoded"] for key, value in decode["ms"].items()}
    speeds = how["batch_size"] * how["context"] / step["ms"]["median"], 1 / token["median"]
    cells = [
        (f"{1e3 * speed:,.0f}", quartiles(ms), quartiles(times["ratio"]), quartiles(times["processor_ratio"]))
        for speed, ms, times in zip(speeds, (step["ms"], token), (step, decode), strict=True)
    ]
    return row["model"], f"{row['parameters']:,}", *cells[0], *cells[1]
