"""Routing against megatron-core's own; experts against fp64, bf16 within twice PyTorch's error."""

import importlib
from functools import partial

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from mtpkit.kernels.moe import reference
from mtpkit.model.kinds.base import Experts, Matrices
from tests.kernels.conftest import Twin
from tests.kernels.inputs import expert_weights
from tests.kernels.recurrence import relative

ROUTINGS = [
    dict(experts=4, top_k=2),
    dict(experts=5, top_k=1),
    dict(experts=3, top_k=3, scale=2.5),
    dict(experts=24, top_k=4, num_groups=6, top_groups=2, scale=0.7),
    dict(experts=16, top_k=4, num_groups=4, top_groups=4),
    dict(experts=12, top_k=4, num_groups=4, top_groups=2),
    dict(experts=160, top_k=6, num_groups=8, top_groups=3),
    dict(experts=128, top_k=6, scale=2.5),
]


def draw_logits(
    tokens: int, experts: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, experts).to(device), (0.5 * torch.randn(experts)).to(device)


def dense(expert_ids, weights, experts: int) -> torch.Tensor:
    """Scatter weights to [T, E]; fails if a token has an expert twice."""
    assert expert_ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert all(len(set(row)) == len(row) for row in expert_ids.tolist())
    return torch.zeros(len(expert_ids), experts).scatter(1, expert_ids.cpu(), weights.cpu())


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("case", ROUTINGS, ids=str)
def test_experts_are_those_of_megatron(twin: Twin, case, tokens):
    case = dict(case)
    experts = case.pop("experts")
    top_k = case.pop("top_k")
    logits, bias = draw_logits(tokens, experts, twin.device)
    like = dict(group_best=top_k // case.get("top_groups", 1), normalize=top_k > 1)
    have = dense(*twin("moe").route(logits, bias, top_k, **case, **like), experts)
    want, _ = topk_routing_with_score_function(
        logits.cpu(),
        top_k,
        num_groups=case.get("num_groups"),
        group_topk=case.get("top_groups"),
        scaling_factor=case.get("scale"),
        score_function="sigmoid",
        expert_bias=bias.cpu(),
    )
    assert torch.equal(have != 0, want != 0)
    assert torch.allclose(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(5, 2), (16, 5), (3, 3)])
def test_softmax_is_that_of_megatron(twin: Twin, experts, top_k, pre_softmax):
    logits, _ = draw_logits(7, experts, twin.device)
    logits[2] *= 50  # most powers underflow
    settings = dict(scale=1.5, score="softmax", normalize=not pre_softmax)
    have = dense(*twin("moe").route(logits, None, top_k, **settings), experts)
    want, _ = topk_routing_with_score_function(
        logits.cpu(),
        top_k,
        use_pre_softmax=pre_softmax,
        scaling_factor=1.5,
        score_function="softmax",
    )
    assert torch.allclose(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", [dict(), dict(num_groups=4, top_groups=2, group_best=2)], ids=str)
def test_sigmoid_without_normalisation_and_bias(twin: Twin, case):
    logits, bias = draw_logits(5, 16, twin.device)
    plain = dense(*twin("moe").route(logits, None, 3, normalize=False, **case), 16)
    chosen = plain != 0
    assert (
        torch.allclose(plain[chosen], logits.cpu().sigmoid()[chosen]) and (chosen.sum(1) == 3).all()
    )
    zero = dense(*twin("moe").route(logits, 0 * bias, 3, normalize=False, **case), 16)
    assert torch.equal(zero, plain)
    ones = dense(*twin("moe").route(logits, None, 3, **case), 16)
    assert torch.allclose(ones, plain / plain.sum(1, keepdim=True))


@pytest.mark.parametrize("shared", ["whole", "gated"])
@pytest.mark.parametrize("groups", [{}, dict(num_groups=4, top_groups=2)], ids=str)
def test_all_tokens_choose_a_shared_expert(twin: Twin, groups, shared):
    logits, bias = draw_logits(5, 16, twin.device)
    alone = twin("moe").route(logits, bias, 4, scale=2.0, **groups)
    gate = torch.randn(5, 1, device=twin.device)
    given = torch.cat([logits, gate], 1) if shared == "gated" else logits
    ids, weights = twin("moe").route(given, bias, 4, scale=2.0, **groups, shared=shared)
    assert torch.equal(ids[:, :4], alone[0]) and (ids[:, 4] == 16).all()
    assert torch.allclose(weights[:, :4], alone[1])
    assert torch.allclose(
        weights[:, 4:], gate.sigmoid() if shared == "gated" else torch.ones_like(gate)
    )


def test_the_score_of_a_group_is_of_as_many_as_asked(twin: Twin):
    # One good expert in group 0, two fair ones in group 1.
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.0]]).to(twin.device)
    for best, group in ((1, {0, 1}), (2, {2, 3})):
        ids, _ = twin("moe").route(logits, None, 2, num_groups=2, top_groups=1, group_best=best)
        assert set(ids[0].tolist()) == group


