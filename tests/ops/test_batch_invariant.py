"""Batch invariance: a row's bits depend neither on the other rows of a call nor on their number."""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, threads

from tilewright import ImplementationUnavailable
from tilewright import ops as tw
from tilewright.core.registry import short
from tilewright.nn import ROWS, RowBlockLinear, in_row_blocks, linear_in_row_blocks
from tilewright.selection import operations
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import INVARIANT, Numerics, Ops

FLOAT, HALF = torch.float32, torch.bfloat16
# Numbers of rows, which kernels may treat differently, and the positions of the two compared rows.
SIZES = ((2, 0), (3, 1), (17, 9), (64, 62), (200, 131))
WIDTH = 96


def tables(rows):
    angle = torch.outer(
        torch.arange(rows).float(), 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    ).to(DEVICE)
    return angle.cos(), angle.sin()


def scale(x, width=WIDTH):
    return torch.linspace(0.5, 1.5, width, device=DEVICE).to(x.dtype)


def normed(op):
    """The results of a norm of rows, next to each other."""

    def call(x, name):
        more = () if op in (tw.rmsnorm, tw.layernorm) else (x.flip(-1).contiguous(),)
        options = {"bias": scale(x)} if op is tw.layernorm else {}
        found = op(x, *more, scale(x), **options, implementation=name)
        return found if isinstance(found, torch.Tensor) else torch.cat(found, -1)

    return call


def at_one_position(x):
    """So that rows can move."""
    return {"position_ids": torch.full((1, x.shape[0]), 3, device=DEVICE)}


def rope(x, name):
    q = x.view(1, -1, 6, 16).transpose(1, 2)
    turned, _ = tw.rope(q, None, *tables(5), **at_one_position(x), implementation=name)
    return turned.transpose(1, 2).reshape(x.shape)


def qk_norm_rope(x, name):
    weights = dict.fromkeys(("q_weight", "k_weight"), scale(x, 16))
    options = {"num_heads": 4, "num_kv_heads": 1, "implementation": name}
    found = tw.qk_norm_rope(x[None], *tables(5), **weights, **at_one_position(x), **options)
    return torch.cat([t.transpose(1, 2).reshape(x.shape[0], -1) for t in found], -1)


def cross_entropy(x, name):
    return tw.cross_entropy(
        x, torch.full((x.shape[0],), 7, device=DEVICE), reduction="none", implementation=name
    )[:, None]


def logprob_entropy(x, name):
    target = torch.full((x.shape[0],), 7, device=DEVICE)
    return torch.stack(tw.logprob_entropy(x, target, temperature=0.7, implementation=name), -1)


def route(x, name):
    found = tw.route(x[:, :32].contiguous(), 4, implementation=name)
    return torch.cat([t.double() for t in found[:2]], -1)


NORMS = ("rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm", "rmsnorm_gated")
ROW_OPS = {
    **{op: normed(getattr(tw, op)) for op in NORMS},
    "rope": rope,
    "qk_norm_rope": qk_norm_rope,
    "cross_entropy": cross_entropy,
    "logprob_entropy": logprob_entropy,
    "route": route,
    "silu_mul": lambda x, name: tw.silu_mul(x, implementation=name),
    "gelu_mul": lambda x, name: tw.gelu_mul(x, implementation=name),
}


@pytest.fixture(autouse=True)
def divided():
    """C++ kernels divide rows among threads, by the number of rows."""
    with threads(2):
        yield


def claims():
    return [
        (op.name, i.name)
        for op in operations().values()
        for i in op.implementations
        if DEVICE in i.batch_invariant
    ]


def test_every_claim_is_tested():
    assert {op for op, _ in claims()} == {*ROW_OPS, "attention"}
    assert {*INVARIANT} - {"moe_mlp"} <= {op for op, _ in claims()}


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=short)
@pytest.mark.parametrize("op, name", [c for c in claims() if c[0] in ROW_OPS])
def test_a_row_does_not_depend_on_the_others(op, name, dtype):
    skip_unless_usable(operations()[op], name, dtype)
    torch.manual_seed(0)
    pair = torch.randn(2, WIDTH, device=DEVICE).to(dtype)
    expected = ROW_OPS[op](pair, name)
    for rows, at in SIZES:
        x = torch.randn(rows, WIDTH, device=DEVICE).to(dtype) * 3
        x[at : at + 2] = pair
        assert torch.equal(ROW_OPS[op](x, name)[at : at + 2], expected), (rows, at)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=short)
