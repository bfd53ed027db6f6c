"""Every deliberately broken backend fails at the right test, and only there.

Those of NAMED run the whole suite. The others run the areas of the tests that must fail, and with
REMOTE_RL_NIGHTLY=1 the whole suite too.
"""

from __future__ import annotations

import os
from pathlib import Path

import broken_backends as broken
import pytest
from broken_backends import Broken, Resending

from remote_rl import connect
from remote_rl.testing import conformance
from remote_rl.testing.conformance.runner import Target, run

#: backend -> exactly the tests that fail on it; those that users have reported, of other systems
NAMED: dict[type[Broken], set[str]] = {
    broken.ForwardOffByOne: {
        "test_entry_t_of_a_forward_belongs_to_response_token_t[short]",
        "test_entry_t_of_a_forward_belongs_to_response_token_t[long]",
    },
    broken.TrainerIgnoresTemperature: {
        "test_sampler_and_trainer_agree_at_every_temperature[0.7]",
        "test_sampler_and_trainer_agree_at_every_temperature[1.3]",
        "test_sampler_and_trainer_agree_at_every_temperature[1.3 and 0.7]",
    },
    broken.MaskInDenominator: {
        "test_denominators_count_what_the_mask_counts[token_mean]",
        "test_denominators_count_what_the_mask_counts[sequence_mean_token_sum]",
        "test_denominators_count_what_the_mask_counts[sequence_mean_token_mean]",
        "test_denominators_count_what_the_mask_counts[sequence_mean_token_sum_norm]",
    },
    broken.LastTokenNeverTrained: {
        "test_every_response_token_is_trained[short]",
        "test_every_response_token_is_trained[long]",
    },
    broken.GradientDoubledOnResend: {"test_a_resent_forward_backward_adds_its_gradient_once"},
    broken.WeightDecayIgnored: {"test_weight_decay_shrinks_the_weights"},
    broken.OptimizerRestoredAnyway: {"test_a_load_without_the_optimizer_begins_a_fresh_one"},
    broken.VersionRepeats: {"test_versions_rise_with_every_change_and_never_repeat"},
    broken.SeedIgnored: {"test_a_seed_decides_the_samples"},
    broken.AbortAsLength: {"test_an_abort_is_told_apart_from_length_and_stop"},
    broken.TruncatedLogprobs: {
        "test_truncation_leaves_logprobs_those_of_the_full_vocabulary[top_p]",
        "test_truncation_leaves_logprobs_those_of_the_full_vocabulary[top_k]",
        "test_truncation_leaves_logprobs_those_of_the_full_vocabulary[min_p]",
        "test_truncation_leaves_logprobs_those_of_the_full_vocabulary[min_tokens]",
    },
    broken.StopStringKept: {
        "test_a_stop_string_ends_a_sample_and_is_left_out",
        "test_stop_strings_end_every_sample_of_every_prompt",
    },
    broken.StopStringNeverKept: {"test_a_stop_string_stays_where_it_is_included"},
    # without it nothing is left out of the draw
    broken.MinTokensIgnored: {
        "test_no_end_comes_before_min_tokens",
        "test_an_end_comes_right_after_min_tokens",
        "test_truncation_leaves_logprobs_those_of_the_full_vocabulary[min_tokens]",
    },
    broken.SyncDeliversNothing: {"test_a_sync_delivers_the_weights"},
}
#: and more
OTHERS: dict[type[Broken], set[str]] = {
    broken.LongResponsesCut: {"test_every_response_token_is_trained[long]"},
    broken.LongForwardsCut: {"test_entry_t_of_a_forward_belongs_to_response_token_t[long]"},
    # of both halves' long texts, since the sampler sees the whole prompt
    broken.LongPromptsCut: {
        "test_entry_t_of_a_forward_belongs_to_response_token_t[long]",
        "test_entry_t_of_a_sample_belongs_to_its_token_t[long]",
        "test_every_response_token_is_trained[long]",
    },
    broken.LastMicroBatchDropped: {"test_every_row_counts_whatever_their_number"},
    broken.PromptsCountedForEachPiece: {
        "test_counts_of_parts_add_up",
        "test_counts_do_not_depend_on_the_order_of_rows",
    },
    broken.BackwardNotCounted: {"test_what_is_computed_is_counted"},
    broken.HalfPrecisionAccumulator: {"test_small_gradients_add_up_beside_a_large_one"},
    broken.TemperatureOfTheFirstRow: {
        "test_sampler_and_trainer_agree_at_every_temperature[1.3 and 0.7]"
    },
    broken.EntropyIgnoresTemperature: {"test_entropies_are_those_of_the_full_vocabulary[0.5]"},
    broken.GradientIgnoresTemperature: {"test_the_gradient_is_the_slope_of_the_value"},
    broken.PenaltiesUnmasked: {
        "test_masks_and_weights_hold_for_every_term[PPO of sequence ratios]"
    },
    broken.EntropyDetached: {"test_masks_and_weights_hold_for_every_term[PPO of sequence ratios]"},
    broken.GradientTwice: {"test_the_gradient_is_the_slope_of_the_value"},
    broken.StepTwiceOnResend: {"test_a_resent_optim_step_steps_once"},
    broken.BetasIgnored: {"test_betas_are_those_of_each_call"},
    # a drowning eps is also what makes AdamW plain descent there
    broken.EpsIgnored: {
        "test_eps_is_added_to_the_root_of_the_second_moment",
        "test_the_gradient_is_the_slope_of_the_value",
    },
    broken.ClippingIgnored: {"test_max_grad_norm_scales_the_gradient"},
    broken.NormAfterClipping: {"test_the_gradient_norm_is_that_before_clipping"},
    broken.SkipUnsaid: {"test_a_gradient_that_is_not_finite_skips_the_step"},
    broken.SnapshotFollows: {"test_a_snapshot_keeps_the_weights_of_its_time"},
    broken.RestoreKeepsGradient: {"test_a_snapshot_is_restored"},
    broken.ReferenceOfASnapshotIsCurrent: {"test_the_reference_is_set_to_a_snapshot"},
    broken.ReferenceNotInCheckpoints: {"test_a_checkpoint_holds_the_reference"},
    broken.OptimizerStaysCold: {"test_a_load_with_the_optimizer_goes_on_as_if_never_stopped"},
    broken.SamplerIgnoresTemperature: {
        "test_sampler_and_trainer_agree_at_every_temperature[0.7]",
        "test_sampler_and_trainer_agree_at_every_temperature[1.3]",
        "test_sampler_and_trainer_agree_at_every_temperature[1.3 and 0.7]",
    },
    broken.UnseededByItself: {
        "test_generates_without_a_seed_repeat_after_a_reset",
        "test_a_checkpoint_holds_the_count_of_unseeded_generates",
    },
    broken.SamplerOffByOne: {
        "test_entry_t_of_a_sample_belongs_to_its_token_t[short]",
        "test_entry_t_of_a_sample_belongs_to_its_token_t[long]",
    },
    broken.LongSamplesUnscored: {"test_entry_t_of_a_sample_belongs_to_its_token_t[long]"},
    broken.StopIdAsLength: {
        "test_a_stop_id_ends_a_sample_and_is_kept",
        "test_stop_ids_end_every_sample_of_every_prompt",
    },
    broken.StopsOfSeveralIgnored: {
        "test_no_end_comes_before_min_tokens",
        "test_stop_ids_end_every_sample_of_every_prompt",
        "test_stop_strings_end_every_sample_of_every_prompt",
    },
    broken.MinTokensOneTooMany: {"test_an_end_comes_right_after_min_tokens"},
    broken.StopStringsIgnoreMinTokens: {"test_stop_strings_count_after_min_tokens"},
    broken.DrawnLogprobsIgnoreMinTokens: {
        "test_truncation_leaves_logprobs_those_of_the_full_vocabulary[min_tokens]"
    },
    broken.PromptsShareTheirSeed: {"test_samples_of_a_repeated_prompt_differ"},
    broken.GreedyIsCertain: {"test_a_temperature_of_zero_takes_the_likeliest"},
    broken.CacheSaltMatters: {"test_routing_hints_change_no_sample[cache_salt]"},
    broken.SamplesOfAPromptAreOne: {"test_samples_of_a_prompt_differ"},
    broken.PauseIgnored: {
        "test_a_pause_holds_generates_until_resume",
        "test_an_abort_means_those_it_names",
    },
    broken.SamplerFollowsTrainer: {"test_the_sampler_keeps_its_weights_until_a_sync"},
    broken.SyncOfSomeTensors: {"test_a_sync_delivers_the_weights"},
    broken.PartsServedAtOnce: {"test_the_sampler_changes_only_when_a_push_is_whole"},
    broken.OffsetsOfPiecesIgnored: {"test_a_push_in_parts_is_the_same_push"},
    broken.ExportOfTheBase: {"test_an_export_holds_the_current_weights"},
    broken.LabelLost: {
        "test_a_label_travels_onto_the_samples[7]",
        "test_a_label_travels_onto_the_samples[epoch-1]",
    },
    broken.ReceiptOfNothing: {"test_a_receipt_proves_the_delivery"},
}
NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"


