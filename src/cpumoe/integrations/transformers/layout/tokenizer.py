"""The tokenizer of a checkpoint folder, as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer without the network and without code from the folder; raises CheckpointError if it cannot."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # the tokenizers package raises plain Exception for a damaged file
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {problem}") from problem
    # If there are no files of a tokenizer, transformers makes one that knows nothing but special tokens.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: it has no vocabulary")
    return tokenizer
