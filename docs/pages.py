"""Equations of the site as MathML, made while it is built, so that no page asks another machine for scripts or fonts.

And Markdown inside of <details>, which forges render without being asked.

A Python-Markdown extension, found because `make docs` puts this folder on the import path.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


class Pages(Extension):
    """Folds after blocks of code and before HTML; equations last, as pymdownx.arithmatex has left them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Called by Python-Markdown."""
        md.preprocessors.register(Folds(md), "gsm-folds", 22)  # superfences 25, md_in_html 20
        md.postprocessors.register(Equations(md), "gsm-equations", -10)


class Folds(Preprocessor):
    """Asks md_in_html for the Markdown of a fold."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines of a page."""
        return [line.replace("<details>", '<details markdown="1">') for line in lines]


class Equations(Postprocessor):
    """MathML in place of TeX."""

    def run(self, text: str) -> str:
        """The HTML of a page, or of a docstring."""
        return EQUATION.sub(equation, text)


def equation(match: re.Match[str]) -> str:
    """One equation, in its line or on lines of its own."""
    shown = "inline" if match[1] == "span" else "block"
    return convert(html.unescape(match[2]).strip(), display=shown)
