"""Every field of what crosses the protocol is classified, and a reserved one holds its default."""

import attrs
import numpy as np
import pytest

from remote_rl import losses
from remote_rl.errors import InvalidRequestError, UnknownNameError
from remote_rl.ops import ALWAYS_OFFERED, OPERATIONS, Stream
from remote_rl.requests import Request
from remote_rl.types import AdamW, Batch, Piece, SamplingParams, TensorForm
from remote_rl.types.fields import KIND, LOCAL, RESERVED, SCHEDULING, SEMANTIC
from remote_rl.types.results import Tensor

KINDS = {kind[KIND] for kind in (SEMANTIC, SCHEDULING, RESERVED, LOCAL)}

BATCH = Batch(prompts=[[1]], prompt_index=[0], responses=[[2, 3]], temperature=1.0)
PIECE = Piece(offset=4, data=np.zeros(4, np.uint8))
#: one legal instance of each request class; a new operation has to be added here
EXAMPLES = {
    "forward": {"batch": BATCH},
    "forward_backward": {"batch": BATCH, "loss": losses.CrossEntropy()},
    "abandon": {"reason": "ValueError: no"},
    "optim_step": {"optimizer": AdamW(lr=0.1)},
    "zero_grad": {},
    "snapshot": {"name": "before"},
    "restore_snapshot": {"name": "before"},
    "drop_snapshot": {"name": "before"},
    "set_reference": {"source": "current"},
    "save": {"name": "step-1"},
    "load": {"name": "step-1"},
    "checkpoints": {},
    "delete": {"name": "step-1"},
    "export": {"name": "model"},
    "sync": {},
    "push_part": {"transfer": "t", "forms": {"w": TensorForm(shape=(2,), dtype="float32")}},
    "push": {"tensors": {"w": np.zeros(2, np.float32)}},
    "version": {},
    "generate": {"prompts": [[1, 2]], "params": SamplingParams(max_tokens=2)},
    "finish_session": {"session_id": "s"},
    "abort": {},
    "pause": {},
    "resume": {},
    "reset_prefix_cache": {},
    "reset": {},
    "sleep": {"half": "training"},
    "wake": {"half": "sampling"},
    "info": {},
    "tokenizer": {},
    "list_files": {"kind": "checkpoint", "name": "step-1"},
    "read_file": {
        "kind": "export",
        "name": "model",
        "path": "config.json",
        "offset": 0,
        "length": 10,
    },
}
REQUESTS = {name: row.request for name, row in OPERATIONS.items()}
CARRIED = [
    SamplingParams,
    AdamW,
    Batch,
    Tensor,
    TensorForm,
    Piece,
    losses.KL,
    losses.Entropy,
    losses.Aggregation,
    *losses.LOSSES.values(),
]
RESERVED_FIELDS = [
    (name, field.name)
    for name, request in REQUESTS.items()
    for field in attrs.fields(request)
    if field.metadata.get(KIND) == "reserved"
]


def request_of(operation, **changes):
    return REQUESTS[operation](**{**EXAMPLES[operation], **changes})


def test_there_is_an_example_of_every_operation():
    assert EXAMPLES.keys() == OPERATIONS.keys()
    for name in OPERATIONS:
        assert isinstance(request_of(name), Request)


@pytest.mark.parametrize("cls", [*REQUESTS.values(), *CARRIED], ids=lambda each: each.__name__)
def test_every_field_is_classified(cls):
    unclassified = [
        field.name for field in attrs.fields(cls) if field.metadata.get(KIND) not in KINDS
    ]
    assert unclassified == []


@pytest.mark.parametrize(("operation", "name"), RESERVED_FIELDS)
@pytest.mark.parametrize("value", ["critic", 5, None, ["policy"]])
def test_a_reserved_field_of_a_request_takes_nothing_but_its_default(operation, name, value):
    default = next(f.default for f in attrs.fields(REQUESTS[operation]) if f.name == name)
    assert getattr(request_of(operation, **{name: default}), name) == default
    with pytest.raises(
        InvalidRequestError, match=rf"\.{name}=.* is reserved: .*leave it"
    ) as caught:
        request_of(operation, **{name: value})
    assert caught.value.details == {"field": name}


@pytest.mark.parametrize("name", ["prompt_parent", "attachments"])
@pytest.mark.parametrize("value", [[0], np.zeros(1), "x", 0, False])
def test_the_reserved_fields_of_a_batch_take_nothing(name, value):
    with pytest.raises(InvalidRequestError, match=f"Batch.{name}=.* is reserved"):
        BATCH.replace(**{name: value})


