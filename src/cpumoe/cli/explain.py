"""``cpumoe explain``: which backend serves a layer, and why the others do not."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import torch

from cpumoe.activation import KINDS, Activation
from cpumoe.backends import explain, select_backend
from cpumoe.config import MoEConfig
from cpumoe.errors import NoBackend
from cpumoe.routing import RoutingMethod
from cpumoe.scheme import Scheme

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_command(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="which backend serves a scheme, and why the others do not")
    parser.add_argument("scheme", help="scheme, such as w4a8-g128")
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
    config = MoEConfig(
        Scheme.parse(arguments.scheme),
        arguments.experts,
        arguments.hidden,
        arguments.intermediate,
        Activation(arguments.activation, gated=False if arguments.not_gated else None),
        scale_dtype=_DTYPES[arguments.scale_dtype],
        routing=RoutingMethod(arguments.routing),
    )
    verdicts = explain(config)
    try:
        chosen, problem = select_backend(config).name, None
    except NoBackend as refusal:
        chosen, problem = None, str(refusal)
    if arguments.json:
        rows = [{"backend": v.backend, "serves": v.obstacle is None, "reason": v.obstacle} for v in verdicts]
        print(json.dumps({"scheme": str(config.scheme), "chosen": chosen, "backends": rows}, indent=1))
        return 0 if chosen else 1
    print(
        f"{config.scheme}, {config.activation}, routing {config.routing.value}, {config.experts} experts of "
        f"{config.hidden_size} x {config.intermediate_size}"
    )
    for verdict in verdicts:
        print(f"  {verdict.backend:10} {'no: ' + verdict.obstacle if verdict.obstacle else 'yes'}")
    print(f"chosen: {chosen}" if chosen else problem)
    return 0 if chosen else 1
