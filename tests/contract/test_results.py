"""AdamW, results, receipts and Tensor: checks, freezing, pickling, reprs."""

import copy
import pickle

import attrs
import numpy as np
import pytest

from remote_rl.errors import InvalidRequestError, UnknownNameError
from remote_rl.types import (
    AdamW,
    CheckpointInfo,
    Done,
    ExportReceipt,
    ForwardBackwardResult,
    LoadResult,
    OptimStepResult,
    Outputs,
    Ragged,
    SyncReceipt,
    Tensor,
    WeightsVersion,
)
from remote_rl.types.results import TENSOR_DTYPES

# -- AdamW --------------------------------------------------------------------------------------


def test_adamw_has_the_defaults_of_torch():
    step = AdamW(lr=1e-3)
    assert (step.betas, step.eps, step.weight_decay, step.max_grad_norm) == (
        (0.9, 0.999),
        1e-8,
        0.01,
        None,
    )
    assert AdamW(lr=np.float32(0.5), betas=[np.float32(0.5), np.float64(0.25)]) == AdamW(
        lr=0.5, betas=(0.5, 0.25)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1}, "AdamW.lr must be a finite number >= 0, not -1"),
        ({"lr": "1e-3"}, "AdamW.lr must be a finite number"),
        ({"lr": float("inf")}, "AdamW.lr must be a finite number"),
        ({"betas": 0.9}, r"AdamW.betas must be two numbers in \[0, 1\), not 0.9"),
        ({"betas": (0.9,)}, "AdamW.betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "AdamW.betas must be two numbers"),
        ({"betas": (True, 0.9)}, "AdamW.betas must be two numbers"),
        ({"betas": "ab"}, "AdamW.betas must be two numbers"),
        ({"eps": -1e-9}, "AdamW.eps must be"),
        ({"weight_decay": None}, "AdamW.weight_decay must be"),
        ({"max_grad_norm": 0}, "AdamW.max_grad_norm must be a finite number > 0"),
    ],
)
def test_adamw_refusals(changes, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        AdamW(**{"lr": 1e-3, **changes})
    assert caught.value.details["field"] == next(iter(changes))


# -- Outputs ------------------------------------------------------------------------------------


def outputs():
    return Outputs(values={"logprobs": Ragged.from_rows([[-1.0], []])}, version=3)


def test_outputs_are_attributes_and_items():
    assert outputs().logprobs == outputs()["logprobs"] == Ragged.from_rows([[-1.0], []])
    with pytest.raises(UnknownNameError, match="no 'logprob'; did you mean 'logprobs'"):
        outputs().logprob
    assert not hasattr(outputs(), "entropy")


def test_outputs_survive_pickle_and_copy():
    assert pickle.loads(pickle.dumps(outputs())) == outputs()
    assert copy.deepcopy(outputs()) == copy.copy(outputs()) == outputs()


# -- results and receipts -----------------------------------------------------------------------

RESULTS = [
    AdamW(lr=0.1),
    ForwardBackwardResult(value=1.5, metrics={"kl": 0.5}, version=2),
    OptimStepResult(grad_norm=np.float32(1), skipped=False, version=np.int64(3)),
    Done(version=0),
    CheckpointInfo(name="a", version=1, optimizer=True, metadata={"step": 3}),
    LoadResult(name="a", version=3, saved_version=1, optimizer=False),
    ExportReceipt(name="e", path="/tmp/e", files=["config.json"], bytes=10, version=1),
    SyncReceipt(
        version=1,
        tensors=2,
        bytes=8,
        seconds=0.5,
        source_fingerprint="f",
        sampler_fingerprint="f",
    ),
    WeightsVersion(trainer=2, sampler=1, label="step"),
    WeightsVersion(trainer=2),
]
NAMES = [type(value).__name__ for value in RESULTS]


@pytest.mark.parametrize("value", RESULTS, ids=NAMES)
def test_results_are_frozen_values_that_pickle(value):
    assert pickle.loads(pickle.dumps(value)) == value
    assert repr(value).startswith(type(value).__name__ + "(")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, attrs.fields(type(value))[0].name, None)


