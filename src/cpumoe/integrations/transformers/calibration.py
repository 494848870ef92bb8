"""Calibration: finds the inputs that the linears and experts of a float checkpoint get when it reads text.

The model runs one decoder layer at a time: all sequences go through a layer before the next one begins. Only the float
linears of that layer are in memory, and its experts are read one by one. A layer runs three times: first to see the
inputs of its linears, then with the linears quantised to see which tokens go to which expert, and last with the results
of the quantised experts, which give the inputs of the next layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.tensor_file import TensorFile, TensorFileWriter
from cpumoe.errors import CheckpointError
from cpumoe.integrations.transformers.llama4 import adapt_llama4
from cpumoe.integrations.transformers.packed_modules import PendingModule, replace_module
from cpumoe.integrations.transformers.tokenizer import load_tokenizer
from cpumoe.quantization.calibration_text import read_sequences
from cpumoe.quantization.gptq import InputStatistics
from cpumoe.quantization.layer_writer import LayerWriter
from cpumoe.quantization.quantization_plan import PlannedLayer, QuantizationPlan, QuantizationReport
from cpumoe.quantization.source_watch import SourceWatch
from cpumoe.quantization.unfinished_work import NOTES

_SEQUENCES_AT_ONCE = 8  # that go through a layer together: this bounds the memory of attention


def calibration_ids(checkpoint: Checkpoint, text: Path, samples: int, length: int) -> Tensor:
    """Token ids [samples, length] int64 of the text, from the checkpoint's own tokenizer; fewer if the text is short.

    Raises for everything that can be wrong with the text or the tokenizer.
    """
    source = checkpoint.folder
    config = _text_config(checkpoint)
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{source} has no tokenizer that transformers can read, which calibration needs ({problem}); copy "
            f"tokenizer.json and tokenizer_config.json of the model into {source}, or leave the calibration out"
        ) from None
    length = min(length, getattr(config, "max_position_embeddings", length))
    ids = read_sequences(text, tokenizer, samples, length)
    if (largest := int(ids.max())) >= (known := config.vocab_size):
        raise CheckpointError(
            f"{source}: the tokenizer gives token {largest}, and the model knows {known}; "
            f"put the tokenizer of this model into {source}"
        )
    return ids


def _text_config(checkpoint: Checkpoint) -> Any:
    return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True).get_text_config()


class ExpertRecorder(PendingModule):
    """Takes the place of a layer's experts: records the calls, and later returns results that were made for them."""

    def __init__(self, top_level: nn.Module) -> None:
        super().__init__()
        self.num_experts = getattr(top_level, "num_experts", None)
        self.recording = False
        self.inputs: list[Tensor] = []
        self.ids: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.answers: list[Tensor] = []
        self.weight_on_input = False

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, ids: Tensor, weights: Tensor, *, apply_router_weight_on_input: bool = False
    ) -> Tensor:
        if self.answers:
            return self.answers.pop(0)
        if self.recording:
            self.inputs.append(hidden_states)
            self.ids.append(ids)
            self.weights.append(weights)
            self.weight_on_input = apply_router_weight_on_input
        return torch.zeros_like(hidden_states)

    def compute_answers(self, expert: Callable[[int, Tensor, Tensor], Tensor], num_experts: int) -> None:
        """Makes the results of the recorded calls.

        ``expert(number, its tokens [rows, H], all tokens [tokens, H])`` gives [rows, H]. Every expert is called once,
        in order, even if no token chose it.
        """
        lengths = [len(part) for part in self.inputs]
        x, ids, weights = torch.cat(self.inputs), torch.cat(self.ids), torch.cat(self.weights).to(torch.float32)
        self.inputs, self.ids, self.weights = [], [], []  # frees the largest tensors of all as early as possible
        x = x.to(torch.float32)
        out = torch.zeros_like(x)
        for number in range(num_experts):
            token, slot = torch.where(ids == number)
            weight = weights[token, slot].unsqueeze(-1)
            rows = x[token]
            if self.weight_on_input:
                out.index_add_(0, token, expert(number, rows * weight, x))
            else:
                out.index_add_(0, token, expert(number, rows, x) * weight)
        self.answers = list(out.split(lengths))


def run_calibrated(
    plan: QuantizationPlan, shards: list[Path], work: Path, report: QuantizationReport, ids: Tensor, watch: SourceWatch
) -> None:
    """Quantises every layer that has no file yet, using the inputs that it gets for ids [samples, length]."""
    config = _text_config(plan.checkpoint)
    report.tokens = ids.numel()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config)  # made again on the CPU: its buffers are in no file
    decoder.norm = nn.Identity()  # nothing after the layers is needed
    run = _Run(plan, shards, work, report, watch)
    with tqdm(total=len(plan.layers), desc="Calibrating", unit="layer", disable=None) as bar:
        for index, layer in enumerate(decoder.layers):
            layer.forward = partial(run.layer, index, layer, layer.forward, bar)
        with torch.no_grad():
            decoder(inputs_embeds=_embeddings(plan, ids), use_cache=False)


def _embeddings(plan: QuantizationPlan, ids: Tensor) -> Tensor:
    """The input of the first layer, [samples, length, H] fp32."""
    name = next((n for n in plan.outside if n.endswith("embed_tokens.weight")), None)
    if name is None:
        raise CheckpointError(f"{plan.checkpoint.folder} has no embed_tokens.weight")
    return nn.functional.embedding(ids, plan.checkpoint.read(name)).to(torch.float32)


