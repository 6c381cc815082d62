"""Rules for Qwen3-Next and Qwen3.5 in vLLM and SGLang that the facts of `Serving` cannot
express."""

import re
from collections.abc import Iterator

from mtpkit.checkpoint.families.serving import Finding, Need, Rule, Server, Subject
from mtpkit.config.sections import AttentionConfig, MlpConfig

INTERVAL = 4
"""Default of `full_attention_interval`: every fourth layer is attention."""
VISION = "model.visual."
"""Prefix of the vision tower's tensors."""

_PACKED = r"\.experts\.(gate_up_proj|down_proj)"


def interval(prefix: str = "") -> Rule:
    """SGLang chooses attention layers by `full_attention_interval` and ignores `layer_types`.
    Reading a config refuses files in which the two differ, so this rule checks only files without
    the interval."""

    def rule(subject: Subject) -> Iterator[Finding]:
        attention = [
            n
            for n, letter in enumerate(subject.config.pattern[::2])
            if letter == AttentionConfig.letter
        ]
        usual = [*range(INTERVAL - 1, len(subject.config.pattern) // 2, INTERVAL)]
        if subject.setting(f"{prefix}full_attention_interval") is None and attention != usual:
            text = (
                f"{prefix}full_attention_interval is absent, which counts as {INTERVAL}: attention"
                f" is in {attention}"
            )
            yield Finding(f"{text}, not in layers {usual}", True, ("sglang",))

    return rule


def dense_layers(subject: Subject) -> Iterator[Finding]:
    """SGLang builds experts in every layer; vLLM builds the head's second half by the rule for the
    base's layer 0."""
    feed = subject.config.pattern[1::2]
    if dense := [n for n, letter in enumerate(feed) if letter == MlpConfig.letter]:
        yield Finding(
            f"layers {dense} have no experts, but the server builds experts in every layer",
            True,
            ("sglang",),
        )
        if dense[0] == 0 and subject.config.mtp.pattern[1:] not in ("", MlpConfig.letter):
            text = (
                "mlp_only_layers and decoder_sparse_step leave layer 0 without experts: the server"
                " then builds the head without experts, too"
            )
            yield Finding(text, True, ("vllm",))


def no_packed_experts(subject: Subject) -> Iterator[Finding]:
    """SGLang reads the experts of Qwen3-Next only one by one; vLLM reads packed ones too, and both
    ways in one file."""
    if packed := sorted(name for name in subject.expected if re.search(_PACKED, name)):
        text = (
            f"{len(packed)} tensors of packed experts, which are read one by one:"
            f" {', '.join(packed[:4])}"
        )
        yield Finding(text, True, ("sglang",))


def tied_at_both_levels(subject: Subject) -> Iterator[Finding]:
    """vLLM reads `tie_word_embeddings` of the text model, SGLang that of the top level; both
    default to false."""
    levels: tuple[tuple[Server, str], ...] = (("vllm", "text_config."), ("sglang", ""))
    for server, level in levels if subject.config.tie_word_embeddings else ():
        key = f"{level}tie_word_embeddings"
        if subject.setting(key) is not True:
            yield Finding(
                f"embeddings are tied, but {key}, which is read, does not say so", True, (server,)
            )


def vision_tower(subject: Subject) -> Iterator[Finding]:
    """Under the published architecture name, servers build the vision tower, vLLM unless it is told
    not to."""
    if not any(name.startswith(VISION) for name in subject.carried):
        missing = f"no tensors {VISION}*, but the server builds the vision tower"
        yield Finding(
            f"{missing}: stitch the heads into the original checkpoint", True, ("sglang",)
        )
        yield Finding(f"{missing}: start it with --language-model-only", False, ("vllm",))


def state_dtype(prefix: str = "") -> Need:
    """The key for the dtype of the recurrent state."""
    why = "servers choose the dtype of the recurrent state"
    return Need(f"{prefix}mamba_ssm_dtype", why, fatal=False, kind="gated_delta_net")
