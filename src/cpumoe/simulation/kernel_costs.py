"""What a rank's kernels cost: measured points and what lies between them. ``bench/rank_costs.py`` measures them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VERSION = 1

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Seconds by an amount: straight lines between measured points, and the last one goes on.

    Below the first point the cost is that of the first point: what is fixed does not get less.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if not amounts or any(low >= high for low, high in pairwise(amounts)):
            raise ValueError(f"points at {amounts}; one or more in ascending order are accepted")
        if not all(math.isfinite(amount) and math.isfinite(cost) and cost >= 0 for amount, cost in self.points):
            raise ValueError("a point of a curve is not a finite number, or its cost is below 0")

    def at(self, amounts: Floats | float) -> Floats:
        """The cost of each amount."""
        x, y = (np.array(column, dtype=np.float64) for column in zip(*self.points, strict=True))
        wanted = np.asarray(amounts, dtype=np.float64)
        # Noise must not make more rows cheaper.
        slope = 0.0 if len(x) == 1 else max(0.0, float((y[-1] - y[-2]) / (x[-1] - x[-2])))
        return np.asarray(np.interp(wanted, x, y) + np.maximum(0.0, wanted - x[-1]) * slope)

    def faster(self, factor: float) -> Curve:
        """The same at so many times the speed."""
        return Curve(tuple((amount, cost / factor) for amount, cost in self.points))

    @classmethod
    def between(cls, low: Curve, high: Curve, share: float) -> Curve:
        """A curve at ``share`` of the way from one to the other, 0 to 1."""
        amounts = sorted({amount for curve in (low, high) for amount, _ in curve.points})
        return cls(tuple((at, float((1 - share) * low.at(at) + share * high.at(at))) for at in amounts))


@dataclass(frozen=True)
class KernelCosts:
    """Seconds that a rank computes, and that it takes to exchange with ranks on the same machine.

    Attributes:
        hidden, intermediate, scheme: of the layer that was measured.
        threads: of a rank.
        together: ranks that computed at the same time while it was measured, since they share memory.
        expert_bytes: of one packed expert.
        call_seconds: one call of a layer, with one token that has no expert here.
        token_seconds: a token more, which need not have an expert here.
        experts: by the intermediate size of a slice, or of a whole expert: one expert by its rows.
        linear: one weight of the linears beside experts, by rows.
        exchange: by its name (see ``exchange_costs.py``): one of two ranks through shared memory, by the bytes that it
            handles.
        message_seconds: of a rank's time for one message of ``torch.distributed``, however short.
    """

    hidden: int
    intermediate: int
    scheme: str
    threads: int
    together: int
    expert_bytes: float
    call_seconds: float
    token_seconds: float
    experts: Mapping[int, Curve]
    linear: Curve
    exchange: Mapping[str, Curve]
    message_seconds: float

    def layer_seconds(self, tokens: int, rows: Floats, inner: int | None = None) -> float:
        """One call of a rank's experts.

        Args:
            tokens: that it is called with.
            rows: [experts here]: how many of them each expert gets.
            inner: intermediate size of what is here of each expert; None for whole ones.
        """
        return self.call_seconds + tokens * self.token_seconds + float(self.expert_seconds(rows, inner).sum())

    def expert_seconds(self, rows: Floats, inner: int | None = None) -> Floats:
        """Of each expert; one without rows costs nothing: its weights are not read."""
        curve = self.expert_curve(self.intermediate if inner is None else inner)
        return np.where(rows > 0, curve.at(rows), 0.0)

    def expert_curve(self, inner: int) -> Curve:
        """One expert, or a slice of that intermediate size, by rows."""
        if inner in self.experts:
            return self.experts[inner]
        below, above = ([n for n in self.experts if (n < inner) == less] for less in (True, False))
        if not below or not above:
            known = ", ".join(map(str, sorted(self.experts)))
            raise ValueError(f"experts with an intermediate size of {inner} were not measured; {known} were")
        low, high = max(below), min(above)
        return Curve.between(self.experts[low], self.experts[high], (inner - low) / (high - low))

    def linears_seconds(self, weights: float, tokens: int) -> float:
        """Linears with so many weights in all."""
        return weights * float(self.linear.at(tokens)) if tokens else 0.0

    def faster(self, factor: float) -> KernelCosts:
        """A rank that does everything so many times as fast."""
        if not 0 < factor < math.inf:
            raise ValueError(f"a rank {factor} times as fast; a number above 0 is accepted")
        return replace(
            self,
            call_seconds=self.call_seconds / factor,
            token_seconds=self.token_seconds / factor,
            experts={inner: curve.faster(factor) for inner, curve in self.experts.items()},
            linear=self.linear.faster(factor),
            exchange={name: curve.faster(factor) for name, curve in self.exchange.items()},
        )

    def with_message_seconds(self, seconds: float) -> KernelCosts:
        """With another carrier of messages than gloo's sockets."""
        return replace(self, message_seconds=seconds)

    # ---- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "experts": {str(inner): list(map(list, curve.points)) for inner, curve in self.experts.items()},
            "linear": list(map(list, self.linear.points)),
            "exchange": {name: list(map(list, curve.points)) for name, curve in self.exchange.items()},
        }

    @classmethod
    def from_json(cls, told: Any) -> KernelCosts:
        """Raises ValueError for what :meth:`to_json` cannot have written."""
        if not isinstance(told, dict) or told.get("version") != _VERSION:
            raise ValueError(f"these are no measured costs of version {_VERSION}")
        try:
            plain = {name: kind(told[name]) for name, kind in _PLAIN.items()}
            experts = {int(inner): _curve(points) for inner, points in told["experts"].items()}
            exchange = {str(name): _curve(points) for name, points in told["exchange"].items()}
            return cls(**plain, experts=experts, linear=_curve(told["linear"]), exchange=exchange)
        except KeyError as missing:
            raise ValueError(f"the measured costs have no {missing}") from None
        except (TypeError, AttributeError) as problem:
            raise ValueError(f"the measured costs cannot be read: {problem}") from None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> KernelCosts:
        """Raises ValueError, with the file's name, if it is not such a file."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except OSError as problem:
            raise ValueError(f"{path}: {problem.strerror or problem}") from None
        except ValueError as problem:  # JSON's own is one too
            raise ValueError(f"{path}: {problem}") from None


_PLAIN: dict[str, Any] = {
    "hidden": int,
    "intermediate": int,
    "scheme": str,
    "threads": int,
    "together": int,
    "expert_bytes": float,
    "call_seconds": float,
    "token_seconds": float,
    "message_seconds": float,
}


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return Curve(tuple((float(amount), float(cost)) for amount, cost in points))
