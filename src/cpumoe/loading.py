"""From a checkpoint on disk to packed weights, a few experts at a time.

An expert source knows how one layer's experts lie in a checkpoint: it lists the tensors it needs, so that all that is
wrong is known before a byte of weights is read, and then reads experts as integers and scales. A new on-disk form is a
new source; everything behind it stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cpumoe.activation import Activation
from cpumoe.architectures import ARCHITECTURES, Architecture, ExpertsFacts, Projections
from cpumoe.backends import QuantizedExperts
from cpumoe.checkpoint import Checkpoint, TensorCheck
from cpumoe.config import MoEConfig
from cpumoe.errors import CheckpointError, CpumoeError
from cpumoe.experts import Experts
from cpumoe.formats.compressed_tensors import LinearFormat, StoredTensor
from cpumoe.formats.tensor_file import DTYPES
from cpumoe.linear import QuantizedLinear
from cpumoe.quantize import quantize_weight
from cpumoe.scheme import Scheme

FLOAT_DTYPES = ("BF16", "F16", "F32")

_CHUNK_BYTES = 64 << 20  # read at once: enough for all threads to pack, little beside a layer


class ExpertSource(Protocol):
    """The experts of one layer, somewhere on disk."""

    prefix: str  # what the names of its tensors start with

    @property
    def config(self) -> MoEConfig: ...

    @property
    def expert_bytes(self) -> int:
        """Bytes that one expert occupies while it is read."""
        ...

    def check(self, check: TensorCheck) -> None:
        """Announces every tensor that will be read."""
        ...

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        """Experts ``first`` to ``first + count - 1``."""
        ...


class Buffers:
    """Memory that is used again for the next experts, so that the kernel does not hand out fresh pages each time."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any content."""
        size = torch.Size(shape).numel()
        held = self._tensors.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            self._tensors[name] = held = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


def read_chunks(source: ExpertSource) -> Iterator[QuantizedExperts]:
    """All experts of a layer, some megabytes at a time; the next are read from disk while these are packed."""
    experts = source.config.experts
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
    with _naming(source.prefix):
        return Experts.from_chunks(read_chunks(source), source.config, backend=backend)


@contextmanager
def _naming(module: str) -> Iterator[None]:
    """The packer knows values that it refuses, and not whose they are."""
    try:
        yield
    except CpumoeError:
        raise
    except ValueError as problem:
        raise CheckpointError(f"{module}: {problem}") from problem


# ---- one linear per projection and expert --------------------------------------------------------------------------


class FloatExpertSource(ExpertSource, Protocol):
    """Experts in float, which may also be read as they are."""

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        """Names of the gate, up and down linears of one expert, as a checkpoint with one linear each has them."""
        ...

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """gate_up [count, 2 I, H] (gate rows first), down [count, H, I] and their biases, in the stored dtype."""
        ...


class _PerExpert:
    """Experts whose linears are stored one by one: ``PREFIX.N.gate_proj.weight`` and so on."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, projections: Projections, config: MoEConfig, has_bias: bool
    ) -> None:
        self.prefix = prefix
        self.config = config
        self._checkpoint = checkpoint
        self._projections = projections
        self._has_bias = has_bias

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self.prefix}.{expert}.{name}" for name in self._projections)
        return gate, up, down

    def _linears(self, expert: int) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of the linears of one expert."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate, up, down = self.linear_names(expert)
        yield gate, inner, hidden
        yield up, inner, hidden
        yield down, hidden, inner

    def _check_linears(self, check: TensorCheck, stored: Callable[[int, int], dict[str, StoredTensor]]) -> None:
        for expert in range(self.config.experts):
            for name, rows, columns in self._linears(expert):
                for suffix, tensor in stored(rows, columns).items():
                    check.expect(f"{name}.{suffix}", tensor)
                if self._has_bias:
                    check.expect(f"{name}.bias", StoredTensor(self._first_dtype("bias", FLOAT_DTYPES), (rows,)))

    def _read_suffix(
        self, suffix: str, first: int, count: int, width: Callable[[int], tuple[int, ...]], buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """The tensors ``suffix`` of some experts: gate rows then up rows [count, 2 I, ...], and down [count, H, ...].

        ``width`` gives what follows the rows, from the number of inputs.
        """
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        dtype = DTYPES[self._checkpoint.info(f"{self.prefix}.0.{self._projections.gate}.{suffix}").dtype]
        gate_up = buffers.get(f"gate_up.{suffix}", (count, 2 * inner, *width(hidden)), dtype)
        down = buffers.get(f"down.{suffix}", (count, hidden, *width(inner)), dtype)
        for index in range(count):
            gate_name, up_name, down_name = self.linear_names(first + index)
            self._checkpoint.read_into(f"{gate_name}.{suffix}", gate_up[index, :inner])
            self._checkpoint.read_into(f"{up_name}.{suffix}", gate_up[index, inner:])
            self._checkpoint.read_into(f"{down_name}.{suffix}", down[index])
        return gate_up, down

    def _read_biases(self, first: int, count: int, buffers: Buffers) -> tuple[Tensor | None, Tensor | None]:
        if not self._has_bias:
            return None, None
        return self._read_suffix("bias", first, count, lambda _: (), buffers)

    def _first_dtype(self, suffix: str, accepted: tuple[str, ...]) -> tuple[str, ...]:
        """The dtype of the first expert's tensor, which all others must have; what is accepted, if there is none."""
        name = f"{self.prefix}.0.{self._projections.gate}.{suffix}"
        if name in self._checkpoint and self._checkpoint.info(name).dtype in accepted:
            return (self._checkpoint.info(name).dtype,)
        return accepted


