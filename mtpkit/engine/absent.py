"""Arguments and methods that vLLM has and mtpkit lacks: an error says what to do instead."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mtpkit.config.checked import is_list, plain
from mtpkit.errors import UserError, listed


class Absent(NamedTuple):
    """An argument that vLLM has and mtpkit lacks."""

    advice: str
    """What to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing; None and empty lists, texts and dicts never do."""

    def accepts(self, value: Any) -> bool:
        """Whether a value asks for nothing, so that the argument can be left out without a word."""
        if value is None or ((is_list(value) or isinstance(value, str | dict)) and not value):
            return True
        return isinstance(value, bool | int | float | str) and any(
            isinstance(plain(value), bool) is isinstance(one, bool) and value == one for one in self.neutral
        )


class AbsentMethod(UserError, AttributeError):
    """A method that vLLM has and mtpkit lacks; `hasattr` is False."""


def _absent(advice: str, **neutral: Any) -> dict[str, Absent]:
    """Arguments that share an advice, each with its neutral value, or a tuple of several."""
    return {name: Absent(advice, value if isinstance(value, tuple) else (value,)) for name, value in neutral.items()}


LLM_ARGUMENTS = {
    **_absent(
        "one device decodes",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        distributed_executor_backend=("mp", "uni"),
        disable_custom_all_reduce=(False, True),
    ),
    **_absent("weights are not quantised, see dtype", quantization=None, quantization_param_path=None),
    **_absent("keys and values have the dtype of the weights", kv_cache_dtype="auto", calculate_kv_scales=False),
    **_absent("use state_dtype", mamba_ssm_cache_dtype="auto", mamba_cache_dtype="auto"),
    **_absent("use num_speculative_tokens", speculative_config=None, speculative_model=None, num_lookahead_slots=0),
    **_absent("use num_blocks", num_gpu_blocks_override=None),
    **_absent("use max_model_len", max_seq_len_to_capture=None, max_context_len_to_capture=None),
    **_absent("use gpu_memory_utilization", kv_cache_memory_bytes=None),
    **_absent("weights and caches stay on the device", swap_space=(0, 4), cpu_offload_gb=0),
    **_absent("no prompt is remembered", enable_prefix_caching=False),
    **_absent("long prompts are always split", enable_chunked_prefill=True),
    **_absent("requests run first come, first served", scheduling_policy="fcfs"),
    **_absent("graphs are captured unless enforce_eager", compilation_config=None),
    **_absent("no code of a checkpoint is run", trust_remote_code=False),
    **_absent(
        "checkpoints are read from their directory",
        download_dir=None,
        revision=None,
        code_revision=None,
        tokenizer_revision=None,
        hf_token=None,
        load_format=("auto", "safetensors"),
        config_format="auto",
    ),
    **_absent("edit config.json", hf_overrides=None, rope_scaling=None, rope_theta=None, override_neuron_config=None),
    **_absent("give SamplingParams to generate", generation_config="vllm", override_generation_config=None),
    **_absent("give token ids as prompts", skip_tokenizer_init=False, tokenizer_mode="auto"),
    **_absent("render messages with the tokenizer's chat template", chat_template=None),
    **_absent("adapters must be merged into the weights", enable_lora=False, max_loras=1, max_lora_rank=16),
    **_absent("text alone is decoded", limit_mm_per_prompt=None, mm_processor_kwargs=None, allowed_local_media_path=""),
    **_absent("models decode text", task=("auto", "generate"), runner=("auto", "generate"), convert=("auto", "none")),
    **_absent("outputs are not constrained", guided_decoding_backend="auto", structured_outputs_config=None),
    **_absent("llm.stats() has them", disable_log_stats=(True, False)),
    **_absent("logits are not changed by callbacks", logits_processors=None),
    **_absent("probabilities are not reported", max_logprobs=20, logprobs_mode="raw_logprobs"),
}
"""Arguments of vLLM's `LLM`."""

SAMPLING_ARGUMENTS = {
    **_absent("repeat the prompt, with other seeds", best_of=1),
    **_absent("there is no beam search", use_beam_search=False, length_penalty=1.0, early_stopping=False),
    **_absent("probabilities are not reported", logprobs=None, prompt_logprobs=None, flat_logprobs=False),
    **_absent("ignore_eos goes on to max_tokens", min_tokens=0),
    **_absent(
        "single tokens are neither favoured nor forbidden",
        logit_bias=None,
        bad_words=None,
        allowed_token_ids=None,
        logits_processors=None,
    ),
    **_absent("outputs are not constrained, see stop", guided_decoding=None, structured_outputs=None),
    **_absent("outputs have token_ids and text", detokenize=True, output_text_buffer_length=0),
    **_absent("decode token_ids yourself", skip_special_tokens=True, spaces_between_special_tokens=True),
    **_absent("stop strings are left out of the text", include_stop_str_in_output=False),
    **_absent("cut the prompt", truncate_prompt_tokens=None),
    **_absent("use llm.generate or llm.stream", output_kind=None),
    **_absent("there is none", extra_args=None, thinking_token_budget=None, skip_reading_prefix_cache=False),
}
"""Arguments of vLLM's `SamplingParams`."""

