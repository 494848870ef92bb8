"""From a checkpoint on disk to packed weights: finding the experts, and packing them as they are read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import FLOAT_SCHEMES, Buffers, ExpertSource, FloatPerExpert, QuantizedPerExpert
from cpumoe.checkpoints.fused_sources import FusedFloat, FusedQuantized
from cpumoe.checkpoints.held_scales import held_scheme
from cpumoe.checkpoints.model_layout import ExpertsLayout, ExpertsShape, FusedExperts, ModelLayout
from cpumoe.checkpoints.named_tensors import NamedTensors, TensorCheck, naming
from cpumoe.checkpoints.regrouped_sources import RegroupedPerExpert
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.regrouping import regrouped_scheme
from cpumoe.layers.scheme import Scheme

_CHUNK_BYTES = 64 << 20  # read at once: enough for all threads to pack, little beside a layer


def read_chunks(source: ExpertSource) -> Generator[QuantizedExperts, None, None]:
    """All experts of a layer, some megabytes at a time; the next are read from disk while these are packed."""
    count = source.config.local_experts
    # Two chunks are in memory: a quarter of a small layer at most.
    step = max(1, min(count // 8, _CHUNK_BYTES // source.expert_bytes))
    buffers = (Buffers(), Buffers())  # one is packed while the other is filled

    def read(index: int, first: int) -> QuantizedExperts:
        return source.read(first, min(step, count - first), buffers[index % 2])

    with ThreadPoolExecutor(1) as reader:
        starts = list(enumerate(range(0, count, step)))
        pending = reader.submit(read, *starts[0])
        for following in [*starts[1:], None]:
            chunk = pending.result()
            if following is not None:
                pending = reader.submit(read, *following)
            yield chunk


def load_experts(source: ExpertSource, backend: str | None = None) -> Experts:
    """Packs the experts of one layer as they are read."""
    # Closed at once where packing refuses a chunk: the next one is being read, from a file that is closed after this.
    with naming(source.prefix), closing(read_chunks(source)) as chunks:
        return Experts.from_chunks(chunks, source.config, backend=backend)


# ---- finding them --------------------------------------------------------------------------------------------------


def find_experts(
    checkpoint: Checkpoint, layout: ExpertsLayout, scheme: Scheme | None, part: ExpertsPart | None = None
) -> ExpertSource:
    """The source of a layer's experts, or of what one rank holds of them.

    Args:
        checkpoint: whose files have them.
        layout: what they are and where.
        scheme: for float weights, what to quantise them to; None leaves them as they are, in the scheme of their dtype.
        part: which experts in which order, and which slice of each; None: all of them. Raises ValueError for one that
            has no experts, and UnsupportedScheme where the scales of the scheme do not go with the slices.
    """
    part = ExpertsPart.whole(layout.shape.expert_count) if part is None else part
    if layout.fused is None:
        every = (name for linears in layout.linears for name in linears)
        storage = None
        if checkpoint.quantization is not None:
            storage = common_storage(checkpoint.storage_of, every, layout.prefix)
    else:
        storage = checkpoint.storage_of(layout.fused.gate_up.tensors[0].rpartition(".")[0])
        storage = storage if storage is not None and storage.fused else None
    if storage is not None and storage.fused and (layout.fused is None or not layout.fused.gate_up.interleaved):
        raise _not_in_one_tensor(checkpoint, layout, storage)
    return expert_source(checkpoint, layout, storage, scheme, part)


def expert_source(
    tensors: NamedTensors,
    layout: ExpertsLayout,
    storage: LinearStorage | None,
    scheme: Scheme | None,
    part: ExpertsPart,
) -> ExpertSource:
    """The source of a layer's experts where it is known how they are stored; None: in float, for ``scheme``."""
    shape, is_fused = layout.shape, layout.fused is not None
    _check_part(layout, part)
    if storage is not None:
        held = experts_scheme(storage, part.slices, is_fused)
    elif scheme is not None:
        held = scheme
    else:
        first = f"{layout.linears[0][0]}.weight" if layout.fused is None else layout.fused.gate_up.tensors[0]
        held = _float_scheme(tensors, first)
    config = experts_config(shape, held, part, layout.prefix)
    if is_fused:
        if storage is not None:
            return FusedQuantized(tensors, _as_quantized(layout), part, config, storage)
        return FusedFloat(tensors, layout, part, config)
    if storage is None:
        return FloatPerExpert(tensors, layout, part, config)
    if _is_regrouped(storage, part.slices):
        for size, matrix in ((shape.hidden_size, "gate_up"), (shape.intermediate_size, "down")):
            storage.scheme.check_inputs(size, f"{layout.prefix} {matrix}")
        return RegroupedPerExpert(tensors, layout, part, config, storage)
    return QuantizedPerExpert(tensors, layout, part, config, storage)


