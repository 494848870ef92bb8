"""Gated delta nets and Kimi delta attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from cpumoe.integrations.transformers.recognition.parts import Parts, describe_matrix, plain
from cpumoe.integrations.transformers.replacements.recurrent import DeltaForm
from cpumoe.ops import decoder


class _Row:
    """What stands side by side in a row: the results of linears of hidden states, then those of linears of these."""

    def __init__(self, module: Any, parts: Parts) -> None:
        self._module = module
        self._parts = parts
        self._narrow: list[tuple[str, str]] = []  # linears whose results are expanded, and those that do it
        self.projections: list[decoder.Matrix] = []
        self.expansions: list[decoder.Expansion] = []
        self._first: dict[str, int] = {}
        self._width = 0

    def add(self, *names: str) -> None:
        """Linears of hidden states, by their names in the module."""
        for name in names:
            linear = self._linear(name)
            self.projections.append(describe_matrix(linear, name))
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
            linear = self._linear(wide)
            self.expansions.append(decoder.Expansion(describe_matrix(linear, wide), self._first[narrow]))
            self._place(wide, linear)

    def columns(
        self, name: str, group_stride: int, offset: int = 0, group: int = 1, head_stride: int = 0
    ) -> decoder.HeadColumns:
        """Where heads stand that begin ``offset`` columns behind the first one of a linear."""
        return decoder.HeadColumns(self._first[name] + offset, group_stride, group, head_stride)

    def _linear(self, name: str) -> Any:
        linear = self._module.get_submodule(name)
        self._parts.take_all_of(linear)
        return linear

    def _place(self, name: str, linear: Any) -> None:
        self._first[name] = self._width
        self._width += linear.out_features


def describe_delta_net(module: Any, form: DeltaForm, parts: Parts) -> decoder.DeltaNet:
    """A layer of the given form. Raises NotDescribed if a linear of it is none."""
    row = _Row(module, parts)
    columns = _COLUMNS[form.projections](form, row)  # before the projections are read off it
    decay: Any = getattr(module, "forget_gate", module)
    norm, out = getattr(module, form.norm), getattr(module, form.out)
    conv: nn.Conv1d = module.conv1d
    parts.take(decay.A_log, decay.dt_bias, norm.weight, conv.weight, conv.bias)
    parts.take_all_of(out)
    return decoder.DeltaNet(
        projections=tuple(row.projections),
        expansions=tuple(row.expansions),
        **columns,
        key_heads=form.key_heads,
        heads=form.heads,
        key_dim=form.key_depth,
        value_dim=form.value_depth,
        log_rates=plain(decay.A_log).flatten(),
        decay_bias=plain(decay.dt_bias).flatten(),
        decay_bound=form.decay_bound,
        conv_weight=plain(conv.weight).flatten(1),
        conv_bias=None if conv.bias is None else plain(conv.bias),
        norm_weight=plain(norm.weight),
        norm_epsilon=float(norm.variance_epsilon),
        sigmoid_gate=form.sigmoid_gate,
        out=describe_matrix(out, form.out),
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
