"""Bytes as people write them."""

from __future__ import annotations

import pytest

from trainables.errors import UserError
from tune_cac.cli.main import main
from tune_cac.study.options import SearchOptions, read_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20GB", 20 * 10**9),
        ("1.5 mb", 1_500_000),
        ("512MiB", 512 * 2**20),
        ("2TiB", 2 * 2**40),
        ("4096", 4096),
        ("0", 0),
        (7, 7),
        ("3kB", 3000),
    ],
)
def test_bytes_with_units(text: str | int, number: int) -> None:
    assert read_bytes(text) == number
    assert SearchOptions(checkpoint_budget=text).budget_bytes == number


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e3", "20 GiBs", "ten", True, "1,5GB"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(
        UserError, match=r"^--checkpoint-budget must be a number of bytes >= 0 with or without a unit, such"
    ):
        read_bytes(text)


def test_a_wrong_budget_ends_the_command_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert main(["search", "--checkpoint-budget", "much", "--name", "s"]) == 2
    assert "such as 20GB, got 'much'" in capsys.readouterr().err


def test_a_forward_cache_is_for_trials_of_one_process() -> None:
    SearchOptions(hold={"forward_cache_mb": 64})
    with pytest.raises(UserError, match=r"forward_cache_mb must be 0 with several workers a trial, .*, got 64"):
        SearchOptions(hold={"forward_cache_mb": 64}, workers_per_trial=2)
