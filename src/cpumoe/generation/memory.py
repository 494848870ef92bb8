"""Size of the KV cache: the share of the free memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cpumoe import settings
from cpumoe.free_memory import available_bytes
from cpumoe.steps.schedule import MOST_SEQUENCES
from cpumoe.tables import size_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


# The part of the memory left free by the model that the cache takes. The rest is for activations, the page cache and
# other programs.
_SHARE = 0.5
_STATES_SHARE = 0.25  # of the cache, for the states of sequences
BATCHED_SEQUENCES = 64  # the same in transformers' continuous batching
_BLOCK_TOKENS = 32
_LEAST_BLOCKS = 16
_TABLE_ENTRY_BYTES = 4  # the table of the native engine has an entry for each block and sequence
BATCH_TOKENS = 1024  # the most tokens that one step computes; a longer prompt is read in parts
_ALONE_TOKENS = 4096  # the same where nobody else waits for the end of a step
_MOST_TOKENS = 1 << 20  # of a request to a model that does not say for how many tokens it was made
_ALONE_BLOCK_TOKENS = 16  # the fewest that the core takes: the next turn of a chat computes the last block again


@dataclass(frozen=True)
class CacheSize:
    """How many blocks of keys and values the cache has, and the memory for them and for all that grows with them.

    ``sequences``: those that may be computed at the same time, each with its states. ``step_tokens``: the most tokens
    that one step computes.
    """

    blocks: int
    block_tokens: int
    total_bytes: int
    sequences: int
    step_tokens: int = BATCH_TOKENS


def cache_size(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    free_bytes: int,
    memory_gb: float | None,
    token_bytes: int | None = None,
    state_bytes: int = 0,
) -> CacheSize:
    """The size of the cache for a model that leaves ``free_bytes`` of memory; ``memory_gb`` is the user's choice.

    What the user chose is used whole. The default is a share of the free memory, and no more than what all sequences
    that can be computed at the same time may have.

    ``token_bytes`` and ``state_bytes`` are what a token and a sequence take in an engine that needs nothing else; by
    default the engine is transformers'.
    """
    config = config.get_text_config()
    if token_bytes is None:
        sequences = BATCHED_SEQUENCES
        block_cost, fixed = _batching_costs(config, dtype)
    else:
        sequences = MOST_SEQUENCES
        block_cost, fixed = token_bytes * _BLOCK_TOKENS + sequences * _TABLE_ENTRY_BYTES, 0
    free_bytes = max(free_bytes, 0)
    budget = free_bytes * _SHARE if memory_gb is None else memory_gb * 1e9
    if memory_gb is not None and budget > free_bytes and settings.MEMORY_CHECK.is_on():
        raise ValueError(f"--memory-gb {memory_gb:g}; the model leaves {size_text(free_bytes)}")
    if state_bytes:
        sequences = min(sequences, max(1, int(budget * _STATES_SHARE // state_bytes)))
        fixed = sequences * state_bytes
    blocks = int((budget - fixed) // block_cost)
    if blocks < _LEAST_BLOCKS:
        raise ValueError(
            f"a cache of {_LEAST_BLOCKS * _BLOCK_TOKENS} tokens takes {size_text(fixed + _LEAST_BLOCKS * block_cost)}; "
            + ("half of what the model leaves" if memory_gb is None else "--memory-gb")
            + f" is {size_text(budget)}"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and memory_gb is None:
        blocks = min(blocks, -(-context // _BLOCK_TOKENS) * sequences)
    return CacheSize(blocks, _BLOCK_TOKENS, fixed + blocks * block_cost, sequences)


def one_request_size(
    config: PreTrainedConfig, free_bytes: int, tokens: int | None, token_bytes: int, state_bytes: int
) -> CacheSize:
    """The size of the cache for one request at a time, with ``tokens`` tokens of prompt and answer at most.

    None: as many as the model was made for, or as half of the free memory has room for. Memory is only taken for as
    many tokens as the longest request had.
    """
    if tokens is None:
        room = int(max(free_bytes * _SHARE, _LEAST_BLOCKS * _BLOCK_TOKENS * token_bytes)) // max(token_bytes, 1)
        tokens = min(room, getattr(config.get_text_config(), "max_position_embeddings", None) or _MOST_TOKENS)
    blocks = -(-tokens // _ALONE_BLOCK_TOKENS)
    total_bytes = blocks * _ALONE_BLOCK_TOKENS * token_bytes + state_bytes
    return CacheSize(blocks, _ALONE_BLOCK_TOKENS, total_bytes, 1, _ALONE_TOKENS)


def _batching_costs(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes for each block, and whatever their number, in transformers' continuous batching."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    block_bytes = config.num_hidden_layers * kv_heads * head_dim * 2 * dtype.itemsize * _BLOCK_TOKENS
    # It keeps a mask of [batch tokens, cache tokens + batch tokens] for each kind of attention. While it computes a
    # layer it also has a copy of the layer's keys and values, repeated for all heads.
    mask_row_bytes = BATCH_TOKENS * dtype.itemsize * len(set(getattr(config, "layer_types", None) or ["full"]))
    copy_bytes = (2 * heads + kv_heads) * head_dim * dtype.itemsize
    return block_bytes + (mask_row_bytes + copy_bytes) * _BLOCK_TOKENS, mask_row_bytes * BATCH_TOKENS


def free_bytes_with(model: PreTrainedModel, available: int) -> int:
    """Return what a model leaves of the memory that was ``available`` before it was loaded.

    Weights that are mapped from files do not count as used memory, but there should be room for all of them.
    """
    return available - max(model_bytes(model), available - available_bytes())


def model_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers of a model."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
