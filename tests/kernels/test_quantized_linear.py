"""Linears with quantised weights against the twin in fp32: to 1e-5 in fp32, and in bf16 within 1.5
times the error of torch's product."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpkit.kernels import device
from mtpkit.kernels.activation import swiglu
from mtpkit.kernels.quantized import Matrix, prepare, reference, restore
from mtpkit.kernels.quantized.product import step_of
from mtpkit.kernels.quantized.reference import E2M1, widen
from tests.kernels import ptx
from tests.kernels.conftest import Twin
from tests.kernels.quantized import FORMATS, RULES, draw_matrix, of_sums
from tests.kernels.recurrence import relative

EPS = 0.1
"""Large enough that a result without it differs."""
STATIC = 0.01
CUT = 2**-7
"""Triton's interpreter cuts bf16 off instead of rounding."""
FLIPPED = 2**-5
"""Where a norm runs first, it may round otherwise, and then some codes of the inputs differ."""


def draw(
    name: str, rows: int, outputs: int, width: int, device: str = "cpu", dtype=torch.bfloat16
) -> tuple[Tensor, Matrix]:
    """x, a slice of a wider tensor that is NaN around it, and a matrix."""
    whole = torch.full((rows + 1, width + 16), torch.nan)
    whole[:rows, 8:-8] = torch.randn(rows, width)
    return whole.to(device, dtype)[:rows, 8:-8], draw_matrix(name, outputs, width, device=device)


def exact(x: Tensor, matrix: Matrix, **rest: Any) -> Tensor:
    """The twin's result in fp32, of x as it is."""
    floats = {
        key: value.float() if isinstance(value, Tensor) else value for key, value in rest.items()
    }
    return reference.quantized_linear(x.float(), matrix, **floats)


def torch_product(x: Tensor, matrix: Matrix, **rest: Any) -> Tensor:
    """The product as torch computes it in bf16, without anything around it."""
    inputs = reference.restored_inputs(x, rest["inputs"], rest["input_scale"])
    return inputs.to(x.dtype) @ widen(matrix, x.dtype).t()


def check(twin: Twin, x: Tensor, matrix: Matrix, tolerance: float = 1e-5, **rest: Any) -> None:
    want = exact(x, matrix, **{key: value for key, value in rest.items() if key != "tile"})
    rest |= {key: rest[key].clone() for key in rest.keys() & {"residual"}}
    have = twin("quantized").quantized_linear(x, matrix, **rest)
    limit = tolerance + of_sums(twin.device, matrix.codes, rest["inputs"])
    if x.dtype == torch.bfloat16:
        plain = {key: rest[key] for key in ("inputs", "input_scale")}
        low = relative(torch_product(x, matrix, **plain), exact(x, matrix, **plain).double())
        limit += 1.5 * low + (CUT if twin.name == "interpreter" else 0)
    assert have.dtype == x.dtype
    assert relative(have, want.double()) <= limit


def rule_of(name: str, device: str = "cpu") -> dict[str, Any]:
    return dict(inputs=RULES[name], input_scale=torch.tensor(STATIC, device=device))


