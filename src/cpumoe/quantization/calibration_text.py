"""Text for calibration: sequences of tokens from a file of any size, spread over all of it.

A file is a text, or with the ending ``.jsonl`` one JSON object a line: ``{"text": "..."}``, or ``{"messages": [...]}``,
which goes through the chat template of the tokenizer.

- A small file (4 MiB, or 16 bytes for every token wanted if that is more) is read whole. The tokens of its texts, one
  text after another, are cut into sequences, and of these as many as are wanted are taken, evenly spaced.
- Of a larger one, as many places as sequences are wanted are taken, evenly spaced by bytes; each sequence is what
  follows from the beginning of the next line on. Nothing else is read, however large the file is.

Memory does not grow with the file: long texts go to the tokenizer in pieces, cut where a line or a word ends.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_MIN_TOKENS = 2

_SMALL_BYTES = 4 << 20  # read whole
_BYTES_PER_TOKEN = 16  # several times what tokenizers need: a larger file has more tokens than are wanted

_PIECE_BYTES = 256 << 10  # to the tokenizer at once, at most: it takes some 200 times the memory of the text
_LONGEST_LINE = 64 << 20  # of a .jsonl file: JSON cannot be read in pieces

_ACCEPTED = 'accepted is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class _Piece:
    """Part of a text; ``begins`` if the tokenizer is to put the token there with which texts begin."""

    raw: bytes
    begins: bool
    offset: int  # of its line, or of itself, in the file


#: From a byte of the file on, pieces of at most so many bytes.
_Reader = Callable[[BinaryIO, int, int], Iterator[_Piece]]


def read_sequences(path: Path, tokenizer: Any, samples: int, length: int) -> Tensor:
    """Token ids [samples, length] int64; fewer, or one that is shorter, if the file has no more.

    Args:
        path: the file; how it is read is told above.
        tokenizer: of transformers.
        samples, length: how many sequences of how many tokens.

    Raises ValueError for a file that is not text, has no tokens, or has lines that are not as above.
    """
    if samples < 1 or length < _MIN_TOKENS:
        raise ValueError(f"{samples} sequences of {length} tokens; 1 or more of {_MIN_TOKENS} or more are accepted")
    if not path.is_file():
        seen = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"the calibration text {path} {seen}; a text file or JSON lines (.jsonl) are accepted")
    reader = partial(_json_lines, path, tokenizer) if path.suffix == ".jsonl" else _plain_text
    size = path.stat().st_size
    small = size <= max(_SMALL_BYTES, _BYTES_PER_TOKEN * samples * length)
    with path.open("rb") as file:
        if small:
            return _of_all(file, path, reader, tokenizer, samples, length)
        return _of_places(file, path, reader, tokenizer, samples, length, size)


def _of_all(file: BinaryIO, path: Path, reader: _Reader, tokenizer: Any, samples: int, length: int) -> Tensor:
    ids = array("q")
    for piece in reader(file, 0, _PIECE_BYTES):
        ids.extend(_tokens(piece, path, tokenizer))
    if len(ids) < _MIN_TOKENS:
        raise ValueError(f"the calibration text {path} has {len(ids)} tokens; {_MIN_TOKENS} or more are accepted")
    length = min(length, len(ids))
    whole = torch.frombuffer(ids, dtype=torch.int64)[: len(ids) // length * length].view(-1, length)
    step = max(1, len(whole) // samples)
    return whole[::step][:samples].clone()


def _of_places(
    file: BinaryIO, path: Path, reader: _Reader, tokenizer: Any, samples: int, length: int, size: int
) -> Tensor:
    sequences: list[list[int]] = []
    at_once = min(_PIECE_BYTES, _BYTES_PER_TOKEN * length)
    done = 0  # bytes: where the last sequence has ended
    for number in range(samples):
        ids: list[int] = []
        for piece in reader(file, max(done, number * size // samples), at_once):
            ids += _tokens(piece, path, tokenizer)
            if len(ids) >= length:
                sequences.append(ids[:length])
                break
        done = file.tell()
    if not sequences:
        raise ValueError(f"the calibration text {path} has no {length} tokens in a row; ask for shorter sequences")
    return torch.tensor(sequences)


def _tokens(piece: _Piece, path: Path, tokenizer: Any) -> list[int]:
    try:
        text = piece.raw.decode()
    except UnicodeDecodeError as problem:
        at = piece.offset + problem.start
        raise ValueError(f"{path} is not UTF-8 text: {problem.reason} at byte {at}; save it as UTF-8") from None
    ids: list[int] = tokenizer(text, add_special_tokens=piece.begins, verbose=False)["input_ids"]
    return ids


# ---- files ----------------------------------------------------------------------------------------------------------


def _plain_text(file: BinaryIO, start: int, at_once: int) -> Iterator[_Piece]:
    """A file that is one text, from the first line that begins at ``start`` or behind it."""
    _go_to_line(file, start, furthest=at_once)
    while raw := file.read(at_once):
        offset = file.tell() - len(raw)
        if len(raw) == at_once:
            raw = raw[: _end_of_words(raw)]
            file.seek(offset + len(raw))
        yield _Piece(raw, offset == 0, offset)


def _json_lines(path: Path, tokenizer: Any, file: BinaryIO, start: int, at_once: int) -> Iterator[_Piece]:
    """The texts of a file of JSON lines, from the first line that begins at ``start`` or behind it."""
    file.seek(max(0, start - 1))
    if start > 0:
        file.readline(_LONGEST_LINE)  # to the end of the line before; there may be none behind it
    while line := file.readline(_LONGEST_LINE):
        offset = file.tell() - len(line)
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"{_place(path, offset)} has more than {_LONGEST_LINE >> 20} MiB; cut it into several")
        if not line.strip():
            continue
        text, begins = _text_of(line, path, offset, tokenizer)
        try:
            rest = text.encode()
        except UnicodeEncodeError as problem:
            raise ValueError(f"{_place(path, offset)} is not text: {problem.reason}; {_ACCEPTED}") from None
        while rest:
            cut = len(rest) if len(rest) <= at_once else _end_of_words(rest[:at_once])
            yield _Piece(rest[:cut], begins, offset)
            rest, begins = rest[cut:], False


def _text_of(line: bytes, path: Path, offset: int, tokenizer: Any) -> tuple[str, bool]:
    """The text of a line, and whether the tokenizer is to mark its beginning: a chat template does that itself."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as problem:
        raise ValueError(f"{_place(path, offset)} is not UTF-8 text: {problem.reason}; save it as UTF-8") from None
    except (ValueError, RecursionError) as problem:  # also for numbers of thousands of digits
        raise ValueError(f"{_place(path, offset)} is not JSON ({problem}); {_ACCEPTED}") from None
    text, messages = (value.get("text"), value.get("messages")) if isinstance(value, dict) else (None, None)
    if isinstance(text, str):
        return text, True
    if not isinstance(messages, list) or not messages:
        seen = f"has {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, dict) else "is no object"
        raise ValueError(f"{_place(path, offset)} {seen:.200}; {_ACCEPTED}")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{_place(path, offset)} has messages, and the tokenizer of this model has no chat template for them; "
            'give lines with {"text": "..."}, or put chat_template.jinja beside its tokenizer.json'
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False), False
    except Exception as problem:  # a template is a program of the model's own, and fails in its own ways
        raise ValueError(
            f"{_place(path, offset)}: the chat template does not take its messages ({problem!r:.200}); {_ACCEPTED}"
        ) from None


def _go_to_line(file: BinaryIO, start: int, furthest: int) -> None:
    """Goes to the first line that begins at ``start`` or behind it, or without one to the next character."""
    file.seek(max(0, start - 1))
    if start == 0 or file.readline(furthest).endswith(b"\n"):
        return
    file.seek(start)
    following = file.read(4)
    file.seek(start + next((i for i, byte in enumerate(following) if not _continues(byte)), len(following)))


def _end_of_words(raw: bytes) -> int:
    """Where to cut text so that lines, or else words, or else characters, stay whole."""
    if (line := raw.rfind(b"\n") + 1) > 0:
        return line
    if (space := raw.rfind(b" ")) > 0:
        return space  # tokenizers put it before the word
    cut = len(raw) - 1
    while cut > len(raw) - 4 and _continues(raw[cut]):
        cut -= 1
    return max(1, cut)


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is inside a character."""
    return byte & 0xC0 == 0x80


def _place(path: Path, offset: int) -> str:
    """Names the line that begins at a byte, whose number is only known by counting."""
    number = 1
    with path.open("rb") as file:
        while offset > 0 and (part := file.read(min(offset, 1 << 20))):
            number += part.count(b"\n")
            offset -= len(part)
    return f"{path}, line {number}"
