"""Quantising a checkpoint, with calibration if a text is given.

transformers is imported for calibration alone: without it, it need not be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.layers.scheme import Scheme
from cpumoe.quantization.checkpoint_quantizer import quantize_folder
from cpumoe.quantization.quantization_plan import QuantizationPlan, Report
from cpumoe.quantization.source_watch import SourceWatch


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
        form: ``"pack-quantized"`` (4 bits on disk, and what transformers reads without cpumoe) or ``"int-quantized"``
            (a byte each).
        calibration: a text file, or JSON lines (``.jsonl``) with a ``text`` or a list of ``messages`` each. With it
            weights are chosen for the inputs they meet (GPTQ); without, rounded to nearest with the best of several
            scales. No more of it is read than :mod:`cpumoe.quantization.calibration_text` says.
        calibration_samples, calibration_length: how many sequences of how many tokens of it are used, at most.

    Raises CheckpointError if the files of ``src`` change meanwhile.
    """
    text = None
    if calibration is not None:
        text = TextCalibration(Path(calibration), calibration_samples, calibration_length)
    return quantize_folder(Path(src), Path(dst), scheme, linears, form, text)


@dataclass(frozen=True)
class TextCalibration:
    """The float model reads a text, one layer at a time: see ``calibration.py``."""

    text: Path
    samples: int
    length: int

    def ids(self, checkpoint: Checkpoint) -> Tensor:
        try:
            from cpumoe.integrations.transformers.calibration import calibration_ids
        except ModuleNotFoundError as problem:
            if problem.name != "transformers":
                raise
            raise RuntimeError("calibration needs transformers: pip install 'cpumoe[transformers]'") from None
        return calibration_ids(checkpoint, self.text, self.samples, self.length)

    def quantize_layers(
        self, plan: QuantizationPlan, shards: list[Path], work: Path, report: Report, ids: Tensor, watch: SourceWatch
    ) -> None:
        from cpumoe.integrations.transformers.calibration import run_calibrated

        run_calibrated(plan, shards, work, report, ids, watch)