class _Run:
    """The state of one pass over the layers."""

    def __init__(
        self, plan: QuantizationPlan, shards: list[Path], work: Path, report: QuantizationReport, watch: SourceWatch
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._shards = shards
        self._work = work
        self._report = report
        self._done = next((i for i, path in enumerate(shards) if not path.exists()), len(shards))

    def layer(
        self, index: int, layer: nn.Module, forward: Callable[..., Tensor], bar: Any, hidden: Tensor, **options: Any
    ) -> Tensor:
        """The forward of a decoder layer: quantises the layer and returns its output, both [samples, length, H]."""
        bar.update()
        if index < self._done:  # an earlier run did this layer and kept the result
            return self._read_hidden(index) if index == self._done - 1 else hidden
        planned = self._plan.layers[index]
        _materialize(layer, planned)
        recorder = self._place_recorder(layer, planned)
        run = partial(_in_parts, forward, hidden, options)
        with LayerWriter(planned, self._shards[index], self._report, self._watch) as writer:
            statistics = _observe(layer, planned, run)
            for name in planned.linears:
                linear = layer.get_submodule(_in_layer(planned, name))
                linear.weight = nn.Parameter(writer.quantize_linear(name, statistics[name]), requires_grad=False)
            if recorder is not None:
                recorder.recording = True
                run()
                recorder.recording = False
                recorder.compute_answers(partial(_outputs, writer), planned.num_experts)
            result = run()
            self._write_hidden(index, result)
        if index > 0:
            self._hidden_path(index - 1).unlink(missing_ok=True)
        layer.to("meta")
        return result

    def _place_recorder(self, layer: nn.Module, planned: PlannedLayer) -> ExpertRecorder | None:
        if planned.expert_source is None:
            return None
        experts_path = planned.checkpoint.architecture.experts_paths[0]
        recorder = ExpertRecorder(layer.get_submodule(experts_path))
        replace_module(layer, experts_path, recorder)
        adapt_llama4(layer)
        return recorder

    def _hidden_path(self, index: int) -> Path:
        return self._work / NOTES / f"hidden-{index:05}.safetensors"

    def _write_hidden(self, index: int, hidden: Tensor) -> None:
        specs = {"hidden": (hidden.dtype, tuple(hidden.shape))}
        with TensorFileWriter(self._hidden_path(index), specs, {}) as writer:
            writer.write("hidden", hidden)

    def _read_hidden(self, index: int) -> Tensor:
        with TensorFile(self._hidden_path(index)) as file:
            return file.read("hidden")


def _outputs(writer: LayerWriter, number: int, inputs: Tensor, others: Tensor) -> Tensor:
    out = writer.quantize_expert(number, inputs, others)
    assert out is not None  # there are outputs whenever inputs are given
    return out


def _in_parts(forward: Callable[..., Tensor], hidden: Tensor, options: dict[str, Any]) -> Tensor:
    """Runs a layer on a few sequences at a time."""
    count = hidden.shape[0]

    def part(value: Any, rows: slice) -> Any:
        per_sequence = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == count and count > 1
        return value[rows] if per_sequence else value

    results: list[Tensor] = []
    for first in range(0, count, _SEQUENCES_AT_ONCE):
        rows = slice(first, first + _SEQUENCES_AT_ONCE)
        result = forward(hidden[rows], **{key: part(value, rows) for key, value in options.items()})
        results.append(result[0] if isinstance(result, tuple) else result)
    return torch.cat(results)


def _observe(layer: nn.Module, planned: PlannedLayer, run: Callable[[], Tensor]) -> dict[str, InputStatistics]:
    """Runs a layer and gathers statistics of the inputs of its linears to be quantised, by their names on disk."""
    statistics = {name: InputStatistics(columns) for name, (_, columns) in planned.linears.items()}

    def hook(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics[name].add(inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [
        layer.get_submodule(_in_layer(planned, name)).register_forward_pre_hook(partial(hook, name))
        for name in planned.linears
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return statistics


def _in_layer(planned: PlannedLayer, name: str) -> str:
    """The name that transformers has inside its layer for what is called ``name`` on disk."""
    inside = name.removeprefix(planned.prefix)
    experts_paths = planned.checkpoint.architecture.experts_paths
    block = experts_paths[0].rpartition(".")[0]
    for experts_path in experts_paths[1:]:  # other names of the block that holds the experts
        if inside.startswith(other := experts_path.rpartition(".")[0] + "."):
            return f"{block}.{inside.removeprefix(other)}"
    return inside


def _materialize(layer: nn.Module, planned: PlannedLayer) -> None:
    """Reads all tensors of a layer except its routed experts into memory, as fp32."""
    checkpoint, source = planned.checkpoint, planned.expert_source
    names = [n for n in checkpoint.names if n.startswith(planned.prefix)]
    if source is not None:
        names = [n for n in names if not n.startswith(f"{source.prefix}.")]
    for name in names:
        owner, _, attribute = _in_layer(planned, name).rpartition(".")
        module = layer.get_submodule(owner)
        value = checkpoint.read(name)
        value = value.to(torch.float32) if value.is_floating_point() else value
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        elif attribute in module._buffers:
            module._buffers[attribute] = value
        else:
            raise CheckpointError(f"{name} has no place in the layer that transformers makes")
    experts_path = None if source is None else checkpoint.architecture.experts_paths[0]
    missing = [
        n
        for n, p in layer.named_parameters()
        if p.is_meta and not (experts_path is not None and n.startswith(f"{experts_path}."))
    ]
    if missing:
        raise CheckpointError(f"{checkpoint.folder} lacks {planned.prefix}{missing[0]}")
