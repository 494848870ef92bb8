"""Calibration: finds the inputs that the linears and experts of a float checkpoint get when it reads text.

The model runs one decoder layer at a time: all sequences go through a layer before the next one begins. Only the float
linears of that layer are in memory, and its experts are read one by one. A layer runs three times: first to see the
inputs of its linears, then with the linears quantised to see which tokens go to which expert, and last with the results
of the quantised experts, which give the inputs of the next layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint
from cpumoe.checkpoints.expert_sources import FloatExpertSource
from cpumoe.checkpoints.tensor_file import TensorFile, TensorFileWriter
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.integrations.transformers.layout.disk_names import DiskNames
from cpumoe.integrations.transformers.layout.expert_modules import expert_modules, marks_of
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.integrations.transformers.loading.packed_modules import PendingModule
from cpumoe.integrations.transformers.loading.special_experts import put_packed
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
    return config_of(checkpoint.config).get_text_config()


class ExpertRecorder(PendingModule):
    """Takes the place of a layer's experts: records the calls, and later returns results that were made for them."""

    def __init__(self, source: FloatExpertSource) -> None:
        super().__init__()
        self.source = source
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

    def compute_answers(self, expert: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        """Makes the results of the recorded calls.

        ``expert(number, its tokens [rows, H], all tokens [tokens, H])`` gives [rows, H]. Every expert is called once,
        in order, even if no token chose it.
        """
        lengths = [len(part) for part in self.inputs]
        x, ids, weights = torch.cat(self.inputs), torch.cat(self.ids), torch.cat(self.weights).to(torch.float32)
        self.inputs, self.ids, self.weights = [], [], []  # frees the largest tensors of all as early as possible
        x = x.to(torch.float32)
        out = torch.zeros_like(x)
        for number in range(self.source.config.local_experts):
            token, slot = torch.where(ids == number)
            weight = weights[token, slot].unsqueeze(-1)
            rows = x[token]
            if self.weight_on_input:
                out.index_add_(0, token, expert(number, rows * weight, x))
            else:
                out.index_add_(0, token, expert(number, rows, x) * weight)
        self.answers = list(out.split(lengths))


class _Done(Exception):  # it is no error: all layers have run
    """Ends a run of the model: what comes after its layers is not needed."""


def run_calibrated(
    plan: QuantizationPlan, shards: list[Path], work: Path, report: QuantizationReport, ids: Tensor, watch: SourceWatch
) -> None:
    """Quantises every layer that has no file yet, using the inputs that it gets for ids [samples, length]."""
    if not plan.is_one_stack:
        raise UnsupportedScheme("this model has several stacks of layers; calibration is for one, so leave it out")
    report.tokens = ids.numel()
    model = empty_model(config_of(plan.checkpoint.config), real_buffers=True)
    model.config.get_text_config().use_cache = False
    run = _Run(plan, shards, work, report, watch, model)
    with tqdm(total=len(plan.layers), desc="Calibrating", unit="layer", disable=None) as bar:
        run.prepare(bar)
        with torch.no_grad(), suppress(_Done):
            model(input_ids=ids, use_cache=False)


class _Run:
    """The state of one pass over the layers."""

    def __init__(
        self,
        plan: QuantizationPlan,
        shards: list[Path],
        work: Path,
        report: QuantizationReport,
        watch: SourceWatch,
        model: PreTrainedModel,
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._shards = shards
        self._work = work
        self._report = report
        self._model = model
        self._names = DiskNames(model, plan.checkpoint.names)
        self._done = next((i for i, path in enumerate(shards) if not path.exists()), len(shards))
        self._experts = {source.layout.module: source for layer in plan.layers for source in layer.experts}

    def prepare(self, bar: Any) -> None:
        """Reads what is outside of the layers, and puts ours in the place of what each layer does."""
        in_layers = self._layers_in_model()
        for index in range(len(self._plan.layers)):
            layer = self._model.get_submodule(f"{in_layers}{index}")
            layer.forward = partial(self.layer, index, f"{in_layers}{index}", layer.forward, bar)
        _materialize(self._model, "", self._names, self._plan.checkpoint, left_out=in_layers)

    def _layers_in_model(self) -> str:
        """What the names of the decoder layers start with in the model."""
        modules = [*self._experts, *(place.module for place in self._plan.layout.linears.values())]
        match = next((match for name in modules if (match := LAYER.match(name)) is not None), None)
        if match is None:
            raise CheckpointError(f"{self._plan.checkpoint.folder}: the model has no decoder layers")
        return match[1]

    def layer(self, index: int, name: str, forward: Callable[..., Any], bar: Any, *inputs: Any, **options: Any) -> Any:
        """The forward of a decoder layer: quantises the layer and returns its output, [samples, length, ...]."""
        bar.update()
        if "past_key_values" in options:  # some models make a cache unasked; a layer runs several times here
            options["past_key_values"] = None
        if index < self._done:  # an earlier run did this layer and kept the result of the last one that it did
            result = self._read_state(self._done - 1, options)
        else:
            result = self._quantize(index, name, partial(_in_parts, forward, inputs, options), options)
        if index == len(self._plan.layers) - 1:
            raise _Done
        return result

    def _quantize(self, index: int, name: str, run: Callable[[], Any], options: dict[str, Any]) -> Any:
        planned, layer = self._plan.layers[index], self._model.get_submodule(name)
        recorders = [
            self._place_recorder(path, source) for path, source in self._experts.items() if path.startswith(f"{name}.")
        ]
        _materialize(layer, f"{name}.", self._names, planned.checkpoint)
        with LayerWriter(planned, self._shards[index], self._report, self._watch) as writer:
            modules = {linear: self._plan.layout.linears[linear].module for linear in planned.linears}
            statistics = _observe(self._model, planned, modules, run)
            for linear, module in modules.items():
                weight = writer.quantize_linear(linear, statistics[linear])
                self._model.get_submodule(module).weight = nn.Parameter(weight, requires_grad=False)
            for recorder in recorders:
                recorder.recording = True
            if recorders:
                run()
            for recorder in recorders:
                recorder.recording = False
                if recorder.inputs:
                    recorder.compute_answers(partial(_outputs, writer, recorder.source))
                else:  # experts that text does not reach: of images
                    for number in range(recorder.source.config.local_experts):
                        writer.quantize_expert(recorder.source, number, None)
            result = run()
            self._write_state(index, result, options)
        if index > 0:
            self._hidden_path(index - 1).unlink(missing_ok=True)
        layer.to("meta")
        return result

    def _place_recorder(self, name: str, source: FloatExpertSource) -> ExpertRecorder:
        recorder, marks = ExpertRecorder(source), marks_of(self._model.get_submodule(name))
        assert marks is not None  # it was described as experts
        put_packed(self._model, name, marks, recorder)
        return recorder

    def _hidden_path(self, index: int) -> Path:
        return self._work / NOTES / f"hidden-{index:05}.safetensors"

    def _write_state(self, index: int, result: Any, options: dict[str, Any]) -> None:
        """Keeps what a layer gives, and what layers hand on to later ones in mappings, for a run that goes on later."""
        shared = {key: dict(value) for key, value in options.items() if isinstance(value, MutableMapping)}
        tensors: list[Tensor] = []
        structure = json.dumps(_without_tensors([result, shared], tensors))
        specs = {str(place): (tensor.dtype, tuple(tensor.shape)) for place, tensor in enumerate(tensors)}
        with TensorFileWriter(self._hidden_path(index), specs, {"structure": structure}) as writer:
            for place, tensor in enumerate(tensors):
                writer.write(str(place), tensor.contiguous())

    def _read_state(self, index: int, options: dict[str, Any]) -> Any:
        with TensorFile(self._hidden_path(index)) as file:
            structure = json.loads(file.metadata["structure"])
            result, shared = _with_tensors(structure, lambda place: file.read(str(place)))
        for key, value in shared.items():
            options[key].update(value)
        return result


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Nested tuples, lists and mappings of tensors as JSON has them; the tensors are added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_without_tensors(one, tensors) for one in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[key, _without_tensors(one, tensors)] for key, one in value.items()]}
    return {"value": value}


