"""Write the facts as one HTML file, which works offline and runs only its own scripts.

Content of a text, a tokenizer or a checkpoint is stored as ASCII JSON without ``<``, ``>`` and ``&``, and inserted into
the page as text, never as HTML. A content security policy allows only the page's own scripts and styles, by their
hashes. Each array is a base64 element, so that the page decodes only the arrays that it draws.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Template
from torch import Tensor

from gsm.data.recall import Task
from gsm.data.tokenizer import Tokenizer
from gsm.explorer.facts import Facts, gather
from gsm.explorer.words import Question, of_id, questions_of, targets_of, words_of
from gsm.files import write_whole
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM

HERE = Path(__file__).parent
STYLE, SCRIPTS = "page.css", ("data.js", "text.js", "panel.js", "page.js")  # scripts in execution order
LARGEST = 48 * 2**20  # bytes of attention weights, above which only the mean over heads is stored
KINDS = {torch.uint8: "u1", torch.uint16: "u2", torch.int32: "i4", torch.float32: "f4"}


@dataclass(frozen=True)
class Page:
    """A page; a notebook displays it as the value of a cell.

    Attributes:
        html: content of the file.
        facts: the numbers in it.
        height: height in a notebook, in pixels.
    """

    html: str
    facts: Facts
    height: int = 760

    def __repr__(self) -> str:
        return f"Page({len(self.facts.token_T)} tokens, {len(self.html) / 1e3:.0f} kB)"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file atomically, and return its path."""
        write_whole(path, self.html.encode())
        return Path(path)

    def _repr_html_(self) -> str:
        """Return a sandboxed frame, which may run scripts without access to the notebook."""
        frame = f'sandbox="allow-scripts" style="width: 100%; height: {self.height}px; border: 0"'
        return f'<iframe title="GSM explorer" {frame} srcdoc="{html.escape(self.html)}"></iframe>'


def explore(
    model: LanguageModel,
    tokens: str | Tensor | Sequence[int],
    named: Tokenizer | Task | None = None,
    *,
    documents: Tensor | None = None,
    targets: Tensor | None = None,
    about: Mapping[str, object] | None = None,
) -> Page:
    """Return a page that shows the computation of a GSM at every token of a text.

    A notebook displays it; ``page.save(path)`` writes it to a file.

    Args:
        model: a GSM.
        tokens: a text that the model's tokenizer encodes, or int64 [T].
        named: the tokenizer or the task that gives the texts of tokens; None: the model's tokenizer, or plain numbers
            if it has none.
        documents: int64 [T], contiguous runs of equal ids; None: one document.
        targets: int64 [T], target of each row, -100 for none; None: the next token, or the answers to the questions of
            a needle or recall task.
        about: facts for the top of the page, by name.

    Raises:
        ValueError: the model has no shared state, or no tokenizer for a text; the number of tokens is out of range; or
            documents or targets differ from the tokens in length.
    """
    named = model.tokenizer if named is None else named
    token_T = torch.as_tensor(model.encode(tokens) if isinstance(tokens, str) else tokens).long().cpu()
    if token_T.dim() != 1:
        raise ValueError(f"tokens must be one sequence [T], got shape {list(token_T.shape)}; use tokens[0]")
    questions = questions_of(named, token_T)
    if questions and targets is None:
        targets = targets_of(questions, token_T)
    facts = gather(model, token_T, documents, targets)
    assert isinstance(model, GSM)  # checked by gather
    return Page(render(facts, named, questions, {**(about or {}), **describe(model)}), facts)


def describe(model: GSM) -> dict[str, str]:
    """Return facts about a model by name, for the top of a page."""
    geometry, stages = model.geometry, model.aggregation.layers
    return {
        "model": f"GSM, {sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters",
        "context": f"{geometry.context:,} in training",
        "window W": str(geometry.window),
        "selected K": f"{geometry.top_k} slots of {geometry.encoder_ratio} tokens",
        "state M": f"{model.state_size} entries",
        "stages": f"{len(stages)}, on layers {', '.join(map(str, stages))}" if stages else "none",
    }


