"""What ranks do in the tests of whole models; see test_ranked_models.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from every_architecture import write_family
from random_layers import relative_error
from rank_processes import Cases
from tiny_architectures import write_float, write_quantized
from torch import Tensor
from word_checkpoints import write_gptq

import cpumoe
from cpumoe import ParallelLayout
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.integrations.transformers.adapter import explanation
from cpumoe.layers.parallel_layout import Exchange, ExpertPlacement
from cpumoe.parallel.ranks import Ranks

TOLERANCE = 1e-5
#: Linears in int8 can make more of the last bit of a float than it was: some value is rounded to the next integer.
ROUNDING_TOLERANCE = 3e-2
#: The same in int16. 1.5e-5 was seen with four ranks, where the model with float experts stays below 1e-5.
INT16_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Model:
    """A small model: how its checkpoint is written, and how it is loaded.

    ``left_bytes``: of linears that one process leaves to transformers to read; None where a rank reads more than its
    share.
    """

    write: Callable[[Path], object]
    options: dict[str, Any] = field(default_factory=dict)
    left_bytes: int | None = None
    tolerance: float = TOLERANCE


_HEAD_BYTES = 128 * 64 * 4  # of a head in float


def _float(architecture: str, **changes: Any) -> Callable[[Path], object]:
    return lambda folder: write_float(folder, architecture, **changes)


def _quantized(architecture: str, scheme: str, form: str, **changes: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        write_quantized(
            write_float(folder.with_name(f"{folder.name}-source"), architecture, **changes), folder, scheme, form
        )

    return write


def _gptq(folder: Path) -> None:
    source = write_float(folder.with_name(f"{folder.name}-source"), "mixtral", intermediate_size=128)
    write_gptq(source, folder)


_FOUR_KV = {"num_key_value_heads": 4}
_WIDE = {"moe_intermediate_size": 128}

MODELS = {
    "qwen3_moe": Model(_float("qwen3_moe", **_WIDE, **_FOUR_KV), {"scheme": "w4a8-g32"}),
    "qwen3_moe, slices of two sizes": Model(
        _float("qwen3_moe", moe_intermediate_size=224, **_FOUR_KV), {"scheme": "w4a8-g32"}
    ),
    "qwen3_moe, one expert": Model(_float("qwen3_moe", num_experts_per_tok=1, **_WIDE, **_FOUR_KV)),
    "qwen3_moe, all in int8": Model(
        _float("qwen3_moe", **_WIDE), {"scheme": "w8a8-g32", "linears": "w8a8"}, 0, ROUNDING_TOLERANCE
    ),
    "qwen3_moe, stored in int4": Model(
        _quantized("qwen3_moe", "w4a8-g32", "pack-quantized", **_WIDE, **_FOUR_KV), {}, _HEAD_BYTES, ROUNDING_TOLERANCE
    ),
    "gpt_oss": Model(_float("gpt_oss", intermediate_size=128, **_FOUR_KV), {"scheme": "w4a16-g32"}),
    "deepseek_v3": Model(_float("deepseek_v3", **_WIDE), {"scheme": "w8a16"}),
    "mixtral, GPTQ": Model(_gptq, {}, _HEAD_BYTES),
    "qwen3_next": Model(lambda folder: write_family(folder, "qwen3_next", **_WIDE)),
    "qwen3_next, w8a16": Model(
        lambda folder: write_family(folder, "qwen3_next", **_WIDE), {"scheme": "w8a16"}, tolerance=INT16_TOLERANCE
    ),
    "kimi_linear": Model(lambda folder: write_family(folder, "kimi_linear", **_WIDE)),
}  # fmt: skip


def write_models(folder: Path) -> None:
    """All checkpoints, and what their models answer in one process."""
    reading = _Reading()
    for name, model in MODELS.items():
        model.write(folder / name)
        seen = _seen(_load(folder / name, **model.options))
        torch.save(vars(seen) | {"read": reading.taken()}, folder / f"{name}.pt")
    reading.end()


#: For four ranks some of them are enough.
FOR_FOUR = ["qwen3_moe", "qwen3_moe, slices of two sizes", "qwen3_moe, one expert", "gpt_oss", "deepseek_v3"]
FOR_FOUR += ["qwen3_next", "qwen3_next, w8a16"]


def _load(folder: Path, **options: Any) -> Any:
    return cpumoe.load_model(folder, dtype=torch.float32, **options).eval()


_TOKENS = torch.tensor([[5, 17, 40, 3, 88, 61, 9], [8, 2, 77, 64, 33, 12, 50]])


@dataclass
class Seen:
    """What a model answers: logits of prompts, of a step behind them, and greedy tokens."""

    prompt: Tensor
    step: Tensor
    tokens: list[int]
    key_heads: list[int]
    steps: str


@torch.no_grad()
def _seen(model: Any) -> Seen:
    first = model(input_ids=_TOKENS, use_cache=True)
    heads = [layer.keys.shape[1] for layer in first.past_key_values.layers if getattr(layer, "keys", None) is not None]
    second = model(input_ids=_TOKENS[:, :1], past_key_values=first.past_key_values, use_cache=True)
    greedy = model.generate(_TOKENS[:1], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    return Seen(first.logits, second.logits, greedy[0].tolist(), heads, explanation(model))


class _Reading:
    """Counts the bytes of tensors that are read."""

    def __init__(self) -> None:
        self._files: list[TensorFile] = []
        self._stock = stock = TensorFile.__init__

        def counted(file: TensorFile, *arguments: Any) -> None:
            self._files.append(file)
            stock(file, *arguments)

        TensorFile.__init__ = counted  # type: ignore[method-assign]

    def end(self) -> None:
        TensorFile.__init__ = self._stock  # type: ignore[method-assign]

    def taken(self) -> int:
        """Bytes since the last call."""
        total = sum(file.bytes_read for file in self._files)
        self._files.clear()
        return total


def layouts(size: int) -> dict[str, ParallelLayout]:
    found = [
        ParallelLayout(tp_size=size),
        ParallelLayout(tp_size=size, expert_parallel=True),
        ParallelLayout(dp_size=size),
        ParallelLayout(dp_size=size, expert_parallel=True),
        ParallelLayout(tp_size=size, expert_parallel=True, sequence_parallel=True),
        ParallelLayout(tp_size=size, expert_parallel=True, exchange=Exchange.ALL_TO_ALL),
        ParallelLayout(tp_size=size, expert_parallel=True, expert_placement_strategy=ExpertPlacement.ROUND_ROBIN),
    ]
    if size == 4:
        found += [
            ParallelLayout(tp_size=2, dp_size=2),
            ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True),
            ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True, exchange=Exchange.ALL_TO_ALL),
        ]
    return {f"{layout} {layout.exchange.value if layout.exchange else ''}".strip(): layout for layout in found}


def every_model(folder: str, names: list[str]) -> dict[str, str | None]:
    """Each model in each layout against the same model in one process."""
    reading, cases = _Reading(), Cases()
    size = Ranks.join().size
    for name in names:
        model = MODELS[name]
        saved = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        bytes_alone = saved.pop("read")
        alone = Seen(**saved)
        for layout_name, layout in layouts(size).items():
            cases.run(
                f"{name}, {layout_name}, {size} ranks",
                _compare, Path(folder) / name, model, layout, alone, bytes_alone, reading,
            )  # fmt: skip
    return cases.outcomes


def _compare(
    folder: Path, model: Model, layout: ParallelLayout, alone: Seen, bytes_alone: int, reading: _Reading
) -> None:
    ranks = Ranks.join(layout)
    spread = _load(folder, ranks=ranks, **model.options)
    read = reading.taken()
    found = _seen(spread)
    for own in (found.prompt, found.step):
        for other, theirs in enumerate(ranks.gather(own.contiguous())):
            assert torch.equal(theirs, own), f"rank {other} has other logits"
    if layout.expert_parallel and "one expert" in folder.name:
        assert torch.equal(found.prompt, alone.prompt)
        assert torch.equal(found.step, alone.step)
    for own, expected in ((found.prompt, alone.prompt), (found.step, alone.step)):
        error = relative_error(own, expected)
        assert error <= model.tolerance, f"the relative error is {error}"
    assert found.tokens == alone.tokens
    assert found.steps == alone.steps
    for own, whole in zip(found.key_heads, alone.key_heads, strict=True):
        group = ranks.group.size
        expected = whole // group if whole % group == 0 and "one call" in found.steps else whole
        assert own == expected, f"the cache has {own} heads of {whole}"
    if model.left_bytes is not None:
        whole = bytes_alone + model.left_bytes
        # Every rank reads the shapes of packed tensors, and the order of inputs that GPTQ has.
        if layout.tp_size == ranks.size:
            assert read <= whole / ranks.size * 1.1, f"{read} bytes were read of {whole}"


def more_of_models(folder: str, cache: str) -> dict[str, str | None]:
    """What is tried with one model alone."""
    reading, cases = _Reading(), Cases()
    ranks = Ranks.join(ParallelLayout(tp_size=2, expert_parallel=True))
    path = Path(folder) / "qwen3_moe"
    options = MODELS["qwen3_moe"].options
    model = _load(path, ranks=ranks, **options)
    cases.run("calls that need all heads", _all_heads, model, _load(path, **options))
    cases.run("a model of one rank cannot be saved", _not_saved, model, Path(cache) / "saved")
    reading.taken()
    cases.run("packed weights are kept", _kept, path, Path(cache), ranks, options, reading)
    for name, way in _WAYS.items():
        cases.run(name, way, path, options)
    return cases.outcomes


@torch.no_grad()
def _all_heads(model: Any, alone: Any) -> None:
    """Without a cache they go through; behind a step they cannot."""
    found = model(input_ids=_TOKENS, output_hidden_states=True)
    expected = alone(input_ids=_TOKENS, output_hidden_states=True)
    assert len(found.hidden_states) == len(expected.hidden_states)
    for own, one in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert relative_error(own, one) <= TOLERANCE
    # The cache of such a call has all heads: what comes behind it goes the same way.
    assert found.past_key_values.layers[0].keys.shape[1] == 4
    again = model(input_ids=_TOKENS[:, :1], past_key_values=found.past_key_values)
    expected = alone(input_ids=_TOKENS[:, :1], past_key_values=expected.past_key_values)
    assert relative_error(again.logits, expected.logits) <= TOLERANCE
    behind = model(input_ids=_TOKENS).past_key_values
    assert behind.layers[0].keys.shape[1] == 2
    for called in (model, model.model):
        for asked in ("output_hidden_states", "output_attentions"):
            _raises("hold the heads of this rank alone", lambda c=called, a=asked: c(  # type: ignore[misc]
                input_ids=_TOKENS[:, :1], past_key_values=behind, **{a: True}
            ))  # fmt: skip
    assert torch.isfinite(model(input_ids=_TOKENS[:, :1], past_key_values=behind).logits).all()


def _raises(text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError as problem:
        assert text in str(problem), str(problem)
    else:
        raise AssertionError(f"nothing was refused: {text}")


def _not_saved(model: Any, folder: Path) -> None:
    _raises("spread over ranks, of which none could save all of it", lambda: model.save_pretrained(folder))


@torch.no_grad()
def _kept(path: Path, cache: Path, ranks: Ranks, options: dict[str, Any], reading: _Reading) -> None:
    first = _load(path, ranks=ranks, cache=cache, **options)(input_ids=_TOKENS).logits
    packing = reading.taken()
    assert len(list(cache.rglob("*.safetensors"))) in (1, 2)  # the other rank may not be there yet
    second = _load(path, ranks=ranks, cache=cache, **options)(input_ids=_TOKENS).logits
    assert torch.equal(first, second)
    assert len(list(cache.rglob("*.safetensors"))) == 2
    restoring = reading.taken()
    assert restoring < packing, f"{restoring} bytes were read again of {packing}"


@torch.no_grad()
def _int8_cache(path: Path, options: dict[str, Any]) -> None:
    ranks = Ranks.join(ParallelLayout(tp_size=2))
    alone = _seen(_load(path, kv_cache="int8", **options))
    found = _seen(_load(path, kv_cache="int8", ranks=ranks, **options))
    assert relative_error(found.step, alone.step) <= ROUNDING_TOLERANCE
    assert found.steps == alone.steps


@torch.no_grad()
def _data_parallel(path: Path, options: dict[str, Any]) -> None:
    """Every rank has sequences of its own, of the same length or not."""
    ranks = Ranks.join(ParallelLayout(dp_size=2, expert_parallel=True))
    alone, spread = _load(path, **options), _load(path, ranks=ranks, **options)
    own = _TOKENS[ranks.rank : ranks.rank + 1, : 4 + 3 * ranks.rank]
    expected, found = alone(input_ids=own), spread(input_ids=own)
    assert relative_error(found.logits, expected.logits) <= TOLERANCE
    more = (alone, expected), (spread, found)
    behind = [m(input_ids=own[:, :1], past_key_values=out.past_key_values).logits for m, out in more]
    assert relative_error(behind[1], behind[0]) <= TOLERANCE


def _refused_rows(path: Path, options: dict[str, Any]) -> None:
    """A rank whose rows are refused tells the others, and all go on."""
    ranks = Ranks.join(ParallelLayout(dp_size=2, expert_parallel=True))
    alone, spread = _load(path, **options), _load(path, ranks=ranks, **options)
    tokens = _TOKENS[:1].clone()
    if ranks.rank == 1:
        tokens[0, 3] = 100000
    text = "token 100000" if ranks.rank == 1 else "rank 1 has refused its rows"
    with torch.no_grad():
        _raises(text, lambda: spread(input_ids=tokens))
        error = relative_error(spread(input_ids=_TOKENS).logits, alone(input_ids=_TOKENS).logits)
    assert error <= TOLERANCE


def _other_lengths(path: Path, options: dict[str, Any]) -> None:
    compare_own_sequences(path, ParallelLayout(dp_size=2, expert_parallel=True), options)


def own_sequences(folder: str) -> dict[str, str | None]:
    """Groups of ranks that generate different texts, one of them nothing at all."""
    cases = Cases()
    for name in ("qwen3_moe", "deepseek_v3", "kimi_linear"):
        for exchange in (None, Exchange.ALL_TO_ALL):
            layout = ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True, exchange=exchange)
            cases.run(f"{name}, {exchange}", compare_own_sequences, Path(folder) / name, layout, MODELS[name].options)
    return cases.outcomes


@torch.no_grad()
def compare_own_sequences(path: Path, layout: ParallelLayout, options: dict[str, Any]) -> None:
    ranks = Ranks.join(layout)
    alone, spread = _load(path, **options), _load(path, ranks=ranks, **options)
    for new_tokens in ((3, 9), (0, 5), (7, 0), (40, 41)):
        own = new_tokens[ranks.layout.dp_rank]
        with cpumoe.own_sequences(spread):
            if own == 0:
                continue
            prompt = _TOKENS[ranks.layout.dp_rank :][:1, : own + 1]
            ask = {"max_new_tokens": own, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            assert spread.generate(prompt, **ask).tolist() == alone.generate(prompt, **ask).tolist()
    with cpumoe.own_sequences(alone):  # one rank: nothing to wait for
        pass


_WAYS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "int8 cache": _int8_cache,
    "data parallel": _data_parallel,
    "rows that are refused": _refused_rows,
    "sequences of other lengths": _other_lengths,
}
