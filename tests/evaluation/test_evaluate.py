"""Perplexity, the comparison of two models and the expert counters, against computations that share no code."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_text_model import EXPERTS, POSITIONS, TEXT, VOCABULARY, tiny_model, tiny_tokenizer
from torch import Tensor, nn

import cpumoe
from cpumoe.evaluation.expert_load import ExpertLoad, count_expert_load, record_routing
from cpumoe.evaluation.perplexity import compare, perplexity


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def token_ids(tokenizer: Any, text: str = TEXT) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def log_probabilities(model: Any, context: list[int]) -> Tensor:
    """Of the token after the context, [vocabulary]."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([context])).logits[0, -1]
    return logits.double().log_softmax(-1)


def context_start(target: int, tokens: int, window: int, stride: int) -> int:
    """Where the window begins from which a token is predicted: the first one that ends at it or later."""
    if target <= window:
        return 0
    later = math.ceil((target - window) / stride)
    return min(window + later * stride, tokens - 1) - window


def test_perplexity_of_one_window(model: Any, tokenizer: Any) -> None:
    text = TEXT[:60]
    ids = torch.tensor([token_ids(tokenizer, text)])
    assert 10 < ids.shape[1] <= POSITIONS
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)  # transformers' own mean cross entropy
    found = perplexity(model, tokenizer, text)
    assert found.tokens == ids.shape[1] - 1
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.nats == pytest.approx(loss * found.tokens, rel=1e-5)
    assert found.bits_per_token == pytest.approx(loss / math.log(2), rel=1e-5)
    assert found.bytes == len(text.encode()) == len(text) + 1  # é has two
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / len(text.encode()))
    assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds) and found.seconds > 0
    assert found.to_json()["perplexity"] == found.perplexity


@pytest.mark.parametrize(("window", "stride"), [(16, 4), (16, None), (16, 16), (7, 3), (1, 1), (None, None), (48, 47)])
def test_perplexity_of_many_windows(model: Any, tokenizer: Any, window: int | None, stride: int | None) -> None:
    ids = token_ids(tokenizer)
    assert len(ids) > 2 * POSITIONS
    used = window or POSITIONS
    step = stride or used // 2
    expected = -sum(
        float(log_probabilities(model, ids[context_start(i, len(ids), used, step) : i])[ids[i]])
        for i in range(1, len(ids))
    )
    found = perplexity(model, tokenizer, TEXT, window=window, stride=stride)
    assert (found.window, found.stride, found.tokens) == (used, step, len(ids) - 1)
    assert found.nats == pytest.approx(expected, rel=1e-5)


def test_memory_is_that_of_one_window(model: Any, tokenizer: Any) -> None:
    shapes: list[tuple[int, ...]] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    steps: list[tuple[int, int]] = []
    found = perplexity(model, tokenizer, TEXT * 3, window=20, stride=5, progress=lambda *step: steps.append(step))
    hook.remove()
    assert shapes[0] == (1, 20, VOCABULARY) and set(shapes[1:-1]) == {(1, 5, VOCABULARY)}
    assert sum(shape[1] for shape in shapes) == found.tokens  # no prediction is computed twice
    assert steps[0] == (20, found.tokens) and steps[-1] == (found.tokens, found.tokens)
    assert len(steps) == len(shapes)


def test_training_mode_is_left_as_it_was(tokenizer: Any) -> None:
    model = tiny_model(attention_dropout=0.5)
    expected = perplexity(model, tokenizer, TEXT[:60])
    assert not model.training
    model.train()
    assert perplexity(model, tokenizer, TEXT[:60]).nats == expected.nats
    assert model.training


def test_refusals(model: Any, tokenizer: Any) -> None:
    for short in ("", "x"):
        with pytest.raises(ValueError, match=f"the text has {len(short)} tokens; 2 or more"):
            perplexity(model, tokenizer, short)
    for window in (0, POSITIONS + 1):
        with pytest.raises(ValueError, match=f"window={window}; 1 to {POSITIONS} \\(the model's positions\\)"):
            perplexity(model, tokenizer, TEXT, window=window)
    for stride in (0, 17):
        with pytest.raises(ValueError, match=f"stride={stride}; 1 to 16"):
            perplexity(model, tokenizer, TEXT, window=16, stride=stride)
    small = tiny_model(vocab_size=64)
    with pytest.raises(ValueError, match="the model has a vocabulary of 64"):
        perplexity(small, tokenizer, TEXT)
    with pytest.raises(ValueError, match="a vocabulary of 300, the float model of 64"):
        compare(model, small, tokenizer, TEXT)
    damaged = copy.deepcopy(model)
    damaged.model.norm.weight.data[3] = math.nan
    with pytest.raises(RuntimeError, match="predictions of tokens 1 to 16 are not finite"):
        perplexity(damaged, tokenizer, TEXT, window=16)
    with pytest.raises(RuntimeError, match="not finite"):
        compare(model, damaged, tokenizer, TEXT, window=16)


