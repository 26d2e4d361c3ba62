"""The center's side of a run whose workers join over a network: waits for them, applies what they send, replaces the lost."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paragrad.config import options
from paragrad.core.job import Job
from paragrad.engines.exchange.center_loop import TICK, CenterLoop, longest_window
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
"""Seconds in which workers are told that the run is over."""
LAST = 10.0
"""The same where they bring what a codec has left out, for the checkpoint of a run that is stopped."""


class NetworkLoop(CenterLoop):
    """Workers join: tracks who is present, gives up those that are lost, starts its own."""

    engine: NetworkSettings

    def __init__(self, engine: NetworkSettings, job: Job, session: Session, learner: Learner) -> None:
        directory = session.directory
        recalled = (
            session.resumed
            if session.resumed is not None and session.resumed.numbers["center"].get("presence") is not None
            else None
        )
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
        """Since when others wait for a worker that is not present, nor any other for its rank."""
        self._ends_with_residuals = False
        """Whether residuals go into the checkpoint at the end, as the run may be resumed."""
        session.missing, session.announce = self._missing, self._want
        self._told_of_waiting = False
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
        if recalled is not None:
            self._expect(recalled.numbers["members"])
        for rank in range(engine.here):
            self.membership.started[rank] = self.membership.incarnations[rank] + 1  # nobody else takes it
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
                raise UsageError(f"{error} Give another address, or port 0 for any that is free.") from None
            return wire.listen(self.membership, endpoint.address_of(host, 0), self._token, pair)

    def publish_shards(self, shards: list[tuple[int, int, str]]) -> None:
        """Tell workers, and those who read endpoint.json, where the shards are."""
        self.membership.shards = shards
        addresses = tuple(address for _, _, address in shards)
        if addresses != self._endpoint.shards:
            self._endpoint = replace(self._endpoint, shards=addresses)
            self._endpoint.write(self.session.directory)

    def __enter__(self) -> NetworkLoop:
        super().__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self.membership.stop(self.session.stopped or ("finished" if details[0] is None else "failed"))
        at_once = details[0] is KeyboardInterrupt
        self._ends_with_residuals = self.job.codec is not None and self.membership.stopping != "finished" and not at_once
        self._say_farewell()
        if self._ends_with_residuals:
            self._take_residuals()
        (self.session.directory / endpoint.FILE).unlink(missing_ok=True)
        self._listener.close()
        if self._shards is not None:
            self._shards.end(at_once=at_once)
        self.session.measured |= {"rejected_clients": dict(self.membership.rejections)} if self.membership.rejections else {}
        super().__exit__(*details)
        self._launcher.close()
        if self._worker_storage is not None:
            self._worker_storage.close()

    def _say_farewell(self) -> None:
        """Wait until the workers that are present, or wait for a rank, know of the end: others wait for the center."""
        began, owing = time.monotonic(), False
        while time.monotonic() < began + (LAST if owing else FAREWELL):
            with self.membership.lock:
                here = any(m is not None and m.here and not m.knows_end for m in self.membership.members)
                wait = any(asked > began - FAREWELL for asked in self.membership.queue.values())
                owing = self._are_owing()
            if not (here or wait or owing):
                return
            time.sleep(0.02)

    def _attach(self) -> None:
        if self._shards is not None:
            self._shards.attach(self.center)
        super()._attach()

    # -- the run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Wait for enough workers, then apply commits until the rows are used up or a stop is asked for."""
        session, least = self.session, self.engine.min_workers or self.engine.workers
        again = any(member is not None for member in self.membership.members)
        self._tell_where()
        if self._shards is not None and self._shards.begin():
            self._keep()
            slice_file.discard(session.directory, self._shards.start_id)
            self.membership.closed = False
        for rank in range(self.engine.here):
            self._start_worker(rank)
        if again:
            self._begun = True
            session.go()
        else:
            while sum(member.here for member in self._members()) < least and session.stopped is None:
                self._turn()
            if session.stopped is None:
                self._begin()
        while session.stopped is None and not self._is_over():
            self._turn()
        self._part()
        self._finish()

    def _tell_where(self) -> None:
        engine = self.engine
        told = {"workers": engine.workers, "here": engine.here, "directory": str(self.session.directory)}
        self.session.emit("listening", address=self._endpoint.address, **told)

    def _begin(self) -> None:
        self._begun = True
        self.session.go()
        replies: list[Reply] = []
        here = {member.rank: member for member in self._members() if member.here}
        for rank in range(self.engine.workers):
            if rank not in here:
                replies += self.center.leave(rank)
        for rank, member in here.items():
            replies += self.center.join(rank, member.incarnation)
        self._deliver(replies)

    def _is_over(self) -> bool:
        if self.center.leases.used < self.center.leases.total:
            return False
        return not any(member.here for member in self._members())

    def _members(self) -> list[Member]:
        return [member for member in self.membership.members if member is not None]

    # -- durable state --------------------------------------------------------------------------------------

    def _expect(self, known: dict[str, list[Any]]) -> None:
        """Give workers that were present when the center was killed some time to reconnect."""
        now = time.monotonic()
        for rank, (incarnation, key, finished, given_up) in known.items():
            member = Member(int(rank), incarnation, key, ready=True, finished=finished, given_up=given_up)
            member.lost_at = None if finished else now
            self.membership.members[int(rank)] = member
            self.membership.incarnations[int(rank)] = incarnation

    def _keep(self) -> None:
        members = {str(m.rank): [m.incarnation, m.key, m.finished, m.given_up] for m in self._members() if m.ready}
        numbers = {**self.session.memory(), "members": members}
        if self._shards is not None:
            numbers["shards"] = self._shards.known
        self._durable.keep(self.center, numbers, self.center.flips, self._answered)
        self._answered.clear()

    def _keep_first(self) -> None:
        """Keep the first of two updates in one turn before the second overwrites what came before it."""
        if self._durable.flips != self.center.flips:
            self._answered |= set(range(self.engine.workers))  # any of them, by the first: their replies are yet to come
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
        """Give a newcomer the residual of its rank, where it is known here or still on the newcomer's machine."""
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
        self.membership.wants_more = wanted

    def _take_residuals(self) -> None:
        """Take the residuals that workers have brought at the end of a run that may be resumed."""
        with self.membership.lock:
            for rank, (sequence, residual) in self.membership.brought.items():
                if sequence == self.center.last(rank) and residual is not None:
                    self.center.private.residuals[rank] = residual
        if missing := self._unknown_residuals():
            names = ", ".join(map(str, missing))
            self.session.emit(
                "warning",
                message=f"A checkpoint without what the codec has left out at workers {names}: they did not answer at the end.",
            )

    def _are_owing(self) -> bool:
        """Return whether workers that are present have yet to bring their residuals."""
        if not self._ends_with_residuals:
            return False
        brought = {rank: sequence for rank, (sequence, _) in self.membership.brought.items()}
        here = {member.rank for member in self._members() if member.here}
        return any(rank in here and brought.get(rank) != self.center.last(rank) for rank in self._unknown_residuals())

    def _unknown_residuals(self) -> list[int]:
        center = self.center
        return [worker for worker in sorted(center.live) if center.last(worker) and worker not in center.private.residuals]

    # -- messages -------------------------------------------------------------------------------------------

    def _announce(self, rank: int) -> None:
        self.membership.announce(rank)

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
            self.center.private.keep(rank, self._brought(rank, last))
        self._keep()

    def _brought(self, rank: int, sequence: int) -> WorkerState | None:
        """Return the private state that belongs to a commit, where the worker has brought it."""
        with self.membership.lock:
            brought, state = self.membership.states.pop(rank, (0, None))
        return state if brought == sequence else None

    def _is_possible(self, commit: Commit) -> bool:
        """Return whether a commit could have been made: a worker elsewhere may be wrong, and the run goes on all the same."""
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
        commit.state = self._brought(rank, sequence)
        self._deaths.pop(rank, None)
        if not self._is_possible(commit):
            self.membership.rejected(member.where, f"worker {rank} committed what was not leased to it, or from the future")
            self._give_up(member)
            return
        self._deliver(self.center.receive(commit))

    # -- lost workers ---------------------------------------------------------------------------------------

    def _mind(self, now: float) -> None:
        if self._shards is not None:
            self._shards.mind()
        for child in list(self._own.values()):
            kill_if_stopped(child, now, self.engine.replace_after)
        membership, after = self.membership, self.engine.replace_after
        with membership.lock:
            news, membership.news = membership.news, []
            asleep, self._minded_at = now - self._minded_at > max(4 * TICK, after / 2), now
            for member in self._members():
                if asleep:  # the center itself was stopped, and could hear nobody
                    member.seen = now
                if not member.finished and member.lost_at is None and now - member.seen > after:
                    member.lost_at, member.silent = now - after / 2, True
                    news.append(("away", {**member.named, "reason": f"there was no sign of life for {after:g} seconds"}))
            lost = [m for m in self._members() if m.lost_at is not None and not m.given_up and now - m.lost_at > after]
        for kind, data in news:
            self._tell(kind, data)
        self._take_failures()
        for member in lost:
            self._give_up(member)
        for rank, held_up in [(r, m) for r, m in enumerate(membership.members) if self._begun and r in self.center.live]:
            if held_up is not None and (held_up.here or held_up.finished):
                self._absent.pop(rank, None)
            elif now - self._absent.setdefault(rank, now) > after:
                self._part_with(rank)
        if not self._begun and not self._told_of_waiting and now - self._opened_at > 2.0:
            self._told_of_waiting = True
            joined = sum(member.ready for member in self._members())
            self.session.emit("waiting", needed=self.engine.min_workers or self.engine.workers, joined=joined)

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "away":
            if data["rank"] not in self._own:  # of a process of ours more will be known
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
        self.membership.announce(member.rank)
        self._part_with(member.rank)
        child = self._own.get(member.rank)
        if child is not None and child.process.pid is None and child.incarnation == member.incarnation:
            child.process.kill()
            self.children.release(child)
            self._replace(member.rank, child)

    def _part_with(self, rank: int) -> None:
        """Let nobody wait for a worker any longer."""
        self._absent.pop(rank, None)
        if self._begun and rank in self.center.live:
            self._deliver(self.center.leave(rank))

    def _take_failures(self) -> None:
        """Handle exceptions that workers have reported. One of a worker that this process has started is kept for its exit."""
        with self.membership.lock:
            failures, self.membership.failures = self.membership.failures, []
        for member, error in failures:
            child = self._own.get(member.rank)
            if child is not None and child.incarnation == member.incarnation:
                child.error = error
                continue
            self.session.emit("lost", **member.named, pid=member.pid, reason=error["text"])
            if self.engine.on_failure == "raise":
                raise WorkerError(member.rank, f"it raised an exception on {member.where}.\n\n{error['text'].rstrip()}")

    # -- workers that this process starts -------------------------------------------------------------------

    def _start_worker(self, rank: int) -> None:
        incarnation, session = self.membership.reserve(rank), self.session
        directory = session.directory.resolve()
        where = directory if self.engine.launcher is None else self._endpoint
        role = NetworkWorker(rank, incarnation, where, self._token, self.engine.shared, self.engine.device)
        task = Task(f"worker-{rank}", self._worker_payload, role, directory, self.engine.threads_each)
        self._own[rank] = self.children.start(
            task,
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
            if member is not None and member.incarnation != child.incarnation:
                member = None  # it had not joined
            finished = member is not None and member.finished
            if member is not None and not finished:
                member.lost_at = member.lost_at or time.monotonic()
        if finished and child.error is None:
            del self._own[rank]
            return
        self._replace(rank, child)

    def _replace(self, rank: int, child: Child) -> None:
        self._deaths[rank] = self._report_lost(rank, child, self._deaths.get(rank, 0))
        self._start_worker(rank)


def _port_before(directory: Path) -> int:
    """Return the port of an earlier start of the center, so that workers who know no more than an address find it again."""
    try:
        return endpoint.split_address(Endpoint.read(directory).address)[1]
    except (UsageError, TransportError):
        return 0