def _with_tensors(value: Any, read: Callable[[int], Tensor]) -> Any:
    """The reverse of ``_without_tensors``."""
    ((kind, content),) = value.items()
    if kind == "tensor":
        return read(content)
    if kind in ("tuple", "list"):
        parts = [_with_tensors(one, read) for one in content]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "mapping":
        return {key: _with_tensors(one, read) for key, one in content}
    return content


def _outputs(writer: LayerWriter, source: FloatExpertSource, number: int, inputs: Tensor, others: Tensor) -> Tensor:
    out = writer.quantize_expert(source, number, inputs, others)
    assert out is not None  # there are outputs whenever inputs are given
    return out


def _in_parts(forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs a layer on a few sequences at a time; the result is what the layer gives, a tensor or a tuple of them.

    Mappings in which layers leave something for later ones get what all parts leave, one part after the other.
    """
    count = (inputs[0] if inputs else options["hidden_states"]).shape[0]

    def part(value: Any, rows: slice) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(part(one, rows) for one in value)
        if isinstance(value, MutableMapping):
            kind: Any = type(value)
            return kind({key: part(one, rows) for key, one in value.items()})
        per_sequence = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == count and count > 1
        return value[rows] if per_sequence else value

    results: list[Any] = []
    left: dict[str, list[Any]] = {key: [] for key, value in options.items() if isinstance(value, MutableMapping)}
    for first in range(0, count, _SEQUENCES_AT_ONCE):
        rows = slice(first, first + _SEQUENCES_AT_ONCE)
        some = {key: part(value, rows) for key, value in options.items()}
        given = {key: dict(some[key]) for key in left}
        results.append(forward(*part(inputs, rows), **some))
        for key, parts in left.items():  # what the layer has put there, not what it was given
            parts.append({k: value for k, value in some[key].items() if value is not given[key].get(k)})
    for key, parts in left.items():
        options[key].update(_joined(parts))
    return _joined(results)


def _joined(parts: list[Any]) -> Any:
    """Results of parts of the sequences as one result: tensors one after the other, whatever they are nested in."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() > 0 else first
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(some)) for some in zip(*parts, strict=True))
    if isinstance(first, Mapping):
        return {key: _joined([one[key] for one in parts]) for key in first}
    return first


