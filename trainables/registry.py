"""The methods that a trial may train with, by name. Loads no torch; a method's code is imported when it is attached."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainables.metrics import METHOD_DEFAULTS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from trainables.config import TrialConfig
    from trainables.stage_tree.interventions import Follower


class Attached:
    """A method at work on one training run. This base class is the method that does nothing."""

    def stop_key(self) -> Hashable:
        """Equal keys mean equal sets of parameters without gradient; read before every step, so it must be cheap."""
        return ()

    def events(self) -> list[dict[str, Any]]:
        """What the method did so far, in plain types: iteration, layer, name, ratio, rule of each stop."""
        return []

    def columns(self) -> dict[str, Any]:
        """The method's own result columns (`trainables.metrics`)."""
        return {}

    def facts(self) -> dict[str, Any]:
        """What the method's follower needs to know of the model, in plain types."""
        return {}

    def carried(self) -> dict[str, Any]:
        """What of the method's state belongs to the training itself (tensors, plain types), not to its rule."""
        return {}

    def following(self) -> dict[str, Any]:
        """Where the method stands, as its follower's `state_dict` says it."""
        return {}

    def go_on(self, followed: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
        """Stand where a follower stands, in a run whose weights were loaded; ``carried`` came with them."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a method may know of the run that it attaches to."""

    model: nn.Module
    """The model, as it will be trained."""
    forward: Callable[[nn.Module], Any]
    """Runs a model like it on one training batch."""
    total_steps: int
    """Optimizer steps of the full run."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A registered method."""

    name: str
    """Its stem, the same in trainables, search_spaces and tests."""
    description: str
    """One line."""
    home: str | None
    """``module:function`` that attaches it: (optimizer, config, run) -> Attached. None attaches nothing."""
    following: str | None = None
    """Module with `follow` and `blueprint_key`. None never acts."""

    def attach(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> Attached:
        """Attach to an optimizer that has not stepped yet."""
        if self.home is None:
            return Attached()
        module, function = self.home.split(":")
        attached: Attached = getattr(importlib.import_module(module), function)(optimizer, config, run)
        return attached

    def facts_key(self, config: TrialConfig) -> Hashable:
        """Configurations of one workload with equal keys have equal `Attached.facts`."""
        if self.following is None:
            return self.name
        key: Hashable = importlib.import_module(self.following).blueprint_key(config)
        return key

    def follow(self, config: TrialConfig, facts: Mapping[str, Any]) -> Follower:
        """The configuration's follower over recorded training. Loads no torch."""
        from trainables.stage_tree.interventions import NeverActs

        if self.following is None:
            return NeverActs(METHOD_DEFAULTS)
        follower: Follower = importlib.import_module(self.following).follow(config, facts)
        return follower


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="none", description="plain training, the baseline", home=None),
        Method(
            name="gradskip",
            description="CAC Gradient-Skip: layers whose weight variance has fallen below its peak stop",
            home="trainables.gradskip.method:attach",
            following="trainables.gradskip.following",
        ),
    )
}
