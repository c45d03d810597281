"""Linear attention of transformers' models (Qwen3-Next) under `accelerate`."""

import copy
import pickle
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tilewright
from tilewright.integrations.transformers import accelerate, errors, restore
from tilewright.integrations.transformers import linear_attention as part
from tilewright.integrations.transformers.functions import own_function
from tilewright.integrations.transformers.packing import documents_of
from tilewright.ops import OPS

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.packages

NAMES = ("causal_conv1d", "gated_delta_rule", "rmsnorm_gated")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.fixture(scope="module", params=["qwen3_next"])
def built(request):
    config = transformers.AutoConfig.for_model(request.param, **SIZES)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def model(built):
    return copy.deepcopy(built)


def tokens(*shape, seed=0):
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(seed))


def pinned():
    """On a CPU `auto` has no fused implementation of some of these ops: the twin stands for it."""
    return tilewright.use(**dict.fromkeys(NAMES, "eager"))


def gradients(model, x):
    model.zero_grad()
    model(x, labels=x).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def layers_of(model):
    return [m for m in model.modules() if part.is_linear_attention(m)]


def test_linear_attention_is_computed_by_ops(model, monkeypatch):
    x = tokens(2, 70)
    logits, grads = model(x).logits, gradients(model, x)
    called = []
    for name in NAMES:
        twin = OPS[name].eager
        monkeypatch.setattr(OPS[name], "_table", {})  # an earlier call's twin is in it
        monkeypatch.setattr(
            OPS[name], "eager", lambda *a, name=name, twin=twin: called.append(name) or twin(*a)
        )
    with pinned():
        report = accelerate(model, parts=("norm", "linear_attention"), quiet=True)
        assert "linear_attention" not in report.left and "norm" not in report.left
        [change] = [c for c in report.changed if c.part == "linear_attention"]
        assert change.modules == {"Qwen3NextGatedDeltaNet": 3}
        assert change.by == "causal_conv1d[eager] and gated_delta_rule[eager]"
        torch.testing.assert_close(model(x).logits, logits, rtol=1e-4, atol=1e-5)
        found = gradients(model, x)
    assert called.count("gated_delta_rule") >= 3 and {*called} == {*NAMES}
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-6, msg=name)
    restore(model)
    assert torch.equal(model(x).logits, logits)


def test_autocast_and_checkpointing_train_as_before(model, monkeypatch):
    """A step in mixed precision with layers recomputed: ops get autocast's dtype, and loss and
    gradients are those of the model's own functions to within bfloat16.
    """
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    x, dtypes = tokens(2, 40), []
    twin = OPS["gated_delta_rule"].eager
    monkeypatch.setattr(
        OPS["gated_delta_rule"], "eager", lambda *a: dtypes.append(a[0].dtype) or twin(*a)
    )

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, labels=x).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    loss, grads = step()
    assert not dtypes
    with pinned():
        accelerate(model, parts=("norm", "linear_attention"), quiet=True)
        found, theirs = step()
    assert len(dtypes) == 6 and {*dtypes} == {torch.bfloat16}, "three layers, each recomputed"
    torch.testing.assert_close(found, loss, rtol=1e-2, atol=0)
    assert theirs.keys() == grads.keys()
    for name, grad in grads.items():
        error, size = (theirs[name] - grad).norm(), grad.norm()
        assert theirs[name].dtype == grad.dtype and error <= 0.1 * size + 1e-4, name


KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
FLAGS = [
    {"return_seq_idx": True},
    {"return_flash_attn_kwargs": True},
    {"return_flash_attn_kwargs": True, "return_seq_idx": True},
]


def hybrid(kind, **changes):
    sizes = SIZES | LINEAR | changes
    if kind == "falcon_h1":  # whose layers are all of one kind
        del sizes["layer_types"]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def collated(lengths, **options):
    x = tokens(1, sum(lengths))
    documents = [{"input_ids": ids[0].tolist()} for ids in x.split(lengths, 1)]
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    return x, collator(documents)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_what_the_collator_of_packed_documents_gives_keeps_them_apart(
    kind, fused, monkeypatch, recwarn
):
    """fused: the convolution; else the model's own computes rows of one document each."""
    monkeypatch.setattr(errors, "WARNED", set())
    model, lengths = hybrid(kind), (5, 30, 1, 20)
    x = tokens(1, sum(lengths))
    apart = torch.cat([model(ids, use_cache=False).logits for ids in x.split(lengths, 1)], 1)
    if not fused:
        monkeypatch.setattr(OPS["causal_conv1d"], "choose", lambda *a, **k: "eager")
    accelerate(model, quiet=True, parts=("attention", "linear_attention"))
    for flags in FLAGS:
        _, given = collated(lengths, **flags)
        del given["labels"]
        logits = model(**given, use_cache=False).logits
        torch.testing.assert_close(logits, apart, rtol=1e-4, atol=1e-5, msg=str(flags))
    assert not [w for w in recwarn if "position_ids" in str(w.message)]


