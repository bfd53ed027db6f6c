"""What a run must do, said as plainly as it can be: dicts, lists and ifs.

The model-based tests compare the dispatcher with it, so it imports nothing of remote_rl. Time moves
by `tick`; `settle` lets everything happen that needs no time; each message of a client is a method
that returns what must be answered, or raises `Refused`.
"""

from dataclasses import dataclass, field

TICK = 0.5
TRAINING, SAMPLING, QUERY, CONTROL = "training", "sampling", "query", "control"

STREAM_OF = {
    "generate": SAMPLING,
    "info": QUERY,
    "abort": CONTROL,
    "pause": CONTROL,
    "resume": CONTROL,
    "reset_prefix_cache": CONTROL,
}  # all others are of the training stream
GROUP_OF = {"pause": "flow", "resume": "flow", "reset_prefix_cache": "cache"}

ACCUMULATES = {"forward_backward", "abandon"}
NEEDS_CLEAN_GRADIENT = {"forward_backward", "optim_step", "save", "sync"}
NEEDS_KNOWN_WEIGHTS = {
    *("forward", "forward_backward", "optim_step", "snapshot", "save", "sync"),
}
CLEARS_GRADIENT = {"optim_step", "zero_grad", "restore_snapshot", "load", "reset"}
REPLACES_WEIGHTS = {"restore_snapshot", "load", "reset"}
LEAVES_A_TRACE = ACCUMULATES | REPLACES_WEIGHTS | {"optim_step", "push", "snapshot"}
WITHOUT_BACKEND = {"abandon", "version", "checkpoints", "delete", "info", "abort"}
REFUSALS = {"ConflictError", "InvalidRequestError", "UnsupportedError"}

#: how a backend method ends: at once, when it is released, or (a generate) not even when aborted
HELD, STUBBORN = "held", "stubborn"
FINISH, SKIP = "finish", "skip"  # anything else is the name of the error that it raises


class Refused(Exception):
    """The message must be answered with an error of one of these classes."""

    def __init__(self, *names):
        super().__init__(names)
        self.names = set(names)


@dataclass(eq=False)
class Op:
    """One operation. state: "new" (not begun, beside the lane), "gap", "queued", "running", "done".
    errors: names of the classes that its error may have. facts: what its result must say.
    script: how the backend will treat it. claims: answers that wait to carry its outcome.
    copies: of its submit that came."""

    client: str
    name: str
    number: int
    digest: str | None
    argument: str | None = None
    script: str = FINISH
    deadline: float | None = None
    generates_before: int = 0
    accepted: float = 0.0
    state: str = "new"
    errors: set = field(default_factory=set)
    facts: dict = field(default_factory=dict)
    tombstone: bool = False
    acknowledged: bool = False
    delivered: bool = False
    claims: int = 0
    copies: int = 0
    began: bool = False
    aborted: bool = False
    ending: str | None = None
    released: bool = False
    last_sign: float = 0.0
    waits_for: list = field(default_factory=list)
    answer: object = None

    @property
    def stream(self):
        return STREAM_OF.get(self.name, TRAINING)

    @property
    def key(self):
        return (self.stream, self.number)

    @property
    def request_id(self):
        return f"{self.client}:{self.stream}:{self.number}"

    @property
    def done(self):
        return self.state == "done"

    def end(self, *errors, **facts):
        self.state, self.errors, self.facts = "done", set(errors), facts


@dataclass
class Lease:
    role: str
    expires: float
    renewals: int = 0


