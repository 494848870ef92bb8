"""Which experts a model uses: counts or records the calls of its experts modules while a ``with`` block runs.

Both work with forward pre-hooks, which are added when the block begins and removed when it ends. Outside the block the
forward pass is unchanged and costs nothing more. Inside it a model with the native decoder runs layer by layer, which
rounds in other places (:mod:`cpumoe.evaluation.perplexity` runs such a model twice). A model that was compiled with
``torch.compile`` before the block does not run the hooks; its counts stay zero.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.parallel.load_counter import LoadCounter
from cpumoe.tables import aligned


def expert_count(module: nn.Module) -> int | None:
    """Number of experts of an experts module (of transformers, or :class:`cpumoe.Experts`); None for other modules."""
    # num_experts comes first: experts of transformers have a config too, but it is the one of the whole model.
    count = getattr(module, "num_experts", None)
    if count is None:
        count = getattr(getattr(module, "config", None), "experts", None)
    return count if isinstance(count, int) else None


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of a model that are called with ids, by their qualified names, in the order of the layers.

    They are the submodules named ``experts`` that are called with (hidden_states [T, H], ids [T, K], weights [T, K]).
    """
    return {name: module for name, module in _named_experts(model) if _takes_ids(module)}


def _named_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and expert_count(module) is not None:
            yield name, module


def _takes_ids(module: nn.Module) -> bool:
    """False for Llama4's own experts, which get every token once per expert, scaled by zero if it was not chosen."""
    return len(inspect.signature(module.forward).parameters) > 1


