"""Tensors of a model besides its experts, held against config.json: headers alone, and no transformers.

A load learns the sizes of these tensors from the model that transformers builds. Here they come from the table of
architectures; where config.json leaves something open, a layer is compared with its neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from cpumoe.checkpoints.architectures import Architecture, Config, ExpertsFacts, Sizes, Vectors
from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint, TensorCheck
from cpumoe.checkpoints.formats import QUANTIZED_SUFFIXES
from cpumoe.checkpoints.linear_sources import LinearSource, added_bias, is_tied_away
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES
from cpumoe.checkpoints.tensor_kinds import LINEARS, NOT_LOADED, OTHER, PER_MLP, kind_of


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a checkpoint by kind, and the quantised linears among them. What is wrong goes into ``check``."""

    checkpoint: Checkpoint
    config: Config  # as it stands, or with all that transformers adds to it
    architecture: Architecture | None
    kinds: Mapping[str, str]
    linears: Mapping[str, LinearSource]
    check: TensorCheck

    def check_modules(self) -> None:
        """Modules that are quantised where config.json says that they are not, and the reverse."""
        for name, kind in self.kinds.items():
            module, _, suffix = name.rpartition(".")
            if module in self.linears or kind in ("experts", NOT_LOADED):
                continue
            info, storage = self.checkpoint.info(name), self._storage_of(name)
            if suffix in QUANTIZED_SUFFIXES:
                self.check.extra.append(name)
            elif storage is not None:
                described = f"{storage.scheme}, {storage.format}"
                self.check.wrong.append(f"{name} is {info}; {described} is what config.json says")
            elif info.dtype not in FLOAT_DTYPES:
                self.check.wrong.append(f"{name} is {info}; {' or '.join(FLOAT_DTYPES)} is accepted")

    def check_model(self, architecture: Architecture, facts: ExpertsFacts, prefix: str) -> None:
        """Everything that a model of this family has. ``prefix`` is what the names of its layers start with."""
        expert_layers = set(facts.layers)
        attention = architecture.attention(self.config)
        vectors: Vectors = {f"{norm}.weight": facts.hidden_size for norm in architecture.norms}
        vectors |= architecture.attention_vectors(self.config)
        for layer in range(self.config["num_hidden_layers"]):
            beside = architecture.shared if layer in expert_layers else architecture.dense
            self._check_biases(f"{prefix}{layer}.", architecture, attention)
            self._check_sizes(f"{prefix}{layer}.", attention | beside(self.config))
            for path, size in vectors.items():
                self._check_vector(f"{prefix}{layer}.{path}", size)
        for layer in facts.layers:
            self._check_router(f"{prefix}{layer}.", architecture, facts)
            for path in architecture.shared_gates:
                self._expect(f"{prefix}{layer}.{path}.weight", 1, facts.hidden_size)
        dense_path = architecture.experts_paths[0].rpartition(".")[0]
        dense_layers = set(range(self.config["num_hidden_layers"])) - expert_layers
        self._check_gated_mlps({f"{prefix}{layer}.{dense_path}" for layer in dense_layers}, facts.hidden_size)
        self._check_ends(prefix, facts.hidden_size)
        suffixes = {"weight", "bias", *QUANTIZED_SUFFIXES, *architecture.router_biases}
        self._check_layers(prefix, expert_layers, suffixes | {path.rpartition(".")[2] for path in vectors})

    def _check_sizes(self, layer: str, sizes: Sizes) -> None:
        """Attention, dense layers and shared experts: the sizes that follow from config.json."""
        for path, size in sizes.items():
            name = f"{layer}{path}"
            found = self._size(name)
            if found is None:
                self.check.missing += self._stored(f"{name}.weight")
            elif found != size:
                self.check.wrong.append(f"{name}.weight is {list(found)}, {list(size)} is accepted")

    def _check_biases(self, layer: str, architecture: Architecture, sizes: Sizes) -> None:
        biases = architecture.attention_biases
        has_biases = self.config.get(biases.field)
        for path in (f"self_attn.{linear}" for linear in biases.linears):
            name = f"{layer}{path}.bias"
            if has_biases is True and path in sizes:
                self._expect(name, sizes[path][0])
            elif has_biases is False and name in self.checkpoint:
                self._check_added_bias(name)

    def _check_added_bias(self, name: str) -> None:
        """A bias that config.json says is not there: zeros that a tool has added, or one too many."""
        linear = self.linears.get(name.removesuffix(".bias"))
        bias = None if linear is None else added_bias(self.checkpoint, linear.name, linear.rows, linear.storage)
        if bias is None:
            self.check.extra.append(name)
        else:
            self.check.expect(name, bias)

    def _check_router(self, layer: str, architecture: Architecture, facts: ExpertsFacts) -> None:
        modules = [f"{layer}{path}" for path in architecture.router_paths]
        module = next((module for module in modules if f"{module}.weight" in self.checkpoint), modules[0])
        self._expect(f"{module}.weight", facts.expert_count, facts.hidden_size)
        for suffix in architecture.router_biases:
            self._expect(f"{module}.{suffix}", facts.expert_count)

    def _check_vector(self, name: str, size: int | None) -> None:
        if size is not None:
            self._expect(name, size)
        elif name not in self.checkpoint:
            self.check.missing.append(name)

    def _check_gated_mlps(self, dense: set[str], hidden_size: int) -> None:
        """Gate, up and down of the layers without experts, and of shared experts: one inner size for all three."""
        shared = {name.rsplit(".", 2)[0] for name, kind in self.kinds.items() if kind == "shared experts"}
        for mlp in sorted(dense | shared):
            gate, up, down = (f"{mlp}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
            sizes = {name: self._size(name) for name in (gate, up, down)}
            inner_sizes = Counter(size[name == down] for name, size in sizes.items() if size is not None)
            for name, size in sizes.items():
                if size is None:
                    self.check.missing += self._stored(f"{name}.weight")
                    continue
                inner = inner_sizes.most_common(1)[0][0]
                accepted = (hidden_size, inner) if name == down else (inner, hidden_size)
                if size != accepted:
                    self.check.wrong.append(f"{name}.weight is {list(size)}, {list(accepted)} is accepted")

    def _check_ends(self, prefix: str, hidden_size: int) -> None:
        """Embeddings, the last norm and the head, which every model of the table has, and nothing else but layers."""
        base = prefix.removesuffix("layers.")
        head, embeddings = f"{base.removesuffix('model.')}lm_head", f"{base}embed_tokens.weight"
        has_head = f"{head}.weight" in self.checkpoint and head not in self.linears
        self._expect(f"{base}norm.weight", hidden_size)
        vocabulary = self.config.get("vocab_size")
        if isinstance(vocabulary, int):
            self._expect(embeddings, vocabulary, hidden_size)
            if has_head:
                self._expect(f"{head}.weight", vocabulary, hidden_size)
        if self._tied is False and not has_head and head not in self.linears:
            self.check.missing.append(f"{head}.weight")
        accepted = self.check.expected | {embeddings, f"{head}.weight"}
        self.check.extra += [
            name
            for name, kind in self.kinds.items()
            if not name.startswith(prefix) and name not in accepted and kind != NOT_LOADED
        ]

    def _check_layers(self, prefix: str, expert_layers: set[int], suffixes: set[str]) -> None:
        """Whether layers have, besides experts, what their neighbours have; half of them or more decide."""
        count = self.config["num_hidden_layers"]
        # (with experts or without, None for both; name inside the layer) -> layer -> shape
        found: dict[tuple[bool | None, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
        for name, kind in self.kinds.items():
            match = LAYER.match(name)
            if match is None and name.startswith(prefix):  # what follows is not the number of a layer
                self.check.extra.append(name)
            if match is None or match[1] != prefix or kind in ("experts", NOT_LOADED):
                continue
            layer, inside = int(match[2]), name[match.end() :]
            module, _, suffix = name.rpartition(".")
            if layer >= count:
                continue  # noted by check_layers_behind
            if kind == OTHER or suffix not in suffixes:
                self.check.extra.append(name)
                continue
            shape = self.checkpoint.info(name).shape
            if module in self.linears and suffix != "bias":  # one quantised layer may have a neighbour in float
                inside = f"{inside.removesuffix(suffix)}weight"
                shape = (self.linears[module].rows, self.linears[module].columns)
            found[layer in expert_layers if kind in PER_MLP else None, inside][layer] = shape
        for (with_experts, inside), shapes in found.items():
            peers = [i for i in range(count) if with_experts is None or (i in expert_layers) == with_experts]
            self._compare(prefix, inside, shapes, peers)

    def _compare(self, prefix: str, inside: str, shapes: dict[int, tuple[int, ...]], peers: list[int]) -> None:
        """The same tensor in the layers ``peers``, of which those in ``shapes`` have it."""
        if 2 * len(shapes) < len(peers):
            self.check.extra += [f"{prefix}{i}.{inside}" for i in shapes]
            return
        self.check.missing += [n for i in peers if i not in shapes for n in self._stored(f"{prefix}{i}.{inside}")]
        usual = Counter(shapes.values()).most_common(1)[0][0]
        model = next(f"{prefix}{i}.{inside} is {list(usual)}" for i, shape in shapes.items() if shape == usual)
        self.check.wrong += [
            f"{prefix}{i}.{inside} is {list(shape)} while {model}" for i, shape in shapes.items() if shape != usual
        ]

    # ---- what is asked above ---------------------------------------------------------------------------------------

    @property
    def _tied(self) -> bool | None:
        """Whether the head is the embeddings; None if config.json does not say."""
        key = "tie_word_embeddings"
        value = self.config.get(key, self.checkpoint.config.get(key))
        return value if isinstance(value, bool) else None

    def _expect(self, name: str, *shape: int) -> None:
        self.check.expect(name, StoredTensor(FLOAT_DTYPES, shape))

    def _size(self, module: str) -> tuple[int, ...] | None:
        """Rows and columns of a linear, whether quantised or not."""
        if module in self.linears:
            return self.linears[module].rows, self.linears[module].columns
        shape = self.checkpoint.info(f"{module}.weight").shape if f"{module}.weight" in self.checkpoint else ()
        return shape if len(shape) == 2 else None

    def _storage_of(self, tensor: str) -> LinearStorage | None:
        """How config.json says that a linear is stored, for the name of its weight; None for all that is float."""
        module, _, suffix = tensor.rpartition(".")
        kind, quantization = kind_of(tensor, self.architecture), self.checkpoint.quantization
        if quantization is None or suffix != "weight" or kind not in LINEARS:
            return None
        storage = quantization.storage_of(module)
        if storage is not None and kind == "lm_head" and self._tied and is_tied_away(self.checkpoint, module, storage):
            return None
        return storage

    def _stored(self, tensor: str) -> list[str]:
        """Tensors that a missing one stands for: those of a quantised linear for its weight."""
        storage = self._storage_of(tensor)
        if storage is None:
            return [tensor]
        return [f"{tensor.removesuffix('weight')}{suffix}" for suffix in storage.tensors(1, 1)]
