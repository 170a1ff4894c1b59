"""A trial trained over the stage tree: it walks what is known and trains only what is not.

The walk follows the trial's own rule over recorded signals. Where the recording ends, or the rule acts as no trial
before it did, the trial claims that stage, continues from the nearest checkpoint of its own path and trains live,
publishing as it goes, until its path enters a stage that others know; there it walks again. What it reports is what it
would have reported alone.
"""

from __future__ import annotations

import io
import json
import pickle
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged
from trainables.metrics import METHOD_DEFAULTS
from trainables.registry import METHODS
from trainables.stage_tree.checkpoints import Checkpoints, Entry, StageWeight
from trainables.stage_tree.claims import NoClaims
from trainables.stage_tree.facts import facts_file, plain_shapes, run_lengths
from trainables.stage_tree.interventions import Follower, Intervention, MissingSignal
from trainables.stage_tree.recorder import SignalRecorder
from trainables.stage_tree.root import root_facts, root_id
from trainables.stage_tree.spacing import spacing
from trainables.stage_tree.store import Stage, StageStore
from trainables.training.run import TrainingRun, check_device, check_forward_cache, read_state
from trainables.workloads import build

#: Columns of a row that are a trial's own, not its stage's.
_OWN_COLUMNS = ("wall_time_s", "search_flops", "stage", *METHOD_DEFAULTS)
#: A row that says that training ended there.
_DIVERGED = "diverged"
#: A trainer that is not heard of for so long, or for so many of its slowest steps, has given its stage up.
_LEASE_S, _LEASE_STEPS = 15.0, 20
#: The same before its first step: the model is built, kernels are chosen, FLOPs are counted.
_BEGINNING_S = 60.0
#: Waiting for another trial: from one look to the next.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How trials of a study share training."""

    tree: Path
    """The study's ``tree`` folder, on storage that all processes see."""
    budget_bytes: int = 20 * 10**9
    """Most bytes of checkpoints."""
    trials: int = 24
    """Trials of the study, which decides how often forks are expected."""
    watches: tuple[tuple[str, ...], ...] = ()
    """Values of ``CAC_WATCH`` in the study, whose layers are recorded from the first trial on."""
    checkpoint_every_s: float = 60.0
    """Most seconds of training that a crash may cost; 0 for an epoch."""


@dataclass(kw_only=True)
class _Visit:
    """A stage on the trial's path."""

    stage: Stage
    entered_by: Intervention | None
    follower_state: dict[str, Any]
    """The follower's state on entering."""


@dataclass(kw_only=True)
class _Live:
    """A run in this process."""

    run: TrainingRun
    recorder: SignalRecorder
    flops_at_load: int
    steps: int = 0
    """Trained in this process."""
    step_s: float = 0.0
    """Of late."""
    slowest_s: float = 0.0
    """Of the steps in this process but the first."""
    evaluation_s: float = 0.0
    """Of the last one."""
    checkpointed: float = field(default_factory=time.monotonic)


