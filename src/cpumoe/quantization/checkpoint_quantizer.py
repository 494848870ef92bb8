"""Quantising a checkpoint on disk, one expert at a time: from a float folder to one in the compressed-tensors format.

The work is done in ``DST.partial``, which gets one file per decoder layer. A file appears only when it is complete, so
a run that was killed goes on after the last complete file. ``DST`` itself appears at the end, by one rename. Without
calibration no more than one expert (or one linear) is in memory. With calibration the float linears of one layer and
the activations of the calibration text are in memory too. The float model is run by the :class:`Calibration` that the
caller passes in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from tqdm import tqdm

from cpumoe.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from cpumoe.checkpoints.model_layout import Describe
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.checkpoints.tensor_file import TensorFile, TensorFileWriter
from cpumoe.crowding import fewer_threads_when_crowded
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.scheme import FLOAT, WHOLE_FLOATS, Scheme
from cpumoe.option_values import INTEGER_FORMATS
from cpumoe.quantization.gptq import takes_statistics
from cpumoe.quantization.layer_writer import LayerWriter
from cpumoe.quantization.plain_transformers import misreading_of_experts
from cpumoe.quantization.quantization_plan import QuantizationPlan, QuantizationReport
from cpumoe.quantization.source_watch import SourceWatch, open_watched
from cpumoe.quantization.unfinished_work import (
    NOTES,
    clear_notes,
    copy_durably,
    notes_of,
    only_notes_left,
    sync,
    work_folder,
    write_durably,
)

_log = logging.getLogger("cpumoe")

_REPORT_FILE = "quantization_report.json"
_EXISTS = "{} exists already; name a folder that does not"


class Calibration(Protocol):
    """Runs the float model on behalf of the quantiser, which itself works on files only."""

    def ids(self, checkpoint: Checkpoint) -> Tensor:
        """The sequences to calibrate with, [samples, length]; raises for anything that is wrong with their text."""

    def quantize_layers(
        self,
        plan: QuantizationPlan,
        shards: list[Path],
        work: Path,
        report: QuantizationReport,
        ids: Tensor,
        watch: SourceWatch,
    ) -> None:
        """Quantises every layer that has no file yet, using the inputs that the layer gets."""


def quantize_folder(
    src: Path,
    dst: Path,
    scheme: Scheme | str,
    linears: Scheme | str | None,
    format: str,
    calibration: Calibration | None,
    describe: Describe,
) -> QuantizationReport:
    """Does what :func:`cpumoe.quantize_checkpoint` describes; ``calibration`` is ready to run."""
    scheme = Scheme.parse(scheme)
    linear_scheme = None if linears == FLOAT else scheme if linears is None else Scheme.parse(linears)
    schemes = [s for s in (scheme, linear_scheme) if s is not None]
    for one in schemes:
        if one.requested is not None:
            raise UnsupportedScheme(
                f"scheme {one}: a checkpoint holds weights, and int8 activations are asked for when it is loaded; "
                f"leave out +int8 here and load it with activations='int8'"
            )
        if one.weights.element in WHOLE_FLOATS:
            raise UnsupportedScheme(
                f"scheme {one} quantises nothing: a float checkpoint runs as it is; fp8 and w8a8 take half the memory"
            )
        if calibration is None:
            refuse_stored_input_scales(one)
    if calibration is not None and not any(takes_statistics(one) or needs_input_scales(one) for one in schemes):
        names = " and ".join(dict.fromkeys(map(str, schemes)))
        raise UnsupportedScheme(
            f"calibration has no effect on {names}; it is for symmetric integers and for stored scales of activations"
        )
    if format not in INTEGER_FORMATS:
        raise ValueError(f"format={format!r}; {' and '.join(INTEGER_FORMATS)} are accepted")
    stopped_at_the_end = (dst / NOTES).is_dir()
    if dst.exists() and not stopped_at_the_end:
        raise FileExistsError(_EXISTS.format(dst))
    if src.resolve() in dst.resolve().parents:
        raise ValueError(
            f"dst={dst} is inside of src={src}, whose files would be read beside it; name a folder next to it, such as "
            f"{src.resolve().parent / dst.name}"
        )
    if not dst.absolute().parent.is_dir():
        folder = dst.absolute().parent
        raise FileNotFoundError(f"{dst}: there is no folder {folder}; make it: mkdir -p {shlex.quote(str(folder))}")
    work = dst.with_name(dst.name + ".partial")
    with open_watched(src, work) as (checkpoint, watch):
        if checkpoint.quantization_section is not None:
            raise UnsupportedScheme(
                f"{src} is quantised already; a float checkpoint is accepted: "
                f"cpumoe quantize FLOAT_MODEL {dst} --scheme {scheme}"
            )
        layout = describe(checkpoint)
        plan = QuantizationPlan(checkpoint, layout, scheme, linear_scheme, format)
        if any(experts.fused is not None for experts in layout.experts):
            problem: str | None = f"knows experts of {layout.model_type} in one tensor only, and makes up others"
        else:
            problem = misreading_of_experts(scheme, format)
        if problem is not None:
            _log.warning(
                "%s: transformers without cpumoe %s; load it with cpumoe.load_model, or import cpumoe first",
                dst,
                problem,
            )
        # The text is read before anything is written: a bad text must leave no unfinished work behind.
        ids = None if calibration is None else calibration.ids(checkpoint)
        settings = {
            "source": watch.fingerprint,
            "scheme": str(scheme),
            "linears": FLOAT if linear_scheme is None else str(linear_scheme),
            "format": format,
            "calibration": None if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
            "calibration_size": None if ids is None else list(ids.shape),
        }
        if stopped_at_the_end:
            return _finish_clearing(dst, settings)
        with work_folder(work, settings), fewer_threads_when_crowded():
            report = _quantize_layers(plan, work, watch, calibration, ids)
            _finish(plan, work, watch, report)
            work.rename(dst)
            sync(dst.absolute().parent)
            clear_notes(dst)
    return report


def _finish_clearing(dst: Path, settings: dict[str, Any]) -> QuantizationReport:
    """Clears away the notes of a run that had done everything else when it was stopped; returns its report."""
    if not only_notes_left(dst, settings):
        raise FileExistsError(_EXISTS.format(dst))
    clear_notes(dst)
    return QuantizationReport.from_json(json.loads((dst / _REPORT_FILE).read_text()))


def _quantize_layers(
    plan: QuantizationPlan, work: Path, watch: SourceWatch, calibration: Calibration | None, ids: Tensor | None
) -> QuantizationReport:
    report = QuantizationReport()
    shards = [work / plan.shard_name(index) for index in range(len(plan.layers) + 1)]
    if not shards[0].exists():
        with TensorFileWriter(shards[0], plan.stored(plan.outside), {"format": "pt"}) as shard:
            for name in plan.outside:
                shard.copy(name, plan.checkpoint.read_into)
            watch.check()
    for index, layer in enumerate(plan.layers):
        if shards[index + 1].exists():
            layer.add_to(report, json.loads(notes_of(shards[index + 1]).read_text()))
    if calibration is not None and ids is not None:
        calibration.quantize_layers(plan, shards[1:], work, report, ids, watch)
        return report
    pending = [(layer, path) for layer, path in zip(plan.layers, shards[1:], strict=True) if not path.exists()]
    for layer, path in tqdm(pending, desc="Quantising", unit="layer", disable=None):
        with LayerWriter(layer, path, report, watch) as writer:
            for name in layer.linears:
                writer.quantize_linear(name, None)
            for source in layer.experts:
                for expert in range(source.config.local_experts):
                    writer.quantize_expert(source, expert, None)
    return report


def _finish(plan: QuantizationPlan, work: Path, watch: SourceWatch, report: QuantizationReport) -> None:
    """Writes the files that turn the folder into a checkpoint; config.json comes last."""
    weight_map: dict[str, str] = {}
    total = 0
    for index in range(len(plan.layers) + 1):
        shard = plan.shard_name(index)
        with TensorFile(work / shard) as file:
            weight_map |= dict.fromkeys(file.tensors, shard)
            total += sum(info.bytes for info in file.tensors.values())
    for path in watch.copied:
        copy_durably(path, work / path.name)
    watch.check()  # once more, for the copied files and for the layers that an earlier run wrote
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    config = dict(plan.checkpoint.config) | {"quantization_config": plan.quantization_config()}
    for name, content in ((INDEX_FILE, index_json), (_REPORT_FILE, report.to_json()), ("config.json", config)):
        write_durably(work / name, content)
