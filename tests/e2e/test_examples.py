"""The programs in examples/, each run as it stands, and the pages that show them."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from image_files import write_folder
from tiny_bert import save_tiny_bert, sentences, write_sentences

import analysis

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: Variables under which the first examples are said to be run.
VARIABLES = {"CAC_VAR_START_ITR": "60", "CAC_VAR_START_THR": "0.99", "CAC_VAR_SAMPLES": "5"}


def run(folder: Path, *command: str, **variables: str) -> list[str]:
    """The lines that a command prints in a folder of its own, under these variables alone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAC_")} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def example(name: str) -> str:
    return str(EXAMPLES / name)


def with_numbers(folder: str) -> str:
    """The same texts, of classes 0 and 1 as SST-2 has them."""
    for file in Path(folder).glob("*.csv"):
        file.write_text(file.read_text().replace(",neg", ",0").replace(",pos", ",1"))
    return folder


def documentation(name: str) -> str:
    return str(ast.get_docstring(ast.parse((EXAMPLES / name).read_text())))


@pytest.mark.slow
def test_the_ordinary_loop_stops_layers(tmp_path: Path) -> None:
    said = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    assert f"{said} python loop.py" in documentation("loop.py")
    lines = run(tmp_path, sys.executable, example("loop.py"), **VARIABLES)
    assert re.fullmatch(r"step \d+: stopped through 0\.weight \(start, ratio 0\.9\d\d\)", lines[0])
    assert len(lines) >= 2


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes_stop_layers(tmp_path: Path) -> None:
    assert "torchrun --standalone --nproc-per-node 2 parallel.py" in documentation("parallel.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = run(tmp_path, *torchrun, example("parallel.py"), **VARIABLES)
    assert re.fullmatch(r"step \d+: stopped through 0\.weight", lines[0])


@pytest.mark.thorough
@pytest.mark.slow
def test_the_scaled_loop_stops_layers(tmp_path: Path) -> None:
    lines = run(tmp_path, sys.executable, example("scaler.py"))
    assert re.fullmatch(r"iterations: \d+", lines[0])
    assert re.fullmatch(r"step \d+: stopped through 0\.weight", lines[1])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plain_loop_prunes(tmp_path: Path) -> None:
    elements = [16 * 9, 16 * 16 * 9, 640]
    pruned = [0, elements[1] // 2, elements[2] // 4]
    lines = run(tmp_path, sys.executable, example("prune.py"))
    assert len(lines) == 4
    assert lines[0] == "epoch 0: zeros [0, 0, 0]"
    assert lines[1:] == [f"epoch {epoch}: zeros {pruned}" for epoch in (1, 2, 3)]  # masks outlive their policy


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plain_loop_distils(tmp_path: Path) -> None:
    lines = run(tmp_path, sys.executable, example("distill.py"))
    assert [line.split(": ")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_schedule_built_of_objects_prunes(tmp_path: Path) -> None:
    (line,) = run(tmp_path, sys.executable, example("objects.py"))
    share = float(line.split()[0])
    # torch's linear layers begin uniform in [-b, b]: half a deviation, b / sqrt 3, cuts off 1 / (2 sqrt 3).
    assert share == pytest.approx(0.289, abs=0.04)


def photos(folder: Path) -> Path:
    """Six classes, each of one colour with noise: what a network learns in a few steps."""
    random = np.random.default_rng(0)
    colours = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255))
    for split, count in (("train", 24), ("val", 5)):
        names = [f"class{number}" for number in range(6) for _ in range(count)]
        pixels = [
            np.clip(np.array(colours[int(name[-1])]) * 0.7 + random.integers(0, 60, (32, 32, 3)), 0, 255).astype(
                np.uint8
            )
            for name in names
        ]
        write_folder(folder / split, pixels, names)
    return folder


@pytest.mark.thorough
@pytest.mark.slow
def test_imagenet_trains_resumes_and_evaluates(tmp_path: Path) -> None:
    """Manual stops come at their iterations; a resumed run ends as one that was not interrupted."""
    data = photos(tmp_path / "photos")
    common = (str(data), "--arch", "resnet20", "--batch-size", "36", "--lr", "0.05", "--lr-epochs", "2", "-p", "1",
              "--cache", str(tmp_path / "cache"))  # fmt: skip
    variables = {"CAC_STOP_LAYER_NUM": "10,20", "CAC_STOP_LAYER_ITR": "0,5", "CAC_BRAKING_DISTANCE": "0"}
    variables["PYTHON"] = sys.executable

    def train(*more: str) -> list[str]:
        return run(tmp_path, "sh", example("imagenet.sh"), *common, *more, **variables)

    whole = train("--epochs", "3", "--output", "whole")
    assert [line for line in whole if line.startswith("iteration")] == [
        "iteration 0: stopped through layer1.1.bn1.weight", "iteration 5: stopped through layer1.2.bn2.bias",
    ]  # fmt: skip
    assert sum(re.match(r"epoch \d step \d/4: loss ", line) is not None for line in whole) == 12
    scores = [line for line in whole if "validation" in line]
    assert [re.fullmatch(r"epoch (\d): validation top-1 [\d.]+ %, top-5 [\d.]+ %", line)[1] for line in scores] == [
        "0", "1", "2",
    ]  # fmt: skip
    top1, top5 = map(float, re.findall(r"([\d.]+) %", scores[-1]))
    assert top1 > 100 / 6
    assert top5 >= top1

    train("--epochs", "1", "--output", "parts")
    rest = train("--epochs", "3", "--output", "parts", "--resume", "parts/checkpoint.pt")
    assert rest[0] == "begin at epoch 1, iteration 4"
    assert [line for line in rest if "validation" in line] == scores[1:]

    (line,) = train("--evaluate", "--resume", "whole/checkpoint.pt")
    assert line == f"validation: top-1 {top1:.2f} %, top-5 {top5:.2f} %"
    best = max(float(re.findall(r"top-1 ([\d.]+)", score)[0]) for score in scores)
    (line,) = train("--evaluate", "--resume", "whole/model_best.pt")
    assert line.startswith(f"validation: top-1 {best:.2f} %")


@pytest.mark.slow
@pytest.mark.thorough
def test_imagenet_names_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, example("imagenet.py"), "nowhere", "--arch", "resnet20"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("imagenet.py: ")
    assert "nowhere" in line


def test_the_shell_script_sets_the_published_variables() -> None:
    """Those of auto mode by their defaults, with the braking distance that the published example adds."""
    from trainables.gradskip.variables import BY_NAME

    text = (EXAMPLES / "imagenet.sh").read_text()
    set_here = dict(re.findall(r'^export (CAC_\w+)="\$\{\1:-(.+)\}"$', text, re.MULTILINE))
    assert set_here.pop("CAC_BRAKING_DISTANCE") == "300"
    auto = {name for name in BY_NAME if name.startswith("CAC_VAR_")}
    assert set_here == {name: BY_NAME[name].default_text for name in auto}


@pytest.mark.thorough
@pytest.mark.slow
def test_each_network_of_the_gan_stops_by_its_own_settings(tmp_path: Path) -> None:
    variables = {"CAC_VAR_START_THR": "-1", "CAC_STOP_LAYER_NUM": "3", "CAC_STOP_LAYER_ITR": "15"}
    done = subprocess.run(
        [sys.executable, str(example("gan.py")), "--epochs", "2", "--width", "4", "--discriminator-stop", "5"],
        cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "stopped through" in line]
    assert told == [
        "epoch 1: generator stopped through parameter -1",
        "epoch 1: discriminator stopped through parameter 4",
        "epoch 2: generator stopped through parameter 3",
        "epoch 2: discriminator stopped through parameter 4",
    ]
    assert done.stdout.count('"frechet_distance"') == 2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("classes", [("neg", "pos"), ("0", "1")])
def test_the_fine_tuned_model_is_saved_as_it_was_trained(classes: tuple[str, str], tmp_path: Path) -> None:
    """Under pasted settings: what they freeze took its one step, and what is loaded says what was trained."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source, data = save_tiny_bert(tmp_path / "model"), write_sentences(tmp_path / "texts", train=64)
    if classes == ("0", "1"):
        with_numbers(data)
    settings = "CAC_WATCH=linear CAC_STOP_LAYER_NUM=20 CAC_STOP_LAYER_ITR=0 CAC_PREFIX_MODE=eval TUNE_CAC_EPOCHS=2"
    (tmp_path / "best.env").write_text(f"export {settings}\n")  # the embeddings and the first block
    program = example("fine_tune.py")
    command = f". ./best.env && {sys.executable} {program} {source} {data}/train.csv tuned"
    *epochs, scores = run(tmp_path, "sh", "-c", command)
    assert len(epochs) == 2
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    assert model.config.id2label == dict(enumerate(classes))
    first = AutoTokenizer.from_pretrained(tmp_path / "tuned")(sentences(64, 0)[0][0], return_tensors="pt")
    assert [float(score) for score in scores.split(": ")[1].split()] == model(**first).logits[0].tolist()
    pretrained = AutoModelForSequenceClassification.from_pretrained(source)
    pairs = zip(model.parameters(), pretrained.parameters(), strict=True)
    moved = [float((a - b).detach().abs().max()) for a, b in pairs]
    one_step = 1.02 * 5e-5  # of AdamW, with its weight decay
    assert max(moved[:21]) < one_step < min(moved[-4:-2])  # the pooler's; a new head begins elsewhere


@pytest.mark.slow
@pytest.mark.thorough
def test_the_trainers_adapters_are_searched_without_another_line(tmp_path: Path) -> None:
    """LoRA on a narrow BERT: what the search trained was counted, evaluated on both splits, and stopped by name."""
    source = save_tiny_bert(tmp_path / "model")
    data = with_numbers(write_sentences(tmp_path / "texts", train=64, validation=32, test=32))
    program = example("trainer.py")
    script = f"{sys.executable} {program} {source} {data} --lora 2 --epochs 2 --lr 0.01"
    assert "--space frozen_prefix --script 'python trainer.py MiniLM texts --lora 8'" in documentation("trainer.py")
    run(
        tmp_path, sys.executable, "-m", "tune_cac", "search", "--space", "frozen_prefix", "--script", script,
        "--trials", "2", "--seeds", "1", "--no-controls", "--name", "s",
    )  # fmt: skip
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].tolist() == ["completed"] * 2
    assert trials["step"].tolist() == [4, 4]
    assert (trials["accuracy"] * 32 % 1 == 0).all()
    assert (trials["test_accuracy"] * 32 % 1 == 0).all()
    assert trials["compute_saved"][1] > 0
    assert "lora_" in json.loads(trials["stop_events"][1])[-1]["name"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "schedule", "control", "share"),
    [
        ("vision_transformer", "heads", ["heads=4", "mlp=256"], 0.501),
        ("resnet", "filters", ["width=23"], 0.534),
    ],
)
def test_models_of_transformers_get_smaller_files(
    model: str, schedule: str, control: list[str], share: float, tmp_path: Path
) -> None:
    """Trained, pruned, thinned, fine-tuned and exported; the control has as many multiplications."""
    shutil.copy(example("smaller_models.py"), tmp_path)
    shutil.copy(EXAMPLES / f"{schedule}.yaml", tmp_path)
    tune_cac, trained = (sys.executable, "-m", "tune_cac"), ("--epochs", "13", "--save")
    work = ("trial", "--workload", f"smaller_models:{model}")
    assert all(option in documentation("smaller_models.py") for option in (" ".join(work), *control))
    run(tmp_path, *tune_cac, *work, "--epochs", "2", "--method", "none", "--save", "dense.pt")
    run(
        tmp_path,
        *tune_cac,
        *work,
        "--option",
        "weights=dense.pt",
        "--schedule",
        f"{schedule}.yaml",
        *trained,
        "pruned.pt",
    )
    options = [word for option in control for word in ("--option", option)]
    run(tmp_path, *tune_cac, *work, *options, "--method", "none", *trained, "control.pt")
    macs = {}
    for name in ("pruned", "control"):
        lines = run(tmp_path, *tune_cac, "export-model", f"{name}.pt", "--output", f"{name}.onnx")
        before, after, ratio = lines[3].removeprefix("multiply-adds a sample").split()
        macs[name] = int(after.replace(",", ""))
        assert float(ratio) == pytest.approx(share if name == "pruned" else 1, abs=0.006)
        before, after = re.findall(r"0\.\d+", next(line for line in lines if line.startswith("accuracy")))
        assert before == after
    assert macs["control"] == pytest.approx(macs["pruned"], rel=0.02)


def test_every_example_is_run_and_says_what_it_is() -> None:
    tested = set(re.findall(r'example\("([\w.]+)"\)', Path(__file__).read_text()))
    searched = (Path(__file__).parent / "test_example_metrics.py").read_text()
    tested |= {f"{name}.py" for name in re.findall(r'^    "(\w+)": \(\[', searched, re.MULTILINE)}
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} == tested
    for path in EXAMPLES.glob("*.py"):
        said = documentation(path.name).replace("torchrun --standalone --nproc-per-node 2", "python")
        assert f"python {path.name}" in said or f"--workload {path.stem}:" in said


def test_pages_show_examples_word_for_word() -> None:
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        for name, code in blocks:
            assert code == (EXAMPLES / name).read_text().split('"""\n\n', 1)[1], f"{page.name}: examples/{name} differs"
            shown.add(name)
    assert shown >= {"prune.py"}
