"""The machine that says the same to the dispatcher and to its model, and compares what they do."""

import pathlib
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stateful_model import (
    CONTROL,
    FINISH,
    HELD,
    QUERY,
    SAMPLING,
    SKIP,
    STREAM_OF,
    STUBBORN,
    TICK,
    TRAINING,
    Model,
    Op,
    Refused,
)
from stateful_world import World, request_of

from remote_rl.messages import (
    Attach,
    Cancel,
    Cancelled,
    Describe,
    Detach,
    Detached,
    Grant,
    Occupied,
    Outcome,
    Renew,
    Renewed,
    Submit,
    Wait,
    Waited,
)
from remote_rl.protocol import PROTOCOL_VERSIONS

LEASE, STALL = 4.0, 6.0
LINGER = 1.25  # between two looks of the watch

TRAINING_OPS = [
    *[("forward_backward", None)] * 4,
    *[("optim_step", None)] * 3,
    *[("zero_grad", None)] * 2,
    *[("sync", "keep"), ("sync", "wait"), ("push", None), ("forward", None), ("abandon", None)],
    *[("version", None), ("checkpoints", None), ("delete", "one"), ("reset", None)],
    *[(name, "kept") for name in ("snapshot", "restore_snapshot", "drop_snapshot")],
    *[(name, which) for name in ("save", "load") for which in ("one", "two")],
]
ENDINGS = st.sampled_from([FINISH, FINISH, FINISH, SKIP, "BackendError", "ConflictError"])
SCRIPTS = st.one_of(ENDINGS, ENDINGS, ENDINGS, st.just(HELD))
INDEX = st.integers(0, 11)
PLACE = st.sampled_from(["turn", "turn", "turn", "next", "gap"])
DEADLINE = st.sampled_from([None, None, None, 0.5, 2.0])
LINGERS = st.sampled_from([0.0, 0.0, LINGER])
TRAINING_CALLS = st.tuples(st.sampled_from(TRAINING_OPS), PLACE, SCRIPTS, DEADLINE)
#: what a driver usually does, one after the other
PROGRAMS = [
    ["zero_grad", "forward_backward", "optim_step", "snapshot", "version"],
    ["zero_grad", "forward_backward", "optim_step", "save"],
    ["load", "version"],
    ["forward_backward", "forward_backward", "optim_step", "sync"],
    ["restore_snapshot", "forward_backward", "optim_step"],
    ["forward_backward", "zero_grad", "optim_step"],
]
ARGUMENTS = {"save": "one", "load": "one", "snapshot": "kept", "restore_snapshot": "kept"}
GENERATE_CALLS = st.tuples(
    st.sampled_from([None] * 9 + ["unsupported"]),
    PLACE,
    st.sampled_from([FINISH, HELD, HELD, STUBBORN, "BackendError"]),
    DEADLINE,
)


@dataclass(eq=False)
class Pending:
    """An answer that is still to come: of a submit that lingers (op), or of a wait."""

    client: str
    task: Any
    end: float
    op: Op | None = None


def pick(items, index):
    return items[index % len(items)]


