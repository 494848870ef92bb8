"""Options that several commands have, and parsers of their values, whose errors name the option."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe import _core, cpu
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import FLOAT, Scheme
from cpumoe.option_values import INT8_ACTIVATIONS, INT8_CACHE

if TYPE_CHECKING:
    from cpumoe.checkpoints.checkpoint import Checkpoint

_MOST_THREADS = 4096  # the limit of the core


# ---- values --------------------------------------------------------------------------------------------------------


def whole_number(least: int, most: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    """A type for argparse: whole numbers in a range."""
    up_to = "" if most is None else f" to {most}"
    kind = "a whole number" if multiple_of == 1 else f"a multiple of {multiple_of}"

    def parse(text: str) -> int:
        # int() alone would accept "1_0" and digits of other scripts, and has its own message for 5000 digits.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else -1
        if number < least or (most is not None and number > most) or number % multiple_of:
            raise argparse.ArgumentTypeError(f"{text!r}; {kind} from {least}{up_to} is accepted")
        return number

    return parse


def whole_numbers(least: int) -> Callable[[str], list[int]]:
    """A type for argparse: whole numbers from ``least``, separated by commas."""
    number = whole_number(least)
    kind = "positive numbers" if least == 1 else f"whole numbers from {least}"

    def parse(text: str) -> list[int]:
        try:
            return [number(part) for part in text.split(",")]
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{text!r}; {kind} separated by commas are accepted") from None

    return parse


positive = whole_number(1)
size_in_features = whole_number(32, multiple_of=32)


def real_number(text: str) -> float:
    """The number in a text, or NaN if it is not a number; every range then refuses it."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_above_zero(text: str) -> float:
    return number_from_zero(text, above=True)


def number_from_zero(text: str, *, above: bool = False) -> float:
    value = real_number(text)
    if not 0 <= value < math.inf or (above and value == 0):
        raise argparse.ArgumentTypeError(f"{text!r}; a number {'above' if above else 'from'} 0 is accepted")
    return value


def scheme_name(text: str) -> str:
    try:
        return str(Scheme.parse(text))
    except UnsupportedScheme as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def scheme_or_float(text: str) -> str:
    try:
        return FLOAT if text == FLOAT else scheme_name(text)
    except argparse.ArgumentTypeError as problem:
        raise argparse.ArgumentTypeError(f"{problem}, and so is {FLOAT}") from None


def instruction_set(text: str) -> str:
    entries = {entry.name: entry for entry in cpu.instruction_sets()}
    usable = ", ".join(name for name, entry in entries.items() if entry.supported)
    if text not in entries:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; accepted here are {usable}")
    if not entries[text].supported:
        raise argparse.ArgumentTypeError(f"{text} cannot run here: {entries[text].reason}; accepted are {usable}")
    return text


def check_scheme_fits(option: str, scheme: Scheme, hidden: int, intermediate: int) -> None:
    """Refuses a scheme whose groups do not divide a layer's sizes; ``option`` is how the user asked for it."""
    if scheme.fits(hidden) and scheme.fits(intermediate):
        return
    names = [f"w4a8-g{size}" for size in (32, 64, 128) if hidden % size == 0 and intermediate % size == 0]
    raise ValueError(
        f"{option}: groups of {scheme.group_size} do not divide a hidden size of {hidden} and an intermediate size of "
        f"{intermediate}; {', '.join([*names, 'w4a8'])} and w8a8 fit"
    )


def check_scheme_fits_model(scheme: str, checkpoint: Checkpoint) -> None:
    """Refuses a scheme for experts whose sizes its groups do not divide."""
    from cpumoe.integrations.transformers.facade import expert_shapes

    for shape in expert_shapes(checkpoint):
        check_scheme_fits(f"--scheme {scheme}", Scheme.parse(scheme), shape.hidden_size, shape.intermediate_size)


def refuse_given(arguments: argparse.Namespace, reason: str, *names: str) -> None:
    """Refuses options that would be ignored. An option that was not given is None or False."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:  # "in (None, False)" would count 0 as False
            raise ValueError(f"--{name.replace('_', '-')} has no effect {reason}")


def check_output(option: str, path: Path | None, *, plot: bool = False) -> None:
    """Refuses a file that could not be written; ``plot``: matplotlib has to draw it."""
    if path is None:
        return
    if plot and find_spec("matplotlib") is None:
        raise RuntimeError(f"{option} needs matplotlib: pip install 'cpumoe[bench]'")
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder; the name of a file is accepted")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.absolute().parent}")


def read_text(path: str | Path, name: str) -> str:
    """The text of a file, or of standard input for ``-``, with its line ends unchanged."""
    try:
        # Path.read_text would turn \r\n into \n.
        encoded = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as problem:
        raise ValueError(f"{name}: {problem.strerror or problem}") from None
    try:
        return encoded.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{name} is not UTF-8: {problem.reason} at byte {problem.start}") from None


# ---- options -------------------------------------------------------------------------------------------------------


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=whole_number(1, _MOST_THREADS),
        metavar="N",
        help="threads to compute with (CPUMOE_NUM_THREADS, or those of PyTorch, but no more than the CPUs there are)",
    )


def use_threads(threads: int) -> None:
    """Makes cpumoe and PyTorch compute with this many threads from now on."""
    import torch

    _core.set_thread_count(threads)
    cpu.warn_of_threads(f"--threads {threads}", threads)
    torch.set_num_threads(threads)


def respect_quota() -> None:
    """Makes PyTorch compute with no more threads than the cgroup has CPU time for, as cpumoe does."""
    if cpu.QUOTA is None or "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    if torch.get_num_threads() > (threads := _core.available_cpus()):
        torch.set_num_threads(threads)


def add_model(parser: argparse.ArgumentParser, name: str = "model", metavar: str = "MODEL", kind: str = "") -> None:
    """Adds an argument for a model: a folder or an id on the hub, which :func:`find_models` turns into a folder."""
    parser.add_argument(
        name,
        type=Path,
        metavar=metavar,
        help=f"{kind}checkpoint folder, or id on the Hugging Face hub (owner/name or owner/name@revision)",
    )


def add_activations(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--activations",
        choices=[INT8_ACTIVATIONS],
        help="run weights whose activations the checkpoint leaves in float with int8 ones (faster for many tokens)",
    )


def add_kv_cache(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--kv-cache",
        choices=[INT8_CACHE],
        help="hold keys and values in int8: half the memory of bf16, and a little less exact",
    )


def add_download(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--download", action="store_true", help="download a model of the hub that is not in the hub's cache here"
    )


def find_models(arguments: argparse.Namespace, *names: str) -> None:
    """Replaces each model that was typed by its folder; downloads it if ``--download`` allows that."""
    from cpumoe.checkpoints.hub import NotDownloaded, find_model

    typed: dict[str, Path] = {name: model for name in names if (model := getattr(arguments, name)) is not None}
    folders = [str(model) for model in typed.values() if model.expanduser().is_dir()]
    if arguments.download and len(folders) == len(typed):
        are = "is a folder" if len(folders) == 1 else "are folders"
        raise ValueError(
            f"--download has no effect: {' and '.join(folders)} {are}; it is for the id of a model on the hub"
        )
    for name, model in typed.items():
        try:
            setattr(arguments, name, find_model(model, download=arguments.download))
        except NotDownloaded as problem:
            raise NotDownloaded(f"{problem}, or add --download to this command") from None
