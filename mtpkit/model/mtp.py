"""Forward passes of the base and of its multi-token-prediction heads; only this file implements the
MTP recurrence.

The base and each depth *hand on* a hidden state to the next depth: the state after their final
norm, or the one before it, as `MtpConfig.reads_of_base` and `reads_of_depth` say. lm_head always
reads the state after the norm, see `normed_states`.

Shape legend: b batch, s sequence, h hidden size, v vocabulary, K depths.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtpkit.config import MtpConfig
from mtpkit.kernels.attention.reference import AttentionWindow
from mtpkit.kernels.draft_head import argmax, best, linear_argmax, linear_best
from mtpkit.kernels.draft_head.reference import to_token_ids
from mtpkit.kernels.embedding import embedding_part
from mtpkit.kernels.integer_rows import IntegerRows
from mtpkit.kernels.norm import mtp_input
from mtpkit.model.collectives import all_gather, all_reduce, best_of_ranks
from mtpkit.model.formats.weight import QuantizedWeight, Weight, multiply, product, widened
from mtpkit.model.head import MtpHead
from mtpkit.model.inputs import DepthInput, DepthStreams, LayerInput, SequenceInput, StepInput
from mtpkit.model.kinds import KINDS, caching_length
from mtpkit.model.layers.base import keeping_inputs, linear_of
from mtpkit.model.layers.embedding import IntegerEmbedding
from mtpkit.model.quantized import for_drafts

DepthAttention = Literal["serving", "per_depth"]


def embed(model: HybridModel, token_ids: Tensor) -> Tensor:
    """Embeddings [s, b, h] of token_ids [b, s]."""
    table = model.embedding.word_embeddings
    # `embedding_part` reads plain tables, and its sum over ranks has no gradient.
    plain = isinstance(table, VocabParallelEmbedding) and not torch.is_grad_enabled()
    if _is_alone(model) or model.config.sequence_parallel or not plain:
        return model.embedding(input_ids=token_ids, position_ids=None)

    own = embedding_part(token_ids.flatten(), table.weight, table.vocab_start_index)
    whole = all_reduce(own, model.pg_collection.tp) if len(own) else own
    return whole.view(*token_ids.shape, own.shape[1]).transpose(0, 1).contiguous()


def base_forward(model: HybridModel, token_ids: Tensor | None, inputs: LayerInput) -> Tensor:
    """Run the base and return the hidden states that it hands on.

    Args:
        token_ids: [b, s] int64; ignored on a pipeline stage after the first, which reads its input
            tensor.
        inputs: a `SequenceInput`, or a `StepInput` with b = 1 and s = T.

    Returns:
        [s, b, h] (s / tp under sequence parallelism).
    """
    hidden = embed(model, token_ids) if token_ids is not None and model.pre_process else None
    with model.base_context():
        return model.decoder(hidden_states=hidden, attention_mask=None, inference_context=inputs)


def normed_states(model: HybridModel, hidden: Tensor, depth: int = 0) -> Tensor:
    """Return the hidden states after the final norm, which lm_head reads.

    Args:
        hidden: [..., h], what the base (depth 0) or a depth hands on.
    """
    if model.mtpkit_config.mtp.hands_on_normed(depth):
        return hidden
    return _final_norm(model, hidden, depth)


def _final_norm(model: HybridModel, hidden: Tensor, depth: int) -> Tensor:
    norm = head_of(model, depth).final_layernorm if depth else model.decoder.final_norm
    return norm(hidden) if len(hidden) else hidden


def gather_sequence(model: HybridModel, hidden: Tensor) -> Tensor:
    """Gather every rank's hidden [s / tp, b, h] into [s, b, h]; without sequence parallelism,
    return hidden as it is.

    All ranks must compute the same with the result, so that each rank gets the whole gradient of
    the result.
    """
    if not model.config.sequence_parallel:
        return hidden
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)


def output_weight(model: HybridModel) -> Weight:
    """This rank's rows of the lm_head, [v / tp, h]."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def compute_logits(model: HybridModel, hidden: Tensor) -> Tensor:
    """Logits [..., v] of `normed_states` [..., h], gathered over tensor-parallel ranks."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    weight = output_weight(model)
    if isinstance(weight, QuantizedWeight) and torch.is_grad_enabled():
        return _gather(model, product(hidden, weight))
    logits = multiply(hidden.reshape(-1, hidden.shape[-1]), weight)
    return _gather(model, logits.view(*hidden.shape[:-1], logits.shape[-1]))


def local_logits(model: HybridModel, hidden: Tensor) -> Tensor:
    """Logits [M, v / tp] of `normed_states` [M, h] for this rank's part of the vocabulary."""
    return multiply(hidden, output_weight(model))


