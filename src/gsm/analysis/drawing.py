"""The architecture as an SVG, drawn from a geometry: encoder, stages, writer, shared state, decoder.

    python -m gsm.analysis.drawing docs/architecture.svg          size nano; any other: size=tiny

Plain text, no library. Letters and lines follow the reader's light or dark scheme; fills are translucent, so that they
suit both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from gsm.files import replacing
from gsm.models.geometry import Geometry

WIDTH, HEIGHT = 880, 500
BOTTOM, TOP = 420, 150  # of the two stacks of layers
ENCODER, STAGES, STATE, DECODER = (24, 270), (372, 110), (560, 54), (690, 166)  # left edge and width of each column
WRITER = (44, 46)  # top edge and height
CELL = 8  # edge of an entry
CHOSEN = ((2, 5, 9), (1, 7, 11), (0, 4, 12))  # of the entries drawn of a bank, in turn
READS = ("reads what its", "layer looked at")
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .small { font-size: 11px; fill: #59636e } .title { font-weight: 600 }
  .line { stroke: #59636e; fill: none; stroke-width: 1.4 } .head { fill: #59636e }
  .encoder { fill: #0072b2; stroke: #0072b2 } .stage { fill: #d55e00; stroke: #d55e00 }
  .state { fill: #009e73; stroke: #009e73 } .decoder { fill: #9a60a8; stroke: #9a60a8 }
  .box { fill-opacity: 0.10; stroke-width: 1.4 } .cell { fill-opacity: 0.25; stroke-width: 0.8 }
  .full { fill-opacity: 1; stroke-width: 0.8 } .stage.line { fill: none } .state.line { fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .line { stroke: #9198a1 } .head { fill: #9198a1 }
    .encoder { fill: #56b4e9; stroke: #56b4e9 } .stage { fill: #f0883e; stroke: #f0883e }
    .state { fill: #2fbf93; stroke: #2fbf93 } .decoder { fill: #c792d4; stroke: #c792d4 }
  }
"""


def draw(geometry: Geometry, *, stages: Sequence[int] | None = None, state_size: int | None = None) -> str:
    """The drawing of a GSM with these widths and depths, as the text of an SVG file; arguments as of ``GSM``."""
    layers = list(geometry.stages if stages is None else stages)
    size = state_size or geometry.window + geometry.top_k
    encoder = _rows(geometry.encoder_layers)
    decoder = _rows(geometry.decoder_layers)
    parts = [
        *_encoder(geometry, encoder),
        *_stages(layers, encoder),
        *_writer(bool(layers)),
        *_state(size, decoder),
        *_decoder(geometry, decoder),
    ]
    said = f"GSM: an encoder of {geometry.encoder_layers} layers, {len(layers)} stages, a state of {size} entries, a "
    said += f"decoder of {geometry.decoder_layers} layers that all read it"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-label="{escape(said)}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _encoder(geometry: Geometry, rows: Sequence[tuple[float, float]]) -> list[str]:
    left, width = ENCODER
    parts = [
        _text(left + width / 2, HEIGHT - 18, "tokens, embedding", anchor="middle"),
        _arrow((left + width / 2, HEIGHT - 34), (left + width / 2, BOTTOM + 3)),
        _text(left, TOP - 12, "encoder", "title"),
        _text(left + 62, TOP - 12, "keeps windows and banks", "small"),
    ]
    banks = sorted(geometry.bank_layers)
    for layer, (y, height) in enumerate(rows, 1):
        middle, owner = y + height / 2, max((bank for bank in banks if bank <= layer), default=None)
        parts.append(_box(left, y, width, height, "encoder"))
        parts.append(_text(left + 8, middle + 4, str(layer)))
        below = middle + 4 if height >= 34 else middle  # what is written about them
        parts += _cells(left + 30, below, 6, "encoder", full=range(6))
        if owner is not None:
            parts += _cells(left + 106, below, 14, "encoder", full=CHOSEN[banks.index(owner) % len(CHOSEN)])
            if height >= 34:
                said = f"{geometry.top_k} of its bank" if owner == layer else f"the same of layer {owner}"
                parts.append(_text(left + 106, middle - 8, said, "small"))
        if layer == 1 and height >= 34:
            parts.append(_text(left + 106, middle + 4, f"window of {geometry.window}", "small"))
    return parts


def _stages(layers: Sequence[int], rows: Sequence[tuple[float, float]]) -> list[str]:
    left, width = STAGES
    parts, start = [], sum(ENCODER)
    for stage, layer in enumerate(layers, 1):
        y, height = rows[layer - 1]
        box = _stage_height(height)
        y += (height - box) / 2
        parts.append(_arrow((start, y + box / 2), (left - 3, y + box / 2)))
        parts.append(_box(left, y, width, box, "stage"))
        parts.append(_text(left + width / 2, y + box / 2 + 4, f"stage {stage}", anchor="middle"))
        end = float(sum(WRITER))
        if stage < len(layers):
            above, height = rows[layers[stage] - 1]
            end = above + (height + _stage_height(height)) / 2
        parts.append(_arrow((left + width / 2, y), (left + width / 2, end + 3), "stage"))
    if layers:
        below = rows[layers[0] - 1][0] + (rows[layers[0] - 1][1] + _stage_height(rows[layers[0] - 1][1])) / 2
        parts += [_text(start + 6, below + 17 + 13 * n, words, "small") for n, words in enumerate(READS)]
        parts.append(_text(left + width / 2 - 8, TOP - 18, "what was retrieved, r", "small", "end"))
    return parts


