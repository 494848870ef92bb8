"""docs/troubleshooting.md quotes messages as the sources have them.

A message on the page is a code span in the first column of a table whose header is "message". ``{name}`` stands for one
or more format fields, ``...`` for any text. Everything else must be equal to the text in the sources.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"

FIELD = "\0"  # a format field in a text of the sources
MAX_VARIANTS = 16  # of one text with conditional parts

_PERCENT = re.compile(r"%[-+ #0]*\d*(?:[.]\d+)?[sdrfg]|{}")  # fields of logging and of str.format
_WILD = re.compile(r"([.]{3}|{[a-z_]+})")  # in a message of the page
_LITERAL = r'"(?:[^"\\]|\\.)*"'


# ---- the page --------------------------------------------------------------------------------------------------------


def quoted_messages(page: str) -> list[str]:
    """Return the messages in the first columns of the tables whose header is "message"."""
    found, inside = [], False
    for line in page.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.startswith("| message |"):
            inside = True
        elif inside and not line.startswith("|---"):
            cell = re.split(r"(?<!\\)\|", line)[1]
            found += re.findall("`([^`]+)`", cell)
    return found


def is_among(message: str, texts: Iterable[str]) -> bool:
    """Return whether one of the texts is the message, field by field and word by word."""
    parts = _WILD.split(message)
    parts[1::2] = [".*" if part == "..." else f"{FIELD}+" for part in parts[1::2]]
    longest = max(parts[::2], key=len)  # a search for it leaves few texts to match, which saves seconds
    parts[::2] = [re.escape(part) for part in parts[::2]]
    pattern = re.compile("".join(parts), re.DOTALL)
    return any(longest in text and pattern.fullmatch(text) for text in texts)


# ---- Python ----------------------------------------------------------------------------------------------------------


def python_texts(source: str) -> set[str]:
    """Return all texts of a Python source, with format fields as FIELD.

    A field that is a constant of the module is also replaced by its value, and one that chooses between two texts by
    either of them.
    """
    tree = ast.parse(source)
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            constants.update({t.id: node.value.value for t in node.targets if isinstance(t, ast.Name)})
    texts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            texts.update(_texts_of(node, constants))
    return texts


def _texts_of(node: ast.expr, constants: dict[str, str]) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [_PERCENT.sub(FIELD, text)]
        case ast.JoinedStr(values=values):
            return _joined([_texts_of(value, constants) for value in values])
        case ast.FormattedValue(value=value):
            return [FIELD, *(text for text in _texts_of(value, constants) if text != FIELD)]
        case ast.Name(id=name) if name in constants:
            return [constants[name]]
        case ast.IfExp(body=body, orelse=orelse):
            return [FIELD, *_texts_of(body, constants), *_texts_of(orelse, constants)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _joined([_texts_of(left, constants), _texts_of(right, constants)])
        case _:
            return [FIELD]


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(chosen) for chosen in itertools.islice(itertools.product(*parts), MAX_VARIANTS)]


# ---- C++ -------------------------------------------------------------------------------------------------------------


def cpp_texts(source: str) -> set[str]:
    """Return the texts of a C++ source: its literals, and the messages that calls put together from their arguments."""
    source = re.sub(rf"({_LITERAL})|//[^\n]*", lambda match: match[1] or "", source)
    texts = {_unquoted(match[0]) for match in re.finditer(rf"{_LITERAL}(?:\s*{_LITERAL})*", source)}
    for match in re.finditer(r"\b(CPUMOE_REQUIRE|refuse|concat)\(", source):
        arguments = list(_arguments(source, match.end()))[1 if match[1] == "CPUMOE_REQUIRE" else 0 :]
        parts = [_unquoted(a) if re.fullmatch(rf"{_LITERAL}(?:\s*{_LITERAL})*", a) else FIELD for a in arguments]
        texts.add("".join(parts))
    return texts


def _unquoted(literals: str) -> str:
    return "".join(text[1:-1].replace(r"\"", '"') for text in re.findall(_LITERAL, literals))


def _arguments(source: str, at: int) -> Iterator[str]:
    """Yield the arguments of a call whose opening parenthesis is just before ``at``."""
    depth, first = 1, at
    for match in re.compile(rf"{_LITERAL}|'(?:[^'\\]|\\.)'|[()\[\]{{}},]").finditer(source, at):
        token = match[0]
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
        if depth == 0 or (depth == 1 and token == ","):
            yield source[first : match.start()].strip()
            first = match.end()
        if depth == 0:
            return


# ---- the tests -------------------------------------------------------------------------------------------------------


@cache
def source_texts() -> list[str]:
    texts: set[str] = set()
    for path in itertools.chain(ROOT.glob("src/cpumoe/**/*.py"), ROOT.glob("src/cpumoe_command/*.py")):
        texts |= python_texts(path.read_text())
    for path in itertools.chain(ROOT.glob("core/**/*.cc"), ROOT.glob("core/**/*.h")):
        texts |= cpp_texts(path.read_text())
    return [text for text in texts if " " in text]  # messages have several words


MESSAGES = quoted_messages(PAGE.read_text())


def test_quoted_messages_are_in_the_sources() -> None:
    assert [message for message in MESSAGES if not is_among(message, source_texts())] == []


def test_page_quotes_each_message_once() -> None:
    assert len(MESSAGES) > 500
    assert [message for message, count in Counter(MESSAGES).items() if count > 1] == []


def test_quoted_messages_have_words_to_search_for() -> None:
    assert [message for message in MESSAGES if not re.search("[A-Za-z]{2,}", _WILD.sub("", message))] == []


def test_changed_python_message_is_not_found() -> None:
    source = '_NAME = "X"\nraise ValueError(f"{_NAME}={value!r} is {\'old\' if a else \'new\'}; " f"{b} are accepted")'
    for message in ("X={value} is old; {most} are accepted", "{name}={value} is {state}; ... are accepted"):
        assert is_among(message, python_texts(source))
        for before, after in (("are accepted", "is accepted"), (" is {", " was {"), ("; ", ", ")):
            assert not is_among(message, python_texts(source.replace(before, after)))


def test_changed_log_line_is_not_found() -> None:
    source = '_log.warning("%s is damaged (%.2f) and will be replaced", path, problem)'
    message = "{path} is damaged ({problem}) and will be replaced"
    assert is_among(message, python_texts(source))
    assert not is_among(message, python_texts(source.replace("will be", "was")))


def test_changed_cpp_message_is_not_found() -> None:
    source = 'CPUMOE_REQUIRE(f(a, "(") > 0, name, "=", n, "; 0 to "  // why\n  "9 are accepted");'
    message = "{name}={number}; 0 to 9 are accepted"
    assert is_among(message, cpp_texts(source))
    assert not is_among(message, cpp_texts(source.replace("0 to ", "1 to ")))


def test_messages_are_read_from_the_first_column_of_message_tables() -> None:
    page = "| message | cause |\n|---|---|\n| `a {b}`<br>`c ...` | `d` |\n\n| other | e |\n|---|---|\n| `f` | g |\n"
    assert quoted_messages(page) == ["a {b}", "c ..."]
