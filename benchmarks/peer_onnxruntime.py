"""onnxruntime's QMoE, measured beside cpumoe."""

from __future__ import annotations

from typing import Any

import torch
from peer import (
    GROUPED,
    LayerWeights,
    Peer,
    PreparedPeer,
    repeated,
    scheme_obstacle,
    sentence,
    weights_per_expert,
)
from torch import Tensor

from cpumoe import _core
from cpumoe.bench.measure import Call
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import fitting_scheme
from cpumoe.layers.activation import Activation
from cpumoe.layers.nibbles import pack_nibbles
from cpumoe.layers.scheme import Scheme


class OnnxRuntimePeer(Peer):
    """The QMoE operator of onnxruntime's CPU package: 4-bit weights in blocks, int8 activations."""

    name = "onnxruntime"
    packages = ("onnx", "onnxruntime")
    building = 4.0  # for the model as built, as serialised and as read again, until the weights are packed

    def own_obstacle(self, shape: Shape) -> str | None:
        import onnxruntime

        if shape.activation not in ("silu", "swiglu_oai"):
            return f"activation {shape.activation!r}; QMoE on CPUs has silu and swiglu_oai with a gate"
        if (reason := scheme_obstacle(shape)) is not None:
            return reason
        size = self.bytes_per_expert(shape) * shape.num_experts
        if size >= 2**31:
            return f"a model of {size / 1e9:.1f} GB; ONNX files end at 2 GB"
        try:  # a tiny layer shows whether this release has the operator with all the options that are used here
            self._call(Shape("tiny", 128, 128, 2, 1), GROUPED, 0)
        except Exception as error:  # the package has a separate exception for every status
            return f"onnxruntime {onnxruntime.__version__} cannot run QMoE as wanted: {sentence(error)}"
        return None

    def bytes_per_expert(self, shape: Shape) -> float:
        # When packed: half a byte per weight, and for each block a scale and the sum of its weights, both floats.
        group = fitting_scheme(GROUPED, shape).group_size or shape.hidden
        return weights_per_expert(shape) * (1 / 2 + 8 / group)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        scheme = fitting_scheme(GROUPED, shape)
        calls = [self._call(shape, scheme, seed) for seed in range(self.copies(shape))]
        return self.prepared(shape, str(scheme), calls, self.bytes_per_expert(shape))

    def _call(self, shape: Shape, scheme: Scheme, seed: int) -> Call:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _core.thread_count()
        # Every copy has its own threads. Those of the previous copy must not spin while this one runs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        model = self._model(shape, scheme, seed)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        def call(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            # The operator chooses experts by one [tokens, experts] tensor and weighs them by another. As the weights
            # are positive, one tensor can be used for both, and the routing is exactly the one wanted.
            scores = torch.zeros((topk_ids.shape[0], shape.num_experts))
            scores.scatter_(1, topk_ids.to(torch.int64), topk_weights.to(torch.float32))
            routing = scores.numpy()
            x = hidden_states.to(torch.float32).numpy()
            (out,) = session.run(None, {"x": x, "choice": routing, "weight": routing})
            return torch.from_numpy(out).to(hidden_states.dtype)

        return call

    def _model(self, shape: Shape, scheme: Scheme, seed: int) -> bytes:
        """One QMoE node with its weights; gate and up rows alternate, as the operator requires."""
        from onnx import TensorProto, helper, numpy_helper

        weights = LayerWeights.random(shape, scheme, seed)
        tensors = {
            "gate_up": pack_nibbles(alternating(weights.gate_up.values)),
            "gate_up_scale": alternating(weights.gate_up.scales).to(torch.float32),
            "down": pack_nibbles(weights.down.values),
            "down_scale": weights.down.scales.to(torch.float32),
        }
        initializers = [numpy_helper.from_array(repeated(t, shape).numpy(), name) for name, t in tensors.items()]
        activation = Activation(shape.activation)
        plain = {"activation_alpha": 1.0, "activation_beta": 0.0}
        oai = {"activation_alpha": activation.alpha, "activation_beta": 1.0, "swiglu_limit": activation.limit}
        absent = [""] * 6  # no third product, no zero points
        node = helper.make_node(
            "QMoE",
            ["x", "choice", "gate_up", "gate_up_scale", "", "down", "down_scale", "", *absent, "weight"],
            ["out"],
            domain="com.microsoft",
            k=shape.topk,
            activation_type="swiglu",
            swiglu_fusion=1,  # gate and up in one product, rows alternating
            expert_weight_bits=4,
            block_size=scheme.group_size,
            accuracy_level=4,  # int8 activations
            normalize_routing_weights=0,
            **(plain if shape.activation == "silu" else oai),
        )

        def value(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", width])

        inputs = [value("x", shape.hidden), value("choice", shape.num_experts), value("weight", shape.num_experts)]
        graph = helper.make_graph([node], "experts", inputs, [value("out", shape.hidden)], initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        serialised: bytes = model.SerializeToString()
        return serialised


def alternating(rows: Tensor) -> Tensor:
    """[experts, gate rows before up rows, ...] -> [experts, gate and up rows in turn, ...]."""
    return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
