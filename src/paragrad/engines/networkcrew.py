"""The center's side of a run whose workers join over a network: waits for them, applies what they bring, parts with some."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragrad import options
from paragrad.engines import processes, slicememory
from paragrad.engines.children import Child
from paragrad.engines.company import Company
from paragrad.engines.crew import TICK, Crew, longest_window
from paragrad.engines.guests import Guest
from paragrad.engines.localworker import Way
from paragrad.engines.memory import Memory
from paragrad.engines.networkworker import same_as
from paragrad.engines.reception import Reception
from paragrad.engines.shared import Segment
from paragrad.errors import UsageError, WorkerError
from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.session import Session
from paragrad.transport import endpoint
from paragrad.transport.endpoint import Endpoint
from paragrad.transport.message import TransportError
from paragrad.types import Commit, Reply

if TYPE_CHECKING:
    from paragrad.engines.network import Network

FAREWELL = 3.0
"""Seconds in which workers are told that the run is over."""
PATIENCE = 30.0
"""Seconds that a checkpoint waits for what a codec has left out at workers elsewhere."""
LAST = 10.0
"""Seconds in which they are told so, and bring along what a codec has left out, for the checkpoint of a run that is stopped."""


class NetworkCrew(Crew):
    """Workers that join: who comes, who is heard of, whose place is free again."""

    engine: Network

    def __init__(self, engine: Network, job: Job, session: Session, learner: Learner) -> None:
        from paragrad.transport import flight

        directory = session.directory
        recalled = session.resumed if session.resumed is not None and "present" in session.resumed.numbers["center"] else None
        window, length = longest_window(job), learner.weights.numel() * learner.weights.element_size()
        vectors = 2 * (1 + len(job.scheme.center_slots)) + engine.workers * (2 + len(job.scheme.sends))
        self._memory = Memory(directory, size=vectors * length, workers=engine.workers, window=window)
        session.at_close += [self._memory.discard, partial(slicememory.discard, directory)]
        self._company = Company(self, job, engine.shards, learner.weights) if engine.shards > 1 else None
        first = None if self._company is None else self._company.first
        super().__init__(engine, job, session, learner, self._memory.segment, by_reference=False, length=first)
        self.center.before_update = self._keep_first
        self._answered: set[int] = set()
        self._members: dict[int, Child] = {}
        """Workers that this process has started, by their place."""
        self._deaths: dict[int, int] = {}
        self._absent: dict[int, float] = {}
        """Since when others wait for a worker that is not there, nor anybody in its place."""
        self._wanted_since: float | None = None
        """Since when workers are asked for what a codec has left out."""
        self._ends_with_residuals = False
        """Whether that goes into the checkpoint at the end, as the run may go on later."""
        if job.codec is not None:
            session.is_ready_to_checkpoint = self._knows_residuals
        self._told_of_waiting = False
        self._opened_at = self._minded_at = time.monotonic()
        token = engine.token or endpoint.make_token(directory)
        pair = engine.certificate_pair(directory)
        self.reception = Reception(
            job,
            self.center,
            self._segment,
            self._slots,
            self._mouth,
            self._waker,
            about={"settings": session.settings, "workers": engine.workers, "scheme": options.describe(job.scheme)},
            **same_as(job, learner),
            run=endpoint.run_name(directory, token),
            shares=str(self._memory.path) if engine.shared and self._company is None else None,
            window=window,
            reserved=engine.here,
        )
        if recalled is not None:
            self._expect(recalled.numbers["guests"])
        self._token = token
        if self._company is None:
            self._keep()
        else:
            self._company.expect(self.reception, pair)
        host, port = endpoint.split_address(engine.address)
        wanted = port or _port_before(directory)
        try:
            self._server = flight.Server.listen(self.reception, endpoint.address_of(host, wanted), token, pair)
        except TransportError as error:
            if port or not wanted:
                raise UsageError(f"{error} Give another address, or port 0 for any that is free.") from None
            self._server = flight.Server.listen(self.reception, endpoint.address_of(host, 0), token, pair)
        name = engine.advertise or endpoint.advertised(host)
        self._endpoint = Endpoint(
            address=endpoint.address_of(name, self._server.port),
            certificate=None if pair is None else pair[0].decode(),
            hostname=None if engine.certificate is None else name,
        )
        self._endpoint.write(directory)

    def say_where(self) -> None:
        """Shards have begun to listen, or one listens elsewhere by now."""
        shards = tuple(address for _, _, address in self.reception.shards)
        if shards != self._endpoint.shards:
            self._endpoint = replace(self._endpoint, shards=shards)
            self._endpoint.write(self.session.directory)

    def __enter__(self) -> NetworkCrew:
        super().__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        from paragrad.transport import flight

        self.reception.stop(self.session.stopped or ("finished" if details[0] is None else "failed"))
        at_once = details[0] is KeyboardInterrupt
        self._ends_with_residuals = self.job.codec is not None and self.reception.stopping != "finished" and not at_once
        self._say_farewell()
        if self._ends_with_residuals:
            self._take_residuals()
        (self.session.directory / endpoint.FILE).unlink(missing_ok=True)
        flight.stop(self._server)
        if self._company is not None:
            self._company.end(at_once=at_once)
        self.session.measured |= {"turned_away": dict(self.reception.turned_away)} if self.reception.turned_away else {}
        super().__exit__(*details)

    def _say_farewell(self) -> None:
        """All hear of the end who are there, or wait for a place: who hears nothing waits for the center to come back."""
        began, owing = time.monotonic(), False
        while time.monotonic() < began + (LAST if owing else FAREWELL):
            with self.reception.lock:
                here = any(g is not None and g.here and not g.told for g in self.reception.guests)
                wait = any(asked > began - FAREWELL for asked in self.reception.queue.values())
                owing = self._are_owing()
            if not (here or wait or owing):
                return
            time.sleep(0.02)

    def _children(self) -> list[Child]:
        shards = [] if self._company is None else self._company.children
        return [*self._members.values(), *super()._children(), *shards]

    def _attach(self) -> None:
        if self._company is not None:
            self._company.attach(self.center)
        super()._attach()

    def _shown(self) -> Segment:
        return super()._shown() if self._company is None else self._company.shown

    def _show(self) -> None:
        if self._company is not None:
            self._company.show()

    # -- the run --------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Wait for enough workers, then apply commits until the rows are used up or a stop is asked for."""
        session, least = self.session, self.engine.min_workers or self.engine.workers
        again = any(guest is not None for guest in self.reception.guests)
        self._tell_where()
        if self._company is not None and self._company.begin(self._token):
            self._keep()
            slicememory.discard(session.directory, self._company.life)
            self.say_where()
            self.reception.closed = False
        for rank in range(self.engine.here):
            self._hire(rank)
        if again:
            self._begun = True
            session.go()
        else:
            while sum(guest.here for guest in self._guests()) < least and session.stopped is None:
                self._turn()
            if session.stopped is None:
                self._begin()
        while session.stopped is None and not self._is_over():
            self._turn()
        session.end()

    def _tell_where(self) -> None:
        engine = self.engine
        told = {"workers": engine.workers, "here": engine.here, "directory": str(self.session.directory)}
        self.session.emit("listening", address=self._endpoint.address, **told)

    def _begin(self) -> None:
        self._begun = True
        self.session.go()
        replies: list[Reply] = []
        here = {guest.rank: guest for guest in self._guests() if guest.here}
        for rank in range(self.engine.workers):
            if rank not in here:
                replies += self.center.leave(rank)
        for rank, guest in here.items():
            replies += self.center.join(rank, guest.incarnation)
        self._deliver(replies)

    def _is_over(self) -> bool:
        if self.center.leases.used < self.center.leases.total:
            return False
        return not any(guest.here for guest in self._guests())

    def _guests(self) -> list[Guest]:
        return [guest for guest in self.reception.guests if guest is not None]

    # -- what is kept ---------------------------------------------------------------------------------------

    def _expect(self, known: dict[str, list[Any]]) -> None:
        """Those who were here when the center was killed: they have a while to come back."""
        now = time.monotonic()
        for rank, (incarnation, key, finished, given_up) in known.items():
            guest = Guest(int(rank), incarnation, key, ready=True, finished=finished, given_up=given_up)
            guest.lost_at = None if finished else now
            self.reception.guests[int(rank)] = guest
            self.reception.incarnations[int(rank)] = incarnation

    def _keep(self) -> None:
        guests = {str(g.rank): [g.incarnation, g.key, g.finished, g.given_up] for g in self._guests() if g.ready}
        numbers = {**self.session.memory(), "guests": guests}
        if self._company is not None:
            numbers["shards"] = self._company.known
        self._memory.keep(self.center, numbers, self.center.flips, self._answered)
        self._answered.clear()

    def _keep_first(self) -> None:
        """Two updates in one turn: the first is kept before the second is written over what came before it."""
        if self._memory.flips != self.center.flips:
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

    # -- what a codec leaves out ----------------------------------------------------------------------------

    def _hand_residual(self, reply: Reply) -> None:
        """A newcomer goes on from what was left out in its place, where that is known here, or still lies on its machine."""
        guest, handed = self.reception.guests[reply.worker], self.reception.handed
        handed.pop(reply.worker, None)
        if reply.residual is not None:
            handed[reply.worker] = reply.residual
        elif guest is not None and reply.last in guest.kept:
            handed[reply.worker] = None
        if reply.last:
            incarnation, taken = -1 - reply.sequence, reply.worker in handed
            self.session.emit("residual", worker=reply.worker, incarnation=incarnation, taken=taken)

    def _knows_residuals(self) -> bool:
        """Before a checkpoint, workers bring along what was left out of their commits; nobody is waited for without end."""
        now, missing = time.monotonic(), self._unknown_residuals()
        self._wanted_since = (self._wanted_since or now) if missing else None
        if self._wanted_since is not None and now - self._wanted_since > PATIENCE:
            self._warn_of(missing, f"they have not committed for {PATIENCE:.0f} seconds")
            missing, self._wanted_since = [], None
        self.reception.wants_residuals = bool(missing)
        return not missing

    def _take_residuals(self) -> None:
        """At the end of a run that may go on later: what workers have brought, of their last commits that count."""
        with self.reception.lock:
            for rank, (sequence, residual) in self.reception.brought.items():
                if sequence == self.center.last(rank) and residual is not None:
                    self.center.residuals[rank] = residual
        if missing := self._unknown_residuals():
            self._warn_of(missing, "they were not heard of at the end")

    def _are_owing(self) -> bool:
        """Whether there are workers that will bring along what they have, for a run that may go on."""
        if not self._ends_with_residuals:
            return False
        brought = {rank: sequence for rank, (sequence, _) in self.reception.brought.items()}
        here = {guest.rank for guest in self._guests() if guest.here}
        return any(rank in here and brought.get(rank) != self.center.last(rank) for rank in self._unknown_residuals())

    def _unknown_residuals(self) -> list[int]:
        center = self.center
        return [worker for worker in sorted(center.live) if center.last(worker) and worker not in center.residuals]

    def _warn_of(self, workers: list[int], why: str) -> None:
        names = ", ".join(map(str, workers))
        self.session.emit("warning", message=f"A checkpoint without what the codec has left out at workers {names}: {why}.")

    # -- what workers say -----------------------------------------------------------------------------------

    def _announce(self, rank: int) -> None:
        self.reception.announce(rank)

    def _on_ready(self, rank: int, incarnation: int) -> None:
        with self.reception.lock:
            guest = self.reception.guests[rank]
            if guest is None or guest.incarnation != incarnation or guest.given_up:
                return
            guest.ready = True
        if self._begun:
            self._deliver(self.center.join(rank, incarnation))

    def _on_left(self, rank: int) -> None:
        self._keep()

    def _is_sound(self, commit: Commit) -> bool:
        """Whether a commit could have been made here: a worker elsewhere may be wrong, and the run goes on all the same."""
        center = self.center
        new = commit.sequence > center.last(commit.worker)
        if commit.version > center.clock or (new and commit.sequence > 1 << 40):
            return False
        held = center.leases.held(commit.worker)
        known = not new or commit.incarnation < self.reception.incarnations[commit.worker] or commit.worker not in center.live
        return known or (len(set(commit.batches)) == len(commit.batches) and set(commit.batches) <= set(held))

    def _receive(self, rank: int, sequence: int) -> None:
        commit = self._slots[rank].get_commit(self.job.scheme.parts)
        guest = self.reception.guests[rank]
        if commit.sequence != sequence or guest is None:
            return  # its worker has sent another since, after this one had come to nothing
        with self.reception.lock:
            brought, residual = self.reception.brought.pop(rank, (0, None))
            self.reception.handed.pop(rank, None)  # who commits has taken it
        commit.residual = residual if brought == sequence else None
        self._deaths.pop(rank, None)
        if not self._is_sound(commit):
            self.reception.intruder(guest.where, f"worker {rank} committed what was not leased to it, or from the future")
            self._give_up(guest)
            return
        self._deliver(self.center.receive(commit))

    # -- what becomes of them -------------------------------------------------------------------------------

    def _mind(self, now: float) -> None:
        if self._company is not None:
            self._company.mind()
        for rank in range(self.engine.here):
            child = self._members.get(rank)
            if child is not None and child.process.pid is not None and processes.is_stopped(child.process.pid):
                child.stopped_at = child.stopped_at or now
                if now - child.stopped_at > self.engine.replace_after:
                    child.process.kill()
            elif child is not None:
                child.stopped_at = None
        reception, after = self.reception, self.engine.replace_after
        with reception.lock:
            news, reception.news = reception.news, []
            failures, reception.failures = reception.failures, []
            asleep, self._minded_at = now - self._minded_at > max(4 * TICK, after / 2), now
            for guest in self._guests():
                if asleep:  # the center itself was stopped, and heard of nobody
                    guest.seen = now
                if not guest.finished and guest.lost_at is None and now - guest.seen > after:
                    guest.lost_at, guest.silent = now - after / 2, True
                    news.append(("away", {**guest.named, "reason": f"nothing was heard of it for {after:g} seconds"}))
            lost = [g for g in self._guests() if g.lost_at is not None and not g.given_up and now - g.lost_at > after]
        for kind, data in news:
            self._tell(kind, data)
        for guest, text in failures:
            self._on_failure(guest, text)
        for guest in lost:
            self._give_up(guest)
        for rank, held_up in [(r, g) for r, g in enumerate(reception.guests) if self._begun and r in self.center.live]:
            if held_up is not None and (held_up.here or held_up.finished):
                self._absent.pop(rank, None)
            elif now - self._absent.setdefault(rank, now) > after:
                self._part_with(rank)
        if not self._begun and not self._told_of_waiting and now - self._opened_at > 2.0:
            self._told_of_waiting = True
            joined = sum(guest.ready for guest in self._guests())
            self.session.emit("waiting", needed=self.engine.min_workers or self.engine.workers, joined=joined)

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "away":
            if data["rank"] not in self._members:  # of a child of ours more will be known
                self.session.emit("lost", **data, pid=None)
        elif kind == "turned_away":
            self.session.emit("warning", message=f"Turned away {data['peer'] or 'a client'}: {data['why']} ({data['count']}x)")
        else:
            self.session.emit(kind, **data)

    def _give_up(self, guest: Guest) -> None:
        with self.reception.lock:
            if guest.given_up or self.reception.guests[guest.rank] is not guest:
                return
            guest.given_up = True
            guest.lost_at = guest.lost_at or time.monotonic()
        self.reception.announce(guest.rank)
        self._part_with(guest.rank)

    def _part_with(self, rank: int) -> None:
        """Nobody waits for this worker any longer."""
        self._absent.pop(rank, None)
        if self._begun and rank in self.center.live:
            self._deliver(self.center.leave(rank))

    def _on_failure(self, guest: Guest, text: str) -> None:
        self.session.emit("lost", **guest.named, pid=guest.pid, reason=text)
        if self.engine.on_failure == "raise":
            raise WorkerError(guest.rank, f"it raised an exception on {guest.where}.\n\n{text.rstrip()}")

    # -- workers of our own ---------------------------------------------------------------------------------

    def _hire(self, rank: int, incarnation: int = 0) -> None:
        self._members[rank] = self._start(rank, incarnation=incarnation, role="guest")

    def _line(self) -> Way:
        return Way(self.session.directory.resolve(), self._token, self.engine.shared)

    def _member(self, rank: int) -> Child:
        if self._company is not None and rank > self.engine.workers:
            return self._company.child(rank)
        return self._members[rank] if rank < self.engine.workers else super()._member(rank)

    def _on_death(self, rank: int) -> None:
        if self._company is not None and rank > self.engine.workers:
            self._company.on_death(rank)
            return
        member = self._let_go(rank)
        with self.reception.lock:
            guest = self.reception.guests[rank]
            finished = guest is not None and guest.finished
            if guest is not None and not finished:
                guest.lost_at = guest.lost_at or time.monotonic()
        if finished and member.error is None:
            del self._members[rank]
            return
        member.deaths = self._deaths.get(rank, 0)
        self._mourn(rank, member)
        self._deaths[rank] = member.deaths
        self._hire(rank, member.incarnation + 1)


def _port_before(directory: Path) -> int:
    """The port of an earlier incarnation, so that workers who know no more than an address find it again."""
    try:
        return endpoint.split_address(Endpoint.read(directory).address)[1]
    except (UsageError, TransportError):
        return 0