def test_training_weights_and_generate_operations_say_their_model():
    without = {name for name, cls in REQUESTS.items() if "model" not in attrs.fields_dict(cls)}
    assert without == {
        "info",
        "tokenizer",
        "reset",
        "sleep",
        "wake",
        "list_files",
        "read_file",
    }


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_an_unknown_keyword_is_refused_with_the_valid_names(operation):
    with pytest.raises(UnknownNameError, match=f"{REQUESTS[operation].__name__} has no field"):
        request_of(operation, modle="policy")


@pytest.mark.parametrize(
    "operation", sorted(name for name, e in EXAMPLES.items() if e and name != "push")
)
def test_a_missing_field_is_named(operation):
    required = [f.name for f in attrs.fields(REQUESTS[operation]) if f.default is attrs.NOTHING]
    assert required
    for name in required:
        given = {key: value for key, value in EXAMPLES[operation].items() if key != name}
        with pytest.raises(InvalidRequestError, match=f"needs '{name}'; pass {name}="):
            REQUESTS[operation](**given)


@pytest.mark.parametrize(
    ("operation", "changes", "message"),
    [
        ("forward", {"batch": [1]}, "Forward.batch must be a Batch"),
        ("forward", {"policy": "a/b"}, "Forward.policy can't be 'a/b'"),
        ("forward", {"outputs": [3]}, "Forward.outputs must be a non-empty string"),
        ("forward_backward", {"loss": "ppo"}, "ForwardBackward.loss must be a loss of"),
        ("optim_step", {"optimizer": 1e-3}, "OptimStep.optimizer must be an AdamW"),
        ("snapshot", {"name": "current"}, "Snapshot.name can't be 'current'"),
        ("save", {"name": "../up"}, "Save.name can't be '../up'"),
        ("save", {"name": ""}, "Save.name can't be ''"),
        ("save", {"name": "a" * 129}, "a name has 1 to 128 letters"),
        ("save", {"name": ".hidden"}, "Save.name can't be"),
        ("save", {"optimizer": 1}, "Save.optimizer must be True or False"),
        ("save", {"metadata": [1]}, "Save.metadata must be a mapping of names to JSON"),
        ("save", {"metadata": {"a": {"b": [object]}}}, r"metadata\['a'\]\['b'\]\[0\] is a type"),
        ("save", {"metadata": {1: 2}}, "has the key 1, which is not a string"),
        ("load", {"name": "base"}, "Load.name can't be 'base'"),
        ("set_reference", {"source": "reference"}, "SetReference.source can't be 'reference'"),
        ("generate", {"prompts": []}, "at least one prompt"),
        ("generate", {"prompts": [[1], []]}, "prompt 1 is empty"),
        ("generate", {"prompts": [[1], [2, -3]]}, "prompt 1 holds a negative token id"),
        ("generate", {"prompts": "hello"}, "prompts must be token ids, not text; tokenise first"),
        ("generate", {"prompts": ["hello"]}, "row 0 of prompts is text"),
        ("generate", {"params": {"n": 1}}, "Generate.params must be a SamplingParams"),
        ("abort", {"request_ids": [1]}, "Abort.request_ids must be a non-empty string"),
        ("sync", {"in_flight": "kep"}, "can't be 'kep'; did you mean 'keep'"),
        ("sync", {"label": 0.5}, "Sync.label must be a whole number, a string or None"),
        ("push", {"tensors": {}}, "push needs a mapping of names to tensors"),
        ("push", {"tensors": [1]}, "push needs a mapping"),
        ("push", {"tensors": None}, "push needs tensors, or the transfer that has brought them"),
        ("push", {"transfer": "t"}, "or the transfer that has brought them, and not both"),
        ("push", {"tensors": None, "transfer": ""}, "Push.transfer must be a non-empty string"),
        ("push_part", {"transfer": 7}, "PushPart.transfer must be a non-empty string"),
        ("push_part", {"forms": {}}, "push_part needs forms, of every tensor, or pieces"),
        ("push_part", {"forms": {"w": 1}}, "PushPart.forms must be a mapping of names to Tensor"),
        ("push_part", {"pieces": [1]}, "PushPart.pieces must be a mapping of names to Piece"),
        ("push_part", {"pieces": {"w": PIECE}}, "or pieces of tensors, and not both"),
        ("sleep", {"half": "trainer"}, "can't be 'trainer'; did you mean 'training'"),
        ("read_file", {"offset": -1}, "ReadFile.offset must be a whole number >= 0"),
        ("read_file", {"length": -1}, "ReadFile.length must be a whole number >= 0"),
        ("list_files", {"kind": "log"}, "ListFiles.kind can't be 'log'"),
    ],
)
def test_requests_refuse_what_no_backend_could_do(operation, changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        request_of(operation, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorForm(shape=[-1], dtype="float32"), "TensorForm.shape must be a whole num"),
        (lambda: TensorForm(shape=3, dtype="float32"), "TensorForm.shape must be a sequence"),
        (lambda: TensorForm(shape=(), dtype="float23"), "did you mean 'float32'"),
        (lambda: Piece(offset=-1, data=PIECE.data), "Piece.offset must be a whole number >= 0"),
        (lambda: Piece(offset=0, data=np.zeros(0, np.uint8)), r"not \[0\] of uint8"),
        (lambda: Piece(offset=0, data=np.zeros(2, np.int8)), r"not \[2\] of int8"),
        (lambda: Piece(offset=0, data=np.zeros((2, 2), np.uint8)), r"not \[2, 2\] of uint8"),
    ],
)
def test_forms_and_pieces_refuse_what_is_none(make, message):
    with pytest.raises(InvalidRequestError, match=message):
        make()