GENERATE_ARGUMENTS = {
    **_absent("give them as prompts", prompt_token_ids=None),
    **_absent("adapters must be merged into the weights", lora_request=None, prompt_adapter_request=None),
    **_absent("requests run first come, first served", priority=0),
    **_absent("outputs are not constrained", guided_options_request=None),
    **_absent("text alone is decoded", multi_modal_data=None, mm_processor_kwargs=None),
    **_absent("encode the prompt yourself", tokenization_kwargs=None, truncate_prompt_tokens=None),
}
"""Arguments of vLLM's `LLM.generate`."""

_NO_VECTORS = "models decode text"
LLM_METHODS = {
    "chat": "give generate the ids of llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
    "return_dict=False)",
    "beam_search": "there is none, use generate",
    **dict.fromkeys(("embed", "encode", "classify", "reward", "score"), _NO_VECTORS),
    **dict.fromkeys(("get_tokenizer", "set_tokenizer"), "use llm.tokenizer, and the argument tokenizer of LLM"),
    "get_default_sampling_params": "defaults are those of SamplingParams()",
    "llm_engine": "use llm.engine",
    "get_metrics": "use llm.stats()",
    "reset_prefix_cache": "no prompt is remembered",
    **dict.fromkeys(("sleep", "wake_up"), "delete the LLM, and make it anew"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use mtpkit bench decode --kernels"),
}
"""Attributes of vLLM's `LLM`, and what to do instead."""


def answers_absent[**P, R](
    what: str, absent: Mapping[str, Absent], signature: inspect.Signature | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: arguments that a function lacks end in one `UserError` that says of each what to do.

    Those of `absent` whose value asks for nothing are dropped. Signature and help stay the function's own.

    Args:
        what: the function's name in the error.
        signature: its arguments; by default the function's own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = signature or inspect.signature(function)

        @functools.wraps(function)
        def answering(*args: P.args, **named: P.kwargs) -> R:
            unknown = named.keys() - own.parameters.keys()
            wrong = [name for name in named if name in unknown and not _is_neutral(absent, name, named[name])]
            if wrong:
                answers = [_answer(name, absent, own.parameters) for name in wrong]
                raise UserError(f"{what} has no argument {_joined(wrong, answers)}; see help({what})")
            known: dict[str, Any] = {name: value for name, value in named.items() if name not in unknown}
            try:
                own.bind(*args, **known)
            except TypeError as error:
                raise UserError(f"{what}: {error}; see help({what})") from None
            return function(*args, **known)

        return answering

    return decorate


def answers_absent_fields[T](absent: Mapping[str, Absent]) -> Callable[[type[T]], type[T]]:
    """The same for the fields of a dataclass."""

    def decorate(cls: type[T]) -> type[T]:
        own, fields = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), inspect.signature(cls)
        signature = fields.replace(parameters=[own, *fields.parameters.values()])
        cls.__init__ = answers_absent(cls.__name__, absent, signature)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return decorate


def absent_method(owner: object, name: str) -> AttributeError:
    """The error of an attribute that `owner` lacks, with what to do instead where vLLM has it."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in LLM_METHODS:
        return AbsentMethod(f"{text}: {LLM_METHODS[name]}")
    return AttributeError(text, name=name, obj=owner)


def _is_neutral(absent: Mapping[str, Absent], name: str, value: Any) -> bool:
    return name in absent and absent[name].accepts(value)


def _joined(names: Sequence[str], answers: Sequence[str]) -> str:
    """All answers, or all names and the first answers where those are too long for a line."""
    whole = listed(answers, most=len(answers), width=330)
    return whole if whole.endswith(answers[-1]) else f"{listed(names, width=180)}: {listed(answers, width=140)}"


def _answer(name: str, absent: Mapping[str, Absent], own: Mapping[str, Any]) -> str:
    if name in absent:
        return f"{name} ({absent[name].advice})"
    close = difflib.get_close_matches(name, [one for one in own if one != "self"], 1)
    return f"{name} (did you mean {close[0]}?)" if close else name
