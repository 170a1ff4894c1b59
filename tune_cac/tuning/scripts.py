"""A search whose trials run a command of the user; the run is known when the baseline has ended.

Its optimizer reports steps and layers, and leaves the variances of every step, so that what a setting stops is known
before it is trained, as where we train ourselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FixedTrial, TrialState

from analysis.metrics.ranking import CUT
from analysis.trace_replay.traces import OF_SCRIPT
from search_spaces import SpaceContext
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.script_counting.trace_file import TRACE_FILE, from_bytes
from trainables.metrics import ROW_KEYS
from trainables.script.placeholders import names
from trainables.script.run import RUN_FACTS, ScriptFailed
from trainables.stage_tree.root import costs_file, facts_file, root_id
from trainables.stage_tree.store import Chunk, StageStore
from trainables.storage import files_of
from trainables.workload_options import read_options
from tune_cac.messages import say
from tune_cac.study.fixed_params import with_watch
from tune_cac.tuning.baseline import WarmStart, learn, never_acts, warn_of_nothing_learned
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.run_context import UNKNOWN_RUN
from tune_cac.tuning.searcher import StudySearch
from tune_cac.tuning.trials import PredefinedTrial

#: Said where a baseline with our optimizer left no variances.
NOT_RECORDED = (
    "the baseline's run could not be recorded, so what settings stop is not known before they are trained and they are "
    "drawn by TPE (docs/own-training.md says what can be recorded)"
)
#: So many trials that fail with one error, and none that does not, end a search.
ALIKE = 3
#: Said where the starting point is left out.
START_DOES_NOTHING = (
    "the space's starting point stops nothing on this run, as the baseline's shows, so it is not trained"
)


def write_root(
    tree: Path | str, config: TrialConfig, row: Mapping[str, Any], told: Mapping[str, Any], content: bytes
) -> str:
    """Write the root of a stage tree that a dense run leaves, without checkpoints; return its id.

    ``content`` is that of the file that the run's optimizer has written (`trace_file`), ``told`` its `RUN_FACTS`.

    Raises:
        OSError: it cannot be written.
        Exception: the file is of another run than the reports (UserError), or of another kind or version.
    """
    facts, values = from_bytes(content)
    steps = told["total_steps"]
    if len(values) < steps or list(facts.layer_names) != told["layer_names"]:
        raise UserError(f"{TRACE_FILE} is of another run of {len(values)} steps than the reports")
    values = values[:steps]  # a script may go on behind its last report, as one that evaluates before its steps does
    described = {
        "workload": config.workload,
        "workload_options": list(config.options),
        "epochs": config.epochs,
        "seed": config.seed,
        "threads": config.threads,
        "device": config.device,
        "steps_per_epoch": steps,  # all steps cost the same
        "total_steps": steps,
        **config.quality.fields(),
        "layer_names": list(facts.layer_names),
        "trains": facts.trains,
        "weight_decays": facts.weight_decays,
        OF_SCRIPT: True,
    }
    root = root_id({**described, "last": values[-1].tolist()})
    store = StageStore(tree, root)
    for layers, blueprint in facts.blueprints:
        key = ("gradskip", *layers)
        store.write(facts_file(key), {"key": key, "facts": blueprint})
    for mask, backward in facts.backward_flops.items():
        store.write(costs_file(mask), {"trains": mask, "steps": [[steps, facts.forward_flops, backward]]})
    store.write("root.json", described)
    chunk = Chunk(begin=0, end=steps, names=tuple(facts.signals), values=values.astype(np.float64), rows={steps: row})
    store.publish(store.first(), chunk, None)
    return root


class ScriptSearch(StudySearch):
    """Train the baseline first; its reports give the number of steps and the layers of a run.

    Trials share nothing, and the only controls are shorter runs, if the command takes ``{epochs}``; then its length is
    searched, too.
    """

    def __init__(self, plan: SearchPlan) -> None:
        self._placeholders = set(names(read_options(plan.base.options)["command"]))
        run = replace(UNKNOWN_RUN, workload_options=plan.context.workload_options, fixed=plan.context.fixed)
        lengths = plan.lengths if "epochs" in self._placeholders else ""
        super().__init__(replace(plan, context=run, sharing=False, lengths=lengths))
        self._before = len(self.study.trials)

    def begin(self) -> None:
        """Queue the baseline; the starting point depends on the run that it reports."""
        self.study.enqueue_trial({}, user_attrs={"role": "baseline"})

    def _sent(self, trial: optuna.Trial) -> dict[str, Any]:
        config, steps = super()._sent(trial), self._facts().get("steps")
        if config["role"] != "baseline" and steps:
            config["steps"] = round(steps * config["config"]["epochs"] / self.plan.base.epochs)
        return config

    @property
    def gave_up(self) -> str:
        """Return why the baseline leaves nothing to try; empty otherwise."""
        if super().gave_up:
            return super().gave_up
        if self.trials.baseline_row() is None:
            return ""
        ended = self.trials.all(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        new = [t.user_attrs for t in ended if t.number >= self._before]  # what failed before --resume is tried on
        settings = [attrs for attrs in new if attrs.get("role") not in ("baseline", CUT, "control")]
        errors = [attrs.get("error", "") for attrs in settings if "continued_by" not in attrs]  # interrupted ones are
        if len(errors) >= ALIKE and len({*errors}) == 1 and errors[0].startswith(ScriptFailed.__name__):
            return f"all {len(errors)} settings failed alike"
        facts = self._facts()
        if facts.get("total_steps") is None:
            return "the baseline reported no step"
        if not facts["layer_names"] and not self._placeholders - {"seed", "epochs", "trial_dir"}:
            return "the baseline has no optimizer of tune_cac.gradskip and the command no placeholder"
        none_stops = not (facts["unit_ends"] if facts.get("has_model") else facts["layer_names"])
        if none_stops and self._search_space.name in ("manual_layers", "frozen_prefix"):
            return "the baseline reported no layers that could stop"
        return ""

    def _ask(self) -> optuna.Trial | str | None:
        self._leave_out_lengths()
        return super()._ask()

    def _leave_out_lengths(self) -> None:
        """Search no lengths if the baseline reports a saving alone: then what a shorter run saves is not known."""
        baseline = self.trials.baseline_row()
        if baseline is not None and not baseline["dense_flops"]:
            self.lengths.searched = False

    def learn(self) -> WarmStart:
        """Return what the baseline told of its run: steps, layers and, if recorded, what settings stop."""
        if self._warm_start is None:
            facts = self._facts()
            self._context = self._context_told(facts)
            self.plan = replace(self.plan, hold=with_watch(self.plan.hold, self._context))
            self._warm_start = self._acting(self._known(self.plan.base, facts, self.trials.root()))
        return self._warm_start

    def _learned(self, epochs: int, root: str | None) -> WarmStart:
        facts = next(json.loads(t.user_attrs[RUN_FACTS]) for t in self.trials.all() if t.user_attrs.get("root") == root)
        return self._known(replace(self.plan.base, epochs=epochs), facts, root)

    def _context_told(self, facts: Mapping[str, Any]) -> SpaceContext:
        return SpaceContext(
            total_steps=int(facts["total_steps"]),
            layer_names=tuple(facts["layer_names"]),
            unit_ends=tuple(facts["unit_ends"]),
            watch=tuple(facts["watch"]),
            has_norms=facts.get("has_norms", False),
            workload_options=self._context.workload_options,
            fixed=self._context.fixed,
        )

    def _known(self, base: TrialConfig, facts: Mapping[str, Any], root: str | None) -> WarmStart:
        plan = replace(self.plan, space=self._search_space, context=self._context_told(facts), base=base)
        return replace(
            learn(plan, root), weight_decays=facts.get("weight_decays"), has_model=facts.get("has_model", False)
        )

    def _with_prefixes(self, context: SpaceContext) -> SpaceContext:
        return context  # whether the script reads from a forward cache is its own choice

    def _enqueue_first(self) -> None:
        if self.study.user_attrs.get("spread"):
            return
        if self._start_does_nothing():
            say(START_DOES_NOTHING)
        else:
            self._enqueue_start(self.learn().context)
        self.trials.tell_why_little(self.learn().why_little(self.plan.seed))
        self.study.set_user_attr("spread", True)

    def _start_does_nothing(self) -> bool:
        """Return whether the baseline's run proves that the starting point would be the same training."""
        if self.outcomes is not None and self.outcomes.predicts:
            with suppress(ValueError, UserError):  # a start of some parameters, of which Optuna draws the others
                config = self._config(FixedTrial(dict(self._search_space.start(self.learn().context))))
                return never_acts(TrialConfig.from_mapping(config), self.learn().trace)
        return False

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Store the run facts that the baseline or a cut run reports, then report the trial as in every search."""
        trial = self._running.get(trial_id)
        if trial is not None and trial.user_attrs.get("role") in ("baseline", CUT) and result and RUN_FACTS in result:
            trial.set_user_attr(RUN_FACTS, result[RUN_FACTS])
            facts = json.loads(result[RUN_FACTS])
            if trial.user_attrs["role"] == "baseline" and (facts.get("sizes") or 0) > 2:  # an epoch's last batch is one
                say(f"inputs vary in size: FLOPs of {facts['measured_steps']} of {facts['steps']} steps were counted, "
                    "those of the others follow from their sizes")  # fmt: skip
            self._keep_trace(trial, result, facts)
        super().on_trial_complete(trial_id, result, error)

    def _keep_trace(self, trial: optuna.Trial, result: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Keep what a dense run's optimizer has recorded; without it settings are drawn by Optuna's sampler."""
        attrs, row = trial.user_attrs, {name: result[name] for name in ROW_KEYS if name in result}
        try:
            content = files_of(self._place).read(f"{attrs['folder']}/{TRACE_FILE}")
            config = TrialConfig.from_mapping(attrs["config"])
            trial.set_user_attr("root", write_root(self.plan.tree, config, row, facts, content))
        except FileNotFoundError:
            if self.outcomes is not None and facts["layer_names"] and attrs["role"] == "baseline":
                say(NOT_RECORDED)
        except Exception as error:  # noqa: BLE001 - a file of another version, or one that the user's script wrote
            warn_of_nothing_learned(error)

    def missing_controls(self, *, shorter_alone: bool = False) -> list[PredefinedTrial]:
        """Return the missing shorter runs; none if the command takes no ``{epochs}``."""
        self._leave_out_lengths()
        return super().missing_controls(shorter_alone=shorter_alone) if "epochs" in self._placeholders else []

    def _facts(self) -> Mapping[str, Any]:
        stored = next((t.user_attrs[RUN_FACTS] for t in self.trials.baselines() if RUN_FACTS in t.user_attrs), "{}")
        facts: Mapping[str, Any] = json.loads(stored)
        return facts
