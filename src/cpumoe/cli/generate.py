"""``cpumoe generate``: the continuation of a text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.cli.generation import (
    Session,
    add_model_arguments,
    add_sampling_arguments,
    check_folder,
    context_length,
    is_decoded,
    load_model,
    load_tokenizer,
    peak_memory_bytes,
    prepare_transformers,
    render_chat,
    sampling_options,
)

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C ended


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continues a text and prints what comes as it comes; then, on stderr, one line of speeds.",
    )
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the text from FILE (UTF-8); - is stdin")
    parser.add_argument("--chat", action="store_true", help="ask the text as a question, by the chat template")
    add_sampling_arguments(parser, max_new_tokens=128)
    parser.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def _prompt(arguments: argparse.Namespace) -> str:
    if (arguments.prompt is None) == (arguments.prompt_file is None):
        raise ValueError("either PROMPT or --prompt-file is needed")
    text: str
    if arguments.prompt is not None:
        name, text = "PROMPT", arguments.prompt
        if not is_decoded(text):
            raise ValueError("PROMPT is not UTF-8")
    else:
        name = "stdin" if arguments.prompt_file == "-" else arguments.prompt_file
        encoded = sys.stdin.buffer.read() if arguments.prompt_file == "-" else Path(name).read_bytes()
        try:
            text = encoded.decode("utf-8")
        except UnicodeDecodeError as problem:
            raise ValueError(f"{name} is not UTF-8: {problem.reason} at byte {problem.start}") from None
    if not text:
        raise ValueError(f"{name} is empty; there is nothing to continue")
    return text


def run(arguments: argparse.Namespace) -> int:
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while reading or loading; an answer ends by itself
        return _INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    text = _prompt(arguments)
    options = sampling_options(arguments)
    check_folder(arguments.model)
    prepare_transformers()
    tokenizer = load_tokenizer(arguments.model)
    prompt = render_chat(tokenizer, [{"role": "user", "content": text}]) if arguments.chat else tokenizer.encode(text)
    if not prompt:
        raise ValueError("the prompt is empty for this tokenizer; there is nothing to continue")
    context = context_length(arguments.model)
    if context is not None and len(prompt) + arguments.max_new_tokens > context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and with --max-new-tokens {arguments.max_new_tokens} that is more "
            f"than the model's context of {context}"
        )
    started = time.perf_counter()
    model = load_model(arguments)
    load_seconds = time.perf_counter() - started

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that is not UTF-8 gets "?"
    streams = not (arguments.no_stream or arguments.json)

    def show(piece: str) -> None:
        if streams:
            print(piece, end="", flush=True)

    answer = Session(model, tokenizer, options).answer(prompt, arguments.max_new_tokens, show)
    if arguments.json:
        facts = {
            "text": answer.text,
            "finish": answer.finish,
            "prompt_tokens": answer.prompt_tokens,
            "generated_tokens": len(answer.tokens),
            "load_seconds": load_seconds,
            "prefill_seconds": answer.prefill_seconds,
            "decode_seconds": answer.decode_seconds,
            "prefill_tokens_per_second": answer.prefill_rate,
            "decode_tokens_per_second": answer.decode_rate,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        print(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        print("" if streams else answer.text, flush=True)
        print(answer.summary(), file=sys.stderr)
    return _INTERRUPTED if answer.finish == "interrupt" else 0