class SharedRun:
    """A run of one configuration, epoch by epoch as `TrainingRun`, over what its study has trained already.

    Args:
        config: the trial's configuration.
        sharing: where and how.
        claims: who trains what (`claims.Claims` or a client of it); None if nobody else is at work.
        holder: this trial's name there.

    Raises (in `train_epoch`):
        TrainingDiverged: as alone, also where another trial diverged on the same path.
    """

    def __init__(
        self, config: TrialConfig, sharing: Sharing, *, claims: Any = None, holder: str = "this process"
    ) -> None:
        self.config = config
        self.sharing = sharing
        self._claims = NoClaims() if claims is None else claims
        self._holder = holder
        self._begun = time.perf_counter()
        check_device(config)
        workload = build(config.workload)
        check_forward_cache(config, workload)
        root = root_facts(config, workload)
        self._root = root
        self._epoch_steps = int(root["steps_per_epoch"])
        self.total_steps = int(root["total_steps"])
        self.store = StageStore(sharing.tree, root_id(root))
        self.checkpoints = Checkpoints(sharing.tree, sharing.budget_bytes, self._stage_weight)
        self._live: _Live | None = None
        self._spent_before = 0
        self._write_s = 0.0
        self._held: str | None = None
        self._bad: set[Entry] = set()
        self._kept: dict[str, list[int]] = {}
        self._renewed = 0.0
        self._described = False
        self._weights: dict[str, StageWeight] | None = None
        self._follower = self._make_follower()
        first = self.store.first()
        self._path = [_Visit(stage=first, entered_by=None, follower_state=self._follower.state_dict())]
        self._reported = 0  # steps at the end of the last row
        self.row: dict[str, Any] | None = None
        """The last epoch's row; None before the first."""
        self.trained_steps = 0
        """Steps that this trial executed."""
        self._rows = self._go()

    def __enter__(self) -> SharedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is claimed and put the process state back."""
        self._rows.close()
        self._release()
        self._drop_live()

    @property
    def finished(self) -> bool:
        """Whether all epochs are reported."""
        return self._reported >= self.total_steps

    @property
    def run(self) -> TrainingRun | None:
        """The run that this trial trains in this process; None where nothing had to be trained so far."""
        return None if self._live is None else self._live.run

    @property
    def search_flops(self) -> int:
        """FLOPs that this trial executed so far."""
        live = self._live
        return self._spent_before + (0 if live is None else live.run.executed_flops - live.flops_at_load)

    def train_epoch(self) -> dict[str, Any]:
        """The next epoch's row, trained or known."""
        try:
            self.row = next(self._rows)
        except BaseException:
            self._release()
            raise
        if self.finished:
            self._release()  # nobody asks this trial for more, and it may stay for long
            self._describe_root(self.run)
        return self.row

    def _go(self) -> Generator[dict[str, Any], None, None]:
        wait_s = _SHORTEST_WAIT_S
        while not self.finished:
            before = self._follower.iteration
            yield from self._walk()
            if self.finished:
                break
            if self._follower.iteration > before:
                wait_s = _SHORTEST_WAIT_S
            if not self._claim(self._here):
                time.sleep(wait_s)  # another trial trains it, and is there no later than this one would be
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            if self._here.refresh():
                continue  # something came while we asked
            yield from self._train()
        self._release()

    # --- where the trial is -----------------------------------------------------------------------------------------

    @property
    def _here(self) -> Stage:
        return self._path[-1].stage

    def _make_follower(self) -> Follower:
        method = METHODS[self.config.method]
        self._known_facts = self._facts(method.facts_key(self.config))
        return method.follow(self.config, self._known_facts)

    def _facts(self, key: Any) -> Mapping[str, Any]:
        if METHODS[self.config.method].following is None:
            return {}
        known = _FACTS.get((self.store.folder, key))
        if known is None:
            name = facts_file(key)
            stored = self.store.read(name)
            if stored is None:
                with TrainingRun(self.config) as run:
                    stored = {"key": key, "facts": run.method.facts()}
                self._write_small(name, stored)
            known = _FACTS[(self.store.folder, key)] = stored["facts"]
        return known

    def _write_small(self, name: str, values: Any) -> None:
        try:
            self.store.write(name, values)
        except OSError as error:
            self._tell_unwritten(error)

    def _tell_unwritten(self, error: OSError) -> None:
        if self.sharing.tree not in _UNWRITTEN:
            _UNWRITTEN.add(self.sharing.tree)
            warnings.warn(
                f"the stage tree cannot be written ({error.strerror or error}): trials train on without sharing what "
                "they train now",
                stacklevel=3,
            )

    def _enter(self, intervention: Intervention) -> Stage:
        stage = self.store.child(self._here, intervention)
        self._path.append(_Visit(stage=stage, entered_by=intervention, follower_state=self._follower.state_dict()))
        return stage

    def _row(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """A stage's row as this trial's own."""
        if _DIVERGED in stored:
            raise TrainingDiverged(stored[_DIVERGED])
        return {
            **stored,
            "wall_time_s": time.perf_counter() - self._begun,
            "search_flops": self.search_flops,
            "stage": self._here.id,
            **self._follower.columns(),
        }

    # --- walking ----------------------------------------------------------------------------------------------------

    def _walk(self) -> Iterator[dict[str, Any]]:
        """Follow the rule over what is known, reporting the rows on the way."""
        while not self.finished:
            stage = self._here
            next_row = self._reported + self._epoch_steps
            if stage.known_until < next_row or next_row not in stage.rows:
                stage.refresh()
            target = min(next_row, stage.known_until)
            try:
                intervention = self._follower.advance(stage, target)
            except MissingSignal:
                return
            if intervention is not None:
                self._enter(intervention)
            elif self._follower.iteration == next_row and next_row in stage.rows:
                self._reported = next_row
                yield self._row(stage.rows[next_row])
            else:
                return

    # --- claims -----------------------------------------------------------------------------------------------------

    def _claim(self, stage: Stage) -> bool:
        if self._held == stage.id:
            return True
        self._release()
        if not self._claims.claim(stage.id, self._holder, self._lease_s()):
            return False
        self._held = stage.id
        self._renewed = time.monotonic()
        return True

    def _release(self) -> None:
        if self._held is not None:
            self._claims.release(self._held, self._holder)
            self._held = None

    def _lease_s(self) -> float:
        if self._live is None or not self._live.slowest_s:
            return _BEGINNING_S
        return _LEASE_S + _LEASE_STEPS * self._live.slowest_s

    def _renew(self, silence_s: float = 0.0) -> None:
        """Say that this trial is alive: now and then, and before it is silent for so many seconds."""
        if self._held is not None and time.monotonic() - self._renewed + silence_s > _LEASE_S / 5:
            self._claims.renew(self._holder, self._lease_s() + silence_s)
            self._renewed = time.monotonic()

    # --- training ---------------------------------------------------------------------------------------------------

    def _train(self) -> Iterator[dict[str, Any]]:
        """Train live from the nearest state of the path until the end, or into a stage that others know."""
        frontier = self._follower.iteration
        live = self._stand_before(frontier)
        run = live.run
        while True:
            run.begin_epoch()
            while not run.epoch_is_trained:
                with run.untimed():
                    self._before_step(live)
                begun = time.perf_counter()
                run.train_step()
                took = time.perf_counter() - begun
                if live.steps > 0:  # the first one chooses kernels and counts FLOPs
                    live.step_s = 0.9 * live.step_s + 0.1 * took if live.step_s else took
                    live.slowest_s = max(live.slowest_s, took)
                live.steps += 1
                self.trained_steps += 1
                with run.untimed():
                    stays = self._after_step(live, frontier)
                if not stays:
                    run.pause()
                    return
            self._check_agreement(live)
            known = self._here.rows.get(run.step)
            if run.step <= frontier and known is not None and _DIVERGED not in known:
                run.skip_evaluation()
                self._publish(live, {})
                continue
            # Evaluating takes less than training an epoch did, or about as long as the time before.
            self._renew(max(2 * live.evaluation_s, self._epoch_steps * live.step_s))
            begun = time.perf_counter()
            try:
                row = run.end_epoch()
            except TrainingDiverged as error:
                self._publish(live, {run.step: {_DIVERGED: str(error)}})
                raise
            live.evaluation_s = time.perf_counter() - begun
            stored = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
            self._publish(live, {run.step: stored})
            self._describe_root(run)
            if run.step > self._reported:
                self._reported = run.step
                yield self._row(stored)
            if run.finished:
                return

    def _before_step(self, live: _Live) -> None:
        if self._is_overdue(live) and self._may_checkpoint(live):
            self._check_agreement(live)
            self._publish(live, {})  # the checkpoint that comes now is of use only if what leads to it is known
        live.recorder.before_step()
        self._renew()
        if self._wants_checkpoint(live):
            self._checkpoint(live)

    def _after_step(self, live: _Live, frontier: int) -> bool:
        """Follow the step that was trained; False if the path goes on in a stage that others know or train."""
        intervention = self._follower.advance(live.recorder, live.run.step)
        if intervention is None:
            return True
        self._check_agreement(live)
        self._publish(live, {})
        stage = self._enter(intervention)
        if live.run.step <= frontier:
            return True  # a known part of the path, or the stage that this trial has claimed
        stage.refresh()
        if stage.known_until > stage.start or stage.rows:
            self._release()
            return False
        return self._claim(stage) and not stage.refresh()

    def _stand_before(self, frontier: int) -> _Live:
        """A live run at the nearest state of the path at or before the frontier, the follower with it."""
        # A row that is missing at the frontier is an evaluation of the state there, with the losses on the way.
        latest = frontier if frontier < self._reported + self._epoch_steps else frontier - 1
        path = list(self._path)
        while True:
            self._path = list(path)
            found = self._nearest_checkpoint(latest)
            live = self._live
            if live is not None and (found is None or live.run.step >= found[1].step):
                self._set_back(live.run.step)
                return live
            self._drop_live()
            if found is None:
                self._set_back(0)
                return self._resume(None)
            place, entry = found
            data = self.checkpoints.read(self._path[place].stage.id, entry)
            if data is not None:
                self._set_back(entry.step)
                try:
                    return self._resume(data)
                except (RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
                    self._tell_unloadable(error)  # an earlier one, then
            self._bad.add(entry)

    def _tell_unloadable(self, error: Exception) -> None:
        if self.sharing.tree not in _UNLOADABLE:
            _UNLOADABLE.add(self.sharing.tree)
            warnings.warn(
                f"a checkpoint of the stage tree cannot be loaded ({error}): trials train on from an earlier one. The "
                "state of the workload's optimizer and schedule must be tensors and plain types",
                stacklevel=3,
            )

    def _nearest_checkpoint(self, frontier: int) -> tuple[int, Entry] | None:
        """The last checkpoint on the path that this trial can go on from: place on the path, and entry."""
        until = frontier
        for place in range(len(self._path) - 1, -1, -1):
            visit = self._path[place]
            usable = [
                entry
                for entry in self.checkpoints.entries(visit.stage.id)
                if visit.stage.start <= entry.step <= until
                and (self._follower.kind == "any" or entry.kind == self._follower.kind)
                and entry not in self._bad
            ]
            if usable and not (place > 0 and self._follower.first_stage_only):
                return place, max(usable, key=lambda entry: entry.step)
            if visit.entered_by is not None:
                until = visit.entered_by.iteration
        return None

    def _set_back(self, step: int) -> None:
        """Bring path and follower back to the start of a step."""
        while len(self._path) > 1 and self._path[-1].stage.start > step:
            self._path.pop()
        visit = self._path[-1]
        self._follower.load_state_dict(visit.follower_state)
        self._follower.advance(visit.stage, step)

    def _resume(self, data: bytes | None) -> _Live:
        run = TrainingRun(self.config)
        try:
            if json.dumps(run.method.facts()) != json.dumps(self._known_facts):
                raise AssertionError(
                    "internal error: the method sees other layers in this model than the stage tree has noted for its "
                    f"settings: {run.method.facts()}, not {self._known_facts}; --no-sharing trains without the tree"
                )
            if data is not None:
                state = read_state(io.BytesIO(data))
                carried = state.pop("carried")
                run.load_state_dict({**state, "row": None, "wall_time_s": 0.0, "search_flops": 0})
                run.method.go_on(self._follower.state_dict(), carried)
            recorder = SignalRecorder(run, self.sharing.watches)
        except BaseException:
            run.close()
            raise
        self._live = _Live(run=run, recorder=recorder, flops_at_load=run.executed_flops)
        return self._live

    def _drop_live(self) -> None:
        if self._live is not None:
            self._spent_before = self.search_flops
            live, self._live = self._live, None
            live.run.close()

    def _check_agreement(self, live: _Live) -> None:
        """The follower says where the training belongs that the method directs. Nothing is left before this holds."""
        stands, followed = live.run.method.following(), self._follower.state_dict()
        if stands and json.dumps(stands, sort_keys=True) != json.dumps(followed, sort_keys=True):
            raise RuntimeError(
                f"internal error: at step {live.run.step} the method stands at {stands} and by what was recorded at "
                f"{followed}; --no-sharing trains without the stage tree. Please report this with the trial's settings"
            )

    # --- what it leaves ---------------------------------------------------------------------------------------------

    def _publish(self, live: _Live, rows: dict[int, dict[str, Any]]) -> None:
        """Write what was recorded since the last time, unless all of it is known."""
        chunk = live.recorder.cut(rows)
        visit = self._path[-1]
        stage = visit.stage
        known = (
            chunk.end <= stage.known_until
            and all(step in stage.rows for step in rows)
            and not any(_DIVERGED in stage.rows[step] for step in rows)
            and all(stage.covers(name, chunk.begin, chunk.end) for name in chunk.names)
            and all(stage.has(name, i) for name, pairs in chunk.sparse.items() for i, _ in pairs)
        )
        if known:
            return
        link = None if visit.entered_by is None else (self._path[-2].stage, visit.entered_by)
        try:
            self.store.publish(stage, chunk, link)
        except OSError as error:
            self._tell_unwritten(error)

    def _may_checkpoint(self, live: _Live) -> bool:
        """Whether checkpoints are kept at all, and somebody could go on from one here."""
        forked = len(self._path) > 1
        return self.sharing.budget_bytes > 0 and live.run.step > 0 and not (self._follower.first_stage_only and forked)

    def _is_overdue(self, live: _Live) -> bool:
        """Whether a crash would cost too much by now; 0 seconds mean every epoch, not every step."""
        every_s = self.sharing.checkpoint_every_s
        if every_s == 0 and live.run.step % self._epoch_steps != 0:
            return False
        return time.monotonic() - live.checkpointed >= every_s

    def _wants_checkpoint(self, live: _Live) -> bool:
        stage, step = self._here, live.run.step
        if not self._may_checkpoint(live):
            return False
        kept = self._kept.get(stage.id)
        if kept is None:
            kind = self._follower.kind
            kept = [entry.step for entry in self.checkpoints.entries(stage.id) if entry.kind == kind]
            self._kept[stage.id] = kept
        if step in kept:
            live.checkpointed = time.monotonic()  # somebody else's is as good
            return False
        if step == stage.start or self._is_overdue(live):
            return True
        if not self._write_s or not live.step_s:
            return not self._write_s
        apart = spacing(
            write_s=self._write_s,
            step_s=live.step_s,
            total_steps=self.total_steps,
            trials=self.sharing.trials,
            depth=len(self._path) - 1,
        )
        last = max((there for there in kept if there < step), default=stage.start)
        return step - last >= apart or self._acts_now(live)

    def _acts_now(self, live: _Live) -> bool:
        """Whether the rule acts in the step that begins: others will fork where one has."""
        state = self._follower.state_dict()
        try:
            return self._follower.advance(live.recorder, live.run.step + 1) is not None
        except MissingSignal:
            return False  # measured in the step itself
        finally:
            self._follower.load_state_dict(state)

    def _checkpoint(self, live: _Live) -> None:
        run, stage = live.run, self._here
        self._check_agreement(live)
        begun = time.perf_counter()
        state = run.state_dict()
        state["optimizer"] = {k: v for k, v in state["optimizer"].items() if k != "gradskip"}
        for name in ("config", "row", "wall_time_s", "search_flops"):
            state.pop(name)
        state["carried"] = run.method.carried()
        file = io.BytesIO()
        torch.save(state, file)
        self._weights = None
        self.checkpoints.put(stage.id, run.step, file.getvalue(), kind=self._follower.kind)
        self._kept.setdefault(stage.id, []).append(run.step)
        took = time.perf_counter() - begun
        self._write_s = took if self._write_s == 0.0 else 0.8 * self._write_s + 0.2 * took
        live.checkpointed = time.monotonic()

    def _stage_weight(self, stage: str) -> StageWeight:
        """How likely and dear a fork from a stage is: as many visits as stages come from it."""
        if self._weights is None:
            self._weights = _weights(self.store, self.total_steps)
        return self._weights.get(stage, StageWeight(start=0, end=self.total_steps, visits=1, step_cost=1.0))

    def _describe_root(self, run: TrainingRun | None) -> None:
        """Write what the root's files lack, once a trial: after its first epoch, and at its end if they were lost."""
        if self._described or not (self.finished or (run is not None and run.epoch_shapes is not None)):
            return
        self._described = True
        if self.store.read("root.json") is None or self.store.read("shapes.json") is None:
            if run is not None:
                self._write_root(run)
            else:
                with TrainingRun(self.config) as built:
                    self._write_root(built)

    def _write_root(self, run: TrainingRun) -> None:
        shapes = run.epoch_shapes
        if shapes is None:
            shapes = run_lengths(run.workload.train_batches(0, self.config.seed))
        self._write_small("shapes.json", plain_shapes(shapes))
        self._write_small(
            "root.json",
            {
                **self._root,
                "layer_names": [name for name, _ in run.model.named_parameters()],
                "trains": "".join("1" if trains else "0" for trains in run.trains_at_first),
            },
        )


#: What this process has read, by a root's folder and key: facts, not state.
_FACTS: dict[tuple[Path, Any], Mapping[str, Any]] = {}
#: Trees that could not be written, said once a process.
_UNWRITTEN: set[Path] = set()
#: Trees with checkpoints that could not be loaded, said once a process.
_UNLOADABLE: set[Path] = set()


def _weights(store: StageStore, total_steps: int) -> dict[str, StageWeight]:
    links = store.links()
    below: dict[str, int] = dict.fromkeys(links, 1)
    for stage in links:
        link = links[stage]
        while link is not None and link[0] in below:
            below[link[0]] += 1
            link = links[link[0]]
    return {
        stage: StageWeight(
            start=0 if link is None else link[1].iteration + 1, end=total_steps, visits=below[stage], step_cost=1.0
        )
        for stage, link in links.items()
    }
