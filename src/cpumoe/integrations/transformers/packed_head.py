"""Models whose lm_head is packed: its number of rows is fixed, so that the vocabulary cannot be resized."""

from __future__ import annotations

from functools import partial
from typing import Any

from cpumoe.layers.linear import QuantizedLinear
from cpumoe.parallel.linear import SplitLinear


def refuse_resizing(model: Any) -> None:
    """Make ``resize_token_embeddings`` raise before it changes anything, if the model's head is packed."""
    if isinstance(_head_of(model), QuantizedLinear | SplitLinear):
        model.resize_token_embeddings = partial(_resize_token_embeddings, model)


def _head_of(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any
) -> Any:
    head = _head_of(model)
    if isinstance(head, QuantizedLinear | SplitLinear):
        size = model.get_input_embeddings().num_embeddings
        wanted = size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != size:
            raise ValueError(
                f"resize_token_embeddings({wanted}): the head of this model is packed for {size} tokens; load it "
                "without linears=, so that its head stays in float, resize it, and save it before it is quantised"
            )
        return model.get_input_embeddings()
    return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, **options)