@pytest.mark.parametrize("value", RESULTS, ids=NAMES)
def test_results_name_what_is_wrong(value):
    given = attrs.asdict(value, recurse=False)
    name = attrs.fields(type(value))[0].name
    with pytest.raises(UnknownNameError, match=f"no field '{name}_'; did you mean '{name}'"):
        type(value)(**given, **{f"{name}_": 1})
    with pytest.raises(InvalidRequestError, match=f"needs '{name}'; pass {name}="):
        type(value)(**{key: each for key, each in given.items() if key != name})


@pytest.mark.parametrize("value", RESULTS[1:], ids=NAMES[1:])
def test_a_negative_version_is_refused_by_name(value):
    name = "trainer" if isinstance(value, WeightsVersion) else "version"
    with pytest.raises(InvalidRequestError, match=f"{type(value).__name__}.{name} must be a whole"):
        attrs.evolve(value, **{name: -1})


def test_numbers_of_results_are_plain():
    step = RESULTS[2]
    assert (type(step.grad_norm), type(step.version)) == (float, int)
    with pytest.raises(InvalidRequestError, match=r"OptimStepResult.skipped must be True or False"):
        attrs.evolve(step, skipped=1)
    with pytest.raises(
        InvalidRequestError, match=r"CheckpointInfo.name must be a non-empty string"
    ):
        attrs.evolve(RESULTS[4], name="")
    with pytest.raises(InvalidRequestError, match=r"SyncReceipt.tensors must be a whole number"):
        attrs.evolve(RESULTS[7], tensors=-1)


# -- Tensor -------------------------------------------------------------------------------------

NUMPY_TAGS = [tag for tag in TENSOR_DTYPES if tag != "bfloat16" and not tag.startswith("float8")]


@pytest.mark.parametrize("tag", NUMPY_TAGS)
def test_tensor_of_numpy_shares_and_tags(tag):
    array = np.zeros((2, 3), tag)
    tensor = Tensor.of(array)
    assert tensor.dtype == tag
    assert tensor.shape == (2, 3)
    assert tensor.nbytes == array.nbytes
    assert np.shares_memory(tensor.data, array)
    assert Tensor.of(tensor) is tensor
    assert repr(tensor) == f"Tensor({tag}, [2, 3])"
    back = pickle.loads(pickle.dumps(tensor))
    assert (back.dtype, back.data.tolist()) == (tag, array.tolist())


@pytest.mark.parametrize(
    ("tag", "dtype"),
    [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8), ("float8_e5m2", np.uint8)],
)
def test_dtypes_that_numpy_lacks_hold_their_bits(tag, dtype):
    assert Tensor(data=np.zeros(4, dtype), dtype=tag).nbytes == 4 * np.dtype(dtype).itemsize
    with pytest.raises(InvalidRequestError, match=f"a {tag} Tensor holds .* data, not float32"):
        Tensor(data=np.zeros(4, np.float32), dtype=tag)


def test_tensor_keeps_scalars_scalar_and_makes_views_contiguous():
    assert Tensor.of(np.float32(3)).shape == ()
    assert Tensor.of([1.0, 2.0]).dtype == "float64"
    turned = Tensor.of(np.arange(6, dtype=np.float32).reshape(2, 3).T)
    assert turned.data.flags.c_contiguous
    assert turned.data.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tensor_refusals_say_what_would_do():
    with pytest.raises(InvalidRequestError, match="complex64 can't be pushed; cast it to one of"):
        Tensor.of(np.zeros(1, np.complex64))
    with pytest.raises(InvalidRequestError, match="did you mean 'bfloat16'"):
        Tensor(data=np.zeros(1, np.uint16), dtype="bfloat")
    assert Tensor(data=np.zeros(1, np.float32), dtype=np.dtype(np.float32)).dtype == "float32"