SIZES = {
    1: (70, 416),
    2: (256, 256),
    5: (3, 1056),
    16: (70, 416),
    17: (256, 256),
    64: (70, 416),
    65: (3, 1056),
}
"""Rows -> outputs and width."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FORMATS)
def test_products(twin: Twin, name: str, rule: str, rows: int, dtype) -> None:
    size = SIZES[rows]
    x, matrix = draw(name, rows, *size, twin.device, dtype)
    check(twin, x, matrix, **rule_of(rule, twin.device))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ["bias, relu^2", "residual", "out"])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_follows_the_product(twin: Twin, name: str, rule: str, case: str, rows: int) -> None:
    x, matrix = draw(name, rows, 70, 288, twin.device, torch.float32)
    rest = rule_of(rule, twin.device)
    if case == "bias, relu^2":
        rest |= dict(bias=torch.randn(70, device=twin.device), activation="relu2")
    elif case == "residual":
        rest["residual"] = torch.randn(rows, 90, device=twin.device)[:, 10:80]
    if case != "out":
        check(twin, x, matrix, **rest)
        return
    whole = torch.zeros(rows, 100, device=twin.device)
    have = twin("quantized").quantized_linear(x, matrix, out=whole[:, 20:90], **rest)
    assert have.data_ptr() == whole[:, 20:90].data_ptr()
    short = of_sums(twin.device, matrix.codes, rest["inputs"])
    assert relative(whole[:, 20:90], exact(x, matrix, **rest).double()) <= 1e-5 + short
    assert not whole[:, :20].any() and not whole[:, 90:].any()


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 40])
def test_programs_share_the_columns(twin: Twin, name: str, splits: int, rows: int) -> None:
    """Also where they do not have equally many steps, and the last step is partial."""
    if twin.name == "reference":
        pytest.skip("has no tiles")
    module = importlib.import_module("mtpkit.kernels.quantized.linear")
    x, matrix = draw(name, rows, 70, 1056, twin.device, torch.float32)
    step = module.step_of(matrix, RULES["none"], 64)
    check(twin, x, matrix, **rule_of("none", twin.device), tile=module.Tile(64, step, 2, 4, splits))


NORMS = {
    "norm": {},
    "norm around zero": dict(zero_centered=True),
    "gated": dict(group_size=128),
    "gated, a group": dict(group_size=384),
    "gated, parts of no group": dict(group_size=96),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", NORMS)
def test_norms_before_the_product(twin: Twin, case: str, rule: str, rows: int, dtype) -> None:
    for name in ("block", "nvfp4"):
        x, matrix = draw(name, rows, 70, 384, twin.device, dtype)
        rest = rule_of(rule, twin.device) | dict(eps=EPS) | NORMS[case]
        rest["norm_weight"] = (1 + 0.5 * torch.randn(384)).to(twin.device, dtype)
        if "gated" in case:
            rest["gate"] = torch.randn(rows, 400).to(twin.device, dtype)[:, 16:]
        alike = rule == "none" and dtype == torch.float32
        check(twin, x, matrix, tolerance=1e-5 if alike else FLIPPED, **rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [288, 416])
def test_swiglu_before_the_product(twin: Twin, width: int, rule: str, rows: int, dtype) -> None:
    """The codes are those of the activation's own result, which is rounded before."""
    for name in ("block", "nvfp4"):
        x, matrix = draw(name, rows, 70, 2 * width, twin.device, dtype)
        matrix = draw_matrix(name, 70, width, device=twin.device)
        rest = rule_of(rule, twin.device) | dict(residual=torch.randn(rows, 70).to(x))
        apart = {key: rest[key].clone() for key in ("residual",)}
        # Without quantisation, the launcher calls the activation of its device.
        inner = swiglu(x) if rule == "none" else twin("activation").swiglu(x)
        want = twin("quantized").quantized_linear(inner, matrix, **rest | apart)
        have = twin("quantized").quantized_linear(x, matrix, swiglu=True, **rest)
        assert torch.equal(have, want)
        want = exact(x, matrix, swiglu=True, **rest)
        assert relative(have, want.double()) <= FLIPPED


def test_a_wrong_norm_would_be_seen() -> None:
    x, matrix = draw("block", 5, 70, 384)
    rest = dict(inputs=RULES["group"], norm_weight=torch.ones(384))
    want = exact(x, matrix, **rest, eps=EPS)
    assert relative(exact(x, matrix, **rest, eps=0.0), want.double()) > FLIPPED
    gated = rest | dict(gate=torch.randn(5, 384), eps=EPS)
    want = exact(x, matrix, **gated, group_size=128)
    assert relative(exact(x, matrix, **gated, group_size=384), want.double()) > FLIPPED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 100, 400, 2100])
@pytest.mark.parametrize("rule", ["token", "group", "static"])
def test_inputs_are_quantised_as_the_twin_does(twin: Twin, rule: str, width: int, dtype) -> None:
    x = (torch.randn(4, width) * torch.logspace(-4, 3, width)).to(twin.device, dtype)
    x[2] = 0
    arguments = RULES[rule], torch.tensor(0.3, device=twin.device)
    values, scales = twin("quantized").quantize_inputs(x, *arguments)
    want, want_scales = reference.quantize_inputs(x, *arguments)
    assert torch.equal(values.float(), want.float())
    assert torch.equal(scales, want_scales)


