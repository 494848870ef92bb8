"""Options that ``generate``, ``chat``, ``serve`` and ``eval`` share: which model to load, and how."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpumoe.cli.arguments import (
    add_activations,
    add_download,
    add_kv_cache,
    add_model,
    check_scheme_fits_model,
    scheme_name,
    scheme_or_float,
)
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import FLOAT, Scheme, named_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--scheme",
        type=scheme_or_float,
        help=f"quantise the experts of a float checkpoint (w4a8-g128, ...; {FLOAT}: do not)",
    )
    add_loading_options(parser)


def add_loading_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of loading that a model has besides the scheme of its experts."""
    parser.add_argument("--linears", type=scheme_name, metavar="SCHEME", help="quantise its other linears too")
    add_activations(parser)
    add_kv_cache(parser)
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the packed weights here for the next start")
    add_download(parser)


def load_chosen_model(arguments: argparse.Namespace, **options: Any) -> PreTrainedModel:
    """Loads the model that the arguments name; ``options`` go to ``from_pretrained``."""
    check_schemes(arguments)
    from cpumoe.integrations.transformers.loading.model_loading import load_model

    return load_model(
        arguments.model,
        scheme=arguments.scheme,
        linears=arguments.linears,
        cache=arguments.cache,
        activations=arguments.activations,
        kv_cache=arguments.kv_cache,
        **options,
    )


def check_schemes(arguments: argparse.Namespace) -> None:
    """Raises if ``--scheme``, ``--linears`` and ``--cache`` do not fit the checkpoint."""
    from cpumoe.checkpoints.checkpoint import Checkpoint
    from cpumoe.checkpoints.storage import refuse_stored_input_scales

    model, scheme = arguments.model, arguments.scheme
    if is_quantized(model):
        if scheme is not None:
            raise UnsupportedScheme(f"--scheme {scheme}: {model} is quantised already; leave it out")
        return
    if arguments.activations is not None:
        raise ValueError(
            f"--activations {arguments.activations}: {model} is a float checkpoint; let the scheme say it: "
            "--scheme w4a16-g32+int8"
        )
    named = named_scheme(scheme, None)
    if named is None:
        raise UnsupportedScheme(
            f"{model} is a float checkpoint: add --scheme w4a8-g128 (or another) to quantise its experts while they "
            f"are read, --scheme bf16 to run them as they are, or --scheme {FLOAT} to leave them to transformers"
        )
    if named == FLOAT:
        if arguments.linears is None and arguments.cache is not None:
            raise ValueError(f"--cache has no effect with --scheme {FLOAT}, which packs nothing")
        if arguments.kv_cache is not None:
            raise ValueError(
                f"--kv-cache {arguments.kv_cache} is for steps in one call of the core, which --scheme {FLOAT} has not"
            )
    if scheme not in (None, FLOAT):
        refuse_stored_input_scales(Scheme.parse(scheme))
        with Checkpoint.open(model) as checkpoint:
            check_scheme_fits_model(scheme, checkpoint)


def is_quantized(folder: Path) -> bool:
    from cpumoe.checkpoints.checkpoint import Checkpoint

    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.quantization_section is not None


def is_decoded(text: str) -> bool:
    """False if the text has surrogates, which Python puts for bytes that are not UTF-8 (in arguments and stdin)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
