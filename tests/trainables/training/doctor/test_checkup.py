"""The doctor on a model, a loader and an optimizer: what it says, and that it leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainables.errors import UserError
from trainables.training.doctor import checks
from trainables.training.doctor.checks import Ratios
from trainables.training.doctor.checkup import doctor
from trainables.training.doctor.observation import StepWatch, zeroed_gradients

CPU = torch.device("cpu")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 3)
    )


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(40, 1, 6, 6), torch.randint(0, 3, (40,))), batch_size=8)


def names(findings: Any) -> list[str]:
    return [finding.name for finding in findings]


@pytest.mark.slow
def test_a_training_with_faults_is_told_each_and_left_as_it_was() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    totals = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        totals.append(loss.item())

    batches = loader()
    step(next(iter(batches)))
    model.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    generator = torch.get_rng_state()
    found = doctor(model, batches, optimizer, step=step)
    assert {"bias-before-batch-norm", "gradients-set-to-zero", "host-waits-for-device"} <= set(names(found.findings))
    here = next(finding for finding in found.findings if finding.name == "host-waits-for-device")
    assert f"{__file__}:" in here.what
    assert "(1 a step)" in here.what
    assert not model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    kept = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))
    text = str(found)
    assert 'model[0].register_parameter("bias", None)  # or built with bias=False' in text
    assert "CAC_STOP_LAYER_NUM: parameters behind a bias that goes get smaller numbers" in text


@pytest.mark.slow
def test_a_good_training_is_said_to_be_one() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    data = next(iter(loader()))
    found = doctor(model, [data] * 5, optimizer, step=step)
    assert found.findings == ()
    assert str(found).startswith("recipe: nothing found")


def test_what_it_needs() -> None:
    with pytest.raises(UserError, match="needs a loader with at least one batch, got none"):
        doctor(make(), [])
    with pytest.raises(
        UserError, match=r"the model cannot run on what the batch seems to hold for it \(.*\): give step="
    ):
        doctor(make(), [torch.ones(2, 2)])
    assert doctor(make(), [{"images": torch.randn(4, 1, 6, 6)}]).findings


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {"a-b": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4))}
        )

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        found: Tensor = self.body["a-b"](left + scale * right)
        return found


@pytest.mark.parametrize(
    "batch",
    [
        (torch.randn(8, 3), torch.randn(8, 3), torch.zeros(8)),
        {"labels": torch.zeros(8), "right": torch.randn(8, 3), "left": torch.randn(8, 3)},
        ((torch.randn(8, 3), torch.randn(8, 3)), torch.zeros(8)),
    ],
)
def test_a_model_is_called_with_what_fits_its_arguments_and_its_mend_is_python(batch: Any) -> None:
    model = TwoInputs()
    (found,) = doctor(model, [batch]).findings
    assert found.name == "bias-before-batch-norm"
    exec(found.mend[0], {"model": model})
    assert model.body["a-b"][0].bias is None  # type: ignore[index]


def test_with_a_step_every_network_is_called_as_the_step_calls_it() -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    judge = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (maker, judge)]
    both = nn.ModuleList([maker, judge])
    before = {name: value.clone() for name, value in both.state_dict().items()}

    def step(batch: Mapping[str, Any]) -> None:
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            optimizer.zero_grad()
            (sign * judge(maker(batch["meta"]["noise"])).mean()).backward()
            optimizer.step()

    found = doctor(both, [{"meta": {"noise": torch.randn(8, 2)}}], optimizers, step=step)
    lines = [line for finding in found.findings for line in finding.mend]
    assert any(line.startswith("model[0].register") for line in lines)
    assert all(finding.what.startswith("in Sequential, ") for finding in found.findings if finding.name[:4] == "bias")
    assert names(found.findings).count("bias-before-batch-norm") == 2
    assert all(torch.equal(value, before[name]) for name, value in both.state_dict().items())
    assert not any(optimizer.state for optimizer in optimizers)


def test_a_line_that_reads_in_some_steps_alone_is_no_wait_of_every_step() -> None:
    model = make()
    seen = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        seen.append(len(seen))
        if len(seen) % 2 == 1:
            print(loss.item(), loss.exp().item())

    assert "host-waits-for-device" not in names(doctor(model, loader(), step=step).findings)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
@pytest.mark.parametrize("unscaled", [False, True])
def test_clipping_before_unscale_is_found(clip: Any, unscaled: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    found = [one for one in doctor(model, [torch.ones(4, 3)], step=step).findings if one.name.startswith("clipping")]
    assert bool(found) is not unscaled
    if found:
        assert f"{__file__}:" in found[0].what


GOOD = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, pin_memory=True)
SLOW = ["loader-without-workers", "loader-without-pinned-memory"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (checks.data_parallel(nn.DataParallel(make())), ["data-parallel"]),
        (checks.data_parallel(make()), []),
        (checks.loading(loader(), 0.02, on_gpu_machine=True), SLOW),
        (checks.loading(GOOD, 0.02, on_gpu_machine=True), []),
        (checks.loading(loader(), 0.02, on_gpu_machine=False), []),
    ],
)
def test_what_is_seen_without_running_anything(found: Any, expected: list[str]) -> None:
    assert names(found) == expected


def test_a_loader_that_holds_the_step_back_is_measured() -> None:
    class Slow(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Tensor:
            import time

            time.sleep(0.05)
            return torch.ones(1, 6, 6)

    found = doctor(make(), DataLoader(Slow(), batch_size=2)).findings
    waiting = next(finding for finding in found if finding.name == "data-loading")
    assert "with num_workers=0" in waiting.what
    assert "of a step waits for its batch here" in waiting.cost


@pytest.mark.parametrize(
    ("capability", "precision", "expected"),
    [((8, 0), "highest", ["float32-without-tensor-cores"]), ((9, 0), "high", []), ((7, 5), "highest", [])],
)
def test_float32_without_tensor_cores(
    capability: tuple[int, int], precision: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert names(checks.matmul_precision(make(), None, torch.device("cuda"))) == expected
    assert names(checks.matmul_precision(make(), None, CPU)) == []


def test_an_optimizer_of_several_kernels_is_measured_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def measured(mended: Callable[[], object], plain: Callable[[], object], _: torch.device) -> Ratios:
        steps.append((mended(), plain()))
        return Ratios(speeds)

    monkeypatch.setattr(checks, "ratios", measured)  # no test is decided by a clock
    speeds: tuple[float, ...] = (0.4, 0.5, 0.6)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    before = [p.clone() for p in model.parameters()]
    (found,) = checks.slow_optimizer(optimizer, CPU)
    assert found.mend == ("torch.optim.AdamW(..., fused=True)",)
    assert found.cost == "50.0 % of an optimizer step (40.0 % to 60.0 %, 3 pairs)"
    assert len(steps) == 1
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert names(checks.slow_optimizer(torch.optim.AdamW(model.parameters(), fused=True), CPU)) == []
    assert names(checks.slow_optimizer(torch.optim.LBFGS(model.parameters()), CPU)) == []
    speeds = (0.8, 0.95)
    assert names(checks.slow_optimizer(optimizer, CPU)) == []


def test_reads_of_values_are_found_with_their_line_except_those_of_optimizers() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with StepWatch(CPU) as watch:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        optimizer.step()
        assert watch.waits == {}
        if loss > 0:
            pass
        float(loss)  # nothing was computed since the host waited
        float(loss + 1)
    assert sum(map(len, watch.waits.values())) == 2
    assert all(place.startswith(f"{__file__}:") for place in watch.waits)


def test_gradients_set_to_zero_are_found_only_where_there_are_any() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = torch.optim.Optimizer.zero_grad
    with zeroed_gradients() as places:
        optimizer.zero_grad(set_to_none=False)  # there are none yet
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
        assert places == {}
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad(set_to_none=False)
    assert sum(places.values()) == 1
    assert torch.optim.Optimizer.zero_grad is original
