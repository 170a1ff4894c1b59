"""Gradient-Skip in the Trainer of transformers: what trains, what is logged, saved and reported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thorough import rest_thorough
from tiny_bert import save_tiny_bert, sentences
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from trainables.errors import UserError
from trainables.gradskip import Settings, wrap
from trainables.gradskip.script_counting.stretches import totals_of
from trainables.script.report_lines import REPORTS_FILE

transformers = pytest.importorskip("transformers")
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from tune_cac.integrations.transformers import GradientSkipCallback  # noqa: E402

#: The embeddings and the first of two blocks stop after the sixth of 16 steps.
STOP = Settings(watch=("linear",), whole_units=True, stop_layer_num=(20,), stop_layer_itr=(5,), lr_factor=2.0)
HELD = "bert.encoder.layer.0.output.LayerNorm.bias"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


def rows(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    texts, labels = sentences(count, seed)
    found = transformers.AutoTokenizer.from_pretrained(name)(texts, padding="max_length", max_length=12)
    keys = ("input_ids", "attention_mask")
    return [{**{key: found[key][n] for key in keys}, "labels": int(label == "pos")} for n, label in enumerate(labels)]


def model_of(name: str) -> Any:
    """Without dropout, whose draws the trainer itself does not repeat, and with products that torch's counter knows."""
    transformers.set_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager"
    )


