"""Plain English: docstrings and comments avoid some words, and names are nouns (CONTRIBUTING.md, "The language").

Each word has a ceiling, for the code of the library. Lower a ceiling when a change has removed some; never raise one.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest

from gsm.paths import ROOT

WORDS = {  # pattern, without regard to case: times that it may occur
    r"\bwhat\b": 36,
    r"\bof (?:which|whom|whose)\b|\bwhose\b": 42,
    r"\b(?:so|as) many\b": 7,
    r"\b(?:alike|anew|besides)\b": 2,
    r"\b(?:says|said|told|tells)\b": 13,
    r"\bone (?:of|that|which|for)\b": 52,
    r"\b(?:theirs|those (?:that|of|which))\b": 62,
    r"(?:^|[.!?]\s+)(?:not|nor|which|whose|of)\b": 41,
}
NAMES = ("found", "one", "known", "own", "said", "given", "kept", "asked", "told", "there", "here", "others", "alike")
ASSIGNED = 50  # times that a variable may get one of these names
SOURCES = [path for zone in ("src", "kernels", "benchmarks") for path in sorted((ROOT / zone).rglob("*.py"))]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Each docstring, and each comment."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [
        ast.get_docstring(node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented)
    ]
    comments = [
        token.string.lstrip("# ")
        for path in SOURCES
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.COMMENT
    ]
    return [text for text in docstrings + comments if text]


@pytest.mark.parametrize(("word", "ceiling"), WORDS.items())
def test_docstrings_and_comments_avoid(texts: list[str], word: str, ceiling: int) -> None:
    count = sum(len(re.findall(word, text, re.IGNORECASE)) for text in texts)
    assert count <= ceiling, f"{word} occurs {count} times: write the noun, or the verb, instead"


def test_names_are_nouns() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    stores = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    vague = [name for name in stores if name in NAMES]
    assert len(vague) <= ASSIGNED, f"{len(vague)} variables are called {', '.join(sorted(set(vague)))}"
