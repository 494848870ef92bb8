"""The folder of a model as transformers reads it: its files, the length of its context."""

from __future__ import annotations

import os
from pathlib import Path

from cpumoe.checkpoints.regular_files import refuse_special_files
from cpumoe.integrations.transformers import hook

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
    "tekken.json",
)


def check_folder(folder: Path) -> None:
    """Raises ValueError if the folder is not a checkpoint with a tokenizer, before anything is loaded."""
    check_config(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder}: there is no tokenizer ({', '.join(_TOKENIZER_FILES)})")


def check_config(folder: Path) -> None:
    """Raises ValueError if the folder is not a checkpoint; it may be one without a tokenizer."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; a downloaded checkpoint is needed")
    refuse_special_files(folder)  # transformers would open a pipe that has a tokenizer's name, and wait
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: there is no config.json, so this is no checkpoint")


def prepare_transformers() -> None:
    """Imports transformers so that it does not use the network and prints nothing between our lines."""
    if needed := hook.too_old():
        raise RuntimeError(f"this command needs {needed}")
    # These are read only once, when huggingface_hub and transformers are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if hook.is_missing():
        raise RuntimeError("this command needs transformers: pip install 'cpumoe[transformers]'")
    import transformers  # noqa: F401
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # in case a download imported it before


def context_length(folder: Path) -> int | None:
    """The number of tokens that the model was made for, or None if its configuration does not say."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None
