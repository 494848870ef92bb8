"""``cpumoe eval``: perplexity of a model, its distance from the float model, and which experts it uses."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpumoe.errors import UnsupportedScheme
from cpumoe.evaluate import Comparison, Evaluation, compare, perplexity
from cpumoe.expert_load import count_expert_load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="perplexity of a model, its distance from the float model, and which experts it uses",
        description="Measures how well a model predicts a text; with --against also how far it is from the float "
        "model it was made of (KL divergence, agreement on tokens and on experts).",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="checkpoint folder, quantised or float")
    parser.add_argument("--text", type=Path, metavar="FILE", required=True, help="text to predict, UTF-8")
    parser.add_argument("--against", type=Path, metavar="FLOAT", help="checkpoint folder of the float model")
    parser.add_argument("--experts", action="store_true", help="also the hottest and the never used experts")
    parser.add_argument("--heatmap", type=Path, metavar="FILE", help="write the load of all experts (PNG) to FILE")
    parser.add_argument("--window", type=int, default=1024, metavar="N", help="tokens seen at a time (1024)")
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens between the ends of windows (half a window; more is faster)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N characters of the text")
    parser.add_argument("--scheme", help="for a float MODEL: quantise its experts, such as w4a8-g128, or float")
    parser.add_argument("--linears", help="quantise the other linears too, such as w4a8-g128")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Whatever can be refused is refused before a model is loaded, which may take minutes.
    text = _read_text(arguments.text, arguments.limit)
    _check_picture(arguments.heatmap)
    for folder in (arguments.model, arguments.against):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder; a checkpoint folder is accepted")
    tokenizer = _load_tokenizer(arguments.model)
    from cpumoe.plugins.transformers import load_model

    model = load_model(arguments.model, scheme=arguments.scheme, linears=arguments.linears)
    against = None
    if arguments.against is not None:
        try:
            against = load_model(arguments.against, scheme="float")
        except UnsupportedScheme:
            raise ValueError(f"--against {arguments.against}: this is quantised; a float model is accepted") from None
    settings = {"window": arguments.window, "stride": arguments.stride}
    if sys.stderr.isatty():
        settings["progress"] = _show_progress
    comparison = None
    counting = arguments.experts or arguments.heatmap is not None
    with count_expert_load(model) if counting else nullcontext() as load:
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
        for layer, experts in load.never_used().items():
            print(f"never used in {layer}: {', '.join(map(str, experts))}")
    if arguments.heatmap is not None:
        print(f"\nheat map: {arguments.heatmap}")
    return 0


def _read_text(path: Path, limit: int | None) -> str:
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}; 1 or more is accepted")
    if not path.is_file():
        raise ValueError(f"--text {path}: there is no such file")
    try:
        # Not read_text, which turns \r\n into \n: the bytes of the file are what is measured.
        text = path.read_bytes().decode("utf-8-sig")[:limit]
    except UnicodeDecodeError as problem:
        raise ValueError(f"--text {path}: byte {problem.start} is not UTF-8; UTF-8 text is accepted") from None
    if not text.strip():
        raise ValueError(f"--text {path}: the file is empty")
    return text


def _check_picture(path: Path | None) -> None:
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RuntimeError("--heatmap needs matplotlib: pip install 'cpumoe[bench]'") from None
    if path.is_dir():
        raise ValueError(f"--heatmap {path}: this is a folder; the name of a file is accepted")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--heatmap {path}: there is no folder {path.absolute().parent}")


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder}: there is no tokenizer in this folder; copy tokenizer.json and its like there")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise RuntimeError("eval needs transformers: pip install 'cpumoe[transformers]'") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # tokenizers raises a bare Exception for a damaged tokenizer.json
        raise RuntimeError(f"{folder}: the tokenizer cannot be loaded: {problem}") from problem


def _show_progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} tokens", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _report(arguments: argparse.Namespace, evaluation: Evaluation) -> str:
    return "\n".join(
        [
            f"{arguments.model} on {arguments.text}: {evaluation.bytes} bytes, {evaluation.tokens} tokens predicted, "
            f"windows of {evaluation.window}, stride {evaluation.stride}",
            f"  perplexity       {evaluation.perplexity:.4f}",
            f"  bits per byte    {evaluation.bits_per_byte:.4f}",
            f"  bits per token   {evaluation.bits_per_token:.4f}",
            f"  tokens a second  {evaluation.tokens_per_second:.1f}",
        ]
    )


def _comparison_report(arguments: argparse.Namespace, comparison: Comparison) -> str:
    ours, theirs = comparison.model, comparison.float_model
    # By the logarithms: the perplexities themselves may be infinite.
    change = (ours.nats - theirs.nats) / ours.tokens
    lines = [
        f"against {arguments.against}",
        f"  its perplexity   {theirs.perplexity:.4f} (log perplexity {change:+.5f} from there)",
        f"  its speed        {theirs.tokens_per_second:.1f} tokens a second",
        f"  KL divergence    {comparison.kl:.6f} nats a token",
        f"  same top token   {comparison.top1_agreement:.2%}",
    ]
    if not comparison.routing:
        return "\n".join([*lines, "  same experts     not known: no layer shows its routing in both models"])
    layers = comparison.routing.values()
    lines.append(
        f"  same experts     {sum(a.shared for a in layers) / len(layers):.2%} "
        f"(the whole set: {sum(a.exact for a in layers) / len(layers):.2%}), mean of {len(layers)} layers"
    )
    width = max(map(len, comparison.routing))
    lines.append(f"    {'layer':{width}}  experts  whole set")
    lines += [
        f"    {layer:{width}}  {agreement.shared:7.2%}  {agreement.exact:9.2%}"
        for layer, agreement in comparison.routing.items()
    ]
    return "\n".join(lines)
