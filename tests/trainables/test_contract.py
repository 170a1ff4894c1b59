"""The contract of methods and workloads; a new one is covered by being registered."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import noise, write_parquet
from runs import MEASURED, Row, facts, finish, without
from schedule_texts import PRUNING
from tiny_bert import save_tiny_bert, write_sentences

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.metrics import ROW
from trainables.registry import METHODS, WORKLOADS
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun
from trainables.workloads import build

#: Prunes, regularizes and quantizes within three epochs: the state of each has to survive.
SCHEDULE = """
version: 1
pruners:
  by_sensitivity: {class: SensitivityPruner, sensitivities: {"*weight": 0.4}}
regularizers:
  small: {class: L1Regularizer, reg_regims: {"*weight": 1.0e-5}}
quantizers:
  linear: {class: QuantAwareTrainRangeLinearQuantizer, bits_activations: 8, bits_weights: 8, bits_bias: null}
policies:
- {pruner: {instance_name: by_sensitivity}, starting_epoch: 0, ending_epoch: 3, frequency: 2}
- {regularizer: {instance_name: small}, epochs: [0, 2]}
- {quantizer: {instance_name: linear}, starting_epoch: 1, ending_epoch: 3, frequency: 1}
"""
#: Settings under which a method acts within three epochs of a workload.
ACTIVE: dict[str, dict[str, Any]] = {
    "none": {},
    "recipe": {"clip_grad_norm": 0.5, "activation_checkpointing": "cheap"},
    "gradskip": {"CAC_STOP_LAYER_NUM": (3, 9), "CAC_STOP_LAYER_ITR": (8, 22), "CAC_BRAKING_DISTANCE": 7},
    "compression": {"schedule": SCHEDULE},
    "gradskip+compression": {
        "CAC_STOP_LAYER_NUM": (3, 9),
        "CAC_STOP_LAYER_ITR": (8, 22),
        "schedule": PRUNING,
    },
    "central_difference": {"gradient_start_itr": 14, "gradient_epsilon": 0.05},
    "discrete_gradient": {"gradient_start_itr": 20, "gradient_epsilon": 0.02, "discrete_stride": 0.005},
    "straight_through": {"gradient_start_itr": 8, "ste_samples": 2, "ste_weighting": "effect"},
    "svrg": {"gradient_start_itr": 8, "svrg_snapshot_every": 5, "svrg_alpha_decays": True},
    "kfac": {"gradient_start_itr": 8, "kfac_factor_every": 3, "kfac_inverse_every": 6},
    "gradient_clustering": {"gradient_start_itr": 8, "cluster_count": 3, "cluster_every": 9, "cluster_iterations": 2},
    "importance_sampling": {"gradient_start_itr": 8, "importance_by": "output_gradient", "importance_update_every": 3},
    "zero_gradients": {"gradient_start_itr": 8, "zero_threshold": 0.5},
    "gradskip+zero_gradients": {
        "gradient_start_itr": 12,
        "zero_threshold": 0.5,
        "zero_unbiased": True,
        "CAC_STOP_LAYER_NUM": (3, 9),
        "CAC_STOP_LAYER_ITR": (8, 22),
    },
}
#: The same for workloads with fewer layers than those stop.
FEW_LAYERS: dict[str, dict[str, Any]] = {"binary_mlp": {"CAC_STOP_LAYER_NUM": (1, 3), "CAC_STOP_LAYER_ITR": (8, 16)}}
#: Options under which a workload's run of three epochs takes a second; images and texts get their data below.
SHORT: dict[str, tuple[str, ...]] = {
    "binary_mlp": ("steps_per_epoch=7", "batch_size=32"),
    "text": ("steps_per_epoch=7", "batch_size=2"),
    "gan_digits": ("width=4",),
    "rosenbrock": ("updates=9", "pairs=3", "decay_from=20", "decay_every=5"),
}
#: What a workload refuses, without layers or without binary activations, and the words of it.
REFUSED = {
    ("gradskip", "rosenbrock"): r"CAC_STOP_LAYER_NUM must be at most 0",
    ("compression", "rosenbrock"): r"\*weight.* matches no",
    ("gradskip+compression", "rosenbrock"): r"\*weight.* matches no",
    ("gradskip+zero_gradients", "rosenbrock"): r"CAC_STOP_LAYER_NUM must be at most 0",
    ("kfac", "rosenbrock"): "kfac needs linear or ungrouped convolution layers",
    ("gradient_clustering", "rosenbrock"): "gradient_clustering needs linear or ungrouped convolution layers",
    ("importance_sampling", "rosenbrock"): "the model's output must have a row for each",
    ("zero_gradients", "rosenbrock"): "the model's output must have a row for each",
    # Its losses are of two networks that see each other, not of rows.
    ("kfac", "gan_digits"): "got targets .* and an output tuple",
    ("gradient_clustering", "gan_digits"): "the model must return one tensor, or logits in a mapping",
    ("importance_sampling", "gan_digits"): "the model must return one tensor, or logits in a mapping",
    ("zero_gradients", "gan_digits"): "the model must return one tensor, or logits in a mapping",
    ("gradskip+zero_gradients", "gan_digits"): "the model must return one tensor, or logits in a mapping",
} | {
    ("straight_through", workload): "needs a model with BinaryActivation modules"
    for workload in WORKLOADS
    if workload != "binary_mlp"
}
#: Every method where a run costs least and on digits, or where these refuse it on the first that takes it; every
#: workload with and without stops.
CASES = [
    (method, workload)
    for method in METHODS
    for workload in WORKLOADS
    if (method, workload) not in REFUSED
    and (
        method in ("none", "gradskip")
        or workload in ("binary_mlp", "digits" if (method, "digits") not in REFUSED else workload)
    )
]
#: Workloads whose run of three epochs costs most.
LONG = ("digits", "gan_digits")


def once(cases: Iterable[tuple[str, str]]) -> list[Any]:
    """Cases, of which `make test` has each method once and the other workloads without any."""

    def is_first(method: str, workload: str) -> bool:
        if method == "compression":
            return workload == "digits"  # the others have no activations to quantize
        return workload == "binary_mlp" or (method == "none" and workload not in LONG)

    return [pytest.param(*case, marks=[pytest.mark.thorough] * (not is_first(*case))) for case in cases]


@pytest.fixture(scope="module", autouse=True)
def image_data(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 40), ("test", 12)):
        labels = [number % 4 for number in range(count)]
        write_parquet(folder / f"{split}-00000.parquet", list(noise(count, 8)), labels)
    SHORT["images"] = (f"data={folder}", "batch_size=6", f"cache={folder / 'cache'}")
    texts, model = write_sentences(folder / "texts", train=40, dev=12), save_tiny_bert(folder / "model")
    SHORT["text_classification"] = (f"data={texts}", f"model={model}", "batch_size=6")


def config_of(method: str, workload: str, **more: Any) -> TrialConfig:
    options = SHORT.get(workload)
    active = {**ACTIVE[method], **(FEW_LAYERS.get(workload, {}) if "gradskip" in method.split("+") else {})}
    if method in ("central_difference", "discrete_gradient"):
        few = {"digits": ("norm6.*", "classifier.bias"), "binary_mlp": ("linear3.bias",)}
        active["gradient_layers"] = few[workload]  # all would take long
    return TrialConfig(method=method, workload=workload, workload_options=options, epochs=3, **active, **more)


def train(config: TrialConfig) -> tuple[list[Row], list[torch.Tensor]]:
    with TrainingRun(config) as run:
        return finish(run), [t.clone() for t in run.model.state_dict().values()]


@functools.cache
def trained(method: str, workload: str) -> tuple[list[Row], list[torch.Tensor]]:
    """A run that several tests look at; none changes it."""
    return train(config_of(method, workload))


def unmeasured(*rows: Row) -> list[Row]:
    return without(rows, MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workload"), once(CASES))
def test_reports_every_column_every_epoch(method: str, workload: str) -> None:
    rows, _ = trained(method, workload)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    kinds = {"int64": int, "Int64": int, "float64": float, "string": str}
    has_test = "test" in build(workload, SHORT.get(workload, ())).splits
    for row in rows:
        assert set(row) | {"further_metrics"} == {metric.name for metric in ROW}
        for metric in ROW:
            value = row.get(metric.name)
            if value is None:
                assert metric.may_lack, metric.name
            else:
                assert isinstance(value, kinds[metric.dtype]), metric.name
        assert (row["test_quality"] is None) == (row["epoch"] < 3 or not has_test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "workload"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case[1] == "gan_digits" and case[0] != "zero_gradients"))
        for case in REFUSED
    ],
)
def test_what_a_workload_cannot_do_is_refused(method: str, workload: str) -> None:
    with pytest.raises(UserError, match=REFUSED[method, workload]) as error:
        train(config_of(method, workload))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", [pytest.param(name, marks=[pytest.mark.thorough] * (name in LONG)) for name in WORKLOADS]
)
def test_another_seed_is_another_run(workload: str) -> None:
    """That equal ones are bit-identical is part of the test of resuming, with all weights."""
    with TrainingRun(config_of("none", workload, seed=1)) as run:
        assert run.train_epoch()["train_loss"] != trained("none", workload)[0][0]["train_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workload"), once(CASES))
def test_resumes_bit_exactly_after_an_early_and_a_late_epoch(method: str, workload: str, tmp_path: Path) -> None:
    config = config_of(method, workload)
    rows, weights = trained(method, workload)

    def part(begin: int, saved: int | None, end: int) -> list[torch.Tensor]:
        """Train from the epoch ``begin`` on, from its checkpoint, to ``end``, and save after the epoch ``saved``."""
        torch.manual_seed(99)  # what another process's generators would hold
        with TrainingRun(config) as run:
            if begin:
                run.load(tmp_path / str(begin))
                assert run.row is not None
                assert unmeasured(run.row) == unmeasured(rows[begin - 1])
            for epoch in range(begin, end):
                assert unmeasured(run.train_epoch()) == unmeasured(rows[epoch])
                if epoch + 1 == saved:
                    (tmp_path / str(saved)).mkdir()
                    run.save(tmp_path / str(saved))
            return [t.clone() for t in run.model.state_dict().values()]

    part(0, 1, 1)
    for begin, saved in ((1, 2), (2, None)):  # that it is saved changes nothing
        assert all(torch.equal(a, b) for a, b in zip(weights, part(begin, saved, 3), strict=True))


@pytest.mark.slow
def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    with TrainingRun(config_of("none", "binary_mlp")) as run:
        run.train_epoch()
        run.save(tmp_path)
    with (
        TrainingRun(config_of("none", "binary_mlp", seed=3)) as run,
        pytest.raises(UserError, match="of another configuration"),
    ):
        run.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_a_checkpoint_that_cannot_be_read_costs_its_epochs_and_nothing_else(damage: str, tmp_path: Path) -> None:
    from trainables.trial import continued

    config = config_of("gradskip", "binary_mlp")
    rows, _ = trained("gradskip", "binary_mlp")
    with TrainingRun(config) as run:
        run.train_epoch()
        run.save(tmp_path)
    file = tmp_path / CHECKPOINT_FILE
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:2000] if damage == "truncated" else b"garbage" * 500)
    with pytest.warns(UserWarning, match="training from the start"):
        run = continued(TrainingRun, config, str(tmp_path))
    with run:
        assert unmeasured(run.train_epoch()) == unmeasured(rows[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "workload"),
    once(case for case in CASES if case[0] != "none" or case[1] in ("binary_mlp", "digits")),
)
def test_over_a_stage_tree_it_is_the_trial_alone(method: str, workload: str, tmp_path: Path) -> None:
    """Trained there, and followed over what was recorded: every method says what it would do next."""
    config = config_of(method, workload)
    alone = facts(trained(method, workload)[0])
    steps = []
    for _ in range(2):
        with SharedRun(config, Sharing(tree=tmp_path / "tree")) as trial:
            rows = finish(trial)
        assert facts(rows) == alone
        steps.append(trial.trained_steps)
    assert steps == [rows[-1]["step"], 0]
