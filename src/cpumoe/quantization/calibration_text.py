"""Text for calibration: sequences of tokens from a file of any size, spread over the whole file.

The file is plain text, or, if its name ends in ``.jsonl``, one JSON object per line: ``{"text": "..."}``, or
``{"messages": [...]}``, which goes through the chat template of the tokenizer.

- A small file (up to 4 MiB, or up to 16 bytes for every token wanted if that is more) is read whole. The tokens of its
  texts, one text after another, are cut into sequences, and the wanted number of sequences is taken, evenly spaced.
- In a larger file, as many places are chosen as sequences are wanted, evenly spaced by bytes. Each sequence starts at
  the first line that begins after its place. Nothing else is read, however large the file is.

Memory does not grow with the file: long texts go to the tokenizer in pieces, which are cut where a line or a word ends.
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

from cpumoe.chat_template import ChatTemplate

_MIN_TOKENS = 2

_SMALL_BYTES = 4 << 20  # a file up to this size is read whole
_BYTES_PER_TOKEN = 16  # several times what a token has on average, so a larger file has more tokens than are wanted

_PIECE_BYTES = 256 << 10  # most that the tokenizer gets at once: it uses about 200 times the memory of the text
_LONGEST_LINE = 64 << 20  # in a .jsonl file: a line of JSON has to be read as a whole

_ACCEPTED = 'accepted is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class _Piece:
    """Part of a text. With ``begins`` the tokenizer puts its begin-of-text token in front."""

    raw: bytes
    begins: bool
    offset: int  # where the piece, or the JSON line it comes from, begins in the file


#: Called with the file, the byte to start at and the most bytes of a piece; yields the pieces that follow.
_Reader = Callable[[BinaryIO, int, int], Iterator[_Piece]]


def read_sequences(path: Path, tokenizer: Any, samples: int, length: int) -> Tensor:
    """Token ids [samples, length] int64. A file with too few tokens gives fewer sequences, or a single shorter one.

    Args:
        path: the file; the text at the top of this module says how it is read.
        tokenizer: a tokenizer of transformers.
        samples, length: how many sequences of how many tokens to take.

    Raises ValueError if the file is not text, has no tokens, or has lines in another form than described above.
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
            return _sequences_of_whole_file(file, path, reader, tokenizer, samples, length)
        return _sequences_of_places(file, path, reader, tokenizer, samples, length, size)


def _sequences_of_whole_file(
    file: BinaryIO, path: Path, reader: _Reader, tokenizer: Any, samples: int, length: int
) -> Tensor:
    ids = array("q")
    for piece in reader(file, 0, _PIECE_BYTES):
        ids.extend(_tokens(piece, path, tokenizer))
    if len(ids) < _MIN_TOKENS:
        raise ValueError(f"the calibration text {path} has {len(ids)} tokens; {_MIN_TOKENS} or more are accepted")
    length = min(length, len(ids))
    whole = torch.frombuffer(ids, dtype=torch.int64)[: len(ids) // length * length].view(-1, length)
    step = max(1, len(whole) // samples)
    return whole[::step][:samples].clone()


def _sequences_of_places(
    file: BinaryIO, path: Path, reader: _Reader, tokenizer: Any, samples: int, length: int, size: int
) -> Tensor:
    sequences: list[list[int]] = []
    at_once = min(_PIECE_BYTES, _BYTES_PER_TOKEN * length)
    done = 0  # the byte at which the last sequence ended
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
    """The pieces of a plain text, from the first line that begins at ``start`` or later."""
    _go_to_line(file, start, furthest=at_once)
    while raw := file.read(at_once):
        offset = file.tell() - len(raw)
        if len(raw) == at_once:
            raw = raw[: _end_of_words(raw)]
            file.seek(offset + len(raw))
        yield _Piece(raw, offset == 0, offset)


def _json_lines(path: Path, tokenizer: Any, file: BinaryIO, start: int, at_once: int) -> Iterator[_Piece]:
    """The pieces of the texts in a file of JSON lines, from the first line that begins at ``start`` or later."""
    file.seek(max(0, start - 1))
    if start > 0:
        file.readline(_LONGEST_LINE)  # skips the rest of the line that begins before ``start``
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
    """The text of a line, and whether the tokenizer must mark its beginning (a chat template does that itself)."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as problem:
        raise ValueError(f"{_place(path, offset)} is not UTF-8 text: {problem.reason}; save it as UTF-8") from None
    except (ValueError, RecursionError) as problem:  # ValueError also stands for numbers with thousands of digits
        raise ValueError(f"{_place(path, offset)} is not JSON ({problem}); {_ACCEPTED}") from None
    text, messages = (value.get("text"), value.get("messages")) if isinstance(value, dict) else (None, None)
    if isinstance(text, str):
        return text, True
    if not isinstance(messages, list) or not messages:
        seen = f"has {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, dict) else "is no object"
        raise ValueError(f"{_place(path, offset)} {seen:.200}; {_ACCEPTED}")
    if (other := next((m for m in messages if not isinstance(m, dict)), None)) is not None:
        raise ValueError(f"{_place(path, offset)}: messages holds {other!r:.80}; JSON objects are accepted")
    template = ChatTemplate(tokenizer)
    try:
        if template.is_there:
            return template.text(messages), False
    except ValueError as problem:
        raise ValueError(f"{_place(path, offset)}: {problem!s:.200}; {_ACCEPTED}") from None
    raise ValueError(
        f"{_place(path, offset)} has messages, and the tokenizer of this model has no chat template for them; "
        'give lines with {"text": "..."}, or put chat_template.jinja beside its tokenizer.json'
    )


def _go_to_line(file: BinaryIO, start: int, furthest: int) -> None:
    """Goes to the first line that begins at ``start`` or up to ``furthest`` bytes later, else to the next character."""
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
        return space  # the space stays with the next word: tokenizers expect it there
    cut = len(raw) - 1
    while cut > len(raw) - 4 and _continues(raw[cut]):
        cut -= 1
    return max(1, cut)


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is inside a character, and not its first byte."""
    return byte & 0xC0 == 0x80


def _place(path: Path, offset: int) -> str:
    """Names the line that begins at a byte, for messages. Its number is found by counting the lines before it."""
    number = 1
    with path.open("rb") as file:
        while offset > 0 and (part := file.read(min(offset, 1 << 20))):
            number += part.count(b"\n")
            offset -= len(part)
    return f"{path}, line {number}"
