"""Float weights to integers with error compensation (GPTQ, Frantar et al. 2022), from statistics of the inputs.

The error of a linear with weight W and quantised weight Q over inputs x is the sum over outputs of d H d^T, with
d = W - Q and H the mean of x^T x. Inputs are quantised one after another, and the error of each is taken up by the
weights of the inputs still to come: with U upper triangular and U^T U the inverse of H, quantising input i with error
d_i leaves the least error if the weight of every later input j is reduced by d_i U_ij / U_ii.

This differs from the paper in three points. The figures are relative errors of the outputs for inputs that were not
used to quantise (w4a8-g128, 256 x 1024 Gaussian weights, 8192 tokens unless another number is given; rounding to
nearest gives 0.11, and 0.10 with a clip search).

- Scales come from a clip search weighted by the diagonal of H. With 8 inputs 50 times as large as the others: 0.022,
  against 0.051 if every input has the same weight.
- Correlations are shrunk by the part that may be chance (``_shrinkage``), since few tokens reach an expert. Independent
  inputs, 512 tokens: 0.101, against 0.177 without shrinking. Products as in SwiGLU, 512 tokens: 0.097 against 0.153.
- Inputs are quantised in the order of falling diagonal of H, so that the costly ones come while most others can still
  make up for them. The scales of all groups are therefore set first. Compared with the order of storage, where the
  scale of a group is set when the group is reached: spectrum 1/i 0.057 instead of 0.062, spectrum 1/i^2 0.0087 instead
  of 0.0116, SwiGLU and large inputs the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import grouped_weight, quantize_weight, search_scales
from cpumoe.layers.scheme import INTEGERS, Scheme

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")

_log = logging.getLogger("cpumoe")

#: The number of tokens from which statistics are worth using. The number of inputs matters little, since correlations
#: are shrunk to what the tokens support; it is the diagonal that needs tokens. Output error divided by that of the clip
#: search alone, for 512 and 2048 inputs and w4a8, w4a8-g32 and w8a8:
#: - correlated inputs (spectrum 1/i, SwiGLU, squared ReLU): 0.84 to 1.07 at 16 tokens, 0.75 to 1.00 at 64, 0.68 to
#:   0.97 at 256;
#: - independent inputs, which have nothing to gain (Gaussian, Student's t with 3 degrees of freedom, Gaussian in 5 % of
#:   the tokens): up to 1.09 at 16 and at 64 tokens, 1.02 at 256, 1.01 at 512.
MIN_TOKENS = 256


_LEAST_ROWS = 64  # a thread with fewer spends its time on calls
_SMALL_HESSIAN = 1024  # up to so many inputs one thread factors it in 50 ms


class InputStatistics:
    """Second moments of the inputs of one linear: in_features^2 * 4 bytes, however many tokens are added."""

    def __init__(self, in_features: int) -> None:
        if in_features < 1:
            raise ValueError(f"in_features={in_features}; a positive number is accepted")
        self.in_features = in_features
        self.tokens = 0
        #: Mean of x^T x over the tokens, neither doubled nor centred: fp32 [in, in], zero before the first token.
        self.hessian = torch.zeros(in_features, in_features)
        #: Largest magnitude that was seen, fp32.
        self.largest = torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Adds tokens x [tokens, in] of any float dtype."""
        if not x.is_floating_point():
            raise ValueError(f"x is {x.dtype}; a floating point dtype is accepted")
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}; [tokens, {self.in_features}] is accepted")
        if x.shape[0] == 0:
            return
        x = x.detach().to(torch.float32)
        low, high = x.aminmax()  # one pass; NaN if there is one
        largest = torch.maximum(high, -low)
        if not bool(torch.isfinite(largest)):
            first = int((~torch.isfinite(x)).any(-1).nonzero()[0])
            raise ValueError(f"x holds NaN or infinity (first in row {first}); finite fp32 numbers are accepted")
        self.largest = torch.maximum(self.largest, largest)
        total = self.tokens + x.shape[0]
        # A running mean: its size does not grow with the tokens, so late tokens count as much as early ones.
        self.hessian.addmm_(x.T, x, beta=self.tokens / total, alpha=1 / total)
        self.tokens = total

    @property
    def sufficient(self) -> bool:
        """Whether there are enough tokens to quantise better with them than without."""
        return self.tokens >= MIN_TOKENS


