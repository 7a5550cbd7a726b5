"""Docstrings and comments are short. They, and the strings that users see, are in words that a reader
of SGLang and the papers knows.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

from test_documents import sentences, without_code, words

PACKAGE = Path(__file__).parents[2] / "sgl_kvtier"
MODULES = sorted(PACKAGE.rglob("*.py"))
MEDIAN_WORDS, NINETIETH_PERCENTILE_WORDS, MOST_WORDS = 12, 20, 40

PRIVATE = re.compile(
    r"\b(lanes?|hands|stands? aside|asked back|mend|mended|mends|nobody|somebody|anybody|everybody"
    r"|whoever|so many|g[ai]ves? way|is nothing that|worked out anew|come to nothing)\b",
    re.I,
)
"""Words of this package's own for I/O threads, the executor of plans, falling back, cancelling,
evicting, a request, and a number.
"""


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module: of itself, its classes, functions and variables."""
    for node in ast.walk(ast.parse(source)):
        for statement in node.body if isinstance(getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield inspect.cleandoc(value.value)


def comments(source: str) -> Iterator[str]:
    """The comments of a module, one line each."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def strings(source: str) -> Iterator[str]:
    """The strings of a module that are text: errors, help, descriptions, logs. One word alone may be
    a key of JSON, a label or a value, so it is left out.
    """
    tree = ast.parse(source)
    expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in expressions else ""
        if isinstance(text, str) and len(text.split()) > 1:
            yield text


def prose(docstring: str) -> str:
    """A docstring without its indented examples and tables."""
    return re.sub(r"^ {4}.*$", "", docstring, flags=re.M)


def lengths(sources: list[str]) -> list[int]:
    """Words of each sentence of the docstrings."""
    found = (prose(docstring) for source in sources for docstring in docstrings(source))
    return [words(sentence) for text in found for sentence in sentences(text)]


def private(source: str) -> list[str]:
    """Private words in docstrings, comments and strings, code spans left out."""
    # A comment is on one line, and splitting source into tokens takes long.
    notes = comments(source) if PRIVATE.search(source) else ()
    texts = [*docstrings(source), *notes, *strings(source)]
    return [word for text in texts for word in PRIVATE.findall(re.sub(r"`[^`]+`", "", text))]


def test_sentences_of_docstrings_are_short():
    found = lengths([path.read_text("utf-8") for path in MODULES])
    assert len(found) > 4000
    assert median(found) <= MEDIAN_WORDS
    assert quantiles(found, n=10)[-1] <= NINETIETH_PERCENTILE_WORDS
    assert max(found) <= MOST_WORDS


def test_docstrings_comments_and_strings_need_no_private_words():
    named = {
        str(path.relative_to(PACKAGE)): found
        for path in MODULES
        if (found := private(path.read_text("utf-8")))
    }
    assert named == {}


def test_readmes_of_rooms_need_no_private_words():
    named = {}
    for path in sorted(PACKAGE.rglob("README.md")):
        text = re.sub(r"`[^`]+`", "", without_code(path.read_text("utf-8")))
        if found := PRIVATE.findall(text):
            named[str(path.relative_to(PACKAGE))] = found
    assert named == {}


def test_long_sentences_and_private_words_are_noticed():
    source = '''"""One `two three`. Four\nfive.

    an example: nobody counts this
"""
FAST = 1
"""So many lanes."""
def work():  # nobody waits
    return {"hands": f"{FAST} gave way"}
'''
    assert lengths([source]) == [2, 2, 3]
    assert private(source) == ["nobody", "So many", "lanes", "nobody", "gave way"]