def render(
    facts: Facts, named: Tokenizer | Task | None, questions: Sequence[Question], about: Mapping[str, object]
) -> str:
    """Return the HTML of the page.

    Args:
        facts: the numbers.
        named: the tokenizer or the task that gives the texts of tokens.
        questions: the questions of a task.
        about: facts for the top of the page, by name.
    """
    style = (HERE / STYLE).read_text(encoding="utf-8")
    scripts = [(HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    arrays = dict(_arrays(facts))
    template = Template((HERE / "page.html.jinja").read_text(encoding="utf-8"), keep_trailing_newline=True)
    return template.render(
        style=style,
        scripts=scripts,
        style_hash=_hash(style),
        script_hashes=[_hash(script) for script in scripts],
        about=_json(_plain_facts(facts, named, questions, about, arrays)),
        arrays={name: _base64(array) for name, array in arrays.items()},
    )


def _plain_facts(
    facts: Facts,
    named: Tokenizer | Task | None,
    questions: Sequence[Question],
    about: Mapping[str, object],
    arrays: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return all facts that are not arrays, for the page's JSON."""
    words = words_of(named, facts.token_T.tolist())
    predicted = {*facts.guess_TG.flatten().tolist(), *facts.target_T.tolist()} - {-1}
    return {
        "about": {name: str(value) for name, value in about.items()},  # as text, because NaN is not valid JSON
        "tokens": len(words),
        "words": [word.text for word in words],
        "kinds": "".join(word.kind for word in words),
        "names": {token: list(of_id(named, token)) for token in predicted},
        "questions": [[question.key, question.needle, question.row] for question in questions],
        "ratio": facts.ratio,
        "readings": [
            {"name": reading.name, "layer": reading.layer, "back": reading.back_E.tolist(), "own": reading.own}
            for reading in facts.readings
        ],
        "ways": list(facts.ways),
        "losses": list(facts.loss_T),
        "heads": arrays[f"{facts.readings[0].name}/near"].shape[1],
        "arrays": {name: [KINDS[array.dtype], *array.shape] for name, array in arrays.items()},
    }


def _arrays(facts: Facts) -> Iterator[tuple[str, Tensor]]:
    """Yield the arrays by their names in the page."""
    yield "token", facts.token_T.int()
    yield "document", facts.document_T.unique_consecutive(return_inverse=True)[1].to(torch.uint16)
    yield "target", facts.target_T.int()
    yield "start", facts.start_F.int()
    yield "way", _quantised(facts.way_ST)
    yield "source", (facts.source_TP + 1).to(torch.uint16)
    yield "share", _quantised(facts.share_STP)
    yield "read", facts.read_T.float()
    yield "retrieved", facts.retrieved_T.float()
    yield "guess", facts.guess_TG.int()
    yield "chance", _quantised(facts.chance_TG)
    for number, loss_T in enumerate(facts.loss_T.values()):
        yield f"loss/{number}", loss_T.float()
    size = sum(x.near_THE.numel() + x.far_THK.numel() + x.sink_TH.numel() for x in facts.readings)
    for reading in facts.readings:
        weights = {"near": reading.near_THE, "far": reading.far_THK, "sink": reading.sink_TH[..., None]}
        for part, weight in weights.items():
            yield f"{reading.name}/{part}", _quantised(weight.mean(dim=1, keepdim=True) if size > LARGEST else weight)
        yield f"{reading.name}/chosen", (reading.chosen_TK + 1).to(torch.uint16)


def _quantised(share: Tensor) -> Tensor:
    """Quantise the square roots of shares in [0, 1] to uint8.

    With square roots, small shares have small errors, and only shares below 4e-6 become 0.
    """
    return (share.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)


def _base64(array: Tensor) -> str:
    flat: np.ndarray = array.cpu().contiguous().numpy()
    return base64.b64encode(flat.astype(flat.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _json(value: Any) -> str:
    """Return JSON in which the special characters of HTML are escaped."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    """Return the hash of a script or style, as a content security policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
