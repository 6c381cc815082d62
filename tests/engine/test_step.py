"""Results of a step on the host: paths, tokens, and which of them are invalid."""

import torch

from mtpkit.engine.steps.plan import Drafts, StepResult, Verdict, pack_result
from mtpkit.kernels import NO_TOKEN


def result_of(accepted, token_ids, drafts) -> StepResult:
    verdict = Verdict(torch.tensor(accepted), torch.tensor(token_ids))
    packed = pack_result(
        verdict, Drafts(torch.tensor(drafts, dtype=torch.int64).view(len(drafts), -1))
    )
    return StepResult.unpack(packed.numpy(), len(token_ids[0]) - 1)


def test_the_path_of_a_chain_is_its_accepted_tokens():
    result = result_of([2, 0, 1], [[4, 5, 6], [7, 0, 0], [8, 9, 0]], [[1, 2], [3, 1], [2, 2]])
    assert result.path.tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]
    assert result.accepted.tolist() == [2, 0, 1] and result.num_tokens.tolist() == [3, 1, 2]
    assert result.token_ids.tolist() == [[4, 5, 6], [7, 0, 0], [8, 9, 0]]
    assert result.drafts.tolist() == [[1, 2], [3, 1], [2, 2]] and result.bad_draft.tolist() == [
        0,
        0,
        0,
    ]
    assert result.log_probs is None


def test_tokens_end_where_the_logits_are_invalid():
    """A token of the path that is none ends a row; what lies behind the path says nothing."""
    result = result_of(
        [1, 1, 0], [[4, NO_TOKEN, 0], [NO_TOKEN, 5, 0], [7, NO_TOKEN, 0]], [[1, 2]] * 3
    )
    assert result.num_tokens.tolist() == [1, 0, 1] and result.accepted.tolist() == [1, 1, 0]


def test_the_first_bad_draft_counts():
    result = result_of(
        [0] * 4, [[1, 0, 0]] * 4, [[NO_TOKEN, 1], [1, NO_TOKEN], [NO_TOKEN, NO_TOKEN], [0, 1]]
    )
    assert result.bad_draft.tolist() == [1, 2, 1, 0]


def test_rows_that_do_not_sample_are_left_out_and_plain_decoding_has_no_drafts():
    result = result_of([0, 0, 0], [[3], [4], [5]], [[], []])
    assert result.path.tolist() == [[0], [0]] and result.token_ids.tolist() == [[3], [4]]
    assert result.num_tokens.tolist() == [1, 1] and result.bad_draft.tolist() == [0, 0]
