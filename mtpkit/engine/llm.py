"""`LLM`, the entry point: texts or token ids in, texts and token ids out, with the interface of
vLLM's `LLM`."""

import atexit
import gc
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from mtpkit.config import ModelConfig
from mtpkit.engine import loading
from mtpkit.engine.device.graphs import largest_step
from mtpkit.engine.device.runner import Runner
from mtpkit.engine.drafting import make_drafter
from mtpkit.engine.engine import Engine
from mtpkit.engine.memory import plan_memory
from mtpkit.engine.ranks import Ranks, join
from mtpkit.engine.requests.absent import (
    CHAT_ARGUMENTS,
    GENERATE_ARGUMENTS,
    LLM_ARGUMENTS,
    absent_method,
    answers_absent,
)
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.messages import as_prompts
from mtpkit.engine.requests.metrics import Metric, metrics_of
from mtpkit.engine.requests.options import DEFAULT_BUDGET, LLMOptions, takes_fields
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.prompts import Prompt, is_prompt, list_params, list_prompts
from mtpkit.engine.requests.request import Request, RequestOutput
from mtpkit.engine.requests.stats import EngineStats
from mtpkit.engine.requests.token_texts import Tokenizer
from mtpkit.engine.requests.tree import Tree, width_of
from mtpkit.engine.steps.verifier import SyntheticAcceptance
from mtpkit.errors import UserError
from mtpkit.model import (
    attention_window,
    draft_embedding_bytes,
    layer_numbers,
    stack_experts,
    state_specs,
)
from mtpkit.model.quantized import widened_bytes
from mtpkit.model.stages import Decoding
from mtpkit.model.state import StateLayout, StateSizes

_logger = logging.getLogger(__name__)


_GIVEN_UP = ("engine", "model")
"""Attributes of an `LLM` that end with it."""


class ShutDown(UserError, AttributeError):
    """An `LLM` is used after its `shutdown`."""


