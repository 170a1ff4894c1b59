"""The device of a search and a trial: a patched clock, and a GPU that is the CPU under another name."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis.io.study_files import Layout, StudyInfo
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training import device_choice
from trainables.training import run as training_run
from trainables.training.device_choice import DeviceChoice, choose_device, sees_gpu
from tune_cac.cli.arguments import RUN, config_from_arguments
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning.run_context import settle_device

pytestmark = pytest.mark.usefixtures("tiny")
GIBIBYTE = 2**30


def config() -> TrialConfig:
    return TrialConfig(workload="tiny", epochs=8, method="none")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Two GPUs of 8 GiB, and seconds that steps take by ``param``; returns the devices of the steps trained."""
    seconds: dict[str, float] = request.param
    now, trained = [0.0], []

    class Run(training_run.TrainingRun):
        def __init__(self, config: TrialConfig) -> None:
            super().__init__(replace(config, device="cpu"))
            self.named = config.device

        def train_step(self) -> None:
            if seconds[self.named] == 0:
                raise RuntimeError("no kernel image is available\nmore")
            super().train_step()
            now[0] += seconds[self.named]
            trained.append(self.named)

    monkeypatch.setattr(training_run, "TrainingRun", Run)
    monkeypatch.setattr(device_choice, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(device_choice, "version", lambda _: "2.13.0")
    for name, value in {
        "is_available": True, "device_count": 2, "mem_get_info": (8 * GIBIBYTE, 8 * GIBIBYTE),
        "max_memory_reserved": GIBIBYTE,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    return trained


@pytest.mark.parametrize("gpu", [{"cpu": 0.4, "cuda": 0.1}], indirect=True)
def test_the_faster_device_is_taken_and_said(gpu: list[str]) -> None:
    found = choose_device(config(), at_a_time=2)
    assert (found.device, found.gpus_per_trial) == ("cuda", 1.0)
    assert str(found) == "on the GPU (a step takes 100 ms on the GPU and 400 ms on a processor)"
    assert gpu.count("cuda") == gpu.count("cpu") == 20 + 3


@pytest.mark.parametrize("gpu", [{"cpu": 0.4, "cuda": 0.1}], indirect=True)
def test_a_gpu_that_is_slower_than_the_processors_together_is_left_alone(gpu: list[str]) -> None:
    found = choose_device(config(), at_a_time=16)
    assert (found.device, found.gpus_per_trial) == ("cpu", 0.0)
    assert "400 ms on a processor, of which 16 train at a time" in found.why


@pytest.mark.parametrize("gpu", [{"cpu": 9.0, "cuda": 0.1}], indirect=True)
def test_trials_share_a_gpu_by_the_memory_that_the_run_used_and_slow_steps_are_not_all_timed(gpu: list[str]) -> None:
    """1 GiB and 600 MiB for CUDA: 4 fit in 90 % of 8 GiB, of 16 at a time on two GPUs."""
    found = choose_device(config(), at_a_time=16)
    assert (found.device, found.gpus_per_trial) == ("cuda", 1 / 4)
    assert gpu.count("cpu") < gpu.count("cuda")
    assert choose_device(replace(config(), workers=3)).device == "cpu"  # of two GPUs


@pytest.mark.parametrize("gpu", [{"cpu": 9.0, "cuda": 0.0}], indirect=True)
def test_what_fails_on_the_gpu_trains_on_the_cpu(gpu: list[str]) -> None:
    assert choose_device(config()) == DeviceChoice("cpu", "training fails on the GPU: no kernel image is available")


@pytest.mark.parametrize("gpu", [{"cpu": 9.0, "cuda": 0.1}], indirect=True)
def test_a_search_takes_it_and_a_study_keeps_it(gpu: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options, why = settle_device(SearchOptions(workload="tiny", epochs=8, cpus_per_trial=1))
    assert (options.device, why.device) == ("cuda", "cuda")
    assert options.trials_at_a_time <= int(2 / options.gpus_per_trial)
    layout = Layout(tmp_path)
    layout.write_info(StudyInfo(epochs=8, versions={}, gpus_per_trial=0.5))
    monkeypatch.setattr("tune_cac.tuning.run_context.read_journal", lambda _: [{"config": {"device": "cuda"}}])
    layout.journal.touch()
    options, why = settle_device(SearchOptions(workload="tiny", epochs=8), layout)
    assert (options.gpus_per_trial, why.why) == (0.5, "as the study so far")
    monkeypatch.setattr(device_choice, "sees_gpu", lambda: False)
    with pytest.raises(UserError, match=r"device cuda \(as the study so far\) needs a GPU, .*: give --device cpu"):
        settle_device(SearchOptions(workload="tiny", epochs=8), layout)
    assert settle_device(SearchOptions(workload="tiny", epochs=8, device="cpu"), layout)[0].gpus_per_trial == 0


def test_without_a_gpu_nothing_is_timed() -> None:
    assert not sees_gpu()
    options, why = settle_device(SearchOptions())
    assert (options.device, str(why)) == ("cpu", "on the CPU (torch sees no GPU)")
    with pytest.raises(UserError, match="--gpus-per-trial must be 0 with --device cpu, got 1"):
        settle_device(SearchOptions(device="cpu", gpus_per_trial=1.0))
    with pytest.raises(UserError, match="unknown --device 'gpu'"):
        SearchOptions(device="gpu")


def test_a_script_has_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides them from a trial that asked for none."""
    monkeypatch.setattr(device_choice, "sees_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = choose_device(TrialConfig(workload="script", workload_options=("command=python a.py",), method="none"))
    assert (found.device, found.gpus_per_trial) == ("cuda", 1.0)


@pytest.mark.parametrize("gpu", [{"cpu": 0.4, "cuda": 0.1}], indirect=True)
def test_a_trial_takes_it_too(gpu: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    for declared in RUN:
        parser.add_argument(declared.name, **declared.settings)
    assert config_from_arguments(parser.parse_args(["--workload", "tiny", "--epochs", "8"])).device == "cuda"
    assert "training on the GPU (a step takes 100 ms on the GPU and 400 ms on a processor)" in capsys.readouterr().err
    assert config_from_arguments(parser.parse_args(["--workload", "tiny", "--device", "cpu"])).device == "cpu"
