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
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.attachment import metadata_key, start_replay
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged
from trainables.interventions import Intervention, MethodReplay, MissingSignal
from trainables.metrics import METHOD_DEFAULTS
from trainables.registry import METHODS
from trainables.runtime.checkpoint_file import read_state
from trainables.stage_tree.checkpoint_policy import Keeper, Sharing
from trainables.stage_tree.checkpoints import Entry
from trainables.stage_tree.leases import NoClaims, StageClaims
from trainables.stage_tree.live import LiveRun
from trainables.stage_tree.packing import unpack
from trainables.stage_tree.recorder import SignalRecorder
from trainables.stage_tree.root import root_facts, root_id
from trainables.stage_tree.run_metadata import method_facts, root_files
from trainables.stage_tree.store import Stage, StageStore
from trainables.training.run import TrainingRun, check_device, check_forward_cache
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


@dataclass(kw_only=True)
class _Visit:
    """A stage on the trial's path."""

    stage: Stage
    entered_by: Intervention | None
    replay_state: dict[str, Any]
    """The replay's state on entering."""


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
        self, config: TrialConfig, sharing: Sharing, *, claims: StageClaims | None = None, holder: str = "this process"
    ) -> None:
        self.config = config
        self.sharing = sharing
        self._claims: StageClaims = NoClaims() if claims is None else claims
        self._holder = holder
        self._begun = time.perf_counter()
        check_device(config)
        workload = build(config.workload, config.options)
        check_forward_cache(config, workload)
        root = root_facts(config, workload)
        self._root = root
        self._epoch_steps = int(root["steps_per_epoch"])
        self.total_steps = int(root["total_steps"])
        self.store = StageStore(sharing.tree, root_id(root))
        self._live: LiveRun | None = None
        self._spent_before = 0
        self._held: str | None = None
        self._bad: set[Entry] = set()
        self._renewed = 0.0
        self._described = False
        self._replay = self._make_replay()
        self._keeper = Keeper(
            self.store, sharing, self._replay, epoch_steps=self._epoch_steps, total_steps=self.total_steps
        )
        self.checkpoints = self._keeper.checkpoints
        first = self.store.first()
        self._path = [_Visit(stage=first, entered_by=None, replay_state=self._replay.state_dict())]
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
        return self._spent_before + (0 if live is None else live.executed_flops)

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
            before = self._replay.iteration
            yield from self._walk()
            if self.finished:
                break
            if self._replay.iteration > before:
                wait_s = _SHORTEST_WAIT_S
            if not self._claim(self._here):
                time.sleep(wait_s)  # another trial trains it, and is there no later than this one would be
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            if self._here.refresh():
                continue  # something came while we asked
            yield from self._train()

    # --- where the trial is -----------------------------------------------------------------------------------------

    @property
    def _here(self) -> Stage:
        return self._path[-1].stage

    @property
    def _depth(self) -> int:
        """Interventions on the way here."""
        return len(self._path) - 1

    def _make_replay(self) -> MethodReplay:
        self._known_facts = self._facts(metadata_key(self.config))
        return start_replay(self.config, self._known_facts)

    def _facts(self, key: Any) -> Mapping[str, Any]:
        if METHODS[self.config.method].replay_module is None:
            return {}
        known = _FACTS.get((self.store.folder, key))
        if known is None:
            known = _FACTS[(self.store.folder, key)] = method_facts(self.store, self.config, self._write_small)
        return known

    def _write_small(self, name: str, values: Any) -> None:
        try:
            self.store.write(name, values)
        except OSError as error:
            self._tell_unwritten(error)

    def _tell_unwritten(self, error: OSError) -> None:
        self._warn_once(
            "unwritten",
            f"the stage tree cannot be written ({error.strerror or error}): trials train on without sharing what they "
            "train now",
        )

    def _warn_once(self, what: str, message: str) -> None:
        """Once a tree and process."""
        if (self.sharing.tree, what) not in _WARNED:
            _WARNED.add((self.sharing.tree, what))
            warnings.warn(message, stacklevel=4)

    def _enter(self, intervention: Intervention) -> Stage:
        stage = self.store.child(self._here, intervention)
        self._path.append(_Visit(stage=stage, entered_by=intervention, replay_state=self._replay.state_dict()))
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
            **self._replay.columns(),
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
                intervention = self._replay.advance(stage, target)
            except MissingSignal:
                return
            if intervention is not None:
                self._enter(intervention)
            elif self._replay.iteration == next_row and next_row in stage.rows:
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
            known = self._here.rows.get(run.step)
            if run.step <= frontier and known is not None and _DIVERGED not in known:
                run.skip_evaluation(known)
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

    def _before_step(self, live: LiveRun) -> None:
        if self._keeper.is_overdue(live) and self._keeper.may(live, self._depth):
            self._publish(live, {})  # the checkpoint that comes now is of use only if what leads to it is known
        live.recorder.before_step()
        self._renew()
        if self._keeper.wants(live, self._here, self._depth, lambda: self._acts_now(live)):
            self._check_agreement(live)
            self._keeper.write(live, self._here)

    def _after_step(self, live: LiveRun, frontier: int) -> bool:
        """Follow the step that was trained; False if the path goes on in a stage that others know or train."""
        intervention = self._replay.advance(live.recorder, live.run.step)
        if intervention is None:
            return True
        self._publish(live, {})
        stage = self._enter(intervention)
        if live.run.step <= frontier:
            return True  # a known part of the path, or the stage that this trial has claimed
        stage.refresh()
        if stage.known_until > stage.start or stage.rows:
            self._release()
            return False
        return self._claim(stage) and not stage.refresh()

    def _stand_before(self, frontier: int) -> LiveRun:
        """A live run at the nearest state of the path at or before the frontier, the replay with it."""
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
                    self._warn_once(
                        "unloadable",
                        f"a checkpoint of the stage tree cannot be loaded ({error}): trials train on from an earlier "
                        "one. The state of the workload's optimizer and schedule must be tensors and plain types",
                    )
            self._bad.add(entry)

    def _nearest_checkpoint(self, frontier: int) -> tuple[int, Entry] | None:
        """The last checkpoint on the path that this trial can go on from: place on the path, and entry."""
        until = frontier
        for place in range(len(self._path) - 1, -1, -1):
            visit = self._path[place]
            usable = [
                entry
                for entry in self.checkpoints.entries(visit.stage.id)
                if visit.stage.start <= entry.step <= until
                and (self._replay.kind == "any" or entry.kind == self._replay.kind)
                and entry not in self._bad
            ]
            if usable and not (place > 0 and self._replay.first_stage_only):
                return place, max(usable, key=lambda entry: entry.step)
            if visit.entered_by is not None:
                until = visit.entered_by.iteration
        return None

    def _set_back(self, step: int) -> None:
        """Bring path and replay back to the start of a step."""
        while len(self._path) > 1 and self._path[-1].stage.start > step:
            self._path.pop()
        visit = self._path[-1]
        self._replay.load_state_dict(visit.replay_state)
        self._replay.advance(visit.stage, step)

    def _resume(self, data: bytes | None) -> LiveRun:
        run = TrainingRun(self.config)
        try:
            if json.dumps(run.method.model_metadata()) != json.dumps(self._known_facts):
                raise AssertionError(
                    "internal error: the method sees other layers in this model than the stage tree has noted for its "
                    f"settings: {run.method.model_metadata()}, not {self._known_facts}; --no-sharing trains without "
                    "the tree"
                )
            if data is not None:
                state = unpack(read_state(io.BytesIO(data)))
                carried = state.pop("training_state")
                run.method.prepare_structure(carried)
                run.load_state_dict({**state, "row": None, "wall_time_s": 0.0, "search_flops": 0, "method": {}})
                run.method.resume(self._replay.state_dict(), carried)
            recorder = SignalRecorder(run, self.sharing.watches)
        except BaseException:
            run.close()
            raise
        self._live = LiveRun(run=run, recorder=recorder, flops_at_load=run.executed_flops)
        return self._live

    def _drop_live(self) -> None:
        if self._live is not None:
            self._spent_before = self.search_flops
            live, self._live = self._live, None
            live.run.close()

    def _check_agreement(self, live: LiveRun) -> None:
        """The replay says where the training belongs that the method directs. Nothing is left before this holds."""
        stands, followed = live.run.method.decision_state(), self._replay.state_dict()
        if stands and json.dumps(stands, sort_keys=True) != json.dumps(followed, sort_keys=True):
            raise RuntimeError(
                f"internal error: at step {live.run.step} the method stands at {stands} and by what was recorded at "
                f"{followed}; --no-sharing trains without the stage tree. Please report this with the trial's settings"
            )

    # --- what it leaves ---------------------------------------------------------------------------------------------

    def _publish(self, live: LiveRun, rows: dict[int, dict[str, Any]]) -> None:
        """Write what was recorded since the last time, unless all of it is known."""
        self._check_agreement(live)
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

    def _acts_now(self, live: LiveRun) -> bool:
        """Whether the rule acts in the step that begins: others will fork where one has."""
        if self._replay.is_quiet():
            return False
        state = self._replay.state_dict()
        try:
            return self._replay.advance(live.recorder, live.run.step + 1) is not None
        except MissingSignal:
            return False  # measured in the step itself
        finally:
            self._replay.load_state_dict(state)

    def _describe_root(self, run: TrainingRun | None) -> None:
        """Write what the root's files lack, once a trial: after its first epoch, and at its end if they were lost."""
        if self._described or not (self.finished or (run is not None and run.epoch_shapes is not None)):
            return
        self._described = True
        if self.store.read("root.json") is None or self.store.read("shapes.json") is None:
            with TrainingRun(self.config) if run is None else nullcontext(run) as built:
                for name, values in root_files(self._root, built).items():
                    self._write_small(name, values)


#: What this process has read, by a root's folder and key: facts, not state.
_FACTS: dict[tuple[Path, Any], Mapping[str, Any]] = {}
#: What was said of a tree in this process.
_WARNED: set[tuple[Path, str]] = set()
