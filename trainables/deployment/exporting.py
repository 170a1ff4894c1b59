"""Write a trained model as a file that other programs run, and run the file."""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
import zlib
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from trainables.deployment.call import Call
from trainables.deployment.fixed_model import fixed_copy
from trainables.errors import UserError, check_model_first, unknown_name
from trainables.runtime.isolation import kept_generators
from trainables.runtime.operator_flops import flop_counter

#: Formats, and how their files end.
FORMATS = {"onnx": ".onnx", "torch": ".pt2"}
#: The entry of a session's configuration without which onnxruntime adds up pairs of products of integers in 16 bits,
#: which saturate, on x86 CPUs without VNNI; on others it has no effect.
EXACT_SUMS = ("session.x64quantprecision", "1")
#: Operators of onnxruntime that multiply floats, each with the place of the weight among its inputs.
FLOAT_PRODUCTS = dict.fromkeys(
    ("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "GRU", "LSTM", "RNN"), 1
)


class IntegerTensor(NamedTuple):
    """A tensor of integers in an ONNX file, values (q - z) s: one call of a quantizer of activations."""

    quantizer: str
    """The quantizer's name in the model; calls are in their order."""
    name: str
    """The tensor's name in the file."""
    step: float
    zero: int


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
    named: tuple[str, ...]
    """Names of inputs that the model was called with by name, in their order."""
    inputs: tuple[str, ...]
    """Names of the file's inputs, in the order of the model's tensors."""
    outputs: Any
    """Structure of the outputs, for `torch.utils._pytree.tree_unflatten`."""
    rounded: tuple[IntegerTensor, ...] = ()
    """Activations that an ONNX file holds as integers."""

    @property
    def _files(self) -> list[Path]:
        return [file for file in (self.file, _beside(self.file)) if file.exists()]

    @property
    def bytes(self) -> int:
        """Return the size of the file, with weights that lie beside it."""
        return sum(file.stat().st_size for file in self._files)

    @property
    def zipped_bytes(self) -> int:
        """Return the same, deflated as a zip archive or a package would."""
        return sum(len(zlib.compress(file.read_bytes(), 6)) for file in self._files)


def _beside(file: Path) -> Path:
    """Return the file of weights beside a model of more than two gigabytes."""
    return file.with_name(f"{file.name}.data")


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
        UserError: another format, a file that cannot be there, ONNX without the extra ``export``, or a model whose
            forward pass torch cannot export, or that takes one batch size alone.
    """
    check_model_first(model, "export_model(model, (inputs,), file)")
    file = Path(file)
    to = to or next((name for name, ending in FORMATS.items() if ending == file.suffix), "")
    if not to:
        raise UserError(
            f"the file must end in {' or '.join(FORMATS.values())}, or to= must name the format, got {file}"
        )
    check_output(file, to)
    if isinstance(args, Mapping):
        raise UserError("args must be a tuple of inputs: inputs by name are kwargs")
    while hasattr(model, "_orig_mod") or isinstance(model, nn.DataParallel | DistributedDataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("a scripted model cannot be exported: give the model that it was made of")
    if to == "onnx" and any(tensor.dtype == torch.bfloat16 for tensor in model.state_dict().values()):
        raise UserError("onnxruntime computes nothing in bfloat16 on a CPU: give model.float(), or use --to torch")
    given = (args,) if isinstance(args, Tensor) else tuple(args)
    call = _of_two_samples(Call(given, dict(kwargs or {})))
    given, named = call
    fixed, simulated = fixed_copy(model)
    with _quiet(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            bound = dict(signature(fixed.forward).bind(*given, **named).arguments)
            if loose := set(named) - set(signature(fixed.forward).parameters):
                raise UserError(f"the forward pass of {name} must name its argument {min(loose)}, not take it as **")
            program = torch.export.export(fixed, given, named, dynamic_shapes=pytree.tree_map(_free_sizes, bound))
            program.example_inputs = None  # they may be nobody else's business
            _check_batch(program, call, name)
            macs = _macs(fixed, call)
            if to == "onnx":
                inputs, rounded = _write_onnx(program, file)
            else:
                inputs, rounded = (), ()
                torch.export.save(program, file)
        except UserError:
            raise
        except Exception as error:  # whatever the model's code raises under tracing
            hint = ": it must not depend on values, only on shapes and types" if "data-dependent" in str(error) else ""
            cause: BaseException = error
            if type(error).__module__.startswith("torch.onnx"):
                hint = ": use operators that ONNX has, or a file of torch.export (.pt2)"
                while cause.__cause__ is not None:  # the first says how to report it
                    cause = cause.__cause__
            first = next(iter(str(cause).strip().splitlines()), "")
            raise UserError(
                f"torch cannot export the forward pass of {name} ({type(cause).__name__}: {first}){hint}"
            ) from error
    return ExportedModel(
        file=file,
        simulated=tuple(simulated),
        has_integers=any(tensor.dtype == torch.int8 for tensor in fixed.state_dict().values()),
        macs=macs,
        named=tuple(named),
        inputs=inputs,
        outputs=program.call_spec.out_spec,
        rounded=rounded,
    )


def check_output(file: Path, to: str) -> None:
    """Raise UserError unless a file of a format can be written there, by packages that are installed."""
    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise UserError(f"the model cannot be written to {file}: it must be a file in a folder that can be written")
    if to == "onnx":
        try:
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"ONNX needs onnxscript and onnxruntime ({error}): pip install 'tune-cac[export]'"
            ) from None


def _of_two_samples(call: Call) -> Call:
    """Return copies of an example's tensors on the CPU; of one sample twice, for torch takes a size of 1 as fixed."""
    size = call.size
    if size == 0:
        raise UserError("the example must have at least one sample, got none")

    def doubled(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu().clone()
        for dimension in _free_sizes(tensor) or ():
            if tensor.shape[dimension] == 1 and (dimension or size == 1):
                tensor = torch.cat([tensor, tensor], dimension)
        return tensor

    return call.changed(doubled)


def _free_sizes(leaf: Any) -> Any:
    """Return which dimensions may vary: the batch, and of integers their number."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    free = leaf.dim() if not leaf.is_floating_point() else 1
    return dict.fromkeys(range(free), torch.export.Dim.AUTO)


def _check_batch(program: Any, call: Call, name: str) -> None:
    """Raise UserError unless an exported program takes twice the example's samples, too."""
    more = call.repeated(2 * call.size)
    try:
        with kept_generators([]):
            program.module()(*more.args, **more.kwargs)
    except Exception as error:
        raise UserError(
            f"the forward pass of {name} takes batches of {call.size} alone: it must take their size from its inputs, "
            "such as x.flatten(1) or x.reshape(x.shape[0], -1); len(x) is a number when it is exported"
        ) from error


def _macs(model: nn.Module, call: Call) -> int:
    """Count one sample's multiplications on the meta device, where fused operators are apart; else on the CPU."""

    def counted(device: str) -> int:
        moved = call.changed(lambda tensor: tensor.to(device, copy=True))
        with kept_generators([]), flop_counter() as counter:
            copy.deepcopy(model).to(device)(*moved.args, **moved.kwargs)
        return int(counter.get_total_flops()) // 2 // call.size

    try:
        return counted("meta")
    except Exception:  # noqa: BLE001  # it makes tensors of its own, or looks at numbers
        return counted("cpu")


def _write_onnx(program: Any, file: Path) -> tuple[tuple[str, ...], tuple[IntegerTensor, ...]]:
    """Write the file and return the names of its inputs, and its activations of integers."""
    from trainables.deployment.integer_kernels import computed_integers, fit_integer_kernels

    made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    fit_integer_kernels(made.model)
    rounded = tuple(
        IntegerTensor(scopes[-2], name, step, zero)
        for node, name, step, zero in computed_integers(made.model)
        if len(scopes := literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))) > 1
    )
    for node in made.model.graph:  # lines of the model's source, more bytes than a small model's weights
        node.metadata_props.clear()
    _beside(file).unlink(missing_ok=True)  # of an earlier, larger model
    _save_as_executed(made.model, file, lambda: made.save(file, external_data=None))
    return tuple(str(value.name) for value in made.model.graph.inputs), rounded


