"""From a checkpoint on disk to packed weights: finding the tensors, and packing experts as they are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeGuard

from cpumoe.checkpoints.architectures import Architecture, ExpertsFacts, Projections, known_architecture
from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint, TensorCheck
from cpumoe.checkpoints.expert_sources import (
    FLOAT_DTYPES,
    Buffers,
    ExpertSource,
    FloatPerExpert,
    FusedFloat,
    QuantizedPerExpert,
    check_weight_shape,
    packable_scale,
)
from cpumoe.checkpoints.formats.compressed_tensors import LinearFormat, StoredTensor
from cpumoe.errors import CheckpointError, CpumoeError
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.scheme import Scheme

_CHUNK_BYTES = 64 << 20  # read at once: enough for all threads to pack, little beside a layer


def read_chunks(source: ExpertSource) -> Iterator[QuantizedExperts]:
    """All experts of a layer, some megabytes at a time; the next are read from disk while these are packed."""
    experts = source.config.local_experts
    # Two chunks are in memory: a quarter of a small layer at most.
    step = max(1, min(experts // 8, _CHUNK_BYTES // source.expert_bytes))
    buffers = (Buffers(), Buffers())  # one is packed while the other is filled

    def read(index: int, first: int) -> QuantizedExperts:
        return source.read(first, min(step, experts - first), buffers[index % 2])

    with ThreadPoolExecutor(1) as reader:
        starts = list(enumerate(range(0, experts, step)))
        pending = reader.submit(read, *starts[0])
        for following in [*starts[1:], None]:
            chunk = pending.result()
            if following is not None:
                pending = reader.submit(read, *following)
            yield chunk


def load_experts(source: ExpertSource, backend: str | None = None) -> Experts:
    """Packs the experts of one layer as they are read."""
    with naming(source.prefix):
        return Experts.from_chunks(read_chunks(source), source.config, backend=backend)


@contextmanager
def naming(module: str) -> Iterator[None]:
    """The packer knows values that it refuses, and not whose they are."""
    try:
        yield
    except CpumoeError:
        raise
    except ValueError as problem:
        raise CheckpointError(f"{module}: {problem}") from problem


# ---- finding them --------------------------------------------------------------------------------------------------


def find_experts(
    checkpoint: Checkpoint, architecture: Architecture, module: str, facts: ExpertsFacts, scheme: Scheme | None
) -> ExpertSource | None:
    """The source of a layer's experts, whatever spelling the checkpoint has them in.

    Args:
        module: name of the experts in transformers, such as ``model.layers.0.mlp.experts``.
        scheme: for float weights, what to quantise them to; None leaves them alone.

    Returns:
        None for float weights that are to be left alone.
    """
    prefixes = expert_prefixes(architecture, module)
    spellings = [(prefix, names) for prefix in prefixes for names in architecture.projections]

    def present(prefix: str, names: Projections) -> bool:
        """Whether any expert has this spelling: a tensor of the first may be the one that is missing."""
        linears = (f"{prefix}.{expert}.{name}" for expert in range(facts.experts) for name in names)
        return any(f"{linear}.{t}" in checkpoint for linear in linears for t in ("weight", "weight_packed"))

    fused = [prefix for prefix in prefixes if f"{prefix}.gate_up_proj" in checkpoint] if architecture.fused else []

    def config(of: Scheme) -> MoEConfig:
        bias = architecture.has_bias
        with naming(module):
            return MoEConfig(
                of, facts.experts, facts.hidden_size, facts.intermediate_size, facts.activation, has_bias=bias
            )

    if fused and architecture.fused:
        if scheme is None:
            return None
        return FusedFloat(checkpoint, fused[0], config(scheme), architecture.has_bias, architecture.fused.interleaved)
    prefix, projections = next((s for s in spellings if present(*s)), spellings[0])
    form = _common_format(checkpoint, prefix, projections, facts.experts)
    if form is not None:
        return QuantizedPerExpert(checkpoint, prefix, projections, config(form.scheme), architecture.has_bias, form)
    if scheme is None:
        return None
    return FloatPerExpert(checkpoint, prefix, projections, config(scheme), architecture.has_bias)


def experts_of(checkpoint: Checkpoint, scheme: Scheme | None = None) -> dict[str, ExpertSource]:
    """The experts of every layer by their names in transformers, from what config.json says.

    All tensors that belong to them are checked; raises CheckpointError with the names of those that are missing, of
    another shape, or too many. Float weights are quantised to ``scheme``, or left out without one.
    """
    facts = checkpoint.facts
    prefix = layers_prefix(checkpoint)
    check = TensorCheck(checkpoint)
    sources: dict[str, ExpertSource] = {}
    for layer in facts.layers:
        module = f"{prefix}{layer}.{checkpoint.architecture.experts[0]}"
        source = experts_of_layer(checkpoint, facts, module, scheme)
        if source is not None:
            source.check(check)
            sources[module] = source
    under = (p for module in sources for p in expert_prefixes(checkpoint.architecture, module))
    check.nothing_else_under(*(f"{path}." for path in under))
    check_layers_behind(checkpoint, check)
    check.raise_problems()
    return sources


def expert_prefixes(architecture: Architecture, module: str) -> list[str]:
    """Where files may have the experts that transformers names ``module``."""
    layer = module.removesuffix(architecture.experts[0])
    return [layer + path for path in architecture.experts]


def experts_of_layer(
    checkpoint: Checkpoint, facts: ExpertsFacts, module: str, scheme: Scheme | None = None
) -> ExpertSource | None:
    """The experts named ``module``, with the sizes that config.json gives; None for float without a scheme."""
    return find_experts(checkpoint, checkpoint.architecture, module, facts, scheme)


#: A scheme without groups: for any size that is served at all, where only names and shapes are of interest.
FITS_ALL_SIZES = Scheme.parse("w8a8")

#: Names of routed experts and of what is inside them; shared ones have another name.
EXPERT = re.compile(r"(^|\.)experts(\.|$)")


def architecture_if_needed(checkpoint: Checkpoint) -> Architecture | None:
    """The architecture; None for one that is not in the table and has no experts, and so needs no entry there."""
    try:
        return checkpoint.architecture
    except CheckpointError:
        if any(map(EXPERT.search, checkpoint.names)):
            raise
        return None


def layers_prefix(checkpoint: Checkpoint) -> str:
    """What the names of the decoder layers start with: ``model.layers.``, or that inside a multimodal model."""
    counts = Counter(match[1] for name in checkpoint.names if (match := LAYER.match(name)) and "vision" not in name)
    if not counts:
        raise CheckpointError(f"{checkpoint.folder}: no tensor belongs to a decoder layer (model.layers.N.)")
    return counts.most_common(1)[0][0]


def prediction_layers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the names of those layers start with that predict further tokens; they are left where they are.

    DeepSeek-V3 and GLM-4.5 have them behind the last layer. They are known by ``eh_proj``, which joins the hidden state
    with the embedding of the next token: a layer without it is a layer of the model, whatever its number.
    """
    layers = checkpoint.text_config.get("num_hidden_layers")
    further = checkpoint.text_config.get("num_nextn_predict_layers")
    if not _is_count(layers) or not _is_count(further):
        return ()
    prefix = layers_prefix(checkpoint)
    joining = (LAYER.match(name) for name in checkpoint.names if ".eh_proj." in name)
    found = {match[0]: int(match[2]) for match in joining if match and match[1] == prefix}
    return tuple(layer for layer, number in found.items() if layers <= number < layers + further)


