"""Rewrite an ONNX graph with QDQ pairs so that onnxruntime multiplies integers; values stay as they are.

Its kernels for int8 want a convolution or product between a DequantizeLinear of its input, one of its weight, one of an
int32 bias, and the QuantizeLinear of its result. Trained models have a batch norm and a rectifier in between. What it
multiplies as floats nevertheless must be floats when it loads the file, and stay so. Its kernels for convolutions round
their results, those for products need not.

Symbols: w = (q - z) s, per output channel c; a batch norm multiplies by f_c = gamma_c / sqrt(var_c + eps).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

#: Operators of onnxruntime that multiply integers, each with the place of the weight among its inputs.
INTEGER_PRODUCTS = {"QLinearConv": 3, "QGemm": 3, "QLinearMatMul": 3, "ConvInteger": 1, "MatMulInteger": 1,
                    "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1, "MatMulNBits": 1}  # fmt: skip
#: Channels, of input and output, from which on a convolution is faster as a product of integers than in floats, though
#: its input is copied for each position of the kernel.
WIDE = 64
#: The end of a dimension, as ONNX's Slice writes it.
END = np.iinfo(np.int64).max
#: Operators whose results are some of their first input's values, across which rounding and rectifiers can be moved.
ORDERLY = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")


def fit_integer_kernels(model: ir.Model) -> None:
    """Fold batch norms into per-channel steps, move rectifiers behind QuantizeLinear, store biases as int32."""
    graph = model.graph
    for node in list(graph):
        before = _producer(node.inputs[0], "DequantizeLinear") if node.op_type == "QuantizeLinear" else None
        if before is not None and [*map(_array, before.inputs[1:])] != [*map(_array, node.inputs[1:])]:
            _shield(graph, before.outputs[0], node)  # onnxruntime would make one range of the two
        if node.op_type == "Conv" or (
            node.op_type == "Gemm"
            and _setting(node, "transB") == _setting(node, "alpha") == _setting(node, "beta") == 1
        ):
            weight = _producer(node.inputs[1], "DequantizeLinear")
            if weight is None or _array(weight.inputs[0]) is None:
                continue
            _fold_norm(graph, node, weight)
            _rectify_integers(graph, node)
            _quantize_bias(graph, node)
            _multiply_columns(graph, node)
    RemoveUnusedNodesPass()(model)


def keep_floats(model: ir.Model, executed: Any) -> bool:
    """Rewrite layers that onnxruntime does not execute as the graph says, or would execute slower than floats.

    - A weight that it multiplies as floats, but dequantizes at every call, becomes a product: it folds that when it
      loads the file, which still has the integers. So does a weight for MatMulNBits, which rounds the layer's input.
    - A float weight that it rounds to int8 on its own, between DequantizeLinear and QuantizeLinear, gets an operator
      behind it that returns its one input, which it neither looks through nor removes.

    Args:
        model: the graph.
        executed: an ONNX graph, what onnxruntime has made of it; layers keep their names.

    Returns:
        Whether anything has changed: then it may make something else of it.
    """
    constant = {tensor.name for tensor in executed.initializer}
    late = {node.output[0] for node in executed.node
            if node.op_type == "DequantizeLinear" and node.input[0] in constant}  # fmt: skip
    slow = {node.name for node in executed.node if node.op_type == "MatMulNBits" or late & set(node.input)}
    rounded = slow | {node.name for node in executed.node if node.op_type in INTEGER_PRODUCTS}
    behind = {node: [part for value in node.inputs if (part := _constant_behind(value)) is not None]
              for node in model.graph}  # fmt: skip
    late_parts = dict.fromkeys(part for node, parts in behind.items() if node.name in slow for part in parts)
    for part in late_parts:
        _fold_when_loaded(model.graph, part)
    changed = bool(late_parts)
    for node, parts in behind.items():
        if parts or node.name not in rounded or node.op_type not in ("Conv", "ConvTranspose", "Gemm"):
            continue
        while (after := _only_user(node)) is not None and after.op_type in ("BatchNormalization", "Relu", "Clip"):
            node = after
        if after is not None and after.op_type != "Max":
            _shield(model.graph, node.outputs[0], after)
            changed = True
    RemoveUnusedNodesPass()(model)
    return changed


def computed_integers(model: ir.Model) -> Iterator[tuple[ir.Node, str, float, int]]:
    """Yield each DequantizeLinear of an activation, and name, step and zero point of its integers."""
    for node in model.graph:
        integers = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if integers is not None and _array(integers) is None:
            yield node, str(integers.name), *(_array(value).item() for value in node.inputs[1:3])


def own_integers(graph: ir.Graph) -> None:
    """Give each layer weights and zero points of its own: under `EXACT_SUMS` onnxruntime cannot convert one twice."""
    taken: set[ir.Value] = set()
    for node in list(graph):
        if node.op_type == "DequantizeLinear" and _array(node.inputs[0]) is not None:
            for number, use in enumerate(list(node.outputs[0].uses())[1:]):
                again = ir.node("DequantizeLinear", node.inputs, dict(node.attributes), name=f"{node.name}_{number}")
                graph.insert_after(node, again)
                use.node.replace_input_with(use.idx, again.outputs[0])
    for node in graph:
        for place, value in enumerate(node.inputs):
            if value is not None and value.dtype == ir.DataType.INT8 and _array(value) is not None:
                if value in taken:
                    node.replace_input_with(place, _constant(graph, node, f"own_{place}", _array(value)))
                taken.add(value)


def _shield(graph: ir.Graph, value: ir.Value, user: ir.Node) -> None:
    """Insert an operator that onnxruntime neither removes nor looks through, and that returns its one input."""
    same = ir.node("Max", [value])
    same.outputs[0].type, same.outputs[0].shape = value.type, value.shape
    graph.insert_before(user, same)
    user.replace_input_with(list(user.inputs).index(value), same.outputs[0])


def _constant_behind(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear of a constant that a value is, also transposed."""
    transpose = _producer(value, "Transpose")
    part = _producer(value if transpose is None else transpose.inputs[0], "DequantizeLinear")
    return None if part is None or _array(part.inputs[0]) is None else part


