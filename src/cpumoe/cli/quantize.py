"""``cpumoe quantize``: a float checkpoint to a quantised one, disk to disk."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.cli.arguments import (
    add_download,
    add_model,
    check_scheme_fits_model,
    find_models,
    positive,
    refuse_given,
    scheme_name,
    scheme_or_float,
    whole_number,
)
from cpumoe.cli.parser import Commands
from cpumoe.layers.scheme import FLOAT
from cpumoe.option_values import INTEGER_FORMATS, PACK_QUANTIZED

if TYPE_CHECKING:
    from cpumoe.quantization.quantization_plan import QuantizationReport

_MAX_LAYERS = 8  # layers whose uncovered experts are printed
_CALIBRATION_SAMPLES = 128
_CALIBRATION_LENGTH = 512


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "quantize",
        help="quantise a float checkpoint, an expert at a time",
        description="Reads the float checkpoint SRC and writes the quantised one DST in the compressed-tensors format. "
        "Memory stays below two layers of the model, whatever its size. The work is done in DST.partial; a run that "
        "was stopped goes on from there when it is started again with the same arguments.",
    )
    add_model(parser, "src", "SRC", "float model: ")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to make")
    parser.add_argument("--scheme", type=scheme_name, default="w4a8-g128", help="of the experts (w4a8-g128)")
    parser.add_argument(
        "--linears",
        type=scheme_or_float,
        metavar="S",
        help=f"of the other linears: a scheme or {FLOAT} (as the experts)",
    )
    parser.add_argument(
        "--format", choices=INTEGER_FORMATS, default=PACK_QUANTIZED, help=f"of integers on disk ({PACK_QUANTIZED})"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text (.txt) or JSON lines with a text each (.jsonl): use GPTQ for integers, and find the stored scales "
        "of activations for schemes that have them (fp8-tensor, nvfp4, w8a8-static)",
    )
    parser.add_argument(
        "--calibration-samples", type=positive, metavar="N", help=f"sequences at most ({_CALIBRATION_SAMPLES})"
    )
    parser.add_argument(
        "--calibration-length", type=whole_number(2), metavar="N", help=f"tokens of each ({_CALIBRATION_LENGTH})"
    )
    add_download(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.checkpoints.checkpoint import Checkpoint

    if arguments.calibration is None:
        refuse_given(arguments, "without --calibration", "calibration_samples", "calibration_length")
    find_models(arguments, "src")
    with Checkpoint.open(arguments.src) as checkpoint:
        check_scheme_fits_model(arguments.scheme, checkpoint)
    from cpumoe.integrations.transformers.calibration.quantizing import quantize_checkpoint

    start = time.perf_counter()
    report = quantize_checkpoint(
        arguments.src,
        arguments.dst,
        arguments.scheme,
        linears=arguments.linears,
        format=arguments.format,
        calibration=arguments.calibration,
        calibration_samples=arguments.calibration_samples or _CALIBRATION_SAMPLES,
        calibration_length=arguments.calibration_length or _CALIBRATION_LENGTH,
    )
    seconds = time.perf_counter() - start
    if arguments.json:
        print(json.dumps(report.to_json() | {"seconds": round(seconds, 1)}, indent=1))
        return 0
    before, after = _bytes(arguments.src), _bytes(arguments.dst)
    print(
        f"{arguments.dst}: {report.matrices} matrices in {seconds:.0f} s, {before * 1e-6:.1f} MB of weights became "
        f"{after * 1e-6:.1f} MB"
    )
    if arguments.calibration is not None:
        _print_coverage(report)
    return 0


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _print_coverage(report: QuantizationReport) -> None:
    print(f"{report.calibrated} of {report.matrices} matrices calibrated with {report.tokens} tokens")
    uncovered = report.uncovered
    if not uncovered:
        print("every expert saw enough tokens")
        return
    print("experts that saw too few tokens and were rounded to nearest:", file=sys.stderr)
    for layer, numbers in list(uncovered.items())[:_MAX_LAYERS]:
        print(f"  {layer}: {', '.join(map(str, numbers))}", file=sys.stderr)
    if len(uncovered) > _MAX_LAYERS:
        print(f"  and in {len(uncovered) - _MAX_LAYERS} more layers; see quantization_report.json", file=sys.stderr)
