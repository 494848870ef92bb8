"""Servers beside each other: vLLM with cpumoe, vLLM's own bf16 path, and ``cpumoe serve``, on the same machine.

    .venv/bin/python benchmarks/vllm_servers.py --python .venv-vllm/bin/python [--layers 8] [--requests 1 8 32]

``--python`` is that of an environment with vLLM and cpumoe (``make test-vllm`` makes ``.venv-vllm``); ``cpumoe serve``
runs with the interpreter of this script. The checkpoints have the shape of Qwen3-30B-A3B with fewer layers and random
weights: w4a8-g128 with a head in w8a8, and bf16. They are written to a temporary folder, or to ``--folder``, where they
are kept. Servers are started one after another, each alone on the machine; clients are threads that ask for as many
tokens at once as there are requests.

vLLM's scheduler waits for its worker by asking again and again, on a core of its own. ``--processes one`` (the default)
puts both into one process, which machines with few cores want; both of vLLM's rows are measured that way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from model_checkpoint import write_checkpoint
from model_shape import ModelShape
from tokenizers import Tokenizer, models, pre_tokenizers

import cpumoe
from cpumoe.bench.measure import Limits, memory_to_probe
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.layers.scheme import Scheme
from cpumoe.tables import aligned

_PROMPT = 16  # tokens
_START_SECONDS = 600.0


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One word for each token: texts of servers are not looked at, but they make some."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def checkpoint(folder: Path, shape: ModelShape, scheme: str | None) -> Path:
    """The folder of a checkpoint, which is written if it is not there."""
    if not (folder / "config.json").exists():
        print(f"writing {folder.name}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, shape.vocabulary)
        storages = (None, None) if scheme is None else (storage_for(Scheme.parse(s)) for s in (scheme, "w8a8"))
        write_checkpoint(folder, shape, *storages)
    return folder


@contextmanager
def running(command: list[str], port: int, environment: dict[str, str]) -> Iterator[str]:
    """The address of a server that answers; it ends with the block."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            until = time.monotonic() + _START_SECONDS
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not answer:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def is_healthy(port: int) -> bool:
    """Whether a server on this machine says that it is well."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ask(address: str, prompt: list[int], tokens: int) -> None:
    """One completion of so many tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        counted = json.load(answer)["usage"]["completion_tokens"]
    if counted != tokens:
        raise SystemExit(f"{counted} tokens were generated, not {tokens}")


def rate(address: str, requests: int, tokens: int, seed: int, vocabulary: int) -> float:
    """Tokens a second of requests that come at once, with prompts that were not seen before."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, vocabulary, (requests, _PROMPT), generator=random).tolist()
    clients = [threading.Thread(target=ask, args=(address, prompt, tokens)) for prompt in prompts]
    started = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return requests * tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with vLLM and cpumoe")
    parser.add_argument("--folder", type=Path, help="for the checkpoints; a temporary one")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8; bf16 takes 1.3 GB for each)")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (48)")
    parser.add_argument("--processes", choices=["one", "several"], default="one", help="of vLLM (one)")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of requests (3)")
    arguments = parser.parse_args()
    shape = ModelShape(arguments.layers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        quantized = checkpoint(folder / f"w4a8-g128-{shape.layers}", shape, "w4a8-g128")
        floats = checkpoint(folder / f"bf16-{shape.layers}", shape, None)
        vllm = [str(arguments.python), "-m", "vllm.entrypoints.cli.main", "serve"]
        options = ["--served-model-name", "model", "--max-model-len", "512", "--max-num-seqs", "64"]
        switches = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        if arguments.processes == "one":
            threads = str(cpumoe.get_num_threads())
            switches |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": threads}
        servers = {
            "vLLM with cpumoe, w4a8-g128": ([*vllm, str(quantized), *options], switches),
            "cpumoe serve, w4a8-g128": (
                [sys.executable, "-m", "cpumoe", "serve", str(quantized), "--name", "model"],
                {},
            ),
            "vLLM, bf16": ([*vllm, str(floats), *options], switches | {"CPUMOE_VLLM": "0"}),
        }
        rows = []
        for name, (command, environment) in servers.items():
            port = free_port()
            limits = Limits()
            limits.probe(memory_to_probe())
            with running([*command, "--port", str(port)], port, environment) as address:
                rate(address, max(arguments.requests), 4, 1, shape.vocabulary)  # what is made when it is first used
                found = []
                for requests in arguments.requests:
                    seeds = range(100 * requests, 100 * requests + arguments.rounds)
                    rates = [rate(address, requests, arguments.tokens, seed, shape.vocabulary) for seed in seeds]
                    found.append(statistics.median(rates))
            rows.append([name, *(f"{one:.1f}" for one in found), f"{limits.dram / 1e9:.0f}"])
            print(f"{name}: {', '.join(rows[-1][1:-1])} tokens/s", file=sys.stderr)
    heads = ["server", *(f"{n} request{'s' if n > 1 else ''}" for n in arguments.requests), "DRAM GB/s before it"]
    print(f"{shape.layers} layers, {cpumoe.isa()}, {cpumoe.get_num_threads()} threads; tokens/s")
    print("\n".join(aligned([heads, *rows], right=range(1, len(heads)))))


if __name__ == "__main__":
    main()
