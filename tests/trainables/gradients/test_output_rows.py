"""Weighted rows of a model's output against the gradient of the explicitly weighted loss; losses of single samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from trainables.errors import UserError
from trainables.gradients.layer_signals import LayerSignals, treatable_layers
from trainables.gradients.output_rows import OutputRows, output_of, sample_losses

COUNT = 6
Batch = tuple[Tensor, ...]


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A mapping with attributes, as Hugging Face's `transformers.utils.ModelOutput` is."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


# As transformers does with each of its classes.
register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: ModelOutput(**dict(zip(names, values, strict=True))),
)


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Wrapped(nn.Module):
    """A model that returns its logits in something."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.body(x))


def data() -> Batch:
    return torch.randn(COUNT, 5, dtype=torch.float64), torch.randint(3, (COUNT,))


def regularized(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def identity(logits: Tensor) -> Any:
    return logits


#: What models return, and how a loss takes the logits.
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (identity, identity),
    "attribute": (lambda z: ModelOutput(loss=z.mean(), logits=z, hidden=z * 2), lambda out: out.logits),
    "key": (lambda z: ModelOutput(loss=z.mean(), logits=z), lambda out: out["logits"]),
    "dict": (lambda z: {"logits": z, "hidden": z * 2}, lambda out: out["logits"]),
    "other key": (lambda z: {"scores": z, "count": torch.tensor(3)}, lambda out: out["scores"]),
    "tuple": (lambda z: (torch.zeros(2, dtype=torch.int64), z), lambda out: out[1]),
    "named": (lambda z: Pair(logits=z, hidden=z * 2), lambda out: out.logits),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_give_the_gradient_of_the_weighted_losses(form: str) -> None:
    """Also where the last layer is watched, whose output is the model's; regularization is untouched."""
    wrap, logits = FORMS[form]
    model, (x, y), weights = Wrapped(wrap), data(), torch.rand(COUNT, dtype=torch.float64)
    losses = F.cross_entropy(model.body(x), y, reduction="none")
    expected = torch.autograd.grad((weights * losses).mean() + regularized(model), list(model.parameters()))
    of_weights = torch.autograd.grad(
        (weights * F.cross_entropy(model.body(x), y, reduction="none")).mean(), model.body[2].weight
    )  # type: ignore[arg-type]
    with OutputRows(model, COUNT, lambda gradient: weights) as rows, LayerSignals(treatable_layers(model)) as signals:
        loss = F.cross_entropy(logits(model(x)), y) + regularized(model)
        found = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    ((inputs, of_outputs),) = signals.calls("body.2")
    torch.testing.assert_close(of_outputs.T @ inputs, of_weights[0])
    p = model.body(x).softmax(1) - F.one_hot(y, 3)
    torch.testing.assert_close(rows.norms, p.norm(dim=1))  # of each sample's own loss, unweighted
    model(x[:2])  # the hook is gone


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_samples_from_any_output(form: str) -> None:
    wrap, logits = FORMS[form]
    model, (x, y) = Wrapped(wrap), data()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(logits(model(batch[0])), batch[1])

    with OutputRows(model, COUNT, keeps_whole=True) as rows:
        loss(model, (x, y))
    found = sample_losses(loss, rows.whole, (x, y))
    torch.testing.assert_close(found, F.cross_entropy(model.body(x), y, reduction="none"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.tensor(1.0), r"a row for each of the 6 samples of a batch, got shape \(\): put the samples' dimension"),
        (torch.zeros(5, 6), r"a row for each of the 6 samples of a batch, got shape \(5, 6\)"),
        ({"logits": torch.zeros(12, 2)}, r"got shape \(12, 2\)"),
        ((torch.zeros(6, 2), torch.zeros(6, 3)), "one tensor, or logits in a mapping, .* got tuple with 2 tensors"),
        ({"a": torch.zeros(6, dtype=torch.int64)}, "got dict with 0 tensors"),
        (None, "got NoneType with 0 tensors"),
    ],
)
def test_outputs_without_a_row_for_each_sample_are_refused(output: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        output_of(output, COUNT)


def test_a_loss_that_does_not_call_the_model_is_refused() -> None:
    model, (x, _) = Wrapped(identity), data()
    message = r"must call the model itself, .* got no call of Wrapped: call model\(\.\.\.\)"
    with pytest.raises(UserError, match=message), OutputRows(model, COUNT):
        model.body(x).sum().backward()
    with pytest.raises(ZeroDivisionError), OutputRows(model, COUNT):
        raise ZeroDivisionError


def test_losses_of_sequences_are_means_over_their_own_tokens() -> None:
    logits, labels = torch.randn(COUNT, 4, 3), torch.randint(3, (COUNT, 4))
    labels[2, 1:] = -100

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    found = sample_losses(loss, logits, (labels, labels))
    single = [F.cross_entropy(row, own) for row, own in zip(logits, labels, strict=True)]
    torch.testing.assert_close(found, torch.stack(single))


def test_a_loss_that_needs_more_than_the_output_is_refused() -> None:
    logits, labels = torch.randn(COUNT, 3), torch.randint(3, (COUNT,))
    with pytest.raises(UserError, match=r"only calls the model .* got AttributeError .*: take .* output_gradient"):
        sample_losses(lambda model, batch: model.body.weight.norm(), logits, (labels,))
    whole = ModelOutput(loss=torch.tensor(1.0), logits=logits)  # its loss is the batch's
    with pytest.raises(UserError, match="samples' losses need a loss that only calls the model"):
        sample_losses(lambda model, batch: model(None).loss, whole, (labels,))