def first_token(model: HybridModel) -> int:
    """The token of the first row of the lm_head that this rank holds."""
    return model.pg_collection.tp.rank() * len(output_weight(model))


def draft_output_weight(
    model: HybridModel, token_ids: Tensor | None, dtype: str | None = None
) -> tuple[Weight, Tensor | None]:
    """Copy the lm_head's rows for drafts; tensor-parallel ranks split these rows as they split the
    lm_head.

    Args:
        token_ids: [D] int64, the tokens that drafts are chosen from; None: all.
        dtype: type of the rows, see `mtpkit.model.quantized.for_drafts`; None: they are widened.

    Returns:
        [d, h], the rows that this rank holds, and [d] int64, their tokens; None for all.
    """
    rows = widened(output_weight(model)).detach()
    if token_ids is not None:
        local = token_ids - first_token(model)
        held = (local >= 0) & (local < len(rows))
        rows = rows[local[held]]
        token_ids = token_ids[held]
    # A rank may hold none of the tokens; a matrix without rows has no groups to scale.
    if dtype is not None and len(rows):
        return for_drafts(rows, dtype), token_ids
    return rows, token_ids


def greedy_tokens(
    model: HybridModel,
    hidden: Tensor,
    draft_weight: Weight | None = None,
    draft_token_ids: Tensor | None = None,
) -> Tensor:
    """Find the best token of each hidden state, for drafts; `linear_argmax` says how ties are
    broken. Each tensor-parallel rank searches its own rows of the lm_head, and `best_of_ranks`
    combines their results.

    Args:
        hidden: [M, h], `normed_states`.
        draft_weight, draft_token_ids: the result of `draft_output_weight`; None: all tokens.

    Returns:
        [M] int64.
    """
    weight = output_weight(model) if draft_weight is None else draft_weight
    tokens = draft_token_ids
    if isinstance(weight, QuantizedWeight):
        logits = weight.multiply(hidden)
        if _is_alone(model):
            return to_token_ids(argmax(logits), tokens)
        values, found = best(logits)
        found = to_token_ids(found, tokens)
    elif _is_alone(model):
        return linear_argmax(hidden, weight, tokens)
    else:
        values, found = linear_best(hidden, weight, tokens)
    # With a draft vocabulary, rows have already been turned into tokens.
    first = first_token(model) if tokens is None else 0
    return best_of_ranks(values, found, model.pg_collection.tp, first)[1]


def _is_alone(model: HybridModel) -> bool:
    return model.config.tensor_model_parallel_size == 1


def _gather(model: HybridModel, part: Tensor) -> Tensor:
    """Gather `part` [..., n / tp] of every tensor-parallel rank into [..., n]."""
    if _is_alone(model):
        return part
    # The collectives of decoding, below, have no gradients.
    if torch.is_grad_enabled():
        return gather_from_tensor_model_parallel_region(part)
    return torch.cat(all_gather(part, model.pg_collection.tp).unbind(), -1)


def head_of(model: HybridModel, depth: int) -> MtpHead:
    """Return the head that runs at a depth, counted from 1; a repeated head runs at every depth."""
    layers = model.mtp.layers
    return layers[0] if model.mtpkit_config.mtp.repeated else layers[depth - 1]


def depth_embedding(model: HybridModel, token_ids: Tensor, inputs: LayerInput) -> Tensor:
    """Embed the tokens of a depth, with zeros at position 0 if `zero_first_embedding` is set.

    Args:
        token_ids: [b, s], shifted by the depth.
        inputs: the layer input of the depth.

    Returns:
        [s, b, h] (s / tp under sequence parallelism).
    """
    embedding = embed(model, token_ids)
    if not model.mtpkit_config.mtp.zero_first_embedding:
        return embedding

    batch, length = token_ids.shape
    positions = inputs.positions_in(batch, length, token_ids.device)
    first = (positions == 0).t()[..., None]  # [s, b, 1]
    if model.config.sequence_parallel:
        first = first.chunk(model.pg_collection.tp.size())[model.pg_collection.tp.rank()]
    return embedding.masked_fill(first, 0)