def takes_statistics(scheme: Scheme) -> bool:
    """Whether weights of a scheme can be quantised with statistics of their inputs."""
    return scheme.weights.symmetric and scheme.weights.element in INTEGERS


def quantize_with_statistics(
    weight: Tensor,
    statistics: InputStatistics,
    scheme: Scheme,
    name: str = "weight",
    *,
    damping: float = 0.01,
    block: int = 128,
) -> QuantizedWeight:
    """Quantises float weights [out, in] so that the outputs change little for inputs like those in the statistics.

    If that is impossible (no inputs can have such statistics, or a number overflows), weights are rounded to nearest
    with ``clip_search`` and a warning is logged. Symmetric integers only.

    Args:
        damping: added to the diagonal of the Hessian, as a share of its mean.
        block: the weights of all later inputs are updated after every so many inputs. This changes the time that it
            takes, and the result no more than by rounding.

    Returns:
        What ``quantize_weight`` would give, with other values and scales.
    """
    if not takes_statistics(scheme):
        raise UnsupportedScheme(f"{name}: {scheme} cannot be calibrated; symmetric integers can")
    if weight.ndim != 2:
        raise ValueError(f"{name} is {list(weight.shape)}; [out, in] is accepted")
    if weight.shape[1] != statistics.in_features:
        raise ValueError(
            f"{name} is {list(weight.shape)}, statistics are of in_features={statistics.in_features}; "
            "the same number of inputs is accepted"
        )
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping={damping}; zero or a positive finite number is accepted")
    if block < 1:
        raise ValueError(f"block={block}; a positive number is accepted")
    grouped, scale_dtype = grouped_weight(weight.detach(), scheme, name)
    largest = scheme.weights.largest
    if statistics.in_features <= _SMALL_HESSIAN:
        ((diagonal, order, factor),) = _on_threads_of_one(partial(_ordered_factor, damping=damping), [statistics])
    else:
        diagonal, order, factor = _ordered_factor(statistics, damping)
    if factor is None:
        _log.warning("%s: the Hessian of its inputs cannot be factored; rounded to nearest", name)
        return quantize_weight(weight, scheme, name, clip_search=True)
    importance = (diagonal + damping).view(grouped.shape[1:])

    def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        scales = search_scales(rows, largest, scale_dtype, importance)
        return scales, _compensated_values(rows.flatten(1), scales, factor, order, largest, block)

    # Rows do not depend on each other.
    count = max(1, min(torch.get_num_threads(), len(grouped) // _LEAST_ROWS))
    parts = _on_threads_of_one(quantize_rows, grouped.tensor_split(count))
    found = [values for _, values in parts if values is not None]
    if len(found) < len(parts):
        _log.warning("%s: error compensation overflows; rounded to nearest", name)
        return quantize_weight(weight, scheme, name, clip_search=True)
    return QuantizedWeight(scheme.weights.element, torch.cat(found), torch.cat([scales for scales, _ in parts]))


def _on_threads_of_one(function: Callable[[_Given], _Found], parts: Sequence[_Given]) -> list[_Found]:
    """Return the results for all parts, each computed by a thread that PyTorch does not divide further.

    GPTQ is thousands of small operations in sequence. PyTorch would spread each of them over its threads and wait for
    all, which takes longer than the operation; while another program uses one of the cores, a hundred times as long.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, parts))
    finally:
        torch.set_num_threads(threads)  # threads that start later have as many as was said last


def _ordered_factor(statistics: InputStatistics, damping: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the diagonal of the estimated Hessian, the order of inputs, and ``_inverse_factor`` in that order."""
    hessian = _estimated_hessian(statistics)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    return hessian.diagonal().clone(), order, _inverse_factor(hessian[order][:, order], damping)


def _estimated_hessian(statistics: InputStatistics) -> Tensor:
    """The Hessian [in, in] to expect for further tokens, scaled to a mean diagonal of 1 over the inputs that were seen.

    An input that was always zero counts as an average one without correlation to others, so it is rounded to nearest.
    """
    diagonal = statistics.hessian.diagonal()
    seen = diagonal > 0
    mean = diagonal[seen].mean() if bool(seen.any()) else torch.tensor(1.0)
    hessian = statistics.hessian / mean
    hessian *= 1 - _shrinkage(hessian, statistics.tokens)
    hessian.diagonal().copy_(torch.where(seen, diagonal / mean, 1.0))
    return hessian


def _shrinkage(hessian: Tensor, tokens: int) -> float:
    """Share (0 to 1) of the correlations between inputs to take away, because few tokens show some by chance.

    The correlation of two independent inputs over N tokens has a variance of 1/N. The ratio of the sum of those
    variances to the sum of the squared correlations seen is the factor with the least squared error of the correlations
    (Schäfer and Strimmer 2005).
    """
    norm = hessian.diagonal().clamp(min=0).rsqrt()
    norm = torch.where(torch.isfinite(norm), norm, 0.0)
    inputs = int((norm > 0).sum())
    correlation = (hessian * norm).mul_(norm.unsqueeze(-1)).clamp_(-1, 1)
    squares = float(correlation.square_().sum(dtype=torch.float64)) - inputs
    by_chance = inputs * (inputs - 1) / max(1, tokens)
    if squares <= by_chance:
        return 1.0
    # The inverse is what is used, and noise weighs more in it. So the ratio of noise to signal counts three times.
    # Output error against counting it once, with 1536 inputs and 1024 tokens: spectrum 1/i 7 % less, products as in
    # SwiGLU 5 % less, squared ReLU 9 % less, 96 directions in noise 9 % more. Counting it six times instead of three:
    # 3, 1 and 6 % less, and 13 % more.
    return 3 * by_chance / (squares + 2 * by_chance)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """[in, in] -> U [in, in], upper triangular with U^T U the inverse of the damped Hessian; None if there is none."""
    if not bool(torch.isfinite(hessian).all()):
        return None
    # With rows and columns reversed, the lower factor of the Hessian becomes the upper factor that the inverse needs.
    # This takes one factorisation and one triangular inverse, and the inverse of the Hessian is never formed.
    reverse = hessian.flip(0, 1)
    diagonal = reverse.diagonal().clone()
    for attempt in range(5):
        added = damping if attempt == 0 else max(damping, 1e-3) * 10**attempt
        reverse.diagonal().copy_(diagonal + added)
        lower, info = torch.linalg.cholesky_ex(reverse)
        if int(info) == 0:
            inverse: Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower)), upper=False)
            return inverse.flip(0, 1)
    return None


