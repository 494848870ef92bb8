"""``cpumoe serve``: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cpumoe.checkpoints.architectures import known_architecture
from cpumoe.checkpoints.checkpoint import read_json
from cpumoe.cli.arguments import find_models
from cpumoe.cli.generation import (
    add_model_arguments,
    check_folder,
    context_length,
    load_model,
    load_tokenizer,
    prepare_transformers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_PACKAGES = ("starlette", "uvicorn", "pydantic")
_TESTED_WITH = "5.22"

# Of the memory that the model leaves free. The rest is for the activations, for the page cache and for other programs.
_SHARE = 0.5
_SEQUENCES = 8  # a cache for more sequences of full length than this would lie idle
_BLOCK_TOKENS = 32
_LEAST_BLOCKS = 16
BATCH_TOKENS = 1024  # tokens that one step computes at most: a longer prompt is read in parts


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
        "--memory-gb", type=_gigabytes, metavar="F", help="memory for keys and values (half of what the model leaves)"
    )
    parser.add_argument("--sequential", action="store_true", help="one request at a time, as generate does")
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


@dataclass(frozen=True)
class CachePlan:
    """How many blocks of keys and values there are, and the memory that they and what grows with them take."""

    blocks: int
    block_tokens: int
    total_bytes: int


def plan_cache(config: PreTrainedConfig, dtype: torch.dtype, free_bytes: int, memory_gb: float | None) -> CachePlan:
    """The cache for a model, where the model itself leaves ``free_bytes``."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    block_bytes = config.num_hidden_layers * kv_heads * head_dim * 2 * dtype.itemsize * _BLOCK_TOKENS
    # transformers keeps a mask of [batch tokens, cache tokens + batch tokens] for each kind of attention, and while a
    # layer is computed it holds a copy of that layer's keys and values, repeated for all heads.
    mask_row_bytes = BATCH_TOKENS * dtype.itemsize * len(set(getattr(config, "layer_types", None) or ["full"]))
    copy_bytes = (2 * heads + kv_heads) * head_dim * dtype.itemsize
    cost = block_bytes + (mask_row_bytes + copy_bytes) * _BLOCK_TOKENS
    fixed = mask_row_bytes * BATCH_TOKENS

    free_bytes = max(free_bytes, 0)
    budget = free_bytes * _SHARE if memory_gb is None else memory_gb * 1e9
    if budget > free_bytes:
        raise ValueError(f"--memory-gb {memory_gb:g}; the model leaves {_size(free_bytes)}")
    blocks = int((budget - fixed) // cost)
    if blocks < _LEAST_BLOCKS:
        raise ValueError(
            f"a cache of {_LEAST_BLOCKS * _BLOCK_TOKENS} tokens takes {_size(fixed + _LEAST_BLOCKS * cost)}; "
            + ("half of what the model leaves" if memory_gb is None else "--memory-gb")
            + f" is {_size(budget)}"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None:
        blocks = min(blocks, -(-context * _SEQUENCES // _BLOCK_TOKENS))
    return CachePlan(blocks, _BLOCK_TOKENS, fixed + blocks * cost)


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def available_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the container, if there is one."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
    return min(available, limit - used + int(kinds.get("inactive_file", 0)))


def _listen(host: str, port: int) -> socket.socket:
    """The port, taken before the model is loaded and held since."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise ValueError(f"--host {host}: {problem.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as problem:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: {problem.strerror}") from None
    return listener


def _model_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def run(arguments: argparse.Namespace) -> int:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"cpumoe serve needs {', '.join(missing)}: pip install 'cpumoe[serve]'")
    if arguments.sequential and arguments.memory_gb is not None:
        raise ValueError("--memory-gb has no effect with --sequential")
    arguments.name = arguments.name or str(arguments.model)  # as it was typed
    find_models(arguments, "model")
    check_folder(arguments.model)
    # Both end a server, at any time, in the same way; a shell may have told its background jobs to ignore SIGINT.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with _listen(arguments.host, arguments.port) as listener:
            idle = _serve(arguments, listener)
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


def _serve(arguments: argparse.Namespace, listener: socket.socket) -> bool:
    """Loads and serves until a signal comes; whether nothing is being computed any more."""
    prepare_transformers()
    import transformers

    try:
        from cpumoe.generation import server
    except ImportError as problem:
        raise RuntimeError(
            f"cpumoe serve was made for transformers {_TESTED_WITH}, this is {transformers.__version__}: {problem}"
        ) from problem
    tokenizer = load_tokenizer(arguments.model)
    context = context_length(arguments.model)
    available = available_bytes()
    # Batching packs the tokens of several sequences into one, which transformers does with this attention alone.
    batched = not arguments.sequential and _has_plain_attention(arguments.model)
    model = load_model(arguments, **({"attn_implementation": "sdpa"} if batched else {}))
    # Weights that are mapped from files do not lower the memory that is available, but they should stay in it.
    free = available - max(_model_bytes(model), available - available_bytes())

    with server.Server(model, tokenizer, arguments.name, context) as served:
        obstacle: str | None = None
        if not arguments.sequential:
            plan = plan_cache(model.config, model.dtype, free, arguments.memory_gb)
            obstacle = served.start_batching(plan.blocks, plan.block_tokens, BATCH_TOKENS)
            if obstacle is None:
                print(
                    f"cache: {plan.blocks} blocks of {plan.block_tokens} tokens, {_size(plan.total_bytes)} of the "
                    f"{_size(free)} that the model leaves; a request may have {served.limit} tokens"
                )
            else:
                print(f"requests are answered one at a time, since batching fails for this model: {obstacle}")
        if arguments.sequential or obstacle is not None:
            served.start_sequential()

        def tell() -> None:
            host, port = listener.getsockname()[:2]
            print(f'model: "{served.name}" at http://{f"[{host}]" if ":" in host else host}:{port}/v1', flush=True)

        return served.run(listener, log_level="info" if arguments.verbose else "warning", on_ready=tell)


def _has_plain_attention(folder: Path) -> bool:
    architecture = known_architecture(read_json(folder / "config.json"))
    return architecture is not None and architecture.plain_attention
