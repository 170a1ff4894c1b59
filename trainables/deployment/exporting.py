"""Write a trained model as a file that other programs run, and run the file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainables.deployment.fixed_model import fixed_copy
from trainables.errors import UserError, unknown_name
from trainables.runtime.operator_flops import FlopCounter

#: Formats, and how their files end.
FORMATS = {"onnx": ".onnx", "torch": ".pt2"}
#: Operators of onnxruntime that multiply integers, and floats, each with the place of the weight among its inputs.
INTEGER_PRODUCTS = {"QLinearConv": 3, "QGemm": 3, "QLinearMatMul": 3, "ConvInteger": 1, "MatMulInteger": 1,
                    "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1}  # fmt: skip
FLOAT_PRODUCTS = dict.fromkeys(("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"), 1)


@dataclass(frozen=True)
class ExportedModel:
    """A file, and how it is called."""

    file: Path
    """It ends in .onnx (beside it may lie FILE.data, the weights) or .pt2."""
    simulated: tuple[str, ...]
    """Quantized weights and activations that no 8-bit integer holds; they compute in floats."""
    macs: int
    """Multiplications, each with an addition, of one sample, those of attention included; zeros count."""
    has_integers: bool
    """True if weights are stored as int8."""
    inputs: tuple[str, ...]
    """Names of the file's inputs, in the order of the model's tensors."""
    outputs: Any
    """Structure of the outputs, for `torch.utils._pytree.tree_unflatten`."""

    @property
    def bytes(self) -> int:
        """Return the size of the file, with weights that lie beside it."""
        beside = self.file.with_name(f"{self.file.name}.data")
        return self.file.stat().st_size + (beside.stat().st_size if beside.exists() else 0)


def export_model(
    model: nn.Module, args: Sequence[Any], file: str | Path, *, to: str = "", kwargs: Mapping[str, Any] | None = None
) -> ExportedModel:
    """Write a model in eval mode: pruned and thinned as it is, quantized weights as int8, activations as QDQ pairs.

    Args:
        model: trained, also with a quantizer or under Gradient-Skip; it stays as it is.
        args: an example of its inputs, batched along dimension 0; the file takes any batch size, and any length of
            integer inputs (tokens).
        file: a name in .onnx or .pt2.
        to: ``onnx`` or ``torch`` (`torch.export`); empty: what the file's name says.
        kwargs: an example of its inputs by name.

    Raises:
        UserError: another format, ONNX without the extra ``export``, or a model whose forward pass torch cannot export.
    """
    file = Path(file)
    to = to or next((name for name, ending in FORMATS.items() if ending == file.suffix), file.suffix)
    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    if to == "onnx":
        _check_onnx()
    fixed, simulated = fixed_copy(model)
    named = dict(kwargs or {})
    shapes = pytree.tree_map(_free_sizes, (tuple(args), named))
    with _quiet(), torch.no_grad():
        free = {**dict(zip(signature(fixed.forward).parameters, shapes[0], strict=False)), **shapes[1]}
        try:
            program = torch.export.export(fixed, tuple(args), named, dynamic_shapes=free if named else shapes[0])
            with FlopCounter() as counter:
                program.module()(*args, **named)
        except Exception as error:  # whatever the model's code raises under tracing
            first = str(error).strip().splitlines() or [""]
            raise UserError(
                f"torch.export cannot follow the forward pass of {type(model).__name__} ({type(error).__name__}: "
                f"{first[0]}): it must depend on shapes and types alone, not on values"
            ) from error
        if to == "onnx":
            inputs = _write_onnx(program, file)
        else:
            torch.export.save(program, file)
            inputs = ()
    samples = next((len(leaf) for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, Tensor)), 1)
    return ExportedModel(
        file=file,
        simulated=tuple(simulated),
        has_integers=any(tensor.dtype == torch.int8 for tensor in fixed.state_dict().values()),
        macs=counter.get_total_flops() // 2 // samples,
        inputs=inputs,
        outputs=program.call_spec.out_spec,
    )


def _check_onnx() -> None:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs onnxscript and onnxruntime ({error}): pip install 'tune-cac[export]'") from None
    onnxruntime.set_default_logger_severity(3)


def _free_sizes(leaf: Any) -> Any:
    """Return which dimensions may vary: the batch, and of integers their number."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    free = leaf.dim() if not leaf.is_floating_point() else 1
    return dict.fromkeys(range(free), torch.export.Dim.AUTO)


