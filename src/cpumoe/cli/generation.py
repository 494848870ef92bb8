"""What ``generate``, ``chat``, ``serve`` and ``eval`` share: options, and loading a model and its tokenizer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.regular_files import refuse_special_files
from cpumoe.cli.arguments import (
    FLOAT,
    add_download,
    add_model,
    check_scheme_fits_model,
    scheme_name,
    scheme_or_float,
)
from cpumoe.errors import UnsupportedScheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
    "tekken.json",
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--scheme",
        type=scheme_or_float,
        help=f"quantise the experts of a float checkpoint (w4a8-g128, ...; {FLOAT}: do not)",
    )
    parser.add_argument("--linears", type=scheme_name, metavar="SCHEME", help="quantise its other linears too")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the packed weights here for the next start")
    add_download(parser)


def check_folder(folder: Path) -> None:
    """Raises for what is no checkpoint with a tokenizer, before anything is loaded."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; a downloaded checkpoint is needed")
    refuse_special_files(folder)  # transformers would open, and wait for, whatever has a tokenizer's name
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: there is no config.json, so this is no checkpoint")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder}: there is no tokenizer ({', '.join(_TOKENIZER_FILES)})")


def prepare_transformers() -> None:
    """Imports transformers so that it stays off the network and writes nothing between our lines."""
    # Read once, when huggingface_hub and transformers are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers  # noqa: F401
        from huggingface_hub import constants
    except ImportError:
        raise RuntimeError("this command needs transformers: pip install 'cpumoe[transformers]'") from None
    constants.HF_HUB_OFFLINE = True  # where a download has imported it before


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # tokenizers raises plain Exception for a damaged file
        raise ValueError(f"{folder}: the tokenizer cannot be read: {problem}") from problem


def load_model(arguments: argparse.Namespace, **options: Any) -> PreTrainedModel:
    """The model that the arguments name; ``options`` are those of ``from_pretrained``."""
    check_schemes(arguments)
    from cpumoe.integrations.transformers.plugin import load_model

    return load_model(
        arguments.model, scheme=arguments.scheme, linears=arguments.linears, cache=arguments.cache, **options
    )


def check_schemes(arguments: argparse.Namespace) -> None:
    """Raises for a checkpoint that ``--scheme``, ``--linears`` and ``--cache`` do not go with."""
    model, scheme = arguments.model, arguments.scheme
    if is_quantized(model):
        if scheme is not None:
            raise UnsupportedScheme(f"--scheme {scheme}: {model} is quantised already; leave it out")
        return
    if scheme is None and "CPUMOE_SCHEME" not in os.environ:
        raise UnsupportedScheme(
            f"{model} is a float checkpoint: add --scheme w4a8-g128 (or another) to quantise its experts while they "
            f"are read, or --scheme {FLOAT} to leave them"
        )
    if (scheme or os.environ["CPUMOE_SCHEME"]) == FLOAT and arguments.linears is None and arguments.cache is not None:
        raise ValueError(f"--cache has no effect with --scheme {FLOAT}, which packs nothing")
    if scheme not in (None, FLOAT):
        with Checkpoint.open(model) as checkpoint:
            check_scheme_fits_model(scheme, checkpoint)


def is_quantized(folder: Path) -> bool:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.quantization_section is not None


def is_decoded(text: str) -> bool:
    """False where Python has put surrogates for bytes that are not UTF-8 (arguments, or stdin in the C locale)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def context_length(folder: Path) -> int | None:
    """Tokens that the model was made for, or None where its configuration does not say."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Tokens of a conversation up to where the answer begins."""
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template; cpumoe generate takes plain text")
    try:
        tokens = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
    except Exception as problem:  # templates raise what they like: jinja's errors, TypeError, ...
        raise ValueError(f"the model's chat template refuses this conversation: {problem}") from problem
    return [token for token in tokens if isinstance(token, int)]
