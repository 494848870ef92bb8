"""``cpumoe explain``: which backend serves a layer, and why the others do not."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpumoe import cpu
from cpumoe.cli.arguments import (
    add_activations,
    add_download,
    check_scheme_fits,
    find_models,
    positive,
    refuse_given,
    size_in_features,
)
from cpumoe.cli.parser import Commands
from cpumoe.errors import NoBackend
from cpumoe.layers.activation import KINDS, Activation
from cpumoe.layers.routing_methods import RoutingMethod
from cpumoe.layers.scheme import SCHEMES, Scheme
from cpumoe.tables import aligned

if TYPE_CHECKING:
    from cpumoe.integrations.transformers.recognition.explain import Explanation
    from cpumoe.layers.config import MoEConfig


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # by PyTorch's names
_LAYER_OPTIONS = ("hidden", "intermediate", "experts", "activation", "not_gated", "routing", "scale_dtype")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="which backend serves a model or a scheme, and why the others do not",
        description="Asks every backend about the experts of a checkpoint, or about a layer that the options describe.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        metavar="MODEL|SCHEME",
        help="checkpoint folder, id on the Hugging Face hub (owner/name), or scheme (w4a8-g128); left out: all schemes",
    )
    layer = parser.add_argument_group("the layer, for a SCHEME (a MODEL has its own)")
    layer.add_argument("--hidden", type=size_in_features, metavar="N", help="hidden size (2048)")
    layer.add_argument("--intermediate", type=size_in_features, metavar="N", help="intermediate size (768)")
    layer.add_argument("--experts", type=positive, metavar="N", help="how many (128)")
    layer.add_argument("--activation", choices=sorted(KINDS), help="(silu)")
    layer.add_argument("--not-gated", action="store_true", help="gate_up has no up rows")
    layer.add_argument("--routing", choices=[m.value for m in RoutingMethod], help="(renormalize)")
    layer.add_argument("--scale-dtype", choices=sorted(_DTYPES), help="of the weight scales (fp32)")
    add_activations(parser)
    add_download(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what is None:
        refuse_given(arguments, "without a MODEL or SCHEME", "download", "activations", *_LAYER_OPTIONS)
        return _explain_all(arguments.json)
    layers, steps = _layers(arguments)
    answers = [_answer(config, count) for config, count in layers.items()]
    if steps is not None:
        answers[0] |= {"steps": steps.sentence, "decoder": steps.values}
    if arguments.json:
        print(json.dumps(answers[0] if len(answers) == 1 else answers, indent=1))
    else:
        for answer in answers:
            _print(answer)
        if steps is not None:
            print(f"steps: {steps.sentence}")
            print("\n".join(steps.lines))
    return 0 if all(answer["chosen"] for answer in answers) else 1


def _explain_all(as_json: bool) -> int:
    """Which backend serves each scheme with each routing method and activation on each instruction set of this CPU."""
    import torch

    from cpumoe.layers.backends import serving_matrix
    from cpumoe.layers.config import MoEConfig
    from cpumoe.layers.packed_weights import packed_spec

    cells = list(serving_matrix())
    if as_json:
        print(json.dumps([asdict(cell) for cell in cells], indent=1))
        return 0
    rows = [("scheme", "kernels", "bits per weight", "backend", "not served with")]
    for name in SCHEMES:
        of_scheme = [cell for cell in cells if cell.scheme == name]
        backends = dict.fromkeys(cell.backend for cell in of_scheme if cell.backend is not None)
        gaps = dict.fromkeys(f"{c.routing}, {c.activation} on {c.isa}" for c in of_scheme if c.backend is None)
        layer = MoEConfig(Scheme.parse(name), 1, 2048, 768, scale_dtype=torch.bfloat16)
        bits = 8 * packed_spec(layer.scheme, layer.scale_dtype, 1, 2048, 2048).packed_bytes / 2048**2
        rows.append((name, _weight_format(layer), f"{bits:.2f}", ", ".join(backends), "; ".join(gaps) or "-"))
    print("\n".join(aligned(rows)))
    count = len({cell.routing for cell in cells}), len({cell.activation for cell in cells})
    isas = ", ".join(dict.fromkeys(cell.isa for cell in cells))
    print(f"asked for {count[0]} routing methods and {count[1]} activations on {isas}")
    return 0


def _layers(arguments: argparse.Namespace) -> tuple[dict[MoEConfig, int], Explanation | None]:
    """The different layers to ask about and how often each occurs, and of a model, how a step is computed."""
    from cpumoe.checkpoints.checkpoint import Checkpoint
    from cpumoe.checkpoints.loading import experts_of
    from cpumoe.integrations.transformers.facade import describe, explain_step

    what = Path(arguments.what).expanduser()
    if not what.is_dir() and "/" not in arguments.what:
        refuse_given(arguments, f"for the scheme {arguments.what}", "download", "activations")
        return {_layer_of_options(arguments): 1}, None
    refuse_given(arguments, f"for a model, whose layers {arguments.what} has", *_LAYER_OPTIONS)
    arguments.model = what
    find_models(arguments, "model")
    with Checkpoint.open(arguments.model, arguments.activations) as checkpoint:
        found = Counter(source.config for source in experts_of(checkpoint, describe(checkpoint)).values())
        steps = explain_step(checkpoint)
    if not found:
        raise ValueError(f"{arguments.what} has no quantised experts; name a scheme instead, such as w4a8-g128")
    return found, steps


def _layer_of_options(arguments: argparse.Namespace) -> MoEConfig:
    """The layer that the options describe."""
    import torch

    from cpumoe.layers.config import MoEConfig

    scheme, activation = Scheme.parse(arguments.what), arguments.activation or "silu"
    hidden, intermediate = arguments.hidden or 2048, arguments.intermediate or 768
    check_scheme_fits(str(scheme), scheme, hidden, intermediate)
    try:
        function = Activation(activation, gated=False if arguments.not_gated else None)
    except ValueError:  # an activation that combines gate and up
        raise ValueError(f"--not-gated does not go with --activation {activation}, which needs a gate") from None
    return MoEConfig(
        scheme,
        arguments.experts or 128,
        hidden,
        intermediate,
        function,
        scale_dtype=getattr(torch, _DTYPES[arguments.scale_dtype or "fp32"]),
        routing=RoutingMethod(arguments.routing or RoutingMethod.RENORMALIZE.value),
    )


def _answer(config: MoEConfig, layers: int) -> dict[str, Any]:
    from cpumoe.layers.backends import explain, select_backend

    try:
        chosen, problem = select_backend(config).name, None
    except NoBackend as refusal:
        chosen, problem = None, str(refusal)
    return {
        "scheme": str(config.scheme),
        "layers": layers,
        "layer": f"{config.activation}, routing {config.routing.value}, {config.experts} experts of "
        f"{config.hidden_size} x {config.intermediate_size}",
        "chosen": chosen,
        "problem": problem,
        "kernels": {"weights": _weight_format(config), "instruction_set": cpu.isa()} if chosen == "native" else None,
        "backends": [
            {"backend": v.backend, "serves": v.obstacle is None, "reason": v.obstacle} for v in explain(config)
        ],
    }


def _weight_format(config: MoEConfig) -> str:
    """How the native kernels store the weights: the name of a row in their table."""
    from cpumoe.layers.packed_weights import packed_spec

    return packed_spec(config.scheme, config.scale_dtype, 1, config.hidden_size, config.intermediate_size).weight_format


def _print(answer: dict[str, Any]) -> None:
    count = f"{answer['layers']} layers: " if answer["layers"] > 1 else ""
    print(f"{count}{answer['scheme']}, {answer['layer']}")
    rows = [(row["backend"], "yes" if row["serves"] else f"no: {row['reason']}") for row in answer["backends"]]
    print("\n".join(aligned(rows, indent=2)))
    print(f"chosen: {answer['chosen']}" if answer["chosen"] else answer["problem"])
    if (kernels := answer["kernels"]) is not None:
        print(f"kernels: {kernels['weights']} on {kernels['instruction_set']}")
