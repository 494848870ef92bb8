"""Gated delta nets and Kimi delta attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cpumoe.integrations.transformers.recognition.mixers.short_conv import is_depthwise
from cpumoe.integrations.transformers.recognition.parts import Parts
from cpumoe.integrations.transformers.recognition.values import Source
from cpumoe.ops import decoder

_GATES = {"silu": False, "swish": False, "sigmoid": True}


@dataclass(frozen=True)
class DeltaForm:
    """A gated delta net (a decay for each head) or Kimi delta attention (one for each channel)."""

    projections: str  # the arrangement of its projections: grouped, joined or apart
    key_heads: int
    heads: int
    key_depth: int
    value_depth: int
    taps: int
    norm: str
    out: str
    sigmoid_gate: bool
    decay_bound: float

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_depth + self.heads * self.value_depth


def delta_form(module: Any) -> DeltaForm | None:
    """Return what a module is, if it looks like a layer with the delta rule."""
    conv: Any = getattr(module, "conv1d", None)
    decay: Any = getattr(module, "forget_gate", module)
    norm = "norm" if hasattr(module, "norm") else "o_norm"
    rates: Any = getattr(decay, "A_log", None)
    bias: Any = getattr(decay, "dt_bias", None)
    weight: Any = getattr(getattr(module, norm, None), "weight", None)
    depth = getattr(module, "head_k_dim", getattr(module, "head_dim", None))
    has_tensors = all(isinstance(tensor, Tensor) for tensor in (rates, bias, weight))
    if not (is_depthwise(conv) and has_tensors and isinstance(depth, int)):
        return None
    gate = _GATES.get(getattr(getattr(module, norm), "activation", ""))
    silu = getattr(module, "activation", None) in ("silu", "swish")
    heads, value_depth = rates.numel(), weight.numel()
    key_heads = (conv.in_channels - heads * value_depth) // (2 * depth)
    projections = next((p for p, found in _found(module).items() if found), None)
    if gate is None or not silu or key_heads < 1 or heads % key_heads or projections is None:
        return None
    form = DeltaForm(
        projections=projections,
        key_heads=key_heads,
        heads=heads,
        key_depth=depth,
        value_depth=value_depth,
        taps=conv.kernel_size[0],
        norm=norm,
        out="out_proj" if hasattr(module, "out_proj") else "o_proj",
        sigmoid_gate=gate,
        decay_bound=_bound(decay),
    )
    per_head = depth if projections == "apart" else 1
    fits = form.channels == conv.in_channels and bias.numel() == heads * per_head and form.decay_bound <= 0
    return form if fits and hasattr(module, form.out) and hasattr(module, "layer_idx") else None


def _found(module: Any) -> dict[str, bool]:
    """The arrangements of projections, and whether a module has all parts of them."""
    names = {
        "grouped": ("in_proj_qkvz", "in_proj_ba"),
        "joined": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "apart": ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate"),
    }
    found = {key: all(hasattr(module, name) for name in parts) for key, parts in names.items()}
    gated = hasattr(module, "g_proj") or (hasattr(module, "g_a_proj") and hasattr(module, "g_b_proj"))
    return {**found, "apart": found["apart"] and gated}


def _bound(decay: Any) -> float:
    """The lower bound of the decay's logarithm, or 0 for none."""
    if getattr(decay, "safe_gate", False):
        return float(decay.lower_bound)
    bound = getattr(decay, "safe_gate_lower_bound", None)
    return 0.0 if bound is None else float(bound)


class _Row:
    """What stands side by side in a row: the results of linears of hidden states, then those of linears of these."""

    def __init__(self, module: Any, parts: Parts) -> None:
        self._module = module
        self._parts = parts
        self._narrow: list[tuple[str, str]] = []  # linears whose results are expanded, and those that do it
        self.projections: list[decoder.Matrix[Source]] = []
        self.expansions: list[decoder.Expansion[Source]] = []
        self._first: dict[str, int] = {}
        self._width = 0

    def add(self, *names: str) -> None:
        """Linears of hidden states, by their names in the module."""
        for name in names:
            linear = self._module.get_submodule(name)
            self.projections.append(self._parts.matrix(linear, name))
            self._place(name, linear)

    def add_one_or_two(self, whole: str, narrow: str, wide: str) -> str:
        """A linear, or two with few features in between. Gives the name of the one that has the result."""
        if hasattr(self._module.get_submodule(whole.rpartition(".")[0]), whole.rpartition(".")[2]):
            self.add(whole)
            return whole
        self.add(narrow)
        self._narrow.append((narrow, wide))
        return wide

    def expand(self) -> None:
        """Places what is expanded, behind all else."""
        for narrow, wide in self._narrow:
            linear = self._module.get_submodule(wide)
            self.expansions.append(decoder.Expansion(self._parts.matrix(linear, wide), self._first[narrow]))
            self._place(wide, linear)

    def columns(
        self, name: str, group_stride: int, offset: int = 0, group: int = 1, head_stride: int = 0
    ) -> decoder.HeadColumns:
        """Where heads stand that begin ``offset`` columns behind the first one of a linear."""
        return decoder.HeadColumns(self._first[name] + offset, group_stride, group, head_stride)

    def _place(self, name: str, linear: Any) -> None:
        self._first[name] = self._width
        self._width += linear.out_features


