"""Forward cache: the outputs of a fully stopped prefix are computed once for each input and then read from a file.

Rows are found by a checksum of the input, in training and in evaluation.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainables.errors import UserError
from trainables.gradskip.cached_rows import PLAIN, Kind, RowFile, read_inputs
from trainables.gradskip.execution_order import is_traced
from trainables.gradskip.layers import unwrap
from trainables.gradskip.prefix_cuts import Cut, may_end_prefix, recorded_cuts
from trainables.gradskip.stops import is_evaluated
from trainables.runtime.isolation import kept_generators
from trainables.runtime.model_copy import copy_of
from trainables.runtime.operator_flops import uncompiled
from trainables.workloads.batch_structure import leaves_in, tensors_in

# --- One forward pass -------------------------------------------------------------------------------------------------
# During the pass the ``forward`` of the prefix's modules m_0..m_k is replaced. The whole batch is computed where a row
# is missing. Where none is, modules return tensors of the shape of their output, and m_k returns the rows.

#: Allowed rounding difference between rows computed in two batches, relative to the largest output: at least, and in
#: steps of the type.
_TOLERANCE, _STEPS = 1e-3, 4
#: Numbers that must be equal, by bytes each, before batches of a size count as rounded like others. A half is rarely
#: rounded otherwise.
_ENOUGH = {2: 10_000, 4: 100, 8: 100}
#: Copies of the model for rows of batches of other sizes, at most; with more of them the sizes are arbitrary.
_MOST_COPIES = 64


class PassReport(NamedTuple):
    """Report of one forward pass through the prefix: names of its modules, and rows of the batch."""

    modules: tuple[str, ...]
    rows: int
    computed: int  # rows that the prefix was actually computed on: all, or none


@dataclass(kw_only=True, eq=False)
class _Pass:
    """A forward pass that runs."""

    cut: Cut
    kind: Kind
    keys: list[int]  # of the batch's rows
    computes: bool
    position: int = 0  # of the module that runs next
    is_inside: bool = False  # whether a module of the prefix runs
    originals: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)


class _Otherwise(Exception):
    """The model runs otherwise than in the pass that was recorded."""


class _Ended(Exception):
    """A pass ended behind the prefix, whose outputs are all that was wanted of it."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()  # without the outputs, which would be printed with a traceback
        self.outputs = outputs


class _Forward:
    """A model's forward pass through a cache; copies and pickles of the model have its own one."""

    def __init__(self, cache: ForwardCache, original: Callable[..., Any]) -> None:
        self._cache, self._original = cache, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Of a function that is compiled with the model in it nothing is kept.
        return self._original(*args, **kwargs) if is_traced() else self._cache.run(self._original, args, kwargs)

    @property
    def is_of_class(self) -> bool:
        """Return whether the method in its place is that of the model's class."""
        model = getattr(self._original, "__self__", None)
        return getattr(self._original, "__func__", None) is getattr(type(model), "forward", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()


def _meta(y: Any) -> Any:
    return tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), y)


def _stand_in(meta: Tensor, device: torch.device, value: float | None) -> Tensor:
    """Return a tensor of this shape that takes a place where nobody reads its numbers, and may be written into."""
    if not meta.is_floating_point():
        return torch.zeros_like(meta, device=device)  # they may be places in another tensor
    return torch.empty_like(meta, device=device) if value is None else torch.full_like(meta, value, device=device)