def _write_onnx(program: Any, file: Path) -> tuple[str, ...]:
    from trainables.deployment.integer_kernels import fit_integer_kernels

    made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    fit_integer_kernels(made.model)
    for node in made.model.graph:  # lines of the model's source, more bytes than a small model's weights
        node.metadata_props.clear()
    made.save(file, external_data=None)
    return tuple(str(value.name) for value in made.model.graph.inputs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch's exporter logs and warns of, which is about itself, off the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _fed(exported: ExportedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = [leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]
    return {name: tensor.cpu().numpy() for name, tensor in zip(exported.inputs, tensors, strict=True)}


class Deployed(nn.Module):
    """Run an exported file in place of the model: same arguments, same outputs, on the CPU."""

    def __init__(
        self, exported: ExportedModel, trained: nn.Module, *, threads: int = 1, as_written: bool = False
    ) -> None:
        super().__init__()
        self.__dict__["_trained"] = trained  # no submodule: others read attributes of it alone
        self._run: Callable[..., Any]
        if exported.file.suffix == FORMATS["torch"]:
            program = torch.export.load(exported.file)
            self._run = program.module()
            return
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        if as_written:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(exported.file), options, providers=["CPUExecutionProvider"])

        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = session.run(None, _fed(exported, args, kwargs))
            return pytree.tree_unflatten([torch.from_numpy(output) for output in outputs], exported.outputs)

        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_trained"], name)


def quantized_after(exported: ExportedModel, calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]) -> bool:
    """Quantize an ONNX file in place after training, by onnxruntime: int8 weights per channel, uint8 activations.

    A model with attention gets the ranges of its activations anew at every call, and attention itself stays in floats:
    with fixed ranges a MiniLM lost 10 points (docs/findings.md). Others get them from ``calls``.

    Args:
        exported: what `export_model` returned.
        calls: inputs by position and by name.

    Returns:
        Whether the ranges are fixed.
    """
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._left = (_fed(exported, args, kwargs) for args, kwargs in calls)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    file = str(exported.file)
    graph = onnx.load(file).graph
    constant = _constants(graph)
    attends = any(node.op_type == "MatMul" and not constant & set(node.input) for node in graph.node)
    with _quiet(), TemporaryDirectory() as folder:
        prepared = f"{folder}/prepared.onnx"
        quant_pre_process(file, prepared, skip_symbolic_shape=True)
        if attends:
            quantize_dynamic(
                prepared, file, ["MatMul", "Gemm", "Gather"], per_channel=True, weight_type=QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
        else:
            quantize_static(
                prepared, file, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
    return not attends


def _constants(graph: Any) -> set[str]:
    """Return the names of a graph's constants, also as integers behind DequantizeLinear, or transposed."""
    found = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("DequantizeLinear", "Transpose") and node.input[0] in found:
            found.update(node.output)
    return found


def executed_products(file: Path) -> tuple[int, int]:
    """Return how many multiplications with weights onnxruntime executes in integers, and how many in floats."""
    import onnx
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(options.optimized_model_filepath).graph
    constant = _constants(graph)
    weights = {**INTEGER_PRODUCTS, **FLOAT_PRODUCTS}
    kinds = [
        node.op_type for node in graph.node if node.op_type in weights and node.input[weights[node.op_type]] in constant
    ]
    integers = sum(kind in INTEGER_PRODUCTS for kind in kinds)
    return integers, len(kinds) - integers