def _save_as_executed(model: Any, file: Path, save: Callable[[], None]) -> None:
    """Write a graph to a file, changed until onnxruntime executes what it says without detours."""
    from trainables.deployment.integer_kernels import keep_floats, own_integers

    own_integers(model.graph)
    save()
    # Extended: before layouts, which give layers other names.
    while any(node.op_type == "DequantizeLinear" for node in model.graph) and keep_floats(
        model, _executed(file, "ORT_ENABLE_EXTENDED").graph
    ):
        save()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch's exporter logs and warns of, which is about itself, off the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _fed(exported: ExportedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = Call(tuple(args), {name: kwargs[name] for name in exported.named}).tensors
    return {name: tensor.cpu().numpy() for name, tensor in zip(exported.inputs, tensors, strict=True)}


def _session(file: Path, **settings: Any) -> Any:
    """Return a session of onnxruntime on the CPU, which prints nothing but errors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, value in {"log_severity_level": 3, **settings}.items():
        setattr(options, name, value)
    options.add_session_config_entry(*EXACT_SUMS)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


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

        levels = onnxruntime.GraphOptimizationLevel
        level = levels.ORT_DISABLE_ALL if as_written else levels.ORT_ENABLE_ALL
        session = _session(exported.file, intra_op_num_threads=threads, graph_optimization_level=level)

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


class IntegerActivations:
    """Run an ONNX file, as it is written or as onnxruntime executes it, and return its activations of integers."""

    def __init__(self, exported: ExportedModel, *, as_written: bool) -> None:
        import onnx
        from onnxruntime import GraphOptimizationLevel

        # Extended: layouts, which come after it, give tensors other names, and the same values.
        made = onnx.load(exported.file) if as_written else _executed(exported.file, "ORT_ENABLE_EXTENDED")
        there = {name for node in made.graph.node for name in node.output}
        lacking = {one.quantizer for one in exported.rounded if one.name not in there}
        self.found = [one for one in exported.rounded if one.quantizer not in lacking]
        del made.graph.output[:]
        made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(r.name for r in self.found))
        self._exported = exported
        with TemporaryDirectory() as folder:
            onnx.save(made, f"{folder}/integers.onnx", save_as_external_data=_beside(exported.file).exists())
            level = GraphOptimizationLevel.ORT_DISABLE_ALL
            self._session = _session(Path(folder, "integers.onnx"), graph_optimization_level=level)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[IntegerTensor, Tensor]]:
        """Yield the activations and their integers, in the order of the quantizers' calls."""
        outputs = dict(zip((output.name for output in self._session.get_outputs()),
                           self._session.run(None, _fed(self._exported, args, kwargs)), strict=True))  # fmt: skip
        for one in self.found:
            yield one, torch.from_numpy(outputs[one.name])


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
    import onnx_ir as ir
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
        quantized = ir.load(file)
        _save_as_executed(quantized, exported.file, lambda: ir.save(quantized, file))
    return not attends


