"""Trees of drafts from heads that were trained on the tiny base of the examples."""

from mtpkit.engine import LLM
from tests.integration.front_doors import PROMPTS, TOKENS, greedy


def test_a_tree_accepts_more_than_the_chain_inside(trained, prompts, answers):
    """With the same tokens, which are the base's own."""
    lengths = []
    for settings in (dict(num_speculative_tokens=2), dict(speculative_token_tree=[3, 2])):
        llm = LLM(
            trained.hf,
            max_num_seqs=PROMPTS,
            max_model_len=512,
            dtype="float32",
            device="cpu",
            **settings,
        )
        outputs = llm.generate(prompts, greedy(TOKENS))
        pairs = zip(prompts, outputs, answers, strict=True)
        assert all(
            answer[: len(prompt) + TOKENS] == prompt + out.outputs[0].token_ids
            for prompt, out, answer in pairs
        )
        lengths.append(llm.stats().acceptance_length)
    assert lengths[1] > lengths[0] + 0.05 > 1.05
    first = llm.stats().acceptance.ranks_per_depth[0]
    assert first[0] > first[1] > first[2], "the heads' better candidates are right more often"
