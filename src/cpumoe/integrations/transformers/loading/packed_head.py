"""Models whose lm_head is packed: its number of rows is fixed, so that the vocabulary cannot be resized."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cpumoe.layers.linear import QuantizedLinear
from cpumoe.parallel.linear import SplitLinear


def refuse_resizing(model: nn.Module) -> None:
    """Make ``resize_token_embeddings`` raise before it changes anything, in every model whose head is packed.

    A model may be inside of another one, whose method calls the inner one's.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _has_packed_head(module):
            module.resize_token_embeddings = partial(_resize_token_embeddings, module)


def _has_packed_head(model: PreTrainedModel) -> bool:
    return isinstance(model.get_output_embeddings(), QuantizedLinear | SplitLinear)


def _resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    if not _has_packed_head(model):
        return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, *arguments, **options)
    size = model.get_input_embeddings().num_embeddings
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise ValueError(
            f"resize_token_embeddings({wanted}): the head of this model is packed for {size} tokens; load it without "
            "linears=, so that its head stays in float, resize it, and save it before it is quantised"
        )
    return model.get_input_embeddings()
