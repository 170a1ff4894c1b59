"""Which script a study trains with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainables.errors import UserError
from tune_cac.study.script_files import check_unchanged, files_digest, named_files, script_identity
from tune_cac.study.search_options import SearchOptions


def test_a_script_and_what_it_imports_from_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "my train.py").write_text("import nets\nimport torch\n")
    (tmp_path / "nets.py").write_text("SIZE = 1\n")
    (tmp_path / "data.csv").write_text("1\n")
    command = "python 'my train.py' --lr 0.1 --data data"
    assert named_files(command, tmp_path) == [tmp_path / "my train.py"]
    options = (f"command={command}", f"cwd={tmp_path}")
    options = (*options, *script_identity(options))
    assert options[-1] == f"files={files_digest(command, tmp_path)}"
    check_unchanged(options)
    (tmp_path / "data.csv").write_text("2\n")
    (tmp_path / "other.py").write_text("\n")
    check_unchanged(options)
    (tmp_path / "nets.py").write_text("SIZE = 2\n")
    with pytest.raises(UserError, match=r"my train\.py or what it imports has changed .* another --name"):
        check_unchanged(options)


@pytest.mark.parametrize(
    "command",
    [
        "python -m project.train --lr 0.1",
        "torchrun --nproc-per-node 2 -m project.train",
        "python -m torch.distributed.run --nproc-per-node 2 -m project.train",
        "accelerate launch --module --num_processes 2 project.train",
        "python -m project",
    ],
)
def test_a_module_of_a_package_behind_a_launcher(command: str, tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "__main__": "",
        "train": "from . import nets\nimport beside\n",
        "nets": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "other.py").write_text("")
    options = (f"command={command}", f"cwd={tmp_path}")
    options = (*options, *script_identity(options))
    (tmp_path / "other.py").write_text("1\n")
    check_unchanged(options)
    for changed in (package / "nets.py", tmp_path / "beside.py"):
        changed.write_text("1\n")
        with pytest.raises(UserError, match=r"^project(\.train)? or what it imports has changed"):
            check_unchanged(options)
        changed.write_text("")
        check_unchanged(options)


def test_another_folder_is_another_script() -> None:
    first, second = (script_identity(("command=sh train.sh", f"cwd=/{name}")) for name in "ab")
    assert first == second  # no file there; the folder itself is the difference
    assert script_identity(("command=x",))[0] == f"cwd={Path.cwd()}"


def test_python_is_given_a_file_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--script must name a file that is there, got train\.py"):
        script_identity(("command=python -u train.py --out x.py", f"cwd={tmp_path}"))
    for command in ("python -m train x.py", "sh train.sh", "echo '{}'", ""):
        script_identity((f"command={command}", f"cwd={tmp_path}"))


def test_a_command_with_epochs_needs_their_number() -> None:
    options = ("command=train --epochs {epochs}",)
    with pytest.raises(UserError, match=r"--epochs must be given where the command has \{epochs\}, got none"):
        SearchOptions(workload="script", workload_options=options)
    assert SearchOptions(workload="script", workload_options=options, epochs=3).trial_epochs == 3
    assert SearchOptions(workload="script", workload_options=("command=train ${epochs}",)).trial_epochs == 1
    assert not SearchOptions(workload="script", workload_options=("command=train",)).sharing