class QuantizedPerExpert(_PerExpert):
    """Integers and scales as compressed-tensors writes them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        projections: Projections,
        config: MoEConfig,
        has_bias: bool,
        form: LinearFormat,
    ) -> None:
        super().__init__(checkpoint, prefix, projections, config, has_bias)
        self.format = form
        self._scale_dtypes = self._first_dtype("weight_scale", FLOAT_DTYPES)
        scale = torch.bfloat16 if self._scale_dtypes == ("BF16",) else torch.float32
        self.config = replace(config, scale_dtype=scale)

    @property
    def expert_bytes(self) -> int:
        per_byte = 8 // self.config.scheme.weights.bits if self.format.form == "pack-quantized" else 1
        return 3 * self.config.hidden_size * self.config.intermediate_size // per_byte

    def _stored(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        tensors = self.format.tensors(rows, columns)
        return tensors | {"weight_scale": replace(tensors["weight_scale"], dtypes=self._scale_dtypes)}

    def check(self, check: TensorCheck) -> None:
        self._check_linears(check, self._stored)

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        form, hidden, inner = self.format, self.config.hidden_size, self.config.intermediate_size
        if form.form == "pack-quantized":
            for expert in range(first, first + count):
                for name, rows, columns in self._linears(expert):
                    _check_weight_shape(self._checkpoint, name, rows, columns)

        def stored_width(columns: int) -> tuple[int, ...]:
            return self._stored(1, columns)[form.weight_name].shape[1:]

        def scale_width(columns: int) -> tuple[int, ...]:
            return self._stored(1, columns)["weight_scale"].shape[1:]

        gate_up, down = self._read_suffix(form.weight_name, first, count, stored_width, buffers)
        gate_up_scale, down_scale = self._read_suffix("weight_scale", first, count, scale_width, buffers)
        gate_up_bias, down_bias = self._read_biases(first, count, buffers)
        return QuantizedExperts(
            form.held(gate_up, hidden),
            _packable_scale(gate_up_scale),
            form.held(down, inner),
            _packable_scale(down_scale),
            gate_up_bias,
            down_bias,
        )


class FloatPerExpert(_PerExpert):
    """Float weights, quantised as they are read."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, projections: Projections, config: MoEConfig, has_bias: bool
    ) -> None:
        super().__init__(checkpoint, prefix, projections, config, has_bias)
        self._dtypes = self._first_dtype("weight", FLOAT_DTYPES)
        self.config = replace(config, scale_dtype=_scale_dtype(self._dtypes))

    @property
    def expert_bytes(self) -> int:
        return _float_expert_bytes(self.config)

    def check(self, check: TensorCheck) -> None:
        self._check_linears(check, lambda rows, columns: {"weight": StoredTensor(self._dtypes, (rows, columns))})

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        return _quantized(*self.read_float(first, count, buffers), self.config.scheme, self.prefix)

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate_up, down = self._read_suffix("weight", first, count, lambda columns: (columns,), buffers)
        return gate_up, down, *self._read_biases(first, count, buffers)


