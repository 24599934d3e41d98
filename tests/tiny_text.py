"""A text small enough that every test may have its own."""

from __future__ import annotations

from pathlib import Path


def write(root: Path) -> Path:
    """Forty modules of 1 to 4 kB in the folder `root`, which is returned."""
    for number in range(40):
        names = (f"f{number}_{rank}" for rank in range(20 + 5 * (number % 9)))
        body = "\n".join(f"def {name}(value):\n    return value + {len(name) * number}  # größer" for name in names)
        (root / f"module_{number}.py").write_text(f'"""Module {number}."""\n{body}\n')
    return root