def check_layers_behind(checkpoint: Checkpoint, check: TensorCheck) -> None:
    """Adds the tensors of layers behind the last to ``check``, but for layers that predict further tokens.

    transformers leaves out some by their number alone, and a num_hidden_layers that is too small would cut a model.
    """
    layers = checkpoint.text_config.get("num_hidden_layers")
    if not _is_count(layers):
        return
    prefix, left_out = layers_prefix(checkpoint), prediction_layers(checkpoint)
    for name in sorted(checkpoint.names):
        match = LAYER.match(name)
        behind = match is not None and match[1] == prefix and int(match[2]) >= layers
        if behind and not name.startswith(left_out):
            check.extra.append(name)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _common_format(checkpoint: Checkpoint, prefix: str, projections: Projections, experts: int) -> LinearFormat | None:
    """The format of all linears of a layer's experts; a layer that mixes several is refused."""
    if checkpoint.quantization is None:
        return None
    found: dict[LinearFormat | None, str] = {}
    for expert in range(experts):
        for projection in projections:
            name = f"{prefix}.{expert}.{projection}"
            found.setdefault(checkpoint.quantization.format_of(name), name)
    if len(found) > 1:
        text = ", ".join(f"{name} {'float' if f is None else f.scheme}" for f, name in found.items())
        raise CheckpointError(f"{prefix}: experts of one layer have different schemes ({text}); one scheme is served")
    return next(iter(found))


