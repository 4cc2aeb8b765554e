"""Text of clearly different kinds that every Python installation carries: no download, no licence question.

The text depends on the Python version (its sources, its documentation, its Unicode tables) and on the seed only.
"""

import ast
import contextlib
import dis
import html.entities
import io
import random
import re
import sysconfig
import types
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

DOCUMENT_CHARS = (40, 900)
"""Shortest and longest document; others are left out, never cut, so that a document ends where its author ended it."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def read_documents(kind: str, num_chars: int, seed: int) -> list[str]:
    """Return documents of one of `KINDS`, in shuffled order, about `num_chars` characters in all."""
    rng = random.Random(f"{seed} {kind}")
    documents, total = [], 0
    for document in KINDS[kind](rng):
        if total >= num_chars:
            break
        if DOCUMENT_CHARS[0] <= len(document) <= DOCUMENT_CHARS[1]:
            documents.append(document)
            total += len(document)
    rng.shuffle(documents)
    return documents


def _modules(rng: random.Random) -> Iterator[tuple[str, ast.Module]]:
    """Yield (source, syntax tree) of the top-level modules of the standard library, in shuffled order."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rng.shuffle(paths)
    for path in paths:
        source = path.read_text(encoding="utf-8")
        yield source, ast.parse(source, path.name)


def _functions(rng: random.Random) -> Iterator[str]:
    """Yield top-level functions and classes of the standard library as they are written."""
    for source, module in _modules(rng):
        lines = source.split("\n")
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _reference(rng: random.Random) -> Iterator[str]:
    """Yield prose, in turn from the language reference and from a module's docstrings."""
    articles = sorted(topics.values())
    rng.shuffle(articles)
    for article, (_, module) in zip(articles, _modules(rng), strict=False):
        docstrings = [
            ast.get_docstring(node) or ""
            for node in ast.walk(module)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        for text in [article, *(docstring for docstring in docstrings if len(docstring) > 300)]:
            paragraphs = text.strip().split("\n\n")
            for start in range(0, len(paragraphs), 2):
                yield "\n\n".join(paragraphs[start : start + 2])


def _disassembly(rng: random.Random) -> Iterator[str]:
    """Yield bytecode listings of functions of the standard library."""
    for _, module in _modules(rng):
        codes = [compile(module, "module", "exec", dont_inherit=True)]
        while codes:
            code = codes.pop(0)
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            if len(code.co_code) <= 400:
                listing = io.StringIO()
                dis.dis(code, file=listing, depth=0)
                text = _ADDRESS.sub("", listing.getvalue())
                lines = (" ".join(line.split()) for line in text.splitlines())
                if "frozenset" not in text:  # printed in an order that changes with the hash seed
                    yield f"dis {code.co_name}\n" + "\n".join(line for line in lines if line)


def _character_names(rng: random.Random) -> Iterator[str]:
    """Yield runs of the Unicode character table: code point, category, name."""
    while True:
        first, last = rng.choice(((0x20, 0x3100), (0xA000, 0xAC00), (0x10000, 0x12000), (0x1D000, 0x1FA00)))
        start, lines = rng.randrange(first, last), []
        for code in range(start, start + rng.randint(4, 20)):
            with contextlib.suppress(ValueError):
                character = chr(code)
                lines.append(f"U+{code:04X} {unicodedata.category(character)} {unicodedata.name(character)}")
        if len(lines) >= 3:
            yield "\n".join(lines)


def _entities(rng: random.Random) -> Iterator[str]:
    """Yield markup full of HTML entities with the characters they stand for."""
    table = sorted((name, value) for name, value in html.entities.html5.items() if name.endswith(";"))
    while True:
        rows = [rng.choice(table) for _ in range(rng.randint(1, 10))]
        cells = [f'<tr><td class="name">&amp;{name}</td><td>&#x{ord(value[0]):x};</td></tr>' for name, value in rows]
        yield "<table>\n" + "\n".join(cells) + "\n</table>"


def _arithmetic(rng: random.Random) -> Iterator[str]:
    """Yield worked sums and ledgers: almost only digits."""
    while True:
        lines, balance = [], rng.randint(0, 500)
        for _ in range(rng.randint(2, 24)):
            amount, sign = rng.randint(1, 99), rng.choice("+-")
            result = balance + amount if sign == "+" else balance - amount
            lines.append(f"{balance} {sign} {amount} = {result}")
            balance = result
        yield "\n".join(lines) + f"\ntotal {balance}"


KINDS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "code": _functions,
    "reference": _reference,
    "disassembly": _disassembly,
    "characters": _character_names,
    "markup": _entities,
    "arithmetic": _arithmetic,
}
"""Kinds of text by name."""