@pytest.mark.parametrize("rows", [1, 5, 0])
@pytest.mark.parametrize("rule", ["token", "group", "static"])
@pytest.mark.parametrize("name", FORMATS)
def test_inputs_that_were_quantised_before(twin: Twin, name: str, rule: str, rows: int) -> None:
    x, matrix = draw(name, rows, 70, 416, twin.device)
    rest = rule_of(rule, twin.device)
    module = twin("quantized")
    want = module.quantized_linear(x, matrix, **rest)
    values, scales = module.quantize_inputs(x, rest["inputs"], rest["input_scale"])
    whole = torch.zeros(rows, 90, dtype=x.dtype, device=twin.device)
    given = dict(inputs=rest["inputs"], x_scales=scales, out=whole[:, 10:80])
    have = module.quantized_linear(values, matrix, **given)
    assert have.dtype == x.dtype and torch.equal(have, want)
    assert torch.equal(whole[:, 10:80], want)


def test_restored_inputs_are_near_the_originals() -> None:
    """Also where the last group is partial."""
    for rule in ("token", "group"):
        x = torch.randn(3, 400)
        restored = reference.restored_inputs(x, RULES[rule])
        assert (restored - x).abs().amax() <= x.abs().amax() / 16


def test_no_rows(twin: Twin) -> None:
    for rule in RULES:
        x, matrix = draw("block", 0, 70, 256, twin.device)
        found = twin("quantized").quantized_linear(x, matrix, **rule_of(rule, twin.device))
        assert found.shape == (0, 70)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_do_not_mix_and_calls_repeat(twin: Twin, name: str, rule: str, value: float) -> None:
    """A row of NaN, such as a padding row, does not spread, and the same call gives the same
    bits."""
    x, matrix = draw(name, 3, 70, 416, twin.device)
    rest = rule_of(rule, twin.device)
    run = twin("quantized").quantized_linear
    first = run(x, matrix, **rest)
    assert torch.equal(first, run(x, matrix, **rest))
    x[1] = value
    poisoned = run(x, matrix, **rest)
    assert torch.equal(poisoned[[0, 2]], first[[0, 2]])
    finite = poisoned[1].isfinite().any()
    # The rule `static` cuts infinity off.
    assert bool(finite) == (rule == "static" and value == torch.inf)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_one_nan_makes_its_row_nan(twin: Twin, rule: str, rows: int) -> None:
    x, matrix = draw("row", rows, 70, 416, twin.device)
    x[0, 17] = torch.nan
    found = twin("quantized").quantized_linear(x, matrix, **rule_of(rule, twin.device))
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_are_subnormal(twin: Twin, name: str, rows: int) -> None:
    x, matrix = draw(name, rows, 70, 416, twin.device, torch.float32)
    if name == "nvfp4":
        # 1 to 7 times 2^-9
        tiny = (torch.arange(1, 8) / 512).to(matrix.scales.dtype).to(twin.device)
        scales = tiny[torch.randint(7, matrix.scales.shape, device=twin.device)]
        matrix = matrix._replace(scales=scales)
    else:
        tiny = torch.full_like(matrix.scales, 1e-39)
        matrix = matrix._replace(scales=tiny)
        x *= 1e30
    check(twin, x, matrix, **rule_of("none", twin.device))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_nearly_the_same_product_alone_and_beside_others(
    twin: Twin, name: str, rule: str
) -> None:
    """Also without tensor cores, which some formats alone do."""
    x, matrix = draw(name, 5, 70, 416, twin.device, torch.float32)
    rest = rule_of(rule, twin.device)
    run = twin("quantized").quantized_linear
    together = run(x, matrix, **rest)
    alone = torch.cat([run(row[None], matrix, **rest) for row in x])
    short = of_sums(twin.device, matrix.codes, rest["inputs"])
    assert relative(alone, together.double()) <= 1e-6 + short


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name][0] != "e4m3"])
def test_prepared_codes_are_the_same_matrix(twin: Twin, name: str) -> None:
    for shape in ((70, 416), (3, 20, 64)):
        prepared = draw_matrix(name, *shape, device=twin.device)
        plain = restore(prepared)
        assert (plain.apart, prepared.apart) == (1, 4)
        assert not torch.equal(plain.values, prepared.values)
        assert torch.equal(widen(plain), widen(prepared))
        assert torch.equal(prepare(plain).values, prepared.values)
        assert prepare(prepared) is prepared and restore(plain) is plain
    x, prepared = draw(name, 5, 70, 416, twin.device, torch.float32)
    run = twin("quantized").quantized_linear
    for rows in (1, 5):
        have = run(x[:rows], restore(prepared))
        assert relative(have, run(x[:rows], prepared).double()) <= 1e-6


