"""Compute layers with the core of a wheel and save the results, so that those of several machines can be compared.

Usage: python layer_bits.py CORE RESULTS.npz, where CORE is the extension module of a wheel. This needs NumPy only,
because the Pythons of pythons.py have no PyTorch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import Any

import numpy as np

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 384, 2
TOKENS = (1, 5, 40)

# scheme: weights, group size, activations
SCHEMES = {
    "w4a8": ("int4", None, "int8"),
    "w4a8-g128": ("int4", 128, "int8"),
    "w4a8-g32": ("int4", 32, "int8"),
    "w8a8": ("int8", None, "int8"),
    "fp32": ("fp32", None, "float"),
}
_LARGEST = {"int4": 8, "int8": 128}
_ROWS_PLAIN, _ROWS_GATE_THEN_UP, _SILU = 0, 1, 0


def load_core(path: str) -> Any:
    """Load an extension module by its path, without the package around it."""
    loader = importlib.machinery.ExtensionFileLoader("_core", path)
    spec = importlib.util.spec_from_file_location("_core", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def pack(
    core: Any, random: np.random.RandomState, scheme: str, experts: int, rows: int, depth: int, *, gated: bool
) -> np.ndarray:
    """Return packed random weights [experts, rows, depth]."""
    weights, group, activations = SCHEMES[scheme]
    if weights == "fp32":
        values = (random.random_sample((experts, rows, depth)) - 0.5).astype(np.float32)
        scales = np.empty((experts, rows, 0), np.float32)
    else:
        largest = _LARGEST[weights]
        values = random.randint(-largest, largest, (experts, rows, depth)).astype(np.int8)
        groups = 1 if group is None else depth // group
        scales = ((random.random_sample((experts, rows, groups)) + 0.5) / largest).astype(np.float32)
    bias = random.random_sample((experts, rows)).astype(np.float32)
    spec = core.PackedSpec(
        weights=weights,
        group_size=group,
        scales="none" if weights == "fp32" else "float32",
        experts=experts,
        out_features=rows,
        in_features=depth,
        gated=gated,
        has_bias=True,
        has_zero_points=False,
        activations=activations,
    )
    blob = np.zeros(spec.packed_bytes, np.uint8)
    core.write_packed_header(blob, spec)
    order = _ROWS_GATE_THEN_UP if gated else _ROWS_PLAIN
    core.pack_into(blob, 0, values, scales, None, None, bias, None, None, order, scheme)
    return blob


def compute(core: Any) -> dict[str, np.ndarray]:
    """Return the outputs of linears and mixture-of-experts layers, by scheme and number of tokens.

    Inputs are uniform numbers of RandomState: every version of NumPy gives the same ones on every machine.
    """
    random = np.random.RandomState(0)
    results = {}
    for scheme in SCHEMES:
        gate_up = pack(core, random, scheme, EXPERTS, 2 * INTERMEDIATE, HIDDEN, gated=True)
        down = pack(core, random, scheme, EXPERTS, HIDDEN, INTERMEDIATE, gated=False)
        linear = pack(core, random, scheme, 1, INTERMEDIATE, HIDDEN, gated=False)
        for tokens in TOKENS:
            x = (random.random_sample((tokens, HIDDEN)) - 0.5).astype(np.float32)
            ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
            weights = random.random_sample((tokens, TOP_K)).astype(np.float32)
            out = np.empty_like(x)
            core.moe(x, ids, weights, gate_up, down, out, _SILU, True, 1.702, 7.0, False)
            results[f"{scheme} experts, {tokens} tokens"] = out
            out = np.empty((tokens, INTERMEDIATE), np.float32)
            core.linear(x, linear, out)
            results[f"{scheme} linear, {tokens} tokens"] = out
    return results


def main() -> None:
    core = load_core(sys.argv[1])
    np.savez(sys.argv[2], isa=core.isa(), **compute(core))


if __name__ == "__main__":
    main()
