"""From a checkpoint on disk to packed weights: finding the experts, and packing them as they are read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from cpumoe.checkpoints.architectures import Architecture, ExpertsFacts, Projections
from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck, naming
from cpumoe.checkpoints.expert_sources import (
    FLOAT_SCHEMES,
    Buffers,
    ExpertSource,
    FloatPerExpert,
    QuantizedPerExpert,
)
from cpumoe.checkpoints.formats import QUANTIZED_SUFFIXES
from cpumoe.checkpoints.fused_sources import FusedFloat, FusedQuantized
from cpumoe.checkpoints.layer_names import check_layers_behind, layers_prefix
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.quantized_experts import QuantizedExperts
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
    checkpoint: Checkpoint, architecture: Architecture, module: str, facts: ExpertsFacts, scheme: Scheme | None
) -> ExpertSource:
    """The source of a layer's experts, whatever spelling the checkpoint has them in.

    Args:
        checkpoint: where to look.
        architecture: the family of the model.
        module: name of the experts in transformers, such as ``model.layers.0.mlp.experts``.
        facts: the sizes that config.json gives.
        scheme: for float weights, what to quantise them to; None leaves them as they are, in the scheme of their dtype.
    """
    prefixes = expert_prefixes(architecture, module)

    def config(of: Scheme) -> MoEConfig:
        sizes = (facts.expert_count, facts.hidden_size, facts.intermediate_size)
        with naming(module):
            return MoEConfig(of, *sizes, facts.activation, has_bias=architecture.has_bias)

    whole = checkpoint.storage_of(prefixes[0])
    if whole is not None and whole.fused:
        if architecture.fused is None or not architecture.fused.interleaved:
            raise UnsupportedScheme(
                f"{module}: experts in the format {whole.format!r}, where the rows of gate and up alternate, are not "
                f"served for the model_type {checkpoint.text_config.get('model_type')!r}; for gpt_oss they are"
            )
        return FusedQuantized(checkpoint, prefixes[0], config(whole.scheme), True, whole)
    if architecture.fused is not None:
        fused = next((prefix for prefix in prefixes if f"{prefix}.gate_up_proj" in checkpoint), None)
        if fused is not None:
            as_is = _float_scheme(checkpoint, f"{fused}.gate_up_proj")
            return FusedFloat(checkpoint, fused, config(scheme or as_is), architecture.fused.interleaved)
    spellings = [(prefix, names) for prefix in prefixes for names in architecture.projections]
    found = (spelling for spelling in spellings if _has_experts(checkpoint, *spelling, facts.expert_count))
    prefix, projections = next(found, spellings[0])
    storage = _common_storage(checkpoint, prefix, projections, facts.expert_count)
    if storage is not None:
        return QuantizedPerExpert(checkpoint, prefix, projections, config(storage.scheme), storage)
    as_is = _float_scheme(checkpoint, f"{prefix}.0.{projections.gate}.weight")
    return FloatPerExpert(checkpoint, prefix, projections, config(scheme or as_is))


def _float_scheme(checkpoint: Checkpoint, tensor: str) -> Scheme:
    """The scheme of experts in float, by the dtype of their first tensor. (Without it the check has to tell.)"""
    dtype = checkpoint.info(tensor).dtype if tensor in checkpoint else ""
    return FLOAT_SCHEMES.get(dtype, FLOAT_SCHEMES[FLOAT_DTYPES[0]])


def _has_experts(checkpoint: Checkpoint, prefix: str, projections: Projections, expert_count: int) -> bool:
    """Whether any expert has this spelling: a tensor of the first may be the one that is missing."""
    linears = (f"{prefix}.{expert}.{name}" for expert in range(expert_count) for name in projections)
    return any(f"{linear}.{suffix}" in checkpoint for linear in linears for suffix in ("weight", *QUANTIZED_SUFFIXES))


def _common_storage(
    checkpoint: Checkpoint, prefix: str, projections: Projections, expert_count: int
) -> LinearStorage | None:
    """How all linears of a layer's experts are stored; a layer that mixes several is refused."""
    if checkpoint.quantization is None:
        return None
    found: dict[LinearStorage | None, str] = {}
    for expert in range(expert_count):
        for projection in projections:
            name = f"{prefix}.{expert}.{projection}"
            found.setdefault(checkpoint.storage_of(name), name)
    if len(found) > 1:
        text = ", ".join(f"{name} {'float' if s is None else s.scheme}" for s, name in found.items())
        raise CheckpointError(f"{prefix}: experts of one layer have different schemes ({text}); one scheme is served")
    return next(iter(found))


def experts_of(checkpoint: Checkpoint, scheme: Scheme | None = None) -> dict[str, ExpertSource]:
    """The experts of every layer by their names in transformers, from what config.json says.

    All tensors that belong to them are checked; raises CheckpointError with the names of those that are missing, of
    another shape, or too many. Float weights are quantised to ``scheme``, or stay as they are without one.
    """
    architecture, facts = checkpoint.architecture, checkpoint.facts
    sources = {
        module: find_experts(checkpoint, architecture, module, facts, scheme)
        for module in expert_modules(checkpoint, architecture, facts)
    }
    check = TensorCheck(checkpoint)
    check_experts(architecture, sources, check)
    check_layers_behind(checkpoint, check)
    check.raise_problems()
    return sources


def expert_modules(checkpoint: Checkpoint, architecture: Architecture, facts: ExpertsFacts) -> list[str]:
    """Names of the experts of all layers, as transformers would have them inside this checkpoint."""
    prefix = layers_prefix(checkpoint)
    return [f"{prefix}{layer}.{architecture.experts_paths[0]}" for layer in facts.layers]


def check_experts(architecture: Architecture, sources: Mapping[str, ExpertSource], check: TensorCheck) -> None:
    """All that is wrong with the tensors of some layers' experts, given by module, and with what lies beside them."""
    for source in sources.values():
        source.check(check)
    prefixes = (prefix for module in sources for prefix in expert_prefixes(architecture, module))
    check.nothing_else_under(*(f"{prefix}." for prefix in prefixes))


def expert_prefixes(architecture: Architecture, module: str) -> list[str]:
    """Where files may have the experts that transformers names ``module``."""
    layer = module.removesuffix(architecture.experts_paths[0])
    return [layer + path for path in architecture.experts_paths]
