"""Numbering and units; what is left training before stopped layers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conv_models import EXECUTION, Shuffled, conv_model
from counted_loops import record_of, summary_of
from loops import train
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip import SGD, AdamW, Settings
from trainables.gradskip.layers import make_plan, unit_ends, watch_needed
from trainables.gradskip.settings import OFF


def split_by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: matrices with weight decay, vectors without."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


class TestGroups:
    @pytest.mark.parametrize("cls", [SGD, AdamW])
    def test_layer_order_is_the_models_not_the_groups(self, cls: Any) -> None:
        model = conv_model()
        settings = Settings(stop_layer_num=(4,), stop_layer_itr=(2,))
        optimizer = cls(split_by_decay(model), lr=0.01, settings=settings, model=model)
        train(model, optimizer, 4)
        assert [p.requires_grad for p in model.parameters()] == [False] * 5 + [True] * 6
        assert optimizer.gradskip.events[0].name == "3.weight"
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]

    def test_without_the_model_it_is_the_groups_and_says_so(self) -> None:
        model = conv_model()
        with pytest.warns(UserWarning, match="came in 2 groups and no model: layers are numbered through the groups"):
            optimizer = SGD(split_by_decay(model), lr=0.01, settings=Settings())
        assert [p.dim() for p in optimizer.gradskip.parameters] == [4, 4, 4, 2] + [1] * 7


class TestWatch:
    def transformer(self) -> nn.Module:
        torch.manual_seed(0)

        class Small(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(11, 8)
                layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
                self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
                self.head = nn.Linear(8, 11)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.blocks(self.embed(x)))

        return Small()

    def test_a_transformer_block_counts_as_a_layer_when_asked_for(self) -> None:
        model = self.transformer()
        settings = Settings(
            watch=("TransformerEncoderLayer",), start_itr=0, samples=1, start_thr=1.0, slope_thr=1.0, mt_thr=1.0
        )
        optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=50.0, settings=settings, model=model)
        units = optimizer.gradskip.plan.units
        names = [name for name, _ in model.named_parameters()]
        assert [names[u.end].split(".")[:3] for u in units] == [["blocks", "layers", str(n)] for n in range(3)]
        # The signal is the variance of all of a block's matrices together.
        block = model.blocks.layers[1]  # type: ignore[union-attr,index]
        joint = torch.cat([p.detach().flatten() for p in block.parameters() if p.dim() >= 2])
        measured = optimizer.gradskip.signal.measure(units[1:2])
        assert float(measured) == pytest.approx(float(joint.double().var()), rel=1e-5)
        tokens = torch.arange(20).reshape(4, 5) % 11
        for _ in range(6):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        stopped = {n for n, p in model.named_parameters() if not p.requires_grad}
        expected = {n for n in names if n.startswith(("embed.", "blocks."))}
        assert [e.layer for e in optimizer.gradskip.events] == [u.number for u in units]
        assert stopped == expected

    @pytest.mark.parametrize("given", ["adapters", "all"])
    @pytest.mark.parametrize("dora", [False, True])
    def test_a_weight_with_adapters_is_one_layer(self, dora: bool, given: str) -> None:
        """Those of PEFT: both matrices, and DoRA's magnitudes, stop together; the frozen weight is not measured."""
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], use_dora=dora, modules_to_save=["4"])
        layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
        model = peft.get_peft_model(nn.Sequential(*layers), config)
        named = [(n, p) for n, p in model.named_parameters() if given == "all" or p.requires_grad]
        for whole_units in (False, True):
            settings = Settings(watch=("linear",), whole_units=whole_units)
            optimizer = AdamW([p for _, p in named], lr=0.1, settings=settings, model=model)
            units = optimizer.gradskip.plan.units
            last = "lora_magnitude_vector" if dora else "lora_B"
            assert [last in named[unit.end][0] for unit in units] == [True, True, False]
            assert [[named[n][0].split(".")[3] for n in unit.watched] for unit in units[:2]] == [
                ["lora_A", "lora_B"]
            ] * 2

    @pytest.mark.parametrize(("kind", "options"), [("Vera", {"r": 2}), ("FourierFT", {"n_frequency": 3}), ("BOFT", {})])
    def test_adapters_are_of_the_kind_of_the_weight_that_they_are_on(self, kind: str, options: dict[str, int]) -> None:
        """Vectors of PEFT count, too, and rotations in four dimensions are no convolutions."""
        peft = pytest.importorskip("peft")
        config = getattr(peft, f"{kind}Config")(target_modules=["0", "1"], **options)
        model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), config)
        trained = [p for p in model.parameters() if p.requires_grad]
        for watch, units in (("linear", 2), ("conv", 0)):
            plan = make_plan(trained, (watch,), model=model)
            assert [unit.end for unit in plan.units] == [len(trained) // 2 - 1, len(trained) - 1][:units]

    def test_convolutions_of_other_dimensions_are_watched_by_their_class(self) -> None:
        layers = [nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Conv1d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2)]
        model = nn.Sequential(*layers)
        assert watch_needed(list(model.parameters()), model) == ("Conv1d", "linear")
        assert watch_needed(list(model.parameters()), None) == ("linear",)
        assert unit_ends(list(model.parameters()), model) == (1, 3)
        assert watch_needed(list(conv_model().parameters()), conv_model()) == ()

    def test_units_end_behind_linear_layers_of_a_model_with_one_convolution(self) -> None:
        """As in a vision transformer; without the model only what the rule watches is known."""
        layers = [nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)]
        model = nn.Sequential(*layers)
        assert unit_ends(list(model.parameters()), model) == (1, 5, 7)
        for given, ends in ((model, [1, 5, 7]), (None, [0])):
            record = record_of()
            record.add(SGD(model.parameters(), lr=0.1, model=given, settings=OFF).gradskip)
            assert summary_of(record)["unit_ends"] == ends

    def test_a_recurrent_layer_is_one_with_all_its_matrices_and_directions(self) -> None:
        recurrent = [nn.LSTM(4, 3, num_layers=2, bidirectional=True), nn.GRUCell(6, 5, bias=False)]
        model = nn.Sequential(*recurrent, nn.Linear(5, 2))
        plan = make_plan(list(model.parameters()), ("linear",), model=model)
        assert [(unit.watched, unit.end) for unit in plan.units] == [
            ((0, 1, 4, 5), 7), ((8, 9, 12, 13), 15), ((16, 17), 17), ((18,), 18),
        ]  # fmt: skip
        assert unit_ends(list(model.parameters()), model) == (7, 15, 17)

    @pytest.mark.parametrize("with_model", [True, False])
    def test_the_rule_leaves_a_last_layer_with_a_bias(self, with_model: bool) -> None:
        """Without the model nobody knows that what is left is no more than its bias."""
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))
        settings = Settings(start_itr=0, samples=1, start_thr=1.0, slope_thr=1.0, mt_thr=1.0)
        optimizer = SGD(
            model.parameters(), lr=0.1, weight_decay=1.0, settings=settings, model=model if with_model else None
        )
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 1, 6, 6)).square().mean().backward()
            optimizer.step()
        assert [e.layer for e in optimizer.gradskip.events] == ([0] if with_model else [0, 2])

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (Settings(watch=("Block",)), "CAC_WATCH=Block names classes of modules and needs the model: give model="),
            (Settings(whole_units=True), "CAC_WHOLE_UNITS=1 needs the model"),
            (Settings(norm_statistics="hold"), "CAC_NORM_STATISTICS=hold looks into the model: give model="),
            (Settings(norm_statistics="hold_all"), "CAC_NORM_STATISTICS=hold_all looks into the model: give model="),
            (Settings(prefix_autograd=False), "CAC_PREFIX_AUTOGRAD=0 looks into the model: give model="),
            (Settings(rule="plasticity"), "CAC_RULE=plasticity looks into the model: give model="),
        ],
    )
    def test_settings_that_need_the_model_say_so(self, settings: Settings, message: str) -> None:
        with pytest.raises(UserError, match=message):
            SGD(conv_model().parameters(), lr=0.1, settings=settings)


