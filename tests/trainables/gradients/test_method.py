"""Methods that change a gradient's variance as methods of a trial: costs, streams, statistics, Gradient-Skip beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Row, facts, finish, rows_alone

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

MEASURED = {"statistics_measurements": 4, "statistics_samples": 5}


def trained(**fields: Any) -> tuple[list[Row], list[torch.Tensor]]:
    with TrainingRun(TrialConfig(**{"epochs": 4, **fields})) as run:
        return finish(run), [t.clone() for t in run.model.state_dict().values()]


def dense_pass(run: TrainingRun) -> tuple[int, int]:
    """FLOPs of an epoch's forward and backward passes."""
    costs = [run.cost.dense_step(batch) for batch in run.workload.train_batches(0, 0)]
    return sum(c.forward_flops for c in costs), sum(c.backward_flops for c in costs)


@pytest.mark.thorough
@pytest.mark.slow
def test_svrg_costs_its_snapshots_and_a_second_gradient_a_step() -> None:
    config = TrialConfig(method="svrg", epochs=4, gradient_start_itr=10, svrg_snapshot_every=10)
    with TrainingRun(config) as run:
        forward, backward = dense_pass(run)
        rows = finish(run)
    # Ten steps are an epoch; from the second on, each has a snapshot, its own gradients, and those at the snapshot.
    assert rows[0]["forward_flops"] == forward
    assert rows[-1]["forward_flops"] == 4 * forward + 3 * 2 * forward
    assert rows[-1]["backward_flops"] == 4 * backward + 3 * 2 * backward
    assert rows[-1]["compute_saved"] == pytest.approx(-1.5)


def test_svrg_of_coefficient_0_is_plain_training_and_costs_nothing() -> None:
    plain, weights = trained(method="none", epochs=1)
    rows, same = trained(method="svrg", svrg_alpha=0.0, epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert rows[-1]["executed_flops"] == plain[-1]["executed_flops"]


@pytest.mark.thorough
@pytest.mark.slow
def test_zero_gradients_save_what_the_kept_samples_do_not_need() -> None:
    rows, _ = trained(method="zero_gradients", zero_threshold=10.0)  # above every gradient of a cross entropy
    with TrainingRun(TrialConfig(epochs=4)) as run:
        _, backward = dense_pass(run)
    assert rows[-1]["backward_flops"] == 0
    assert rows[-1]["compute_saved"] == pytest.approx(4 * backward / rows[-1]["dense_flops"])
    plain, weights = trained(method="none")
    rows, same = trained(method="zero_gradients", zero_threshold=1e-12)
    assert rows[-1]["executed_flops"] == plain[-1]["executed_flops"]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(weights, same, strict=True))


@pytest.mark.thorough
@pytest.mark.slow
def test_beside_gradient_skip_both_savings_count_once() -> None:
    stops = {"CAC_STOP_LAYER_NUM": (3, 9), "CAC_STOP_LAYER_ITR": (8, 22)}
    skipped, _ = trained(method="gradskip", **stops)
    both, _ = trained(method="gradskip+zero_gradients", zero_threshold=0.3, **stops)
    zero, _ = trained(method="zero_gradients", zero_threshold=0.3)
    assert both[-1]["stopped_through"] == skipped[-1]["stopped_through"] == 9
    assert both[-1]["optimizer_bytes"] == skipped[-1]["optimizer_bytes"]
    assert max(skipped[-1]["compute_saved"], zero[-1]["compute_saved"]) < both[-1]["compute_saved"]
    assert both[-1]["compute_saved"] < skipped[-1]["compute_saved"] + zero[-1]["compute_saved"]
    with pytest.raises(UserError, match="CAC_RULE=gradient_norm can't be combined with zero gradients"):
        trained(method="gradskip+zero_gradients", CAC_RULE="gradient_norm")


@pytest.mark.thorough
@pytest.mark.slow
def test_samples_without_numbers_are_kept_epoch_by_epoch() -> None:
    """Text draws windows at random: clusters are of those of one epoch, at most so many of them."""
    options = ("batch_size=4", "steps_per_epoch=6")
    fields = {"workload": "text", "workload_options": options, "method": "gradient_clustering", "cluster_count": 3}
    with TrainingRun(TrialConfig(**fields, epochs=3, kept_samples=10, cluster_every=6)) as run:
        seen = []
        while not run.finished:
            rows = run.train_epoch()
            method = run.method.gradient_method()
            assert method.data.count == 10
            seen.append(method.data.tensors[0].clone())
        assert json.loads(rows["gradient_clusters"])
    assert not torch.equal(seen[0], seen[1])
    epoch = torch.cat([batch[0] for batch in run.workload.train_batches(1, 0)])
    assert all(bool((epoch == row).all(1).any()) for row in seen[1])


