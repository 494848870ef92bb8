"""Writes the file of one quantised layer: its linears and experts, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cpumoe.checkpoints.expert_sources import Buffers, FloatExpertSource
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import TensorFileWriter
from cpumoe.crowding import make_room
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import input_scale_for, needs_input_scales
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme
from cpumoe.quantization.gptq import MIN_TOKENS, InputStatistics, quantize_with_statistics, takes_statistics
from cpumoe.quantization.quantization_plan import PlannedLayer, QuantizationReport
from cpumoe.quantization.source_watch import SourceWatch
from cpumoe.quantization.unfinished_work import notes_of, write_durably


class LayerWriter:
    """Quantises the linears and experts of one layer, in the order of the plan, and writes them to the layer's file."""

    def __init__(self, layer: PlannedLayer, path: Path, report: QuantizationReport, watch: SourceWatch) -> None:
        self._layer = layer
        self._watch = watch
        self._report = report
        self._counts: dict[str, Any] = {"matrices": 0, "calibrated": 0, "uncovered": {}}
        self._buffers = Buffers()
        self._path = path
        self._writer = TensorFileWriter(path, layer.stored(), {"format": "pt"})

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._writer.__exit__(kind, error, trace)
            if isinstance(error, Exception):
                self._watch.check()  # if a source file was changed meanwhile, that is the error to report
            return
        with self._writer:
            for name in self._layer.copied:
                self._writer.copy(name, self._layer.checkpoint.read_into)
            self._watch.check()  # everything that goes into this file has been read by now
            write_durably(notes_of(self._path), self._counts)  # before the layer's file, which marks it as done
        self._layer.add_to(self._report, self._counts)

    def quantize_linear(self, name: str, statistics: InputStatistics | None) -> Tensor:
        """Quantises and writes the next linear; returns the weight that it represents, [rows, columns] fp32."""
        make_room()
        storage = self._layer.linear_storage
        assert storage is not None  # there are no linears without it
        weight = self._layer.checkpoint.read(f"{name}.weight")
        quantized = self._quantized(weight, statistics, storage.scheme, f"{name}.weight")
        if statistics is not None:
            quantized = self._with_input_scale(quantized, statistics.largest, storage.scheme)
        if f"{name}.bias" in self._layer.checkpoint:
            quantized = replace(quantized, bias=self._layer.checkpoint.read(f"{name}.bias"))
        self._write(storage, name, quantized)
        return reference.dequantize(quantized)

    def quantize_expert(
        self, source: FloatExpertSource, expert: int, inputs: Tensor | None, others: Tensor | None = None
    ) -> Tensor | None:
        """Quantises and writes the next expert; with inputs [rows, H], returns its outputs [rows, H] fp32.

        ``others`` [tokens, H] are all inputs of the layer's experts: they tell what an expert with few tokens may get.
        """
        make_room()
        storage, config, inner = self._layer.expert_storage, source.config, source.config.intermediate_size
        gate_up, down, gate_up_bias, down_bias = source.read_float(expert, 1, self._buffers)
        *first_names, down_name = source.linear_names(expert)
        seen = None if inputs is None else InputStatistics(config.hidden_size)
        if seen is not None and inputs is not None:
            seen.add(inputs)
            if not seen.sufficient and takes_statistics(config.scheme):
                self._counts["uncovered"].setdefault(source.prefix, []).append(expert)
        first = self._quantized(gate_up[0], seen, config.scheme, first_names[0])
        if others is not None:
            first = self._with_input_scale(first, others.abs().amax(), config.scheme)
        if gate_up_bias is not None:
            first = replace(first, bias=gate_up_bias[0].to(torch.float32))
        for name, weight in zip(first_names, first.halves() if config.activation.gated else (first,), strict=True):
            self._write(storage, name, weight)
        hidden: Tensor | None = None
        if inputs is not None and seen is not None:
            dense = reference.dequantize(first)

            def intermediate(tokens: Tensor) -> Tensor:  # [tokens, H] -> [tokens, I]
                gate_and_up = torch.nn.functional.linear(tokens, dense, first.bias)
                return reference.apply_activation(gate_and_up, config.activation)

            hidden = intermediate(inputs)
            sufficient = seen.sufficient
            seen = InputStatistics(inner) if sufficient else None
            if seen is not None:
                seen.add(hidden)
        second = self._quantized(down[0], seen, config.scheme, down_name)
        if hidden is not None and others is not None and needs_input_scales(config.scheme):
            seen_by_down = hidden if seen is not None else torch.cat((hidden, intermediate(others[:MIN_TOKENS])))
            second = self._with_input_scale(second, seen_by_down.abs().amax(), config.scheme)
        if down_bias is not None:
            second = replace(second, bias=down_bias[0].to(torch.float32))
        self._write(storage, down_name, second)
        if hidden is None:
            return None
        return torch.nn.functional.linear(hidden, reference.dequantize(second), second.bias)

    def _quantized(
        self, weight: Tensor, statistics: InputStatistics | None, scheme: Scheme, name: str
    ) -> QuantizedWeight:
        self._counts["matrices"] += 1
        if statistics is None or not statistics.sufficient or not takes_statistics(scheme):
            return quantize_weight(weight, scheme, name, clip_search=True)
        self._counts["calibrated"] += 1
        return quantize_with_statistics(weight, statistics, scheme, name)

    def _with_input_scale(self, weight: QuantizedWeight, largest: Tensor, scheme: Scheme) -> QuantizedWeight:
        """The weight of a linear with the stored scale for inputs of this largest magnitude, if its scheme has one."""
        if not needs_input_scales(scheme):
            return weight
        self._counts["calibrated"] += not takes_statistics(scheme)  # others were counted when they were quantised
        return replace(weight, input_scales=input_scale_for(largest, scheme).view(1))

    def _write(self, storage: LinearStorage, name: str, weight: QuantizedWeight) -> None:
        for suffix, tensor in storage.encode(weight).items():
            self._writer.write(f"{name}.{suffix}", tensor)
        if weight.bias is not None:
            self._writer.write(f"{name}.bias", weight.bias)
