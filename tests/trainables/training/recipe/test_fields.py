"""Fields of the training recipe: what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from trainables.config import TrialConfig
from trainables.errors import UserError

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
