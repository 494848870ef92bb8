"""What a checkpoint is, what of it would be loaded and into how much memory, and what would stop the load.

Headers and config.json tell all of that: no weights are read, and transformers is not needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from math import prod
from typing import Any, ParamSpec, TypeVar

from cpumoe import cpu
from cpumoe.checkpoints.architectures import ExpertsFacts, text_config
from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint, TensorCheck
from cpumoe.checkpoints.contents import (
    KINDS,
    LINEARS,
    NOT_LOADED,
    ORDER,
    OTHER,
    PER_MLP,
    SUFFIXES,
    Part,
    Problems,
    bits_per_weight,
    experts_bytes,
    experts_weights,
    linear_bytes,
    offers,
    total,
)
from cpumoe.checkpoints.expert_sources import FLOAT_DTYPES, ExpertSource, QuantizedPerExpert
from cpumoe.checkpoints.formats.compressed_tensors import LinearFormat, StoredTensor
from cpumoe.checkpoints.layer_shapes import Sizes
from cpumoe.checkpoints.loading import (
    EXPERT,
    FITS_ALL_SIZES,
    QUANTIZED_SUFFIXES,
    architecture_if_needed,
    check_layers_behind,
    expert_prefixes,
    experts_of_layer,
    find_linears,
    layers_prefix,
    prediction_layers,
    stored_weight_shape,
)
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import Scheme

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: Makes the whole configuration of config.json; None where nobody can be asked, ValueError for what is wrong with it.
CompleteConfig = Callable[[Mapping[str, Any]], dict[str, Any] | None]


class Survey:
    """All that headers and config.json tell. What goes wrong on the way is noted, and the rest is told as well."""

    def __init__(
        self, checkpoint: Checkpoint, scheme: Scheme | None = None, complete: CompleteConfig | None = None
    ) -> None:
        """Looks at everything but the weights.

        Args:
            checkpoint: to look at.
            scheme: what the experts of a float checkpoint would be quantised to.
            complete: adds to config.json what the model's class would; None to take it as it stands.
        """
        self.checkpoint = checkpoint
        self.config = checkpoint.text_config  # as it stands, or with all that transformers adds to it
        self._scheme = scheme
        self._sentences: list[str] = []
        self._check = TensorCheck(checkpoint)
        self.is_quantized = checkpoint.quantization_section is not None
        if self.is_quantized and scheme is not None:
            raise UnsupportedScheme(f"scheme {scheme} for a checkpoint that is quantised already; leave it out")
        self.quantization = self._try(lambda: checkpoint.quantization)
        is_served = not self.is_quantized or self.quantization is not None
        self.architecture = self._try(architecture_if_needed, checkpoint)
        self._try(checkpoint.check_config)
        completed = None if complete is None else self._try(complete, checkpoint.config)
        self.config = text_config(completed or checkpoint.config)
        self.facts = None
        if self.architecture is not None and self._try(lambda: checkpoint.facts) is not None:
            self.facts = self._try(self.architecture.facts, self.config)
        self._prefix = self._try(layers_prefix, checkpoint)
        self._kinds = {name: self._kind(name) for name in checkpoint.names}
        self._mark_prediction_layers()
        self.sources = dict(self._find_experts()) if is_served else {}
        self.linears = (self._try(find_linears, checkpoint, self._check) if is_served else None) or {}
        if is_served:
            self._try(check_layers_behind, checkpoint, self._check)
            self._try(self._check_tensors)
        self.parts = self._parts()

    def _try(self, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T | None:
        try:
            return function(*arguments, **named)
        except ValueError as problem:
            if str(problem) not in self._sentences:  # many layers may have the same
                self._sentences.append(str(problem))
            return None

    @property
    def problems(self) -> Problems:
        lists = (self._check.missing, self._check.wrong, self._check.extra, self._sentences)
        return Problems(*(list(dict.fromkeys(found)) for found in lists))  # two checks may find the same

    # ---- what is there ---------------------------------------------------------------------------------------------

    def _find_experts(self) -> Iterator[tuple[str, ExpertSource]]:
        """Prefix on disk, and the experts of one layer."""
        if self.facts is None or self.architecture is None or self._prefix is None:
            return
        for layer in self.facts.layers:
            module = f"{self._prefix}{layer}.{self.architecture.experts[0]}"
            # Experts that stay in float are checked like those that are quantised on load.
            source = self._try(experts_of_layer, self.checkpoint, self.facts, module, self._scheme or FITS_ALL_SIZES)
            if source is not None:
                source.check(self._check)
                yield source.prefix, source

    def _kind(self, name: str) -> str:
        module = name.rpartition(".")[0]
        if self.architecture is not None and module.endswith(self.architecture.routers):
            return "router"
        return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)

    def _mark_prediction_layers(self) -> None:
        """Layers behind the last, which predict further tokens, are left where they are."""
        found = self._try(prediction_layers, self.checkpoint) or ()
        self._kinds |= {name: NOT_LOADED for name in self._kinds if name.startswith(found)}

    def _parts(self) -> list[Part]:
        parts: dict[tuple[str, str | None, str], Part] = {}
        modules: dict[tuple[str, str | None, str], set[str]] = defaultdict(set)
        float_bytes = cpu.float_dtype()[0].itemsize
        for name, kind in self._kinds.items():
            info, module = self.checkpoint.info(name), name.rpartition(".")[0]
            if kind == "experts" and (match := EXPERT.search(name)) is not None:
                module = name[: match.end()].removesuffix(".")
            key = (kind, *self._scheme_and_form(module))
            part = parts.setdefault(key, Part(*key))
            modules[key].add(module)
            part.disk_bytes += info.bytes
            part.dtypes = sorted({*part.dtypes, info.dtype})
            if part.scheme is not None:
                continue
            if info.dtype not in FLOAT_DTYPES and kind != NOT_LOADED:  # how many values that is, the scheme would know
                part.parameters = part.memory_bytes = None
            elif part.parameters is not None and part.memory_bytes is not None:
                part.parameters += prod(info.shape)
                part.memory_bytes += 0 if kind == NOT_LOADED else prod(info.shape) * float_bytes
        for key, part in parts.items():
            part.modules = len(modules[key])
            if part.scheme is not None:
                sizes = [self._packed_size(module) for module in sorted(modules[key])]
                part.parameters, part.memory_bytes = sum(s[0] for s in sizes), sum(s[1] for s in sizes)
        return sorted(parts.values(), key=lambda part: (ORDER.index(part.kind), str(part.scheme), part.form))

    def _scheme_and_form(self, module: str) -> tuple[str | None, str]:
        """Scheme of a module in memory (None for float) and its form on disk."""
        if module in self.linears:
            form = self.linears[module].format
            return str(form.scheme), form.form
        source = self.sources.get(module)
        if isinstance(source, QuantizedPerExpert):
            return str(source.config.scheme), source.format.form
        return None if source is None or self._scheme is None else str(self._scheme), "float"

    def _packed_size(self, module: str) -> tuple[int, int]:
        """Number of weights of a packed module (scales and biases do not count), and its bytes in memory."""
        if module in self.linears:
            linear = self.linears[module]
            return linear.rows * linear.columns, self._try(linear_bytes, self.checkpoint, linear) or 0
        config = self.sources[module].config
        return experts_weights(config), self._try(experts_bytes, config) or 0

    # ---- what is wrong ---------------------------------------------------------------------------------------------

    def _check_tensors(self) -> None:
        self._check_weight_shapes()
        self._check_modules()
        if self.facts is not None and self._prefix is not None:
            self._check_experts(self._prefix, self.facts)
            self._check_linears(self._prefix, set(self.facts.layers))
            self._check_routers(self._prefix, self.facts)
            self._check_dense(self._prefix, self.facts)
            self._check_ends(self._prefix, self.facts.hidden_size)
            self._check_layers(self._prefix, set(self.facts.layers))

    def _check_experts(self, prefix: str, facts: ExpertsFacts) -> None:
        """No experts but those that were found, under any spelling; a layer that was refused is not searched."""
        architecture = self.checkpoint.architecture
        for layer in facts.layers:
            spellings = expert_prefixes(architecture, f"{prefix}{layer}.{architecture.experts[0]}")
            if not self.sources.keys().isdisjoint(spellings):
                self._check.nothing_else_under(*(f"{spelling}." for spelling in spellings))

    def _check_weight_shapes(self) -> None:
        """The sizes that ``pack-quantized`` files give themselves."""
        expected = {name: (linear.rows, linear.columns) for name, linear in self.linears.items()}
        for source in self.sources.values():
            if isinstance(source, QuantizedPerExpert):
                hidden, inner = source.config.hidden_size, source.config.intermediate_size
                sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
                for expert in range(source.config.local_experts):
                    expected.update(zip(source.linear_names(expert), sizes, strict=True))
        for name, size in expected.items():
            told = stored_weight_shape(self.checkpoint, name)
            if told is not None and told != size:
                self._check.wrong.append(f"{name}.weight_shape says {list(told)}, {list(size)} is accepted")

    @property
    def _tied(self) -> bool | None:
        """Whether the head is the embeddings; None if config.json does not say."""
        key = "tie_word_embeddings"
        told = self.config.get(key, self.checkpoint.config.get(key))
        return told if isinstance(told, bool) else None

    def _check_modules(self) -> None:
        """Modules that are quantised where config.json says that they are not, and the reverse."""
        for name, kind in self._kinds.items():
            module, _, suffix = name.rpartition(".")
            if module in self.linears or kind in ("experts", NOT_LOADED):
                continue
            info, form = self.checkpoint.info(name), self._format_of(name)
            if suffix in QUANTIZED_SUFFIXES:
                self._check.extra.append(name)
            elif form is not None and not (kind == "lm_head" and self._tied):
                self._check.wrong.append(f"{name} is {info}; {form.scheme}, {form.form} is what config.json says")
            elif info.dtype not in FLOAT_DTYPES:
                self._check.wrong.append(f"{name} is {info}; {' or '.join(FLOAT_DTYPES)} is accepted")

    def _format_of(self, tensor: str) -> LinearFormat | None:
        """How config.json says that a linear is held, for the name of its weight; None for all that is float."""
        module, _, suffix = tensor.rpartition(".")
        if self.quantization is None or suffix != "weight" or self._kind(tensor) not in LINEARS:
            return None
        return self.quantization.format_of(module)

    def _check_routers(self, prefix: str, facts: ExpertsFacts) -> None:
        # Besides the router of the experts, a family may have gates of shared experts.
        spellings = [path for path in self.checkpoint.architecture.routers if "shared" not in path]
        for layer in facts.layers:
            names = [f"{prefix}{layer}.{path}.weight" for path in spellings]
            found = next((name for name in names if name in self.checkpoint), names[0])
            self._check.expect(found, StoredTensor(FLOAT_DTYPES, (facts.experts, facts.hidden_size)))
            for suffix in ("bias", "e_score_correction_bias"):
                name = f"{found.removesuffix('weight')}{suffix}"
                if name in self.checkpoint:
                    self._check.expect(name, StoredTensor(FLOAT_DTYPES, (facts.experts,)))

    def _check_linears(self, prefix: str, expert_layers: set[int]) -> None:
        """Attention, dense layers and shared experts: the sizes that follow from config.json."""
        architecture = self.checkpoint.architecture
        for layer in range(self.config["num_hidden_layers"]):
            beside = architecture.shared if layer in expert_layers else architecture.dense
            attention = architecture.attention(self.config)
            self._check_biases(f"{prefix}{layer}.", attention)
            for path, size in (attention | beside(self.config)).items():
                name = f"{prefix}{layer}.{path}"
                found = self._size(name)
                if found is None:
                    self._check.missing += self._stored(f"{name}.weight")
                elif found != size:
                    self._check.wrong.append(f"{name}.weight is {list(found)}, {list(size)} is accepted")

    def _check_biases(self, layer: str, sizes: Sizes) -> None:
        biases = self.checkpoint.architecture.biases
        told = self.config.get(biases.field)
        for path in (f"self_attn.{linear}" for linear in biases.linears):
            name = f"{layer}{path}.bias"
            if told is True and path in sizes:
                self._check.expect(name, StoredTensor(FLOAT_DTYPES, (sizes[path][0],)))
            elif told is False and name in self.checkpoint:
                self._check.extra.append(name)

    def _check_dense(self, prefix: str, facts: ExpertsFacts) -> None:
        """Gate, up and down of the layers without experts and of shared experts: one size between them."""
        path = self.checkpoint.architecture.experts[0].rpartition(".")[0]
        layers = set(range(self.config["num_hidden_layers"])) - set(facts.layers)
        blocks = {f"{prefix}{layer}.{path}" for layer in layers}
        blocks |= {name.rsplit(".", 2)[0] for name, kind in self._kinds.items() if kind == "shared experts"}
        for block in sorted(blocks):
            gate, up, down = (f"{block}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
            sizes = {name: self._size(name) for name in (gate, up, down)}
            inner = Counter(s[name == down] for name, s in sizes.items() if s is not None)
            for name, size in sizes.items():
                if size is None:
                    self._check.missing += self._stored(f"{name}.weight")
                    continue
                wide = inner.most_common(1)[0][0]
                accepted = (facts.hidden_size, wide) if name == down else (wide, facts.hidden_size)
                if size != accepted:
                    self._check.wrong.append(f"{name}.weight is {list(size)}, {list(accepted)} is accepted")

    def _size(self, module: str) -> tuple[int, ...] | None:
        """Rows and columns of a linear, whether quantised or not."""
        if module in self.linears:
            return self.linears[module].rows, self.linears[module].columns
        shape = self.checkpoint.info(f"{module}.weight").shape if f"{module}.weight" in self.checkpoint else ()
        return shape if len(shape) == 2 else None

    def _check_ends(self, prefix: str, hidden: int) -> None:
        """Embeddings, the last norm and the head, which every model of the table has, and nothing else but layers."""
        base = prefix.removesuffix("layers.")
        head = f"{base.removesuffix('model.')}lm_head."
        ends: dict[str, tuple[int, ...]] = {f"{base}norm.weight": (hidden,)}
        vocabulary = self.config.get("vocab_size")
        if isinstance(vocabulary, int):
            ends[f"{base}embed_tokens.weight"] = (vocabulary, hidden)
            if f"{head}weight" in self.checkpoint and head[:-1] not in self.linears:
                ends[f"{head}weight"] = (vocabulary, hidden)
        for name, shape in ends.items():
            self._check.expect(name, StoredTensor(FLOAT_DTYPES, shape))
        if self._tied is False and f"{head}weight" not in self.checkpoint and head[:-1] not in self.linears:
            self._check.missing.append(f"{head}weight")
        accepted = {*ends, *self._check.expected, f"{base}embed_tokens.weight", f"{head}weight"}
        self._check.extra += [
            name
            for name, kind in self._kinds.items()
            if not name.startswith(prefix) and name not in accepted and kind != NOT_LOADED
        ]

    def _check_layers(self, prefix: str, expert_layers: set[int]) -> None:
        """Whether layers have, besides experts, what their neighbours have; half of them or more decide."""
        count = self.config["num_hidden_layers"]
        # (with experts or without, None for both; name inside the layer) -> layer -> shape
        found: dict[tuple[bool | None, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
        for name, kind in self._kinds.items():
            match = LAYER.match(name)
            if match is None and name.startswith(prefix):  # the number of no layer
                self._check.extra.append(name)
            if match is None or match[1] != prefix or kind in ("experts", NOT_LOADED):
                continue
            layer, inside = int(match[2]), name[match.end() :]
            module, _, suffix = name.rpartition(".")
            if layer >= count:
                continue  # what is there and should not be has been noted
            if kind == OTHER or suffix not in SUFFIXES:
                self._check.extra.append(name)
                continue
            shape = self.checkpoint.info(name).shape
            if module in self.linears and suffix != "bias":  # one quantised layer may have a neighbour in float
                inside = f"{inside.removesuffix(suffix)}weight"
                shape = (self.linears[module].rows, self.linears[module].columns)
            found[layer in expert_layers if kind in PER_MLP else None, inside][layer] = shape
        for (with_experts, inside), shapes in found.items():
            peers = [i for i in range(count) if with_experts is None or (i in expert_layers) == with_experts]
            if 2 * len(shapes) < len(peers):
                self._check.extra += [f"{prefix}{i}.{inside}" for i in shapes]
                continue
            self._check.missing += [n for i in peers if i not in shapes for n in self._stored(f"{prefix}{i}.{inside}")]
            usual = Counter(shapes.values()).most_common(1)[0][0]
            model = next(f"{prefix}{i}.{inside} is {list(usual)}" for i, shape in shapes.items() if shape == usual)
            self._check.wrong += [
                f"{prefix}{i}.{inside} is {list(shape)} while {model}" for i, shape in shapes.items() if shape != usual
            ]

    def _stored(self, tensor: str) -> list[str]:
        """Tensors that a missing one stands for: those of a quantised linear for its weight."""
        form = self._format_of(tensor)
        return [tensor] if form is None else [f"{tensor.removesuffix('weight')}{name}" for name in form.tensors(1, 1)]

    # ---- the whole of it -------------------------------------------------------------------------------------------

    def offers(self) -> list[dict[str, Any]]:
        """What the experts of a float checkpoint would take, for every scheme that fits."""
        if self.is_quantized or self._scheme is not None:
            return []
        return offers([source.config for source in self.sources.values()])

    def to_json(self) -> dict[str, Any]:
        experts = [part for part in self.parts if part.kind == "experts"]
        weights = total([part.parameters for part in experts])
        dtype, reason = cpu.float_dtype()
        facts, problems = self.facts, self.problems
        return {
            "folder": str(self.checkpoint.folder),
            "files": len(self.checkpoint.files),
            "model_type": self.config.get("model_type"),
            "layers": self.config.get("num_hidden_layers"),
            "hidden_size": self.config.get("hidden_size"),
            "experts": None
            if facts is None
            else {
                "layers": len(facts.layers),
                "count": facts.experts,
                "per_token": facts.topk,
                "intermediate_size": facts.intermediate_size,
                "activation": str(facts.activation),
                "disk_bits_per_weight": bits_per_weight(sum(part.disk_bytes for part in experts), weights),
                "memory_bits_per_weight": bits_per_weight(total([part.memory_bytes for part in experts]), weights),
            },
            "quantized": self.is_quantized,
            "parts": [asdict(part) | {"held": part.held} for part in self.parts],
            "parameters": total([part.parameters for part in self.parts if part.kind != NOT_LOADED]),
            "disk_bytes": sum(part.disk_bytes for part in self.parts),
            "memory_bytes": total([part.memory_bytes for part in self.parts]),
            "float_dtype": str(dtype).removeprefix("torch."),
            "float_dtype_reason": reason,
            "schemes": self.offers(),
            "loads": not problems,
            "problems": asdict(problems),
        }
