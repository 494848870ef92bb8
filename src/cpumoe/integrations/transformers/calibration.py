"""Calibration: what the linears and experts of a float checkpoint meet when it reads text.

The model runs one decoder layer at a time, each for all sequences before the next, with only that layer's float linears
in memory and experts read one by one. A layer runs three times: to see the inputs of its linears, then with those
quantised to see which tokens go to which expert, and then with the quantised experts' results, which are what the next
layer meets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.tensor_file import TensorFile, TensorFileWriter
from cpumoe.errors import CheckpointError
from cpumoe.integrations.transformers.llama4 import adapt_llama4
from cpumoe.integrations.transformers.model_plan import Pending, replace_module
from cpumoe.quantization.calibration_text import read_sequences
from cpumoe.quantization.gptq import InputStatistics
from cpumoe.quantization.layer_writer import LayerWriter
from cpumoe.quantization.quantization_plan import LayerPlan, QuantizationPlan, Report
from cpumoe.quantization.source_watch import SourceWatch
from cpumoe.quantization.unfinished_work import NOTES

_SEQUENCES_AT_ONCE = 8  # through a layer: bounds the memory of attention


def calibration_ids(checkpoint: Checkpoint, text: Path, samples: int, length: int) -> Tensor:
    """Token ids [samples, length] int64 of the text, by the checkpoint's own tokenizer; fewer if there are no more.

    Everything that can be wrong with the text or the tokenizer is found here.
    """
    source = checkpoint.folder
    config = _text_config(checkpoint)
    tokenizer = _tokenizer(source)
    length = min(length, getattr(config, "max_position_embeddings", length))
    ids = read_sequences(text, tokenizer, samples, length)
    if (largest := int(ids.max())) >= (known := config.vocab_size):
        raise CheckpointError(
            f"{source}: the tokenizer gives token {largest}, and the model knows {known}; "
            f"put the tokenizer of this model into {source}"
        )
    return ids


def _tokenizer(source: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        # Where there are no files of a tokenizer, transformers makes one that knows nothing but special tokens.
        problem = None if len(tokenizer) > len(tokenizer.added_tokens_decoder) else "it has no vocabulary"
    except (OSError, ValueError) as found:
        problem = str(found)
    if problem is not None:
        raise CheckpointError(
            f"{source} has no tokenizer that transformers can read, which calibration needs ({problem}); copy "
            f"tokenizer.json and tokenizer_config.json of the model into {source}, or leave the calibration out"
        )
    return tokenizer


def _text_config(checkpoint: Checkpoint) -> Any:
    return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True).get_text_config()


class ExpertRecorder(Pending):
    """Stands where a layer's experts are: notes who was called with what, and later answers with given results."""

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

    def answer(self, expert: Callable[[int, Tensor], Tensor], experts: int) -> None:
        """Asks ``expert(number, its tokens [rows, H])`` for every expert in turn, also those that no token chose."""
        lengths = [len(part) for part in self.inputs]
        x, ids, weights = torch.cat(self.inputs), torch.cat(self.ids), torch.cat(self.weights).to(torch.float32)
        self.inputs, self.ids, self.weights = [], [], []  # they are the largest that is held
        out = torch.zeros(x.shape, dtype=torch.float32)
        for number in range(experts):
            token, slot = torch.where(ids == number)
            weight = weights[token, slot].unsqueeze(-1)
            rows = x[token].to(torch.float32)
            if self.weight_on_input:
                out.index_add_(0, token, expert(number, rows * weight))
            else:
                out.index_add_(0, token, expert(number, rows) * weight)
        self.answers = list(out.split(lengths))


def run_calibrated(
    plan: QuantizationPlan, shards: list[Path], work: Path, report: Report, ids: Tensor, watch: SourceWatch
) -> None:
    """Quantises every layer whose file is not there yet, with the inputs that it meets for ids [samples, length]."""
    config = _text_config(plan.checkpoint)
    report.tokens = ids.numel()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config)  # again, on the CPU: its buffers are not stored
    decoder.norm = nn.Identity()  # only the layers are of interest
    run = _Run(plan, shards, work, report, watch)
    with tqdm(total=len(plan.layers), desc="Calibrating", unit="layer", disable=None) as bar:
        for index, layer in enumerate(decoder.layers):
            layer.forward = partial(run.layer, index, layer, layer.forward, bar)
        with torch.no_grad():
            decoder(inputs_embeds=_embeddings(plan, ids), use_cache=False)


