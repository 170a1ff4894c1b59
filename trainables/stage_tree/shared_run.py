"""A trial trained over the stage tree: it replays what is known and trains only what is not.

The trial's own rule is replayed over recorded signals. If the recording ends, or the rule acts as in no earlier trial,
the trial leases that stage, continues from the nearest checkpoint of its own path and trains live, publishing what it
records, until its path enters a stage that other trials recorded; there it replays again. It reports the same rows as
if it had trained alone.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Container, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainables.attachment import start_replay
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged
from trainables.interventions import Intervention, MethodReplay, MissingSignal
from trainables.metrics import METHOD_DEFAULTS
from trainables.runtime.watchdog import waits_for_others
from trainables.stage_tree.checkpoint_policy import CheckpointPolicy, LiveRun, Sharing, resume_live
from trainables.stage_tree.checkpoints import Checkpoints, Entry
from trainables.stage_tree.leases import Leases, StageLease
from trainables.stage_tree.recorder import SignalRecorder
from trainables.stage_tree.root import DIVERGED, TreeWriter, root_facts, root_id
from trainables.stage_tree.store import Stage, StageStore
from trainables.training.run import TrainingRun, check_device, check_forward_cache
from trainables.workloads import build_for

#: Columns of a row that are a trial's own, not its stage's.
_OWN_COLUMNS = ("wall_time_s", "search_flops", "stage", *METHOD_DEFAULTS)
#: Shortest and longest seconds between checks while another trial trains.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5


@dataclass(kw_only=True)
class Visit:
    """A stage on a trial's path."""

    stage: Stage
    entered_by: Intervention | None
    replay_state: dict[str, Any]  # state of the replay when it entered the stage


class TrialPath:
    """The stages of one trial's run through the tree, and the replay of its method along them."""

    def __init__(self, store: StageStore, replay: MethodReplay) -> None:
        self._store, self.replay = store, replay
        self.visits = [Visit(stage=store.first(), entered_by=None, replay_state=replay.state_dict())]

    @property
    def here(self) -> Stage:
        """Return the last stage."""
        return self.visits[-1].stage

    @property
    def depth(self) -> int:
        """Return the number of interventions so far."""
        return len(self.visits) - 1

    @property
    def link(self) -> tuple[Stage, Intervention] | None:
        """Return the stage before the last, and the intervention between them; None at the root."""
        entered_by = self.visits[-1].entered_by
        return None if entered_by is None else (self.visits[-2].stage, entered_by)

    def enter(self, intervention: Intervention) -> Stage:
        """Append the stage that an intervention leads to, and return it."""
        stage = self._store.child(self.here, intervention)
        self.visits.append(Visit(stage=stage, entered_by=intervention, replay_state=self.replay.state_dict()))
        return stage

    def set_back(self, step: int) -> None:
        """Reset path and replay to the start of a step."""
        while len(self.visits) > 1 and self.here.start > step:
            self.visits.pop()
        self.replay.load_state_dict(self.visits[-1].replay_state)
        self.replay.advance(self.here, step)

    def nearest_checkpoint(
        self, checkpoints: Checkpoints, until: int, refused: Container[Entry]
    ) -> tuple[int, Entry] | None:
        """Return the last checkpoint that this trial can continue from: place on the path, and entry."""
        kind = self.replay.kind
        for place, visit in reversed(list(enumerate(self.visits))):
            usable = [
                entry
                for entry in checkpoints.entries(visit.stage.id)
                if visit.stage.start <= entry.step <= until and kind in ("any", entry.kind) and entry not in refused
            ]
            if usable and not (place > 0 and self.replay.first_stage_only):
                return place, max(usable, key=lambda entry: entry.step)
            if visit.entered_by is not None:
                until = visit.entered_by.iteration
        return None

    def acts_at(self, recorder: SignalRecorder, step: int) -> bool:
        """Return whether the method acts in the step that begins; other trials are likely to fork there."""
        if self.replay.is_quiet():
            return False
        state = self.replay.state_dict()
        try:
            return self.replay.advance(recorder, step + 1) is not None
        except MissingSignal:
            return False  # measured in the step itself
        finally:
            self.replay.load_state_dict(state)


