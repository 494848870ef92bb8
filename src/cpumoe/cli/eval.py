"""``cpumoe eval``: perplexity of a model, its distance from the float model, and which experts it uses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpumoe.cli.arguments import check_output, find_models, positive, read_text
from cpumoe.cli.model_arguments import add_model_arguments, check_schemes, is_quantized, load_chosen_model
from cpumoe.cli.parser import Commands
from cpumoe.generation.model_folder import check_folder, context_length, prepare_transformers
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.layers.scheme import FLOAT
from cpumoe.option_values import DEFAULT_WINDOW
from cpumoe.tables import aligned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cpumoe.evaluation.perplexity import Comparison, Evaluation, Progress


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="perplexity of a model, its distance from the float model, and which experts it uses",
        description="Measures how well a model predicts a text; with --against also how far it is from the float "
        "model it was made of (KL divergence, agreement on tokens and on experts).",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", required=True, help="text to predict, UTF-8; - is standard input"
    )
    parser.add_argument("--against", type=Path, metavar="FLOAT", help="the float model: a folder or an id, as MODEL")
    parser.add_argument("--experts", action="store_true", help="also the hottest and the never used experts")
    parser.add_argument("--heatmap", type=Path, metavar="FILE", help="write the load of all experts (PNG) to FILE")
    parser.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help=f"tokens seen at a time ({DEFAULT_WINDOW}, or the model's positions if these are fewer)",
    )
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens between the ends of windows (half a window; more is faster)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N characters of the text")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.evaluation.expert_load import ExpertLoad
    from cpumoe.evaluation.perplexity import compare, perplexity

    # Everything that can be refused is refused before the model is loaded, because loading may take minutes.
    text = _read_text(arguments.text, arguments.limit)
    check_output("--heatmap", arguments.heatmap, plot=True)
    find_models(arguments, "model", "against")
    check_folder(arguments.model)
    check_schemes(arguments)
    if arguments.against is not None and is_quantized(arguments.against):
        raise ValueError(f"--against {arguments.against}: this is quantised; a float model is accepted")
    prepare_transformers()
    tokenizer = load_tokenizer(arguments.model)
    # verbose=False: no warning about a text longer than the model's positions, since it is read in windows.
    _check_windows(arguments, len(tokenizer(text, verbose=False)["input_ids"]))
    model, against = _load(arguments)
    settings: dict[str, Any] = {"window": arguments.window, "stride": arguments.stride}
    comparison = None
    counting = arguments.experts or arguments.heatmap is not None
    load = ExpertLoad.of(model) if counting else None
    with _progress_bar() as progress:
        settings |= {"progress": progress, "expert_load": load}
        if against is None:
            evaluation = perplexity(model, tokenizer, text, **settings)
        else:
            comparison = compare(model, against, tokenizer, text, **settings)
            evaluation = comparison.model
    if load is not None and arguments.heatmap is not None:
        load.heatmap(arguments.heatmap)

    if arguments.json:
        facts: dict[str, Any] = {"model": str(arguments.model), "text": str(arguments.text), **evaluation.to_json()}
        if comparison is not None:
            facts |= {"against": str(arguments.against), "comparison": comparison.to_json()}
        if load is not None:
            facts["expert_load"] = load.to_json()
        print(json.dumps(facts, indent=1))
        return 0
    print(_report(arguments, evaluation))
    if comparison is not None:
        print(f"\n{_comparison_report(arguments, comparison)}")
    if load is not None and arguments.experts:
        print(f"\n{load.table()}")
        for layer, unused in load.never_used().items():
            print(f"never used in {layer}: {', '.join(map(str, unused))}")
    if arguments.heatmap is not None:
        print(f"\nheat map: {arguments.heatmap}")
    return 0


def _load(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load the model and that of ``--against``, if there is memory for both."""
    if arguments.against is None:
        return load_chosen_model(arguments), None
    from cpumoe.integrations.transformers.loading.load_memory import float_model_bytes
    from cpumoe.integrations.transformers.loading.model_loading import load_model

    model = load_chosen_model(arguments, reserve_bytes=float_model_bytes(arguments.against))
    return model, load_model(arguments.against, scheme=FLOAT)


def _read_text(path: Path, limit: int | None) -> str:
    if str(path) != "-" and not path.is_file():
        raise ValueError(f"--text {path}: there is no such file")
    text = read_text(path, f"--text {path}")[:limit]
    if not text.strip():
        raise ValueError(f"--text {path}: there is no text in it")
    return text


def _check_windows(arguments: argparse.Namespace, tokens: int) -> None:
    """Refuses windows that are longer than the text or the model's context, since these would be cut."""
    folders = [folder for folder in (arguments.model, arguments.against) if folder is not None]
    positions = min((length for folder in folders if (length := context_length(folder)) is not None), default=None)
    window = arguments.window
    if window is not None and positions is not None and window > positions:
        raise ValueError(f"--window {window}: the model has {positions} positions; 1 to {positions} are accepted")
    if window is not None and window > tokens:
        raise ValueError(f"--window {window}: the text has {tokens} tokens; 1 to {tokens} are accepted")
    if arguments.stride is None:
        return
    window = window or min(DEFAULT_WINDOW, positions or DEFAULT_WINDOW)
    if arguments.stride > window:
        raise ValueError(f"--stride {arguments.stride}; 1 to {window} (the window) are accepted")
    if tokens <= window:
        raise ValueError(f"--stride has no effect: the {tokens} tokens of the text are seen in one window of {window}")


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal."""
    from tqdm import tqdm

    with tqdm(desc="Evaluating", unit="token", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _report(arguments: argparse.Namespace, evaluation: Evaluation) -> str:
    title = (
        f"{arguments.model} on {arguments.text}: {evaluation.bytes} bytes, {evaluation.tokens} tokens predicted, "
        f"windows of {evaluation.window}, stride {evaluation.stride}"
    )
    rows = [
        ("perplexity", f"{evaluation.perplexity:.4f}"),
        ("bits per byte", f"{evaluation.bits_per_byte:.4f}"),
        ("bits per token", f"{evaluation.bits_per_token:.4f}"),
        ("tokens a second", f"{evaluation.tokens_per_second:.1f}"),
    ]
    return "\n".join([title, *aligned(rows, indent=2)])


def _comparison_report(arguments: argparse.Namespace, comparison: Comparison) -> str:
    ours, theirs = comparison.model, comparison.float_model
    # The difference of the logarithms: the perplexities themselves may be infinite.
    change = (ours.nats - theirs.nats) / ours.tokens
    layers = comparison.routing.values()
    same_experts = "not known: no layer shows its routing in both models"
    if layers:
        same_experts = (
            f"{sum(a.shared for a in layers) / len(layers):.2%} "
            f"(the whole set: {sum(a.exact for a in layers) / len(layers):.2%}), mean of {len(layers)} layers"
        )
    rows = [
        ("its perplexity", f"{theirs.perplexity:.4f} (log perplexity {change:+.5f} from there)"),
        ("its speed", f"{theirs.tokens_per_second:.1f} tokens a second"),
        ("KL divergence", f"{comparison.kl:.6f} nats a token"),
        ("same top token", f"{comparison.top1_agreement:.2%}"),
        ("same experts", same_experts),
    ]
    lines = [f"against {arguments.against}", *aligned(rows, indent=2)]
    if layers:
        by_layer = [("layer", "experts", "whole set")]
        by_layer += [(name, f"{a.shared:.2%}", f"{a.exact:.2%}") for name, a in comparison.routing.items()]
        lines += aligned(by_layer, right=(1, 2), indent=4)
    return "\n".join(lines)