class TestWholeUnits:
    def test_units_in_execution_order(self) -> None:
        model = Shuffled()
        optimizer = SGD(
            model.parameters(), lr=0.1, settings=Settings(whole_units=True), model=model,
            example_inputs=torch.randn(2, 1, 8, 8),
        )  # fmt: skip
        skip = optimizer.gradskip
        assert skip.names is not None
        assert [skip.names[n] for n in skip.plan.order] == EXECUTION
        assert [skip.names[u.number] for u in skip.plan.units] == ["conv0.weight", "conv1.weight", "conv2.weight"]
        assert [u.end for u in skip.plan.units] == [3, 7, 11]  # the head is no part of the last one

    def test_auto_stops_a_layer_with_bias_and_norm_and_nothing_is_left(self) -> None:
        model = Shuffled()
        settings = Settings(start_itr=0, samples=2, start_thr=1.0, slope_thr=1.0, mt_thr=1.0, whole_units=True)
        optimizer = SGD(model.parameters(), lr=0.01, weight_decay=3.0, settings=settings, model=model)
        stopped: list[set[str]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(
                model, optimizer, 10,
                each=lambda _: stopped.append({n for n, p in model.named_parameters() if not p.requires_grad}),
            )  # fmt: skip
        assert [e.name for e in optimizer.gradskip.events] == ["conv0.weight", "conv1.weight", "conv2.weight"]
        assert {frozenset(s) for s in stopped} == {frozenset(EXECUTION[:n]) for n in (0, 4, 8, 12)}
        assert optimizer.gradskip.left_upstream() == []

    def test_a_manual_stop_takes_the_unit_of_its_number(self) -> None:
        model = Shuffled()
        names = [name for name, _ in model.named_parameters()]
        number = names.index("norms.1.bias")
        settings = Settings(stop_layer_num=(number,), stop_layer_itr=(1,), whole_units=True)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        train(model, optimizer, 3)
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(EXECUTION[:8])
        assert optimizer.gradskip.events[0].name == "norms.1.bias"
