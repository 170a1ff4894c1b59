"""What a recipe sets on the process, the model and the optimizer, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.recipe import recipe as compiling
from trainables.training.recipe.recipe import Recipe, with_kernels
from trainables.training.run import TrainingRun
from trainables.workloads import build_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def recipe(device: torch.device = CPU, **fields: Any) -> Recipe:
    return Recipe(TrialConfig(method="none", **fields), device)


def test_a_runs_settings_of_the_process_end_with_it() -> None:
    with TrainingRun(TrialConfig(method="none", epochs=1, deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with TrainingRun(TrialConfig(method="none", epochs=1, cudnn_benchmark=True)):
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("given", "pinned"), [({}, True), ({"pin_memory": False}, False)])
def test_on_a_gpu_batches_are_pinned_and_sent_without_waiting(
    given: dict[str, Any], pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: the calls are what can be seen."""
    found = recipe(CUDA, **given)
    assert found.loader(build_for(TrialConfig()))._pin == pinned
    calls: list[tuple[object, bool]] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: calls.append((device, non_blocking)))
    found.on_device((torch.ones(1), torch.ones(1)))
    assert calls == [(CUDA, True)] * 2


def test_pinning_on_a_cpu_is_said_to_do_nothing() -> None:
    with pytest.warns(UserWarning, match="pin_memory=True has no effect on the CPU"):
        recipe(pin_memory=True).loader(build_for(TrialConfig()))


def test_channels_last_is_the_format_of_weights_and_images() -> None:
    with TrainingRun(TrialConfig(method="none", epochs=1, channels_last=True)) as run:
        run.begin_epoch()
        run.train_step()  # unless this process has done so, counts FLOPs on a copy of the model, hooks included
        seen = []
        run.model.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
        )
        run.train_step()
        weight = run.model.get_parameter("conv3.weight")
    assert seen == [True]
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_kernels_change_nothing_else_of_an_optimizer(kind: type[torch.optim.Optimizer], fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [{"params": [("w", model.weight)], "lr": 0.5}, {"params": [("b", model.bias)], "weight_decay": 0.1}]
    plain = kind(groups, lr=0.1)  # type: ignore[call-arg]
    found = with_kernels(plain, fused=fused)
    assert type(found) is kind
    for group, before in zip(found.param_groups, plain.param_groups, strict=True):
        assert (group["fused"], group["foreach"]) == (fused, not fused)
        changed = {"fused", "foreach", "params"}
        assert {k: v for k, v in group.items() if k not in changed} == {
            k: v for k, v in before.items() if k not in changed
        }
        assert [id(p) for p in group["params"]] == [id(p) for p in before["params"]]
    model(torch.ones(1, 3)).sum().backward()
    found.step()


def test_gradients_of_parameters_that_were_replaced_are_clipped() -> None:
    """As thinning replaces them."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = recipe(clip_grad_norm=0.5)
    model.weight = nn.Parameter(torch.ones(1, 2))
    optimizer.param_groups[0]["params"][0] = model.weight
    model(torch.full((1, 2), 30.0)).sum().backward()
    found.after_backward(optimizer)
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert float(norms.norm()) == pytest.approx(0.5)


@pytest.mark.parametrize(("kind", "factor"), [(torch.optim.SGD, 4.0), (torch.optim.Adam, 2.0)])
def test_the_learning_rate_follows_the_batch_size(kind: Any, factor: float) -> None:
    optimizer = recipe().prepare_optimizer(kind(nn.Linear(2, 1).parameters(), lr=0.1), 4.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)


def test_a_batch_size_changes_steps_and_learning_rate() -> None:
    with TrainingRun(TrialConfig(method="none", epochs=1, batch_size=128)) as run:
        assert run.total_steps == 5
        run.begin_epoch()
        run.train_step()
        assert run.optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.4)


def test_a_batch_size_of_a_workload_that_chooses_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch_size can't be set for workload text, which chooses it itself, got 8"):
        build_for(TrialConfig(workload="text", batch_size=8))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"precision": "half"}, "unknown precision 'half'"),
    ({"activation_checkpointing": "all"}, "unknown activation_checkpointing 'all'"),
    ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
    ({"loader_workers": -1}, "loader_workers must be an integer >= 0, got -1"),
    ({"loader_workers": True}, "loader_workers must be an integer >= 0, got True"),
    ({"channels_last": 1}, "channels_last must be True or False, got 1"),
    ({"clip_grad_norm": 0.0}, "clip_grad_norm must be a number above 0, got 0.0: leave it out for no clipping"),
    ({"cudnn_benchmark": True, "deterministic": True}, "cudnn_benchmark must be False with deterministic=True"),
    ({"fused_optimizer": True, "precision": "float16"}, "fused_optimizer must be False with precision=float16 and Gra"),
    ({"compile_mode": "fast"}, "unknown compile_mode 'fast'"),
    ({"compile_mode": "default", "forward_cache_mb": 5}, "forward_cache_mb must be 0 with compile_mode=default, got 5"),
    ({"precision": "bfloat16", "forward_cache_mb": 5}, "forward_cache_mb must be 0 with precision=bfloat16, got 5"),
    (
        {"method": "kfac", "precision": "bfloat16"},
        "method kfac computes gradients of its own in float32, got precision=bfloat16",
    ),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_value_is_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        TrialConfig(**given)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_fields_that_leave_gradients_as_they_are_go_with_an_estimator() -> None:
    TrialConfig(method="kfac", batch_size=32, loader_workers=1, precision="float32")


def test_without_a_compiler_the_model_trains_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "why_not", lambda _: "InvalidCxxCompiler: No working C++ compiler found")
    model, found = nn.Linear(2, 1), recipe(compile_mode="default")
    with pytest.warns(UserWarning, match="compile_mode=default has no effect: torch.compile does not work here"):
        found.compile(model)
    assert not found.compiled
    assert model._compiled_call_impl is None
