"""Which cases of the tests the two tiers run."""

import itertools
import multiprocessing
import subprocess
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
import torch.multiprocessing

from tests.shared import few_with_all

STARTERS = (subprocess, multiprocessing, torch.multiprocessing)
"""A test whose code names one of these modules, or leads to code that does, starts processes."""
HANDFUL = (
    "tests/cli/test_boundary.py::test_exit_code_and_line",
    "tests/engine/test_replicas.py::test_tokens_are_those_of_one_engine",
    "tests/engine/test_stages.py::test_two_ranks_decode_what_one_does",
    "tests/model/test_parallel.py::test_tensor_parallel",
    "tests/server/test_client.py::test_several_prompts_have_one_choice_each",
    "tests/training/test_kill.py::test_a_killed_run_goes_on_bit_for_bit",
    "tests/training/test_run.py::test_two_ranks_train_to_the_losses_of_one",
)
"""Functions of the fast tier that start processes, of which each costs seconds: one for each way
that the package has of being several processes."""


SLOW = (
    "tests/bench/test_bench_decode.py::test_a_broken_engine_is_not_timed",
    "tests/bench/test_bench_decode.py::test_a_mixture_of_experts_is_measured",
    "tests/bench/test_bench_decode.py::test_auto_among_a_tree_and_chains_is_timed",
    "tests/bench/test_bench_decode.py::test_broken_experts_are_not_timed",
    "tests/bench/test_bench_decode.py::test_trees_are_timed",
    "tests/bench/test_bench_decode.py::test_what_the_base_chose_is_compared_with_a_plain_forward_pass",
    "tests/bench/test_bench_kernels.py::test_every_op_is_checked_and_timed",
    "tests/bench/test_bench_train.py::test_losses_are_those_of_a_run_from_files",
    "tests/bench/test_no_prefix_cache.py::test_benchmarks_have_no_prefix_cache",
    "tests/checkpoint/test_deepseek.py::test_drafts_and_tokens_are_those_of_transformers",
    "tests/checkpoint/test_frozen_base.py::test_a_run_gives_its_base_back",
    "tests/checkpoint/test_quantized_families.py::test_every_family_keeps_its_matrices",
    "tests/cli/test_bench.py::test_decode_and_roofline_have_the_same_limit",
    "tests/cli/test_bench.py::test_one_layer_of_each_kind_tells_the_weights_of_a_shape",
    "tests/engine/prefix/test_broken.py::test_sabotage_is_seen",
    "tests/engine/prefix/test_cached_graphs.py::test_conversations_in_graphs",
    "tests/engine/prefix/test_equality.py::test_conversations_with_trees",
    "tests/engine/prefix/test_equality.py::test_eviction_and_preemption_under_load",
    "tests/engine/prefix/test_equality.py::test_heads_that_read_by_other_rules",
    "tests/engine/prefix/test_equality.py::test_heads_with_recurrent_state",
    "tests/engine/prefix/test_equality.py::test_outputs_that_end_by_a_stop_string_or_too_many_tokens",
    "tests/engine/prefix/test_equality.py::test_prompts_at_the_edges_of_blocks_and_checkpoints",
    "tests/engine/prefix/test_equality.py::test_ten_turns_of_every_kind_of_state",
    "tests/engine/prefix/test_equality.py::test_ten_turns_with_drafts_that_are_right_and_wrong",
    "tests/engine/prefix/test_equality.py::test_trees_of_drafts",
    "tests/engine/prefix/test_fuzz.py::test_random_histories",
    "tests/engine/test_adaptive.py::test_auto_decodes_the_same_tokens_while_k_changes",
    "tests/engine/test_adaptive.py::test_drafts_are_those_without_caches_while_k_changes",
    "tests/engine/test_ahead.py::test_drawn_drafts_do_not_depend_on_when_the_host_looks",
    "tests/engine/test_ahead.py::test_penalised_output_is_that_of_plain_decoding",
    "tests/engine/test_ahead.py::test_what_ends_a_request_inside_its_drafts",
    "tests/engine/test_broken_drafts.py::test_a_rejected_draft_that_is_not_finite_changes_no_token",
    "tests/engine/test_constrained_law.py::test_drafts_that_the_host_chose_are_not_taken_for_drawn_ones",
    "tests/engine/test_constrained_law.py::test_drawn_drafts_leave_the_law_of_constrained_outputs_alone",
    "tests/engine/test_device_state.py::test_requests_of_all_kinds_in_slots_that_others_had",
    "tests/engine/test_distribution.py::test_broken_rejection_is_found",
    "tests/engine/test_distribution.py::test_drawn_drafts_leave_the_law_alone",
    "tests/engine/test_distribution.py::test_drawn_trees_leave_the_law_alone",
    "tests/engine/test_distribution.py::test_four_outputs_of_each_prompt_follow_the_law",
    "tests/engine/test_distribution.py::test_plain_sampling_follows_the_law",
    "tests/engine/test_draft_lm_head.py::test_drafts_are_those_of_the_rounded_lm_head",
    "tests/engine/test_draft_lm_head.py::test_drawn_drafts_keep_the_law",
    "tests/engine/test_drafts.py::test_distinct_recurrent_heads_draft_as_without_caches",
    "tests/engine/test_drafts.py::test_drafts_are_the_same_alone_in_a_batch_in_chunks_and_after_preemption",
    "tests/engine/test_graphs.py::test_a_request_of_the_full_length_beside_short_ones",
    "tests/engine/test_graphs.py::test_auto_under_graphs",
    "tests/engine/test_graphs.py::test_auto_with_trees_under_graphs",
    "tests/engine/test_graphs.py::test_drafts_in_graphs_are_those_outside",
    "tests/engine/test_graphs.py::test_graphs_change_no_token",
    "tests/engine/test_graphs.py::test_layers_of_every_kind",
    "tests/engine/test_graphs.py::test_null_rows_leave_all_state_as_it_is",
    "tests/engine/test_graphs.py::test_penalties_in_graphs",
    "tests/engine/test_graphs.py::test_rules_about_tokens_and_log_probabilities",
    "tests/engine/test_graphs.py::test_trees",
    "tests/engine/test_half_states.py::test_a_prompt_that_comes_again_has_what_it_would_compute",
    "tests/engine/test_half_states.py::test_checkpoints_of_wider_states",
    "tests/engine/test_half_states.py::test_with_replay_states_stay_near_those_in_fp32_for_every_k",
    "tests/engine/test_half_states.py::test_with_snapshots_no_state_depends_on_k",
    "tests/engine/test_head_rules.py::test_steps_that_graphs_replay",
    "tests/engine/test_head_rules.py::test_tokens_and_drafts",
    "tests/engine/test_kv_fp8.py::test_a_hit_in_the_prefix_cache_changes_no_token",
    "tests/engine/test_kv_fp8.py::test_drafts_are_those_of_rounded_keys_and_values",
    "tests/engine/test_mixed.py::test_mixing_changes_no_draft",
    "tests/engine/test_mixed.py::test_one_token_chunks_and_chunks_of_a_decode_rows_width_beside_decode_rows",
    "tests/engine/test_mixed.py::test_preemption_in_the_middle_of_mixed_steps",
    "tests/engine/test_no_wait.py::test_nor_does_one_of_trees",
    "tests/engine/test_not_finite.py::test_a_request_of_nan_leaves_nothing_in_its_slot_or_blocks",
    "tests/engine/test_output_kinds.py::test_what_is_new_adds_up_to_the_whole",
    "tests/engine/test_parallel.py::test_random_histories",
    "tests/engine/test_parallel.py::test_streams_hold_the_outputs_with_something_new",
    "tests/engine/test_poisoned_histories.py::test_eagerly",
    "tests/engine/test_poisoned_histories.py::test_in_graphs",
    "tests/engine/test_poisoned_histories.py::test_with_a_prefix_cache",
    "tests/engine/test_poisoned_histories.py::test_with_drafts_that_the_engine_chooses",
    "tests/engine/test_speculate.py::test_drawn_drafts_do_not_change_the_tokens_of_k_0",
    "tests/engine/test_speculate.py::test_graphs_decode_as_eager_steps_do",
    "tests/engine/test_structured.py::test_drafts_change_no_output",
    "tests/engine/test_structured.py::test_graphs_constrain_as_eager_steps_do",
    "tests/engine/test_structured.py::test_masks_along_drafts_are_those_of_one_token_after_another",
    "tests/engine/test_structured.py::test_shapes_of_drafts_change_from_step_to_step",
    "tests/engine/test_text_params.py::test_pieces_add_up_with_stop_strings_and_special_tokens",
    "tests/engine/test_text_params.py::test_stop_strings_wait_for_min_tokens",
    "tests/engine/test_token_rules.py::test_outputs_follow_the_rules",
    "tests/engine/test_trees.py::test_no_token_changes",
    "tests/engine/test_trees.py::test_penalties_and_seeds",
    "tests/engine/test_trees.py::test_steps_of_trees_and_of_chains",
    "tests/integration/test_block_families.py::test_any_number_of_drafts_gives_the_tokens_of_none",
    "tests/integration/test_block_families.py::test_any_number_of_drafts_of_other_heads_of_glm",
    "tests/integration/test_family_acceptance.py::test_the_engine_counts_what_teacher_forcing_predicts",
    "tests/integration/test_family_losslessness.py::test_drafts_change_no_token_and_are_those_of_whole_sequences",
    "tests/integration/test_head_rules.py::test_the_engine_counts_what_teacher_forcing_predicts",
    "tests/integration/test_sampled_acceptance.py::test_greedy_counts_are_equal",
    "tests/integration/test_sampled_acceptance.py::test_sampled_counts_are_as_expected",
    "tests/integration/test_toy_kind.py::test_drafts_change_no_token_under_either_rollback",
    "tests/integration/test_toy_kind.py::test_what_was_exported_decodes",
    "tests/kernels/test_acceptance.py::test_rejection_gives_the_target_distribution",
    "tests/kernels/test_ssd_varlen.py::test_states_are_kept_at_regular_positions",
    "tests/kernels/test_ssm_update.py::test_replay",
    "tests/kernels/test_state_rounding.py::test_ends_of_chunks",
    "tests/kernels/test_state_rounding.py::test_folds",
    "tests/kernels/test_state_rounding.py::test_snapshots_do_not_depend_on_the_tokens_of_a_step",
    "tests/kernels/test_trees.py::test_replay",
    "tests/kernels/test_trees.py::test_snapshots",
    "tests/model/test_steps.py::test_a_request_goes_on_where_what_a_chunk_leaves_is_put",
    "tests/training/test_block_families.py::test_heads_train_and_go_back",
    "tests/training/test_cache.py::test_a_damaged_shard_is_named_and_written_anew",
    "tests/training/test_cache.py::test_heads_learn_the_same_to_the_bit",
    "tests/training/test_cache.py::test_narrow_caches_give_nearly_the_same_losses",
    "tests/training/test_cache.py::test_the_base_is_not_in_memory",
    "tests/training/test_depths.py::test_recurrent_heads_train_through_the_kernels_as_through_plain_pytorch",
    "tests/training/test_evaluation.py::test_a_directory_of_either_layout",
    "tests/training/test_evaluation.py::test_a_model_of_weights_that_are_no_numbers_is_not_measured",
    "tests/training/test_kill.py::test_a_killed_run_goes_on_bit_for_bit",
    "tests/training/test_quantized_base.py::test_a_run_goes_on_as_if_it_had_not_stopped",
    "tests/training/test_quantized_base.py::test_a_run_keeps_its_base_as_it_is_stored",
    "tests/training/test_quantized_base.py::test_acceptance_is_that_of_the_exported_file",
    "tests/training/test_quantized_base.py::test_no_matrix_of_the_base_is_ever_widened",
    "tests/training/test_run.py::test_a_mixture_without_mlps_is_trained_by_default",
    "tests/training/test_run.py::test_heads_learn_what_the_base_says",
    "tests/training/test_run.py::test_resuming_gives_the_same_losses_to_the_bit",
    "tests/training/test_run.py::test_two_ranks_train_to_the_losses_of_one",
    "tests/training/test_run.py::test_what_is_not_finite_ends_the_run_as_it_was_saved_last",
)
"""Functions of which each case takes 0.8 s or more. The fast tier runs their first case."""


