"""Options of ``generate`` and ``chat`` for choosing tokens and stopping; without them the model's own settings hold."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.cli.arguments import number_from_zero, positive, real_number, refuse_given, whole_number

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from cpumoe.steps.sampling import Sampling

_FILE = "generation_config.json"
_TOP_K = 50  # transformers' default
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
    group.add_argument("--temperature", type=number_from_zero, metavar="F", help="above 0: sample; 0: as --greedy")
    group.add_argument("--top-p", type=_share, metavar="F", help="sample from the likeliest with this probability")
    group.add_argument(
        "--top-k",
        type=positive,
        metavar="N",
        help=f"sample from the likeliest N (if the model does not say: {_TOP_K})",
    )
    group.add_argument(
        "--min-p", type=_share, metavar="F", help="sample from those at least F times as likely as the likeliest"
    )
    group.add_argument("--seed", type=whole_number(0, 2**64 - 1), metavar="N", help="of the sampling: the same again")
    parser.add_argument(
        "--stop", type=_stop, action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def _share(text: str) -> float:
    value = real_number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a number above 0 and up to 1 is accepted")
    return value


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


def sampling_of(arguments: argparse.Namespace, own: GenerationConfig) -> Sampling:
    """The sampling that the arguments ask for, with what they leave open from the model's configuration ``own``."""
    from cpumoe.steps.sampling import Sampling

    if arguments.greedy or arguments.temperature == 0:
        return Sampling.of_model(own, samples=False)
    if arguments.temperature is None and not own.do_sample:
        reason = f"for a model whose {_FILE} does not ask for sampling; add --temperature 1"
        refuse_given(arguments, reason, *_SHAPING, "seed")
        return Sampling.of_model(own)
    asked = {name: getattr(arguments, name) for name in _SHAPING}
    if own.top_k is None and arguments.top_k is None:
        asked["top_k"] = _TOP_K
    return replace(Sampling.of_model(own, samples=True).asked(arguments.temperature, **asked), seed=arguments.seed)
