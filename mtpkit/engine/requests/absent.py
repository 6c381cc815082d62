"""Arguments and methods that vLLM has and mtpkit lacks; the errors about them say what to do
instead."""

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
    """Advice on what to do instead, or on what mtpkit does."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing. None and empty lists, texts and dicts are always neutral."""

    def accepts(self, value: Any) -> bool:
        """Whether the value is neutral, so that the argument can be ignored silently."""
        if value is None or ((is_list(value) or isinstance(value, str | dict)) and not value):
            return True
        # True equals 1, but a flag in place of a number is a mistake, and the other way round.
        return isinstance(value, bool | int | float | str) and any(
            isinstance(plain(value), bool) is isinstance(one, bool) and value == one
            for one in self.neutral
        )


class AbsentMethod(UserError, AttributeError):
    """A method that vLLM has and mtpkit lacks; `hasattr` returns False."""


def _absent(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Absent]:
    """Map each argument's name to its `Absent`. A row has an advice, and for each of its arguments
    the neutral value or a tuple of neutral values."""
    return {
        name: Absent(advice, value if isinstance(value, tuple) else (value,))
        for advice, arguments in rows.items()
        for name, value in arguments.items()
    }


LLM_ARGUMENTS = _absent(
    {
        "use mtpkit generate --data-parallel-size, or mtpkit.engine.Replicas": dict(
            data_parallel_size=1
        ),
        "start the processes with torchrun": dict(
            distributed_executor_backend=("mp", "uni", "external_launcher")
        ),
        "scales of keys and values come from the checkpoint, see kv_cache_dtype": dict(
            calculate_kv_scales=False, quantization_param_path=None
        ),
        "use state_dtype": dict(mamba_ssm_cache_dtype="auto", mamba_cache_dtype="auto"),
        "use num_speculative_tokens": dict(
            speculative_config=None, speculative_model=None, num_lookahead_slots=0
        ),
        "use num_blocks": dict(num_gpu_blocks_override=None),
        "use max_model_len": dict(max_seq_len_to_capture=None, max_context_len_to_capture=None),
        "use gpu_memory_utilization": dict(kv_cache_memory_bytes=None),
        "weights and caches stay on the device": dict(swap_space=(0, 4), cpu_offload_gb=0),
        "long prompts are always split": dict(enable_chunked_prefill=True),
        "requests run first come, first served": dict(scheduling_policy="fcfs"),
        "graphs are captured unless enforce_eager is set": dict(compilation_config=None),
        "code in checkpoints is never run": dict(trust_remote_code=False),
        "tokenizers are read from a directory": dict(tokenizer_revision=None),
        "set HF_TOKEN, or run hf auth login": dict(hf_token=None),
        "checkpoints are read from safetensors and config.json": dict(
            code_revision=None,
            load_format=("auto", "safetensors"),
            config_format="auto",
        ),
        "edit config.json": dict(
            hf_overrides=None, rope_scaling=None, rope_theta=None, override_neuron_config=None
        ),
        "give SamplingParams to generate": dict(
            generation_config="vllm", override_generation_config=None
        ),
        "give token ids as prompts": dict(skip_tokenizer_init=False, tokenizer_mode="auto"),
        "give chat_template to LLM.chat": dict(chat_template=None),
        "adapters must be merged into the weights": dict(
            enable_lora=False, max_loras=1, max_lora_rank=16
        ),
        "models read and write text only": dict(
            limit_mm_per_prompt=None,
            mm_processor_kwargs=None,
            allowed_local_media_path="",
            task=("auto", "generate"),
            runner=("auto", "generate"),
            convert=("auto", "none"),
        ),
        "llguidance holds structured_outputs of SamplingParams": dict(
            guided_decoding_backend="auto", structured_outputs_config=None
        ),
        "use llm.stats()": dict(disable_log_stats=(True, False)),
        "callbacks cannot change logits": dict(logits_processors=None),
        "a request may ask for up to 20": dict(max_logprobs=20),
    }
)
"""Arguments of vLLM's `LLM`."""

SAMPLING_ARGUMENTS = _absent(
    {
        "use n, and choose among the outputs": dict(best_of=1),
        "beam search is not supported": dict(
            use_beam_search=False, length_penalty=1.0, early_stopping=False
        ),
        "logprobs is a list of dicts": dict(flat_logprobs=False),
        "use logit_bias, allowed_token_ids or bad_words": dict(logits_processors=None),
        "use structured_outputs": dict(guided_decoding=None),
        "texts are those of the tokenizer's decode": dict(
            spaces_between_special_tokens=True, output_text_buffer_length=0
        ),
        "logprobs and prompt_logprobs report the most probable tokens": dict(
            logprob_token_ids=None, prompt_logprob_token_ids=None, prompt_logprob_start=None
        ),
        "leave it out": dict(
            extra_args=None,
            thinking_token_budget=None,
            skip_reading_prefix_cache=False,
            skip_clone=False,
            stream_interval=1,
            repetition_detection=None,
            watermarking=False,
            routed_experts_prompt_start=0,
            trace_decode_token_ids=None,
        ),
    }
)
"""Arguments of vLLM's `SamplingParams`."""

