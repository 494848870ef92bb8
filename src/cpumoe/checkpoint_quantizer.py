"""Quantising a checkpoint on disk: from a float folder to a compressed-tensors one, an expert at a time.

The work is done in ``DST.partial``, one file per decoder layer, each of which appears when it is whole; a run that was
killed goes on after the last whole one. ``DST`` itself appears at the end, by one rename. Without calibration no more
than one expert (or one linear) is in memory; with it, the float linears of one layer and the calibration activations
besides (see :mod:`cpumoe.calibration`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from cpumoe import reference
from cpumoe.checkpoint import INDEX_FILE, Checkpoint
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.expert_sources import FLOAT_DTYPES, Buffers, FloatExpertSource
from cpumoe.formats.compressed_tensors import FORMS, Form, LinearFormat, write_config
from cpumoe.formats.tensor_file import DTYPES, TensorFile, TensorFileWriter
from cpumoe.gptq import InputStatistics, quantize_with_statistics
from cpumoe.loading import experts_of, layers_prefix
from cpumoe.quantize import quantize_weight, scale_dtype_of
from cpumoe.scheme import Scheme
from cpumoe.unfinished_work import NOTES, notes_of, sync, work_folder, write_durably

_log = logging.getLogger("cpumoe")

#: What ``linears`` takes to leave all linears but those of the experts in float.
FLOAT = "float"

_REPORT_FILE = "quantization_report.json"


@dataclass
class Report:
    """What a run did: how many matrices were quantised, and which experts calibration did not reach."""

    matrices: int = 0
    calibrated: int = 0
    tokens: int = 0
    uncovered: dict[str, list[int]] = field(default_factory=dict)  # layer's experts -> numbers of the experts

    def to_json(self) -> dict[str, Any]:
        return {
            "matrices": self.matrices,
            "calibrated_matrices": self.calibrated,
            "calibration_tokens": self.tokens,
            "experts_with_too_few_tokens": self.uncovered,
        }


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str = "w4a8-g128",
    *,
    linears: Scheme | str | None = None,
    form: str = "pack-quantized",
    calibration: str | Path | None = None,
    calibration_samples: int = 128,
    calibration_length: int = 512,
) -> Report:
    """Quantises the float checkpoint ``src`` into the new folder ``dst``, which other tools read too.

    Args:
        src: folder of a float checkpoint.
        dst: folder to be made. It appears when everything is in it; ``dst.partial`` holds the work until then, and a
            later call with the same arguments goes on from there.
        scheme: of the experts.
        linears: of the other linears of the decoder layers: a scheme, ``"float"`` to leave them, None for that of the
            experts. Routers, embeddings and the head stay in float.
        form: ``"pack-quantized"`` (4 bits on disk) or ``"int-quantized"`` (a byte each).
        calibration: a text file (``.txt``), or JSON lines with a ``text`` each (``.jsonl``). With it weights are chosen
            for the inputs they meet (GPTQ); without, rounded to nearest with the best of several scales.
        calibration_samples, calibration_length: how many sequences of how many tokens of it are used, at most.
    """
    src, dst = Path(src), Path(dst)
    scheme = Scheme.parse(scheme)
    linear_scheme = None if linears == FLOAT else scheme if linears is None else Scheme.parse(linears)
    if form not in FORMS:
        raise ValueError(f"form={form!r}; {' and '.join(FORMS)} are accepted")
    if dst.exists():
        raise FileExistsError(f"{dst} exists already; name a folder that does not")
    if not dst.absolute().parent.is_dir():
        raise FileNotFoundError(f"{dst}: there is no folder {dst.absolute().parent}")
    with Checkpoint.open(src) as checkpoint:
        if checkpoint.quantization_section is not None:
            raise UnsupportedScheme(f"{src} is quantised already; a float checkpoint is accepted")
        plan = QuantizationPlan(checkpoint, scheme, linear_scheme, form)
        settings = {
            "source": _fingerprint(checkpoint),
            "scheme": str(scheme),
            "linears": FLOAT if linear_scheme is None else str(linear_scheme),
            "form": form,
            "calibration": None if calibration is None else hashlib.sha256(Path(calibration).read_bytes()).hexdigest(),
            "calibration_size": None if calibration is None else [calibration_samples, calibration_length],
        }
        work = dst.with_name(dst.name + ".partial")
        with work_folder(work, settings):
            texts = None if calibration is None else Path(calibration)
            report = _quantize_layers(plan, work, texts, calibration_samples, calibration_length)
            _finish(plan, work, report)
            work.rename(dst)
            sync(dst.absolute().parent)
            shutil.rmtree(dst / NOTES)
    return report


def _quantize_layers(plan: QuantizationPlan, work: Path, calibration: Path | None, samples: int, length: int) -> Report:
    report = Report()
    shards = [work / plan.shard_name(index) for index in range(len(plan.layers) + 1)]
    if not shards[0].exists():
        with TensorFileWriter(shards[0], plan.stored(plan.outside), {"format": "pt"}) as writer:
            for name in plan.outside:
                writer.write(name, plan.checkpoint.read(name))
    for index, layer in enumerate(plan.layers):
        if shards[index + 1].exists():
            layer.add_to(report, json.loads(notes_of(shards[index + 1]).read_text()))
    if calibration is not None:
        try:
            from cpumoe.calibration import run_calibrated
        except ModuleNotFoundError as problem:
            if problem.name != "transformers":
                raise
            raise RuntimeError("calibration needs transformers: pip install 'cpumoe[transformers]'") from None
        run_calibrated(plan, shards[1:], work, report, calibration, samples, length)
        return report
    pending = [(layer, path) for layer, path in zip(plan.layers, shards[1:], strict=True) if not path.exists()]
    for layer, path in tqdm(pending, desc="Quantising", unit="layer", disable=None):
        with LayerWriter(layer, path, report) as writer:
            for name in layer.linears:
                writer.quantize_linear(name, None)
            for expert in range(layer.experts_count):
                writer.quantize_expert(expert, None)
    return report


# ---- what becomes of which tensor ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer: the linears that are quantised, the experts, and what is copied."""

    checkpoint: Checkpoint
    index: int
    prefix: str  # of its names on disk, such as "model.layers.3."
    linears: dict[str, tuple[int, int]]  # name -> rows and columns
    experts: FloatExpertSource | None
    copied: tuple[str, ...]
    linear_format: LinearFormat | None
    expert_format: LinearFormat

    @property
    def experts_count(self) -> int:
        return 0 if self.experts is None else self.experts.config.experts

    def stored(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every tensor of this layer's file, in the order in which it is written."""
        out: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (rows, columns) in self.linears.items():
            assert self.linear_format is not None  # there are no linears without it
            scale = scale_dtype_of(DTYPES[self.checkpoint.info(f"{name}.weight").dtype])
            out |= _announced(self.linear_format, name, rows, columns, scale)
            if f"{name}.bias" in self.checkpoint:
                out |= _announced_copy(self.checkpoint, f"{name}.bias")
        if self.experts is not None:
            config, bias = self.experts.config, self.experts.config.has_bias
            for expert in range(config.experts):
                gate, up, down = self.experts.linear_names(expert)
                for name, rows, columns in (
                    (gate, config.intermediate_size, config.hidden_size),
                    (up, config.intermediate_size, config.hidden_size),
                    (down, config.hidden_size, config.intermediate_size),
                ):
                    out |= _announced(self.expert_format, name, rows, columns, config.scale_dtype)
                    if bias:
                        out[f"{name}.bias"] = (torch.float32, (rows,))
        for name in self.copied:
            out |= _announced_copy(self.checkpoint, name)
        return out

    def add_to(self, report: Report, told: dict[str, Any]) -> None:
        """Adds what quantising this layer found."""
        report.matrices += told["matrices"]
        report.calibrated += told["calibrated"]
        if told["uncovered"] and self.experts is not None:
            report.uncovered[self.experts.prefix] = told["uncovered"]


class QuantizationPlan:
    """The whole checkpoint, cut into what lies outside the decoder layers and the layers."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, linears: Scheme | None, form: Form) -> None:
        self.checkpoint = checkpoint
        self.expert_format = LinearFormat(scheme, form)
        self.linear_format = None if linears is None else LinearFormat(linears, form)
        architecture = checkpoint.architecture
        prefix = layers_prefix(checkpoint)
        sources = {source.prefix: source for source in experts_of(checkpoint, scheme).values()}
        count = int(checkpoint.text_config["num_hidden_layers"])
        by_layer: dict[int, list[str]] = {index: [] for index in range(count)}
        self.outside: list[str] = []
        for name in sorted(checkpoint.names):
            number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
            # Layers behind the last one (for predicting several tokens) are copied as they are.
            (by_layer[int(number)] if number.isdigit() and int(number) < count else self.outside).append(name)
        self.left_in_float: list[str] = [n.removesuffix(".weight") for n in self.outside if self._is_matrix(n)]
        self.layers: list[LayerPlan] = []
        for index, names in by_layer.items():
            layer_prefix = f"{prefix}{index}."
            if not names:
                raise CheckpointError(f"{checkpoint.folder}: there is no tensor of layer {index} ({layer_prefix}*)")
            source = next((s for p, s in sources.items() if p.startswith(layer_prefix)), None)
            rest = [n for n in names if source is None or not n.startswith(f"{source.prefix}.")]
            matrices = [n.removesuffix(".weight") for n in rest if self._is_matrix(n)]
            chosen: dict[str, tuple[int, int]] = {}
            for name in matrices:
                rows, columns = checkpoint.info(f"{name}.weight").shape
                if linears is None or name.endswith(architecture.routers) or not linears.fits(columns):
                    self.left_in_float.append(name)
                else:
                    chosen[name] = (rows, columns)
            done = {f"{name}.{part}" for name in chosen for part in ("weight", "bias")}
            self.layers.append(
                LayerPlan(
                    checkpoint,
                    index,
                    layer_prefix,
                    chosen,
                    cast("FloatExpertSource | None", source),
                    tuple(n for n in rest if n not in done),
                    self.linear_format,
                    self.expert_format,
                )
            )

    def _is_matrix(self, name: str) -> bool:
        info = self.checkpoint.info(name)
        return name.endswith(".weight") and len(info.shape) == 2 and info.dtype in FLOAT_DTYPES

    def shard_name(self, index: int) -> str:
        return f"model-{index + 1:05}-of-{len(self.layers) + 1:05}.safetensors"

    def stored(self, names: list[str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        out: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name in names:
            out |= _announced_copy(self.checkpoint, name)
        return out

    def quantization_config(self) -> dict[str, Any]:
        if self.linear_format is None or self.linear_format == self.expert_format:
            return write_config({"Linear": self.expert_format}, self.left_in_float)
        formats = {"re:.*[.]experts[.]": self.expert_format, "Linear": self.linear_format}
        return write_config(formats, self.left_in_float)


def _announced(
    form: LinearFormat, name: str, rows: int, columns: int, scale: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    dtypes = {
        "weight": torch.int8,
        "weight_packed": torch.int32,
        "weight_scale": scale,
        "weight_shape": torch.int64,
    }
    return {f"{name}.{key}": (dtypes[key], stored.shape) for key, stored in form.tensors(rows, columns).items()}


def _announced_copy(checkpoint: Checkpoint, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    info = checkpoint.info(name)
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{name} is {info.dtype}; accepted are {', '.join(DTYPES)}")
    return {name: (DTYPES[info.dtype], info.shape)}


# ---- one layer -----------------------------------------------------------------------------------------------------


class LayerWriter:
    """Quantises the linears and experts of one layer, in the order of its plan, into the layer's file."""

    def __init__(self, layer: LayerPlan, path: Path, report: Report) -> None:
        self._layer = layer
        self._report = report
        self._told: dict[str, Any] = {"matrices": 0, "calibrated": 0, "uncovered": []}
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
            return
        with self._writer:
            for name in self._layer.copied:
                self._writer.write(name, self._layer.checkpoint.read(name))
            write_durably(notes_of(self._path), self._told)  # before the file that says the layer is done
        self._layer.add_to(self._report, self._told)

    def quantize_linear(self, name: str, statistics: InputStatistics | None) -> Tensor:
        """Quantises and writes the next linear; returns what it stands for, [rows, columns] fp32."""
        form = self._layer.linear_format
        assert form is not None  # there are no linears without it
        values, scales = self._quantized(
            self._layer.checkpoint.read(f"{name}.weight"), statistics, form.scheme, f"{name}.weight"
        )
        self._write(form, name, values, scales)
        if f"{name}.bias" in self._layer.checkpoint:
            self._writer.write(f"{name}.bias", self._layer.checkpoint.read(f"{name}.bias"))
        return reference.dequantize(values, scales)

    def quantize_expert(self, expert: int, inputs: Tensor | None) -> Tensor | None:
        """Quantises and writes the next expert; with inputs [rows, H], returns its outputs [rows, H] fp32."""
        source, form = self._layer.experts, self._layer.expert_format
        assert source is not None  # the caller has counted them
        config, inner = source.config, source.config.intermediate_size
        gate_up, down, gate_up_bias, down_bias = source.read_float(expert, 1, self._buffers)
        gate_name, up_name, down_name = source.linear_names(expert)
        seen = None if inputs is None else InputStatistics(config.hidden_size)
        if seen is not None and inputs is not None:
            seen.add(inputs)
            if not seen.sufficient:
                self._told["uncovered"].append(expert)
        values, scales = self._quantized(gate_up[0], seen, config.scheme, gate_name)
        biases = None if gate_up_bias is None else gate_up_bias[0].to(torch.float32)
        for name, rows in ((gate_name, slice(0, inner)), (up_name, slice(inner, None))):
            self._write(form, name, values[rows], scales[rows])
            if biases is not None:
                self._writer.write(f"{name}.bias", biases[rows])
        second_bias = None if down_bias is None else down_bias[0].to(torch.float32)
        hidden: Tensor | None = None
        if inputs is not None and seen is not None:
            hidden = torch.nn.functional.linear(inputs, reference.dequantize(values, scales), biases)
            hidden = reference.apply_activation(hidden, config.activation)  # [rows, I]
            sufficient = seen.sufficient
            seen = InputStatistics(inner) if sufficient else None
            if seen is not None:
                seen.add(hidden)
        values, scales = self._quantized(down[0], seen, config.scheme, down_name)
        self._write(form, down_name, values, scales)
        if second_bias is not None:
            self._writer.write(f"{down_name}.bias", second_bias)
        if hidden is None:
            return None
        return torch.nn.functional.linear(hidden, reference.dequantize(values, scales), second_bias)

    def _quantized(
        self, weight: Tensor, statistics: InputStatistics | None, scheme: Scheme, name: str
    ) -> tuple[Tensor, Tensor]:
        self._told["matrices"] += 1
        if statistics is None or not statistics.sufficient:
            return quantize_weight(weight, scheme, name, clip_search=True)
        self._told["calibrated"] += 1
        return quantize_with_statistics(weight, statistics, scheme, name)

    def _write(self, form: LinearFormat, name: str, values: Tensor, scales: Tensor) -> None:
        for key, tensor in form.encode(values, scales).items():
            self._writer.write(f"{name}.{key}", tensor)


# ---- the folder ---------------------------------------------------------------------------------------------------


def _fingerprint(checkpoint: Checkpoint) -> list[list[Any]]:
    return [[f.path.name, (stat := f.path.stat()).st_size, stat.st_mtime_ns] for f in checkpoint.files]


def _finish(plan: QuantizationPlan, work: Path, report: Report) -> None:
    """Writes what makes a folder a checkpoint, config.json last."""
    source = plan.checkpoint.folder
    weight_map: dict[str, str] = {}
    total = 0
    for index in range(len(plan.layers) + 1):
        shard = plan.shard_name(index)
        with TensorFile(work / shard) as file:
            weight_map |= dict.fromkeys(file.tensors, shard)
            total += sum(info.bytes for info in file.tensors.values())
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name == INDEX_FILE
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, work / path.name)
            sync(work / path.name)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    config = dict(plan.checkpoint.config) | {"quantization_config": plan.quantization_config()}
    for name, content in ((INDEX_FILE, index_json), (_REPORT_FILE, report.to_json()), ("config.json", config)):
        write_durably(work / name, content)