class FusedFloat:
    """Float weights of all experts in one tensor, [experts, in, out]: gpt-oss (gate and up in turn), Llama 4."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: MoEConfig, has_bias: bool, interleaved: bool
    ) -> None:
        self.prefix = prefix
        self._checkpoint = checkpoint
        self._has_bias = has_bias
        self._interleaved = interleaved
        name = f"{prefix}.gate_up_proj"
        found = checkpoint.info(name).dtype if name in checkpoint else None
        self._dtypes = (found,) if found in FLOAT_DTYPES else FLOAT_DTYPES
        self.config = replace(config, scale_dtype=_scale_dtype(self._dtypes))

    @property
    def expert_bytes(self) -> int:
        return _float_expert_bytes(self.config)

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        prefix = f"{self.prefix}.{expert}"
        return f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj"

    def check(self, check: TensorCheck) -> None:
        experts, hidden, inner = self.config.experts, self.config.hidden_size, self.config.intermediate_size
        check.expect(f"{self.prefix}.gate_up_proj", StoredTensor(self._dtypes, (experts, hidden, 2 * inner)))
        check.expect(f"{self.prefix}.down_proj", StoredTensor(self._dtypes, (experts, inner, hidden)))
        if self._has_bias:
            check.expect(f"{self.prefix}.gate_up_proj_bias", StoredTensor(FLOAT_DTYPES, (experts, 2 * inner)))
            check.expect(f"{self.prefix}.down_proj_bias", StoredTensor(FLOAT_DTYPES, (experts, hidden)))

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        return _quantized(*self.read_float(first, count, buffers), self.config.scheme, self.prefix)

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        def part(name: str) -> Tensor:
            info = self._checkpoint.info(f"{self.prefix}.{name}")
            out = buffers.get(name, (count, *info.shape[1:]), DTYPES[info.dtype])
            self._checkpoint.read_into(f"{self.prefix}.{name}", out, first * (info.bytes // self.config.experts))
            return out

        def rows_apart(rows: Tensor) -> Tensor:  # [count, 2 I, ...]
            return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if self._interleaved else rows

        gate_up, down = rows_apart(part("gate_up_proj").transpose(1, 2)), part("down_proj").transpose(1, 2)
        if not self._has_bias:
            return gate_up, down, None, None
        return gate_up, down, rows_apart(part("gate_up_proj_bias")), part("down_proj_bias")


def _scale_dtype(stored: tuple[str, ...]) -> torch.dtype:
    """Dtype of the scales that ``quantize_weight`` makes from weights of this dtype."""
    return torch.bfloat16 if stored == ("BF16",) else torch.float32


def _float_expert_bytes(config: MoEConfig) -> int:
    # Quantising goes through fp32 with several temporaries: 16 bytes for each weight.
    return 3 * config.hidden_size * config.intermediate_size * 16


def _quantized(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    scheme: Scheme,
    name: str,
) -> QuantizedExperts:
    return QuantizedExperts(
        *quantize_weight(gate_up, scheme, f"{name} gate_up"),
        *quantize_weight(down, scheme, f"{name} down"),
        gate_up_bias,
        down_bias,
    )


def _packable_scale(scale: Tensor) -> Tensor:
    return scale.to(torch.float32) if scale.dtype == torch.float16 else scale


def _check_weight_shape(checkpoint: Checkpoint, name: str, rows: int, columns: int) -> None:
    stored = checkpoint.read(f"{name}.weight_shape").tolist()
    if stored != [rows, columns]:
        raise CheckpointError(f"{name}.weight_shape is {stored}; [{rows}, {columns}] is accepted")


# ---- finding them --------------------------------------------------------------------------------------------------


def find_experts(
    checkpoint: Checkpoint,
    architecture: Architecture,
    module: str,
    *,
    experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Activation,
    scheme: Scheme | None,
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
        linears = (f"{prefix}.{expert}.{name}" for expert in range(experts) for name in names)
        return any(f"{linear}.{t}" in checkpoint for linear in linears for t in ("weight", "weight_packed"))

    fused = [prefix for prefix in prefixes if f"{prefix}.gate_up_proj" in checkpoint] if architecture.fused else []

    def config(of: Scheme) -> MoEConfig:
        bias = architecture.has_bias
        with _naming(module):
            return MoEConfig(of, experts, hidden_size, intermediate_size, activation, has_bias=bias)

    if fused and architecture.fused:
        if scheme is None:
            return None
        return FusedFloat(checkpoint, fused[0], config(scheme), architecture.has_bias, architecture.fused.interleaved)
    prefix, projections = next((s for s in spellings if present(*s)), spellings[0])
    form = _common_format(checkpoint, prefix, projections, experts)
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
    facts = checkpoint.architecture.facts(checkpoint.text_config)
    prefix = layers_prefix(checkpoint)
    announced, held = len(facts.layers) * facts.experts, len(checkpoint.names)
    if announced > 10_000 + 100 * held:  # listing them all would take hours and say nothing
        raise CheckpointError(f"{checkpoint.folder}: config.json announces {announced} experts for {held} tensors")
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
    return find_experts(
        checkpoint,
        checkpoint.architecture,
        module,
        experts=facts.experts,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        activation=facts.activation,
        scheme=scheme,
    )


#: The part of a name that leads to the decoder layers.
LAYER = re.compile(r"(.*?\blayers\.)\d+\.")

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
            _check_weight_shape(self._checkpoint, self.name, self.rows, self.columns)
        stored = self._checkpoint.read(f"{self.name}.{self.format.weight_name}")
        with _naming(self.name):
            return QuantizedLinear.from_quantized(
                self.format.held(stored, self.columns),
                _packable_scale(self._checkpoint.read(f"{self.name}.weight_scale")),
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
    architecture = ARCHITECTURES.get(str(checkpoint.text_config.get("model_type")))
    routers = () if architecture is None else architecture.routers
    layers = checkpoint.text_config.get("num_hidden_layers")
    linears: dict[str, LinearSource] = {}
    for tensor in checkpoint.names:
        name, _, suffix = tensor.rpartition(".")
        integers = suffix == "weight" and checkpoint.info(tensor).dtype == "I8"
        if name in linears or not (integers or suffix in QUANTIZED_SUFFIXES):
            continue
        form = checkpoint.quantization.format_of(name)
        if form is None or EXPERT.search(name) or _NOT_LINEAR.search(name) or name.endswith(routers):
            continue
        layer = LAYER.match(name)
        if layer is not None and isinstance(layers, int) and int(layer[0].split(".")[-2]) >= layers:
            continue  # a layer behind the last predicts further tokens, and is not loaded
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