class LLM:
    """A model that is ready to decode.

    The arguments are the fields of `LLMOptions`, by name or in their order; see
    `help(LLM.__init__)`.

    Raises:
        UserError: settings that cannot work, or heads that are missing or too few.
    """

    @answers_absent("LLM", LLM_ARGUMENTS)
    @takes_fields(LLMOptions)
    def __init__(self, options: LLMOptions) -> None:
        """Load a model and allocate its caches."""
        options = loading.located(options)
        source = loading.opened(options.model)
        model_config = loading.windowed(loading.config_of(source), options)
        budget = options.speculative_budget is not None
        adaptive = budget or options.num_speculative_tokens == "auto"
        tree, depths = loading.resolve_tree(options, model_config)
        # With "auto", each K would need its own graphs of mixed steps.
        mixed = 0 if adaptive else options.max_mixed_tokens
        options = replace(options, num_speculative_tokens=depths, max_mixed_tokens=mixed)

        # Everything is checked before weights are read, which can take minutes.
        loading.check_trained(options.model, model_config.mtp, depths)
        loading.check_kv_cache_dtype(options, model_config)
        loading.check_draft_lm_head_dtype(options, depths)
        draft_ids = loading.draft_token_ids(options.draft_vocab, model_config.vocab_size)
        self.ranks = join(options, model_config)
        stages = self.ranks.stage.stages
        loading.check_children(
            tree, model_config.vocab_size if draft_ids is None else len(draft_ids)
        )

        self.model, self.tokenizer, eos_token_ids = loading.open_model(
            source,
            options.dtype,
            options.device,
            options.tokenizer,
            self.ranks.tensor_size,
            options.enable_expert_parallel and self.ranks.tensor_size > 1,
            stages,
            Decoding.of(model_config, "auto" if adaptive else depths, options.max_num_seqs, stages),
            quantization=options.quantization,
        )
        loading.round_embedding(self.model, options.draft_embedding_dtype, depths, stages)

        stacked = stack_experts(self.model)
        weight = next(self.model.parameters())
        self.ranks.connect(weight, not options.disable_custom_all_reduce)
        async_scheduling, graphs = loading.execution(
            weight, stacked, options.async_scheduling, options.enforce_eager, stages
        )
        config = _engine_config(
            options, model_config, depths, tree, self.ranks, async_scheduling, graphs
        )
        loading.report_limits(config, model_config.max_position_embeddings)

        if draft_ids is not None:
            draft_ids = draft_ids.to(weight.device)
        # The last stage drafts for all.
        own_depths = depths if self.ranks.stage.last else 0
        head_dtype = options.draft_lm_head_dtype
        drafter = make_drafter(
            self.model,
            own_depths,
            config.block_size,
            config.draft_sampling,
            draft_ids,
            tree,
            loading.draft_head_dtype(self.model, head_dtype, own_depths),
            attention_window(model_config.mtp),
        )
        acceptance = options.synthetic_acceptance
        loading.report_unused(
            depths,
            model_config,
            draft_vocab=options.draft_vocab,
            draft_lm_head_dtype=None if head_dtype == "auto" else head_dtype,
            draft_attention_window=options.draft_attention_window,
            draft_attention_sinks=options.draft_attention_sinks,
            synthetic_acceptance=acceptance,
        )

        sizes = StateSizes(
            config.block_size,
            config.decode_width,
            config.state_rollback,
            weight.dtype,
            getattr(torch, options.state_dtype),
            loading.KV_DTYPES[options.kv_cache_dtype],
            rank=self.model.pg_collection.tp.rank(),
        )
        layout = StateLayout(
            state_specs(self.model), sizes, drafter.span.before, layer_numbers(self.model)
        )
        self.memory_plan = plan_memory(
            model_config,
            layout,
            config,
            weight.device,
            options.gpu_memory_utilization,
            options.num_blocks,
            drafter.span,
            options.prefix_cache_bytes,
            self.ranks,
            draft_embedding_bytes(self.model),
            drafter.head_bytes,
            max(widened_bytes(self.model), drafter.widened_bytes),
        )
        config = replace(config, num_checkpoints=self.memory_plan.num_checkpoints)
        _logger.info("%s", self.memory_plan)
        loading.report_uncached(options, self.memory_plan)

        verifier = None
        if acceptance is not None:
            verifier = SyntheticAcceptance(acceptance, depths, weight.device)
        self.engine = Engine(
            config,
            layout,
            self.memory_plan.num_blocks,
            Runner(
                self.model,
                self.ranks.stage,
                # Null rows fill a step up to a captured size, which may exceed the budget.
                max(config.max_num_batched_tokens, largest_step(config)[0]),
            ),
            drafter,
            model_config.vocab_size,
            weight.device,
            self.tokenizer,
            eos_token_ids,
            verifier,
            self.ranks,
        )
        self._turn = _Turn()
        self._making = threading.Lock()
        self.on_device = torch.cuda.device(weight.device) if weight.is_cuda else nullcontext()
        """A context in which the LLM's device is the current one: each thread has its own."""
        _freeze_objects()
        self._warm_up(options.warm_up, adaptive, budget)

    def _warm_up(self, capture: bool, adaptive: bool, budget: bool) -> None:
        """Capture graphs if `capture` is set; with K = "auto" or a budget, time steps of batch
        sizes that double."""
        config = self.engine.config
        if capture:
            self.engine.warm_up(self.engine.draft_shapes if adaptive else [config.drafts])
        if adaptive and config.num_speculative_tokens:
            largest = config.max_num_seqs
            powers = range(largest.bit_length() + 1)
            sizes = sorted({min(2**power, largest) for power in powers})
            self.engine.adapt(sizes, budget=budget)

    @answers_absent("LLM.generate", GENERATE_ARGUMENTS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Decode all prompts to their end. Calls from several threads run one after the other.

        Args:
            prompts: a text, a list of token ids, a dict with `prompt`, `prompt_token_ids` or
                `messages`, or a list of these. A dict may have a `name`, which error messages use
                for the prompt, and `checkpoint_at`, see `Prompt`.
            sampling_params: one object for all prompts, or one per prompt.
            use_tqdm: show progress on stderr; None: if that is a terminal, and on rank 0 alone.

        Returns:
            One finished output per prompt, in the order of the prompts. If a prompt of a list
            cannot be served, or the logits of a request become NaN or infinite, its finish reason
            is "error", and `error` says why; see `require_whole`. The other prompts are decoded.

        Raises:
            UserError: a single prompt that cannot be served, a text without a tokenizer, something
                that is no prompt at all, or a stream of this thread that is still open; no prompt
                is decoded then.
        """
        requests = self._requests(prompts, sampling_params)
        finished = {}
        from tqdm import tqdm

        hidden: bool | None = None  # tqdm itself finds out whether stderr is a terminal
        if use_tqdm is not None:
            hidden = not use_tqdm
        elif self.ranks.rank:
            hidden = True
        with tqdm(total=len(requests), desc="prompts", disable=hidden) as progress:
            for output in self._run(requests, finished_only=True):
                finished[output.request_id] = output
                progress.update()
        return [finished[request.request_id] for request in requests]

    @answers_absent("LLM.chat", CHAT_ARGUMENTS)
    def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, which the tokenizer's chat template renders. The prefix cache keeps
        a checkpoint before each generation prompt, so that the next turn goes on from there.

        To read answers while they grow, give `stream` dicts with `messages`, see `Prompt`.

        Args:
            messages: a conversation, which is a list of messages with `role` and `content`, or a
                list of conversations. A content is a text, or a list of parts `{"type": "text",
                "text": ...}`.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: a template in place of the tokenizer's.
            add_generation_prompt: end with what the template writes before an answer.
            continue_final_message: go on with the last message; needs `add_generation_prompt`
                False.
            tools: JSON schemas of the functions that may be called.
            chat_template_kwargs: variables for the template, such as `enable_thinking`.

        Returns:
            As `generate`; the `prompt` of an output is the rendered conversation.

        Raises:
            UserError: as in `generate`, or there is no tokenizer or no template.
        """
        prompts = as_prompts(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    @answers_absent("LLM.stream", GENERATE_ARGUMENTS)
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield an output whenever a request has new tokens, with all tokens and the whole text so
        far.

        Text that may become part of a stop string is held back. Closing the iterator drops the
        unfinished requests. Calls of other threads wait from the stream's first output until it
        ends or is closed. Prompts of a list that cannot be served come first, as in `generate`.

        Raises:
            UserError: as in `generate`, raised by the call itself; or another stream, last read by
                this thread, is still open.
        """
        return self._run(self._requests(prompts, sampling_params))

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError`; for vLLM's methods that mtpkit lacks, the error says what to do
        instead."""
        if name in _GIVEN_UP:
            raise ShutDown("this LLM was shut down: make a new one")
        raise absent_method(self, name)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Give up model and caches, so that their memory can be used for something else. Waits
        until calls of other threads have ended. Later calls are errors, except this one, which then
        does nothing.

        Raises:
            UserError: a stream of this thread is still open.
        """
        with self._turn.taken():
            for name in _GIVEN_UP:
                self.__dict__.pop(name, None)
        # Frozen objects are never collected.
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be texts, and outputs have a text."""
        return self.tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may have `messages`."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if there is none."""
        return self.tokenizer

    def stats(self) -> EngineStats:
        """Totals over all requests since the LLM was made or `reset_stats` was called."""
        return self.engine.stats()

    def get_metrics(self) -> list[Metric]:
        """The same totals, and gauges, under vLLM's names."""
        return metrics_of(self.stats())

    def reset_stats(self) -> None:
        """Reset the totals."""
        self.engine.reset_stats()

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier prompts and outputs left in the prefix cache; required after a change
        of the weights. Waits until calls of other threads have ended. If the model is split over
        ranks, every rank must call this method. Without a prefix cache there is nothing to forget.
        Statistics stay.

        Returns:
            False if requests that were added to `engine` directly are unfinished: nothing is
            forgotten then. Else True.

        Raises:
            UserError: a stream of this thread is still open.
        """
        with self._turn.taken():
            if self.engine.has_unfinished:
                return False
            if self.engine.scheduler.prefix:
                self.engine.scheduler.prefix.clear()
            return True

    def _run(self, requests: list[Request], finished_only: bool = False) -> Iterator[RequestOutput]:
        refused = [request for request in requests if request.finished]
        accepted = [request for request in requests if not request.finished]
        unfinished = {request.request_id for request in accepted}
        with self._turn.taken():
            # Steps would return outputs of these requests, too, which this call does not know.
            if self.engine.has_unfinished:
                raise UserError(
                    "requests added to llm.engine directly are not finished: call llm.engine.step"
                    " until they are"
                )
            try:
                for request in accepted:
                    self.engine.scheduler.add(request)
                for request in refused:
                    yield RequestOutput.of(request.all_of_prompt)
                    self._turn.hold()
                while unfinished:
                    with self.on_device:
                        outputs = self.engine.step(finished_only)
                    for output in outputs:
                        if output.finished:
                            unfinished.discard(output.request_id)
                        yield output
                        self._turn.hold()  # another thread may have taken over the iterator
            finally:
                for request_id in unfinished:
                    self.engine.abort(request_id)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Make requests of all prompts, without queueing them. Prompts of a list that cannot be
        served become requests that have ended with an error."""
        listed = list_prompts(prompts)
        params = list_params(sampling_params, len(listed))
        # A lone prompt raises an error; one of a list must not cost the others their outputs.
        refuse = not is_prompt(prompts)
        intake = self.engine.intake
        with self._making:  # requests are numbered, and tokenizers serve one thread at a time
            return [
                intake.read(prompt, intake.seeded(one), intake.next_id(), name, refuse)
                for (name, prompt), one in zip(listed, params, strict=True)
            ]


def _engine_config(
    options: LLMOptions,
    model: ModelConfig,
    depths: int,
    tree: Tree | None,
    ranks: Ranks,
    async_scheduling: bool,
    graphs: bool,
) -> EngineConfig:
    """Resolve the options for a model; the memory plan adds the number of checkpoints later.

    Args:
        depths: the largest K.
        tree: the shape of the drafts, if it is a tree.
        async_scheduling: whether a step is launched before the results of the last one are read.
        graphs: whether this rank can replay steps as CUDA graphs.
    """
    return EngineConfig(
        max_model_len=options.max_model_len or model.max_position_embeddings,
        num_speculative_tokens=depths,
        tree=tree,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens
        or max(DEFAULT_BUDGET, options.max_num_seqs * width_of(tree or depths)),
        max_mixed_tokens=options.max_mixed_tokens,
        max_inter_token_latency=options.max_inter_token_latency,
        state_rollback=options.state_rollback,
        enable_prefix_caching=options.enable_prefix_caching,
        prefix_cache_dtype=(
            options.state_dtype
            if options.prefix_cache_dtype == "auto"
            else options.prefix_cache_dtype
        ),
        prefix_cache_interval=options.prefix_cache_interval,
        logprobs_mode=options.logprobs_mode,
        draft_sampling=options.draft_sampling,
        async_scheduling=async_scheduling,
        num_batches=ranks.stage.stages,
        graphs=bool(ranks.all_reduce_min(int(graphs))),  # experts of a single stage may forbid them
        # All ranks must draw the same tokens.
        seed=options.seed if options.seed is not None else ranks.broadcast(secrets.randbits(32)),
    )


def _freeze_objects() -> None:
    """Exclude all objects made so far from garbage collection: no step may wait while the collector
    traverses all modules of a model. Objects that an earlier engine froze are collected first, if
    they have become garbage.

    At exit they are unfrozen: Python's last collection passes frozen objects by, and Triton 3.9
    then reports its own among them as leaked.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)  # of an earlier engine
    atexit.register(gc.unfreeze)


class _Turn:
    """A lock that lets one call run at a time; a second call of the same thread is an error, as it
    would deadlock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the lock and hold it.

        Raises:
            UserError: this thread holds the lock.
        """
        if self._thread == threading.get_ident():
            raise UserError(
                "an earlier stream of this thread is still open: read it to its end or close it"
                " first"
            )
        with self._lock:
            self.hold()
            try:
                yield
            finally:
                self._thread = None

    def hold(self) -> None:
        """Make the calling thread the holder of the lock."""
        self._thread = threading.get_ident()
