"""Tests specific to logprob_entropy, and to what linear_logprob shares with it: shards of the
vocabulary, argmax and adapters. Parity with the eager twins is in test_contract.py.
"""

import functools
import tempfile

import pytest
import torch
from helpers import DEVICE, join_group, skip_unless_usable, two_processes

from tilewright.bench import contract
from tilewright.ops import OPS, linear_logprob, logprob_entropy

OP, LINEAR = OPS["logprob_entropy"], OPS["linear_logprob"]
NAMES = OP.names()
SHARDED = {"logits": -1, "weight": 0, "bias": 0, "lora_B": 0}  # the dimension of the vocabulary


def grads(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


def problems():
    g = torch.Generator().manual_seed(0)
    T, V, H = 8, 62, 16

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, generator=g) * scale

    y = torch.randint(V, (T,), generator=g)
    y[5] = -100
    logits = randn(T, V, scale=2.0)
    logits[0] = 1.0  # a tie across the shards
    logits[2, 31:] = float("-inf")  # a shard without probability; the target is in the other
    y[2] = 3
    head = {"x": randn(T, H), "weight": randn(V, H), "target": y, "chunk_size": 3}
    adapter = {"lora_A": randn(4, H, scale=0.5), "lora_B": randn(V, 4), "lora_scale": 0.5}
    everything = {"temperature": 0.7, "softcap": 5.0, "return_argmax": True}
    far = logits.clamp_min(-9) + 1e6 - 3 * (torch.arange(V) < 31)  # shards with distant peaks
    return [
        (logprob_entropy, {"logits": logits, "target": y, "return_argmax": True}),
        (logprob_entropy, {"logits": logits, "target": y, **everything}),
        (logprob_entropy, {"logits": far, "target": y, "temperature": 1.5}),
        (linear_logprob, head),
        (linear_logprob, {**head, **adapter, "bias": randn(V), **everything}),
    ]


def run(fn, kwargs, dtype, **options):
    """Results, and the gradient of each floating tensor."""
    kwargs = {
        k: v.to(dtype).requires_grad_() if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in kwargs.items()
    }
    leaves = {k: v for k, v in kwargs.items() if torch.is_tensor(v) and v.requires_grad}
    logprob, entropy, *argmax = fn(**kwargs, **options)
    found = grads(logprob.sum() + 0.3 * entropy.square().sum(), *leaves.values())
    return (
        [logprob.detach(), entropy.detach(), *argmax],
        dict(zip(leaves, found, strict=True)),
    )