def test_a_width_that_no_kernel_takes(twin: Twin) -> None:
    """Runs as separate ops of torch."""
    values = torch.randint(256, (6, 15), dtype=torch.uint8, device=twin.device)
    scales = torch.rand(6, 3, device=twin.device)
    matrix = prepare(Matrix("int4", values, scales, (1, 10)))
    assert matrix.apart == 1
    x = torch.randn(2, 30, device=twin.device)
    norm = dict(norm_weight=torch.rand(30, device=twin.device), eps=EPS)
    check(twin, x, matrix, **rule_of("none", twin.device), **norm)


def test_the_assembly_turns_every_code_into_its_number() -> None:
    codes = importlib.import_module("mtpkit.kernels.quantized.codes")
    for code in range(256):
        # Beside it, codes that must not mix with it.
        word = code | (255 - code) << 8 | code << 24
        want = torch.tensor([code, 255 - code, 0, code], dtype=torch.uint8)
        want = want.view(torch.float8_e4m3fn).float()
        # The code of NaN would be 480.
        want = torch.where(want.isnan(), torch.tensor(480.0).copysign(want), want)
        assert ptx.halves(ptx.run(codes.E4M3_PTX, 2, word)) == want.tolist()

    unit = _bits(2.0**119 * 0.4375)
    for code in range(16):
        quads = [code | (15 - code) << 4 | code << 8 | code << 12, 0xF7C5]
        word = quads[0] | quads[1] << 16
        want = [_e2m1(quad >> 4 * place & 15) for place in range(4) for quad in quads]
        found = ptx.halves(ptx.run(codes.E2M1_PTX, 4, word, unit))
        assert [128 * number for number in found] == [0.4375 * number for number in want]
        zero = _bits(128.0 + 5)
        want = [(quad >> 4 * place & 15) - 5.0 for place in range(4) for quad in quads]
        assert ptx.halves(ptx.run(codes.INT4_PTX, 4, word, zero)) == want


def _bits(number: float) -> int:
    """Two bf16 numbers in a word."""
    half = torch.tensor(number, dtype=torch.bfloat16).view(torch.uint16).item()
    return int(half) | int(half) << 16


def _e2m1(code: int) -> float:
    return -E2M1[code & 7] if code > 7 else E2M1[code]


def test_e2m1_times_every_scale_is_exact_in_bf16() -> None:
    """Also of scales that are subnormal in e4m3, which without the factor would not be."""
    codes = importlib.import_module("mtpkit.kernels.quantized.codes")
    bytes_ = torch.arange(1, 127, dtype=torch.uint8)
    for scale in bytes_.view(torch.float8_e4m3fn).float().tolist():
        unit = _bits(scale * 2.0**119)
        found = ptx.halves(ptx.run(codes.E2M1_PTX, 4, 0x76543210, unit))
        assert [128 * number for number in found[1::2]] == [
            scale * E2M1[code] for code in range(4, 8)
        ]
        assert [128 * number for number in found[::2]] == [scale * E2M1[code] for code in range(4)]


SERVED = [
    ("block", "group"),
    ("row", "token"),
    ("matrix", "static"),
    ("matrix", "none"),
    ("int4", "none"),
    ("int4, zero points", "none"),
    ("nvfp4", "none"),
]
"""Formats and rules of published checkpoints."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_of_matrices_too_large_for_that(
    twin: Twin, name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles of rows of our own kernel."""
    if twin.name != "reference":
        module = importlib.import_module("mtpkit.kernels.quantized.linear")
        monkeypatch.setattr(module, "MOST_WIDENED", 0)
    x, matrix = draw(name, 140, 70, 416, twin.device)
    check(twin, x, matrix, **rule_of(rule, twin.device))