def _constants(graph: Any) -> set[str]:
    """Return the names of a graph's constants, also as integers behind DequantizeLinear, or transposed."""
    found = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("DequantizeLinear", "Transpose") and node.input[0] in found:
            found.update(node.output)
    return found


def _executed(file: Path, level: str) -> Any:
    """Return the ONNX model that onnxruntime makes of a file."""
    import onnx
    from onnxruntime import GraphOptimizationLevel

    with TemporaryDirectory() as folder:
        optimized = f"{folder}/optimized.onnx"
        _session(file, optimized_model_filepath=optimized,
                 graph_optimization_level=getattr(GraphOptimizationLevel, level))  # fmt: skip
        return onnx.load(optimized)


def executed_products(file: Path) -> tuple[int, int]:
    """Return how many multiplications with weights onnxruntime executes in integers, and how many in floats."""
    from trainables.deployment.integer_kernels import INTEGER_PRODUCTS

    graph = _executed(file, "ORT_ENABLE_ALL").graph
    constant = _constants(graph)
    weights = {**INTEGER_PRODUCTS, **FLOAT_PRODUCTS}
    kinds = [
        node.op_type for node in graph.node if node.op_type in weights and node.input[weights[node.op_type]] in constant
    ]
    integers = sum(kind in INTEGER_PRODUCTS for kind in kinds)
    return integers, len(kinds) - integers