def recognize_delta_net(module: Any, form: DeltaForm, parts: Parts) -> decoder.DeltaNet[Source]:
    """Return a layer of the given form. Raise UnsupportedDecoder if a linear of it is none."""
    row = _Row(module, parts)
    columns = _COLUMNS[form.projections](form, row)  # before the projections are read off it
    decay: Any = getattr(module, "forget_gate", module)
    norm: Any = getattr(module, form.norm)
    return decoder.DeltaNet[Source](
        projections=tuple(row.projections),
        expansions=tuple(row.expansions),
        **columns,
        key_heads=form.key_heads,
        heads=form.heads,
        key_dim=form.key_depth,
        value_dim=form.value_depth,
        log_rates=parts.tensor(decay, "A_log", flat_from=0),
        decay_bias=parts.tensor(decay, "dt_bias", flat_from=0),
        decay_bound=form.decay_bound,
        conv_weight=parts.tensor(module.conv1d, "weight", flat_from=1),
        conv_bias=parts.optional(module.conv1d, "bias"),
        norm_weight=parts.tensor(norm, "weight"),
        norm_epsilon=float(norm.variance_epsilon),
        sigmoid_gate=form.sigmoid_gate,
        out=parts.matrix(getattr(module, form.out), form.out),
    )


def _columns(
    queries: decoder.HeadColumns,
    keys: decoder.HeadColumns,
    values: decoder.HeadColumns,
    gates: decoder.HeadColumns,
    betas: decoder.HeadColumns,
    decays: decoder.HeadColumns,
) -> dict[str, decoder.HeadColumns]:
    return {"queries": queries, "keys": keys, "values": values, "gates": gates, "betas": betas, "decays": decays}


def _grouped(form: DeltaForm, row: _Row) -> dict[str, decoder.HeadColumns]:
    row.add("in_proj_qkvz", "in_proj_ba")
    group, dk, dv = form.heads // form.key_heads, form.key_depth, form.value_depth
    stride = 2 * dk + 2 * group * dv
    return _columns(
        row.columns("in_proj_qkvz", stride),
        row.columns("in_proj_qkvz", stride, dk),
        row.columns("in_proj_qkvz", stride, 2 * dk, group, dv),
        row.columns("in_proj_qkvz", stride, 2 * dk + group * dv, group, dv),
        row.columns("in_proj_ba", 2 * group, 0, group, 1),
        row.columns("in_proj_ba", 2 * group, group, group, 1),
    )


def _joined(form: DeltaForm, row: _Row) -> dict[str, decoder.HeadColumns]:
    row.add("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    keys, dk, dv = form.key_heads * form.key_depth, form.key_depth, form.value_depth
    return _columns(
        row.columns("in_proj_qkv", dk),
        row.columns("in_proj_qkv", dk, keys),
        row.columns("in_proj_qkv", dv, 2 * keys),
        row.columns("in_proj_z", dv),
        row.columns("in_proj_b", 1),
        row.columns("in_proj_a", 1),
    )


def _apart(form: DeltaForm, row: _Row) -> dict[str, decoder.HeadColumns]:
    row.add("q_proj", "k_proj", "v_proj", "b_proj")
    gates = row.add_one_or_two("g_proj", "g_a_proj", "g_b_proj")
    decays = row.add_one_or_two("forget_gate.f_proj", "forget_gate.f_a_proj", "forget_gate.f_b_proj")
    row.expand()
    return _columns(
        row.columns("q_proj", form.key_depth),
        row.columns("k_proj", form.key_depth),
        row.columns("v_proj", form.value_depth),
        row.columns(gates, form.value_depth),
        row.columns("b_proj", 1),
        row.columns(decays, form.key_depth),
    )


#: Queries, keys, values, gates, betas and decays in each arrangement of projections.
_COLUMNS = {"grouped": _grouped, "joined": _joined, "apart": _apart}