def test_a_model_beside_itself(model: Any, tokenizer: Any) -> None:
    for other in (model, copy.deepcopy(model)):
        found = compare(model, other, tokenizer, TEXT)
        assert found.kl == 0 and found.top1_agreement == 1
        # PyTorch's sums may differ in the last bit with the alignment of what they add.
        alone = pytest.approx(perplexity(model, tokenizer, TEXT).nats, rel=1e-12)
        assert found.model.nats == alone and found.float_model.nats == alone
        assert list(found.routing) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        assert all(agreement.shared == agreement.exact == 1 for agreement in found.routing.values())


def perturbed(model: Any) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return other


def test_comparison_with_a_perturbed_model(model: Any, tokenizer: Any) -> None:
    other = perturbed(model)
    text = TEXT[:60]  # one window: everything can be read off one forward pass
    ids = torch.tensor([token_ids(tokenizer, text)])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, output_router_logits=True) for m in (other, model))
    log_q, log_p = (output.logits[0, :-1].double().log_softmax(-1) for output in (ours, theirs))

    found = compare(other, model, tokenizer, text)
    assert found.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-4)
    assert found.kl > 1e-4
    assert found.top1_agreement == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()))
    assert found.model.nats == pytest.approx(perplexity(other, tokenizer, text).nats)
    assert found.float_model.nats == pytest.approx(perplexity(model, tokenizer, text).nats)
    for i, agreement in enumerate(found.routing.values()):
        chosen = [
            [set(row) for row in output.router_logits[i].topk(2).indices[: ids.shape[1] - 1].tolist()]
            for output in (ours, theirs)
        ]
        common = [len(a & b) for a, b in zip(*chosen, strict=True)]
        assert agreement.shared == pytest.approx(sum(common) / 2 / len(common))
        assert agreement.exact == pytest.approx(sum(c == 2 for c in common) / len(common))
        assert 0 < agreement.exact < agreement.shared < 1
    told = found.to_json()
    assert told["kl"] == found.kl and told["routing"][1]["layer"] == "model.layers.1.mlp.experts"


def test_comparison_over_many_windows_counts_every_token_once(model: Any, tokenizer: Any) -> None:
    """The other model also chooses one expert instead of two: the same set is then impossible."""
    other = perturbed(model)
    for layer in other.model.layers:
        layer.mlp.gate.top_k = 1
    ids, window, stride = token_ids(tokenizer), 16, 4
    kl, shared = 0.0, [0.0, 0.0]
    for i in range(1, len(ids)):
        context = ids[context_start(i, len(ids), window, stride) : i]
        log_q, log_p = log_probabilities(other, context), log_probabilities(model, context)
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        with torch.no_grad():
            ours, theirs = (
                m(input_ids=torch.tensor([context]), output_router_logits=True).router_logits for m in (other, model)
            )
        for layer in range(2):
            shared[layer] += float(ours[layer][-1].argmax() in theirs[layer][-1].topk(2).indices) / 2
    for first, second, weight in (
        (other, model, 1.0),  # one of the float model's two
        (model, other, 2.0),  # the only one of the float model
    ):
        found = compare(first, second, tokenizer, TEXT, window=window, stride=stride)
        for agreement, total in zip(found.routing.values(), shared, strict=True):
            assert agreement.shared == pytest.approx(weight * total / (len(ids) - 1))
            assert agreement.exact == 0
        assert found.model.nats == perplexity(first, tokenizer, TEXT, window=window, stride=stride).nats
        if second is model:
            assert found.kl == pytest.approx(kl / (len(ids) - 1), rel=1e-4)


def test_counters_agree_with_the_router(model: Any) -> None:
    seen: dict[str, list[int]] = {}

    def watch(layer: str) -> Any:
        return lambda module, inputs, output: seen.setdefault(layer, []).extend(output[2].flatten().tolist())

    layers = {f"model.layers.{i}.mlp.experts": model.model.layers[i].mlp.gate for i in range(2)}
    hooks = [gate.register_forward_hook(watch(layer)) for layer, gate in layers.items()]
    with count_expert_load(model) as load, record_routing(model) as routing, torch.no_grad():
        for shape in ((1, 7), (3, 5)):
            model(input_ids=torch.randint(0, VOCABULARY, shape))
    for hook in hooks:
        hook.remove()
    assert list(load.counts) == list(layers)
    for layer in layers:
        assert load.counts[layer].dtype == torch.int64
        assert load.counts[layer].tolist() == [seen[layer].count(expert) for expert in range(EXPERTS)]
        assert load.tokens[layer] == 7 + 15
        assert [tuple(ids.shape) for ids in routing[layer]] == [(7, 2), (15, 2)]
        assert torch.cat(routing[layer]).flatten().tolist() == seen[layer]


