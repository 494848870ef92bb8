"""``cpumoe demo``: the model that comes with the package completes Python code; or one large layer is measured."""

from __future__ import annotations

import argparse
import time

from cpumoe import cpu
from cpumoe.cli import demo_layer
from cpumoe.cli.arguments import positive, refuse_given
from cpumoe.cli.parser import Commands

_TOKENS = 64


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="let the model that comes with the package write Python; or --layer",
        description="Loads the small 4-bit mixture-of-experts model that comes with the package, completes three "
        "prompts, and says how fast that was, where the time went, which experts were used, and how it compares with "
        "the same model in float. With --layer: one layer of Qwen3-30B-A3B's shape instead, measured and checked.",
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help=f"tokens of each completion ({_TOKENS})")
    parser.add_argument("--layer", action="store_true", help="one large layer with random weights instead")
    demo_layer.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.layer:
        refuse_given(arguments, "with --layer, which completes nothing", "tokens")
        return demo_layer.run(arguments)
    refuse_given(arguments, "without --layer", *demo_layer.OPTIONS)
    if arguments.tokens == 1:
        raise ValueError("--tokens 1; 2 or more are accepted: the first comes with the prompt")
    return _complete(arguments.tokens or _TOKENS)


def _complete(tokens: int) -> int:
    import torch

    from cpumoe.generation.model_folder import prepare_transformers

    prepare_transformers()
    from cpumoe.bench.decoding import decode_times
    from cpumoe.bench.machine_load import MachineLoad, doubt
    from cpumoe.demo import model as demo_model
    from cpumoe.demo.completions import PROMPTS, SAMPLING, float_model
    from cpumoe.evaluation.expert_load import count_expert_load
    from cpumoe.generation.memory import model_bytes
    from cpumoe.generation.session import Session
    from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
    from cpumoe.integrations.transformers.loading.model_loading import load_model

    start = time.perf_counter()
    model = load_model(demo_model.FOLDER)
    seconds = time.perf_counter() - start
    tokenizer = load_tokenizer(demo_model.FOLDER)
    config = model.config
    print(
        f"A mixture-of-experts model of {config.num_hidden_layers} layers with {config.num_experts} experts each, "
        f"{config.num_experts_per_tok} per token, trained on the Python standard library.\n"
        f"Loaded in {seconds:.1f} s; {cpu.isa()} kernels, {cpu.get_num_threads()} threads."
    )
    rates: list[float] = []
    texts: list[list[int]] = []
    for prompt in PROMPTS:
        print(f"\n{'-' * 100}\n{prompt}", end="")
        ids = tokenizer.encode(prompt)
        with Session(model, tokenizer, SAMPLING, tokens=len(ids) + tokens) as session:
            answer = session.answer(ids, tokens, lambda piece: print(piece, end="", flush=True))
        rates.append(answer.decode_rate or 0.0)
        texts.append(ids + answer.tokens)
        print()
    print("-" * 100)
    # Counted afterwards: while somebody looks at the experts, a model runs layer by layer.
    with torch.inference_mode(), count_expert_load(model) as load:
        for text in texts:
            model(torch.tensor([text]))
    used = sum(int((counts > 0).sum()) for counts in load.counts.values())
    every = sum(len(counts) for counts in load.counts.values())
    print(f"\n{max(rates):.0f} tokens per second; {used} of {every} experts were used.")

    first = torch.tensor([tokenizer.encode(PROMPTS[0])])
    load_of_others = MachineLoad()
    packed_times = decode_times(model, first, 32)
    parts = ", ".join(f"{kind} {share:.0%}" for kind, share in packed_times.shares.items() if share >= 0.01)
    print(f"Where a token's {packed_times.seconds * 1e3:.1f} ms go: {parts}.")

    plain = float_model(model)
    plain_times = decode_times(plain, first, 8)
    print(
        f"The same model in {str(plain.dtype).removeprefix('torch.')} with transformers alone: "
        f"{plain_times.seconds * 1e3:.1f} ms a token, {model_bytes(plain) * 1e-6:.0f} MB of weights instead of "
        f"{model_bytes(model) * 1e-6:.0f} MB."
    )
    if warning := doubt(load_of_others.taken_by_others(), packed_times.all_seconds, plain_times.all_seconds):
        print(warning)
    bits = demo_model.quality()["bits_per_byte"]
    print(
        f"Held-out text: {bits['w4a8-g128 calibrated']:.4f} bits per byte as shipped, {bits['float']:.4f} in float "
        "(models/python-stdlib/README.md says how this was measured)."
    )
    return 0