class Model:
    """One run. lease, stall: seconds. checkpoints: name to version, kept on disk."""

    def __init__(self, lease, stall, checkpoints):
        self.lease, self.stall = lease, stall
        self.now = 0.0
        self.leases = {}
        self.ended = set()
        self.epoch = 0
        self.lost = False
        self.ops = {}  # (client, stream, number) to Op
        self.turn = {}  # client to the next number of its training stream
        self.latest_control = {}  # (client, group) to number
        self.aborted_up_to = {}  # client to the highest generate that an abort of it means
        self.agenda = []  # (operation, how it is released), in order
        self.flow = []  # pauses and resumes, one after the other, of all clients
        self.lane = []
        self.training = None
        self.beside = []
        self.calls = []  # (operation, request id) of the backend
        self.version = self.highest = self.pushed = self.accumulated = 0
        self.dirty = self.unknown = self.paused = False
        self.paused_by = set()
        self.pristine = True
        self.snapshots = set()
        self.checkpoints = checkpoints

    # -- leases ---------------------------------------------------------------------------------

    @property
    def driver(self):
        return next((name for name, one in self.leases.items() if one.role == "driver"), None)

    def attach(self, client, *, here=True, epoch=None, start=None, takeover=False):
        """here: the handle, if it names an instance, names this one."""
        if not here or self.lost:
            raise Refused("RunLostError")
        self._expire()
        if epoch is not None:
            if start is not None or takeover:
                raise Refused("InvalidRequestError")
            self._refuse_ended(client)
            if client not in self.leases:
                if epoch != self.epoch or self.driver is None:
                    raise Refused("LeaseError")
                self.leases[client] = Lease("member", self.now + self.lease)
            return self._grant(client, None)
        if start is None and not self.pristine and client not in self.leases:
            raise Refused("InvalidRequestError")
        self._refuse_ended(client)
        if client not in self.leases:
            if self.driver is not None and not takeover:
                driver = self.leases[self.driver]
                return {"remaining": driver.expires - self.now, "renewals": driver.renewals}
            if self.driver is not None:
                self._end_client(self.driver)
            self.epoch += 1
            self.leases[client] = Lease("driver", self.now + self.lease)
        return self._grant(client, None if self.pristine else start)

    def _refuse_ended(self, client):
        if client in self.ended:
            raise Refused("LeaseError")

    def _grant(self, client, needs_start):
        role = self.leases[client].role
        return {"role": role, "epoch": self.epoch, "needs_start": needs_start}

    def _enter(self, client, here):
        """A message that needs a lease, and renews it."""
        if not here or self.lost:
            raise Refused("RunLostError")
        self._expire()
        if client not in self.leases:
            raise Refused("LeaseError")
        self.leases[client].expires = self.now + self.lease
        self.leases[client].renewals += 1

    def renew(self, client, here=True):
        self._enter(client, here)

    def detach(self, client, here=True):
        if here and client in self.ended:
            return
        self._enter(client, here)
        self._end_client(client)

    def _expire(self):
        for client in list(self.leases):
            if client in self.leases and self.leases[client].expires <= self.now:
                self._end_client(client)

    def _end_client(self, client):
        """With a driver its whole epoch ends."""
        for name in list(self.leases) if client == self.driver else [client]:
            del self.leases[name]
            self.ended.add(name)
            for op in self.of(name):
                if op.state in ("new", "gap", "queued"):
                    op.end("LeaseError")
                elif op.state == "running" and op.stream != TRAINING:
                    self._end_early(op, "LeaseError")
            if name in self.paused_by:
                self.paused_by.remove(name)
                self._lift(name)

    def _lift(self, client):
        """The run itself resumes, where nobody is left who paused: nobody else would."""
        if not self.paused_by:
            self.agenda.append((Op(client, "resume", 0, None), None))

    # -- operations -----------------------------------------------------------------------------

    def of(self, client):
        return [op for op in self.ops.values() if op.client == client]

    def submit(self, op, here=True):
        """The operation that has this number: `op` itself where it is new."""
        self._enter(op.client, here)
        known = self._find(op.client, op.name, op.number, op.digest)
        if known is None:
            if op.argument == "unsupported":
                raise Refused("UnsupportedError")
            op.accepted = self.now
            self._add(op)
            known = op
        known.copies += 1
        if known.copies > 1:  # whose answer is heard, nobody knows: waits bring it, too
            known.delivered = False
        elif known.done:
            known.delivered = True
        return known

    def _find(self, client, name, number, digest):
        known = self.ops.get((client, STREAM_OF.get(name, TRAINING), number))
        if known is None:
            return None
        same = known.tombstone or known.digest == digest
        if known.acknowledged or known.name != name or not same:
            raise Refused("ConflictError")
        return known

    def _add(self, op):
        self.ops[op.client, *op.key] = op
        if op.stream == TRAINING:
            self._add_in_order(op)
        elif not op.done and not self._is_overtaken(op):
            if op.name == "abort":
                latest = self.aborted_up_to.get(op.client, 0)
                self.aborted_up_to[op.client] = max(latest, op.generates_before)
            if op.name == "generate":  # it was called before an abort that overtook it
                op.aborted = op.number <= self.aborted_up_to.get(op.client, 0)
            self.agenda.append((op, None))

    def _add_in_order(self, op):
        if not op.done:
            op.state = "gap"
        turn = self.turn.get(op.client, 1)
        while (op.client, TRAINING, turn) in self.ops:
            ready = self.ops[op.client, TRAINING, turn]
            if not ready.done:
                ready.state = "queued"
            self.lane.append(ready)
            turn += 1
        self.turn[op.client] = turn

    def _is_overtaken(self, op):
        """A control operation that is older than one of its kind is answered and ignored."""
        if op.name not in GROUP_OF:
            return False
        group = (op.client, GROUP_OF[op.name])
        latest = self.latest_control.get(group, 0)
        self.latest_control[group] = max(latest, op.number)
        if op.number < latest:
            op.end(version=self.version)
        return op.done

    def cancel(self, client, name, number, here=True):
        """Whether it will never run, or was told to end."""
        self._enter(client, here)
        op = self.ops.get((client, STREAM_OF.get(name, TRAINING), number))
        if op is None:
            op = Op(client, name, number, None, tombstone=True)
            op.end("OperationCancelled")
            self._add(op)
        elif op.acknowledged and (op.stream != TRAINING or number < self.turn.get(client, 1)):
            raise Refused("ConflictError")
        else:  # whoever asks has not heard how it ended, whatever answer told it: waits bring it
            op.copies += 1
            op.delivered = False
        if op.state in ("new", "gap", "queued"):
            op.end("OperationCancelled")
        elif op.state == "running" and op.stream != TRAINING:
            self._end_early(op, "OperationCancelled")
            return True
        return op.errors == {"OperationCancelled"}

    def acknowledge(self, client, keys):
        for key in keys:
            op = self.ops.get((client, *key))
            if op is not None and op.done:
                op.acknowledged = True

    def wait(self, client, acknowledged=(), here=True):
        """What a wait brings now."""
        self._enter(client, here)
        self.acknowledge(client, acknowledged)
        return self.unheard(client)

    def unheard(self, client):
        return [
            op
            for op in self.of(client)
            if op.done and not (op.acknowledged or op.delivered or op.claims)
        ]

    # -- what happens by itself -----------------------------------------------------------------

    def release(self, op, how):
        """The backend method that was held goes on."""
        op.released = True
        self.agenda.append((op, how))

    def settle(self):
        self._after_each()
        while self.agenda or self._lane_moves():
            while self.agenda:
                op, how = self.agenda.pop(0)
                op.script = how or op.script
                if op.name in ("pause", "resume") and op.state == "new":
                    self.flow.append(op)
                elif op.state == "new":
                    self._begin(op)
                elif op in self.beside and not self._goes_on(op):
                    self._finish(op)
                self._after_each()

    def _goes_on(self, op):
        return op.script == STUBBORN or (op.script == HELD and not op.aborted)

    def _after_each(self):
        for abort in [each for each in self.beside if each.name == "abort"]:
            if all(each.done for each in abort.waits_for):
                self._finish(abort)
        while self.flow and self.flow[0].state != "running":
            op = self.flow[0]
            if op.state == "new":
                self._begin_flow(op)
            if op.done and op in self.flow:
                self.flow.remove(op)

    def _begin_flow(self, op):
        lifts = op.number == 0
        if lifts and (self.paused_by or not self.paused):
            op.end(version=self.version)  # somebody has paused or resumed meanwhile
        elif op.name == "pause" and self._delivery_waits():
            op.end("ConflictError")
        else:
            self._begin(op)

    def _lane_moves(self):
        if self.training is not None:
            if self.training.script == HELD:
                return False
            op, self.training = self.training, None
            self._finish(op)
        elif self.lane:
            self._take_turn(self.lane.pop(0))
        else:
            return False
        return True

    def _take_turn(self, op):
        if not op.done and self._late(op):
            op.end("DeadlineExceededError")
        if op.done:  # cancelled, late or dropped while it waited: it counts where it stood
            self._failed(op)
            return
        refusal = self._refusal(op)
        if refusal is None and op.name in LEAVES_A_TRACE:
            self.pristine = False
        if refusal is None:
            refusal = self._refusal_of_files(op)
        if refusal is not None:
            op.end(refusal)
            self._failed(op)
            return
        if op.name == "load":
            self.highest = max(self.highest, self.checkpoints[op.argument])
        self.training = op
        self._call(op)

    def _call(self, op):
        op.state, op.began, op.last_sign = "running", True, self.now
        if op.name in WITHOUT_BACKEND:
            op.script = FINISH
        else:
            self.calls.append((op.name, op.request_id))

    def _begin(self, op):
        """Beside the lane."""
        self._call(op)
        self.beside.append(op)
        if op.name == "abort":
            for other in list(self.beside):
                if other.name == "generate" and self._means(op, other):
                    op.waits_for.append(other)
                    self._end_early(other, None)
        elif not self._goes_on(op):
            self._finish(op)

    def _means(self, abort, generate):
        if generate.client == abort.client:
            return generate.number <= abort.generates_before
        return generate.accepted <= abort.accepted

    def _delivery_waits(self):
        return (
            self.training is not None
            and (self.training.name, self.training.argument) == ("sync", "wait")
            and self.training.script == HELD
        )

    def _refusal(self, op):
        if op.name == "snapshot" and op.argument in self.snapshots:
            return "ConflictError"
        if op.name in ("restore_snapshot", "drop_snapshot") and op.argument not in self.snapshots:
            return "InvalidRequestError"
        if self.unknown and op.name in NEEDS_KNOWN_WEIGHTS:
            return "ConflictError"
        if self.dirty and op.name in NEEDS_CLEAN_GRADIENT:
            return "DirtyGradientsError"
        if op.name == "optim_step" and not self.accumulated:
            return "ConflictError"
        if op.name == "save" and self.accumulated:
            return "ConflictError"
        if op.name == "sync" and op.argument == "wait" and self.paused:
            return "ConflictError"
        if op.name == "sync" and self.pushed > self.version:
            return "ConflictError"
        return None

    def _refusal_of_files(self, op):
        if op.name == "save" and op.argument in self.checkpoints:
            return "ConflictError"
        if op.name in ("load", "delete") and op.argument not in self.checkpoints:
            return "InvalidRequestError"
        return "BackendError" if op.name == "abandon" else None

    def _finish(self, op):
        """What was running has ended."""
        if op in self.beside:
            self.beside.remove(op)
        if op in self.flow:
            self.flow.remove(op)
        if op.done:
            return
        released = op.script not in (HELD, STUBBORN)
        failed = released and op.script not in (FINISH, SKIP)
        if not failed:
            self._succeeded(op)
        if failed or op.ending is not None:
            op.end(op.ending or op.script)
            self._failed(op)
        else:
            op.end(**self._facts(op, "stop" if released else "abort"))

    def _succeeded(self, op):
        if op.name in REPLACES_WEIGHTS or (op.name == "optim_step" and op.script != SKIP):
            self.highest += 1
            self.version = self.highest
        if op.name in REPLACES_WEIGHTS:
            self.unknown = False
        if op.name == "push":
            self.highest += 1
            self.pushed = self.highest
        if op.name == "forward_backward":
            self.accumulated += 1
        if op.name in CLEARS_GRADIENT:
            self.accumulated, self.dirty = 0, False
        if op.name == "reset":
            self.pristine = True
            self.snapshots.clear()
        if op.name == "snapshot":
            self.snapshots.add(op.argument)
        if op.name == "drop_snapshot":
            self.snapshots.remove(op.argument)
        if op.name == "save":
            self.checkpoints[op.argument] = self.version
        if op.name == "delete":
            del self.checkpoints[op.argument]
        if op.name == "pause":
            self.paused = True
            if op.ending is None:
                self.paused_by.add(op.client)
            else:  # its client was told that it failed
                self._lift(op.client)
        if op.name == "resume":
            self.paused = False
            self.paused_by.clear()

    def _facts(self, op, reason):
        if op.name == "generate":
            return {"reason": reason}
        if op.name == "info":
            return {"paused": self.paused}
        if op.name == "checkpoints":
            return {"names": set(self.checkpoints)}
        if op.name == "version":
            return {"trainer": self.version}
        if op.name == "push":
            return {"version": self.pushed}
        if op.name == "optim_step":
            return {"version": self.version, "skipped": op.script == SKIP}
        return {"version": self.version}

    def _failed(self, op):
        if op.name in ACCUMULATES or (op.name == "optim_step" and op.began):
            self.dirty = True
            self.pristine = False
        changes = op.name in REPLACES_WEIGHTS or op.name == "optim_step"
        if changes and op.began and not op.errors & REFUSALS:
            self.unknown = True

    def _end_early(self, op, error):
        """error: None keeps the result, as an abort does. The first reason counts."""
        op.ending = op.ending or error
        op.aborted = True
        if op.name == "generate":
            self.agenda.append((op, None))

    # -- time -----------------------------------------------------------------------------------

    def tick(self):
        """Half a second passes, and whoever watches looks once."""
        self.now += TICK
        self._expire()
        late = []
        for op in self._open():
            if self._late(op):
                if op.state != "running":
                    op.end("DeadlineExceededError")
                    late.append(op)
                elif op.stream != TRAINING:
                    self._end_early(op, "DeadlineExceededError")
        for op in self._open():
            if op.state == "running" and op.last_sign + self.stall <= self.now:
                self._stalls(op, late)
        self.settle()

    def _late(self, op):
        return op.deadline is not None and op.accepted + op.deadline <= self.now

    def _open(self):
        own = [op for op in self.ops.values() if op.client in self.leases]
        others = [each for each in (*self.beside, self.training) if each is not None]
        return [op for op in dict.fromkeys([*own, *others]) if not op.done]

    def pass_unseen(self, seconds):
        """Time passes between two looks of the watch: messages see it, nothing else does."""
        self.now += seconds

    def _stalls(self, op, late):
        if op.name == "generate" and not op.aborted and (self.paused or self._delivery_waits()):
            op.last_sign = self.now
        elif op.stream == TRAINING:
            for each in late:  # which of the two is looked at first, nobody says
                each.errors.add("RunLostError")
            op.end("RunLostError")
            self.lose()
        elif not op.done:  # at once, and its method is cancelled
            op.end(op.ending or "StalledError")
            self.beside.remove(op)

    def progress(self, op):
        """What was told to end has one stall for it, whatever it reports."""
        if not op.aborted:
            op.last_sign = self.now

    def lose(self):
        """The run is over, for everything at once."""
        self.lost = True
        for op in self._open():
            op.end("RunLostError")
        self.training, self.beside, self.flow = None, [], []

    def close(self):
        """What runs for nobody is cancelled."""
        if not self.lost:
            for op in self._open():
                if op.client not in self.leases:
                    op.end(op.ending or "OperationCancelled")
        self.lose()
