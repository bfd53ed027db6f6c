"""The policy's outputs and gradients against plain transformers on padded rows."""

import numpy as np
import pytest
import torch
from arctic_memory import peak_bytes
from arctic_models import ARCHITECTURES, VOCABULARY, tiny_model, write_model
from arctic_oracle import (
    NAMED_LOSSES,
    backward,
    gradients_of,
    largest_relative_difference,
    plain_gradients,
    plain_outputs,
    random_batch,
    random_cotangents,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from backends.arctic.training.attention import NAME
from backends.arctic.training.packing import pack
from backends.arctic.training.policy import OUTPUTS, PolicyModule
from remote_rl.errors import BackendError, UnsupportedError
from remote_rl.losses import resolve
from remote_rl.types import Batch

torch.set_num_threads(1)

CLOSE = 1e-11

#: Mistral's layers slide; its window is shorter than most texts of `random_batch`
MODELS = [
    *((name, tied, {}) for name in ARCHITECTURES for tied in (False, True)),
    ("mistral", False, {"sliding_window": 8}),
    (
        "qwen3",
        False,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
]
NAMES = [f"{name}{'-tied' * tied}{'-sliding' * bool(extra)}" for name, tied, extra in MODELS]
every_model = pytest.mark.parametrize("kind", MODELS, ids=NAMES)


def pair(kind, dtype=torch.float64, **options):
    """(policy, a plain model of its own) with the same weights."""
    name, tied, extra = kind
    model, plain = (tiny_model(name, tied=tied, **extra).to(dtype) for _ in range(2))
    if dtype == torch.float64:
        for each in (model, plain):
            use_wide_norms(each)
    plain.set_attn_implementation("sdpa")
    return PolicyModule(model, **options).train(), plain


def use_wide_norms(model):
    """Transformers' norms go through float32, which would hide what is below its rounding."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)


def policy_gradients(policy, batch, loss, pieces=None):
    """Name as the plain model has it to gradient, from pieces of rows."""
    policy.zero_grad()
    resolved = resolve(loss, batch)
    for rows in pieces or [np.arange(len(batch))]:
        piece = batch.select(rows)
        outputs = policy(pack(piece, "cpu"), OUTPUTS)
        backward(outputs, resolved.select(rows), piece)
    return {name.removeprefix("model."): grad for name, grad in gradients_of(policy).items()}


# -- outputs ----------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
def test_outputs_are_transformers_own(kind, dtype, tolerance):
    policy, plain = pair(kind, dtype)
    for seed in range(3):
        batch = random_batch(seed)
        with torch.no_grad():
            ours, theirs = policy(pack(batch, "cpu"), OUTPUTS), plain_outputs(plain, batch)
        for name in OUTPUTS:
            assert ours[name].dtype == dtype
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance)
        # the texts see something of each other, or the comparison would say little
        spread = theirs["logprobs"].std()
        assert spread > 0.5


@settings(max_examples=25)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    responses=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(MODELS),
)
def test_outputs_of_any_ragged_batch(prompts, responses, seed, kind):
    batch = random_batch(seed, prompt_lengths=tuple(prompts), response_lengths=tuple(responses))
    policy, plain = cached_pair(kind)
    with torch.no_grad():
        ours = policy(pack(batch, "cpu"), OUTPUTS)
        if len(batch.responses.values) == 0:
            assert all(len(output) == 0 for output in ours.values())
            return
        theirs = plain_outputs(plain, batch)
    for name in OUTPUTS:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-11)


PAIRS = {}


def cached_pair(kind):
    key = NAMES[MODELS.index(kind)]
    if key not in PAIRS:
        PAIRS[key] = pair(kind)
    return PAIRS[key]


def test_only_the_outputs_asked_for_are_given():
    policy, _ = cached_pair(MODELS[0])
    packed = pack(random_batch(0), "cpu")
    for asked in ({"logprobs"}, {"entropy"}, {"logprobs", "entropy"}):
        assert policy(packed, frozenset(asked)).keys() == asked
    with pytest.raises(UnsupportedError, match="no output 'values'; it has entropy, logprobs"):
        policy(packed, frozenset({"logprobs", "values"}))


def test_a_model_read_from_a_directory_in_bfloat16(tmp_path):
    path = write_model(tmp_path / "model", "qwen3", tied=True)
    assert {"config.json", "model.safetensors"} <= {file.name for file in path.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    policy = PolicyModule(model).train()
    batch = random_batch(0)
    outputs = policy(pack(batch, "cpu"), OUTPUTS)
    assert {output.dtype for output in outputs.values()} == {torch.float32}
    wide = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        theirs = plain_outputs(wide, batch)
    for name in OUTPUTS:
        assert float((outputs[name] - theirs[name]).detach().abs().mean()) < 0.05
    backward(outputs, resolve(NAMED_LOSSES["ppo"], batch), batch)
    assert policy.model.lm_head.weight.grad.dtype == torch.bfloat16


# -- gradients --------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("loss", NAMED_LOSSES)
def test_gradients_are_plain_autograds(kind, loss):
    policy, plain = cached_pair(kind)
    for seed in range(2):
        batch = random_batch(seed)
        ours = policy_gradients(policy, batch, NAMED_LOSSES[loss])
        theirs = plain_gradients(plain, batch, NAMED_LOSSES[loss])
        assert largest_relative_difference(ours, theirs) < CLOSE


@every_model
def test_gradients_of_cotangents(kind):
    policy, plain = cached_pair(kind)
    batch = random_batch(5)
    cotangents = random_cotangents(batch)
    ours = policy_gradients(policy, batch, cotangents)
    assert largest_relative_difference(ours, plain_gradients(plain, batch, cotangents)) < CLOSE


@every_model
def test_gradients_in_float32(kind):
    policy, plain = pair(kind, torch.float32)
    for loss in NAMED_LOSSES.values():
        batch = random_batch(1)
        ours, theirs = policy_gradients(policy, batch, loss), plain_gradients(plain, batch, loss)
        assert largest_relative_difference(ours, theirs) < 1e-5


@settings(max_examples=15)
@given(data=st.data(), loss=st.sampled_from(sorted(NAMED_LOSSES)), kind=st.sampled_from(MODELS))
def test_pieces_sharing_and_chunks_change_nothing(data, loss, kind):
    batch = random_batch(data.draw(st.integers(0, 100)))
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    pieces = np.split(np.array(order), cuts)
    policy, plain = cached_pair(kind)
    theirs = plain_gradients(plain, batch, NAMED_LOSSES[loss])
    head = policy.causal_lm.get_output_embeddings()
    whole, head.chunk = head.chunk, data.draw(st.integers(1, 60))
    try:
        ours = policy_gradients(policy, batch, NAMED_LOSSES[loss], pieces)
        unshared = unshare(batch)
        alone = policy_gradients(policy, unshared, NAMED_LOSSES[loss])
    finally:
        head.chunk = whole
    assert largest_relative_difference(ours, theirs) < CLOSE
    assert largest_relative_difference(alone, theirs) < CLOSE


def unshare(batch):
    """The same rows, each with a prompt of its own."""
    return batch.replace(
        prompts=batch.prompts.select(batch.prompt_index),
        prompt_index=np.arange(len(batch), dtype=np.int32),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", MODELS[:1] + MODELS[-2:], ids=NAMES[:1] + NAMES[-2:])
def test_gradient_checkpointing_changes_nothing(kind, reentrant):
    policy, plain = pair(kind, gradient_checkpointing=True, reentrant=reentrant)
    batch, loss = random_batch(2), NAMED_LOSSES["ppo with kl and entropy"]
    theirs = plain_gradients(plain, batch, loss)
    assert largest_relative_difference(policy_gradients(policy, batch, loss), theirs) < CLOSE
    with torch.no_grad():  # in training mode, without a warning, and back in training mode
        policy(pack(batch, "cpu"), OUTPUTS)
    assert all(module.training for module in policy.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_with_a_frozen_embedding(reentrant):
    kind = MODELS[0]
    policy, plain = pair(kind, gradient_checkpointing=True, reentrant=reentrant)
    for model in (policy.causal_lm, plain):
        model.get_input_embeddings().requires_grad_(False)
    batch, loss = random_batch(2), NAMED_LOSSES["ppo"]
    ours, theirs = policy_gradients(policy, batch, loss), plain_gradients(plain, batch, loss)
    assert largest_relative_difference(ours, theirs) < CLOSE


def test_an_empty_piece_reaches_every_parameter_with_zeros():
    for kind in MODELS[:2]:
        policy, _ = pair(kind)
        outputs = policy(pack(None, "cpu"), OUTPUTS)
        assert [len(output) for output in outputs.values()] == [0, 0]
        sum(output.sum() for output in outputs.values()).backward()
        gradients = [parameter.grad for parameter in policy.parameters()]
        assert all(gradient is not None and not gradient.any() for gradient in gradients)


# -- memory -----------------------------------------------------------------------------------


def training_peak(budget, **options):
    """Peak bytes of a forward and backward of one prompt and as many responses as the budget of
    packed tokens has room for."""
    policy, _ = pair(MODELS[0], torch.float32, **options)
    responses = (budget - 32) // 32
    batch = random_batch(0, prompt_lengths=(32,), response_lengths=(33,) * responses)
    packed, loss = pack(batch, "cpu"), NAMED_LOSSES["ppo"]
    assert packed.layout.length <= budget
    policy_gradients(policy, batch, loss)  # gradients exist, as in later passes
    return peak_bytes(lambda: backward(policy(packed, OUTPUTS), resolve(loss, batch), batch))


def test_peak_memory_is_linear_in_the_tokens_and_less_with_checkpointing():
    half, whole = (training_peak(budget, head_chunk=32) for budget in (1024, 2048))
    assert 1.5 * half < whole < 2.1 * half
    leaner = training_peak(2048, head_chunk=32, gradient_checkpointing=True)
    assert leaner < 0.8 * whole
    assert training_peak(2048, head_chunk=2048) > whole + 1024 * VOCABULARY * 4


# -- around it ------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_self_check_passes_and_leaves_no_trace(kind, checkpointing):
    policy, _ = pair(kind, torch.float32, gradient_checkpointing=checkpointing)
    assert policy.self_check() < 1e-4
    assert policy.causal_lm.config._attn_implementation == NAME
    assert all(module.training for module in policy.modules())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_generating_with_the_policys_model_is_refused_not_wrong():
    policy, _ = cached_pair(MODELS[0])
    with pytest.raises(BackendError, match="without a packed layout"):
        policy.model(input_ids=torch.tensor([[1, 2]]))


def test_two_models_and_layouts_never_mix():
    first, second = cached_pair(MODELS[0])[0], cached_pair(MODELS[6])[0]
    batches = [random_batch(seed) for seed in (1, 2)]
    alone = [model(pack(batch, "cpu"), OUTPUTS) for model in (first, second) for batch in batches]
    packs = [pack(batch, "cpu") for batch in batches]
    together = [[model(packed, OUTPUTS) for model in (first, second)] for packed in packs]
    crossed = [together[place][which] for which in (0, 1) for place in (0, 1)]
    for left, right in zip(alone, crossed, strict=True):
        for name in OUTPUTS:
            assert torch.equal(left[name], right[name])
    # and backward of the earlier one after the later one's forward
    first.zero_grad()
    sum(output.sum() for output in crossed[0].values()).backward()
    ours = gradients_of(first)
    first.zero_grad()
    sum(output.sum() for output in alone[0].values()).backward()
    assert largest_relative_difference(ours, gradients_of(first)) == 0


def test_a_batch_may_be_one_single_token():
    policy, plain = cached_pair(MODELS[1])
    batch = Batch(prompts=[[7]], prompt_index=[0], responses=[[9]], temperature=1.3)
    with torch.no_grad():
        ours = policy(pack(batch, "cpu"), OUTPUTS)["logprobs"]
        theirs = plain_outputs(plain, batch)["logprobs"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
