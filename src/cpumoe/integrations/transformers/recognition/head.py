"""Whether a model's own code does no more than call its head on the hidden states of its base model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.parts import check_linear
from cpumoe.integrations.transformers.recognition.probe import copy_of


def calls_its_head(model: Any, output: type[Any]) -> bool:
    """Return whether a model's logits are what its head computes of made-up hidden states of its base model.

    ``output``: class of the base model's results.
    """
    head = model.get_output_embeddings()
    try:
        check_linear(head, "head")
        with torch.no_grad():
            expected = head(_made_up_hidden(model.model.embed_tokens))
        return torch.equal(results_of(model, output).logits, expected)
    except Exception:  # it is called in another way, or is no linear
        return False


def results_of(model: Any, output: type[Any]) -> Any:
    """Return what a model's own code makes of made-up hidden states of its base model."""
    copied = copy_of(model)
    copied._modules = {**model._modules, "model": _MadeUp(output, model.model)}
    copied.config = copy.copy(model.config)
    copied.config.return_dict = True
    with torch.no_grad():
        return type(model).forward(copied, input_ids=torch.zeros((1, 1), dtype=torch.long), logits_to_keep=1)


class _MadeUp(nn.Module):
    """Stands for a base model inside of the one with the head: gives made-up hidden states."""

    def __init__(self, output: type[Any], base: Any) -> None:
        super().__init__()
        self._output, self._base = output, (base,)  # not a child

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(last_hidden_state=_made_up_hidden(self._base[0].embed_tokens))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in vars(type(self)):
            return super().__getattr__(name)
        return getattr(self._base[0], name)


def _made_up_hidden(embedding: Any) -> Tensor:
    weight = embedding.weight
    made: Tensor = torch.randn((1, 1, weight.shape[1]), generator=torch.Generator().manual_seed(5))
    return made.to(weight.dtype)
