"""`doctor --script`: a training script of the user's is run for some steps, told its faults, and ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from thorough import rest_thorough

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.free = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(self.free(self.norm(self.conv(images)).relu()).mean((2, 3)))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    data = torch.utils.data.TensorDataset(torch.randn(400, 1, 8, 8), torch.randint(0, 3, (400,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
    for epoch in range(1000):
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            print("loss", loss.item())
    open("trained", "w").close()
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tune_cac", "doctor", "--script", *command], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", rest_thorough(["python train.py 0.1", "python3 -u train.py 0.1", "python -m train 0.1"])
)
def test_a_script_is_observed_and_ended(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, command)
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("seen: ")[2]
    assert told.startswith("11 optimizer steps\nrecipe: ")
    assert 'model.get_submodule("conv").register_parameter("bias", None)' in told
    assert "free" not in told
    line = 1 + SCRIPT.splitlines().index("            optimizer.zero_grad(set_to_none=False)")
    assert f"train.py:{line}: each gradient is written" in told
    assert done.stdout.count("loss ") == 10  # the eleventh step ends it
    assert not (tmp_path / "trained").exists()


TWO_NETWORKS = """
import torch
from torch import nn

class Maker(nn.Sequential): pass
class Judge(nn.Sequential): pass

maker = Maker(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
judge = Judge(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 1))
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (judge, maker)]
for step in range(100):
    for optimizer in optimizers:
        optimizer.zero_grad()
        judge(input=maker(torch.randn(8, 2))).mean().backward()
        optimizer.step()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_the_smaller_of_two_networks_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(TWO_NETWORKS)
    done = run(tmp_path, "python gan.py")
    assert done.returncode == 0, done.stderr
    assert "in Maker, 1 layer has a bias" in done.stdout
    assert "in Judge, 1 layer has a bias" in done.stdout
    assert 'model.get_submodule("0").register_parameter("bias", None)' in done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_a_script_that_is_short_fails_or_does_not_train_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SCRIPT.replace("range(1000)", "range(1)").replace("randn(400", "randn(24")
                                       .replace("(400,)", "(24,)"))  # fmt: skip
    done = run(tmp_path, "python short.py 0.1")
    assert done.returncode == 0
    assert "seen: 3 optimizer steps, of 11 that the doctor wants: times were not measured" in done.stdout
    (tmp_path / "idle.py").write_text("print('hello')")
    assert "no step of a torch optimizer was seen" in run(tmp_path, "python idle.py").stdout
    (tmp_path / "broken.py").write_text("raise ValueError('mine')")
    failed = run(tmp_path, "python broken.py")
    assert failed.returncode == 1
    assert "ValueError: mine" in failed.stderr