def test_a_bias_chooses_but_does_not_weigh(twin: Twin):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).to(twin.device)
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0]).to(twin.device)
    have = dense(*twin("moe").route(logits, bias, 2), 4)
    scores = logits.cpu().sigmoid()[0, [0, 3]]
    assert torch.allclose(have[0, [0, 3]], scores / scores.sum())


NAN_ROUTINGS = [
    dict(),
    dict(num_groups=4, top_groups=2),
    dict(num_groups=2, top_groups=1),
    dict(score="softmax"),
]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, under the interpreter
@pytest.mark.parametrize("groups", NAN_ROUTINGS)
def test_a_token_of_nan_has_distinct_experts(twin: Twin, groups):
    """Null rows of a batch may hold anything; their experts are read, so that they have to
    exist."""
    if twin.name == "reference":
        pytest.skip("nothing pads a batch where the twin runs")
    logits, bias = draw_logits(3, 16, twin.device)
    alone = twin("moe").route(logits, bias, 4, **groups)
    logits[1] = torch.nan
    expert_ids, weights = twin("moe").route(logits, bias, 4, **groups)
    assert ((expert_ids >= 0) & (expert_ids < 16)).all() and len(set(expert_ids[1].tolist())) == 4
    for have, want in zip((expert_ids, weights), alone, strict=True):
        assert torch.equal(have[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "width"), [(1, 5, 24), (8, 12, 72), (4, 300, 32), (9, 12, 72), (0, 4, 8)]
)
def test_logits_of_normed_tokens(twin: Twin, tokens, experts, width, dtype, zero_centered):
    """x is a slice of a wider tensor, with NaN around it."""
    wide = torch.full((tokens, width + 16), torch.nan)
    wide[:, 8:-8] = torch.randn(tokens, width)
    x = wide.to(twin.device, dtype)[:, 8:-8]
    norm_weight, weight = (
        torch.rand(*shape).to(twin.device, dtype) for shape in ((width,), (experts, width))
    )
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact *= norm_weight.double() + zero_centered
    normed, logits = twin("moe").router_logits(x, norm_weight, 1e-5, zero_centered, weight)
    # Triton's interpreter cuts bf16 off instead of rounding.
    limit = 1e-5 if dtype == torch.float32 else 2**-7
    assert normed.dtype == dtype and logits.dtype == torch.float32
    assert not tokens or relative(normed, exact) <= limit
    # Of the tokens as they were rounded, logits are those of fp32.
    assert not tokens or relative(logits, normed.double() @ weight.double().t()) <= 1e-5
    plain, logits = twin("moe").router_logits(x, None, 0.0, False, weight)
    assert plain is x and (not tokens or relative(logits, x.double() @ weight.double().t()) <= 1e-5)


def draw(
    tokens,
    experts,
    top_k,
    width,
    inner,
    activation,
    device="cpu",
    dtype=torch.bfloat16,
    residual=True,
):
    """Arguments of `expert_mlp`; x and residual are slices of wider tensors, with NaN around
    them."""

    def sliced() -> torch.Tensor:
        wide = torch.full((tokens, width + 16), torch.nan)
        wide[:, 8:-8] = torch.randn(tokens, width)
        return wide.to(device, dtype)[:, 8:-8]

    ids = (
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, top_k)
    )
    x = sliced()
    normal = partial(torch.randn, device=device)
    fc1, fc2 = expert_weights(normal, experts, width, inner, activation)
    return dict(
        x=x,
        fc1=fc1.to(dtype),
        fc2=fc2.to(dtype),
        expert_ids=ids.to(device, torch.int64),
        weights=torch.rand(tokens, top_k).to(device),
        activation=activation,
        residual=sliced() if residual else None,
    )