def _compensated_values(
    weight: Tensor, scales: Tensor, factor: Tensor, order: Tensor, largest: int, block: int
) -> Tensor | None:
    """fp32 weights [out, in] and scales [out, groups] -> int8 [out, in]; None if a number overflows.

    ``order`` [in] lists the inputs in the order in which they are quantised, and ``factor`` has the same order.
    """
    outputs, inputs = weight.shape
    group = inputs // scales.shape[1]
    rest = weight.T[order].contiguous()  # [in, out]: one input is one contiguous row
    steps = scales.to(torch.float32).T.contiguous()  # [groups, out]
    step_of = (order // group).tolist()
    pivots = factor.diagonal().tolist()
    values = torch.empty(inputs, outputs, dtype=torch.int8)
    errors = torch.empty(min(block, inputs), outputs)
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        for i in range(start, end):
            step = steps[step_of[i]]
            value = (rest[i] / step).round_().clamp_(-largest - 1, largest)
            values[i] = value
            error = errors[i - start]
            torch.sub(rest[i], value.mul_(step), out=error).div_(pivots[i])
            rest[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
        done = errors[: end - start]
        if not bool(torch.isfinite(done).all()):
            return None
        rest[end:].addmm_(factor[start:end, end:].T, done, alpha=-1)
    in_place = torch.empty_like(values)
    in_place[order] = values
    return in_place.T.contiguous()
