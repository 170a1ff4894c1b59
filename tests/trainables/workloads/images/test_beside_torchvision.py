"""Images and models beside torchvision and timm: data, names, normalisation, sizes, and fine-tuning by their users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from image_files import noise, write_folder

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from torchvision_here import import_torchvision
from trainables.workloads.images.workload import Images

vision = import_torchvision()
folder, cache = sys.argv[1:]
theirs = vision.datasets.ImageFolder(folder, transform=vision.transforms.PILToTensor())
ours = Images(data=folder, cache=cache, validation=0.3, augment=False)
assert ours._data.labels["train"].tolist() == theirs.targets
pixels = torch.from_numpy(ours._data.pixels["train"][:])
assert torch.equal(pixels, torch.stack([image for image, _ in theirs]))
seen = torch.cat([images for images, _ in ours.train_batches(0, 0)])
rows = torch.from_numpy(ours._parts["train"])[torch.cat(ours._order(0, 0))]
expected = torch.stack([theirs[int(row)][0] for row in rows]).float()
mean, deviation = (expected.mean((0, 2, 3), keepdim=True), expected.std((0, 2, 3), keepdim=True, unbiased=False))
torch.testing.assert_close(seen, (expected - mean) / deviation, atol=2e-3, rtol=1e-3)

network = vision.models.resnet18()
torch.save(network.state_dict(), cache + "/own.pt")
tuned = Images(data=folder, cache=cache, model="torchvision:resnet18", weights=cache + "/own.pt")
mine, theirs = tuned.make_model().state_dict(), network.state_dict()
new = [name for name, value in theirs.items() if not torch.equal(mine[name], value)]
assert new == ["fc.weight", "fc.bias"], new
torch.testing.assert_close(tuned._mean.flatten() / 255, torch.tensor([0.485, 0.456, 0.406]))
assert tuned._size == 224
print("equal")
"""


#: As in torchvision's tutorial on transfer learning: phases under set_grad_enabled, a schedule, the best weights kept;
#: all of the network trains, or its new head alone.
TUTORIAL = """
import sys, os, copy
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision_here import import_torchvision
vision = import_torchvision()
os.environ["TUNE_CAC_TRIAL_DIR"] = "counted here"
from trainables import gradskip
from trainables.gradskip.script_counting import process_record

steps = vision.transforms.Compose([
    vision.transforms.RandomResizedCrop(32), vision.transforms.RandomHorizontalFlip(), vision.transforms.ToTensor()])
data = vision.datasets.ImageFolder(sys.argv[1], steps)
loaders = {"train": torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
           "val": torch.utils.data.DataLoader(data, batch_size=8)}

def train(make, head_alone):
    torch.manual_seed(0)
    model = vision.models.resnet18()
    if head_alone:
        for parameter in model.parameters():
            parameter.requires_grad = False
    model.fc = torch.nn.Linear(model.fc.in_features, len(data.classes))
    optimizer = make(model, model.fc.parameters() if head_alone else model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    best, kept, flops = -1.0, None, 0
    for _ in range(2):
        for phase in ("train", "val"):
            model.train(phase == "train")
            correct = 0
            for images, labels in loaders[phase]:
                optimizer.zero_grad()
                counter = FlopCounterMode(display=False)
                with torch.set_grad_enabled(phase == "train"), counter:
                    scores = model(images)
                    loss = torch.nn.functional.cross_entropy(scores, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                flops += counter.get_total_flops() if phase == "train" else 0
                correct += int((scores.argmax(1) == labels).sum())
            if phase == "train":
                scheduler.step()
            elif correct > best:
                best, kept = correct, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model, optimizer, flops

dense_run = gradskip.Settings(start_itr=10**6)
stops = gradskip.Settings(stop_layer_num=(3,), stop_layer_itr=(6,))
for head_alone, settings in ((False, (dense_run, stops)), (True, (dense_run,))):
    plain, _, dense = train(lambda model, given: torch.optim.SGD(given, lr=0.001, momentum=0.9), head_alone)
    for own in settings:
        process_record._PROCESS = process_record.ProcessRecord()
        ours, optimizer, counted = train(lambda model, given: gradskip.SGD(
            given, lr=0.001, momentum=0.9, model=model, settings=own), head_alone)
        equal = all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values()))
        found = process_record.process_summary()
        executed = found["forward_flops"] + found["backward_flops"]
        print(head_alone, bool(optimizer.gradskip.events), equal, executed == counted, counted < dense)
"""