def _fold_when_loaded(graph: ir.Graph, part: ir.Node) -> None:
    """Compute w = (q - z) s by operators that onnxruntime folds: it leaves DequantizeLinear to kernels for integers."""
    q, scale, zero = _integers(part)
    shape = (-1, *[1] * (q.ndim - 1 - _setting(part, "axis", 1))) if scale.ndim else ()
    nodes = [ir.node("Cast", [part.inputs[0]], {"to": ir.DataType.FLOAT})]
    for kind, other in [("Sub", zero.astype(np.float32))] * bool(zero.any()) + [("Mul", scale)]:
        nodes.append(ir.node(kind, [nodes[-1].outputs[0], _constant(graph, part, kind, other.reshape(shape))]))
    graph.insert_before(part, nodes)
    _leave_out(graph, part, nodes[-1].outputs[0])


def _fold_norm(graph: ir.Graph, node: ir.Node, weight: ir.Node) -> None:
    """Fold the batch norm that alone follows: s_c |f_c| is the step; where f_c < 0, q and z change their signs."""
    norm = _only_user(node)
    if norm is None or norm.op_type != "BatchNormalization" or norm.outputs[0].is_graph_output():
        return
    gamma, beta, mean, variance = (_array(value) for value in norm.inputs[1:5])
    bias = _array(node.inputs[2]) if len(node.inputs) > 2 else np.zeros(())
    if gamma is None or beta is None or mean is None or variance is None or bias is None:
        return
    q, scale, zero = _integers(weight)
    factor = gamma / np.sqrt(variance + _setting(norm, "epsilon", 1e-5))
    turned, dead = factor < 0, factor == 0

    # -q may have no place in int8, and (-q - 1) - (-z - 1) is as much.
    q = np.where(_along(turned, q), -q - 1, q) * _along(~dead, q)
    zero = np.where(turned, -zero - 1, zero) * ~dead
    parts = (q.astype(np.int8), (scale * np.where(dead, 1, np.abs(factor))).astype(np.float32), zero.astype(np.int8))
    _put(node, 1, _dequantized(graph, node, "weight", parts))
    _put(node, 2, _constant(graph, node, "bias", ((bias - mean) * factor + beta).astype(np.float32)))
    _leave_out(graph, norm, node.outputs[0])


