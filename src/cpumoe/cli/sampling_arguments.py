"""Options of ``generate`` and ``chat`` for choosing tokens and stopping; without them the model's own settings hold."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpumoe.cli.arguments import positive, real_number, refuse_given

if TYPE_CHECKING:
    from transformers import GenerationConfig

_FILE = "generation_config.json"
_SHAPING = ("top_p", "top_k", "min_p")  # options that limit which tokens are sampled


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=max_new_tokens,
        metavar="N",
        help=f"length of an answer at most ({max_new_tokens})",
    )
    group = parser.add_argument_group(
        "sampling",
        "By default tokens are chosen as the model's generation_config.json says, just as transformers does: sampled, "
        "with its temperature, top_p, top_k and penalties, or the likeliest one where it does not ask for sampling.",
    )
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument("--temperature", type=_temperature, metavar="F", help="above 0: sample; 0: as --greedy")
    group.add_argument("--top-p", type=_share, metavar="F", help="sample from the likeliest with this probability")
    group.add_argument(
        "--top-k", type=positive, metavar="N", help="sample from the likeliest N (where the model does not say: 50)"
    )
    group.add_argument(
        "--min-p", type=_share, metavar="F", help="sample from those at least F times as likely as the likeliest"
    )
    group.add_argument("--seed", type=_seed, metavar="N", help="of the sampling: the same again")
    parser.add_argument(
        "--stop", type=_stop, action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def _temperature(text: str) -> float:
    value = real_number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; a number from 0 is accepted")
    return value


def _share(text: str) -> float:
    value = real_number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a number above 0 and up to 1 is accepted")
    return value


def _seed(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else -1
    if not 0 <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number from 0 to 2**64 - 1 is accepted")
    return number


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; a text of a character or more is accepted")
    return text


def check_sampling_arguments(arguments: argparse.Namespace) -> None:
    """Raises for options that contradict each other, whatever the model's settings are."""
    if arguments.greedy:
        refuse_given(arguments, "with --greedy", "temperature", *_SHAPING, "seed")
    elif arguments.temperature == 0:
        refuse_given(arguments, "with --temperature 0, which is --greedy", *_SHAPING, "seed")


def generation_config(folder: Path) -> GenerationConfig:
    """The generation settings that come with a model, or transformers' defaults if it has none."""
    from transformers import AutoConfig, GenerationConfig

    path = folder / _FILE
    if not path.is_file():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return GenerationConfig.from_model_config(config)
    try:
        own = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, OSError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path} cannot be used: {problem}") from problem
    for name in ("temperature", *_SHAPING, "repetition_penalty"):
        value = getattr(own, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{path} cannot be used: {name} is {value!r}; a number is accepted")
    if (own.num_beams or 1) != 1:
        raise ValueError(f"{path}: num_beams is {own.num_beams}; 1 is accepted, since text is shown as it comes")
    return own


def sampling_options(arguments: argparse.Namespace, own: GenerationConfig) -> dict[str, Any]:
    """The arguments as options of ``generate``, for a model whose own configuration is ``own``. Also seeds torch.

    For options that are not in the result, ``generate`` uses the values in ``own``.
    """
    check_sampling_arguments(arguments)
    if arguments.greedy or arguments.temperature == 0:
        return {"do_sample": False, "temperature": None} | dict.fromkeys(_SHAPING)
    given = {name: value for name in ("temperature", *_SHAPING) if (value := getattr(arguments, name)) is not None}
    if arguments.temperature is None and not own.do_sample:
        reason = f"for a model whose {_FILE} does not ask for sampling; add --temperature 1"
        refuse_given(arguments, reason, *_SHAPING, "seed")
        return {}
    if arguments.seed is not None:
        import torch

        torch.manual_seed(arguments.seed)
    return {"do_sample": True, **given}
