"""All tensors of a checkpoint held against what the model has: what is missing, of another shape, or too many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.linear_sources import LinearSource, is_tied_away
from cpumoe.checkpoints.model_layout import LinearPlace, ModelLayout
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES


def quantized_linears(checkpoint: Checkpoint, layout: ModelLayout) -> dict[str, LinearSource]:
    """The linears that are quantised in the files and are not experts, by their names there."""
    found: dict[str, LinearSource] = {}
    for name, linear in layout.linears.items():
        storage = None if f"{name}.weight" in layout.routers else checkpoint.storage_of(name)
        if storage is None or (linear.is_tied and is_tied_away(checkpoint, name, storage)):
            continue
        found[name] = LinearSource(checkpoint, name, linear.rows, linear.columns, storage, linear.has_bias)
    return found


def check_model(
    layout: ModelLayout,
    experts: Iterable[ExpertSource],
    linears: Mapping[str, LinearSource],
    check: TensorCheck,
) -> None:
    """Adds all that is wrong with the tensors of a checkpoint to ``check``.

    Args:
        layout: what the model has.
        experts: those that were found in the files.
        linears: those that are quantised, by name; all others are float.
    """
    for name, linear in layout.linears.items():
        if name in linears:
            linears[name].check(check)
        else:
            _expect_float(name, linear, check)
    for source in experts:
        source.check(check)
    for name, tensor in layout.tensors.items():
        if tensor.shape is not None and tensor.is_float:
            check.expect(name, StoredTensor(FLOAT_DTYPES, tensor.shape))
        else:
            check.expect_any(name)
    for name, scale in layout.kv_cache_scales.items():
        check.expect(name, scale, read_value=True)
    check.nothing_else_but(layout.left_out)


def _expect_float(name: str, linear: LinearPlace, check: TensorCheck) -> None:
    if not linear.is_tied:
        check.expect(linear.source, StoredTensor(FLOAT_DTYPES, (linear.rows, linear.columns)))
    if linear.has_bias:
        check.expect(f"{name}.bias", StoredTensor(FLOAT_DTYPES, (linear.rows,)))