def experts_scheme(storage: LinearStorage, slices: int, is_fused: bool = False) -> Scheme:
    """What stored experts, or slices of them, are in memory; ``is_fused``: all of a layer lie in one tensor."""
    if is_fused:
        return storage.scheme
    return (regrouped_scheme if _is_regrouped(storage, slices) else held_scheme)(storage.scheme)


def _is_regrouped(storage: LinearStorage, slices: int) -> bool:
    return storage.has_input_order and storage.scheme.group_size is not None and slices > 1


def experts_config(shape: ExpertsShape, scheme: Scheme, part: ExpertsPart, prefix: str) -> MoEConfig:
    """What a part of a layer's experts is in memory; raises UnsupportedScheme for slices that there cannot be."""
    sizes = (shape.expert_count, shape.hidden_size, shape.intermediate_size)
    with naming(prefix):
        whole = MoEConfig(scheme, *sizes, shape.activation, has_bias=shape.has_bias)
    if part.is_whole(shape.expert_count):
        return whole
    held = None if part.experts == tuple(range(shape.expert_count)) else len(part.experts)
    try:
        _, inner = part.cut(shape.intermediate_size, scheme.slice_unit)
    except ValueError as problem:
        raise UnsupportedScheme(f"{prefix}: {problem}") from None
    with naming(prefix):
        return replace(whole, intermediate_size=inner, held_experts=held)


def _check_part(layout: ExpertsLayout, part: ExpertsPart) -> None:
    count = layout.shape.expert_count
    if not part.experts:
        raise ValueError(f"this rank holds no experts of {layout.prefix}; one or more of its {count} are accepted")
    if outside := [expert for expert in part.experts if not 0 <= expert < count]:
        raise ValueError(f"expert {outside[0]} of {layout.prefix}; 0 to {count - 1} are accepted")


def _not_in_one_tensor(checkpoint: Checkpoint, layout: ExpertsLayout, storage: LinearStorage) -> UnsupportedScheme:
    model_type = checkpoint.text_config.get("model_type")
    return UnsupportedScheme(
        f"{layout.prefix}: experts in the format {storage.format!r}, where all of a layer lie in one tensor and rows "
        f"of gate and up alternate, are not served for the model_type {model_type!r}; for gpt_oss they are"
    )


def _as_quantized(layout: ExpertsLayout) -> ExpertsLayout:
    """Where quantised tensors of all experts lie: outputs come before inputs, whatever float ones do."""
    assert layout.fused is not None
    gate_up, down = (replace(m, transposed=False) for m in (layout.fused.gate_up, layout.fused.down))
    return replace(layout, fused=FusedExperts(gate_up, down))


def _float_scheme(tensors: NamedTensors, tensor: str) -> Scheme:
    """The scheme of experts in float, by the dtype of their first tensor. (Without it the check has to tell.)"""
    dtype = tensors.info(tensor).dtype if tensor in tensors else ""
    return FLOAT_SCHEMES.get(dtype, FLOAT_SCHEMES[FLOAT_DTYPES[0]])


def common_storage(
    storage_of: Callable[[str], LinearStorage | None], linears: Iterable[str], prefix: str
) -> LinearStorage | None:
    """How all linears of a layer's experts are stored; None for float. A layer that mixes several is refused."""
    found: dict[LinearStorage | None, str] = {}
    for name in linears:
        found.setdefault(storage_of(name), name)
    if len(found) > 1:
        text = ", ".join(f"{name} {'float' if s is None else s.scheme}" for s, name in found.items())
        raise CheckpointError(f"{prefix}: experts of one layer have different schemes ({text}); one scheme is served")
    return next(iter(found))


def experts_of(
    checkpoint: Checkpoint,
    layout: ModelLayout,
    scheme: Scheme | None = None,
    part_of: Callable[[ExpertsLayout], ExpertsPart] | None = None,
) -> dict[str, ExpertSource]:
    """The experts of every layer by their names in the model, or what ``part_of`` says that this rank holds of each.

    All tensors that belong to them are checked, those of other ranks too; raises CheckpointError with the names of
    those that are missing, of another shape, or too many. Float weights are quantised to ``scheme``, or stay as they
    are without one.
    """
    sources = {
        experts.module: find_experts(checkpoint, experts, scheme, None if part_of is None else part_of(experts))
        for experts in layout.experts
    }
    check = TensorCheck(checkpoint)
    for source in sources.values():
        source.check(check)
    check.extra += [*layout.unexpected, *sorted(layout.of_experts.keys() - check.expected)]
    check.raise_problems()
    return sources
