"""``cpumoe explain``: which backend serves a layer, and why the others do not."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cpumoe.activation import KINDS, Activation
from cpumoe.backends import explain, select_backend
from cpumoe.checkpoint import Checkpoint
from cpumoe.config import MoEConfig
from cpumoe.errors import NoBackend
from cpumoe.loading import experts_of
from cpumoe.routing import RoutingMethod
from cpumoe.scheme import Scheme

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="which backend serves a model or a scheme, and why the others do not",
        description="Asks every backend about the experts of a checkpoint, or about a layer that the options describe.",
    )
    parser.add_argument("what", metavar="MODEL|SCHEME", help="checkpoint folder, or scheme such as w4a8-g128")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--activation", choices=sorted(KINDS), default="silu")
    parser.add_argument("--not-gated", action="store_true", help="gate_up has no up rows")
    parser.add_argument("--routing", choices=[m.value for m in RoutingMethod], default=RoutingMethod.RENORMALIZE.value)
    parser.add_argument("--scale-dtype", choices=sorted(_DTYPES), default="fp32", help="of the weight scales")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    answers = [_answer(config, layers) for config, layers in _layers(arguments).items()]
    if arguments.json:
        print(json.dumps(answers[0] if len(answers) == 1 else answers, indent=1))
    else:
        for answer in answers:
            _print(answer)
    return 0 if all(answer["chosen"] for answer in answers) else 1


def _layers(arguments: argparse.Namespace) -> dict[MoEConfig, int]:
    """The different layers to ask about, and how many there are of each."""
    folder = Path(arguments.what)
    if not folder.is_dir():
        config = MoEConfig(
            Scheme.parse(arguments.what),
            arguments.experts,
            arguments.hidden,
            arguments.intermediate,
            Activation(arguments.activation, gated=False if arguments.not_gated else None),
            scale_dtype=_DTYPES[arguments.scale_dtype],
            routing=RoutingMethod(arguments.routing),
        )
        return {config: 1}
    with Checkpoint.open(folder) as checkpoint:
        found = Counter(source.config for source in experts_of(checkpoint).values())
    if not found:
        raise ValueError(f"{folder} has no quantised experts; name a scheme instead, such as w4a8-g128")
    return found


def _answer(config: MoEConfig, layers: int) -> dict[str, Any]:
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
        "backends": [
            {"backend": v.backend, "serves": v.obstacle is None, "reason": v.obstacle} for v in explain(config)
        ],
    }


def _print(answer: dict[str, Any]) -> None:
    count = f"{answer['layers']} layers: " if answer["layers"] > 1 else ""
    print(f"{count}{answer['scheme']}, {answer['layer']}")
    for row in answer["backends"]:
        print(f"  {row['backend']:10} {'yes' if row['serves'] else 'no: ' + row['reason']}")
    print(f"chosen: {answer['chosen']}" if answer["chosen"] else answer["problem"])