def _embeddings(plan: QuantizationPlan, ids: Tensor) -> Tensor:
    """What the first layer meets, [samples, length, H] fp32."""
    name = next((n for n in plan.outside if n.endswith("embed_tokens.weight")), None)
    if name is None:
        raise CheckpointError(f"{plan.checkpoint.folder} has no embed_tokens.weight")
    return nn.functional.embedding(ids, plan.checkpoint.read(name)).to(torch.float32)


class _Run:
    """The state of one pass over the layers."""

    def __init__(
        self, plan: QuantizationPlan, shards: list[Path], work: Path, report: Report, watch: SourceWatch
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
        """Takes the place of a decoder layer: [samples, length, H] -> the same, from the quantised layer."""
        bar.update()
        if index < self._done:  # by an earlier run, which has left its result
            return self._read_hidden(index) if index == self._done - 1 else hidden
        plan = self._plan.layers[index]
        _materialize(layer, plan)
        recorder = self._place_recorder(layer, plan)
        run = partial(_in_parts, forward, hidden, options)
        with LayerWriter(plan, self._shards[index], self._report, self._watch) as writer:
            statistics = _observe(layer, plan, run)
            for name in plan.linears:
                linear = layer.get_submodule(_in_layer(plan, name))
                linear.weight = nn.Parameter(writer.quantize_linear(name, statistics[name]), requires_grad=False)
            if recorder is not None:
                recorder.recording = True
                run()
                recorder.recording = False
                recorder.answer(partial(_outputs, writer), plan.experts_count)
            result = run()
            self._write_hidden(index, result)
        if index > 0:
            self._hidden_path(index - 1).unlink(missing_ok=True)
        layer.to("meta")
        return result

    def _place_recorder(self, layer: nn.Module, plan: LayerPlan) -> ExpertRecorder | None:
        if plan.experts is None:
            return None
        path = plan.checkpoint.architecture.experts_paths[0]
        recorder = ExpertRecorder(layer.get_submodule(path))
        replace_module(layer, path, recorder)
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


def _outputs(writer: LayerWriter, number: int, inputs: Tensor) -> Tensor:
    out = writer.quantize_expert(number, inputs)
    assert out is not None  # it was given inputs
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


def _observe(layer: nn.Module, plan: LayerPlan, run: Callable[[], Tensor]) -> dict[str, InputStatistics]:
    """Runs a layer and gathers the inputs of the linears that are to be quantised, by their names on disk."""
    statistics = {name: InputStatistics(columns) for name, (_, columns) in plan.linears.items()}

    def hook(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics[name].add(inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [
        layer.get_submodule(_in_layer(plan, name)).register_forward_pre_hook(partial(hook, name))
        for name in plan.linears
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return statistics


def _in_layer(plan: LayerPlan, name: str) -> str:
    """Name inside transformers' layer of something named ``name`` on disk."""
    inside = name.removeprefix(plan.prefix)
    paths = plan.checkpoint.architecture.experts_paths
    block = paths[0].rpartition(".")[0]
    for path in paths[1:]:  # other names for the block that holds the experts
        if inside.startswith(other := path.rpartition(".")[0] + "."):
            return f"{block}.{inside.removeprefix(other)}"
    return inside


def _materialize(layer: nn.Module, plan: LayerPlan) -> None:
    """Reads everything of a layer but its routed experts into memory, as fp32."""
    checkpoint: Checkpoint = plan.checkpoint
    names = [n for n in checkpoint.names if n.startswith(plan.prefix)]
    if plan.experts is not None:
        names = [n for n in names if not n.startswith(f"{plan.experts.prefix}.")]
    for name in names:
        owner, _, attribute = _in_layer(plan, name).rpartition(".")
        module = layer.get_submodule(owner)
        value = checkpoint.read(name)
        value = value.to(torch.float32) if value.is_floating_point() else value
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        elif attribute in module._buffers:
            module._buffers[attribute] = value
        else:
            raise CheckpointError(f"{name} has no place in the layer that transformers makes")
    experts = "" if plan.experts is None else checkpoint.architecture.experts_paths[0] + "."
    left = [n for n, p in layer.named_parameters() if p.is_meta and not (experts and n.startswith(experts))]
    if left:
        raise CheckpointError(f"{plan.checkpoint.folder} lacks {plan.prefix}{left[0]}")
