"""What vLLM calls for a quantised linear that is served: which rows a worker holds, and the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from cpumoe.checkpoints.pushed_linear import LinearPart, PushedLinear
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.integrations.vllm.inlets import Inlet, remove_inlets
from cpumoe.integrations.vllm.served_experts import refuse_made_up_weights
from cpumoe.integrations.vllm.telling import LINEARS, take, tell_taken
from cpumoe.layers import reference
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight


@dataclass(frozen=True)
class StoredLinear:
    """A linear of the checkpoint: its name there, how it is stored, and the dtypes of its tensors by suffix."""

    name: str
    storage: LinearStorage
    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class _Rows:
    """What vLLM calls a part of a linear, its rows in the files, and those that this worker holds."""

    shard: object
    rows: int
    first: int
    count: int


class LinearMethod(LinearMethodBase):  # type: ignore[misc]  # untyped base
    """The method of a linear whose weights are quantised.

    Args:
        prefix: vLLM's name of it.
        stored: the linears of the checkpoint that it consists of.
    """

    def __init__(self, prefix: str, stored: Sequence[StoredLinear]) -> None:
        super().__init__()
        self._prefix, self._stored = prefix, tuple(stored)
        self._intake: PushedLinear | None = None
        self._first_output = 0  # of a worker that has some of the outputs of a linear whose inputs are split
        self._outputs = 0

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        for one in self._stored:
            take(LINEARS, one.storage.scheme)
        rows = held_rows(layer, self._stored[0].storage)
        stored, is_as_in_files = self._stored, len(self._stored) == len(rows)
        if not is_as_in_files:
            if any(one.storage != stored[0].storage for one in stored):
                raise UnsupportedScheme(
                    f"{self._prefix}: linears of several schemes, some of which are one in the files"
                )
            stored = stored[:1] * len(rows)
        parts = [
            LinearPart(
                one.name if is_as_in_files else f"{self._prefix}[{place}]", one.storage, r.rows, r.first, r.count
            )
            for place, (one, r) in enumerate(zip(stored, rows, strict=True))
        ]
        intake = self._intake = PushedLinear(self._prefix, input_size, parts)
        loader = _LinearLoader(intake, [r.shard for r in rows])
        for suffix in intake.suffixes:
            dtype = self._stored[0].dtypes.get(suffix, params_dtype)
            layer.register_parameter(suffix, Inlet(loader.of(suffix), dtype))
        if input_size_per_partition != input_size:
            self._first_output, self._outputs = rows[0].first, rows[0].rows
        elif isinstance(layer, ParallelLMHead):
            self._outputs = sum(output_partition_sizes)  # filled up with rows of nothing
        else:
            self._outputs = sum(r.count for r in rows)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self._intake is None:
            raise CheckpointError(f"{self._prefix}: its weights were packed before, and cannot be loaded anew")
        tell_taken()
        linears, self._intake = self._intake.finish(), None
        remove_inlets(layer)
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            # Latent attention takes the weight itself apart. So does cpumoe's, which holds it in the model's dtype.
            dtype = layer.params_dtype
            weights = [_dequantized(linear).to(dtype) for linear in linears]
            layer.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        else:
            layer.cpumoe_linears = nn.ModuleList(linears)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out] of the worker; of one whose inputs are split, what it adds to those of all."""
        if "cpumoe_linears" not in layer._modules:
            return functional.linear(x, layer.weight, bias)
        splits_inputs = isinstance(layer, RowParallelLinear) and layer.tp_size > 1
        if splits_inputs:
            # A scale for each token is that of all its inputs. So a worker takes the inputs of all, and has its part of
            # the outputs instead: what vLLM adds up then has the bits of one worker.
            x = tensor_model_parallel_all_gather(x)
        linears, in_fp32 = layer.cpumoe_linears, bias is not None
        outputs = [linear(x, fp32_out=in_fp32) for linear in linears]
        out = outputs[0] if len(outputs) == 1 else torch.cat([x.new_empty((*x.shape[:-1], 0)), *outputs], -1)
        behind = self._outputs - self._first_output - out.shape[-1]
        if self._first_output or behind:
            out = functional.pad(out, (self._first_output, behind))
        return out if bias is None else (out + bias).to(x.dtype)


def _dequantized(linear: QuantizedLinear) -> Tensor:
    """fp32 [out, in]."""
    return reference.dequantize(unpack_weight(linear.weight_packed, scheme=linear.scheme)[0])


class _LinearLoader:
    """What vLLM's loaders call for a tensor of a linear."""

    def __init__(self, intake: PushedLinear, shards: Sequence[object]) -> None:
        self._intake = intake
        self._places = {shard: (place,) for place, shard in enumerate(shards)}
        self._all = tuple(range(len(shards)))

    def of(self, suffix: str) -> Any:
        def load(param: object, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            if loaded_shard_id is None:
                parts = self._all
            elif isinstance(loaded_shard_id, tuple):
                parts = tuple(place for one in loaded_shard_id for place in self._places[one])
            else:
                parts = self._places[loaded_shard_id]
            self._intake.push(parts, suffix, loaded_weight)

        return load


#: Classes whose rows are known, most special first.
_KNOWN = (ParallelLMHead, QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear,
          ReplicatedLinear)  # fmt: skip


def refuse_unknown_linear(layer: Any) -> None:
    """Raises UnsupportedScheme for a linear of which it is not known which rows a worker holds."""
    refuse_made_up_weights()
    known = next((kind for kind in _KNOWN if isinstance(layer, kind)), None)
    if known is None or type(layer).weight_loader is not known.weight_loader:
        raise UnsupportedScheme(f"linears of the class {type(layer).__name__} are not served")


def held_rows(layer: Any, storage: LinearStorage) -> list[_Rows]:
    """The parts of a linear of vLLM, from the first row to the last."""
    rank, size = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)

    def part(shard: object, rows: int, slices: int = size, index: int = rank) -> _Rows:
        if rows % slices != 0:
            raise UnsupportedScheme(f"{rows} outputs in {slices} equal parts")
        return _Rows(shard, rows, rows // slices * index, rows // slices)

    if isinstance(layer, ParallelLMHead):
        held = layer.shard_indices
        first = held.org_vocab_start_index
        return [_Rows(None, layer.org_vocab_size, first, held.org_vocab_end_index - first)]
    if isinstance(layer, RowParallelLinear):
        if size == 1:
            return [_Rows(None, layer.output_size, 0, layer.output_size)]
        unit = storage.scheme.weights.group.rows or 1  # rows that share scales stay together
        units = -(-layer.output_size // unit)
        begin, end = (min(units * r // size * unit, layer.output_size) for r in (rank, rank + 1))
        return [_Rows(None, layer.output_size, begin, end - begin)]
    if isinstance(layer, QKVParallelLinear):
        copies = layer.num_kv_head_replicas
        of_keys, of_values = (layer.total_num_kv_heads * n for n in (layer.head_size, layer.v_head_size))
        return [
            part("q", layer.total_num_heads * layer.head_size),
            part("k", of_keys, size // copies, rank // copies),
            part("v", of_values, size // copies, rank // copies),
        ]
    if isinstance(layer, MergedColumnParallelLinear):
        return [part(index, rows) for index, rows in enumerate(layer.output_sizes)]
    if isinstance(layer, ColumnParallelLinear):
        return [part(None, layer.output_size)]
    return [_Rows(None, layer.output_size, 0, layer.output_size)]