def _rows_of(arguments: Any, wanted: Sequence[int] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of a forward pass's positional and named arguments with these rows alone.

    None: the first `_RECORDED_ROWS`, or all.
    """
    rows = next((len(t) for t in tensors_in(arguments) if t.dim()), 1)
    places = torch.tensor(wanted or range(min(rows, _RECORDED_ROWS)))
    with torch.inference_mode(False):
        some: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            Tensor, lambda t: t[places.to(t.device)] if t.dim() and len(t) == rows else t.clone(), arguments
        )
    return some


def _coarsest_type(y: Tensor) -> torch.dtype:
    """Return the type in which y was computed, as far as is known."""
    device = y.device.type
    used = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else y.dtype
    return min(used, y.dtype, key=lambda one: one.itemsize)


def _is_close(y: Tensor, other: Tensor) -> bool:
    finite = y[y.isfinite()]  # those of a diverged training may be none
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    used = _coarsest_type(y)
    steps = _STEPS * torch.finfo(used).eps if used.is_floating_point else 0.0
    return torch.allclose(other, y, rtol=0, atol=max(_TOLERANCE, steps) * scale, equal_nan=True)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module and its submodules into eval mode inside the block, and restore each one's own mode."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class CachedBatches:
    """Batches of an epoch with the length of what they are from, if it has one; the cache is running in a loop."""

    def __init__(self, cache: ForwardCache, batches: Iterable[Any]) -> None:
        self._cache, self._batches = cache, batches

    def __iter__(self) -> Iterator[Any]:
        return self._cache.epoch(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError, as of the batches themselves

    def __bool__(self) -> bool:
        return True


# --- Forward cache ----------------------------------------------------------------------------------------------------
# A prefix consists of what runs before a cut (`prefix_cuts`), and none of its parameters needs a gradient. Its outputs
# depend on the input alone once its norms use their running statistics and its dropout is off, so both are in eval mode
# here, whether a row is computed or read: a sample's output never depends on its batch or on the cache's content. This
# differs from training without the cache, where a stopped batch norm still uses the batch's statistics.
#
# **Rows read equal rows computed, bit for bit.** A kernel may round a row otherwise in a batch of another size: on the
# CPU (torch 2.13) linear layers do so for fewer than 16 float32 vectors, in bfloat16 for any number. All rows are thus
# kept as batches of one size have them, that of the first batch, or of a larger one that rounds otherwise: rows that
# come in a smaller one are computed by a copy of the model among repeated ones. A batch of another size is read once
# enough numbers of such batches were equal to those that are kept; where one differs, it is computed in every epoch.
#
# Limits: a Python number that a module of the prefix keeps for a later one stays as it was last computed; hooks on the
# prefix's modules except the last receive other numbers than activations when all rows are read.

#: Outputs are computed again and compared in every so many-th batch with hits, starting with the first.
COMPUTE_EVERY = 64
#: Rows of a batch that a forward pass is recorded on, where nobody gave one.
_RECORDED_ROWS = 3


class ForwardCache:
    """Cache of a model's stopped-prefix outputs by input, limited to a number of bytes.

        with ForwardCache(model, budget_bytes=10**9) as cache, cache.running():
            for images, labels in loader:
                loss = loss_fn(model(images), labels)
                loss.backward()

    Forward passes in training mode with gradients and in evaluation mode without are read and kept. The cache detects
    stops by itself, and starts anew when the prefix grows or when its weights or running statistics change.

    Args:
        model: may be wrapped by DistributedDataParallel or torch.compile.
        samples: different inputs of training that there are at most; more of them switch the cache off. None: unknown.
        budget_bytes: maximum bytes of the files, >= 0. Outputs of the training set are kept wholly or not at all; those
            of evaluation use what is left.
        folder: folder of the files; None: the system's folder for temporary files (often in memory: /tmp).
        forward: runs the model that it is given on a batch, with all that reads its outputs; a forward pass of a copy
            shows what can be kept. None: the first training pass does.

    Raises:
        UserError: an argument out of range, a folder that does not exist, or a model of which nothing can be kept.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int | None = None,
        budget_bytes: int,
        folder: str | Path | None = None,
        forward: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        for name, value, low in (("samples", samples, 1), ("budget_bytes", budget_bytes, 0)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise UserError(f"forward cache: {name} must be an integer >= {low}, got {value!r}")
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"forward cache: folder must be a folder that exists, got {str(folder)!r}: create it")
        if any(isinstance(part, nn.DataParallel) for part in model.modules()):
            raise UserError(
                "forward cache: the model must not be in DataParallel, which runs copies of it: use "
                "DistributedDataParallel"
            )
        self.model = unwrap(model)
        self.samples, self.budget_bytes, self._folder = samples, budget_bytes, folder
        self.files: dict[Kind, RowFile] = {}
        self.last: PassReport | None = None  # report of the last forward pass; None: it ran without the cache
        self.enabled = True  # permanently False after `switch_off` or `close`
        self.cached_through = -1  # place among the cuts of the one whose outputs are kept; -1 for none
        self.hits = 0  # rows of training read so far
        self.misses = 0  # rows of training computed so far because they were not in the cache
        #: Called before each training pass with the model, its arguments, and whether the prefix's outputs are read.
        self.on_pass: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], bool], None] | None = None
        self._compiled: list[nn.Module] | None = None  # wrappers of the model; None: not looked for
        self._running: _Pass | None = None
        self._ends_behind_prefix = False  # passes raise _Ended with the prefix's output, as soon as it is computed
        self._is_mode_told = self._has_tried = False
        self._blocks = 0  # those of `running` that have begun and not ended
        self._replaced_calls: list[tuple[nn.Module, str, Any]] = []  # what runs the model, with its own methods
        self._placeholder: float | None = None  # value of what nobody is to read; None: whatever is in memory
        self._checked: set[int] = set()  # places of cuts with which a copy of the model returned what it did without
        self._state: tuple[tuple[int, int], ...] = ()
        self._cut_in_evaluation: dict[Any, bool] = {}
        self._begin_anew()
        self.cuts: list[Cut] = []
        # Modules and other parameters of each cut that those before it do not have; the modules' own may be replaced.
        self._parts: list[list[nn.Module]] = []
        self._beside: list[list[Tensor]] = []
        if forward is not None:
            self._take_cuts(recorded_cuts(self.model, forward))

    def _take_cuts(self, cuts: list[Cut]) -> None:
        self.cuts = cuts
        seen: set[int] = set()
        for cut in cuts:
            parts = {id(part): part for module in cut.modules for part in module.modules()}
            inside = {id(p) for part in parts.values() for p in part._parameters.values()}
            beside = {id(p): p for p in cut.parameters if id(p) not in inside}
            self._parts.append([part for key, part in parts.items() if key not in seen])
            self._beside.append([p for key, p in beside.items() if key not in seen])
            seen |= {*parts, *beside}

    def switch_off(self, reason: str) -> None:
        """Close the cache permanently and warn with the reason."""
        self.close()
        warnings.warn(f"forward cache off: {reason}", stacklevel=2)

    def close(self) -> None:
        """Drop all rows and free the disk space; from here on the model runs without the cache."""
        self.enabled = False
        self.cached_through = -1
        self._drop(True, False)

    def __enter__(self) -> ForwardCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_anew(self) -> None:
        self._drop(True, False)
        self._keeps_training = True
        self._shapes: dict[tuple[Kind, int], list[Any]] = {}  # of what modules return, on meta, by rows of the batch
        #: By rows of the batch, first of all those of batches that rows are kept of: how many numbers of such batches
        #: were equal to what is kept, infinity once they are enough; minus infinity if one was not.
        self._rounds_alike: dict[Kind, dict[int, float]] = {}
        self._copies = 0  # of the model, for rows of batches of other sizes
        self._hits_before, self._is_told = self.hits, False

    def _drop(self, *is_training: bool) -> None:
        for kind in [kind for kind in self.files if kind.is_training in is_training]:
            self.files.pop(kind).close()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def rows(self, is_training: bool) -> int:
        """Return how many rows of training, or of evaluation, are kept."""
        return sum(len(file) for kind, file in self.files.items() if kind.is_training == is_training)

    def update(self) -> None:
        """Find the stopped prefix, and start anew where it or its weights changed; each forward pass calls this."""
        if not self.enabled:
            return
        through = self._stopped_through()
        # Versions count in-place changes: a loaded checkpoint, or a published optimizer's momentum on stopped layers.
        state = tuple(
            (id(tensor), tensor._version)
            for parts, beside in zip(self._parts[: through + 1], self._beside, strict=False)
            for tensor in (
                *beside,
                *(t for part in parts for t in (*part._parameters.values(), *part._buffers.values())),
            )
            if tensor is not None
        )
        if through != self.cached_through or state != self._state:
            self.cached_through, self._state = through, state
            self._begin_anew()

    def _stopped_through(self) -> int:
        last = -1
        for place, (parts, beside) in enumerate(zip(self._parts, self._beside, strict=True)):
            parameters = [p for part in parts for p in part._parameters.values() if p is not None] + beside
            if any(parameter.requires_grad for parameter in parameters):
                break
            if parameters and all(map(is_evaluated, self.cuts[place].shared)):  # else they drop in training
                last = place
        if last < 0:
            return -1
        # None of these enlarges its input, so the last one has the smallest outputs and saves the most.
        while (
            last + 1 < len(self.cuts) and not self._beside[last + 1] and all(map(may_end_prefix, self._parts[last + 1]))
        ):
            last += 1
        return last

    # --- forward passes -----------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block, forward passes of the model read rows that are kept, and keep the others."""
        self.last, self._blocks = None, self._blocks + 1
        if self._blocks == 1:  # others may begin in it, and end after it
            self._replaced_calls = [(entry, name, vars(entry).get(name)) for entry, name in self._entries()]
            for entry, name, _ in self._replaced_calls:
                setattr(entry, name, _Forward(self, getattr(entry, name)))
        try:
            yield
        finally:
            self._blocks -= 1
            for entry, name, own in self._replaced_calls if self._blocks == 0 else ():
                delattr(entry, name)
                if own is not None:
                    setattr(entry, name, own)

    def _entries(self) -> list[tuple[nn.Module, str]]:
        """Return what runs the model and its method; where it is compiled, what runs the compiled code."""
        if self.model._compiled_call_impl is not None:
            return [(self.model, "_compiled_call_impl")]
        dynamo: Any = sys.modules.get("torch._dynamo")  # whose import takes seconds
        if dynamo and self._compiled is None:  # since this cache was made, perhaps
            modules = [thing for thing in gc.get_objects() if issubclass(type(thing), dynamo.OptimizedModule)]
            self._compiled = [module for module in modules if unwrap(module) is self.model]
        return [(entry, "forward") for entry in self._compiled or [self.model]]

    def epoch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield an epoch's batches, `running` meanwhile; switch off if its inputs were not those of the one before."""
        known = [file for kind, file in self.files.items() if kind.is_training]
        hits, misses = self.hits, self.misses
        with self.running():
            yield from batches
        same_prefix = any(file is one for file in known for one in self.files.values())
        if same_prefix and self.hits == hits and self.misses > misses:
            self.switch_off("inputs must repeat, but none of this epoch's were those of an earlier one: augmentation?")

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model's own ``forward`` returns, with the prefix's outputs from the cache where they are."""
        if self._running is not None:
            return forward(*args, **kwargs)
        self.last, now = None, self._begin(args, kwargs)
        if self.on_pass is not None and self.model.training and torch.is_grad_enabled():
            self.on_pass(self.model, args, kwargs, now is not None and not now.computes)
        if now is None:
            return forward(*args, **kwargs)
        self._running = now
        try:
            with self._replaced(now):
                result = forward(*args, **kwargs)
            if now.position < len(now.cut.modules):
                raise _Otherwise(f"ended before {now.cut.names[now.position]!r}")
        except _Otherwise as error:
            self.switch_off(f"the model must run its modules in the same order in each pass, but it {error}")
            return forward(*args, **kwargs)
        finally:
            self._running = None
        rows = len(now.keys)
        self.last = PassReport(now.cut.names, rows=rows, computed=rows if now.computes else 0)
        return result

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass | None:
        """Return the pass that begins; None where it runs without the cache."""
        is_training = self.model.training
        if not self.enabled or is_training != torch.is_grad_enabled():
            return None
        if not self.cuts and (is_training or not self._has_tried):
            self._has_tried = True
            try:
                self._take_cuts(self._recorded(args, kwargs, is_training=True))
            except UserError as error:
                if is_training:  # an evaluation may lack what training passes
                    self.switch_off(str(error).removeprefix("forward cache: "))
        if not self.cuts:
            return None
        self.update()
        if self.cached_through < 0:
            return None
        cut, found = self.cuts[self.cached_through], read_inputs(is_training, (args, kwargs))
        if found is None or not (is_training or self._is_cut_in_evaluation(cut, found[0], args, kwargs)):
            return None
        kind, keys = found
        file, rows = self.files.get(kind), len(keys)
        held = 0 if file is None else sum(key in file for key in keys)
        if is_training:
            if not self._shapes:
                self._tell_mode(cut)
            self.hits += held
            self.misses += rows - held
        self._rounds_alike.setdefault(kind, {rows: math.inf})
        is_alike = self._is_alike(kind, rows)
        is_known = len(self._shapes.get((kind, rows), ())) == len(cut.modules)
        due = file is None or file.hit_batches % COMPUTE_EVERY == 0 or not is_known
        if file is not None and held:
            file.hit_batches += 1
        if is_training and 0 < self.rows(True) <= self.hits - self._hits_before:  # an epoch was read
            self._tell()
        now = _Pass(cut=cut, kind=kind, keys=keys, computes=held < rows or due or not is_alike)
        if held < rows and not is_alike:
            self._keep_from_copy(now, (args, kwargs))
            if not self.enabled:
                return None
        if not now.computes and self.cached_through not in self._checked:
            self._checked.add(self.cached_through)
            if not self._returns_the_same(args, kwargs):
                self.switch_off(f"the model reads more of what was computed before {cut.names[-1]!r} than its output")
                return None
        return now

    def _is_alike(self, kind: Kind, rows: int) -> bool:
        """Return whether batches of so many rows round like those that rows are kept of, the first ones of the kind."""
        return self._rounds_alike[kind].get(rows) == math.inf

    def _tell_mode(self, cut: Cut) -> None:
        """Warn once where norms or dropout of the prefix go on in training mode without a cache."""
        parts = [part for module in cut.modules for part in module.modules() if part.training]
        moves = any(
            (isinstance(part, _NormBase) and part.track_running_stats) or (isinstance(part, _DropoutNd) and part.p > 0)
            for part in parts
            if not is_evaluated(part)
        )
        if moves and not self._is_mode_told and self._placeholder is None:
            self._is_mode_told = True
            warnings.warn(
                "forward cache: norms and dropout of the prefix, in training mode without a cache, are in evaluation "
                "mode: CAC_PREFIX_MODE=eval, or module.eval() in each epoch, makes both alike",
                stacklevel=2,
            )

    def _tell(self) -> None:
        if not self._is_told and self._placeholder is None:
            self._is_told, size = True, f"{self.rows(True):,} samples, {self.bytes / 1e6:,.0f} MB"
            print(f"forward cache: kept the prefix's outputs of {size}", file=sys.stderr)

    def _returns_the_same(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a copy of the model that reads the first rows of a batch returns what it does without.

        This guards against reads that the recorded pass did not show: without it they are garbage that nobody sees.
        """
        few, few_named = _rows_of((args, kwargs))
        found: list[list[Tensor]] = []
        with self._copied() as (twin, _):
            try:
                for _ in range(3):  # the first two compute; a model that draws or counts by itself differs there
                    with kept_generators(t.device for t in tensors_in((few, few_named))):
                        leaves = tensors_in(twin(*few, **few_named))
                        found.append([t.detach() for t in leaves if t.is_floating_point()])
            except Exception:  # noqa: BLE001  # it takes batches of one size alone
                return True
        first, again, read = found
        return not all(map(_is_close, first, again)) or all(map(_is_close, again, read))

    @contextmanager
    def _copied(self) -> Iterator[tuple[nn.Module, ForwardCache]]:
        """Yield a copy of the model that runs through a cache of its own, of which no count of FLOPs sees anything."""
        with torch.inference_mode(False), torch.set_grad_enabled(self.model.training), _disable_current_modes():
            twin = copy_of(self.model)
            of_twin = dict(zip(map(id, self.model.parameters()), twin.parameters(), strict=True))
            ours = self.model.__dict__.get("forward")
            if isinstance(ours, _Forward) and ours.is_of_class:
                del twin.forward  # a method as an attribute would keep the copy alive until a collection of cycles
            with ForwardCache(twin, budget_bytes=2**30, folder=self._folder) as probe, uncompiled(), probe.running():
                probe._placeholder, probe._checked = math.nan, {self.cached_through}
                probe._cut_in_evaluation = self._cut_in_evaluation
                probe._take_cuts(
                    [
                        replace(
                            cut,
                            modules=tuple(map(twin.get_submodule, cut.names)),
                            parameters=tuple(of_twin[id(parameter)] for parameter in cut.parameters),
                        )
                        for cut in self.cuts
                    ]
                )
                yield twin, probe

    def _keep_from_copy(self, now: _Pass, arguments: Any) -> None:
        """Keep rows of a batch as a copy of the model computes them in a batch of the size that rows are kept of."""
        file, size, rows = self.files.get(now.kind), next(iter(self._rounds_alike[now.kind])), len(now.keys)
        has_room = file is not None and self.budget_bytes - self.bytes >= file.row_bytes
        if not (self._keeps_training if now.kind.is_training else has_room) or self._copies == _MOST_COPIES:
            return
        self._copies += 1
        # Each row is repeated in place, so that batches which are sorted stay so.
        most = max(rows, size)
        some, named = _rows_of(arguments, [place * rows // most for place in range(size)])
        firsts = [-(-row * most // rows) for row in range(min(rows, size))]
        try:
            with self._copied() as (twin, probe), kept_generators([now.kind.device]):
                probe._ends_behind_prefix = True
                twin(*some, **named)
        except _Ended as ended:
            outputs = ended.outputs[firsts]
        except Exception:  # noqa: BLE001  # a model that takes no equal rows, or that cannot be copied
            return
        else:
            return
        self._keep(replace(now, keys=now.keys[:size]), outputs, is_of_copy=True)

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> list[Cut]:
        """Return the cuts of a pass of the first rows, in this mode, of which all that is left may be read."""
        few = _rows_of((args, kwargs))

        def forward(model: nn.Module) -> list[Any]:
            result = model(*few[0], **few[1])
            for leaf in leaves_in(result):
                if not isinstance(leaf, (Tensor, *PLAIN)):
                    raise UserError(f"the model returns a {type(leaf).__name__}, which may hold any of its outputs")
            own = [value for part in model.modules() for value in vars(part).items()]
            return [result, *(value for name, value in own if name not in ("_parameters", "_buffers"))]

        with torch.inference_mode(False):
            return recorded_cuts(self.model, forward, is_training=is_training)

    def _is_cut_in_evaluation(self, cut: Cut, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an evaluation reads nothing behind the cut that was computed before it, either."""
        key = (self.cached_through, kind.inputs)
        if key not in self._cut_in_evaluation:
            reason = "later parts of the model use what was computed before the cut, too"
            try:
                is_cut = any(one.modules == cut.modules for one in self._recorded(args, kwargs, is_training=False))
            except UserError as error:
                is_cut, reason = False, str(error).removeprefix("forward cache: ")
            self._cut_in_evaluation[key] = is_cut
            if not is_cut:
                warnings.warn(f"forward cache: evaluation runs without it: {reason}", stacklevel=2)
        return self._cut_in_evaluation[key]

    @contextmanager
    def _replaced(self, now: _Pass) -> Iterator[None]:
        """Replace `forward` of the prefix's modules inside the block."""
        before = {module: module.__dict__.get("forward") for module in now.cut.modules}
        visit = torch.compiler.disable(self._visit) if "torch._dynamo" in sys.modules else self._visit
        try:
            for module in before:
                now.originals[module] = module.forward
                module.forward = partial(visit, now, module)
            yield
        finally:
            for module, own in before.items():
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.forward = own

    def _visit(self, now: _Pass, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cut, position = now.cut, now.position
        if now.is_inside or position == len(cut.modules):  # a module may be used again after the prefix
            return now.originals[module](*args, **kwargs)
        if module is not cut.modules[position]:
            raise _Otherwise(f"ran {cut.names[cut.modules.index(module)]!r}")
        now.position += 1
        is_last = now.position == len(cut.modules)
        shapes = self._shapes.setdefault((now.kind, len(now.keys)), [])
        if not now.computes:
            if is_last:
                return self._read(now, shapes[position])
            stand_in = partial(_stand_in, device=now.kind.device, value=self._placeholder)
            return tree_map_only(Tensor, stand_in, shapes[position])
        now.is_inside = True
        with _evaluating(module):  # in training with gradients on, which nothing here needs: its FLOPs are a step's
            y = now.originals[module](*args, **kwargs)
        now.is_inside = False
        if is_last and self._ends_behind_prefix:
            raise _Ended(y)
        shapes[position:] = [_meta(y)]
        if is_last:
            self._keep(now, y)
        return y

    def _read(self, now: _Pass, meta: Tensor) -> Tensor:
        y = self.files[now.kind].get(now.keys).to(now.kind.device, non_blocking=True)
        # Always the same strides, because later modules may choose kernels, and thus rounding, by them.
        return y if meta.is_contiguous() else torch.empty_like(meta, device=y.device).copy_(y)

    def _keep(self, now: _Pass, y: Any, *, is_of_copy: bool = False) -> None:
        """Compare computed rows with those that are kept, and keep the others if batches of this size round alike."""
        keys, is_training = now.keys, now.kind.is_training
        if not isinstance(y, Tensor) or y.layout != torch.strided or y.is_nested or not y.dim() or len(y) != len(keys):
            raise _Otherwise(f"got no row a sample from {now.cut.names[-1]!r}")
        file, alike = self.files.get(now.kind), self._rounds_alike[now.kind]
        known = [] if file is None else [row for row, key in enumerate(keys) if key in file]
        if file is not None and known:
            before = file.get([keys[row] for row in known]).to(y.device)
            after = y[torch.tensor(known, device=y.device)]
            if not _is_close(after, before):
                return self.switch_off(
                    "the prefix must compute each sample by itself and the same each time: it has a norm without "
                    "running statistics, or draws random numbers in eval mode"
                )
            if not is_of_copy and len(keys) != next(iter(alike)):
                is_equal, enough = torch.equal(after, before), _ENOUGH.get(_coarsest_type(y).itemsize, 100)
                equal = alike.get(len(keys), 0) + after.numel() if is_equal else -math.inf
                alike[len(keys)] = math.inf if equal >= enough else equal
                if not is_equal and len(keys) > next(iter(alike)):
                    self.files.pop(now.kind).close()
                    alike, file = {len(keys): math.inf}, None
                    self._rounds_alike[now.kind] = alike
        new = {key: row for row, key in enumerate(keys) if file is None or key not in file}
        row_bytes = y[0].numel() * y.element_size()
        is_kept = (self._keeps_training or not is_training) and (is_of_copy or self._is_alike(now.kind, len(keys)))
        if not new or row_bytes == 0 or not is_kept:
            return None
        most, count = self.samples or sys.maxsize, len(new) + (0 if file is None else len(file))
        if is_training and count > most:
            return self.switch_off(
                f"inputs must repeat, but there are more different ones than {most} samples: augmentation?"
            )
        if is_training and self.bytes + len(new) * row_bytes > self.budget_bytes:
            self._drop(False)  # evaluation keeps what training leaves
        room = (self.budget_bytes - self.bytes) // row_bytes
        if is_training and room < len(new):
            needed = "" if self.samples is None else f", {self.samples * row_bytes:,} for all"
            warnings.warn(
                f"forward cache keeps nothing of training: its budget of {self.budget_bytes:,} bytes must hold the "
                f"outputs of all samples, {row_bytes:,} bytes each{needed}",
                stacklevel=2,
            )
            self._keeps_training = False
            return self._drop(True)
        try:
            if room and file is None:
                file = self.files[now.kind] = RowFile(y, most_bytes=self.budget_bytes, folder=self._folder)
            if room and file is not None:
                file.put(dict(islice(new.items(), room)), y)
        except OSError as error:
            return self.switch_off(f"no room for its file: {error}; give another folder or a smaller budget")
        return self._tell() if is_training and count == most else None
