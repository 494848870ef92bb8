"""How much the slowest rank gains by placing experts by their load: ``python benchmarks/expert_balance.py``.

Routing is that of the model that comes with the package, recorded on held-out text, and drawn at random: the K largest
of Zipf's weights, each times a random number of its own, which is choosing without putting back. A placement is planned
from the first half of the tokens and judged on the second half; copies take turns as they do in a layer. Each figure is
the load of the slowest rank over the mean, averaged over layers, and over steps where there are several.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cpumoe import ParallelLayout
from cpumoe.cli.arguments import add_threads, positive, use_threads
from cpumoe.demo.model import FOLDER
from cpumoe.evaluation.expert_load import record_routing
from cpumoe.parallel.balance import plan_placement
from cpumoe.parallel.load_counter import LoadCounter
from cpumoe.parallel.placement import Placement, physical_ids
from cpumoe.tables import aligned

_TEXT = Path(__file__).parent.parent / "tests" / "data" / "heldout.txt"
_RANKS = (2, 4, 8, 16, 32)
_SPARE = (0, 1, 2)  # slots a rank beyond those that all experts need


def recorded_routing(tokens: int) -> list[Tensor]:
    """The ids [tokens, K] of every layer of the shipped model on held-out text."""
    from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
    from cpumoe.integrations.transformers.loading.model_loading import load_model

    model = load_model(FOLDER)
    text = torch.tensor(load_tokenizer(FOLDER).encode(_TEXT.read_text()))[:tokens]
    with torch.inference_mode(), record_routing(model) as routing:
        for window in text.split(model.config.max_position_embeddings):
            model(window.unsqueeze(0))
    return [torch.cat(calls) for calls in routing.values()]


def zipf_routing(experts: int, topk: int, tokens: int, layers: int = 4) -> Iterator[Tensor]:
    """Ids [tokens, K] of layers whose experts have weights 1, 1/2, 1/3, ... in an order of their own."""
    for layer in range(layers):
        draw = torch.Generator().manual_seed(layer)
        weights = 1 / torch.arange(1, experts + 1)[torch.randperm(experts, generator=draw)]
        noise = torch.empty(tokens, experts).exponential_(generator=draw)
        yield (weights / noise).topk(topk).indices


def slowest(placement: Placement, topk_ids: Tensor, step: int) -> float:
    """The slowest rank's choices over the mean, in steps of so many tokens; the mean of all steps."""
    whole = topk_ids[: len(topk_ids) // step * step]
    ranks = torch.tensor(placement.rank_of)[physical_ids(whole, placement)]  # [tokens, K]
    steps = torch.arange(len(whole)).div(step, rounding_mode="floor").unsqueeze(1)
    count = placement.rank_count
    loads = torch.bincount((steps * count + ranks).flatten(), minlength=len(whole) // step * count).view(-1, count)
    return float((loads.amax(1) / loads.double().mean(1)).mean())


def table(layers: list[Tensor], experts: int, step: int | None) -> list[str]:
    rows = [("ranks", "linear", "packed", *(f"{spare} spare a rank" for spare in _SPARE[1:]))]
    for ranks in _RANKS:
        if ranks > experts:
            continue
        columns: list[list[float]] = [[] for _ in range(1 + len(_SPARE))]
        for topk_ids in layers:
            first, second = topk_ids.chunk(2)
            counter = LoadCounter({"layer": experts})
            counter.add("layer", first)
            each = -(-experts // ranks)
            linear = Placement.of_layout(experts, ParallelLayout(dp_size=ranks, expert_parallel=True))
            planned = (plan_placement(counter.loads("layer"), ranks, min(each + spare, experts)) for spare in _SPARE)
            for column, placement in zip(columns, (linear, *planned), strict=True):
                column.append(slowest(placement, second, step or len(second)))
        rows.append((str(ranks), *(f"{sum(column) / len(column):.3f}" for column in columns)))
    return aligned(rows, right=range(2 + len(_SPARE)), indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=32768, metavar="N", help="of the routing (32768)")
    parser.add_argument("--step", type=positive, default=256, metavar="N", help="tokens of a step (256)")
    add_threads(parser)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        use_threads(arguments.threads)
    shipped = recorded_routing(arguments.tokens)
    routings = {f"the shipped model, 16 experts, 4 per token, {len(shipped[0])} tokens": (shipped, 16)}
    for experts in (128, 256):
        title = f"Zipf, {experts} experts, 8 per token, {arguments.tokens} tokens"
        routings[title] = (list(zipf_routing(experts, 8, arguments.tokens)), experts)
    for title, (layers, experts) in routings.items():
        for step in (None, arguments.step):
            print(f"{title}; {'all of the second half' if step is None else f'steps of {step} tokens'}")
            print("\n".join(table(layers, experts, step)))


if __name__ == "__main__":
    main()