#: The first stages stop before the first step; what is read from the cache is what is computed without it.
TIMM = """
import sys
from pathlib import Path
import torch
from torchvision_here import import_torchvision
import_torchvision()
sys.path.append(str(Path(sys.prefix) / "torchvision"))
import timm
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from trainables.workloads.images.workload import Images

folder, cache, name = sys.argv[1:]
torch.manual_seed(3)
network = timm.create_model(name)
weights = cache + "/own.pt"
torch.save(network.state_dict(), weights)
ours = Images(data=folder, cache=cache, model="timm:" + name, weights=weights)
facts = timm.data.resolve_model_data_config(network)
for own, theirs in ((ours._mean, facts["mean"]), (ours._deviation, facts["std"])):
    torch.testing.assert_close(own.flatten() / 255, torch.tensor(theirs))
assert ours._size == facts["input_size"][-1]

options = (f"data={folder}", f"cache={cache}", f"model=timm:{name}", f"weights={weights}", "augment=false",
           "image_size=64")
stop = {"CAC_STOP_LAYER_NUM": (12,), "CAC_STOP_LAYER_ITR": (-1,), "CAC_PREFIX_MODE": "eval"}
trained, saved = [], []
for megabytes in (50, 0):
    config = TrialConfig(workload="images", workload_options=options, epochs=2, batch_size=8, method="gradskip",
                         forward_cache_mb=megabytes, **stop)
    with TrainingRun(config) as run:
        first = {key: value.clone() for key, value in run.model.state_dict().items()}
        while not run.finished:
            saved.append(run.train_epoch()["compute_saved"])
        trained.append(run.model.state_dict())
        if megabytes:
            assert run.forward_cache.hits == 36, run.forward_cache.hits
own = network.state_dict()
new = [key for key, value in first.items() if not torch.equal(own[key], value)]
assert new and all(key.startswith(("fc.", "head.", "classifier.")) for key in new), new
assert all(torch.equal(trained[0][key], trained[1][key]) for key in own)
moved = [key for key in own if not torch.equal(trained[0][key], first[key])]
assert 0 < len(moved) < len(own)
assert saved[1] > saved[-1] + 0.01, saved
print("equal")
"""


def run(script: str, folder: Path, *arguments: str) -> str:
    """Return what a script prints that is given a folder of 40 images of 4 classes."""
    write_folder(folder / "data", list(noise(40, 12)), [f"class {'badc'[number % 4]}" for number in range(40)])
    (folder / "cache").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder / "data"), *arguments],
        capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_images_and_models_are_those_of_torchvision(tmp_path: Path) -> None:
    assert run(SCRIPT, tmp_path, str(tmp_path / "cache")) == "equal\n"


@pytest.mark.thorough
def test_the_tutorial_on_transfer_learning_trains_as_before_and_is_counted(tmp_path: Path) -> None:
    rows = [line.split() for line in run(TUTORIAL, tmp_path).splitlines()]
    assert rows == [  # head alone, stopped, trained as by torch.optim, counted as by torch, less than dense
        ["False", "False", "True", "True", "False"],
        ["False", "True", "False", "True", "True"],
        ["True", "False", "True", "True", "False"],
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit", "test_efficientnet"])
def test_a_model_of_timm_is_fine_tuned_from_a_cache_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert run(TIMM, tmp_path, str(tmp_path / "cache"), name) == "equal\n"