@pytest.mark.parametrize("name", [n for op, n in claims() if op == "attention"])
def test_a_document_does_not_depend_on_the_others(name, dtype):
    """Nor on its position; also in backward."""
    skip_unless_usable(operations()["attention"], name, dtype)
    torch.manual_seed(0)
    length = 37
    own = [torch.randn(1, length, h, 16, device=DEVICE).to(dtype) for h in (4, 2, 2, 4)]

    def run(before, after):
        def among(t):
            """Among tokens of other documents, before it and after it."""
            rest = (torch.randn(1, n, t.shape[2], 16, device=DEVICE) for n in (before, after))
            one, other = (r.to(dtype) for r in rest)
            return torch.cat((one, t, other), 1).transpose(1, 2)

        *leaves, dy = (among(t) for t in own)
        leaves = [t.requires_grad_() for t in leaves]
        ends = bounds(before, length, after)
        out = tw.attention(*leaves, cu_seqlens=ends, implementation=name)
        found = (out, *torch.autograd.grad(out, leaves, dy))
        return [t[:, :, before : before + length] for t in found]

    expected = run(0, 0)
    for before, after in ((1, 0), (64, 3), (100, 29)):
        found = run(before, after)
        assert all(map(torch.equal, found, expected)), (before, after)


def bounds(before, length, after):
    ends = {0, before, before + length, before + length + after}
    return torch.tensor(sorted(ends), device=DEVICE)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=short)
@pytest.mark.parametrize("shape", [(96, 160), (257, 33), (512, 1024)], ids=str)
def test_products_in_row_blocks_do_not_depend_on_other_rows(shape, dtype):
    torch.manual_seed(0)
    K, N = shape
    weight, bias = (torch.randn(size, device=DEVICE).to(dtype) for size in ((N, K), (N,)))
    pair = torch.randn(2, K, device=DEVICE).to(dtype).requires_grad_()
    grad = torch.randn(2, N, device=DEVICE).to(dtype)
    expected = linear_in_row_blocks(pair, weight, bias)
    [expected_dx] = torch.autograd.grad(expected, pair, grad)
    close = {} if dtype == HALF else {"rtol": 1e-4, "atol": 1e-4}  # sums of 512 terms of size one
    torch.testing.assert_close(expected, torch.nn.functional.linear(pair, weight, bias), **close)
    for rows, at in (*SIZES, (ROWS, ROWS - 2), (ROWS + 1, ROWS - 1), (2 * ROWS + 5, ROWS + 60)):
        x = torch.randn(rows, K, device=DEVICE).to(dtype)
        x[at : at + 2] = pair.detach()
        x.requires_grad_()
        dy = torch.randn(rows, N, device=DEVICE).to(dtype)
        dy[at : at + 2] = grad
        found = linear_in_row_blocks(x, weight, bias)
        assert found.shape == (rows, N) and torch.equal(found[at : at + 2], expected), (rows, at)
        [dx] = torch.autograd.grad(found, x, dy)
        assert torch.equal(dx[at : at + 2], expected_dx), (rows, at)


def test_row_blocks_of_any_shape():
    weight = torch.randn(5, 3)
    for shape in ((3,), (0, 3), (2, 4, 3), (1, ROWS, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(
            linear_in_row_blocks(x, weight), torch.nn.functional.linear(x, weight)
        )
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    before, x = dict(model.named_parameters()), torch.randn(7, 3)
    expected = model(x)
    in_row_blocks(model)
    assert type(model[0]) is type(model[2]) is RowBlockLinear
    assert all(p is before[n] for n, p in model.named_parameters())
    torch.testing.assert_close(model(x), expected)


# ---- a whole model

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=short)
@pytest.mark.parametrize("merge_qkv", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("length", [1, 23])
def test_logits_and_losses_do_not_depend_on_the_batch(dtype, merge_qkv, length):
    """A document alone, and packed after and before others: the same bits throughout the model.
    Matrix products treat one token differently from many.
    """
    config = ModelConfig.from_hf(SHAPE)
    ops = Ops.resolve(
        numerics=Numerics(batch_invariant=True), experts=False, device_type=DEVICE, dtype=dtype
    )
    model = Transformer(config, ops, merge_qkv).to(DEVICE)
    init_weights(model, 0, std=0.3)
    model.to(dtype)
    torch.manual_seed(0)
    own = torch.randint(0, 61, (length,), device=DEVICE)

    def run(before, after):
        one, other = (torch.randint(0, 61, (n,), device=DEVICE) for n in (before, after))
        tokens, ends = torch.cat((one, own, other))[None], bounds(before, length, after)
        labels = torch.full_like(tokens, -100)
        labels[0, before + length // 2] = 3  # one: a sum's order depends on its terms' positions
        logits = model(tokens, cu_seqlens=ends)[0, before : before + length]
        return logits, model(tokens, cu_seqlens=ends, labels=labels)

    expected = run(0, 0)
    assert expected[0].dtype == torch.float32
    for before, after in ((1, 0), (40, 2), (150, 90)):
        assert all(map(torch.equal, run(before, after), expected)), (before, after)


def test_what_does_not_claim_it_is_refused():
    message = (
        "moe_mlp: no implementation that is usable here claims that a row's bits do not depend"
    )
    with pytest.raises(ImplementationUnavailable, match=message):
        Ops.resolve(numerics=Numerics(batch_invariant=True))
    with pytest.raises(ImplementationUnavailable, match=r"attention\[eager\]: does not claim"):
        Ops.resolve("eager", numerics=Numerics(batch_invariant=True), experts=False)
