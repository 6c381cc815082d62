"""Several outputs of one prompt (`SamplingParams.n`), of which each is a request of its own.

These *siblings* have the same id, prompt and parameters, and seeds that follow each other, as in
vLLM. The first one that runs computes the prompt; the others wait for it, and go on from the
checkpoint that it leaves in the prefix cache, see `Admission`. From then on they share nothing:
each may be preempted, and each ends by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mtpkit.engine.requests.request import CompletionOutput, Request, RequestOutput


def outputs_after(changed: Iterable[Request], finished_only: bool = False) -> list[RequestOutput]:
    """The outputs of the prompts whose requests have changed in a step.

    Args:
        changed: requests that emitted tokens or ended; one may come several times.
        finished_only: as if the output kind of all were `FINAL_ONLY`.
    """
    prompts: dict[str, list[Request]] = {}
    for request in dict.fromkeys(changed):
        prompts.setdefault(request.request_id, []).append(request)

    outputs = []
    for requests in prompts.values():
        every = requests[0].all_of_prompt
        if not (finished_only or requests[0].final_only):
            outputs.append(RequestOutput.of(sorted(requests, key=lambda one: one.index)))
        elif all(request.finished for request in every):
            outputs.append(RequestOutput.of(every))
    return outputs


def joined(
    earlier: Sequence[CompletionOutput], later: Sequence[CompletionOutput]
) -> list[CompletionOutput]:
    """What two pieces of the outputs of a prompt hold together."""
    pieces = {one.index: one for one in earlier}
    for one in later:
        before = pieces.get(one.index)
        if before is not None:
            one = _both(before, one)
        pieces[one.index] = one
    return [pieces[index] for index in sorted(pieces)]


def _both(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    """Two pieces of one output as one piece."""
    log_probs = later.logprobs
    if earlier.logprobs is not None:
        log_probs = earlier.logprobs + (log_probs or [])
    total = later.cumulative_logprob
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        text=earlier.text + later.text,
        logprobs=log_probs,
        cumulative_logprob=earlier.cumulative_logprob if total is None else total,
    )