class LinearSource:
    """One quantised linear of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, name: str, rows: int, columns: int, form: LinearFormat, bias: bool):
        self.name = name
        self._checkpoint = checkpoint
        self.rows, self.columns = rows, columns
        self.format = form
        self.has_bias = bias

    def check(self, check: TensorCheck) -> None:
        for suffix, tensor in self.format.tensors(self.rows, self.columns).items():
            check.expect(f"{self.name}.{suffix}", tensor)
        if self.has_bias:
            check.expect(f"{self.name}.bias", StoredTensor(FLOAT_DTYPES, (self.rows,)))

    def load(self) -> QuantizedLinear:
        if self.format.form == "pack-quantized":
            check_weight_shape(self._checkpoint, self.name, self.rows, self.columns)
        stored = self._checkpoint.read(f"{self.name}.{self.format.weight_name}")
        with naming(self.name):
            return QuantizedLinear.from_quantized(
                self.format.held(stored, self.columns),
                packable_scale(self._checkpoint.read(f"{self.name}.weight_scale")),
                self.format.scheme,
                self._checkpoint.read(f"{self.name}.bias") if self.has_bias else None,
            )


#: What quantised linears have besides, or in the place of, a float weight.
QUANTIZED_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")

# A target of "Linear" in quantization_config means a class, which names do not tell.
_NOT_LINEAR = re.compile(r"vision|embed|norm$")


def find_linears(checkpoint: Checkpoint, check: TensorCheck) -> dict[str, LinearSource]:
    """The quantised linears that are not experts, by name: found by their tensors, with the sizes of these.

    What they lack, and what they have too much, is added to ``check``. The plug-ins know a model's linears from the
    model itself; this is for those who have the files alone.
    """
    if checkpoint.quantization is None:
        return {}
    architecture = known_architecture(checkpoint.config)
    routers = () if architecture is None else architecture.routers
    left_out = prediction_layers(checkpoint)
    linears: dict[str, LinearSource] = {}
    for tensor in checkpoint.names:
        name, _, suffix = tensor.rpartition(".")
        integers = suffix == "weight" and checkpoint.info(tensor).dtype == "I8"
        if name in linears or not (integers or suffix in QUANTIZED_SUFFIXES):
            continue
        form = checkpoint.quantization.format_of(name)
        if form is None or EXPERT.search(name) or _NOT_LINEAR.search(name) or name.endswith(routers):
            continue
        if name.startswith(left_out):
            continue
        rows, columns = _stored_size(checkpoint, name, form)
        linears[name] = LinearSource(checkpoint, name, rows, columns, form, f"{name}.bias" in checkpoint)
        linears[name].check(check)
    check.nothing_else_under(*(f"{name}." for name in linears))
    return linears


def _stored_size(checkpoint: Checkpoint, name: str, form: LinearFormat) -> tuple[int, int]:
    """Rows and columns of a quantised linear as its tensors have them; a missing one leaves the others to tell."""

    def shape(suffix: str) -> tuple[int, ...]:
        found = checkpoint.info(f"{name}.{suffix}").shape if f"{name}.{suffix}" in checkpoint else ()
        return found if len(found) == 2 else ()

    weight, scale = shape(form.weight_name), shape("weight_scale")
    told = stored_weight_shape(checkpoint, name)
    if told is not None:  # the last word of a row may be filled up, so this comes first if one of the others agrees
        expected = form.tensors(*told)
        if weight == expected[form.weight_name].shape or scale == expected["weight_scale"].shape:
            return told
    if weight:
        per_element = 1 if form.form == "int-quantized" else 32 // form.scheme.weights.bits
        return weight[0], weight[1] * per_element
    return (scale[0], scale[1] * (form.scheme.group_size or 1)) if scale else (0, 0)


def stored_weight_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int] | None:
    """What the tensor ``weight_shape`` of a linear says; None without one of the right kind."""
    tensor = f"{name}.weight_shape"
    if tensor not in checkpoint or str(checkpoint.info(tensor)) not in ("I64 [2]", "I32 [2]"):
        return None
    rows, columns = checkpoint.read(tensor).tolist()
    return rows, columns