def _rank(rank, world, folder, name):
    group = join_group(rank, world, folder)
    for i, (fn, kwargs) in enumerate(problems()):
        own = {
            k: v.chunk(world, SHARDED[k])[rank].clone() if k in SHARDED else v
            for k, v in kwargs.items()
        }
        found = run(fn, own, torch.float32, group=group, implementation=name)
        torch.save(found, f"{folder}/{i}-{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_two_shards_of_the_vocabulary_equal_one(name):
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    skip_unless_usable(OP, name, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        two_processes(_rank, folder, name)
        for i, (fn, kwargs) in enumerate(problems()):
            results, gradients = run(fn, kwargs, torch.float64, implementation="eager")
            ranks = [torch.load(f"{folder}/{i}-{r}") for r in range(2)]
            for found, _ in ranks:
                assert len(found) == len(results)
                for f, t in zip(found, results, strict=True):
                    torch.testing.assert_close(f.double(), t.double(), rtol=1e-5, atol=1e-6)
            for leaf, truth in gradients.items():
                parts = [own[leaf] for _, own in ranks]
                if leaf in SHARDED:
                    parts = [torch.cat(parts, SHARDED[leaf])]
                for part in parts:  # what is replicated has the whole gradient on each rank
                    assert contract.error(part, truth)[0] < 2e-5, (i, leaf)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_a_large_constant_costs_no_precision_at_any_temperature(name):
    skip_unless_usable(OP, name, torch.float32)
    g = torch.Generator().manual_seed(0)
    steps = torch.randint(-40, 40, (4, 300), generator=g).float().to(DEVICE) / 4
    y = torch.randint(300, (4,), generator=g).to(DEVICE)
    call = functools.partial(logprob_entropy, target=y, temperature=0.7)
    near, far = steps.clone().requires_grad_(), (steps + 2.0**20).requires_grad_()
    found = [call(x, implementation=name) for x in (near, far)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    of = [grads(lp.sum() - h.sum(), x)[0] for (lp, h), x in zip(found, (near, far), strict=True)]
    assert contract.error(of[1], of[0])[0] < 1e-5


@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_inplace_overwrites_the_logits_once(name):
    skip_unless_usable(OP, name, torch.float32)
    x = torch.randn(5, 40, device=DEVICE)
    y = torch.randint(40, (5,), device=DEVICE)
    leaf = x.clone().requires_grad_()
    [truth] = grads(logprob_entropy(leaf, y, implementation=name)[0].sum(), leaf)
    logits = x.clone().requires_grad_() * 1
    logprob, _ = logprob_entropy(logits, y, inplace=True, implementation=name)
    [found] = torch.autograd.grad(logprob.sum(), logits, retain_graph=True)
    assert torch.equal(found, truth)
    assert torch.equal(logits.detach(), truth)
    assert found.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprob.sum(), logits)


@pytest.mark.parametrize("name", LINEAR.names())
def test_a_zero_adapter_is_none_and_a_merged_one_the_same(name):
    skip_unless_usable(LINEAR, name, torch.float32)
    g = torch.Generator().manual_seed(0)
    x, w, a, b = (
        torch.randn(*shape, generator=g).to(DEVICE)
        for shape in ((7, 16), (50, 16), (3, 16), (50, 3))
    )
    y = torch.randint(50, (7,), generator=g).to(DEVICE)
    call = functools.partial(linear_logprob, target=y, chunk_size=4, implementation=name)
    plain = call(x, w)
    for t, p in zip(call(x, w, lora_A=a, lora_B=b * 0), plain, strict=True):
        assert torch.equal(t, p)
    merged = call(x, w + 0.5 * b @ a)
    for t, p in zip(call(x, w, lora_A=a, lora_B=b, lora_scale=0.5), merged, strict=True):
        torch.testing.assert_close(t, p, rtol=1e-4, atol=1e-5)


X, W, Y = torch.randn(3, 8), torch.randn(10, 8), torch.tensor([1, 2, 3])
A, B = torch.randn(2, 8), torch.randn(10, 2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: linear_logprob(X, W, Y, lora_A=A), ValueError, "lora_B must be given"),
        (lambda: linear_logprob(X, W, Y, lora_B=B), ValueError, "lora_A must be given"),
        (
            lambda: linear_logprob(X, W, Y, lora_A=A[:, :7], lora_B=B),
            ValueError,
            r"lora_A must have shape \[rank, H\], where H = 8, got \[2, 7\]",
        ),
        (
            lambda: linear_logprob(X, W, Y, lora_A=A, lora_B=B[:9]),
            ValueError,
            r"lora_B must have shape \[V, r\], where V = 10, got \[9, 2\]",
        ),
        (
            lambda: linear_logprob(X, W, Y, lora_A=A[:1], lora_B=B),
            ValueError,
            r"lora_B must have shape \[V, r\] with r == rank, where rank = 1, got \[10, 2\]",
        ),
        (
            lambda: linear_logprob(X, W, Y, lora_A=A[:0], lora_B=B[:, :0]),
            ValueError,
            r"lora_A must have shape \[rank, H\] with rank >= 1, got \[0, 8\]",
        ),
        (lambda: linear_logprob(X, W, Y, group="tp"), TypeError, "group must be"),
        (lambda: logprob_entropy(W, Y), ValueError, "target must have shape"),
        (
            lambda: logprob_entropy(X, Y, softcap=1e-30, temperature=1e30),
            ValueError,
            "softcap / temperature must be a finite number",
        ),
        (lambda: logprob_entropy(X, Y + 7), IndexError, "accepted are 0 to 7"),
        (lambda: logprob_entropy(X, Y, group="tp"), TypeError, "group must be"),
        (
            lambda: logprob_entropy(X[:1].expand(3, 8), Y, inplace=True),
            ValueError,
            "inplace=True cannot overwrite logits",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
