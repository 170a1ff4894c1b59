"""The estimators' fields of a configuration: their defaults, their checks, and the method that they belong to."""

from __future__ import annotations

from typing import Any

import pytest

from trainables.config import TrialConfig, method_of
from trainables.errors import UserError
from trainables.gradients.fields import (
    STE_ESTIMATORS,
)
from trainables.gradients.replay import switched_on


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gradient_epsilon": 0.0}, "gradient_epsilon must be a number above 0, got 0.0"),
        ({"gradient_start_itr": True}, "gradient_start_itr must be an integer >= 0, got True"),
        ({"ste_estimator": "sine"}, "unknown ste_estimator 'sine': did you mean 'sign'"),
        ({"svrg_alpha": 1.5}, "svrg_alpha must be a number in [0, 1], got 1.5"),
        ({"kfac_decay": 1.0}, "kfac_decay must be a number in [0, 1), got 1.0"),
        ({"importance_uniform": 0.0}, "importance_uniform must be a number in (0, 1], got 0.0"),
        ({"zero_threshold": "x"}, "zero_threshold must be a number above 0, got 'x'"),
        ({"method": "svrg", "zero_threshold": 0.1}, "unknown setting of method svrg 'zero_threshold': "),
        ({"statistics_measurements": 2, "statistics_samples": 1}, "statistics_samples must be an integer >= 2, got 1"),
        ({"method": "discrete_gradient", "discrete_stride": 0.5},
         "discrete_stride must be at most gradient_epsilon=0.01, got 0.5"),
        ({"method": "central_difference", "discrete_stride": 0.5},
         "unknown setting of method central_difference 'discrete_stride': "),
        ({"method": "central_difference", "workers": 2},
         "method central_difference trains in one process, got workers=2: leave --workers-per-trial out"),
    ],
)  # fmt: skip
def test_wrong_values_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TrialConfig(**values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_method_is_that_of_the_fields() -> None:
    assert method_of(["gradient_layers", "ste_samples", "epochs"]) == "straight_through"
    assert method_of(["discrete_stride"]) == "discrete_gradient"
    assert method_of(["gradient_epsilon"]) == "central_difference"
    assert method_of(["CAC_VAR_START_THR", "pruning_sensitivities"]) == "gradskip+compression"
    assert method_of(["seed"]) == "none"
    with pytest.raises(UserError, match="settings of central_difference can't be searched together with those of grad"):
        method_of(["gradient_epsilon", "CAC_VAR_START_THR"])
    with pytest.raises(
        UserError, match="settings of discrete_gradient and straight_through can't be searched together"
    ):
        method_of(["discrete_stride", "ste_samples"])


def test_the_intervention_is_the_estimator_with_all_it_depends_on() -> None:
    """A default that is written out is the same training; the iteration is no part of the text."""
    plain = switched_on(TrialConfig(method="central_difference"))
    same = switched_on(TrialConfig(method="central_difference", gradient_epsilon=0.1, gradient_start_itr=0))
    other = switched_on(TrialConfig(method="central_difference", gradient_epsilon=0.2))
    late = switched_on(TrialConfig(method="central_difference", gradient_start_itr=7))
    assert plain == same
    assert plain.action != other.action
    assert (late.iteration, late.action) == (7, plain.action)
    texts = {switched_on(TrialConfig(method="straight_through", ste_estimator=name)).action for name in STE_ESTIMATORS
             if name != "proposal"}  # fmt: skip
    assert len(texts) == 4
