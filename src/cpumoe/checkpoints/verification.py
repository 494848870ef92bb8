"""Every quantised layer of a checkpoint, as it is loaded and run, against the plain arithmetic (``cpumoe check``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.checkpoints.model_layout import Describe
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.storage import LinearStorage, refuse_stored_input_scales
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import held_activations
from cpumoe.layers.experts import Experts
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import INTEGERS, WHOLE_FLOATS, Scheme
from cpumoe.option_values import EXPERTS_TOLERANCE, LINEAR_TOLERANCE

_SEED = 20
_FEWEST_TOKENS = 16
_OUTLIER = 1000.0  # beside values around 1; some tokens of real models look like that

# The bits of a code's magnitude, by element.
_MAGNITUDES: dict[str, int] = {"fp4": 0x7, "fp6-e3m2": 0x1F, "fp6-e2m3": 0x1F, "fp8": 0x7F}

# Magnitudes below this are packed as 0: see core/kernels/prepare_floats.h.
_SMALLEST_BF16 = 2.0**-50

_SATURATED = 0.25  # share of the values at an end of the range; 0.03 to 0.12 are usual


@dataclass
class Result:
    """What was found of one module. ``difference`` is that of the worst token, relative; None if it did not run.

    Problems and warnings begin with the name of what they are about.
    """

    name: str
    kind: str  # "experts" or "linear"
    scheme: str
    difference: float | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


# ---- comparing -----------------------------------------------------------------------------------------------------


def _examine(result: Result, name: str, stored: QuantizedWeight, scheme: Scheme, storage: LinearStorage | None) -> None:
    """What is wrong with the numbers of a file themselves."""
    text = f"scales of {name}" if storage is None else f"{name}.{storage.scale_suffix}"
    scales = reference.scale_values(stored.scales)
    inputs = f"scale of the inputs of {name}"
    for what, tensor in ((text, scales), (f"{name}.bias", stored.bias), (inputs, stored.input_scales)):
        if tensor is not None and (bad := int((~torch.isfinite(tensor.float())).sum())):
            result.problems.append(f"{what}: {bad} of {tensor.numel()} values are NaN or infinite")
    if zeros := int((scales == 0).sum()):
        result.warnings.append(f"{text}: {zeros} of {scales.numel()} scales are zero")
    values = stored.values
    if stored.element in _MAGNITUDES:
        values = values.view(torch.int8) & _MAGNITUDES[stored.element]  # the codes without their signs
    if not int(torch.count_nonzero(values)):
        result.warnings.append(f"{name}: all weights are zero")
    if stored.element == "fp8" and (bad := int(torch.count_nonzero(values == _MAGNITUDES["fp8"]))):
        result.problems.append(f"{name}: {bad} of {values.numel()} weights are NaN")
    if stored.element in WHOLE_FLOATS and (bad := int((~torch.isfinite(values)).sum())):
        result.problems.append(f"{name}: {bad} of {values.numel()} weights are NaN or infinite")
    if stored.element not in INTEGERS:  # a quantiser uses the largest code in every group
        return
    largest = scheme.weights.largest
    low, high = (int(end) for end in values.aminmax())
    if low < -largest - 1 or high > largest:
        result.problems.append(f"{name}: integers from {low} to {high}; {-largest - 1} to {largest} are accepted")
    at_ends = torch.count_nonzero(values <= -largest - 1) + torch.count_nonzero(values >= largest)
    share = int(at_ends) / values.numel()
    if share > _SATURATED and stored.zero_points is None:
        result.warnings.append(f"{name}: saturated, {share:.0%} of the weights are at an end of the range")


def _compare(result: Result, name: str, stored: QuantizedWeight, packed: QuantizedWeight) -> None:
    """Packed weights must give back the file to the bit."""

    def factors(weight: QuantizedWeight) -> Tensor:
        return torch.ones(weight.values.shape[0]) if weight.factors is None else weight.factors

    def bits(values: Tensor) -> Tensor:  # 8-bit floats cannot be compared, and NaN is not what it is
        if values.dtype == torch.bfloat16:
            return torch.where(values.abs() < _SMALLEST_BF16, 0.0, values)
        return values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values

    for what, mine, theirs in (
        ("integers" if stored.element in INTEGERS else "values", bits(packed.values), bits(stored.values)),
        ("scales", reference.scale_values(packed.scales), reference.scale_values(stored.scales)),
        ("zero points", packed.zero_points, stored.zero_points),
        ("factors", factors(packed), factors(stored)),
        ("biases", packed.bias, stored.bias),
        ("orders of inputs", packed.input_order, stored.input_order),
        ("scales of inputs", packed.input_scales, stored.input_scales),
    ):
        if mine is None or theirs is None:
            if mine is not theirs:
                result.problems.append(f"{name}: {what} are {'packed' if theirs is None else 'in the file'} only")
        elif mine.shape != theirs.shape:
            result.problems.append(f"{name}: {what} are {list(mine.shape)} packed, {list(theirs.shape)} in the file")
        elif different := int(torch.count_nonzero(mine != theirs)):  # 16-bit floats are widened, which is exact
            result.problems.append(f"{name}: {different} of {mine.numel()} packed {what} are not those of the file")


def _inputs(tokens: int, width: int) -> Tensor:
    """[tokens, width] with the scale of normalised hidden states; one row is zero and one has an outlier."""
    x = torch.randn((tokens, width), generator=torch.Generator().manual_seed(_SEED))
    x[0] = 0
    x[1, width // 3] = _OUTLIER
    return x


def _routing(tokens: int, expert_count: int, topk: int) -> tuple[Tensor, Tensor]:
    """ids and weights [tokens, topk]: the experts of a random order in turn, so that all of them get their tokens."""
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(expert_count, generator=generator)
    ids = order[torch.arange(tokens * topk) % expert_count].view(tokens, topk)
    weights = torch.rand((tokens, topk), generator=generator) + 0.1
    return ids, weights / weights.sum(-1, keepdim=True)


def _judge(result: Result, output: Tensor, truth: Tensor, tolerance: float) -> None:
    """Notes the largest difference of a token [tokens, out], relative to the size of its output.

    Tokens with little output are measured by the median one: the token of zeros has none, and with scales per group
    its sums cancel to a rounding error instead of zero.
    """
    error, size = (t.double().norm(dim=-1) for t in (output - truth, truth))
    relative = torch.where(error == 0, 0.0, error / torch.maximum(size, size.median()))
    token = int(relative.nan_to_num(nan=math.inf).argmax())
    difference = float(relative[token])
    if not math.isfinite(difference):
        result.problems.append(
            f"{result.name}: the output of token {token} is not finite, or not zero where all must be"
        )
        return
    result.difference = max(difference, result.difference or 0.0)
    if difference > tolerance:
        result.problems.append(
            f"{result.name}: the output of token {token} is {difference:.1e} away from the reference; "
            f"{tolerance:.0e} is accepted"
        )


def _run(result: Result, call: Callable[[slice], Tensor], truth: Callable[[slice], Tensor], tolerance: float) -> None:
    """All tokens at once, and one alone: long and short inputs take different ways through the kernels.

    The truth is asked for each time: where all tokens share a scale, one alone has another.
    """
    for rows in (slice(None), slice(2, 3)):
        _judge(result, call(rows), truth(rows), tolerance)


def _check_experts(result: Result, source: ExpertSource, tokens: int | None, tolerance: float | None) -> None:
    config = source.config
    experts: Experts | None = None
    try:
        experts = load_experts(source, backend="native")
    except (ValueError, RuntimeError) as problem:  # the file is looked at nevertheless: its names say more
        refusal = f"{result.name} cannot be loaded: {problem}"

    def compared(expert: int) -> list[QuantizedWeight]:
        stored_weights = source.stored_expert(expert)
        packed_weights: Sequence[QuantizedWeight | None] = [None] * len(stored_weights)
        if experts is not None:
            packed_weights = experts.quantized(expert, 1)[0].linears(gated=bool(config.activation.gated))
        for (name, stored), packed in zip(stored_weights.items(), packed_weights, strict=True):
            _examine(result, name, stored, config.scheme, source.storage)
            if packed is not None:
                _compare(result, name, stored, packed)
        return list(stored_weights.values())

    if experts is None:
        for expert in range(config.local_experts):
            compared(expert)
        result.problems.append(refusal)
        return

    compared_experts: set[int] = set()

    def plain(expert: int, inputs: Tensor) -> Tensor:
        """[rows, H] -> [rows, H] from the values of the file."""
        again = expert in compared_experts
        weights = source.stored_expert(expert).values() if again else compared(expert)
        compared_experts.add(expert)
        *first, down = map(reference.dense, weights)
        gate_up = reference.stacked(*first) if len(first) == 2 else first[0]
        return reference.expert(inputs, gate_up, down, config.activation, held)

    held = held_activations(config.scheme)
    topk = min(config.local_experts, source.layout.per_token)
    count = tokens or max(_FEWEST_TOKENS, 2 + math.ceil(config.local_experts / topk))  # two are special
    x, (ids, weights) = _inputs(count, config.hidden_size), _routing(count, config.local_experts, topk)
    layer = experts
    _run(
        result,
        lambda rows: layer(x[rows], ids[rows], weights[rows]),
        lambda rows: reference.sum_of_experts(x[rows], ids[rows], weights[rows], plain),
        tolerance or EXPERTS_TOLERANCE,
    )
    for expert in set(range(config.local_experts)) - compared_experts:  # with few tokens
        compared(expert)


def _check_linear(result: Result, source: LinearSource, tokens: int | None, tolerance: float | None) -> None:
    stored = source.stored_weight()
    _examine(result, source.name, stored, source.storage.scheme, source.storage)
    try:
        linear = source.load()
    except (ValueError, RuntimeError) as problem:
        result.problems.append(f"{result.name} cannot be loaded: {problem}")
        return
    _compare(result, source.name, stored, unpack_weight(linear.weight_packed, scheme=source.storage.scheme)[0])
    x = _inputs(tokens or _FEWEST_TOKENS, source.columns)
    dense, held = reference.dense(stored), held_activations(source.storage.scheme)
    _run(
        result,
        lambda rows: linear(x[rows]),
        lambda rows: reference.linear(x[rows], dense, held),
        tolerance or LINEAR_TOLERANCE,
    )


# ---- layer by layer --------------------------------------------------------------------------------------------------


Step = tuple[Result, Callable[[Result], None]]


def checks_of(
    checkpoint: Checkpoint,
    describe: Describe,
    scheme: Scheme | None,
    tokens: int | None,
    tolerance: float | None,
    wanted: list[int] | None,
) -> dict[str, list[Step]]:
    """Layer -> what is to be checked in it. All tensors are known to be there when this returns."""
    is_float = checkpoint.quantization is None
    if is_float and scheme is None:
        raise UnsupportedScheme(
            f"{checkpoint.folder} is a float checkpoint; say what its experts would be quantised to: --scheme w4a8-g128"
        )
    if not is_float and scheme is not None:
        raise UnsupportedScheme(f"--scheme {scheme} for a checkpoint that is quantised already; leave it out")
    refuse_stored_input_scales(scheme)
    layout, check = describe(checkpoint), TensorCheck(checkpoint)
    sources, linears = experts_of(checkpoint, layout, scheme).values(), quantized_linears(checkpoint, layout)
    check_model(layout, sources, linears, check)
    check.raise_problems()
    steps: dict[str, Step] = {}
    for source in sources:
        run = partial(_check_experts, source=source, tokens=tokens, tolerance=tolerance)
        name = source.layout.module
        steps[name] = (Result(name, "experts", str(source.config.scheme)), run)
    for name, linear in linears.items():
        run = partial(_check_linear, source=linear, tokens=tokens, tolerance=tolerance)
        steps[name] = (Result(name, "linear", str(linear.storage.scheme)), run)
    layers: dict[tuple[int, str], list[Step]] = {}
    for name, step in steps.items():
        match = LAYER.match(name)
        layer = (-1, name) if match is None else (int(match[2]), match[0][:-1])
        layers.setdefault(layer, []).append(step)
    numbers = sorted(number for number, _ in layers if number >= 0)
    if wanted is not None and (unknown := [number for number in wanted if number not in numbers]):
        raise ValueError(f"--layers {unknown[0]}: layers with quantised weights are {', '.join(map(str, numbers))}")
    if not layers:
        raise CheckpointError(f"{checkpoint.folder} has no quantised weights that could be checked")
    return {name: layers[n, name] for n, name in sorted(layers) if wanted is None or n in wanted}


def run_checks(layers: dict[str, list[Step]]) -> Iterator[tuple[str, list[Result]]]:
    """Checks layer by layer; the weights of one module are in memory at a time."""
    for layer, steps in layers.items():
        for result, check in steps:
            start = time.perf_counter()
            try:
                check(result)
            except (ValueError, RuntimeError, OSError) as problem:  # a file that ends while it is read, say
                result.problems.append(f"{result.name}: {problem}")
            result.seconds = round(time.perf_counter() - start, 3)
        yield layer, [result for result, _ in steps]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    results = [result for layer in found for result in layer["modules"]]
    failed = [result.name for result in results if result.problems]
    return {
        "layers": [layer | {"modules": [asdict(result) for result in layer["modules"]]} for layer in found],
        "modules": len(results),
        "agrees": not failed,
        "first_difference": failed[0] if failed else None,
        "differing": failed,
        "warnings": sum(len(result.warnings) for result in results),
        "seconds": round(sum(result.seconds for result in results), 3),
    }