def _quantize_bias(graph: ir.Graph, node: ir.Node) -> None:
    """Store the bias as int32 of step s_x s_c, which moves it by half a step at most.

    So that this is little, weights of few levels are spread over all of int8 first: w = (k (q - z)) (s / k).
    """
    source = _source(node)
    weight = _producer(node.inputs[1], "DequantizeLinear")
    bias = _array(node.inputs[2]) if len(node.inputs) > 2 else None
    input_scale = None if source is None else _array(source.inputs[1])
    if bias is None or input_scale is None or weight is None or (node.op_type == "Conv" and not _is_rounded(node)):
        return
    q, scale, zero = _integers(weight)
    apart = q - _along(zero, q)
    if (k := 127 // max(1, int(np.abs(apart).max()))) > 1:
        scale = (scale / k).astype(np.float32)
        parts = ((k * apart).astype(np.int8), scale, np.zeros(zero.shape, np.int8))
        _put(node, 1, _dequantized(graph, node, "spread", parts))
    step = (input_scale * scale).astype(np.float32)
    limits = np.iinfo(np.int32)
    q = np.clip(np.round(bias / step.astype(np.float64)), limits.min, limits.max).astype(np.int32)
    _put(node, 2, _dequantized(graph, node, "bias", (q, step, np.zeros(step.shape, np.int32))))


def _multiply_columns(graph: ir.Graph, node: ir.Node) -> None:
    """Write a wide convolution whose result is not rounded as a product of integers.

    A row of the product has the input's integers under the kernel at one place: slices of the input, side by side.
    """
    source, weight = _source(node), _producer(node.inputs[1], "DequantizeLinear")
    if node.op_type != "Conv" or source is None or weight is None or _is_rounded(node):
        return
    (q, scale, zero), (step, point) = _integers(weight), source.inputs[1:]
    kernel, axes = q.shape[2:], range(1, q.ndim - 1)
    if (
        min(q.shape[:2]) < WIDE
        or _setting(node, "group", 1) != 1
        or _setting(node, "auto_pad", "NOTSET") != "NOTSET"
        or node.outputs[0].is_graph_output()
    ):
        return

    def put(kind: str, *inputs: Any, **settings: Any) -> Any:
        values = [one if isinstance(one, ir.Value) else _constant(graph, node, f"{kind}_{next(numbers)}", one)
                  for one in inputs]  # fmt: skip
        new = ir.node(kind, values, settings, name=node.name if kind == "MatMul" else None)
        graph.insert_before(node, new)
        return new.outputs[0]

    numbers, ones = itertools.count(), [1] * len(kernel)
    x = put("Transpose", put("QuantizeLinear", node.inputs[0], step, point), perm=[0, *range(2, q.ndim), 1])
    if any(pads := _setting(node, "pads", [0])):
        x = put("Pad", x, np.array([0, *pads[: len(kernel)], 0, 0, *pads[len(kernel) :], 0]), point)
    apart, strides = _setting(node, "dilations", ones), np.array(_setting(node, "strides", ones))
    reach = np.multiply(np.array(kernel) - 1, apart)
    if any(reach) or any(strides > 1):
        begins = [np.multiply(place, apart) for place in np.ndindex(*kernel)]
        slices = [put("Slice", x, begin, np.where(begin < reach, begin - reach, END), np.array(axes), strides)
                  for begin in begins]  # fmt: skip
        x = put("Concat", *slices, axis=q.ndim - 1)
    parts = np.moveaxis(q, (0, 1), (-1, -2)).reshape(-1, len(q)).astype(np.int8), scale, zero.astype(np.int8)
    y = put("MatMul", put("DequantizeLinear", x, step, point), _dequantized(graph, node, "columns", parts, axis=1))
    if len(node.inputs) > 2:
        y = put("Add", y, node.inputs[2])
    _leave_out(graph, node, put("Transpose", y, perm=[0, q.ndim - 1, *axes]))


def _rectify_integers(graph: ir.Graph, node: ir.Node) -> None:
    """Replace ReLU or Clip before QuantizeLinear by a Clip of the integers behind it: rounding keeps the order."""
    rectifier = _reader(node)
    quantize = None if rectifier is None or rectifier.op_type not in ("Relu", "Clip") else _reader(rectifier)
    if rectifier is None or quantize is None or quantize.op_type != "QuantizeLinear":
        return
    scale, zero = (_array(value) for value in quantize.inputs[1:3])
    assert scale is not None
    assert zero is not None
    limits = np.iinfo(zero.dtype)
    ends = [np.zeros(()), None] if rectifier.op_type == "Relu" else [_array(value) for value in rectifier.inputs[1:]]
    bounds = [
        np.clip(np.round(end / scale + zero), limits.min, limits.max).astype(zero.dtype) if end is not None else limit
        for end, limit in zip((*ends, None, None)[:2], (limits.min, limits.max), strict=True)
    ]
    assert rectifier.inputs[0] is not None
    _leave_out(graph, rectifier, rectifier.inputs[0])
    if tuple(bounds) == (limits.min, limits.max):
        return
    users = list(quantize.outputs[0].uses())
    ends_of_clip = [_constant(graph, node, f"clip_{n}", np.asarray(b, zero.dtype)) for n, b in enumerate(bounds)]
    clip = ir.node("Clip", [quantize.outputs[0], *ends_of_clip])
    clip.outputs[0].type, clip.outputs[0].shape = quantize.outputs[0].type, quantize.outputs[0].shape
    graph.insert_after(quantize, clip)
    for use in users:
        use.node.replace_input_with(use.idx, clip.outputs[0])


# --- The graph's parts ------------------------------------------------------------------------------------------------


def _producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == kind else None


def _only_user(node: ir.Node) -> ir.Node | None:
    uses = list(node.outputs[0].uses())
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None


def _reader(node: ir.Node) -> ir.Node | None:
    """Return what alone uses a node's result, as it is or behind operators that onnxruntime moves rounding across."""
    while (user := _only_user(node)) is not None and user.op_type in ORDERLY:
        node = user
    return user


def _source(node: ir.Node) -> ir.Node | None:
    """Return the DequantizeLinear that a layer's input comes from, as it is or behind such operators."""
    value = node.inputs[0]
    while value is not None and (before := value.producer()) is not None and before.op_type in ORDERLY:
        value = before.inputs[0]
    return _producer(value, "DequantizeLinear")


def _is_rounded(node: ir.Node) -> bool:
    """Return whether a layer's result is used as integers alone."""
    after = _reader(node)
    return after is not None and after.op_type == "QuantizeLinear"


def _setting(node: ir.Node, name: str, default: Any = None) -> Any:
    """Return an attribute of a node; by default that of Gemm: transB 0, alpha and beta 1."""
    if name in node.attributes:
        return node.attributes[name].value
    return (name != "transB") if default is None else default


def _array(value: ir.Value | None) -> Any:
    """Return a constant's array; None if it is computed."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _integers(node: ir.Node) -> tuple[Any, Any, Any]:
    """Return q and z in int32, and s, of a DequantizeLinear of a constant."""
    q, scale = (_array(value) for value in node.inputs[:2])
    zero = _array(node.inputs[2]) if len(node.inputs) > 2 else None
    return q.astype(np.int32), scale, np.zeros(scale.shape, np.int32) if zero is None else zero.astype(np.int32)


def _along(channels: Any, weight: Any) -> Any:
    """Return one value per output channel, or one for all, in a shape that broadcasts to the weight."""
    return channels.reshape(-1, *[1] * (weight.ndim - 1))


def _constant(graph: ir.Graph, node: ir.Node, name: str, array: Any) -> ir.Value:
    full = f"{node.name}_{name}"
    value = ir.val(full, const_value=ir.tensor(array, name=full))
    graph.register_initializer(value)
    return value


def _dequantized(graph: ir.Graph, node: ir.Node, name: str, parts: tuple[Any, Any, Any], axis: int = 0) -> ir.Value:
    """Insert a DequantizeLinear of constants q, s, z before a node."""
    inputs = [_constant(graph, node, f"{name}_{part}", array) for part, array in zip("qsz", parts, strict=True)]
    new = ir.node("DequantizeLinear", inputs, {"axis": axis} if parts[1].ndim else {})
    graph.insert_before(node, new)
    return new.outputs[0]


def _put(node: ir.Node, place: int, value: ir.Value) -> None:
    if len(node.inputs) <= place:
        node.resize_inputs(place + 1)
    node.replace_input_with(place, value)


def _leave_out(graph: ir.Graph, node: ir.Node, source: ir.Value) -> None:
    for use in list(node.outputs[0].uses()):
        use.node.replace_input_with(use.idx, source)
    graph.remove(node, safe=True)