def _embedding_rows(model: HybridModel, token_ids: Tensor) -> tuple[Tensor, Tensor | IntegerRows]:
    """Return where the embeddings of token_ids [1, T] lie: row numbers [T] int64, and the table
    that they index."""
    table = model.embedding.word_embeddings
    if _is_alone(model):
        return token_ids[0], table.rows if isinstance(table, IntegerEmbedding) else table.weight

    # A rank holds only a part of the table, so `embed` looks the rows up and sums them over ranks;
    # token i then is row i of the result.
    return torch.arange(token_ids.shape[1], device=token_ids.device), embed(model, token_ids)[:, 0]


def _normed_pair(layer: MtpHead, embedding: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat([layer.enorm(embedding), layer.hnorm(hidden)], -1)


def mtp_forward(
    model: HybridModel,
    depth: int,
    hidden: Tensor,
    token_ids: Tensor,
    inputs: LayerInput,
    keep: Tensor | None = None,
) -> Tensor:
    """One depth of the heads: g^k = final_layernorm(block(eh_proj([enorm(embedding);
    hnorm(g^{k-1})]))).

    DeepSeek-V3 (arXiv:2412.19437, section 2.2); a repeated head applies one block at every depth.
    If depths hand on the state before `final_layernorm`, that state takes the place of g^{k-1} and
    g^k.

    Args:
        depth: k, from 1.
        hidden: [s, b, h], g^{k-1}: the state that the previous depth hands on, or the base for
            depth 1.
        token_ids: [b, s], already shifted: element i is t_{i+k}.
        inputs: `SequenceInput`, `DepthInput`, or `StepInput`.
        keep: [N] int64, the tokens of a step to compute g^k for; None: all. The other tokens only
            fill the caches.

    Returns:
        The state that the depth hands on, [s, b, h], or [N, b, h] with `keep`; `normed_states`
        gives g^k.

    Example, tokens A B C D: depth 1 reads hidden h_A h_B h_C with tokens B C D and predicts C D ..
    """
    layer = head_of(model, depth)
    if isinstance(inputs, StepInput):
        zeroed = inputs.positions if model.mtpkit_config.mtp.zero_first_embedding else None
        norms = (layer.enorm.weight, layer.hnorm.weight)
        zero_centered = model.config.layernorm_zero_centered_gamma
        rows, table = _embedding_rows(model, token_ids)
        x = mtp_input(rows, hidden[:, 0], table, *norms, layer.enorm.eps, zero_centered, zeroed)
        x, _unused = layer.eh_proj(x[:, None])
    else:
        # The backward makes the normed pair, 2 h per token, again instead of keeping it.
        x, _unused = linear_of(
            layer.eh_proj,
            partial(_normed_pair, layer),
            depth_embedding(model, token_ids, inputs),
            hidden,
        )

    # `eh_proj` splits its outputs over ranks, while layers read whole hidden states, though only a
    # part of the sequence under sequence parallelism.
    x = _gather(model, x)
    if model.config.sequence_parallel:
        x = scatter_to_sequence_parallel_region(x)

    if keep is None:
        x = layer.mtp_model_layer(hidden_states=x, attention_mask=None, inference_context=inputs)
    else:
        x = _kept(model, layer.mtp_model_layer.layers, x, inputs, keep)

    if model.mtpkit_config.mtp.hands_on_normed(depth):
        return _final_norm(model, x, depth)
    return x


def depth_forward(
    model: HybridModel, depth: int, hidden: Tensor, token_ids: Tensor, inputs: LayerInput
) -> tuple[Tensor, Tensor]:
    """Run one depth with the arguments of `mtp_forward`.

    Returns:
        The state that it hands on, and g^k, both [s, b, h].
    """
    handed_on = mtp_forward(model, depth, hidden, token_ids, inputs)
    return handed_on, normed_states(model, handed_on, depth)


def _kept(
    model: HybridModel, layers: nn.ModuleList, x: Tensor, inputs: LayerInput, keep: Tensor
) -> Tensor:
    """Run a head's layers on x [T, 1, h] and return [N, 1, h] at tokens `keep` [N]; the other
    tokens stop at the last layer that keeps a state or cache."""
    assert isinstance(inputs, StepInput)
    pattern = model.mtpkit_config.mtp.pattern
    last = caching_length(pattern) - 1
    # Without such a layer, the other tokens need not run at all.
    if last < 0:
        x = x[keep]

    for index, layer in enumerate(layers):
        narrows = index == last and KINDS[pattern[index]].narrows
        # A step may keep no token, as in the middle of a prompt.
        if len(x):
            step = replace(inputs, keep=keep) if narrows else inputs
            out = layer(hidden_states=x, attention_mask=None, inference_context=step)
            x = out[0] if isinstance(out, tuple) else out

        if index == last and not narrows:
            x = x[keep]
    return x


def shift_tokens(token_ids: Tensor, depth: int) -> Tensor:
    """Shift token_ids [b, s] left by `depth`; places at the end without a token hold 0 and must be
    masked."""
    return F.pad(token_ids[:, depth:], (0, min(depth, token_ids.shape[1])))


def shift_states(model: HybridModel, hidden: Tensor, depth: int) -> Tensor:
    """Shift hidden [s, b, h] (s / tp under sequence parallelism) to the front by `depth`; the end
    is filled with 0."""
    # The shift moves states from one rank's part of the sequence to another's.
    whole = gather_sequence(model, hidden)
    moved = F.pad(whole[depth:], (0, 0, 0, 0, 0, min(depth, len(whole))))
    if model.config.sequence_parallel:
        return scatter_to_sequence_parallel_region(moved)
    return moved


def unroll_depths(
    model: HybridModel,
    hidden: Tensor,
    token_ids: Tensor,
    num_depths: int,
    attention: DepthAttention | None = None,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
    mix: Callable[[Tensor, Tensor], Tensor] | None = None,
    recompute: bool = False,
    forward: Callable[
        [HybridModel, int, Tensor, Tensor, LayerInput], tuple[Tensor, Tensor]
    ] = depth_forward,
    document_lens: tuple[int, ...] | None = None,
) -> Iterator[Tensor]:
    """Yield g^1 .. g^K, each after its final norm, over whole sequences.

    g^k_i is meaningful where t_{i+k} exists in the document of i; elsewhere it is finite and must
    be masked out.

    Args:
        hidden: [s, b, h], the states that the base hands on.
        token_ids: [b, s].
        attention: `serving`, the mask that decoding a repeated head produces, or `per_depth`,
            causal attention of each depth over its own stream: the one that Megatron trains and
            that decoding distinct heads produces. None: the one that decoding this model produces.
        documents, positions: [b, s], and `document_lens`: see `SequenceInput`.
        mix: for training, a function that makes the input of depth k + 1 from the states that depth
            k hands on and from the base's hidden states that they stand in for, both [s, b, h];
            element i of the base's is h_{i+k}, or 0 past the end. The base's states are normed if
            depths hand on normed states. If depths hand on states before the norm, the base must do
            so, too.
        recompute: keep only the inputs of each depth and the entries that later depths read, and
            run the depth again in the backward (activation recomputation, Chen et al. 2016,
            arXiv:1604.06174).
        forward: function that runs one depth, with the arguments and the result of `depth_forward`.
    """
    rules = model.mtpkit_config.mtp
    serving = rules.repeated if attention is None else attention == "serving"
    assert rules.repeated or not serving, "distinct heads have a cache per depth: per_depth"

    # `mix` combines states of the base and of depths, all before their norm or all after it.
    base = hidden
    if mix is not None and rules.hands_on_normed(1):
        base = normed_states(model, hidden)
    assert mix is None or rules.hands_on_normed(1) or not rules.hands_on_normed(0), "see `mix`"

    # Entries that each depth leaves for the next ones, with the `serving` mask
    streams = DepthStreams()
    for depth in range(1, num_depths + 1):
        sequences = documents, positions, document_lens, attention_window(rules)
        inputs: LayerInput = SequenceInput(*sequences)
        if serving:
            inputs = DepthInput(*sequences, depth=depth, streams=streams)

        arguments = (model, depth, hidden, shift_tokens(token_ids, depth), inputs)
        if recompute:
            kept = partial(_keeping_inputs, forward)
            # Nothing in a depth is random, so that no state of generators need be kept.
            hidden, normed = checkpoint(
                kept, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden, normed = forward(*arguments)
        yield normed
        if mix is not None and depth < num_depths:
            hidden = mix(hidden, shift_states(model, base, depth))


def attention_window(heads: MtpConfig) -> AttentionWindow | None:
    """What queries of the heads' attention layers see; None: all of their document."""
    if not heads.attention_window:
        return None
    return AttentionWindow(heads.attention_window, heads.attention_sinks)


def _keeping_inputs(
    forward: Callable[..., tuple[Tensor, Tensor]], *arguments: object
) -> tuple[Tensor, Tensor]:
    with keeping_inputs():
        return forward(*arguments)