def oracle(x, fc1, fc2, expert_ids, weights, activation, residual=None) -> torch.Tensor:
    """The result in fp64, token by token."""
    rows = []
    for token, experts in enumerate(expert_ids.tolist()):
        row = (
            torch.zeros_like(x[token], dtype=torch.float64)
            if residual is None
            else residual[token].double()
        )
        for place, expert in enumerate(experts):
            inner = fc1[expert].double() @ x[token].double()
            if activation == "swiglu":
                gate, value = inner.chunk(2)
                inner = gate * torch.sigmoid(gate) * value
            else:
                inner = inner.clamp_min(0) ** 2
            row = row + weights[token, place].double() * (fc2[expert].double() @ inner)
        rows.append(row)
    return torch.stack(rows)


def check(twin: Twin, arguments: dict, **rest) -> None:
    want = oracle(**arguments)
    out = twin("moe").expert_mlp(**arguments, **rest)
    limit = 1e-5
    if out.dtype == torch.bfloat16:
        limit = 2 * relative(reference.expert_mlp(**arguments), want)
        # Triton's interpreter cuts bf16 off instead of rounding.
        limit += 2**-7 if twin.name == "interpreter" else 0
    assert out.dtype == arguments["x"].dtype and relative(out, want) <= limit


SIZES = {
    "one token": (1, 4, 2, 32, 24),
    "one token of many experts": (1, 12, 5, 200, 136),
    "one token of several blocks": (1, 4, 2, 1100, 530),
    "more experts than pairs": (3, 24, 2, 32, 24),
    "an expert for all": (9, 1, 1, 32, 40),
    "blocks that overflow": (40, 3, 2, 72, 20),
    "wider than a tile": (5, 4, 3, 200, 136),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("size", SIZES)
def test_experts(twin: Twin, size, activation, dtype):
    check(twin, draw(*SIZES[size], activation, twin.device, dtype))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_every_size_of_block(twin: Twin, size):
    """Experts that fill a block, and one pair more."""
    arguments = draw(50, 3, 1, 32, 24, "relu2", twin.device, residual=False)
    arguments["expert_ids"][:33] = 1
    arguments["expert_ids"][33:49] = 0
    check(twin, arguments, **({} if twin.name == "reference" else dict(size=size)))


def test_no_tokens(twin: Twin):
    arguments = draw(0, 4, 2, 32, 24, "relu2", twin.device)
    assert twin("moe").expert_mlp(**arguments).shape == (0, 32)
    expert_ids, weights = twin("moe").route(*draw_logits(0, 4, twin.device), 2)
    assert expert_ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_experts_of_other_ranks_add_nothing(twin: Twin, activation, tokens):
    """Two ranks with half of the experts each come to the sum of one that has all."""
    whole = draw(tokens, 6, 3, 64, 32, activation, twin.device, torch.float32, residual=False)
    whole["expert_ids"][0] = torch.tensor([0, 1, 2])  # none on the second rank
    parts = []
    for first in (0, 3):
        own = whole["expert_ids"] - first
        own = torch.where((own >= 0) & (own < 3), own, 3)
        weights = {name: whole[name][first : first + 3].contiguous() for name in ("fc1", "fc2")}
        parts.append(
            twin("moe").expert_mlp(**whole | weights | dict(expert_ids=own), some_elsewhere=True)
        )
    assert relative(sum(parts), oracle(**whole)) < 1e-5
    assert not parts[1][0].any()


@pytest.mark.parametrize("tokens", [5, 400])
def test_pairs_of_experts_elsewhere_are_in_no_block(twin: Twin, tokens):
    """Their expert has no weights here: a block of it would read past the last one's."""
    if twin.name == "reference":
        pytest.skip("it has no blocks")
    # 3: elsewhere
    ids = (
        torch.stack([torch.randperm(4) for _ in range(tokens)])[:, :2].contiguous().to(twin.device)
    )
    blocks = twin("moe").sort_pairs(ids, 3, 16)
    used = int(blocks.used)
    pairs = ids.numel()
    counts = [int((ids == expert).sum()) for expert in range(3)]
    assert used == sum(-(-count // 16) for count in counts) <= len(blocks.experts)
    assert blocks.experts[:used].max() < 3
    order = blocks.order[:used].flatten()
    assert sorted(order[order < pairs].tolist()) == (ids.flatten() < 3).nonzero()[:, 0].tolist()


def test_rows_do_not_mix_and_calls_repeat(twin: Twin):
    """A row of NaN does not spread to rows in the same experts' blocks, and the same call gives the
    same bits."""
    arguments = draw(6, 2, 2, 64, 32, "relu2", twin.device)
    first = twin("moe").expert_mlp(**arguments)
    assert torch.equal(first, twin("moe").expert_mlp(**arguments))
    arguments["x"][2] = torch.nan
    poisoned = twin("moe").expert_mlp(**arguments)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(poisoned[others], first[others]) and poisoned[2].isnan().all()


def test_a_wrong_expert_would_be_seen():
    arguments = draw(6, 4, 2, 64, 32, "relu2")
    want = oracle(**arguments)
    limit = 2 * relative(reference.expert_mlp(**arguments), want)
    wrong = arguments | dict(expert_ids=(arguments["expert_ids"] + 1) % 4)
    assert relative(reference.expert_mlp(**wrong), want) > limit
    assert (
        relative(
            reference.expert_mlp(**arguments | dict(weights=arguments["weights"].flip(1))), want
        )
        > limit
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 128, 700, 3000])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_many_experts(tokens, activation):
    check(Twin("cuda", "cuda"), draw(tokens, 128, 6, 512, 192, activation, "cuda"))


@pytest.mark.gpu
def test_a_graph_repeats_with_other_experts():
    """The experts of the captured call are arbitrary."""
    twin = Twin("cuda", "cuda")
    arguments = draw(8, 32, 4, 256, 192, "relu2", "cuda")
    logits, bias = draw_logits(8, 32, "cuda")

    def layer() -> torch.Tensor:
        ids, weights = twin("moe").route(logits, bias, 4)
        return twin("moe").expert_mlp(**arguments | dict(expert_ids=ids, weights=weights))

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for scale in (1.0, 0.0, 30.0):  # 0: all to the experts that the bias prefers
        logits.copy_(scale * torch.randn_like(logits))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, layer()) and replayed.isfinite().all()


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(
    ("experts", "tokens", "top_k"), [(7, 1, 3), (3, 40, 3), (5, 64, 2), (5, 65, 2), (20, 13, 10)]
)
def test_pairs_are_sorted_into_blocks(twin: Twin, experts, tokens, top_k, size):
    """One program sorts up to 128 pairs, one for each expert more of them: the same blocks come
    out."""
    if twin.name == "reference":
        pytest.skip("sorts nothing")
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    # one expert has more than a block
    ids[:, 0] = torch.where(ids[:, 0] == 0, ids[:, 0], ids[0, 0])
    ids[::3, -1] = experts  # of another rank
    blocks = importlib.import_module("mtpkit.kernels.moe.triton").sort_pairs(
        ids.to(twin.device), experts, size
    )
    want_order = []
    want_experts = []
    for expert in range(experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        padded = mine + [ids.numel()] * (-len(mine) % size)
        want_order += padded
        want_experts += [expert] * (len(padded) // size)
    used = int(blocks.used)
    assert (
        used == len(want_experts) <= len(blocks.experts)
        and blocks.experts[:used].tolist() == want_experts
    )
    assert blocks.order[:used].flatten().tolist() == want_order


DRAWN = [
    dict(experts=5, top_k=2),
    dict(experts=128, top_k=6, scale=2.5, shared="whole"),
    dict(experts=24, top_k=4, num_groups=6, top_groups=2),  # groups that the reference routes
    dict(experts=16, top_k=4, num_groups=4, top_groups=1, group_best=1, shared="gated"),
    dict(experts=12, top_k=3, score="softmax"),
]


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_experts_are_those_of_the_twin(twin: Twin, case):
    """The switch is read on the device: 0 leaves the router's choice; otherwise the choice is the
    reference's draw, and weights are those of the chosen experts' scores."""
    case = dict(case)
    experts = case.pop("experts")
    top_k = case.pop("top_k")
    logits, bias = draw_logits(33, experts + (case.get("shared") == "gated"), twin.device)
    bias = None if case.get("score") == "softmax" else 50 * bias[:experts]
    switch = torch.zeros(1, dtype=torch.int32, device=twin.device)
    route = partial(twin("moe").route, logits, bias, top_k, **case)
    for have, want in zip(route(draw=switch), route(), strict=True):
        assert torch.equal(have, want)
    switch.fill_(1)
    ids, weights = route(draw=switch)
    keys = reference.drawn_keys(logits[:, :experts].cpu())
    want = keys.topk(top_k).indices
    assert torch.equal(ids[:, :top_k].sort(1).values.cpu(), want.sort(1).values)
    scores = logits[:, :experts].cpu()
    scores = scores.softmax(1) if bias is None else scores.sigmoid()
    chosen = scores.gather(1, ids[:, :top_k].cpu())
    chosen *= case.get("scale", 1.0) / chosen.sum(1, keepdim=True)
    assert torch.allclose(weights[:, :top_k].cpu(), chosen, rtol=1e-5, atol=1e-7)
    if "shared" in case:
        assert (ids[:, top_k] == experts).all()


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_drawn_experts_are_as_many_as_the_limit_counts(tokens):
    """Though all tokens have nearly the same logits, all pairs of experts are equally likely, and a
    batch has the distinct experts that `Matrices.read` expects."""
    batches = 2000
    logits = torch.randn(32) + 1e-3 * torch.randn(batches, tokens, 32)
    ids = torch.stack([reference.drawn_keys(one).topk(4).indices for one in logits])
    distinct = torch.tensor([len(one.unique()) for one in ids]).float()
    expected = Matrices(0, 1, Experts(32, 4)).read(tokens)
    assert abs(distinct.mean() - expected) <= 5 * distinct.std() / batches**0.5

    chosen = torch.zeros(batches * tokens, 32).scatter(1, ids.flatten(0, 1), 1.0)
    pairs = (chosen.t() @ chosen)[torch.ones(32, 32).triu(1) == 1]
    # Chi-square of 496 pairs, which exclude one another. With keys of torch.rand, it has mean 485
    # and standard deviation 40.
    assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < 485 + 5 * 40


def test_equal_tokens_and_equal_logits_draw_apart():
    """Requests with the same prompt draw for themselves, and so do tokens without any logits."""
    for logits in (torch.randn(1, 64).expand(50, 64), torch.zeros(50, 64)):
        ids = reference.drawn_keys(logits).topk(4).indices
        assert len({tuple(row) for row in ids.tolist()}) == 50
        assert len(ids.unique()) > 55  # 61.6 are expected of 64


@pytest.mark.gpu
def test_a_graph_draws_anew_with_each_replay():
    logits, bias = draw_logits(64, 128, "cuda")
    switch = torch.zeros(1, dtype=torch.int32, device="cuda")
    route = partial(Twin("cuda", "cuda")("moe").route, logits, bias, 6, draw=switch)
    route()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = route()
    seen = []
    for on in (0, 1, 1):
        switch.fill_(on)
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        seen.append(ids.clone())
        assert torch.equal(ids, route()[0])
    want = reference.drawn_keys(logits).topk(6).indices
    assert torch.equal(seen[2].sort(1).values, want.sort(1).values)
    assert not torch.equal(seen[1], seen[2])


def test_equal_experts_are_chosen_in_order(twin: Twin):
    if twin.name == "reference":
        pytest.skip("topk takes any of them")
    logits = torch.zeros(1, 40, device=twin.device)
    bias = torch.full((40,), -0.5, device=twin.device)
    bias[3] = torch.tensor(-0.5).nextafter(torch.tensor(-1.0))
    ids, _ = twin("moe").route(logits, bias, 5)
    assert ids.tolist() == [[0, 1, 2, 4, 5]]