def test_nothing_stays_behind(model: Any) -> None:
    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    assert hooks() == 0
    with count_expert_load(model) as load:
        assert hooks() == 2
    assert hooks() == 0
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert not any(counts.any() for counts in load.counts.values())
    for watch in (count_expert_load, record_routing):
        with pytest.raises(KeyboardInterrupt), watch(model):
            raise KeyboardInterrupt
        assert hooks() == 0


def test_experts_of_cpumoe_and_ids_of_other_ranks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = cpumoe.Experts.quantize(torch.randn(4, 64, 32), torch.randn(4, 32, 32), "w4a8-g32")

    block = Block()
    ids = torch.tensor([[0, 3], [-1, 3], [-1, -1]], dtype=torch.int32)
    with count_expert_load(block) as load, record_routing(block) as routing:
        block.experts(torch.randn(3, 32), ids, torch.rand(3, 2))
    recorded = ids.tolist()
    ids.zero_()  # the recording is a copy
    assert routing["experts"][0].tolist() == recorded
    assert load.counts["experts"].tolist() == [1, 0, 0, 2] and load.tokens["experts"] == 3
    assert load.never_used() == {"experts": [1, 2]}
    assert load.imbalance("experts") == pytest.approx(2 / 0.75)
    load.add("experts", torch.tensor([[4, 1]]))  # E is what transformers writes for an expert of another rank
    assert load.counts["experts"].tolist() == [1, 1, 0, 2]


def test_models_whose_routing_cannot_be_seen(tokenizer: Any) -> None:
    for watch in (count_expert_load, record_routing):
        with pytest.raises(ValueError, match="Linear has no experts modules"):
            watch(nn.Linear(2, 2)).__enter__()
    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        interleave_moe_layer_step=1,
        max_position_embeddings=64,
        attention_chunk_size=64,
    )
    llama4 = transformers.Llama4ForCausalLM(config).eval()
    with pytest.raises(ValueError, match="Llama4TextExperts.*are not told which experts were chosen"):
        count_expert_load(llama4).__enter__()
    found = compare(llama4, llama4, tokenizer, TEXT[:40])
    assert found.kl == 0 and found.routing == {}


def test_calls_without_ids_are_refused(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    with count_expert_load(model), pytest.raises(ValueError, match=r"mlp\.experts .* without \[tokens, K\] ids"):
        experts(torch.randn(3, 64), torch.randn(3, 2), torch.randn(3, 2))


def test_table_and_json() -> None:
    load = ExpertLoad({f"model.layers.{i}.mlp.experts": 4 for i in (0, 2, 3)})
    load.add("model.layers.0.mlp.experts", torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1]]))
    load.add("model.layers.2.mlp.experts", torch.tensor([[2, 3]]))
    heading, first, second, third = load.table(hottest=2).splitlines()
    assert heading.split()[:3] == ["layer", "tokens", "max/mean"]
    assert first.split() == ["0", "5", "2.00", "0", "of", "4", "0", "(50.0%)", "1", "(30.0%)"]
    assert second.split() == ["2", "1", "2.00", "2", "of", "4", "2", "(50.0%)", "3", "(50.0%)"]
    assert third.split() == ["3", "0", "-", "4", "of", "4", "no", "tokens"]
    assert load.to_json()["layers"][0] == {
        "layer": "model.layers.0.mlp.experts",
        "tokens": 5,
        "counts": [5, 3, 1, 1],
        "imbalance": 2.0,
        "never_used": [],
    }
    assert load.to_json()["layers"][2]["imbalance"] is None
    with pytest.raises(ValueError, match="hottest=0"):
        load.table(hottest=0)
    same_number = ExpertLoad({"encoder.0.experts": 2, "decoder.0.experts": 2})
    assert "decoder.0.experts" in same_number.table()


def test_heatmap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ExpertLoad({f"model.layers.{i}.mlp.experts": 128 if i else 64 for i in range(40)})
    for layer in list(load.counts)[:-1]:  # the last one saw nothing
        load.add(layer, torch.randint(0, 64, (50, 4)))
    picture = tmp_path / "load.png"
    load.heatmap(picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert 600 < width < 2500 and 400 < height < 2000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install 'cpumoe\[bench\]'"):
        load.heatmap(picture)