def _writer(stages: bool) -> list[str]:
    left, width = STAGES
    top, height = WRITER
    encoder = sum(ENCODER) - 20
    return [
        _line([(encoder, TOP), (encoder, top + height / 2), (left - 3, top + height / 2)]),
        _text(encoder - 8, top + height / 2 + 4, "the encoder's output, e", "small", "end"),
        _box(left, top, width, height, "stage"),
        _text(left + width / 2, top + 19, "writer", "title", anchor="middle"),
        _text(left + width / 2, top + 36, "z = e + r" if stages else "z = e", anchor="middle"),
    ]


def _state(size: int, rows: Sequence[tuple[float, float]]) -> list[str]:
    left, width = STATE
    top, height = WRITER
    start, end = sum(STAGES), sum(DECODER) - DECODER[1] / 2
    parts = [
        _box(left, TOP, width, BOTTOM - TOP, "state"),
        _line([(start, top + 15), (left + width / 2, top + 15), (left + width / 2, TOP - 3)], "state"),
        _text(start + 10, top + 8, "one entry a position", "small"),
        _line(
            [
                (start, top + 34),
                (start + 34, top + 34),
                (start + 34, BOTTOM + 30),
                (end, BOTTOM + 30),
                (end, BOTTOM + 3),
            ]
        ),
        _text(start + 42, BOTTOM + 46, "z of the row itself", "small"),
        _text(left + width / 2 + 10, TOP - 28, "shared state", "title"),
        _text(left + width / 2 + 10, TOP - 13, f"the last {size} entries", "small"),
    ]
    count = int((BOTTOM - TOP - 20) // 18)
    pitch = (BOTTOM - TOP - 20) / count
    for number in range(count):
        y = TOP + 10 + pitch * (number + 0.5) - 5
        parts.append(f'<rect class="state full" x="{left + 9}" y="{y:.1f}" width="{width - 18}" height="10" rx="2"/>')
    for y, row in rows:
        parts.append(_arrow((left + width, y + row / 2), (DECODER[0] - 3, y + row / 2), "state"))
    return parts


def _decoder(geometry: Geometry, rows: Sequence[tuple[float, float]]) -> list[str]:
    left, width = DECODER
    middle = left + width / 2
    parts = [_arrow((middle, TOP), (middle, 70)), _text(middle, 58, "norm, head, logits", anchor="middle")]
    parts += [_text(middle + 8, TOP - 28, "decoder", "title"), _text(middle + 8, TOP - 13, "keeps nothing", "small")]
    for number, (y, height) in enumerate(rows, geometry.encoder_layers + 1):
        parts.append(_box(left, y, width, height, "decoder"))
        parts.append(_text(left + 8, y + height / 2 + 4, str(number)))
        if height >= 20:
            parts.append(_text(left + 34, y + height / 2 + 4, "a query on the state", "small"))
    return parts


def _stage_height(height: float) -> float:
    """Of a stage beside a layer."""
    return max(20.0, min(height, 46.0))


def _rows(count: int) -> list[tuple[float, float]]:
    """Top edge and height of so many layers, the first one at the bottom."""
    gap = min(10.0, 60 / count)
    height = (BOTTOM - TOP + gap) / count - gap
    return [(BOTTOM - number * (height + gap) - height, height) for number in range(count)]


def _cells(x: float, middle: float, count: int, kind: str, full: Sequence[int]) -> list[str]:
    """A row of entries, some of which are read."""
    edge = f'y="{middle - CELL / 2:.1f}" width="{CELL}" height="{CELL}" rx="1.5"'
    names = ["full" if number in full else "cell" for number in range(count)]
    return [f'<rect class="{kind} {name}" x="{x + 11 * number:.1f}" {edge}/>' for number, name in enumerate(names)]


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind} box" x="{x}" y="{y:.1f}" width="{width}" height="{height:.1f}" rx="6"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _arrow(start: tuple[float, float], end: tuple[float, float], kind: str = "") -> str:
    return _line([start, end], kind)


def _line(points: Sequence[tuple[float, float]], kind: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind} line" points="{path}" marker-end="url(#head)"/>'


def main(arguments: Sequence[str]) -> None:
    """Draws the size that is named to the file that is named."""
    import yaml

    from gsm.paths import configs

    size = next((word.removeprefix("size=") for word in arguments if word.startswith("size=")), "nano")
    path = next((Path(word) for word in arguments if "=" not in word), Path("docs/architecture.svg"))
    fields = yaml.safe_load((configs() / "size" / f"{size}.yaml").read_text(encoding="utf-8"))
    text = draw(Geometry(**{name: value for name, value in fields.items() if not name.startswith("_")}))
    with replacing(path) as file:
        file.write(text.encode())


if __name__ == "__main__":
    main(sys.argv[1:])