@pytest.mark.thorough
@pytest.mark.slow
def test_clusters_are_told_in_the_last_row_and_the_effective_size_in_each() -> None:
    rows, _ = trained(method="gradient_clustering", cluster_count=4, cluster_every=15)
    assert [json.loads(row["gradient_clusters"]) for row in rows[:3]] == [[], [], []]
    clusters = json.loads(rows[-1]["gradient_clusters"])
    assert sum(cluster["size"] for cluster in clusters) == 599
    assert all(0 <= number < 599 for cluster in clusters for number in cluster["examples"])
    rows, _ = trained(method="importance_sampling", importance_update_every=2)
    assert all(0.5 < row["effective_samples"] <= 1 for row in rows)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"method": "none"},
        {"method": "svrg", "svrg_snapshot_every": 7},
        {"method": "kfac"},
        {"method": "gradient_clustering", "cluster_mode": "online", "cluster_every": 3, "cluster_count": 4},
        {"method": "importance_sampling"},
        {"method": "zero_gradients", "zero_threshold": 0.3, "zero_unbiased": True},
        {"method": "gradskip", "CAC_STOP_LAYER_NUM": (9,), "CAC_STOP_LAYER_ITR": (15,)},
    ],
    ids=lambda fields: fields["method"],
)
def test_a_measured_trial_is_the_trial_bit_for_bit_and_its_cost_is_counted(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    plain, weights = trained(**fields)
    rows, same = trained(**fields, **MEASURED)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    for row, alone in zip(rows, plain, strict=True):
        assert (row["train_loss"], row["quality"]) == (alone["train_loss"], alone["quality"])
        (sgd, *others) = json.loads(row["gradient_statistics"])
        assert (sgd["estimator"], sgd["step"]) == ("sgd", 10 * (row["epoch"] - 1))
        # A method is measured once it has stepped.
        expected = [] if fields["method"] in ("none", "gradskip") or row["epoch"] == 1 else [fields["method"]]
        assert [other["estimator"] for other in others] == expected
        columns = json.loads(row["further_metrics"])
        assert columns["sgd_normalised_variance"] == sgd["total"]["normalised_variance"]
        assert all(columns[f"{name}_bias"] == others[0]["total"]["bias"] for name in expected)
    with TrainingRun(TrialConfig(epochs=4)) as run:
        full = next(b for b in run.workload.train_batches(0, 0) if len(b[0]) == 64)
        step = run.cost.dense_step(full)
    executed = rows[-1]["executed_flops"] - plain[-1]["executed_flops"]
    evaluations = sum(m["gradient_evaluations"] for row in rows for m in json.loads(row["gradient_statistics"]))
    if fields["method"] != "gradskip":  # whose gradients become cheaper
        assert executed == pytest.approx(evaluations * (step.forward_flops + step.backward_flops), rel=1e-6)
    # Over a stage tree, and continued from a checkpoint in the middle.
    config = TrialConfig(**{"epochs": 4, **fields, **MEASURED})
    with SharedRun(config, Sharing(tree=tmp_path / "tree")) as trial:
        assert facts(finish(trial)) == rows_alone(config)
    with TrainingRun(config) as run:
        run.train_epoch()
        run.train_epoch()
        run.save(tmp_path)
    with TrainingRun(config) as run:
        run.load(tmp_path)
        assert [run.train_epoch()["further_metrics"] for _ in range(2)] == [r["further_metrics"] for r in rows[2:]]


def test_samples_of_no_measurement_are_refused() -> None:
    with pytest.raises(UserError, match="statistics_samples=5 needs statistics_measurements, the number of"):
        trained(statistics_samples=5)


def test_a_forward_cache_does_not_know_samples_that_a_method_chooses() -> None:
    with pytest.raises(UserError, match="chooses the samples of a step, which a forward cache would not know"):
        trained(method="importance_sampling", forward_cache_mb=10)


@pytest.mark.slow
def test_there_are_no_more_clusters_than_samples() -> None:
    fields = {"workload": "text", "workload_options": ("batch_size=2", "steps_per_epoch=2"), "kept_samples": 3}
    rows, _ = trained(**fields, method="gradient_clustering", epochs=1)
    assert len(json.loads(rows[-1]["gradient_clusters"])) <= 3