class Counted(Trainer):  # type: ignore[misc]
    """Torch's own counter looks at every training step, and a clock."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flops: list[int] = []
        self.seconds = 0.0

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        with FlopCounterMode(display=False) as counter:
            loss = super().training_step(*arguments, **options)
        self.flops.append(counter.get_total_flops())
        self.seconds += time.perf_counter() - begun
        return loss


def trainer_of(name: str, folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    given = {"num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "epoch", "save_steps": 4, **options}
    return Counted(
        model_of(name) if model is None else model,
        TrainingArguments(
            str(folder), per_device_train_batch_size=8, learning_rate=1e-2, report_to=[], use_cpu=True,
            disable_tqdm=True, **given,
        ),
        train_dataset=rows(name, 64, 0), eval_dataset=rows(name, 32, 1), callbacks=list(callbacks),
        compute_metrics=lambda found: {"f1": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )  # fmt: skip


class Logger(TrainerCallback):  # type: ignore[misc]
    """A logger that comes before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / REPORTS_FILE).read_text().splitlines()]


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a search by f1 runs a script."""
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", str(tmp_path))
    monkeypatch.setenv("TUNE_CAC_METRIC", "f1")
    (tmp_path / REPORTS_FILE).touch()
    return tmp_path


def test_it_trains_as_a_wrapped_optimizer_does_and_loggers_see_what_stopped(bert: str, tmp_path: Path) -> None:
    logger, callback = Logger(), GradientSkipCallback(STOP)
    trainer = trainer_of(bert, tmp_path / "ours", logger, callback)
    trainer.train()
    by_hand = model_of(bert)
    optimizer = trainer_of(bert, tmp_path / "hand", model=by_hand).create_optimizer()
    other = trainer_of(bert, tmp_path / "hand", model=by_hand)
    other.optimizer = wrap(optimizer, STOP, model=by_hand)
    other.train()
    weights, wanted = trainer.model.state_dict(), by_hand.state_dict()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert [event.name for event in callback.gradskip.events] == [HELD]
    counted = totals_of(callback.gradskip.step_record.stretches)
    assert counted["steps"] == 16
    stopped = sum(value.numel() for value in list(by_hand.parameters())[:21])
    last = [log for log in logger.logs if "loss" in log][-1]
    assert last["stopped_share"] == stopped / sum(value.numel() for value in by_hand.parameters())
    executed = counted["forward_flops"] + counted["backward_flops"]
    assert last["compute_saved"] == pytest.approx(1 - executed / counted["dense_flops"])
    assert last["compute_saved"] > 0.2
    assert trainer.state.log_history[-1]["compute_saved"] == last["compute_saved"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_resumed_training_continues_bit_for_bit(bert: str, tmp_path: Path) -> None:
    whole = trainer_of(bert, tmp_path / "whole", GradientSkipCallback(STOP))
    whole.train()
    for step in (4, 8):  # before the stop, and after it
        resumed = trainer_of(bert, tmp_path / "rest", callback := GradientSkipCallback(STOP))
        resumed.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
        weights, wanted = resumed.model.state_dict(), whole.model.state_dict()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        assert callback.gradskip.iteration == 16
        assert [event.iteration for event in callback.gradskip.events] == [5]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_checkpoint_that_was_trained_without_it_is_refused(bert: str, tmp_path: Path) -> None:
    trainer_of(bert, tmp_path, max_steps=4).train()
    trainer = trainer_of(bert, tmp_path, GradientSkipCallback(STOP))
    with pytest.raises(UserError, match="was not there in its 4 steps: begin anew without the checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("is_old", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_a_checkpoint_that_was_trained_on_without_it_is_refused(is_old: bool, bert: str, tmp_path: Path) -> None:
    """A trainer without the callback keeps the entry of the rule's state, but not what it says; of versions before
    2026-11-30, which did not note the trainer's step, the rule's iteration says as much."""
    trainer_of(bert, tmp_path, GradientSkipCallback(STOP), max_steps=4).train()
    if is_old:
        state = torch.load(file := tmp_path / "checkpoint-4/optimizer.pt")
        del state["param_groups"][0]["gradskip"]["trainer"]
        torch.save(state, file)
        trainer_of(bert, tmp_path / "on", on := GradientSkipCallback(STOP), max_steps=6).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-4")
        )
        assert on.gradskip.iteration == 6
    trainer_of(bert, tmp_path, max_steps=8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    trainer = trainer_of(bert, tmp_path, GradientSkipCallback(STOP))
    with pytest.raises(UserError, match=r"must be of its step 8, got that of step 4: .* the checkpoint of step 4"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


@pytest.mark.parametrize("factors", [(2.0, 1.0), (1.0, 2.0)])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_checkpoint_of_other_learning_rates_is_refused(
    factors: tuple[float, float], bert: str, tmp_path: Path
) -> None:
    before, after = (replace(STOP, lr_factor=factor) for factor in factors)
    trainer_of(bert, tmp_path, GradientSkipCallback(before), max_steps=4).train()
    trainer = trainer_of(bert, tmp_path, GradientSkipCallback(after))
    with pytest.raises(UserError, match=f"is of lr_factor={factors[0]} and the settings ask for {factors[1]}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.slow
@pytest.mark.thorough
def test_gradient_skip_twice_is_refused(bert: str, tmp_path: Path) -> None:
    model = model_of(bert)
    wrapped = trainer_of(bert, tmp_path, GradientSkipCallback(STOP), model=model)
    wrap(wrapped.create_optimizer(), STOP, model=model)
    two = trainer_of(bert, tmp_path, GradientSkipCallback(STOP), GradientSkipCallback(STOP))
    for trainer in (wrapped, two):
        with pytest.raises(UserError, match="has Gradient-Skip already, by wrap or another"):
            trainer.train()


def test_deepspeed_is_refused() -> None:
    outer = type("DeepSpeedOptimizerWrapper", (), {})()
    with pytest.raises(UserError, match="got DeepSpeed's: train with DDP or FSDP2"):
        GradientSkipCallback(STOP)._skip.begin(outer, torch.nn.Linear(1, 1), steps=lambda: 0, total_steps=None)


def test_evaluations_are_reported_by_the_metric_of_the_search(
    bert: str, searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(bert, searched, GradientSkipCallback(STOP))
    trainer.train()
    trainer.predict(rows(bert, 32, 2))
    found = reports(searched)
    history = [log for log in trainer.state.log_history if "eval_f1" in log]
    assert [line["f1"] for line in found] == [*(log["eval_f1"] for log in history), history[-1]["eval_f1"]]
    assert [line["val_loss"] for line in found[:2]] == [log["eval_loss"] for log in history]
    assert "test_f1" in found[2]
    assert found[2]["gradskip"]["longest_iteration"] == 16
    monkeypatch.delenv("TUNE_CAC_METRIC")
    other = trainer_of(bert, searched, GradientSkipCallback(STOP), metric_for_best_model="f1")
    with pytest.raises(UserError, match=r"compares by accuracy, and .* f1, val_loss: search with --metric f1 --direc"):
        other.train()


@pytest.mark.slow
@pytest.mark.thorough
def test_an_early_end_is_reported_with_the_weights_that_are_kept(bert: str, searched: Path) -> None:
    """Nothing is better by 10 than the first of 6 evaluations, so the third one ends the training."""
    trainer = trainer_of(
        bert, searched, GradientSkipCallback(STOP), transformers.EarlyStoppingCallback(2, 10.0), num_train_epochs=6,
        save_strategy="epoch", lr_scheduler_type="constant", load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    trainer.predict(rows(bert, 32, 2))
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    found = reports(searched)
    assert [line["val_loss"] for line in found] == [*losses[:3], min(losses[:3]), min(losses[:3])]
    assert [line.get("early_stopped") for line in found] == [None, None, None, True, True]
    assert "test_f1" in found[-1]


@pytest.mark.slow
@pytest.mark.thorough
def test_several_data_sets_make_one_report(bert: str, searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_CAC_METRIC", "b_f1")
    trainer = trainer_of(bert, searched, GradientSkipCallback(STOP))
    trainer.eval_dataset = {"a": rows(bert, 16, 4), "b": rows(bert, 16, 5)}
    trainer.train()
    assert [sorted({"a_f1", "b_f1"} & line.keys()) for line in reports(searched)] == [["a_f1", "b_f1"]] * 2


@pytest.mark.slow
@pytest.mark.thorough
def test_only_training_steps_count_as_training_time(bert: str, searched: Path) -> None:
    trainer = trainer_of(bert, searched, GradientSkipCallback(STOP))
    evaluated = trainer.compute_metrics

    def slowly(found: Any) -> Any:
        time.sleep(0.5)
        return evaluated(found)

    trainer.compute_metrics, begun = slowly, time.perf_counter()
    trainer.train()
    first, second = (line["train_time_s"] for line in reports(searched))
    assert 0 < first < second
    assert trainer.seconds < second < time.perf_counter() - begun - 2 * 0.5


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_training_begins_anew(bert: str, tmp_path: Path) -> None:
    """By the same trainer, which has its optimizer, or by another one of the same model, which gets a new one."""
    callback, short = GradientSkipCallback(STOP), {"max_steps": 8, "eval_strategy": "no"}
    trainer = trainer_of(bert, tmp_path, callback, **short)
    trainer.train()
    another = trainer_of(bert, tmp_path, callback, model=trainer.model, **short)
    resumed = {"resume_from_checkpoint": str(tmp_path / "checkpoint-4")}
    for again, options in [(trainer, resumed), (another, {}), (trainer, {})]:
        assert all(weight.requires_grad for weight in trainer.model.parameters())
        again.train(**options)
        assert not _get_current_dispatch_mode_stack()  # steps that are still to be counted would slow down what follows
        assert (callback.gradskip.iteration, len(callback.gradskip.events)) == (8, 1)
        logs = [log["compute_saved"] for log in again.state.log_history if log["step"] > 4 and "loss" in log]
        assert logs == [0.0, pytest.approx(0.096, abs=1e-3)]  # of the steps before it none was of this training
        assert len(callback.gradskip.parameters) == len(list(trainer.model.parameters()))
        assert len(callback.gradskip.stopped) == 21


@pytest.mark.parametrize(
    ("kind", "options"),
    rest_thorough([("Lora", {"use_dora": True}), ("IA3", {}), ("PromptTuning", {})], of_several=True),
)
def test_a_search_is_offered_whole_adapters_and_no_head(
    kind: str, options: dict[str, Any], bert: str, searched: Path
) -> None:
    """Not a prompt's head either, which PEFT registers before the prompt: the backward pass would run on to that."""
    peft = pytest.importorskip("peft")
    wanted = {"num_virtual_tokens": 2} if kind == "PromptTuning" else {"target_modules": ["key", "value"], **options}
    wanted |= {"feedforward_modules": []} if kind == "IA3" else {}
    model = peft.get_peft_model(model_of(bert), getattr(peft, f"{kind}Config")(task_type="SEQ_CLS", **wanted))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    last = "magnitude_vector" if kind == "Lora" else "ia3"
    ends = [n for n, name in enumerate(trained) if last in name]
    trainer = trainer_of(bert, searched, GradientSkipCallback(Settings(start_thr=-1)), model=model, max_steps=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    assert reports(searched)[-1]["gradskip"]["unit_ends"] == ends
    said = any("prompt_encoder.default.embedding.weight run before" in str(one.message) for one in seen)
    assert said is (kind == "PromptTuning")


def test_the_model_is_the_trainers_where_callbacks_are_given_what_is_around_it(bert: str, tmp_path: Path) -> None:
    """As SetFit does, which replaces the call of the callbacks."""
    callback = GradientSkipCallback(STOP)
    trainer = trainer_of(bert, tmp_path, callback, max_steps=8, eval_strategy="no", save_strategy="no")

    def call_event(self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        given = {"model": object(), "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        for one in self.callbacks:
            control = getattr(one, event)(args, state, control, **given, **kwargs) or control
        return control

    handler = trainer.callback_handler
    handler.call_event = lambda *arguments, **options: call_event(handler, *arguments, **options)
    trainer.train()
    [event] = callback.gradskip.events
    assert (event.iteration, event.name) == (5, HELD)
    assert trainer.flops[6] < trainer.flops[5]


class Interrupted(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8:
            raise KeyboardInterrupt


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_is_a_normal_one_after_ctrl_c(bert: str, tmp_path: Path) -> None:
    """Of a model with frozen weights, which stay frozen."""
    model, batch = lora(bert)
    before = flops_of_step(model, batch)
    trained, settings = [weight.requires_grad for weight in model.parameters()], first_block(model)
    settings, callback = replace(settings, prefix_mode="eval"), GradientSkipCallback(settings)
    trainer = trainer_of(bert, tmp_path, Interrupted(), model=model, save_steps=100)
    trainer.add_callback(callback)
    hooks = hooks_of(model)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(callback.gradskip.stopped) == 4
    assert [weight.requires_grad for weight in model.parameters()] == trained
    assert hooks_of(model) == hooks + 1  # that of the sizes of inputs
    assert flops_of_step(model, batch) == before
    assert flops_of_step(model, batch[:3]) < before
    assert not _get_current_dispatch_mode_stack()
    trainer.callback_handler.pop_callback(Interrupted)
    another = trainer_of(bert, tmp_path, again := GradientSkipCallback(settings), model=model, max_steps=8)
    for one, its, steps in ((another, again, 8), (trainer, callback, 16)):
        one.train()
        assert (its.gradskip.iteration, len(its.gradskip.events)) == (steps, 1)
        assert len(its.gradskip.parameters) == sum(trained)


@pytest.mark.thorough
@pytest.mark.slow
def test_ctrl_c_lets_go_of_callbacks_of_before_a_reload(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook's autoreload does."""
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    module = sys.modules[GradientSkipCallback.__module__]
    monkeypatch.setattr(module, "GradientSkipCallback", GradientSkipCallback)
    trainer = trainer_of(bert, tmp_path, Interrupted(), eval_strategy="no", save_strategy="no")
    trainer.add_callback(callback := GradientSkipCallback(STOP))
    importlib.reload(module)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(callback.gradskip.stopped) == 21
    assert all(weight.requires_grad for weight in trainer.model.parameters())


@pytest.mark.slow
@pytest.mark.thorough
def test_what_an_earlier_training_has_stopped_is_named(bert: str, tmp_path: Path) -> None:
    """Such as one in a plain loop."""
    model = model_of(bert)
    earlier = wrap(torch.optim.SGD(model.parameters()), replace(STOP, stop_layer_itr=(-1,)), model=model)
    with pytest.raises(
        UserError, match=r"embeddings.* and 20 more were stopped by an earlier training .* a new trainer"
    ):
        trainer_of(bert, tmp_path, GradientSkipCallback(STOP), model=model).train()
    assert all(weight.requires_grad for weight in model.parameters())
    del earlier


def test_a_scaler_that_took_the_step_off_before_still_takes_ours() -> None:
    """As accelerate does for float16: it keeps the step that it found, and puts it back after every step of its own."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    skip = GradientSkipCallback(Settings(watch=("linear",), stop_layer_num=(1,), stop_layer_itr=(1,)))._skip
    skip.begin(optimizer, model, steps=lambda: 0, total_steps=None)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        optimizer.step()
    assert skip.gradskip is not None
    assert skip.gradskip.iteration == 4
    assert [weight.requires_grad for weight in model.parameters()] == [False, False, True, True]


def lora(bert: str) -> tuple[Any, list[dict[str, Any]]]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return peft.get_peft_model(model_of(bert), config), rows(bert, 8, 3)


def first_block(model: Any) -> Settings:
    """Stop the adapters of the first of two blocks after the sixth step; the trainer's optimizer has these alone."""
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    last = max(n for n, name in enumerate(trained) if "layer.0." in name)
    return Settings(watch=("linear",), whole_units=True, stop_layer_num=(last,), stop_layer_itr=(5,))


def flops_of_step(model: Any, batch: list[dict[str, Any]]) -> int:
    inputs = {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}
    with FlopCounterMode(display=False) as counter:
        model.train()(**inputs).loss.backward()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_backward_pass_ends_where_adapters_stop(bert: str, tmp_path: Path) -> None:
    """Adapters of PEFT on a frozen model: torch's own counter sees what a step costs before and after the stop."""
    model, batch = lora(bert)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    before = flops_of_step(model, batch)
    trainer = trainer_of(bert, tmp_path, callback := GradientSkipCallback(first_block(model)), model=model)
    trainer.train()
    by_hand, _ = lora(bert)
    for name, weight in by_hand.named_parameters():
        weight.requires_grad_(name in trained and "layer.0." not in name)
    after = flops_of_step(by_hand, batch)
    assert trainer.flops == [before] * 6 + [after] * 10
    stretches = [one for one in callback.gradskip.step_record.stretches if one.steps]
    assert [one.forward_flops[-1] + one.backward_flops[-1] for one in stretches] == [before, after]
    assert after < 0.8 * before


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("adapters", [True, False])
def test_it_ends_there_with_gradient_checkpointing_too(adapters: bool, bert: str, tmp_path: Path) -> None:
    """The trainer makes the embeddings' output need a gradient then, which nothing but the stopped prefix wanted."""

    def made() -> Any:
        return lora(bert)[0] if adapters else model_of(bert)

    model, short = made(), {"max_steps": 10, "eval_strategy": "no", "save_strategy": "no"}
    callback = GradientSkipCallback(first_block(model) if adapters else STOP)
    trainer = trainer_of(bert, tmp_path, callback, model=model, gradient_checkpointing=True, **short)
    trainer.train()
    by_hand = made()
    getattr(by_hand, "activation_checkpointing_enable", by_hand.gradient_checkpointing_enable)()
    by_hand.disable_input_require_grads()
    for name, weight in by_hand.named_parameters():
        weight.requires_grad_(weight.requires_grad and "layer.0." not in name and "embeddings" not in name)
    assert trainer.flops[6:] == [flops_of_step(by_hand, rows(bert, 8, 3))] * 4
    plain = trainer_of(bert, tmp_path, callback, model=made(), **short)
    plain.train()
    wanted = plain.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.slow
@pytest.mark.thorough
def test_what_checkpointing_would_compute_again_of_a_frozen_prefix_is_saved(
    mode: Any, adapters: bool, bert: str, tmp_path: Path
) -> None:
    """Whose parts transformers does not checkpoint where they are in evaluation mode."""

    def made() -> Any:
        return lora(bert)[0] if adapters else model_of(bert)

    options = {"gradient_checkpointing": True, "eval_strategy": "no", "save_strategy": "no"}
    dense = trainer_of(bert, tmp_path, model=made(), max_steps=1, **options)
    dense.train()
    settings = first_block(dense.model) if adapters else STOP
    callback = GradientSkipCallback(replace(settings, stop_layer_itr=(-1,), prefix_mode=mode))
    trainer = trainer_of(bert, tmp_path, callback, model=made(), max_steps=2, **options)
    trainer.train()
    saved = trainer.state.log_history[0]["compute_saved"]
    assert saved == pytest.approx(1 - float(sum(trainer.flops)) / float(2 * dense.flops[0]), abs=1e-9)
    assert saved > 0.3


@pytest.mark.slow
@pytest.mark.thorough
def test_reentrant_checkpointing_goes_on_through_the_stop_and_says_so(bert: str, tmp_path: Path) -> None:
    model, _ = lora(bert)
    settings = first_block(model)
    kind = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = trainer_of(bert, tmp_path, GradientSkipCallback(settings), model=model, **kind)
    with pytest.warns(
        UserWarning, match=r"whose gradient reentrant activation checkpointing needs: .*\{'use_reentrant': False\}"
    ):
        trainer.train()
    plain = trainer_of(bert, tmp_path, GradientSkipCallback(settings), model=lora(bert)[0])
    plain.train()
    wanted = plain.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in trainer.model.state_dict().items())


TWO = """
import os
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch, test_transformers as ours
from tune_cac.integrations.transformers import GradientSkipCallback
callback = GradientSkipCallback(ours.STOP)
trainer = ours.trainer_of({bert!r}, Path("out"), callback, eval_strategy="no", save_strategy="no")
trainer.train()
torch.save([callback.gradskip.iteration, trainer.model.state_dict()], f"{{trainer.args.process_index}}.pt")
torch.distributed.barrier()
os._exit(0)  # torch#179291: gloo's threads may abort an interpreter that ends
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_stop_together(bert: str, tmp_path: Path) -> None:
    """transformers' Trainer under torchrun, by gloo: half of the steps, the same weights on both sides."""
    (tmp_path / "train.py").write_text(TWO.format(path=[*sys.path, str(Path(__file__).parent)], bert=bert))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (steps, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert steps == 8
    assert all(torch.equal(first[name], second[name]) for name in first)
