"""A backend that declares what does not exist, or what it has no method for, is refused at once."""

import attrs
import pytest
from dispatcher_fakes import FakeBackend

from remote_rl.dispatcher import Dispatcher
from remote_rl.errors import InvalidRequestError
from remote_rl.losses import LOSSES
from remote_rl.ops import OPERATIONS
from remote_rl.protocol import Capabilities
from remote_rl.requests import InFlight
from remote_rl.types import SamplingParams
from remote_rl.types.results import TENSOR_DTYPES

#: every kind of capability, and a name of it; None where any name may be declared
KINDS = {
    "operations": "generate",
    "outputs": None,
    "losses": "CrossEntropy",
    "optimizers": "AdamW",
    "sampling_options": "temperature",
    "sampling_outputs": "drawn_logprobs",
    "in_flight": "abort",
    "push_dtypes": "bfloat16",
    "policies": "snapshot",
}
CALLED = ["start", "close", "kill", "sampler_version"]


class Declaring(FakeBackend):
    """The fake, declaring other things, and without some methods."""

    def __init__(self, without=(), **declared):
        super().__init__()
        self.capabilities = Capabilities(**declared)
        for name in without:
            setattr(self, name, None)


def test_there_is_a_case_for_every_kind():
    assert sorted(KINDS) == sorted(attrs.fields_dict(Capabilities))


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_a_misspelt_capability_is_refused_with_the_nearest(kind, name):
    if name is None:
        Dispatcher(Declaring(**{kind: {"values", "anything"}}))
        return
    Dispatcher(Declaring(**{kind: {name}}))
    misspelt = name[:-2] + name[-1]
    with pytest.raises(InvalidRequestError, match=f"{misspelt!r}.*; did you mean {name!r}"):
        Dispatcher(Declaring(**{kind: {name, misspelt}}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [{1}, 3, None, {""}])
def test_a_capability_is_a_set_of_names(kind, value):
    with pytest.raises(InvalidRequestError, match=rf"Capabilities.{kind}"):
        Capabilities(**{kind: value})


def test_all_that_exists_may_be_declared():
    Dispatcher(
        Declaring(
            operations=OPERATIONS,
            losses={each.__name__ for each in LOSSES.values()},
            sampling_options=set(attrs.fields_dict(SamplingParams)) - {"outputs"},
            in_flight=InFlight.__args__,
            push_dtypes=TENSOR_DTYPES,
        )
    )


@pytest.mark.parametrize(
    "operation", sorted(name for name, row in OPERATIONS.items() if row.face != "dispatcher")
)
def test_a_declared_operation_needs_its_method(operation):
    Dispatcher(Declaring(without=[operation], operations=set(OPERATIONS) - {operation}))
    with pytest.raises(
        InvalidRequestError, match=f"'fake' declares the operation {operation!r}, but .* no method"
    ) as caught:
        Dispatcher(Declaring(without=[operation], operations={operation}))
    assert caught.value.details == {"operation": operation}


@pytest.mark.parametrize("face", ["training", "sampling", "weights"])
def test_a_face_that_offers_nothing_may_be_missing(face):
    class Lacking(FakeBackend):
        pass

    setattr(Lacking, face, None)
    backend = Lacking()
    offered = {name for name, row in OPERATIONS.items() if row.face != face}
    backend.capabilities = Capabilities(operations=offered)
    Dispatcher(backend)
    backend.capabilities = Capabilities(operations=OPERATIONS)
    with pytest.raises(InvalidRequestError, match=f"but its {face!r} has no method"):
        Dispatcher(backend)


@pytest.mark.parametrize("name", CALLED)
def test_what_every_backend_needs(name):
    with pytest.raises(InvalidRequestError, match=f"has no method {name!r}, which every backend"):
        Dispatcher(Declaring(without=[name]))
