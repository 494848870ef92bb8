"""The folder of a model as transformers reads it: its files, its chat template, the length of its context."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.checkpoints.regular_files import refuse_special_files
from cpumoe.integrations.transformers import hook

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation up to the place where the answer begins."""
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template; cpumoe generate takes plain text")
    try:
        tokens = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
    except Exception as problem:  # a template is a program that comes with the model and may raise anything
        raise ValueError(f"the model's chat template refuses this conversation: {problem}") from problem
    return [token for token in tokens if isinstance(token, int)]
