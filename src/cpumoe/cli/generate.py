"""``cpumoe generate``: the continuation of a text."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cpumoe.chat_template import ChatTemplate
from cpumoe.cli.arguments import find_models, read_text, refuse_given
from cpumoe.cli.model_arguments import add_model_arguments, is_decoded, load_chosen_model
from cpumoe.cli.node_ranks import add_ranks, run_on_nodes
from cpumoe.cli.rank_arguments import add_rank_arguments, join_ranks
from cpumoe.cli.sampling_arguments import (
    add_sampling_arguments,
    check_sampling_arguments,
    generation_config,
    sampling_of,
)
from cpumoe.cli.screen import Screen
from cpumoe.generation.model_folder import check_folder, context_length, prepare_transformers
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe_command import INTERRUPTED, interrupted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cpumoe.parallel.ranks import Ranks
    from cpumoe.steps.sampling import Sampling

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continues a text and prints what comes as it comes; then, on stderr, one line of speeds. The text "
        "is PROMPT, or a file, or what stands on standard input: cpumoe generate MODEL < prompt.txt.",
    )
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue; - is standard input")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the text from FILE (UTF-8)")
    parser.add_argument(
        "--chat", action="store_true", help="ask the text as a question, by the chat template; reasoning goes to stderr"
    )
    add_sampling_arguments(parser, max_new_tokens=128)
    parser.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_rank_arguments(parser)
    add_ranks(parser)
    parser.set_defaults(run=run)


def _prompt(arguments: argparse.Namespace) -> str:
    given, file = arguments.prompt, arguments.prompt_file
    if given is not None and file is not None:
        raise ValueError("both PROMPT and --prompt-file are given; one of them is accepted")
    if given is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(
            "there is no text to continue: PROMPT, --prompt-file FILE or standard input "
            "(cpumoe generate MODEL < FILE) is accepted"
        )
    text: str
    if given is not None and given != "-":
        name, text = "PROMPT", given
        if not is_decoded(text):
            raise ValueError("PROMPT is not UTF-8")
    else:
        name = "standard input" if file in (None, "-") else f"--prompt-file {file}"
        text = read_text(file or "-", name)
    if not text:
        raise ValueError(f"{name} is empty; there is nothing to continue")
    return text


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        refuse_given(arguments, "with --json, which prints at the end", "no_stream")
    check_sampling_arguments(arguments)
    text = _prompt(arguments)
    if (code := run_on_nodes(arguments, text)) is not None:
        return code
    find_models(arguments, "model")
    check_folder(arguments.model)
    prepare_transformers()
    sampling = sampling_of(arguments, generation_config(arguments.model))
    tokenizer = load_tokenizer(arguments.model)
    prompt = (
        ChatTemplate(tokenizer).prompt([{"role": "user", "content": text}])
        if arguments.chat
        else tokenizer.encode(text)
    )
    if not prompt:
        raise ValueError("the prompt is empty for this tokenizer; there is nothing to continue")
    context = context_length(arguments.model)
    if context is not None and len(prompt) + arguments.max_new_tokens > context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and with --max-new-tokens {arguments.max_new_tokens} that is more "
            f"than the model's context of {context}"
        )
    ranks = join_ranks(arguments)
    with ranks.together():
        return _answer(arguments, prompt, tokenizer, sampling, ranks)


def _answer(
    arguments: argparse.Namespace,
    prompt: list[int],
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    ranks: Ranks,
) -> int:
    """Loads the model and answers, as the first rank; the others follow its steps, or do the same if there are none."""
    from cpumoe.generation.session import Session, peak_memory_bytes
    from cpumoe.integrations.transformers.adapter import native_with_head
    from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
    from cpumoe.steps.rank_runner import follow_steps

    ranks.agree("prompt", f"{prompt} {sampling} {arguments.max_new_tokens} {arguments.stop}")
    if sampling.seed is None:  # all ranks choose the same tokens
        sampling = replace(sampling, seed=ranks.gather_numbers([secrets.randbits(63)])[0][0])
    started = time.perf_counter()
    model = load_chosen_model(arguments, ranks=ranks)
    load_seconds = time.perf_counter() - started
    prints = ranks.rank == 0
    if not prints and (native := native_with_head(model)) is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes to all ranks, and the first one ends the steps
        follow_steps(PagedDecoder(model, native), ranks)
        return 0

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that is not UTF-8 gets "?"
    streams = prints and not (arguments.no_stream or arguments.json)

    def pass_by(piece: str) -> None:
        """Show nothing."""

    screen = Screen(sys.stderr)
    show_answer, show_reasoning = (screen.show_answer, screen.show_reasoning) if streams else (pass_by, pass_by)
    length = arguments.max_new_tokens
    with Session(model, tokenizer, sampling, arguments.stop or (), tokens=len(prompt) + length, ranks=ranks) as session:
        answer = session.answer(prompt, length, show_answer, show_reasoning if arguments.chat else None)
    remarks = [interrupted("generate")] if answer.finish == "interrupt" else []
    status = INTERRUPTED if answer.finish == "interrupt" else 0
    if not prints:
        return status
    if arguments.json:
        facts = {
            "text": answer.text,
            **({"reasoning": answer.reasoning} if arguments.chat else {}),
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
        remarks.append(answer.summary())
    if remarks:
        print("; ".join(remarks), file=sys.stderr)
    return status
