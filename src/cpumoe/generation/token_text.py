"""The text and the bytes of single tokens, as the log probabilities in answers show them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenText:
    """A token as text. A token may be a part of a character only; ``bytes`` joined over tokens give the character.

    Attributes:
        text: with replacement characters for parts of characters.
        bytes: in UTF-8; None if the tokenizer does not show them.
    """

    id: int
    text: str
    bytes: bytes | None

    @property
    def is_whole(self) -> bool:
        """Whether the token consists of whole characters."""
        return self.bytes == self.text.encode()

    @property
    def label(self) -> str:
        """Return the text, or for parts of characters their escaped bytes, as the OpenAI API writes them."""
        if self.is_whole or self.bytes is None:
            return self.text
        return "".join(f"\\x{byte:02x}" for byte in self.bytes)

    @property
    def key(self) -> str:
        """Return the label in the style of text completions, which is another one for every token with other bytes."""
        if self.is_whole:
            return self.text
        return f"token_id:{self.id}" if self.bytes is None else f"bytes:{self.label}"


class TokenTexts:
    """Looks up the text of tokens. Results are kept; there are no more than tokens in the vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._before_text = self._decode(self._before)
        self.of = cache(self._of)

    def _of(self, token: int) -> TokenText:
        text = self._decode([*self._before, token])
        # After other text, because many tokenizers drop the space that a text begins with.
        text = text[len(self._before_text) :] if text.startswith(self._before_text) else self._decode([token])
        if _UNFINISHED not in text:
            return TokenText(token, text, text.encode())
        data = self._raw_bytes(token)
        agrees = data is not None and data.decode(errors="replace") == text
        return TokenText(token, text, data if agrees else None)

    def _raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes that the vocabulary has for a token, in byte-level BPE or with byte fallback."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return None
        if match := _BYTE_FALLBACK.fullmatch(name):
            return bytes([int(match[1], 16)])
        letters = _byte_letters()
        return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else None

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens)
        assert isinstance(text, str)
        return text


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level BPE vocabulary stands for.

    Printable characters of Latin-1 stand for themselves, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