@pytest.mark.parametrize(
    ("name", "rule", "rows", "shape", "expected"),
    [
        ("block", "group", 129, (256, 1024), True),
        ("block", "group", 128, (256, 1024), False),
        ("block", "group", 129, (256, 640), False),
        ("block", "group", 129, (200, 1024), False),
        ("block", "none", 129, (256, 1024), False),
        ("block", "token", 129, (256, 1024), False),
        ("row", "token", 129, (256, 640), True),
        ("row", "group", 129, (256, 1024), False),
        ("matrix", "static", 129, (256, 640), True),
        ("nvfp4", "none", 129, (256, 1024), False),
    ],
)
@pytest.mark.parametrize(
    ("capability", "cuda", "blocks"),
    [((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)],
    ids=str,
)
def test_products_that_torch_takes(
    name: str,
    rule: str,
    rows: int,
    shape: tuple[int, int],
    expected: bool,
    capability: tuple[int, int],
    cuda: str,
    blocks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS takes scales of blocks on Hopper alone, from CUDA 12.9 on."""
    module = importlib.import_module("mtpkit.kernels.quantized.linear")
    monkeypatch.setattr(module, "overlaps", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    module._takes_blocks.cache_clear()
    matrix = draw_matrix(name, *shape)
    found = module._is_torch_product(matrix, RULES[rule], rows, torch.device("cuda"))
    module._takes_blocks.cache_clear()
    assert found == (expected and (blocks or name != "block"))


@pytest.mark.parametrize("shape", [(70, 416), (33, 128), (3, 72), (128, 640)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_of_weights_alone_are_widened_first(
    twin: Twin, name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also matrices as files have them."""
    x, matrix = draw(name, 140, *shape, twin.device)
    if twin.name != "reference":
        widening = importlib.import_module("mtpkit.kernels.quantized.widening")
        module = importlib.import_module("mtpkit.kernels.quantized.linear")
        if step_of(matrix, RULES["none"], 128) is None:
            pytest.skip("no kernel takes the matrix")
        for each in (matrix, restore(matrix)):
            have = widening.widened(each, torch.float32)
            assert relative(have, widen(each).double()) < 1e-6
        called = []
        monkeypatch.setattr(
            module, "widened", lambda *args: called.append(1) or widening.widened(*args)
        )
    rest = rule_of("none", twin.device)
    check(twin, x, matrix, **rest)
    norm = dict(norm_weight=torch.ones(shape[1], device=twin.device).bfloat16(), eps=EPS)
    residual = torch.randn(len(x), shape[0]).to(x)
    out = torch.full((len(x), shape[0]), torch.nan).to(x)
    # Norm and activation have kernels of their own, which round.
    around = norm | dict(residual=residual, activation="relu2")
    check(twin, x, matrix, tolerance=2**-7, **around, **rest)
    check(twin, x, matrix, out=out, **rest)
    assert twin.name == "reference" or len(called) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 131, 256, 2048])
@pytest.mark.parametrize(("name", "rule"), SERVED)
@pytest.mark.parametrize("size", [(4096, 4096), (1856, 2688), (2688, 1856), (10304, 4096)], ids=str)
def test_sizes_of_real_models(name: str, rule: str, rows: int, size: tuple) -> None:
    x, matrix = draw(name, rows, *size, "cuda")
    # Many rows in fp8 with scales per row are multiplied by torch, whose sums are as short over the
    # whole width.
    torchs = rows > 128 and name in ("row", "matrix") and rule != "none"
    tolerance = 2**-9 if torchs else 1e-5
    check(Twin("cuda", "cuda"), x, matrix, tolerance=tolerance, **rule_of(rule, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rule"), SERVED)
@pytest.mark.parametrize("rows", [1, 4, 64, 512])
def test_early_starts_and_graphs_change_no_bit(
    name: str, rule: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linears that wait for what the one before them writes, captured on a stream of their own, as
    a step is; with 512 rows some are torch's."""
    run = importlib.import_module("mtpkit.kernels.quantized.triton").quantized_linear
    x, matrix = draw(name, rows, 2048, 2048, "cuda")
    rest = rule_of(rule, "cuda") | dict(norm_weight=torch.ones(2048, device="cuda").bfloat16())

    def chain() -> Tensor:
        out = x
        for _ in range(6):
            out = run(out, matrix, residual=x.clone(), **rest)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(device, "overlaps", lambda _: False)
        want = chain()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, want) and want.isfinite().all()
