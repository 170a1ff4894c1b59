"""Settings by network in tables, and the lines to paste: they are read again by the code that they are meant for."""

from __future__ import annotations

import shlex

import tune_cac
from analysis.presentation.env_file import environment_lines
from analysis.presentation.intervention_text import action_words
from analysis.presentation.networks_text import networks_text
from trainables.config import TrialConfig
from trainables.gradskip.settings import Settings
from tune_cac.study.fixed_params import read_assignments

CONFIG = TrialConfig(
    workload="gan_digits", workload_options=("width=8",), epochs=12, method="gradskip_by_network",
    CAC_BRAKING_DISTANCE=4,
    network_settings=(
        "discriminator.CAC_STOP_LAYER_NUM=2,6", "discriminator.CAC_STOP_LAYER_ITR=20,40",
        "generator.CAC_VAR_START_THR=0.97",
    ),
)  # fmt: skip


def test_the_command_to_paste_has_the_trials_configuration() -> None:
    lines = [line.removeprefix("#") for line in environment_lines(CONFIG, schedule="")]
    words = shlex.split(f"{lines[1].removesuffix(chr(92))} {lines[2]}")
    assert words[:4] == ["python", "-m", "tune_cac", "trial"]
    given = {
        name: words[place + 1] for place, name in enumerate(words) if name in ("--workload", "--epochs", "--option")
    }
    assert given == {"--workload": "gan_digits", "--epochs": "12", "--option": "width=8"}
    sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    again = TrialConfig(
        workload="gan_digits", workload_options=("width=8",), epochs=12, method=words[words.index("--method") + 1],
        **read_assignments(sets),
    )  # fmt: skip
    assert again == CONFIG


def test_the_code_to_paste_makes_each_networks_settings() -> None:
    lines = environment_lines(CONFIG, schedule="")
    code = "\n".join(line.removeprefix("#").strip() for line in lines[4:])
    found: dict[str, Settings] = {}
    exec(code, {"tune_cac": tune_cac}, found)
    assert {name: settings.to_environment() for name, settings in found.items()} == {
        name: CONFIG.settings_of_network(name).to_environment() for name in ("discriminator", "generator")
    }


def test_every_line_is_a_comment() -> None:
    assert all(line.startswith("#") for line in environment_lines(CONFIG, schedule=""))


def test_tables_name_the_networks() -> None:
    text = networks_text(CONFIG.to_dict())
    assert text == "discriminator: STOP_LAYER_NUM=2,6 STOP_LAYER_ITR=20,40; generator: START_THR=0.97"
    assert networks_text({}) == networks_text({"network_settings": None}) == ""


def test_an_intervention_of_both_names_what_each_stopped() -> None:
    names = [f"{network}.{number}" for network in ("generator", "discriminator") for number in range(2)]
    action = '{"networks":{"discriminator":{"braking":3,"stop":[2,3]},"generator":{"braking":0,"stop":[0]}}}'
    assert action_words(action, names) == (
        "discriminator: stop through discriminator.1, braking 3; generator: stop through generator.0"
    )