def areas_of(tests: set[str]) -> set[str]:
    """The classes of the suite that these tests belong to."""
    functions = [getattr(conformance.Suite, name.partition("[")[0]) for name in tests]
    return {function.__qualname__.partition(".")[0] for function in functions}


def failures(backend: type[Broken], folder: Path, areas: set[str]) -> dict[str, str]:
    """Test to reason, of those that fail on it."""
    made = backend()
    session = connect(made, checkpoint_dir=folder)
    if made.again is not None:
        connection = session._connection
        connection.transport = Resending(connection.transport, made.again)
    target = Target(session=session, tolerance=1e-5, learning_rate=1e-2)
    try:
        reports = run(target, areas=areas)
    finally:
        session.detach()
    assert len(reports) > (1 if areas else 100)
    return {report.name: report.reason for report in reports if report.verdict == "failed"}


@pytest.mark.parametrize("backend", NAMED, ids=lambda backend: backend.__name__)
def test_it_fails_at_the_right_test_and_only_there(backend: type[Broken], tmp_path: Path) -> None:
    failed = failures(backend, tmp_path, areas=set())
    assert set(failed) == NAMED[backend], failed


def test_a_weight_sync_that_delivers_nothing_and_says_success__verl_7495(tmp_path: Path) -> None:
    """Whoever reported it found out after two months; the suite says what was wrong."""
    (reason,) = failures(broken.SyncDeliversNothing, tmp_path, {"Delivery"}).values()
    assert "logprobs of sampler and trainer" in reason, reason


@pytest.mark.parametrize("backend", OTHERS, ids=lambda backend: backend.__name__)
def test_others_do_too(backend: type[Broken], tmp_path: Path) -> None:
    areas = set() if NIGHTLY else areas_of(OTHERS[backend])
    failed = failures(backend, tmp_path, areas)
    assert set(failed) == OTHERS[backend], failed


def test_every_broken_backend_is_in_one_of_the_tables() -> None:
    classes = {
        value
        for name, value in vars(broken).items()
        if isinstance(value, type) and issubclass(value, Broken) and not name.startswith("_")
    } - {Broken}
    assert classes == set(NAMED) | set(OTHERS)
    assert not set(NAMED) & set(OTHERS)
    assert all(backend.__doc__ for backend in classes)