def test_a_form_knows_its_size():
    form = TensorForm.of(Tensor(data=np.zeros((3, 4), np.uint16), dtype="bfloat16"))
    assert (form.shape, form.dtype, form.itemsize, form.nbytes) == ((3, 4), "bfloat16", 2, 24)
    assert TensorForm(shape=(), dtype="int64").nbytes == 8
    assert TensorForm(shape=(0, 5), dtype="int64").nbytes == 0


def test_numbers_and_metadata_arrive_as_json_has_them():
    assert type(request_of("sync", label=np.int64(7)).label) is int
    metadata = request_of("save", metadata={"betas": (0.9, np.float64(0.5)), "n": np.int32(1)})
    assert metadata.metadata == {"betas": [0.9, 0.5], "n": 1}
    assert request_of("save", metadata=None).metadata == {}


def test_requirements_name_what_a_backend_must_declare():
    def needs(operation, **changes):
        return set(request_of(operation, **changes).requirements())

    assert needs("forward", outputs={"entropy"}) == {("output", "entropy")}
    assert needs("forward", policy="reference") == {
        ("output", "logprobs"),
        ("policy", "reference"),
    }
    assert needs("forward", policy="before") == {("output", "logprobs"), ("policy", "snapshot")}
    assert needs("set_reference", source="base") == {("policy", "reference")}
    assert needs("set_reference", source="before") == {
        ("policy", "reference"),
        ("policy", "snapshot"),
    }
    assert needs("forward_backward", loss=losses.PPO(entropy=losses.Entropy(0.1))) == {
        ("loss", "PPO"),
        ("output", "logprobs"),
        ("output", "entropy"),
    }
    assert needs("optim_step") == {("optimizer", "AdamW")}
    assert needs("sync", in_flight="abort") == {("in_flight", "abort")}
    assert needs("push") == {("in_flight", "keep"), ("push_dtype", "float32")}
    assert needs("push", tensors=None, transfer="t") == {
        ("operation", "push_part"),
        ("in_flight", "keep"),
    }
    assert needs("push_part") == {("push_dtype", "float32")}
    assert needs("push_part", forms={}, pieces={"w": PIECE}) == set()
    assert needs("generate") == {("sampling_output", "logprobs")}
    assert needs(
        "generate", params=SamplingParams(max_tokens=1, n=4, top_p=0.5, seed=0, outputs=())
    ) == {("sampling_option", "top_p"), ("sampling_option", "seed")}
    assert needs("zero_grad") == set()


def test_the_table_is_consistent():
    for name, row in OPERATIONS.items():
        assert row.name == name
        assert row.request.__module__.startswith("remote_rl.requests")
        if row.stream is not Stream.TRAINING:
            rules = (row.accumulates, row.dirties, row.needs_clean, row.clears)
            assert rules == (False,) * 4, name
    assert len({row.request for row in OPERATIONS.values()}) == len(OPERATIONS)
    own = {name for name, row in OPERATIONS.items() if row.face == "dispatcher"}
    assert own == ALWAYS_OFFERED
