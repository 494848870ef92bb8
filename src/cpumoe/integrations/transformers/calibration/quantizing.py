"""Quantising a checkpoint, with calibration if a text is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.scheme import Scheme
from cpumoe.quantization.checkpoint_quantizer import quantize_folder
from cpumoe.quantization.quantization_plan import QuantizationPlan, QuantizationReport
from cpumoe.quantization.source_watch import SourceWatch


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str = "w4a8-g128",
    *,
    linears: Scheme | str | None = None,
    format: str = "pack-quantized",
    calibration: str | Path | None = None,
    calibration_samples: int = 128,
    calibration_length: int = 512,
) -> QuantizationReport:
    """Quantises the float checkpoint ``src`` into the new folder ``dst``, which other tools read too.

    Args:
        src: folder of a float checkpoint.
        dst: folder to make. It appears when it is complete. Until then the work is in ``dst.partial``, and a later call
            with the same arguments continues it.
        scheme: the scheme of the experts.
        linears: the scheme of the other linears in the decoder layers, or ``"float"`` to leave them as they are; None
            means the scheme of the experts. Routers, embeddings and the head stay in float.
        format: how integers are stored: ``"pack-quantized"`` (4 bits each; transformers reads it without cpumoe) or
            ``"int-quantized"`` (one byte each).
        calibration: a text file, or JSON lines (``.jsonl``), each with a ``text`` or a list of ``messages``. With it
            weights are chosen for the inputs that they get (GPTQ); without it they are rounded to nearest, with the
            best of several scales. :mod:`cpumoe.quantization.calibration_text` says how much of the file is read.
        calibration_samples, calibration_length: the most sequences to use, and the most tokens of each.

    Raises CheckpointError if the files of ``src`` change while it runs.
    """
    text = None
    if calibration is not None:
        text = TextCalibration(Path(calibration), calibration_samples, calibration_length)
    return quantize_folder(Path(src), Path(dst), scheme, linears, format, text, describe)


@dataclass(frozen=True)
class TextCalibration:
    """Calibration with a text that the float model reads, one layer at a time (``calibration.py``)."""

    text: Path
    samples: int
    length: int

    def ids(self, checkpoint: Checkpoint) -> Tensor:
        from cpumoe.integrations.transformers.calibration.calibration import calibration_ids

        return calibration_ids(checkpoint, self.text, self.samples, self.length)

    def quantize_layers(
        self,
        plan: QuantizationPlan,
        shards: list[Path],
        work: Path,
        report: QuantizationReport,
        ids: Tensor,
        watch: SourceWatch,
    ) -> None:
        from cpumoe.integrations.transformers.calibration.calibration import run_calibrated

        run_calibrated(plan, shards, work, report, ids, watch)