def test_document_numbers_of_several_rows_keep_documents_apart(model):
    x = tokens(2, 12)
    numbers = torch.tensor([[0] * 5 + [1] * 7, [1] * 12], dtype=torch.int32)
    positions = torch.stack([torch.cat([torch.arange(5), torch.arange(7)]), torch.arange(12)])
    apart = [model(row).logits for row in (x[:1, :5], x[:1, 5:], x[1:])]
    wanted = torch.cat([torch.cat(apart[:2], 1), apart[2]])
    with pinned():
        accelerate(model, quiet=True, parts=("attention", "linear_attention"))
        found = model(x, position_ids=positions, seq_idx=numbers, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_bounds_of_document_numbers_are_traced():
    numbers = torch.tensor([[0, 0, 1], [1, 1, 4]])
    assert documents_of(numbers).tolist() == [0, 2, 3, 5, 6]
    traced = torch.compile(documents_of, fullgraph=True, backend="eager")(numbers)
    assert traced.unique().tolist() == [0, 2, 3, 5, 6] and len(traced) == 7
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "kind, changes",
    [*((kind, {}) for kind in KINDS), ("lfm2", CONV), ("falcon_h1", MAMBA)],
)
def test_positions_alone_that_leak_through_linear_layers_warn_once(kind, changes, monkeypatch):
    monkeypatch.setattr(errors, "WARNED", set())
    model = hybrid(kind, **changes)
    accelerate(model, quiet=True)
    x, given = collated((5, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing leaks in rows of one document, padded or not
        model(x, use_cache=False)
        mask = torch.tensor([[0] * 3 + [1] * 9])
        model(x, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0), use_cache=False)
    with pytest.warns(UserWarning, match="position_ids alone keep packed documents apart") as seen:
        for _ in range(2):
            model(**given, use_cache=False)
    assert len([w for w in seen if "position_ids" in str(w.message)]) == 1


def test_bounds_that_leak_through_the_models_own_layers_warn(monkeypatch):
    monkeypatch.setattr(errors, "WARNED", set())
    model = hybrid("lfm2", **CONV)
    accelerate(model, quiet=True)
    _, given = collated((5, 7), return_flash_attn_kwargs=True)
    with pytest.warns(UserWarning, match="cu_seq_lens_q and position_ids keep .* Lfm2ShortConv"):
        model(**given, use_cache=False)
    restore(model)
    monkeypatch.setattr(errors, "WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**given, use_cache=False)


def test_a_hybrids_count_and_lengths_that_change_make_two_graphs():
    model = hybrid("qwen3_5_text")
    accelerate(model, parts=("linear_attention", "loss"), quiet=True)
    torch._dynamo.reset()
    seen = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    for n in range(4, 10):
        _, given = collated((n, 12 - n), return_flash_attn_kwargs=True, return_seq_idx=True)
        options = {**given, "num_items_in_batch": n + 40, "use_cache": False}
        torch.testing.assert_close(compiled(**options).loss, model(**options).loss)
    assert seen.frame_count <= 2
    torch._dynamo.reset()


def test_generation_goes_on_from_the_last_state(model):
    model.eval()
    x = tokens(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        wanted = model.generate(x, **options)
        with pinned():
            accelerate(model, quiet=True)
            assert torch.equal(model.generate(x, **options), wanted)


def test_copies_and_pickles_keep_it(model):
    x = tokens(1, 12)
    with pinned():
        accelerate(model, quiet=True)
        logits = model(x).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x).logits, logits)
            assert all(part.is_linear_attention(m) for m in layers_of(other))
            assert len(layers_of(other)) == 3


def test_functions_that_compute_something_else_are_left(model, monkeypatch):
    module = layers_of(model)[0]
    space = own_function(type(module).forward).__globals__
    rule = space["torch_chunk_gated_delta_rule"]

    def twice(query, key, value, g, beta, **kwargs):
        out, state = rule(query, key, value, g, beta, **kwargs)
        return 2 * out, state

    monkeypatch.setitem(space, "torch_chunk_gated_delta_rule", twice)
    assert part.ops_of(type(module)) == ("causal_conv1d",)
    monkeypatch.setitem(space, "causal_conv1d_fn", lambda x, *a, **k: x)
    assert "does not call functions" in part.ops_of(type(module))
    with pinned():
        report = accelerate(model, quiet=True)
    assert "does not call functions" in report.left["linear_attention"]


@pytest.mark.parametrize("options", [{"activation": "relu"}, {"activation": "gelu"}])
def test_requests_that_the_op_does_not_take_are_the_models_own(options):
    def own(hidden_states, weight, bias=None, activation=None, **kwargs):
        return "own"

    x, w = torch.randn(2, 3, 9), torch.randn(3, 4)
    assert part._convolution(own)(x, w, None, **options) == "own"
    assert torch.is_tensor(part._convolution(own)(x, w, None, activation="silu"))