class DispatcherMachine(RuleBasedStateMachine):
    """Several clients and one run. Messages go out at once, or some together in one instant."""

    def __init__(self):
        super().__init__()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="remote_rl-stateful-"))
        self.world = World(self.folder, LEASE, STALL)
        self.model = Model(LEASE, STALL, {})
        self.strangers = {}  # clients of earlier runs, to the run's instance id
        self.pending = []
        self.mail = []  # (message, check) that go out together
        self.together = 0
        self.names = 0
        self.shown = set()  # clients whose waits may bring progress, and no outcome
        self.unseen = 0.0  # seconds since the watch looked
        self.frozen = {}  # ended clients to how many calls of theirs had begun
        self.failed = False

    # -- saying ---------------------------------------------------------------------------------

    def agree(self, holds, *what):
        if not holds:
            self.failed = True
            raise AssertionError(" ".join(map(str, what)))

    def expect(self, said):
        """What the model answers, a refusal included."""
        try:
            return said()
        except Refused as refused:
            return refused

    def say(self, message, check):
        self.mail.append((message, check))
        self.together -= 1
        if self.together <= 0:
            self.flush()

    def flush(self):
        mail, self.mail, self.together = self.mail, [], 0
        answers = self.world.tell([message for message, _ in mail])
        self.world.settle()
        self.model.settle()
        for (message, check), answer in zip(mail, answers, strict=True):
            if check is not None:
                check(message, answer)
        self.hear()

    def compare(self, want, kind, then=None):
        """A check of one answer: a refusal by its class, or an answer of this kind."""

        def check(message, answer):
            if isinstance(want, Refused):
                name = type(answer).__name__
                self.agree(name in want.names, message, "got", name, "instead of", want.names)
            else:
                self.agree(isinstance(answer, kind), message, "got", repr(answer), "for", want)
                if then is not None:
                    then(answer)

        return check

    def leased(self, client):
        return {
            "client_id": client,
            "instance_id": self.strangers.get(client, self.world.dispatcher.instance_id),
        }

    def here(self, client):
        return client not in self.strangers

    def somebody(self, index):
        """Mostly who is attached."""
        attached = list(self.model.leases)
        others = [*self.model.ended, *self.strangers, "nobody"]
        return pick([*attached * 4, *sorted(others)], index)

    def any_op(self, index):
        """The latest first."""
        return pick(list(self.model.ops.values())[::-1], index)

    def number(self, client, stream, place):
        used = [op.number for op in self.model.of(client) if op.stream == stream]
        if place == "turn":
            return next(n for n in range(1, len(used) + 2) if n not in used)
        return max(used, default=0) + (1 if place == "next" else 2)

    # -- hearing --------------------------------------------------------------------------------

    def outcome(self, op, answer):
        """The answer is the operation's one outcome, and the same one every time."""
        self.agree((answer.stream, answer.number) == op.key, answer, "for", op)
        if op.errors:
            name = type(answer.error).__name__
            self.agree(name in op.errors, op, "ended with", name)
        else:
            self.agree(answer.error is None, op, "failed with", repr(answer.error))
            self.agree(self.facts(op, answer.result) == op.facts, op, "gave", answer.result)
        said = answer.result if answer.error is None else answer.error
        if op.answer is None:
            op.answer = said
        self.agree(op.answer is said, op, "was answered twice, otherwise")

    def facts(self, op, result):
        if op.name == "generate":
            return {"reason": next(iter(result.samples())).finish_reason}
        if op.name == "checkpoints":
            return {"names": {info.name for info in result.checkpoints}}
        return {name: getattr(result, name) for name in op.facts}

    def hear(self):
        """The answers that were still to come."""
        for one in [each for each in self.pending if each.op is not None]:
            self.hear_submit(one)
        for one in [each for each in self.pending if each.op is None]:
            self.hear_wait(one)
        self.pending = [each for each in self.pending if not each.task.done()]

    def hear_wait(self, one):
        over = one.end <= self.model.now or one.client not in self.model.leases or self.model.lost
        unheard = self.model.unheard(one.client)
        if not one.task.done():
            self.agree(not over and not unheard, "the wait of", one.client, "hangs")
            return
        brought = [outcome.number for outcome in one.task.result().outcomes]
        self.agree(brought or over or one.client in self.shown, "a wait brought nothing too early")
        by_key = {op.key: op for op in self.model.of(one.client) if op.done}
        for outcome in one.task.result().outcomes:
            op = by_key.get((outcome.stream, outcome.number))
            self.agree(op is not None and not op.delivered and not op.claims, outcome)
            self.outcome(op, outcome)

    def hear_submit(self, one):
        over = one.end <= self.model.now
        if not one.task.done():
            self.agree(not one.op.done and not over, "the answer to", one.op, "hangs")
            return
        answer = one.task.result()
        self.agree(isinstance(answer, Outcome), one.op, "got", repr(answer))
        one.op.claims -= 1
        if answer.done:
            self.agree(one.op.done, one.op, "can't have ended")
            self.outcome(one.op, answer)
            one.op.delivered = one.op.copies == 1
        else:
            self.agree(over, one.op, "was answered too early")

    # -- attaching ------------------------------------------------------------------------------

    @initialize(taken_over=st.booleans())
    def a_driver_and_a_member(self, taken_over):
        if taken_over:
            self.attach(0, "driver", True, "current")
            self.attach(0, "takeover", True, "current")
            return
        self.attach(0, "driver", True, "current")
        self.attach(0, "member", True, None)

    @rule(
        index=INDEX,
        how=st.sampled_from(["driver", "takeover", "member", "member", "old", "elsewhere"]),
        fresh=st.booleans(),
        start=st.sampled_from(["current", "current", "current", None]),
    )
    def attach(self, index, how, fresh, start):
        client = self.somebody(index)
        if fresh or not self.here(client):
            self.names += 1
            client = f"client{self.names}"
        fields = {"takeover": how == "takeover", "start": start}
        if how in ("member", "old", "elsewhere"):
            fields = {"epoch": max(1, self.model.epoch - (how == "old"))}
        here = how != "elsewhere"
        want = self.expect(lambda: self.model.attach(client, here=here, **fields))
        mine = self.world.dispatcher.instance_id
        message = Attach(
            client_id=client,
            protocol_versions=PROTOCOL_VERSIONS,
            instance_id=mine if here else "of another run",
            **fields,
        )

        def then(answer):
            got = {name: getattr(answer, name) for name in want}
            self.agree(got == want, message, "got", got, "instead of", want)

        kind = Occupied if not isinstance(want, Refused) and "remaining" in want else Grant
        self.say(message, self.compare(want, kind, then))
        if how == "takeover":
            self.an_ended_client_speaks(index)

    def an_ended_client_speaks(self, index):
        """The driver that has gone, or a member of it."""
        if self.model.ended:
            self.renew(pick(sorted(self.model.ended)[::-1], index))

    def renew(self, client):
        want = self.expect(lambda: self.model.renew(client, self.here(client)))
        self.say(Renew(**self.leased(client)), self.compare(want, Renewed))

    @rule(index=INDEX, what=st.sampled_from(["renew", "renew", "renew", "detach", "info", "info"]))
    def say_little(self, index, what):
        client = self.somebody(index)
        if what == "info":
            self.submit(Op(client, "info", self.number(client, QUERY, "next"), "i"))
        elif what == "renew":
            self.renew(client)
        else:
            want = self.expect(lambda: self.model.detach(client, self.here(client)))
            self.say(Detach(**self.leased(client)), self.compare(want, Detached))
            self.an_ended_client_speaks(index)

    # -- operations -----------------------------------------------------------------------------

    def submit(self, op, linger=0.0):
        """Sends an operation, for the first time or again."""
        if linger:
            self.flush()
        want = self.expect(lambda: self.model.submit(op, self.here(op.client)))
        if want is op:
            self.world.backend.scripts[op.request_id] = op.script
        message = Submit(
            operation=op.name,
            number=op.number,
            request=request_of(op.name, op.argument),
            digest=op.digest,
            deadline=op.deadline,
            generates_before=op.generates_before,
            linger=linger,
            **self.leased(op.client),
        )
        if linger and isinstance(want, Op) and not want.done:
            want.claims += 1
            task = self.world.begin(message)
            self.pending.append(Pending(op.client, task, self.model.now + linger, want))
            self.flush()
            return
        ended = isinstance(want, Op) and want.done

        def then(answer):
            self.agree(answer.done == ended, want, "is answered by", repr(answer))
            if ended:
                self.outcome(want, answer)

        self.say(message, self.compare(want, Outcome, then))

    @rule(index=INDEX, calls=st.lists(TRAINING_CALLS, min_size=1, max_size=5), linger=LINGERS)
    def submit_training(self, index, calls, linger):
        """linger: of the last one."""
        self.have_a_driver()
        client = self.somebody(index)
        for left, ((name, argument), place, script, deadline) in enumerate(calls, 1 - len(calls)):
            number = self.number(client, TRAINING, place)
            digest = f"{name} {argument}"
            op = Op(client, name, number, digest, argument, script, deadline)
            self.submit(op, 0.0 if left else linger)

    def have_a_driver(self):
        if not (self.model.leases or self.model.lost):
            self.attach(0, "driver", True, "current")

    @rule(
        index=INDEX,
        program=st.sampled_from(PROGRAMS),
        script=st.sampled_from([FINISH, FINISH, HELD, "BackendError"]),
        deadline=DEADLINE,
        which=st.integers(0, 2),
    )
    def run_a_program(self, index, program, script, deadline, which):
        """which: has the script, and those after it the deadline."""
        calls = []
        for count, name in enumerate(program):
            what = (name, ARGUMENTS.get(name, "keep" if name == "sync" else None))
            how, until = script if count == which else FINISH, deadline if count > which else None
            calls.append((what, "turn", how, until))
        self.submit_training(index, calls, 0.0)

    @rule(index=INDEX, calls=st.lists(GENERATE_CALLS, min_size=1, max_size=3), linger=LINGERS)
    def submit_generates(self, index, calls, linger):
        client = self.somebody(index)
        for left, (argument, place, script, deadline) in enumerate(calls, 1 - len(calls)):
            number = self.number(client, SAMPLING, place)
            op = Op(client, "generate", number, "g", argument, script, deadline)
            self.submit(op, 0.0 if left else linger)

    @rule(
        index=INDEX,
        name=st.sampled_from(["pause", "resume", "abort", "abort", "reset_prefix_cache"]),
        place=PLACE,
        script=st.sampled_from([FINISH, FINISH, FINISH, HELD, "BackendError"]),
        meant=st.sampled_from([0, 0, -1, 2]),
    )
    def submit_control(self, index, name, place, script, meant):
        """meant: generates beyond (or up to before) the highest that an abort means."""
        client = self.somebody(index)
        op = Op(client, name, self.number(client, CONTROL, place), "c", script=script)
        if name == "abort":
            op.script = FINISH
            op.generates_before = max(0, self.number(client, SAMPLING, "next") - 1 + meant)
        self.submit(op)

    @precondition(lambda self: self.model.ops)
    @rule(
        index=INDEX,
        how=st.sampled_from(["same", "same", "same", "digest", "operation"]),
        linger=st.sampled_from([0.0, LINGER]),
    )
    def send_again(self, index, how, linger):
        self.send_copy(self.any_op(index), linger, how)

    def send_copy(self, op, linger, how="same"):
        """how: the very same, or something else under its number."""
        name, digest = op.name, op.digest or "of a tombstone"
        if how == "digest":
            digest = "of something else"
        if how == "operation":
            name = {TRAINING: "version", CONTROL: "abort"}.get(op.stream, name)
        self.submit(Op(op.client, name, op.number, digest, op.argument), linger)

    @rule(
        index=INDEX,
        what=st.one_of(
            st.none(),
            st.none(),
            st.sampled_from([*TRAINING_OPS, *[("generate", None)] * 8, ("pause", None)]),
        ),
        place=PLACE,
        also=st.booleans(),
    )
    def cancel(self, index, what, place, also):
        """what: has not arrived yet, None for what has. also: and then it arrives."""
        if what is None:
            if self.model.ops:
                op = self.any_op(index)
                self.say_cancel(op.client, op.name, op.number)
            return
        client, (name, argument) = self.somebody(index), what
        stream = STREAM_OF.get(name, TRAINING)
        number = self.number(client, stream, place)
        self.say_cancel(client, name, number)
        op = self.model.ops.get((client, stream, number))
        if op is not None and op.tombstone:
            op.argument = argument
            if also:
                self.submit(Op(client, name, number, "late", argument))

    def say_cancel(self, client, name, number):
        want = self.expect(lambda: self.model.cancel(client, name, number, self.here(client)))
        message = Cancel(
            stream=STREAM_OF.get(name, TRAINING),
            number=number,
            operation=name,
            **self.leased(client),
        )

        def then(answer):
            self.agree(answer.cancelled == want, message, "got", answer, "instead of", want)

        self.say(message, self.compare(want, Cancelled, then))

    # -- waiting --------------------------------------------------------------------------------

    @rule(
        index=INDEX,
        acknowledge=st.sampled_from(["none", "heard", "all", "all"]),
        timeout=st.sampled_from([0.0, 0.0, 3.0]),
        late=st.booleans(),
    )
    def wait(self, index, acknowledge, timeout, late):
        """late: a copy of what is acknowledged comes after it, or the same wait again."""
        client = self.somebody(index)
        self.say_wait(client, acknowledge, timeout)
        heard = [op for op in self.model.of(client) if op.acknowledged]
        if late and acknowledge == "all" and heard:
            self.send_copy(pick(heard[::-1], index), 0.0)
        elif late:
            self.say_wait(client, acknowledge, 0.0)

    def say_wait(self, client, acknowledge, timeout):
        if timeout:
            self.flush()
        ops = self.model.of(client) if acknowledge != "none" else []
        keys = [op.key for op in ops if acknowledge == "all" or op.delivered]
        want = self.expect(lambda: self.model.wait(client, keys, self.here(client)))
        message = Wait(timeout=timeout, acknowledged=keys, **self.leased(client))
        if timeout and want == []:
            task = self.world.begin(message)
            self.pending.append(Pending(client, task, self.model.now + timeout))
            self.flush()
            return

        def then(answer):
            brought = {(outcome.stream, outcome.number): outcome for outcome in answer.outcomes}
            self.agree(brought.keys() == {op.key for op in want}, "a wait of", client, brought)
            for op in want:
                self.outcome(op, brought[op.key])

        self.say(message, self.compare(want, Waited, then))

    @precondition(lambda self: self.pending)
    @rule(index=INDEX)
    def break_a_connection(self, index):
        self.flush()
        if not self.pending:
            return
        one = pick(self.pending, index)
        self.pending.remove(one)
        one.task.cancel()
        if one.op is not None:
            one.op.claims -= 1
        self.world.settle()
        self.hear()

    # -- backend and time -----------------------------------------------------------------------

    def held(self):
        """What the backend has not ended yet."""
        running = [self.model.training, *self.model.beside]
        return [op for op in running if op is not None and op.name != "abort"]

    @precondition(lambda self: self.held())
    @rule(index=INDEX, how=st.one_of(ENDINGS, ENDINGS, st.just("life")), count=st.integers(1, 4))
    def the_backend_ends_some(self, index, how, count):
        for _ in range(count):
            if self.held():
                self.the_backend_ends_one(pick(self.held(), index), how)

    def the_backend_ends_one(self, op, how):
        if how == "life" or op.stream == CONTROL:
            self.flush()
        if op not in self.held() or op.released:
            return  # meanwhile, or in this same instant
        if how == "life":
            self.show_life(op)
            return
        self.model.release(op, how)
        self.say(lambda: self.world.backend.release(op.request_id, how), None)

    def show_life(self, op):
        self.model.progress(op)
        self.world.backend.contexts_by_id[op.request_id].progress(1.0)
        self.shown.add(op.client)

    @rule(
        seconds=st.sampled_from([TICK, TICK, 2.0, LEASE - TICK, LEASE, STALL]),
        keeping=st.sampled_from(["nothing", "leases", "leases", "all", "all"]),
    )
    def time_passes(self, seconds, keeping):
        """keeping: what lives on meanwhile: the leases, or what runs as well."""
        self.flush()
        for count in range(int(seconds / TICK)):
            if keeping != "nothing" and count % 4 == 3:
                for client in list(self.model.leases):
                    self.renew(client)
            if keeping == "all" and count % 4 == 3:
                for op in self.held():
                    self.show_life(op)
            self.half_a_second_passes()

    def half_a_second_passes(self):
        self.unseen = 0.0
        self.model.tick()
        self.world.tick(TICK)
        self.hear()

    @precondition(lambda self: self.model.leases)
    @rule(index=INDEX, late=st.booleans())
    def a_message_comes_at_the_end_of_a_lease(self, index, late):
        """Just before it or just after it, and before the watch looks again."""
        self.flush()
        client = pick(list(self.model.leases), index)
        while client in self.model.leases:
            left = self.model.leases[client].expires - self.model.now
            if left <= TICK and not self.unseen:
                self.unseen = left if late else left / 2
                self.model.pass_unseen(self.unseen)
                self.world.clock.jump(self.unseen)
                self.world.settle()
                self.hear()
                break
            self.half_a_second_passes()
        self.renew(client)

    @rule(count=st.integers(2, 4))
    def the_next_messages_come_together(self, count):
        self.flush()
        self.together = count

    @precondition(lambda self: self.model.lost or self.model.checkpoints or self.names > 5)
    @rule(resume=st.booleans())
    def the_server_is_started_again(self, resume):
        self.flush()
        self.stop()
        earlier = [*self.model.leases, *self.model.ended]
        self.strangers.update(dict.fromkeys(earlier, self.world.dispatcher.instance_id))
        self.frozen = {}
        self.world.start()
        self.model = Model(LEASE, STALL, self.model.checkpoints)
        if resume:
            self.attach(0, "driver", True, "current")
            for name in [*self.model.checkpoints][-1:]:
                self.submit_training(0, [(("load", name), "turn", FINISH, None)], 0.0)

    def stop(self):
        self.model.close()
        self.world.stop()
        self.hear()
        self.agree(not self.pending, "left without an answer:", self.pending)
        self.agree(self.world.tasks() == 0, "tasks are left behind")
        self.agree(self.world.backend.closes == 1, "the backend was not closed")

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def everything_agrees(self):
        if not self.mail:
            self.the_backend_was_called_as_the_model_says()
            self.each_number_is_executed_once_in_order_while_its_client_may()
            self.the_run_is_what_the_model_says()
            self.nothing_runs_for_nobody()

    def the_backend_was_called_as_the_model_says(self):
        backend, calls = self.world.backend, self.model.calls
        begun = Counter(backend.begun)
        self.agree(begun == Counter(calls), "calls:", begun - Counter(calls), "too many,",
                   Counter(calls) - begun, "missing")  # fmt: skip
        in_order = [call for call in backend.begun if f":{TRAINING}:" in call[1]]
        meant = [call for call in calls if f":{TRAINING}:" in call[1]]
        self.agree(in_order == meant, "order of calls:", in_order, "instead of", meant)

    def each_number_is_executed_once_in_order_while_its_client_may(self):
        begun = [request_id for _, request_id in self.world.backend.begun]
        own = [each for each in begun if not each.endswith(":control:0")]
        self.agree(len(set(own)) == len(own), "executed twice:", own)
        self.agree(not self.world.backend.overlaps, "two training operations at once")
        for client in (*self.model.leases, *self.model.ended):
            mine = [each.split(":") for each in own if each.startswith(f"{client}:")]
            numbers = [int(each[2]) for each in mine if each[1] == TRAINING]
            self.agree(numbers == sorted(numbers), client, "out of order:", numbers)
            if client in self.model.ended:
                before = self.frozen.setdefault(client, len(mine))
                self.agree(len(mine) == before, client, "executed after its lease's end")

    def the_run_is_what_the_model_says(self):
        (info,) = self.world.tell([Describe()])
        self.agree((info.lost is not None) == self.model.lost, "lost:", info.lost)
        self.agree(info.driver == (self.model.driver is not None), "driver:", info.driver)
        if not self.model.lost:
            run = (info.versions.trainer, info.paused, info.pristine)
            want = (self.model.version, self.model.paused, self.model.pristine)
            self.agree(run == want, "version, paused, pristine:", run, "instead of", want)

    def nothing_runs_for_nobody(self):
        if not (self.pending or self.held() or self.model.beside or self.model.lost):
            self.agree(self.world.tasks() == self.world.services, "tasks are left behind")

    def teardown(self):
        try:
            if not self.failed:
                self.the_last_word()
        finally:
            self.world.close()
            shutil.rmtree(self.folder)

    def the_last_word(self):
        """What accumulator, dirtiness and weights have become, as the next driver finds them."""
        self.flush()
        for op in self.held():
            self.model.release(op, FINISH)
            self.world.backend.release(op.request_id, FINISH)
        self.flush()
        if not self.model.lost:
            self.attach(0, "takeover", True, "current")
            for call in (("sync", "keep"), ("optim_step", None), ("version", None)):
                self.submit_training(0, [(call, "turn", FINISH, None)], 0.0)
            self.say_wait(self.somebody(0), "none", 0.0)
        self.everything_agrees()
        self.stop()
