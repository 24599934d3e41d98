"""The architecture as an SVG, drawn from a geometry; ``drawing.svg.jinja`` has the look.

python -m gsm.analysis.drawing docs/architecture.svg          size nano; any other: size=tiny
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Template

from gsm.files import replacing
from gsm.models.geometry import Geometry

FILE = Path(__file__).with_suffix(".svg.jinja")
BOTTOM, TOP = 420, 150  # edges of the two stacks of layers
CHOSEN = ((2, 5, 9), (1, 7, 11), (0, 4, 12))  # selected entries in the picture of a bank, in turn


def draw(geometry: Geometry, *, stages: Sequence[int] | None = None, state_size: int | None = None) -> str:
    """The drawing of a GSM with these widths and depths, as the text of an SVG file; arguments as of ``GSM``."""
    layers, banks = _rows(geometry.encoder_layers), sorted(geometry.bank_layers)
    template = Template(FILE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    return template.render(
        layers=layers,
        owners=[max((bank for bank in banks if bank <= layer), default=None) for layer in range(1, len(layers) + 1)],
        chosen={bank: CHOSEN[number % len(CHOSEN)] for number, bank in enumerate(banks)},
        stages=[_beside(*layers[layer - 1]) for layer in (geometry.stages if stages is None else stages)],
        decoder=_rows(geometry.decoder_layers),
        window=geometry.window,
        top_k=geometry.top_k,
        state_size=state_size or geometry.window + geometry.top_k,
    )


def _rows(count: int) -> list[tuple[float, float]]:
    """Return top edge and height of each of ``count`` layers, the first at the bottom."""
    gap = min(10.0, 60 / count)
    height = (BOTTOM - TOP + gap) / count - gap
    return [(BOTTOM - number * (height + gap) - height, height) for number in range(count)]


def _beside(y: float, height: float) -> tuple[float, float]:
    """Top edge and height of a stage beside a layer."""
    stage_height = max(20.0, min(height, 46.0))
    return y + (height - stage_height) / 2, stage_height


def main(arguments: Sequence[str]) -> None:
    """Draws the size that is named to the file that is named."""
    import yaml

    from gsm.paths import configs

    size = next((word.removeprefix("size=") for word in arguments if word.startswith("size=")), "nano")
    path = next((Path(word) for word in arguments if "=" not in word), Path("docs/architecture.svg"))
    fields = yaml.safe_load((configs() / "size" / f"{size}.yaml").read_text(encoding="utf-8"))
    numbers = {name: value for name, value in fields.items() if not name.startswith("_") and name != "defaults"}
    with replacing(path) as file:
        file.write(draw(Geometry(**numbers)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
