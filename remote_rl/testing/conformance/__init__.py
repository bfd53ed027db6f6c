"""Testing: the conformance suite, which says whether a backend or server is right (imports pytest
and its own modules).

| class            | what it checks                                                                |
|------------------|-------------------------------------------------------------------------------|
| `Refusals`       | info; what isn't declared is refused by name; bad ids, lengths and names     |
| `Outputs`        | forward: alignment, the full vocabulary, entropy, batching, order            |
| `SampledLogprobs`| the temperature rule, alignment and truncation of the sampler's logprobs     |
| `LossValues`     | values of losses: formulas, denominators, masks, weights, scale              |
| `Gradients`      | every token trained, slopes, accumulation, cotangents, dirty gradients       |
| `Counts`         | tokens and FLOPs that operations say they have computed                      |
| `Optimizer`      | every knob of AdamW with every call, skipped steps                           |
| `Snapshots`      | snapshots, the reference, reset                                              |
| `Checkpoints`    | save and load with and without optimizer, lists, deletes, exports, downloads |
| `Sampling`       | counts, seeds, streaming, routing, tokenizer                                 |
| `Endings`        | ends, stop ids and strings, min_tokens, include_stop                         |
| `Control`        | abort, pause, resume, sleep, wake                                            |
| `Delivery`       | sync, receipts, staleness, labels, versions, in_flight                       |
| `Pushes`         | push, whole and in parts                                                     |
| `ExactlyOnce`    | resent messages, conflicts, gaps, tombstones                                 |
| `Suite`          | all of them                                                                  |

A test module of your own runs them:

    from remote_rl import connect
    from remote_rl.testing import conformance

    @pytest.fixture(scope="module")
    def conformance_session(tmp_path_factory):
        with connect("mine", checkpoint_dir=tmp_path_factory.mktemp("run")) as session:
            yield session

    class TestMyBackend(conformance.Suite):
        tolerance = 1e-4

`Conformance` says what else can be overridden, docs/conformance.md how to read a failure, and
`remote-rl conformance TARGET` runs the suite without a module.
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "the conformance suite needs pytest: pip install 'remote-rl[testing]'"
    ) from error

# its asserts then say the values that they compared
_MODULES = (
    *("base", "checks", "probe", "refusals", "outputs", "sampled_logprobs", "loss_values"),
    *(
        "gradients",
        "counts",
        "optimizer",
        "snapshots",
        "checkpoints",
        "sampling",
        "endings",
        "control",
        "delivery",
    ),
    *("pushes", "exactly_once"),
)
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _MODULES))

from .base import Conformance  # noqa: E402
from .checkpoints import Checkpoints  # noqa: E402
from .control import Control  # noqa: E402
from .counts import Counts  # noqa: E402
from .delivery import Delivery  # noqa: E402
from .endings import Endings  # noqa: E402
from .exactly_once import ExactlyOnce  # noqa: E402
from .gradients import Gradients  # noqa: E402
from .loss_values import LossValues  # noqa: E402
from .optimizer import Optimizer  # noqa: E402
from .outputs import Outputs  # noqa: E402
from .pushes import Pushes  # noqa: E402
from .refusals import Refusals  # noqa: E402
from .sampled_logprobs import SampledLogprobs  # noqa: E402
from .sampling import Sampling  # noqa: E402
from .snapshots import Snapshots  # noqa: E402

__all__ = [
    "Checkpoints",
    "Conformance",
    "Control",
    "Counts",
    "Delivery",
    "Endings",
    "ExactlyOnce",
    "Gradients",
    "LossValues",
    "Optimizer",
    "Outputs",
    "Pushes",
    "Refusals",
    "SampledLogprobs",
    "Sampling",
    "Snapshots",
    "Suite",
]


class Suite(
    Refusals,
    Outputs,
    SampledLogprobs,
    LossValues,
    Gradients,
    Counts,
    Optimizer,
    Snapshots,
    Checkpoints,
    Sampling,
    Endings,
    Control,
    Delivery,
    Pushes,
    ExactlyOnce,
):
    """Every test."""
