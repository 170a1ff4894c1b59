"""Registered methods and workloads of trials, by name. Loads no torch.

A method's code is imported when it is attached (`trainables.attachment`), a workload's when it is built
(`trainables.workloads.build`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainables.errors import UserError, unknown_name
from trainables.quality import ACCURACY, Quality
from trainables.workload_options import SCRIPT_OPTIONS, read_options


@dataclass(frozen=True, kw_only=True)
class Method:
    """A registered method."""

    name: str
    description: str
    home: str | None
    """``module:function`` that attaches it: (optimizer, config, run) -> Attached. None attaches nothing."""
    replay_module: str | None
    """Module with `start_replay` and `blueprint_key`. None: the method never acts."""


_COMPRESSION = ("trainables.compression.trial.method:attach", "trainables.compression.trial.replay")
_GRADIENTS = ("trainables.gradients.method:attach", "trainables.gradients.replay")
METHODS: dict[str, Method] = {
    name: Method(name=name, description=description, home=home, replay_module=replay_module)
    for name, description, home, replay_module in (
        ("none", "plain training, the baseline", None, None),
        ("recipe", "plain training by another recipe: precision, kernels, loading", None, None),
        ("gradskip", "CAC Gradient-Skip: layers whose weight variance has fallen below its peak stop",
         "trainables.gradskip.controller:attach", "trainables.gradskip.replay"),
        ("compression", "a compression schedule: pruning, regularization, quantization, thinning, distillation",
         *_COMPRESSION),
        ("gradskip+compression", "Gradient-Skip while a compression schedule prunes", *_COMPRESSION),
        ("central_difference", "gradients from differences of the loss, without a backward pass", *_GRADIENTS),
        ("discrete_gradient", "the smallest changes of weights that lower the loss, the best of them together",
         *_GRADIENTS),
        ("straight_through", "gradients through binary activations, from samples", *_GRADIENTS),
        ("svrg", "gradients with a control variate from a snapshot of the weights", *_GRADIENTS),
        ("kfac", "gradients preconditioned by Kronecker factors of the curvature", *_GRADIENTS),
        ("gradient_clustering", "batches that take samples of all clusters of similar gradients", *_GRADIENTS),
        ("importance_sampling", "batches that take samples with large losses or gradients more often", *_GRADIENTS),
        ("zero_gradients", "samples with nearly no loss gradient left out of the backward pass", *_GRADIENTS),
        ("gradskip+zero_gradients",
         "Gradient-Skip, and samples with nearly no loss gradient left out of the backward pass", *_GRADIENTS),
    )
}  # fmt: skip

#: Options with a flag of their own.
_FLAGS = {"data": "--data PATH", "model": "--model NAME"}
#: Name of the workload that runs a command of the user's.
SCRIPT = "script"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered workload."""

    home: str
    """``module:class``. The class's keyword arguments are the workload's options."""
    default_epochs: int
    description: str
    needs: tuple[str, ...] = ()
    """Required options, which have no default."""
    quality: Quality = ACCURACY
    """The metric by which its trials are compared unless a search names another."""


WORKLOADS: dict[str, Entry] = {
    "digits": Entry(
        home="trainables.workloads.digits:Digits",
        default_epochs=30,
        description="real handwritten digits that ship with scikit-learn, six convolutions; seconds a run on one core "
        "(--option activations=binary: sign activations)",
    ),
    "images": Entry(
        home="trainables.workloads.images.workload:Images",
        default_epochs=30,
        description="your images: Hugging Face Parquet or folders by class (--data PATH), on resnet20, resnet18, ... "
        "(--model NAME, package.module:function, or pretrained: transformers:NAME, timm:NAME, torchvision:NAME)",
        needs=("data",),
    ),
    "rosenbrock": Entry(
        home="trainables.workloads.rosenbrock:Rosenbrock",
        default_epochs=80,
        description="Rosenbrock's function of 100 numbers, minimised by steps of a fixed length; a minute a run",
        quality=Quality(name="value", direction="min", unit=""),
    ),
    "text": Entry(
        home="trainables.workloads.text:Text",
        default_epochs=30,
        description="the next character of the manual that ships with Python: two transformer blocks, no convolution; "
        "half a minute a run on one core",
    ),
    "text_classification": Entry(
        home="trainables.workloads.text_classification:TextClassification",
        default_epochs=3,
        description="your texts by class: CSV, TSV or Parquet (--data PATH), on a pretrained transformer (--model "
        "FOLDER, or its name on the Hugging Face hub); needs tune-cac[transformers]",
        needs=("data", "model"),
    ),
    "gan_digits": Entry(
        home="trainables.workloads.gan_digits:GanDigits",
        default_epochs=60,
        description="a generator of digits against a discriminator, by Frechet distance, minimised; half a minute a "
        "run on one core (--option first=discriminator: its layers stop first)",
        quality=Quality(name="frechet_distance", direction="min", unit=""),
    ),
    "binary_mlp": Entry(
        home="trainables.workloads.binary_mlp:BinaryMLP",
        default_epochs=30,
        description="three layers of 32 with binary activations on a teacher's outputs, minimised; a second a run on "
        "one core (--option pretrained=yes: 17 seconds more, once)",
        quality=Quality(name="mse", direction="min", unit=""),
    ),
}


def check_workload(name: str, options: Iterable[str] = ()) -> None:
    """Raise UserError for a name neither registered nor ``module:function``, or for wrong or missing options."""
    if not isinstance(name, str) or (name not in WORKLOADS and name != SCRIPT and not is_factory(name)):
        raise unknown_name("workload", str(name), [*WORKLOADS, "package.module:function"])
    given = read_options(options)
    if name == SCRIPT:
        for option in given:
            if option not in SCRIPT_OPTIONS and f"{{{option}}}" not in given.get("command", ""):
                raise unknown_name("option of workload script", option, SCRIPT_OPTIONS)
        if "command" not in given:
            raise UserError("workload script needs a command: give --script 'python train.py'")
    for need in WORKLOADS[name].needs if name in WORKLOADS else ():
        if need not in given:
            raise UserError(f"workload {name} needs {_FLAGS.get(need, f'--option {need}=...')}")


def is_factory(name: str) -> bool:
    """Return whether a workload's name refers to a user's function, ``package.module:function``."""
    module, separator, function = name.partition(":")
    return bool(separator) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))
