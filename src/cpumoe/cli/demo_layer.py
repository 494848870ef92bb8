"""``cpumoe demo --layer``: quantises one layer of a known model, runs it and compares it with the float layer."""

from __future__ import annotations

import argparse

from cpumoe import cpu
from cpumoe.bench.shapes import SHAPES, Shape
from cpumoe.cli.arguments import check_scheme_fits, positive, scheme_name
from cpumoe.layers.scheme import Scheme
from cpumoe.tables import aligned

#: Options that have no meaning without ``--layer``.
OPTIONS = ("scheme", "experts")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --layer")
    group.add_argument("--scheme", type=scheme_name, help="of the layer (w4a8-g128)")
    group.add_argument("--experts", type=positive, metavar="N", help="of the layer (64; Qwen3-30B-A3B has 128)")


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.demo.layer import DemoLayer

    model = SHAPES["qwen3-30b-a3b"]
    scheme = Scheme.parse(arguments.scheme or "w4a8-g128")
    check_scheme_fits(f"--scheme {scheme}", scheme, model.hidden, model.intermediate)
    shape = Shape(model.name, model.hidden, model.intermediate, arguments.experts or 64, model.topk)
    if shape.num_experts < shape.topk:
        raise ValueError(f"--experts {shape.num_experts}; {shape.topk} or more are accepted")
    print(
        f"One layer of {model.name}: hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.num_experts} "
        f"experts, {shape.topk} per token; {cpu.isa()} kernels, {cpu.get_num_threads()} threads.\n"
    )
    layer = DemoLayer(shape, scheme)
    packed_bytes, scheme = layer.experts.packed_bytes, layer.experts.config.scheme
    print(
        f"Quantised to {scheme} in {layer.seconds:.1f} s: {2 * layer.weights * 1e-6:.0f} MB in bf16 -> "
        f"{packed_bytes * 1e-6:.0f} MB packed ({8 * packed_bytes / layer.weights:.2f} bits per weight).\n"
    )
    all_times = {tokens: layer.times(tokens) for tokens in (1, 16, 256)}
    rows = [("tokens", "cpumoe ms", "PyTorch bf16 ms", "faster by")]
    for tokens, times in all_times.items():
        faster = f"{times.torch_ms / times.own_ms:.1f}x"
        rows.append((str(tokens), f"{times.own_ms:.3f}", f"{times.torch_ms:.3f}", faster))
    print("\n".join(aligned(rows, right=range(4))))
    if warning := next((times.doubt for times in all_times.values() if times.doubt is not None), None):
        print(warning)

    found = layer.agreement()
    print(
        f"\nAgainst the float layer: relative error {found.float_error:.3f} (random weights; this is what "
        f"{scheme.weights.bits} bits cost)."
    )
    print(f"Against the reference arithmetic of {scheme}: {found.reference_error:.1e}.")
    names = [f"{name} {'same bits' if same else 'DIFFERENT BITS'}" for name, same in found.same_bits.items()]
    print(f"On every instruction set of this CPU: {', '.join(names)}.")
    return 0 if all(found.same_bits.values()) else 1