class SharedRun:
    """A run of one configuration, epoch by epoch as `TrainingRun`, that reuses what its study has trained already.

    ``claims`` are the leases of stages; None if no other trial runs. `train_epoch` raises TrainingDiverged as alone,
    also where another trial diverged on the same path.
    """

    def __init__(
        self, config: TrialConfig, sharing: Sharing, *, claims: Leases | None = None, holder: str = "this process"
    ) -> None:
        self.config = config
        self.sharing = sharing
        self._begun = time.perf_counter()
        check_device(config)
        workload = build_for(config)
        check_forward_cache(config, workload)
        root = root_facts(config, workload)
        self._epoch_steps = int(root["steps_per_epoch"])
        self.total_steps = int(root["total_steps"])
        self.store = StageStore(sharing.tree, root_id(root))
        self._live: LiveRun | None = None
        self._spent_before = 0
        self._lease = StageLease(Leases() if claims is None else claims, holder, self._slowest_step_s)
        self._unreadable: set[Entry] = set()
        self._writer = TreeWriter(self.store, root, config)
        self._metadata = self._writer.method_metadata()
        self._replay = start_replay(config, self._metadata)
        self._checkpoint_policy = CheckpointPolicy(
            self.store, sharing, self._replay, epoch_steps=self._epoch_steps, total_steps=self.total_steps
        )
        self.checkpoints = self._checkpoint_policy.checkpoints
        self.path = TrialPath(self.store, self._replay)
        self._reported = 0  # steps at the end of the last row
        self.row: dict[str, Any] | None = None  # the last epoch's row; None before the first
        self.trained_steps = 0  # steps that this trial executed
        self._rows = self._next_rows()

    def __enter__(self) -> SharedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what is leased and put the process state back."""
        self._rows.close()
        self._lease.release()
        self._drop_live()

    @property
    def finished(self) -> bool:
        """Return whether all epochs are reported."""
        return self._reported >= self.total_steps

    @property
    def run(self) -> TrainingRun | None:
        """Return the run that this trial trains in this process; None if nothing had to be trained so far."""
        return None if self._live is None else self._live.run

    @property
    def search_flops(self) -> int:
        """Return the FLOPs that this trial executed so far."""
        live = self._live
        return self._spent_before + (0 if live is None else live.executed_flops)

    def train_epoch(self) -> dict[str, Any]:
        """Return the next epoch's row, trained or known."""
        try:
            self.row = next(self._rows)
        except BaseException:
            self._lease.release()
            raise
        if self.finished:
            self._checkpoint_policy.finish()  # which the search may look at
            self._lease.release()  # no more rows are needed, and this object may exist for long
            self._writer.describe_root(self.run, finished=True)
        return self.row

    def _next_rows(self) -> Generator[dict[str, Any], None, None]:
        wait_s = _SHORTEST_WAIT_S
        while not self.finished:
            before = self._replay.iteration
            yield from self._replay_known()
            if self.finished:
                break
            if self._replay.iteration > before:
                wait_s = _SHORTEST_WAIT_S
            if not self._lease.claim(self.path.here.id):
                waits_for_others()
                time.sleep(wait_s)  # another trial trains it, and finishes no later than this one would
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            if self.path.here.refresh():
                continue  # something was published while the lease was requested
            yield from self._train()

    def _row(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        if DIVERGED in stored:
            raise TrainingDiverged(stored[DIVERGED])
        return {
            **stored,
            "wall_time_s": time.perf_counter() - self._begun,
            "search_flops": self.search_flops,
            "stage": self.path.here.id,
            **self._replay.columns(),
        }

    def _slowest_step_s(self) -> float:
        return 0.0 if self._live is None else self._live.slowest_s

    def _replay_known(self) -> Iterator[dict[str, Any]]:
        """Replay the rule over recorded signals and yield the rows that are known."""
        while not self.finished:
            stage = self.path.here
            next_row = self._reported + self._epoch_steps
            if stage.known_until < next_row or next_row not in stage.rows:
                stage.refresh()
            target = min(next_row, stage.known_until)
            try:
                intervention = self._replay.advance(stage, target)
            except MissingSignal:
                return
            if intervention is not None:
                self.path.enter(intervention)
            elif self._replay.iteration == next_row and next_row in stage.rows:
                self._reported = next_row
                yield self._row(stage.rows[next_row])
            else:
                return

    def _train(self) -> Iterator[dict[str, Any]]:
        """Train live from the nearest state of the path until the end, or until a stage that others recorded."""
        frontier = self._replay.iteration
        live = self._stand_before(frontier)
        run = live.run
        while True:
            run.begin_epoch()
            while not run.epoch_is_trained:
                with run.untimed():
                    self._before_step(live)
                live.train_step()
                self.trained_steps += 1
                with run.untimed():
                    stays = self._after_step(live, frontier)
                if not stays:
                    run.pause()
                    return
            known = self.path.here.rows.get(run.step)
            if run.step <= frontier and known is not None and DIVERGED not in known:
                run.skip_evaluation(known)
                self._publish(live, {})
                continue
            # An evaluation takes less time than the training of an epoch, or about as long as the last evaluation.
            self._lease.renew(max(2 * live.evaluation_s, self._epoch_steps * live.step_s))
            begun = time.perf_counter()
            try:
                row = run.end_epoch()
            except TrainingDiverged as error:
                self._publish(live, {run.step: {DIVERGED: str(error)}})
                raise
            live.evaluation_s = time.perf_counter() - begun
            stored = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
            self._publish(live, {run.step: stored})
            self._writer.describe_root(run, finished=self.finished)
            if run.step > self._reported:
                self._reported = run.step
                yield self._row(stored)
            if run.finished:
                return

    def _before_step(self, live: LiveRun) -> None:
        policy, path = self._checkpoint_policy, self.path
        if policy.is_overdue(live) and policy.may(live, path.depth):
            self._publish(live, {})  # a checkpoint is useful only if the steps before it are published
        live.recorder.before_step()
        self._lease.renew()
        if policy.wants(live, path.here, path.depth, lambda: path.acts_at(live.recorder, live.run.step)):
            self._check_agreement(live)
            policy.write(live, path.here)

    def _after_step(self, live: LiveRun, frontier: int) -> bool:
        """Replay the step that was trained; return False if the path continues in a stage that others know or train."""
        intervention = self._replay.advance(live.recorder, live.run.step)
        if intervention is None:
            return True
        self._publish(live, {})
        stage = self.path.enter(intervention)
        if live.run.step <= frontier:
            return True  # a known part of the path, or the stage that this trial has claimed
        stage.refresh()
        if stage.known_until > stage.start or stage.rows:
            self._lease.release()
            return False
        return self._lease.claim(stage.id) and not stage.refresh()

    def _stand_before(self, frontier: int) -> LiveRun:
        """Return a live run at the nearest state of the path at or before the frontier, and set the replay there."""
        self._checkpoint_policy.finish()
        # A row that is missing at the frontier is made by ending an epoch there, so a step before it is trained.
        latest = frontier if frontier < self._reported + self._epoch_steps else frontier - 1
        visits = list(self.path.visits)
        while True:
            self.path.visits = list(visits)
            found = self.path.nearest_checkpoint(self.checkpoints, latest, self._unreadable)
            live = self._live
            if live is not None and (found is None or live.run.step >= found[1].step):
                self.path.set_back(live.run.step)
                return live
            self._drop_live()
            if found is None:
                self.path.set_back(0)
                return self._resume(None)
            place, entry = found
            data = self.checkpoints.read(self.path.visits[place].stage.id, entry)
            if data is not None:
                self.path.set_back(entry.step)
                try:
                    return self._resume(data)
                except (RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
                    self._writer.warn_unloadable(error)
            self._unreadable.add(entry)

    def _resume(self, data: bytes | None) -> LiveRun:
        self._live = resume_live(self.config, data, self._metadata, self._replay.state_dict(), self.sharing.watches)
        return self._live

    def _drop_live(self) -> None:
        if self._live is not None:
            self._spent_before = self.search_flops
            live, self._live = self._live, None
            live.run.close()
        self._checkpoint_policy.finish()

    def _check_agreement(self, live: LiveRun) -> None:
        """Raise RuntimeError if method and replay disagree; nothing is published before this check."""
        stands, followed = live.run.method.decision_state(), self._replay.state_dict()
        if stands and json.dumps(stands, sort_keys=True) != json.dumps(followed, sort_keys=True):
            raise RuntimeError(
                f"internal error: at step {live.run.step} the method's state is {stands}, but the state replayed from "
                f"the recording is {followed}; --no-sharing trains without the stage tree. Please report this with the "
                "trial's settings"
            )

    def _publish(self, live: LiveRun, rows: dict[int, dict[str, Any]]) -> None:
        self._check_agreement(live)
        self._writer.publish(self.path.here, self.path.link, live.recorder.cut(rows))
