"""The front door: text or tokens in, text and tokens out, in the shape that vLLM's users know."""

import gc
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch

from mtpkit.engine.drafter import Drafter, make_drafter
from mtpkit.engine.engine import Engine, EngineStats
from mtpkit.engine.loading import DTYPES, open_model
from mtpkit.engine.memory import plan_memory
from mtpkit.engine.params import EngineConfig, SamplingParams
from mtpkit.engine.request import Request, RequestOutput
from mtpkit.engine.runner import Runner
from mtpkit.engine.states import CacheLayout
from mtpkit.engine.verifier import SyntheticAcceptance
from mtpkit.errors import UserError
from mtpkit.kernels.dispatch import CHOICE, on_kernels
from mtpkit.model import cache_specs, stack_experts

_MAX_BATCHED = 2048
_logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | dict[str, Any]


class LLM:
    """A model that is ready to decode.

    Args:
        model: directory of a checkpoint of either layout, or a model from `mtpkit.model.build_model`.
        num_speculative_tokens: K, drafts a step from the model's MTP heads; 0 decodes plainly. "auto": chosen for each
            step, up to the depths that the heads were trained for, from step times measured at start and the acceptance
            seen so far.
        dtype: of weights, keys and values. "auto": a given model's own; else bfloat16 on a GPU, float32 on a CPU.
        seed: from which requests without a seed get theirs.
        block_size: tokens whose keys and values share a block.
        max_model_len: longest prompt plus output; None: what the model was made for.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step; longer prompts are split. None: 2048, or what decoding needs.
        gpu_memory_utilization: share of the GPU's memory that weights and caches may take.
        num_blocks: blocks of the cache; None: what fits.
        state_rollback: how recurrent state is taken back after a rejection, "replay" or "snapshot".
        state_dtype: of recurrent state, "float32" or "bfloat16".
        draft_sampling: draw drafts from the heads' distribution instead of taking their best tokens.
        draft_vocab: tokens that drafts are chosen among, as ids or as a file that `mtpkit data draft-vocab` wrote. The
            output stays the base's own; None: all tokens.
        async_scheduling: launch a step before the results of the last one are looked at. None: on a GPU.
        enforce_eager: no CUDA graphs.
        synthetic_acceptance: accept drafts by chance at this rate a depth; for benchmarks with random weights.
        device: None: the GPU, or the CPU where there is none.
        tokenizer: a transformers tokenizer or its directory; None: the one beside the checkpoint, if there is one.

    Raises:
        UserError: settings that cannot work, or heads that are missing or too few.
    """

    def __init__(
        self,
        model: Any,
        num_speculative_tokens: int | Literal["auto"] = 0,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        seed: int = 0,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_blocks: int | None = None,
        state_rollback: Literal["replay", "snapshot"] = "replay",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        draft_sampling: bool = False,
        draft_vocab: str | Path | Sequence[int] | None = None,
        async_scheduling: bool | None = None,
        enforce_eager: bool = False,
        synthetic_acceptance: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
    ) -> None:
        _check_choice("dtype", dtype, ["auto", *DTYPES])
        _check_choice("state_dtype", state_dtype, [*DTYPES])
        adaptive = num_speculative_tokens == "auto"
        if not adaptive and not isinstance(num_speculative_tokens, int):
            raise UserError(f"num_speculative_tokens is {num_speculative_tokens!r}, must be a number or 'auto'")
        if adaptive and draft_sampling:
            raise UserError("num_speculative_tokens 'auto' needs the heads' best tokens: draft_sampling must be False")
        # Settings are checked before a large model is read; what the model decides is filled in after.
        config = EngineConfig(
            max_model_len=1 if max_model_len is None else max_model_len,
            num_speculative_tokens=0 if isinstance(num_speculative_tokens, str) else num_speculative_tokens,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_MAX_BATCHED if max_num_batched_tokens is None else max_num_batched_tokens,
            state_rollback=state_rollback,
            draft_sampling=draft_sampling,
            seed=seed,
        )
        self.model, self.tokenizer, eos_token_ids = open_model(model, dtype, device, tokenizer)
        stacked = stack_experts(self.model)
        model_config, weight = self.model.mtpkit_config, next(self.model.parameters())
        if adaptive and not model_config.mtp_num_depths:
            raise UserError(
                "num_speculative_tokens is 'auto', but the model has no MTP heads: train some, or set it to 0"
            )
        depths = model_config.mtp_num_depths if adaptive else config.num_speculative_tokens
        draft_ids = _draft_token_ids(draft_vocab, model_config.vocab_size, weight.device)
        drafter = make_drafter(self.model, depths, block_size, max_num_seqs, draft_sampling, draft_ids)
        if adaptive and not drafter.device_only:
            raise UserError("num_speculative_tokens 'auto' needs a repeated MTP head: set a number for distinct ones")
        _warn_if_ignored(depths, draft_vocab=draft_vocab, synthetic_acceptance=synthetic_acceptance)
        ahead, graphs = _execution(weight, stacked, drafter, async_scheduling, enforce_eager)
        config = replace(
            config,
            max_model_len=max_model_len or model_config.max_position_embeddings,
            num_speculative_tokens=depths,
            max_num_batched_tokens=max_num_batched_tokens or max(_MAX_BATCHED, max_num_seqs * (1 + depths)),
            async_scheduling=ahead,
            graphs=graphs,
        )
        layout = CacheLayout(cache_specs(self.model), config, weight.dtype, DTYPES[state_dtype])
        self.memory_plan = plan_memory(model_config, layout, config, weight.device, gpu_memory_utilization, num_blocks)
        _logger.info("%s", self.memory_plan)
        self.engine = Engine(
            config,
            layout,
            self.memory_plan.num_blocks,
            Runner(self.model),
            drafter,
            model_config.vocab_size,
            weight.device,
            self.tokenizer,
            eos_token_ids,
            SyntheticAcceptance(synthetic_acceptance, depths, weight.device) if synthetic_acceptance else None,
        )
        # A step must not wait while the collector looks through all of a model's modules. What an earlier engine froze
        # is looked at once more: it may be garbage by now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if adaptive and depths:
            self.engine.adapt(sorted({min(2**power, max_num_seqs) for power in range(max_num_seqs.bit_length() + 1)}))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Decode all prompts to their end.

        Args:
            prompts: a text, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a list of such.
            sampling_params: one for all, or one each.
            use_tqdm: show progress.

        Returns:
            One finished output a prompt, in their order.

        Raises:
            UserError: a prompt that cannot be served, or a stream that is still open; nothing is run then.
        """
        requests = self._requests(prompts, sampling_params)
        finished = {}
        from tqdm import tqdm

        with tqdm(total=len(requests), desc="prompts", disable=not use_tqdm) as progress:
            for output in self._run(requests, finished_only=True):
                finished[output.request_id] = output
                progress.update()
        return [finished[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield an output whenever a request has new tokens; its tokens and text are all so far.

        What could still become a stop string is held back. Closing the iterator drops the unfinished requests.

        Raises:
            UserError: a prompt that cannot be served, raised by the call itself; another stream that is still open.
        """
        return self._run(self._requests(prompts, sampling_params))

    def stats(self) -> EngineStats:
        """Totals over all requests since the last `reset_stats`."""
        return self.engine.stats()

    def reset_stats(self) -> None:
        """Start the totals anew."""
        self.engine.reset_stats()

    def _run(self, requests: list[Request], finished_only: bool = False) -> Iterator[RequestOutput]:
        if self.engine.has_unfinished:
            raise UserError("an earlier stream is still open: read it to its end or close it first")
        unfinished = {request.request_id for request in requests}
        try:
            for request in requests:
                self.engine.scheduler.add(request)
            while unfinished:
                for output in self.engine.step(finished_only):
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            for request_id in unfinished:
                self.engine.abort(request_id)

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """All prompts as requests that can be served."""
        listed = _as_list(prompts)
        params = sampling_params or SamplingParams()
        each = itertools.repeat(params, len(listed)) if isinstance(params, SamplingParams) else params
        if not isinstance(params, SamplingParams) and len(params) != len(listed):
            raise UserError(f"{len(listed)} prompts but {len(params)} sampling parameters: give one, or one a prompt")
        encoded = [self._encode(prompt) for prompt in listed]
        return [
            self.engine.make_request(token_ids, one, prompt=text)
            for (text, token_ids), one in zip(encoded, each, strict=True)
        ]

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """Text, if there is one, and token ids of a prompt."""
        if isinstance(prompt, dict):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not known:
                raise UserError(f"prompt {prompt} has neither 'prompt' nor 'prompt_token_ids'")
            return self._encode(prompt[known[0]])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("a text prompt needs a tokenizer: give one, or prompt_token_ids")
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or not all(isinstance(token, Integral) for token in prompt):
            raise UserError(f"a prompt is a {type(prompt).__name__}: give a text, or token ids as a list of integers")
        return None, prompt  # type: ignore[return-value]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one."""
    if not isinstance(prompts, str | dict | Sequence):
        raise UserError(f"prompts are a {type(prompts).__name__}: give texts, or lists of token ids")
    if isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _check_choice(name: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        raise UserError(f"{name} is {value!r}, must be one of {', '.join(choices)}")


def _warn_if_ignored(depths: int, **settings: object) -> None:
    if not depths:
        for name in (name for name, value in settings.items() if value is not None):
            _logger.warning("%s has no effect: num_speculative_tokens is 0", name)


def _execution(
    weight: torch.Tensor, stacked: bool, drafter: Drafter, async_scheduling: bool | None, enforce_eager: bool
) -> tuple[bool, bool]:
    """Whether steps run ahead of their results, and whether they are CUDA graphs.

    Raises:
        UserError: what was asked for cannot be; the GPU is not the current one, on which streams and kernels run.
    """
    device, on_gpu = weight.device, weight.is_cuda
    if on_gpu and device.index not in (None, torch.cuda.current_device()):
        raise UserError(
            f"device is {device}, but cuda:{torch.cuda.current_device()} is current: call "
            f"torch.cuda.set_device({device.index}) first, or choose the GPU by CUDA_VISIBLE_DEVICES"
        )
    reason = "" if drafter.device_only else "distinct MTP heads read tokens that only the host knows"
    if async_scheduling and reason:
        raise UserError(f"async_scheduling must be False: {reason}")
    if not stacked:
        reason = "the experts' weights lie in another's buffer, and megatron-core's pass through them asks the device"
    if on_gpu and not on_kernels(weight):
        reason = f"{CHOICE} chooses the plain twins of kernels, which ask the device"
    if on_gpu and (enforce_eager or reason):
        _logger.info("decoding without CUDA graphs: %s", reason or "enforce_eager is set")
    ahead = drafter.device_only and (on_gpu if async_scheduling is None else async_scheduling)
    return ahead, on_gpu and not enforce_eager and not reason


def _draft_token_ids(
    draft_vocab: str | Path | Sequence[int] | None, vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    if draft_vocab is None:
        return None
    from mtpkit.data.draft_vocab import check_draft_vocab, load_draft_vocab

    if isinstance(draft_vocab, str | Path):
        ids = load_draft_vocab(draft_vocab, vocab_size)
    else:
        ids = list(draft_vocab)
        check_draft_vocab(ids, vocab_size, "draft_vocab")
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device)