def _observe(
    model: nn.Module, planned: PlannedLayer, modules: dict[str, str], run: Callable[[], Any]
) -> dict[str, InputStatistics]:
    """Runs a layer and gathers statistics of the inputs of its linears to be quantised, by their names on disk."""
    statistics = {name: InputStatistics(columns) for name, (_, columns) in planned.linears.items()}

    def hook(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics[name].add(inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [
        model.get_submodule(module).register_forward_pre_hook(partial(hook, name)) for name, module in modules.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return statistics


def _materialize(
    module: nn.Module, prefix: str, names: DiskNames, checkpoint: Checkpoint, left_out: str | None = None
) -> None:
    """Reads the tensors of a module into memory, as fp32. Routed experts have been taken out of it before.

    Args:
        prefix: what the names of its tensors in the model start with.
        left_out: what the names of tensors start with that stay as they are.
    """
    experts = tuple(f"{name}." for name, _ in expert_modules(module))
    missing: list[str] = []
    for name, tensor in module.state_dict().items():
        if (left_out is not None and name.startswith(left_out)) or name.startswith(experts):
            continue
        value = names.read(names.stored_as(f"{prefix}{name}"), checkpoint.read)
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if value is None and tensor.is_meta:  # what is not, was made with the model
            missing.append(f"{prefix}{name}")
        if value is None:
            continue
        if attribute in owner._parameters:
            value = value.to(torch.float32) if value.is_floating_point() else value
            owner._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        else:
            owner._buffers[attribute] = value.to(torch.float32) if value.is_floating_point() else value
    if missing:
        raise CheckpointError(f"{checkpoint.folder} lacks {missing[0]}")