class ExpertLoad(LoadCounter):
    """How often each expert of each layer was chosen, in figures and pictures."""

    def __init__(self, num_experts: Mapping[str, int]) -> None:
        """``num_experts``: the number of experts of each layer, by the layer's name."""
        super().__init__(num_experts)

    @classmethod
    def of(cls, model: nn.Module) -> ExpertLoad:
        """Return counters for the experts of a model; raise ValueError if it has none that can be watched."""
        return cls({name: expert_count(module) or 0 for name, module in _watchable(model).items()})

    def shares(self, layer: str) -> Tensor:
        """Share of the choices that fell on each expert, [experts] float64; NaN if the layer got no tokens."""
        counts = self.counts[layer].double()
        return counts / counts.sum()

    def imbalance(self, layer: str) -> float | None:
        """Load of the hottest expert divided by the mean load; 1 is even. None if the layer got no tokens."""
        counts = self.counts[layer].double()
        return float(counts.max() / counts.mean()) if counts.any() else None

    def never_used(self) -> dict[str, list[int]]:
        """The experts of each layer that no token chose, without the layers that used all of them."""
        unused = {layer: (counts == 0).nonzero().flatten().tolist() for layer, counts in self.counts.items()}
        return {layer: numbers for layer, numbers in unused.items() if numbers}

    def table(self, hottest: int = 10) -> str:
        """A line per layer: imbalance, experts never used, and the ``hottest`` experts with their shares."""
        if hottest < 1:
            raise ValueError(f"hottest={hottest}; 1 or more is accepted")
        unused = self.never_used()
        rows = [("layer", "tokens", "max/mean", "never used", "hottest experts (share of the choices)")]
        for label, (layer, counts) in zip(self._labels(), self.counts.items(), strict=True):
            imbalance = self.imbalance(layer)
            order = counts.argsort(descending=True, stable=True)[:hottest].tolist()
            shares = self.shares(layer)
            rows.append(
                (
                    label,
                    str(self.tokens[layer]),
                    "-" if imbalance is None else f"{imbalance:.2f}",
                    f"{len(unused.get(layer, []))} of {len(counts)}",
                    "  ".join(f"{i} ({float(shares[i]):.1%})" for i in order if counts[i] > 0) or "no tokens",
                )
            )
        return "\n".join(aligned(rows, right=(1, 2, 3)))

    def to_json(self) -> dict[str, Any]:
        """All figures, for ``json.dumps``: for each layer its tokens, counts, imbalance and the experts never used."""
        unused = self.never_used()
        return {
            "layers": [
                {
                    "layer": layer,
                    "tokens": self.tokens[layer],
                    "counts": counts.tolist(),
                    "imbalance": self.imbalance(layer),
                    "never_used": unused.get(layer, []),
                }
                for layer, counts in self.counts.items()
            ]
        }

    def heatmap(self, path: str | Path) -> None:
        """Writes a PNG with a row per layer and a column per expert; the colour is the load relative to an even one."""
        try:
            from matplotlib.colors import TwoSlopeNorm
            from matplotlib.figure import Figure  # pyplot would change the caller's choice of backend
        except ImportError:
            raise RuntimeError("a heat map needs matplotlib: pip install 'cpumoe[bench]'") from None

        width = max(len(counts) for counts in self.counts.values())
        load = torch.full((len(self.counts), width), torch.nan, dtype=torch.float64)  # [layers, experts]
        for row, (layer, counts) in enumerate(self.counts.items()):
            load[row, : len(counts)] = self.shares(layer) * len(counts)
        peak = float(load.nan_to_num(0).max())

        figure = Figure(
            figsize=(min(16, 5 + 0.06 * width), min(14, 2.5 + 0.14 * len(self.counts))), dpi=120, layout="constrained"
        )
        axes = figure.subplots()
        image = axes.imshow(
            load.numpy(),
            aspect="auto",
            interpolation="nearest",  # every cell is one expert, not to be blended with its neighbours
            cmap="RdBu_r",
            norm=TwoSlopeNorm(vmin=0, vcenter=1, vmax=max(2.0, peak)),
        )
        axes.set_facecolor("0.6")  # no expert there, or no tokens
        labels = self._labels()
        rows_per_label = -(-len(labels) // 32)
        axes.set_yticks(range(0, len(labels), rows_per_label), labels[::rows_per_label], fontsize=7)
        columns_per_label = next(step for step in (1, 2, 4, 8, 16, 32, 64, width) if width <= 20 * step)
        axes.set_xticks(range(0, width, columns_per_label))
        axes.set(xlabel="expert", ylabel="layer", title=f"Expert load over {max(self.tokens.values()):,} tokens")
        figure.colorbar(image, label="load relative to an even one", pad=0.02)
        figure.savefig(path, format="png")

    def _labels(self) -> list[str]:
        """The numbers of the layers, or their whole names if a name has no number or two have the same one."""
        numbers = [re.search(r"\.(\d+)\.", layer) for layer in self.counts]
        labels = [number[1] for number in numbers if number]
        return labels if len(set(labels)) == len(self.counts) else list(self.counts)


@contextmanager
def count_expert_load(model: nn.Module) -> Iterator[ExpertLoad]:
    """Counts which experts a model uses while the block runs.

    >>> with count_expert_load(model) as load:
    ...     model.generate(**inputs)
    >>> print(load.table())

    Raises ValueError if the model has no experts modules that can be watched.
    """
    load = ExpertLoad.of(model)
    with watching_experts(model, load.add):
        yield load


def watching_experts(model: nn.Module, see: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
    """Return a context inside which ``see(layer, topk_ids)`` is called before every call of a model's experts.

    Raises ValueError if the model has no experts modules that can be watched.
    """
    return _watching(_watchable(model), see)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Records which experts were chosen: for every layer, the ids [T, K] of each call in the order of the calls.

    Raises ValueError if the model has no experts modules that can be watched.
    """
    modules = _watchable(model)
    routing: dict[str, list[Tensor]] = {name: [] for name in modules}
    with _watching(modules, lambda layer, topk_ids: routing[layer].append(topk_ids.detach().clone())):
        yield routing


def _watchable(model: nn.Module) -> dict[str, nn.Module]:
    modules = experts_modules(model)
    if modules:
        return modules
    without_ids = next((module for _, module in _named_experts(model)), None)
    if without_ids is not None:
        raise ValueError(
            f"the experts of {type(model).__name__} ({type(without_ids).__name__}) are not told which experts were "
            "chosen; load the model with cpumoe.load_model and a scheme to see them"
        )
    raise ValueError(f"{type(model).__name__} has no experts modules; a mixture-of-experts model is accepted")


@contextmanager
def _watching(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls ``see(layer, topk_ids)`` before every call of the modules, until the block ends."""

    def hook_for(layer: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            topk_ids = inputs[1] if len(inputs) > 1 else None
            if not isinstance(topk_ids, Tensor) or topk_ids.dim() != 2 or topk_ids.is_floating_point():
                raise ValueError(
                    f"{layer} ({type(module).__name__}) was called without [tokens, K] ids as its second argument"
                )
            see(layer, topk_ids)

        return hook

    with ExitStack() as hooks:
        for layer, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(hook_for(layer)).remove)
        yield
