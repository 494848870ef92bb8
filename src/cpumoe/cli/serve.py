"""``cpumoe serve``: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from cpumoe.checkpoints.json_files import read_json
from cpumoe.cli.arguments import find_models, number_above_zero, positive, refuse_given, whole_number
from cpumoe.cli.model_arguments import add_model_arguments, load_chosen_model
from cpumoe.cli.node_ranks import add_ranks, run_on_nodes
from cpumoe.cli.parser import Commands
from cpumoe.cli.rank_arguments import add_rank_arguments, join_ranks
from cpumoe.free_memory import available_bytes
from cpumoe.generation.connections import MAX_CONNECTIONS, connection_limit, listen
from cpumoe.generation.model_folder import check_folder, context_length, prepare_transformers
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.tables import size_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cpumoe.generation.engine import Started
    from cpumoe.generation.server import Server
    from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
    from cpumoe.parallel.ranks import Ranks
    from cpumoe.steps.rank_runner import Balancing

_PACKAGES = ("starlette", "uvicorn", "pydantic")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model through the OpenAI API",
        description="Serves /v1/chat/completions, /v1/completions, /v1/responses, /v1/models and /health. Requests "
        "that come together are computed together. Ctrl-C or SIGTERM ends it.",
    )
    add_model_arguments(parser)
    parser.add_argument("--name", help="what requests call the model (MODEL as given)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=whole_number(0, 65535), default=8000, help="port; 0 takes a free one (8000)")
    parser.add_argument(
        "--memory-gb",
        type=number_above_zero,
        metavar="F",
        help="memory for the KV cache (half of what the model leaves, at most what 256 requests of full context length "
        "take, or 64 with transformers' batching)",
    )
    parser.add_argument(
        "--max-connections",
        type=positive,
        metavar="N",
        help=f"connections open at once; more of them wait ({MAX_CONNECTIONS}, or what ulimit -n has room for)",
    )
    parser.add_argument("--sequential", action="store_true", help="one request at a time, as generate does")
    group = add_rank_arguments(parser)
    group.add_argument(
        "--rebalance", type=positive, metavar="STEPS", help="with --ep: move experts by their load every STEPS (never)"
    )
    group.add_argument(
        "--spare-experts", type=positive, metavar="N", help="with --rebalance: room for N copies on every rank (0)"
    )
    add_ranks(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"cpumoe serve needs {', '.join(missing)}: pip install 'cpumoe[serve]'")
    if arguments.sequential and arguments.memory_gb is not None:
        raise ValueError("--memory-gb has no effect with --sequential")
    if (code := run_on_nodes(arguments)) is not None:
        return code
    arguments.name = arguments.name or str(arguments.model)  # as it was typed
    find_models(arguments, "model")
    check_folder(arguments.model)
    ranks = join_ranks(arguments)
    if arguments.rebalance is None:
        refuse_given(arguments, "without --rebalance", "spare_experts")
    if not ranks:
        refuse_given(arguments, "with one rank", "rebalance")
        return _run(arguments, ranks)
    with ranks.together():
        _refuse_layout(arguments, ranks)
        return _run(arguments, ranks) if ranks.rank == 0 else _follow(arguments, ranks)


def _refuse_layout(arguments: argparse.Namespace, ranks: Ranks) -> None:
    if not ranks.layout.uses_ep:
        refuse_given(arguments, "without --ep: every rank has a slice of each expert", "rebalance")
    if arguments.sequential:
        raise ValueError("--sequential with several ranks; requests are computed together there")


def _balancing(arguments: argparse.Namespace) -> Balancing | None:
    from cpumoe.steps.rank_runner import Balancing

    if arguments.rebalance is None:
        return None
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # what torchrun calls machines
    return Balancing(arguments.rebalance, arguments.spare_experts or 0, nodes)


def _follow(arguments: argparse.Namespace, ranks: Ranks) -> int:
    """What all ranks but the first do. They end with that one, and not by signals, which come to all of them."""
    from cpumoe.steps.rank_runner import follow_steps

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    prepare_transformers()
    paged = _spread_decoder(_load(arguments, ranks))
    _least_free_bytes(ranks)
    follow_steps(paged, ranks)
    return 0


def _run(arguments: argparse.Namespace, ranks: Ranks) -> int:
    # Both signals end a server at any time and in the same way, even if a shell made its background jobs ignore SIGINT.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        max_connections = connection_limit(arguments.max_connections)
        with listen(arguments.host, arguments.port) as listener:
            idle = _serve(arguments, listener, max_connections, ranks)
    except KeyboardInterrupt:
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not idle:
        # A step that is being computed cannot be interrupted, and Python would wait for its thread.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _serve(arguments: argparse.Namespace, listener: socket.socket, max_connections: int, ranks: Ranks) -> bool:
    """Loads the model and serves until a signal comes. Returns whether all computing has ended."""
    prepare_transformers()
    from cpumoe.generation.engine import start_engine
    from cpumoe.generation.memory import free_bytes_with
    from cpumoe.generation.server import Server

    tokenizer = load_tokenizer(arguments.model)
    context = context_length(arguments.model)
    available = available_bytes()
    model = _load(arguments, ranks)
    free = free_bytes_with(model, available)
    if ranks:
        _spread_decoder(model)
        free = _least_free_bytes(ranks)
    started = start_engine(
        model,
        free,
        memory_gb=arguments.memory_gb,
        one_request=arguments.sequential,
        ranks=ranks,
        balancing=_balancing(arguments),
    )
    with started, Server(model, tokenizer, arguments.name, context, started.engine) as server:
        _tell_how(server, started, free, ranks, one_request=arguments.sequential)

        def print_address() -> None:
            host, port = listener.getsockname()[:2]
            print(f'model: "{arguments.name}" at http://{f"[{host}]" if ":" in host else host}:{port}/v1', flush=True)

        log_level = "info" if arguments.verbose else "warning"
        return server.run(listener, max_connections, log_level, on_ready=print_address)


def _load(arguments: argparse.Namespace, ranks: Ranks) -> PreTrainedModel:
    """Load the model, on every rank in the same way."""
    from cpumoe.integrations.transformers.layout.model_classes import config_of, has_plain_attention

    options: dict[str, Any] = {}
    if not arguments.sequential:
        options["reserve_bytes"] = int((arguments.memory_gb or 0) * 1e9)
        # Batching packs the tokens of several sequences into one row, which transformers can do with this attention.
        if has_plain_attention(config_of(read_json(arguments.model / "config.json"))):
            options["attn_implementation"] = "sdpa"
    return load_chosen_model(arguments, ranks=ranks, **options)


def _spread_decoder(model: PreTrainedModel) -> PagedDecoder:
    """What computes the steps of a model that is spread over ranks. Raises ValueError if nothing does."""
    from cpumoe.integrations.transformers.adapter import explanation, native_with_head
    from cpumoe.integrations.transformers.paged_decoder import PagedDecoder

    if (native := native_with_head(model)) is None:
        raise ValueError(f"several ranks serve models whose steps are one call of the core, and {explanation(model)}")
    return PagedDecoder(model, native)


def _least_free_bytes(ranks: Ranks) -> int:
    """What every rank has left when all of them have loaded the model: those of one machine share its memory."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks.gather_numbers([0])  # all have loaded it
    return min(free for (free,) in ranks.gather_numbers([available_bytes() // ranks_here]))


def _tell_how(server: Server, started: Started, free: int, ranks: Ranks, *, one_request: bool) -> None:
    """Prints which engine there is for a model which leaves ``free`` bytes of memory, and the size of its KV cache."""
    if one_request:
        if started.size is not None:
            print(f"cache: one request of up to {server.token_limit} tokens, {size_text(started.size.total_bytes)}")
        return
    if (size := started.size) is None:
        print(started.way)
        return
    groups = ranks.size // ranks.group.size
    print(
        f"cache: {size.blocks} blocks of {size.block_tokens} tokens, {size_text(size.total_bytes)} of the "
        f"{size_text(free)} that the model leaves{' on every rank' if ranks else ''}; a request may have "
        f"{server.token_limit} tokens"
    )
    shared_out = f" by {groups} groups of ranks, each with requests of its own" if groups > 1 else ""
    print(f"requests are computed together{shared_out}, {started.way}")
