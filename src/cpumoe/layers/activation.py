"""Activation functions between the two products of an expert."""

from __future__ import annotations

from dataclasses import dataclass

#: Name -> number of the kernel's activation (core/kernels/table.h).
KINDS = {"silu": 0, "swiglu_oai": 1, "swiglu_step": 2, "gelu": 3, "gelu_tanh": 4, "relu2": 5}

_SAME = {"swiglu": "silu"}
_NEEDS_GATE = ("swiglu_oai", "swiglu_step")
_UNGATED_SUFFIX = "_no_mul"


@dataclass(frozen=True)
class Activation:
    """An activation with its parameters.

    Gated: ``f(gate) * up`` with ``gate_up`` of 2I rows. Not gated: ``f(x)`` with I rows; that is what ``relu2`` and
    the names with ``_no_mul`` behind them (``silu_no_mul``, ...) mean unless ``gated`` says otherwise.
    ``alpha`` and ``limit`` belong to ``swiglu_oai`` (gate <= limit, up within +-limit,
    ``gate * sigmoid(alpha * gate) * (up + 1)``); ``limit`` also to ``swiglu_step`` (silu(gate) and up clamped), where
    silu(gate) may have a ``gate_limit`` of its own. ``silu(min(gate, L))`` is ``swiglu_step`` with ``gate_limit``
    silu(L), since silu grows where it is positive.
    """

    name: str = "silu"
    gated: bool | None = None  # None: as the name says
    alpha: float = 1.702
    limit: float = 7.0
    gate_limit: float | None = None  # None: the same as limit

    def __post_init__(self) -> None:
        plain = self.name.removesuffix(_UNGATED_SUFFIX)
        name = _SAME.get(plain, plain)
        if name not in KINDS:
            names = ", ".join([*KINDS, *_SAME, *(k + _UNGATED_SUFFIX for k in KINDS if k not in _NEEDS_GATE)])
            raise ValueError(f"activation {self.name!r} is not known; accepted are {names}")
        if self.gated is None:
            object.__setattr__(self, "gated", plain == self.name and name != "relu2")
        elif self.gated and plain != self.name:
            raise ValueError(f"activation {self.name!r} has no gate; gated=False is accepted")
        object.__setattr__(self, "name", name)
        if not self.gated and self.name in _NEEDS_GATE:
            raise ValueError(f"activation {self.name!r} needs a gate; gated=True is accepted")
        if not self.limit > 0:
            raise ValueError(f"activation limit={self.limit}; a positive number is accepted")
        if self.gate_limit is not None and (self.name != "swiglu_step" or not self.gate_limit > 0):
            raise ValueError(
                f"activation {self.name!r} with gate_limit={self.gate_limit}; swiglu_step takes a positive one"
            )

    @classmethod
    def of(cls, value: str | Activation) -> Activation:
        return value if isinstance(value, Activation) else cls(value)

    @property
    def kind(self) -> int:
        return KINDS[self.name]

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that the kernel takes: alpha, or the limit of silu(gate), and the limit."""
        if self.name == "swiglu_step":
            return (self.limit if self.gate_limit is None else self.gate_limit), self.limit
        return self.alpha, self.limit

    @property
    def arguments(self) -> tuple[int, bool, float, float]:
        """The arguments of operators that compute experts: kind, gated, alpha and limit."""
        return self.kind, bool(self.gated), *self.parameters

    def gate_up_rows(self, intermediate_size: int) -> int:
        """Rows of ``gate_up`` for an intermediate size."""
        return 2 * intermediate_size if self.gated else intermediate_size

    def __str__(self) -> str:
        return self.name if self.gated else f"{self.name} (not gated)"
