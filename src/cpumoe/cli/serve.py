"""``cpumoe serve``: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.checkpoints.json_files import read_json
from cpumoe.cli.arguments import find_models, positive, refuse_given
from cpumoe.cli.model_arguments import add_model_arguments, load_chosen_model
from cpumoe.cli.node_ranks import add_ranks, run_on_nodes
from cpumoe.cli.rank_arguments import add_rank_arguments, join_ranks
from cpumoe.free_memory import available_bytes
from cpumoe.generation.connections import MAX_CONNECTIONS, connection_limit, listen
from cpumoe.generation.model_folder import check_folder, context_length, prepare_transformers
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.tables import size_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cpumoe.generation.server import Server
    from cpumoe.integrations.transformers.native_decoder import NativeDecoder
    from cpumoe.parallel.ranks import Ranks
    from cpumoe.steps.rank_runner import Balancing

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_PACKAGES = ("starlette", "uvicorn", "pydantic")
_TESTED_WITH = "5.22"


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
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (8000)")
    parser.add_argument(
        "--memory-gb",
        type=_gigabytes,
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


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; 0 to 65535 are accepted")
    return port


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; a number above 0 is accepted")
    return value


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
    from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
    from cpumoe.steps.rank_runner import follow_steps

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    prepare_transformers()
    model = _load(arguments, ranks)
    native = _native_of(model)
    _least_free_bytes(ranks)
    follow_steps(PagedDecoder(model, native), ranks)
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
    from cpumoe.generation.memory import model_bytes

    prepare_transformers()
    import transformers

    try:
        from cpumoe.generation.server import Server
    except ImportError as problem:
        if not (problem.name or "").startswith("transformers"):
            raise
        raise RuntimeError(
            f"cpumoe serve was made for transformers {_TESTED_WITH}, this is {transformers.__version__}: {problem}"
        ) from problem
    tokenizer = load_tokenizer(arguments.model)
    context = context_length(arguments.model)
    available = available_bytes()
    model = _load(arguments, ranks)
    # Weights that are mapped from files do not count as used memory, but there should be room for all of them.
    free = available - max(model_bytes(model), available - available_bytes())
    if ranks:
        free = _least_free_bytes(ranks)

    with Server(model, tokenizer, arguments.name, context) as server:
        if arguments.sequential:
            server.start_sequential()
        else:
            _start_together(server, model, free, arguments.memory_gb, ranks, _balancing(arguments))

        def print_address() -> None:
            host, port = listener.getsockname()[:2]
            print(f'model: "{server.name}" at http://{f"[{host}]" if ":" in host else host}:{port}/v1', flush=True)

        log_level = "info" if arguments.verbose else "warning"
        return server.run(listener, max_connections, log_level, on_ready=print_address)


def _cache_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the memory that has to be left for the KV cache; None for an engine that has none of a fixed size."""
    return None if arguments.sequential else int((arguments.memory_gb or 0) * 1e9)


def _load(arguments: argparse.Namespace, ranks: Ranks) -> PreTrainedModel:
    """Load the model, on every rank in the same way."""
    # Batching packs the tokens of several sequences into one row, which transformers can do with this attention only.
    batched = not arguments.sequential and _has_plain_attention(arguments.model)
    attention = {"attn_implementation": "sdpa"} if batched else {}
    return load_chosen_model(arguments, ranks=ranks, reserve_bytes=_cache_bytes(arguments), **attention)


def _native_of(model: PreTrainedModel) -> NativeDecoder:
    """What computes the steps of a model that is spread over ranks. Raises ValueError if nothing does."""
    from cpumoe.integrations.transformers.native_decoder import explanation, native_with_head

    if (native := native_with_head(model)) is None:
        raise ValueError(f"several ranks serve models whose steps are one call of the core, and {explanation(model)}")
    return native


def _least_free_bytes(ranks: Ranks) -> int:
    """What every rank has left when all of them have loaded the model: those of one machine share its memory."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks.gather_numbers([0])  # all have loaded it
    return min(free for (free,) in ranks.gather_numbers([available_bytes() // ranks_here]))


def _start_together(
    server: Server,
    model: PreTrainedModel,
    free: int,
    memory_gb: float | None,
    ranks: Ranks,
    balancing: Balancing | None,
) -> None:
    """Starts the best engine that there is for a model which leaves ``free`` bytes of memory, and says which it is."""
    from cpumoe.generation.memory import BATCH_TOKENS, cache_size
    from cpumoe.integrations.transformers.int8_cache import holds_records
    from cpumoe.integrations.transformers.native_decoder import native_with_head

    way, obstacle = "each step in one call of the core", None
    native = _native_of(model) if ranks else native_with_head(model)
    if native is not None:
        size = cache_size(model.config, model.dtype, free, memory_gb, native.token_bytes, native.state_bytes)
        sizes = (size.blocks, size.block_tokens, BATCH_TOKENS, size.sequences)
        obstacle = server.start_steps(native, *sizes, ranks, balancing)
    if ranks and obstacle is not None:
        raise RuntimeError(obstacle)
    if (native is None or obstacle is not None) and holds_records(model):
        obstacle = obstacle or "transformers' continuous batching holds keys and values in float"
    elif native is None or obstacle is not None:
        way = "by transformers' continuous batching" + ("" if obstacle is None else f": {obstacle}")
        size = cache_size(model.config, model.dtype, free, memory_gb)
        obstacle = server.start_batching(size.blocks, size.block_tokens, BATCH_TOKENS)
    if obstacle is not None:
        print(f"requests are answered one at a time, since batching fails for this model: {obstacle}")
        server.start_sequential()
        return
    groups = ranks.size // ranks.group.size
    print(
        f"cache: {size.blocks} blocks of {size.block_tokens} tokens, {size_text(size.total_bytes)} of the "
        f"{size_text(free)} that the model leaves{' on every rank' if ranks else ''}; a request may have "
        f"{server.token_limit} tokens"
    )
    shared_out = f" by {groups} groups of ranks, each with requests of its own" if groups > 1 else ""
    print(f"requests are computed together{shared_out}, {way}")


def _has_plain_attention(folder: Path) -> bool:
    from cpumoe.integrations.transformers.layout.model_classes import config_of, has_plain_attention

    return has_plain_attention(config_of(read_json(folder / "config.json")))