def function_name(item: pytest.Item) -> str:
    """The id of a case without its parameters."""
    return item.nodeid.partition("[")[0]


def fast(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first and the last case of each function, of slow ones the first alone, without functions
    that start processes.

    Between these two every parameter of a full product has two values. Cases that need a GPU do not
    count, since they are skipped, nor do those of a reference twin beside cases of its kernel: the
    engine's tests run the twins.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gpu"):
            functions[function_name(item)].append(item)

    chosen = []
    for name, cases in functions.items():
        cases = [case for case in cases if not _of_twin(case)] or cases
        if name in HANDFUL or not starts_processes(cases[0]):
            chosen.append(cases[0])
            if len(cases) > 1 and name not in SLOW:
                chosen.append(cases[-1])
    return chosen


def _of_twin(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("twin") == "reference"


def thinned(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Few cases of each function of the kernels' tests: every two values of different parameters
    that were together in a case, the twin among them, are together in one that remains.

    A full product of four parameters takes five times as long, and kernels break at a value or at
    two of them. Cases that need a GPU remain: there a product costs little.
    """
    functions: dict[str, dict[str, set]] = defaultdict(dict)
    for item in items:
        parametrized = hasattr(item, "callspec") and not item.get_closest_marker("gpu")
        if parametrized and item.nodeid.startswith("tests/kernels/"):
            values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
            pairs = set(itertools.combinations(values, 2))
            functions[function_name(item)][item.nodeid] = pairs or set(values)

    left_out = set()
    for cases in functions.values():
        # of a product the first and the last case share no value: both remain, as in `fast`
        first, *others = cases.items()
        last = others[-1:]
        left_out |= cases.keys() - set(few_with_all(dict([first, *last, *others[:-1]])))
    return [item for item in items if item.nodeid not in left_out]


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test or a fixture of it has code that names a module which starts processes."""
    seen: set[object] = set()
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(fixture.func for made in fixtures for fixture in made)]
    return any(_leads_to_processes(function, seen) for function in functions)


def _leads_to_processes(value: object, seen: set[object]) -> bool:
    """Whether a module starts processes, or the code of a function or class of the tests does."""
    if isinstance(value, types.ModuleType):
        return value in STARTERS
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, types.FunctionType | type) or value in seen:
        return False
    if not value.__module__.startswith("tests"):
        return False
    seen.add(value)
    parts = vars(value).values() if isinstance(value, type) else _named(value)
    return any(_leads_to_processes(part, seen) for part in parts)


def _named(function: types.FunctionType) -> Iterator[object]:
    """What the code of a function names outside of it: globals, and variables of the function
    around it."""
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # a variable that is not assigned yet
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for scope in (function.__globals__, *_modules(function, code)):
            yield from (scope.get(name) for name in code.co_names)


def _modules(function: types.FunctionType, code: types.CodeType) -> Iterator[dict[str, object]]:
    """The globals of modules of the tests that code names, since it may name what is in them."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and value.__name__.startswith("tests"):
            yield vars(value)
