"""What the site needs besides Markdown: equations as MathML, and tables that are made from the yaml files.

A Python-Markdown extension, found because `make docs` puts this folder on the import path. Equations become MathML
while the site is built, so that no page asks another machine for scripts or fonts. A line `<!-- yamls: GROUP -->`
becomes a table of the yamls of a config group with the question that each asks, its opening comment.
"""

from __future__ import annotations

import html
import re
from itertools import takewhile
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MARKER = re.compile(r"<!-- yamls: (\S+) -->")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


class Pages(Extension):
    """Tables of yamls, then everything else, then equations as pymdownx.arithmatex has left them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Called by Python-Markdown."""
        md.preprocessors.register(Tables(md), "gsm-tables", 100)
        md.postprocessors.register(Equations(md), "gsm-equations", -10)


class Tables(Preprocessor):
    """A table in place of each marker that stands on a line of its own outside of code."""

    def run(self, lines: list[str]) -> list[str]:
        """All lines of a page."""
        found = ((line, MARKER.fullmatch(line)) for line in lines)
        return [new for line, match in found for new in (table(match[1]) if match else [line])]


class Equations(Postprocessor):
    """MathML in place of TeX."""

    def run(self, text: str) -> str:
        """The HTML of a page, or of a docstring."""
        return EQUATION.sub(equation, text)


def equation(match: re.Match[str]) -> str:
    """One equation, in its line or on lines of its own."""
    shown = "inline" if match[1] == "span" else "block"
    return convert(html.unescape(match[2]).strip(), display=shown)


def table(group: str) -> list[str]:
    """Lines of a Markdown table: the yamls of a group, and what each asks. Raises ValueError where there is none."""
    files = sorted((CONFIGS / group).glob("*.yaml"))
    if not files:
        raise ValueError(f"<!-- yamls: {group} -->: there is no yaml in configs/{group}")
    rows = [f"| `{file.stem}` | {opening_comment(file.read_text())} |" for file in files]
    return ["", "| yaml | asks, or is |", "|---|---|", *rows, ""]


def opening_comment(yaml: str) -> str:
    """The first paragraph of the comment that a yaml opens with, in one line."""
    lines = (line for line in yaml.splitlines() if not line.startswith("# @package"))
    paragraph = takewhile(lambda line: line.startswith("# "), lines)
    return " ".join(line[2:].strip() for line in paragraph).replace("|", "\\|")
