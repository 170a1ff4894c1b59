"""Built-in workloads: batches by epoch and seed alone, options that are refused, fingerprints by option."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainables.errors import UserError
from trainables.workloads import build
from trainables.workloads.base import Workload

OPTIONS = {
    "digits": ("activations=binary",),
    "text": ("batch_size=3", "steps_per_epoch=5"),
    "binary_mlp": ("batch_size=4", "steps_per_epoch=3"),
    "gan_digits": ("width=4",),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_are_a_function_of_epoch_and_seed_and_resume_anywhere(name: str) -> None:
    workload = build(name, OPTIONS[name])

    def batches(epoch: int, seed: int, start: int = 0) -> list[Tensor]:
        return [
            torch.cat([part.flatten().double() for part in b]) for b in workload.train_batches_from(epoch, seed, start)
        ]

    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    whole = batches(2, 1)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert len(whole) == workload.steps_per_epoch
    assert all(torch.equal(a, b) for a, b in zip(whole, batches(2, 1), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], batches(2, 1, start=2), strict=True))
    for other in (batches(2, 2), batches(3, 1), whole[1:]):
        assert not torch.equal(whole[0], other[0])
    if workload.by_step:
        parts = zip(workload.batch_at(2, 1, 1), list(workload.train_batches(2, 1))[1], strict=True)
        assert all(torch.equal(a, b) for a, b in parts)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_fingerprint_tells_options_apart(name: str) -> None:
    found = {build(name, options).fingerprint() for options in ((), OPTIONS[name][:1], OPTIONS[name][-1:], ())}
    assert len(found) == 1 + len(OPTIONS[name])


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("digits", "activations=binry", "unknown activations of workload digits 'binry': did you mean 'binary'"),
        ("text", "batch_size=0", "^batch_size of workload text must be at least 1, got 0$"),
        ("binary_mlp", "steps_per_epoch=0", "^steps_per_epoch of workload binary_mlp must be at least 1, got 0$"),
        ("binary_mlp", "pretrained=maybe", "option pretrained of workload binary_mlp must be yes or no, got 'maybe'"),
        ("gan_digits", "first=both", "unknown first network of workload gan_digits 'both'"),
        ("gan_digits", "width=5", "width of workload gan_digits must be an even number >= 2, got 5"),
        ("rosenbrock", "pairs=0", "pairs of workload rosenbrock must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(name: str, option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, (option,))


def test_a_workload_that_cannot_be_evaluated_is_told_what_to_define() -> None:
    from tiny_workload import Tiny

    class Without(Tiny):
        evaluate, evaluation_batches = Workload.evaluate, Workload.evaluation_batches  # type: ignore[assignment]

    workload = Without()
    with pytest.raises(UserError, match="tiny must define evaluate, or evaluation_batches of validation: got none"):
        workload.evaluate(workload.make_model(), "validation", "cpu")
