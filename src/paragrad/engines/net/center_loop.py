"""The center's side of a run whose workers join over a network: waits for them, applies commits, replaces lost workers."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paragrad.config import options
from paragrad.core.job import Job
from paragrad.engines.exchange.center_loop import TICK, CenterLoop, longest_window
from paragrad.engines.net import residual_file
from paragrad.engines.net.durable_state import DurableState
from paragrad.engines.net.member import Member
from paragrad.engines.net.membership import Membership
from paragrad.engines.net.settings import NetworkSettings
from paragrad.engines.net.worker import NetworkWorker, same_as
from paragrad.engines.process.children import Child, kill_if_stopped
from paragrad.engines.process.launcher import Forks
from paragrad.engines.process.payload import pack
from paragrad.engines.process.task import Task
from paragrad.engines.sharding import slice_file
from paragrad.engines.sharding.supervisor import ShardSupervisor
from paragrad.engines.transport import endpoint, transport
from paragrad.engines.transport.endpoint import Endpoint
from paragrad.engines.transport.message import TransportError
from paragrad.engines.transport.transport import Listener
from paragrad.errors import UsageError, WorkerError
from paragrad.learners.learner import Learner
from paragrad.rundir.session import Session
from paragrad.types import Commit, Reply, WorkerState

FAREWELL = 3.0
"""Seconds to wait at the end of a run until the workers know of it."""
LAST = 10.0
"""Seconds to wait instead while workers bring residuals, for the checkpoint of a run that is stopped."""


class NetworkLoop(CenterLoop):
    """Workers join: tracks who is present, gives up lost workers, starts its own."""

    engine: NetworkSettings

    def __init__(self, engine: NetworkSettings, job: Job, session: Session, learner: Learner) -> None:
        directory = session.directory
        window, length = longest_window(job), learner.weights.numel() * learner.weights.element_size()
        vectors = 2 * (1 + len(job.scheme.center_slots)) + engine.workers * (2 + len(job.scheme.sends))
        self._durable = DurableState(directory, size=vectors * length, workers=engine.workers, window=window)
        session.at_close += [self._durable.discard, partial(slice_file.discard, directory)]
        self._token = engine.token or endpoint.make_token(directory)
        pair = engine.certificate_pair(directory)
        announced: dict[int, str | None] = {}
        self._name = engine.advertise or endpoint.advertised(endpoint.split_address(engine.address)[0])
        self._shards: ShardSupervisor | None = None
        if engine.shards > 1:
            self._shards = ShardSupervisor(
                self,
                job,
                learner.weights,
                shards=engine.shards,
                elsewhere=engine.shards_elsewhere,
                address=engine.address,
                name=self._name,
                token=self._token,
                pair=pair,
                own_certificate=engine.certificate is not None,
                announced=announced,
            )
        first = None if self._shards is None else self._shards.first
        super().__init__(engine, job, session, learner, self._durable.segment, by_reference=False, length=first)
        self.center.before_update = self._keep_first
        self._answered: set[int] = set()
        self._launcher = engine.launcher or Forks()
        self._worker_storage = self._launcher.storage(directory.resolve()) if engine.launcher is not None else None
        self._worker_payload = self._payload if self._worker_storage is None else pack(job, self._worker_storage)
        self._own: dict[int, Child] = {}
        """Workers that this process has started, by rank."""
        self._deaths: dict[int, int] = {}
        """Deaths of a started worker since its last commit, by rank."""
        self._absent: dict[int, float] = {}
        """Time since which the others wait for a rank that no worker has, by rank."""
        session.missing, session.announce = self._missing, self._want
        self._waiting_reported = False
        self._opened_at = self._minded_at = time.monotonic()
        self.membership = Membership(
            job,
            self.center,
            self._segment,
            self._slots,
            self._message_end,
            self._wake_end,
            about={"settings": session.settings, "workers": engine.workers, "scheme": options.describe(job.scheme)},
            **same_as(job, learner),
            run=endpoint.run_name(directory, self._token),
            shares=str(self._durable.path) if engine.shared and self._shards is None else None,
            window=window,
        )
        self.membership.announced = announced
        if session.resumed is not None and session.resumed.numbers["center"].get("presence") is not None:
            self._expect(session.resumed.numbers["members"])
        for rank in range(engine.here):
            self.membership.started[rank] = self.membership.incarnations[rank] + 1  # no worker that joins may take it
        if self._shards is None:
            self._keep()
        else:
            self.membership.start_id, self.membership.closed = self._shards.start_id, True
        self._listener = self._listen(pair)
        self._endpoint = Endpoint(
            address=endpoint.address_of(self._name, self._listener.port),
            certificate=None if pair is None else pair[0].decode(),
            hostname=None if engine.certificate is None else self._name,
        )
        self._endpoint.write(directory)

    def _listen(self, pair: tuple[bytes, bytes] | None) -> Listener:
        host, port = endpoint.split_address(self.engine.address)
        wanted = port or _port_before(self.session.directory)
        wire = transport.default()
        try:
            return wire.listen(self.membership, endpoint.address_of(host, wanted), self._token, pair)
        except TransportError as error:
            if port or not wanted:
                raise UsageError(f"{error} Give another address, or port 0 for any free port.") from None
            return wire.listen(self.membership, endpoint.address_of(host, 0), self._token, pair)

    def publish_shards(self, shards: list[tuple[int, int, str]]) -> None:
        """Publish where the shards are: to workers, and in endpoint.json."""
        self.membership.shards = shards
        addresses = tuple(address for _, _, address in shards)
        if addresses != self._endpoint.shards:
            self._endpoint = replace(self._endpoint, shards=addresses)
            self._endpoint.write(self.session.directory)

    def __exit__(self, *details: object) -> None:
        membership = self.membership
        membership.stop(self.session.stopped or ("finished" if details[0] is None else "failed"))
        at_once = details[0] is KeyboardInterrupt
        takes_residuals = self.job.codec is not None and membership.stopping != "finished" and not at_once
        self._say_farewell(takes_residuals=takes_residuals)
        if takes_residuals:
            self._take_residuals()
        (self.session.directory / endpoint.FILE).unlink(missing_ok=True)
        self._listener.close()
        if self._shards is not None:
            self._shards.end(at_once=at_once)
        if membership.rejections:
            self.session.measured |= {"rejected_clients": dict(membership.rejections)}
        super().__exit__(*details)
        self._launcher.close()
        if self._worker_storage is not None:
            self._worker_storage.close()
        if self.job.codec is not None and membership.stopping == "finished":
            residual_file.discard(membership.run)

    def _say_farewell(self, *, takes_residuals: bool) -> None:
        """Wait until the workers that are present, or wait for a rank, know of the end, and have brought their residuals."""
        began, owing = time.monotonic(), False
        while time.monotonic() < began + (LAST if owing else FAREWELL):
            with self.membership.lock:
                unaware = any(member.is_present and not member.knows_end for member in self._members())
                queued = any(asked > began - FAREWELL for asked in self.membership.queue.values())
                owing = takes_residuals and self._owes_residuals()
            if not (unaware or queued or owing):
                return
            time.sleep(0.02)

    def _attach(self) -> None:
        if self._shards is not None:
            self._shards.attach(self.center)
        super()._attach()

    # -- the run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Wait for enough workers, then apply commits until the rows are used up or the run is stopped."""
        session, engine = self.session, self.engine
        restarted = bool(self._members())
        session.emit(
            "listening",
            address=self._endpoint.address,
            workers=engine.workers,
            here=engine.here,
            directory=str(session.directory),
        )
        if self._shards is not None and self._shards.begin():
            self._keep()
            slice_file.discard(session.directory, self._shards.start_id)
            self.membership.closed = False
        for rank in range(engine.here):
            self._start_worker(rank)
        if restarted:
            self._begun = True
            session.go()
        else:
            least = engine.min_workers or engine.workers
            while sum(member.is_present for member in self._members()) < least and session.stopped is None:
                self._turn()
            if session.stopped is None:
                self._begin()
        while session.stopped is None and not self._is_over():
            self._turn()
        self._part()
        self._finish()

    def _begin(self) -> None:
        self._begun = True
        self.session.go()
        replies: list[Reply] = []
        present = {member.rank: member for member in self._members() if member.is_present}
        for rank in range(self.engine.workers):
            if rank not in present:
                replies += self.center.leave(rank)
        for rank, member in present.items():
            replies += self.center.join(rank, member.incarnation)
        self._deliver(replies)

    def _is_over(self) -> bool:
        leases = self.center.leases
        return leases.used >= leases.total and not any(member.is_present for member in self._members())

    def _members(self) -> list[Member]:
        return [member for member in self.membership.members if member is not None]

    # -- durable state --------------------------------------------------------------------------------------

    def _expect(self, known: dict[str, list[Any]]) -> None:
        """Give workers that were present when the center was killed some time to reconnect."""
        now = time.monotonic()
        for name, (incarnation, key, finished, given_up) in known.items():
            rank, lost_at = int(name), None if finished else now
            member = Member(rank, incarnation, key, ready=True, finished=finished, given_up=given_up, lost_at=lost_at)
            self.membership.members[rank] = member
            self.membership.incarnations[rank] = incarnation

    def _keep(self) -> None:
        members = {str(m.rank): [m.incarnation, m.key, m.finished, m.given_up] for m in self._members() if m.ready}
        numbers = {**self.session.memory(), "members": members}
        if self._shards is not None:
            numbers["shards"] = self._shards.known
        self._durable.keep(self.center, numbers, self._answered)
        self._answered.clear()

    def _keep_first(self) -> None:
        """Keep the first of two updates in one turn before the second overwrites the state before it."""
        if self._durable.flips != self.center.flips:
            self._answered |= set(range(self.engine.workers))  # the first may have answered any of them
            self._keep()

    def _deliver(self, replies: list[Reply]) -> None:
        self._answered |= {reply.worker for reply in replies}
        if self.job.codec is not None:
            for reply in replies:
                if reply.sequence < 0:
                    self._hand_residual(reply)
        self._keep()
        super()._deliver(replies)

    # -- residuals and private state ------------------------------------------------------------------------

    def _hand_residual(self, reply: Reply) -> None:
        """Give a newcomer the residual of its rank, if it is known here or still on the newcomer's machine."""
        member, handed = self.membership.members[reply.worker], self.membership.handed
        handed.pop(reply.worker, None)
        if reply.residual is not None:
            handed[reply.worker] = reply.residual
        elif member is not None and reply.last in member.kept:
            handed[reply.worker] = None
        if reply.last:
            incarnation, taken = -1 - reply.sequence, reply.worker in handed
            self.session.emit("residual", worker=reply.worker, incarnation=incarnation, taken=taken)

    def _missing(self) -> list[int]:
        """Return the workers that have yet to bring their private state or their residual."""
        residuals = self._unknown_residuals() if self.job.codec is not None else []
        return sorted({*residuals, *self._owing_states()})

    def _owing_states(self) -> list[int]:
        present = [member.rank for member in self._members() if not member.finished and not member.given_up]
        return sorted(set(present).intersection(self.center.may_bring))

    def _want(self, wanted: bool) -> None:
        self.membership.wants_private = wanted

    def _take_residuals(self) -> None:
        """Take the residuals that workers have brought at the end of a run that may be resumed."""
        with self.membership.lock:
            for rank, (sequence, residual) in self.membership.brought.items():
                if sequence == self.center.last(rank) and residual is not None:
                    self.center.private.residuals[rank] = residual
        if missing := self._unknown_residuals():
            names = ", ".join(map(str, missing))
            message = f"The checkpoint lacks the codec's residuals of workers {names}: they did not answer at the end."
            self.session.emit("warning", message=message)

    def _owes_residuals(self) -> bool:
        """Return whether workers that are present have yet to bring their residuals."""
        brought = {rank: sequence for rank, (sequence, _) in self.membership.brought.items()}
        present = {member.rank for member in self._members() if member.is_present}
        return any(brought.get(rank) != self.center.last(rank) for rank in present.intersection(self._unknown_residuals()))

    def _unknown_residuals(self) -> list[int]:
        center = self.center
        return [worker for worker in sorted(center.live) if center.last(worker) and worker not in center.private.residuals]

    # -- messages -------------------------------------------------------------------------------------------

    def _announce(self, rank: int) -> None:
        self.membership.announce()

    def _on_ready(self, rank: int, incarnation: int) -> None:
        with self.membership.lock:
            member = self.membership.members[rank]
            if member is None or member.incarnation != incarnation or member.given_up:
                return
            member.ready = True
        if self._begun:
            self._deliver(self.center.join(rank, incarnation))

    def _on_left(self, rank: int) -> None:
        if (last := self.center.last(rank)) and rank not in self.center.private.states:
            self.center.private.keep(rank, self._take_state(rank, last))
        self._keep()

    def _take_state(self, rank: int, sequence: int) -> WorkerState | None:
        """Return the private state that belongs to a commit, if the worker has brought it."""
        with self.membership.lock:
            brought, state = self.membership.states.pop(rank, (0, None))
        return state if brought == sequence else None

    def _is_possible(self, commit: Commit) -> bool:
        """Return whether a worker could have made this commit. One that could not does not end the run."""
        center = self.center
        new = commit.sequence > center.last(commit.worker)
        if commit.version > center.clock or (new and commit.sequence > 1 << 40):
            return False
        held = center.leases.held(commit.worker)
        known = not new or commit.incarnation < self.membership.incarnations[commit.worker] or commit.worker not in center.live
        return known or (len(set(commit.batches)) == len(commit.batches) and set(commit.batches) <= set(held))

    def _receive(self, rank: int, sequence: int) -> None:
        commit = self._slots[rank].get_commit()
        member = self.membership.members[rank]
        if commit.sequence != sequence or member is None:
            return  # its worker has sent another one since, after this one was rejected
        with self.membership.lock:
            brought, residual = self.membership.brought.pop(rank, (0, None))
            self.membership.handed.pop(rank, None)  # a worker that commits has taken it
        commit.residual = residual if brought == sequence else None
        commit.state = self._take_state(rank, sequence)
        self._deaths.pop(rank, None)
        if not self._is_possible(commit):
            self.membership.rejected(
                member.host, f"worker {rank} committed mini-batches that it did not lease, or a version from the future"
            )
            self._give_up(member)
            return
        self._deliver(self.center.receive(commit))

    # -- lost workers ---------------------------------------------------------------------------------------

    def _mind(self, now: float) -> None:
        membership, after = self.membership, self.engine.replace_after
        if self._shards is not None:
            self._shards.mind()
        for child in list(self._own.values()):
            kill_if_stopped(child, now, after)
        with membership.lock:
            news, membership.news = membership.news, []
            asleep, self._minded_at = now - self._minded_at > max(4 * TICK, after / 2), now
            for member in self._members():
                if asleep:  # the center itself was stopped, and could not hear any worker
                    member.heard_at = now
                if not member.finished and member.lost_at is None and now - member.heard_at > after:
                    member.lost_at, member.silent = now - after / 2, True
                    news.append(("away", {**member.identity, "reason": f"there was no sign of life for {after:g} seconds"}))
            lost = [m for m in self._members() if m.lost_at is not None and not m.given_up and now - m.lost_at > after]
        for kind, data in news:
            self._report(kind, data)
        self._take_failures()
        for member in lost:
            self._give_up(member)
        self._end_waits(now)
        if not self._begun and not self._waiting_reported and now - self._opened_at > 2.0:
            self._waiting_reported = True
            joined = sum(member.ready for member in self._members())
            self.session.emit("waiting", needed=self.engine.min_workers or self.engine.workers, joined=joined)

    def _end_waits(self, now: float) -> None:
        """Let the others wait no longer for ranks that have had no worker for too long."""
        for rank, member in enumerate(self.membership.members):
            if not self._begun or rank not in self.center.live:
                continue
            if member is not None and (member.is_present or member.finished):
                self._absent.pop(rank, None)
            elif now - self._absent.setdefault(rank, now) > self.engine.replace_after:
                self._remove(rank)

    def _report(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "away":
            if data["rank"] not in self._own:  # the exit of a worker that this process has started says more
                self.session.emit("lost", **data, pid=None)
        elif kind == "rejected":
            self.session.emit("warning", message=f"Rejected {data['peer'] or 'a client'}: {data['why']} ({data['count']}x)")
        else:
            self.session.emit(kind, **data)

    def _give_up(self, member: Member) -> None:
        """Take a lost worker's rank away from it. One that this process started elsewhere is replaced at once: it may still be
        alive, and is fenced off."""
        with self.membership.lock:
            if member.given_up or self.membership.members[member.rank] is not member:
                return
            member.given_up = True
            member.lost_at = member.lost_at or time.monotonic()
        self.membership.announce()
        self._remove(member.rank)
        child = self._own.get(member.rank)
        if child is not None and child.process.pid is None and child.incarnation == member.incarnation:
            child.process.kill()
            self.children.release(child)
            self._replace(member.rank, child)

    def _remove(self, rank: int) -> None:
        """Remove a worker from the center: the others wait for it no longer."""
        self._absent.pop(rank, None)
        if self._begun and rank in self.center.live:
            self._deliver(self.center.leave(rank))

    def _take_failures(self) -> None:
        """Handle exceptions that workers have reported. That of a worker which this process has started waits for its exit."""
        with self.membership.lock:
            failures, self.membership.failures = self.membership.failures, []
        for member, error in failures:
            child = self._own.get(member.rank)
            if child is not None and child.incarnation == member.incarnation:
                child.error = error
                continue
            self.session.emit("lost", **member.identity, pid=member.pid, reason=error["text"])
            if self.engine.on_failure == "raise":
                raise WorkerError(member.rank, f"it raised an exception on {member.host}.\n\n{error['text'].rstrip()}")

    # -- workers that this process starts -------------------------------------------------------------------

    def _start_worker(self, rank: int) -> None:
        incarnation, engine = self.membership.reserve(rank), self.engine
        directory = self.session.directory.resolve()
        where = directory if engine.launcher is None else self._endpoint
        role = NetworkWorker(rank, incarnation, where, self._token, engine.shared, engine.device)
        self._own[rank] = self.children.start(
            Task(f"worker-{rank}", self._worker_payload, role, directory, engine.threads_each),
            on_exit=partial(self._on_exit, rank),
            on_note=self._on_note,
            launcher=self._launcher,
            incarnation=incarnation,
        )

    def _on_exit(self, rank: int, child: Child) -> None:
        """Replace a started worker that has ended."""
        self._drain_messages()
        self._take_failures()
        if self._own.get(rank) is not child:
            return
        with self.membership.lock:
            member = self.membership.members[rank]
            if member is not None and member.incarnation == child.incarnation:
                if member.finished and child.error is None:
                    del self._own[rank]
                    return
                if not member.finished:
                    member.lost_at = member.lost_at or time.monotonic()
        self._replace(rank, child)

    def _replace(self, rank: int, child: Child) -> None:
        self._deaths[rank] = self._report_lost(rank, child, self._deaths.get(rank, 0))
        self._start_worker(rank)


def _port_before(directory: Path) -> int:
    """Return the port of an earlier start of the center, for workers that know only an address; 0 if there was none."""
    try:
        return endpoint.split_address(Endpoint.read(directory).address)[1]
    except (UsageError, TransportError):
        return 0