GENERATE_ARGUMENTS = _absent(
    {
        "give token ids as prompts": dict(prompt_token_ids=None),
        "adapters must be merged into the weights": dict(
            lora_request=None, prompt_adapter_request=None
        ),
        "requests run first come, first served": dict(priority=0),
        "give structured_outputs to SamplingParams": dict(guided_options_request=None),
        "models read and write text only": dict(multi_modal_data=None, mm_processor_kwargs=None),
        "encode the prompt yourself": dict(tokenization_kwargs=None),
        "give it to SamplingParams": dict(truncate_prompt_tokens=None),
    }
)
"""Arguments of vLLM's `LLM.generate`."""

CHAT_ARGUMENTS = _absent(
    {
        "adapters must be merged into the weights": dict(lora_request=None),
        "contents get the form that the template renders": dict(
            chat_template_content_format="auto"
        ),
        "models read and write text only": dict(mm_processor_kwargs=None),
        "the template writes all special tokens": dict(tokenization_kwargs=None),
    }
)
"""Arguments of vLLM's `LLM.chat`."""

LLM_METHODS = {
    "beam_search": "beam search is not supported, use generate",
    **dict.fromkeys(
        ("embed", "encode", "classify", "reward", "score"), "models only generate text"
    ),
    "set_tokenizer": "use LLM's argument tokenizer",
    "get_default_sampling_params": "defaults are those of SamplingParams()",
    "llm_engine": "use llm.engine",
    **dict.fromkeys(("sleep", "wake_up"), "delete the LLM and make a new one"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use mtpkit bench decode --kernels"),
}
"""Attributes of vLLM's `LLM`, each with what to do instead."""


def answers_absent[**P, R](
    what: str, absent: Mapping[str, Absent], signature: inspect.Signature | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: raise one `UserError` that names all given arguments the function lacks, with the
    advice in `absent`.

    Arguments in `absent` with neutral values are dropped. The function keeps its signature and
    help.

    Args:
        what: the function's name in the error.
        signature: the function's signature, for functions whose signature `inspect.signature`
            cannot find.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = signature or inspect.signature(function)

        @functools.wraps(function)
        def answering(*args: P.args, **named: P.kwargs) -> R:
            unknown = named.keys() - own.parameters.keys()
            neutral = {
                name for name in unknown & absent.keys() if absent[name].accepts(named[name])
            }
            wrong = [name for name in named if name in unknown - neutral]
            if wrong:
                answers = [_answer(name, absent, own.parameters) for name in wrong]
                raise UserError(
                    f"{what} has no argument {_joined(wrong, answers)}; see help({what})"
                )
            known: dict[str, Any] = {
                name: value for name, value in named.items() if name not in unknown
            }
            try:
                # Checked before the call: a TypeError from inside the function is a bug, not the
                # caller's.
                own.bind(*args, **known)
            except TypeError as error:
                raise UserError(f"{what}: {error}; see help({what})") from None
            return function(*args, **known)

        return answering

    return decorate


def answers_absent_fields[T](absent: Mapping[str, Absent]) -> Callable[[type[T]], type[T]]:
    """Decorator: `answers_absent` for the fields of a dataclass."""

    def decorate(cls: type[T]) -> type[T]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        fields = inspect.signature(cls)
        signature = fields.replace(parameters=[own, *fields.parameters.values()])
        cls.__init__ = answers_absent(cls.__name__, absent, signature)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return decorate


def absent_method(owner: object, name: str) -> AttributeError:
    """The error for an attribute that `owner` lacks, with advice if vLLM has the attribute."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in LLM_METHODS:
        return AbsentMethod(f"{text}: {LLM_METHODS[name]}")
    # With name and object, Python's traceback suggests names that are nearly the same.
    return AttributeError(text, name=name, obj=owner)


def _joined(names: Sequence[str], answers: Sequence[str]) -> str:
    """Join all answers; if they are too long for one line, join the names, followed by the first
    answers."""
    whole = listed(answers, most=len(answers), width=330)
    return (
        whole
        if whole.endswith(answers[-1])
        else f"{listed(names, width=180)}: {listed(answers, width=140)}"
    )


def _answer(name: str, absent: Mapping[str, Absent], own: Mapping[str, Any]) -> str:
    if name in absent:
        return f"{name} ({absent[name].advice})"
    close = difflib.get_close_matches(name, [one for one in own if one != "self"], 1)
    return f"{name} (did you mean {close[0]}?)" if close else name
