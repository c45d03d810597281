"""tilewright.integrations.transformers.accelerate: a model computes the same as transformers', on
this instance alone, until it is restored.
"""

import copy
import gc
import math
import operator
import pickle
import statistics
import types
import warnings
from unittest import mock

import pytest
import torch
from helpers import DEVICE, keep_tables
from torch._dynamo.testing import CompileCounterWithBackend

from tilewright import ops
from tilewright.integrations import transformers as integration
from tilewright.integrations.transformers import (
    PARTS,
    accelerate,
    accelerated,
    instance,
    layers,
    restore,
)

pytestmark = pytest.mark.packages

COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # so that every layer matters
}
# All experts are chosen: a router's rounding may not decide which.
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
    },
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": None},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 3},
    "glm4": {},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 4},
    "deepseek_v3": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 3,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "num_mtp_layers": 0,
    },
}
EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")
NO_MLP = ("mixtral", "olmoe", "gpt_oss")  # but for their experts


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    """transformers; its tables are restored after the test."""
    pytest.importorskip(
        "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
    )
    keep_tables(monkeypatch)


def config_of(kind, **changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**COMMON, **FAMILIES.get(kind, {}), **changes})


def tiny(kind="llama", **changes):
    """A random model with transformers' eager attention and experts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(kind, **changes), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():  # norms' weights and biases, which are new ones' constants
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model.to(DEVICE).train()


def pair(kind="llama", parts=PARTS, attention="eager", **changes):
    """An accelerated model, and one that is as transformers have it."""
    theirs = tiny(kind, **changes)
    theirs.set_attn_implementation(attention)
    ours = copy.deepcopy(theirs)
    accelerate(ours, parts=parts, quiet=True)
    return ours, theirs


def batch(padding=None, rows=2, length=9):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 48, (rows, length), generator=g)
    mask = torch.ones_like(ids)
    if padding:
        mask[0, slice(0, 3) if padding == "left" else slice(length - 3, length)] = 0
    return ids.masked_fill(mask == 0, 0).to(DEVICE), mask.to(DEVICE)


def gradients(model, ids, mask, **options):
    """The loss and all gradients, of a part of a larger batch. No token is predicted from padding,
    where attention is arbitrary.
    """
    model.zero_grad()
    labels = ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
    count = torch.tensor(37, device=ids.device)
    options = {"num_items_in_batch": count, "use_cache": False, **options}
    out = model(input_ids=ids, attention_mask=mask, labels=labels, **options)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def outputs(model, padding):
    """Logits of real tokens, without a cache, with one, and token by token from it."""
    ids, mask = batch(padding)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, use_cache=False).logits
        found = {"plain": plain[mask == 1]}
        first = model(ids[:, :-2], attention_mask=mask[:, :-2], use_cache=True)
        found["cache"] = first.logits[mask[:, :-2] == 1]
        if padding != "right":  # tokens after padding have no defined positions
            cache = first.past_key_values
            for n in (8, 9):
                step = model(ids[:, n - 1 : n], attention_mask=mask[:, :n], past_key_values=cache)
                found[f"step {n}"] = step.logits
    return found


def errors(found, truth):
    """The norm of each difference, relative to the tensor's norm; gradients that are 0 but for
    rounding (of biases of keys) relative to a hundredth of the largest.
    """
    least = 0.01 * max(float(t.float().norm()) for t in truth.values() if t is not None)
    assert found.keys() == truth.keys()
    return {
        n: float((found[n].float() - t.float()).norm()) / max(float(t.float().norm()), least)
        for n, t in truth.items()
        if t is not None
    }


def assert_within(draws, slack):
    """The numerics contract, for the norms of errors. draws: (ours, theirs, truth) of each batch.
    Eager's error is the root of its mean square over them: one batch's, for a small tensor, may be
    small by luck.
    """
    mine, eager = zip(*((errors(o, t), errors(e, t)) for o, e, t in draws), strict=True)
    for error in mine:
        for name, one in error.items():
            typical = math.sqrt(statistics.fmean(found[name] ** 2 for found in eager))
            assert one <= 2 * typical + slack, f"{name}: {one:.2e}, eager {typical:.2e}"


# ---- every family


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_computes_as_before(kind):
    """Logits and gradients in float32 and bfloat16, padded on both sides, with and without a
    cache.
    """
    theirs = tiny(kind)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, parts=PARTS, quiet=True)
    done = {change.part for change in report.changed}
    absent = {"linear_attention", *(() if kind in EXPERTS else ("experts",))}
    absent |= {"mlp"} if kind in NO_MLP else set()
    assert done == set(PARTS) - absent, str(report)
    assert all(report.left[part] == "the model has none" for part in absent)
    assert ours.state_dict().keys() == theirs.state_dict().keys()

    # bfloat16 second: its truth is the rounded weights' in float32.
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = theirs.to(dtype), ours.to(dtype)
        exact = copy.deepcopy(theirs).float() if dtype == torch.bfloat16 else theirs
        # 1e-5: a hundred roundings in float32; 2^-9: one in bfloat16.
        slack = 1e-5 if dtype == torch.float32 else 2**-9
        models, paddings = (ours, theirs, exact), (None, "left", "right")
        for model in models:
            model.train()
        assert_within([[gradients(m, *batch(p)) for m in models] for p in paddings], slack)
        for model in models:
            model.eval()
        for p in paddings:
            assert_within([[outputs(m, p) for m in models]], slack)


def test_every_part_calls_its_op(monkeypatch):
    """Each part, alone, calls its op in every layer, and no other part's."""
    calls = []
    modules = {
        "norm": (integration.layers.ops, "rmsnorm"),
        "rope": (integration.layers.ops, "rope"),
        "mlp": (integration.layers.ops, "silu_mul"),
        "attention": (integration.attention, "attention"),
        "experts": (integration.experts, "moe_mlp"),
        "loss": (integration.causal_lm.ops, "linear_cross_entropy"),
    }

    def counted(part, own):
        return lambda *a, **k: (calls.append(part), own(*a, **k))[1]

    for part, (module, name) in modules.items():
        monkeypatch.setattr(module, name, counted(part, getattr(module, name)))
    model = tiny("qwen3_moe")
    expected = {"norm": 9, "rope": 2, "mlp": 1, "attention": 2, "experts": 1, "loss": 1}
    assert expected.keys() == {*PARTS} - {"linear_attention"}
    for part in expected:
        calls.clear()
        accelerate(model, parts=(part,), quiet=True)
        gradients(model, *batch())
        assert calls == [part] * expected[part]
    calls.clear()
    restore(model)
    gradients(model, *batch())
    assert not calls


# ---- one instance, and back


ASKED = {
    "norm": (layers, "is_norm"),
    "rope": (layers, "rotations_of"),
    "mlp": (layers, "is_mlp"),
    "attention": (integration.acceleration, "own_function"),
    "linear_attention": (integration.linear_attention, "is_linear_attention"),
    "experts": (integration.acceleration, "why_not"),
    "loss": (integration.causal_lm, "loss_reason"),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_error_within_a_part_is_raised_and_leaves_the_model_as_it_was(part, monkeypatch):
    """Only what this version of transformers has not is a reason to leave a part."""
    model = tiny("qwen3_moe").eval()
    expected = outputs(model, None)

    def failing(*arguments):
        raise RuntimeError("an error of ours")

    with monkeypatch.context() as planted:
        planted.setattr(*ASKED[part], failing)
        with pytest.raises(RuntimeError, match="an error of ours"):
            accelerate(model, parts=PARTS, quiet=True)
    assert not any(map(instance.is_replaced, model.modules()))
    assert integration.report_of(model) is None
    assert model.config._attn_implementation == model.config._experts_implementation == "eager"
    found = outputs(model, None)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("how", ["table", "pickled"])
def test_a_learned_rotary_embedding_gets_its_gradient(how, monkeypatch):
    """As Mistral Large 4's; without one, tables are those of `ops.rope`."""
    model = tiny("llama")
    rotary = model.model.rotary_emb
    rotary.alpha = torch.nn.Parameter(torch.full((4,), 0.9, device=DEVICE))
    own = type(rotary).forward

    def forward(self, x, position_ids):
        cos, sin = own(self, x, position_ids)
        return cos * self.alpha.repeat(2), sin + self.alpha.repeat(2)

    monkeypatch.setattr(type(rotary), "forward", forward)
    theirs = copy.deepcopy(model)
    report = accelerate(model, parts=PARTS, quiet=True)
    assert "rope" in {change.part for change in report.changed}
    if how == "pickled":
        model = pickle.loads(pickle.dumps(model))
    found, expected = (gradients(m, *batch()) for m in (model, theirs))
    assert model.model.rotary_emb.alpha.grad.abs().min() > 0
    assert_within([[found, expected, expected]], 1e-5)
    with mock.patch.object(ops, "rope", wraps=ops.rope) as calls:
        with torch.no_grad():
            model(batch()[0])
        model.model.rotary_emb.alpha.requires_grad_(False)
        model(batch()[0])
    assert calls.call_count == 4


def test_restore_is_to_the_bit_and_other_models_never_change():
    from transformers import LlamaForCausalLM

    config = config_of("llama", attn_implementation="eager")
    model, other = LlamaForCausalLM(config).train(), LlamaForCausalLM(config).train()
    classes = {name: type(m) for name, m in model.named_modules()}
    forwards = {cls: cls.forward for cls in classes.values()}
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    before = gradients(model, *batch())
    untouched = gradients(other, *batch())
    accelerate(model, parts=PARTS, quiet=True)
    assert model.config._attn_implementation == "tilewright:or_eager"
    assert other.config._attn_implementation == config._attn_implementation == "eager"
    again = gradients(other, *batch())
    assert all(torch.equal(untouched[n], again[n]) for n in untouched)
    changed = gradients(model, *batch())
    assert not all(torch.equal(before[n], changed[n]) for n in before), "nothing was computed anew"
    restore(model)
    after = gradients(model, *batch())
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert all(cls.forward is forward for cls, forward in forwards.items())
    for name, m in model.named_modules():
        assert m.__dict__.keys() == attributes[name].keys(), name
    assert model.config.to_dict() == config.to_dict()


OWN = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


@pytest.mark.parametrize("own", OWN)
def test_every_attention_of_transformers_is_changed(own):
    """Their packages need not be there."""
    from transformers import AttentionInterface

    if own not in AttentionInterface().valid_keys():
        pytest.skip(f"this version of transformers has no {own}")
    model = tiny()
    model.config._attn_implementation = own
    report = accelerate(model, parts=("attention",), quiet=True)
    assert "attention" not in report.left
    assert model.config._attn_implementation == integration.tables.with_other(own)


def test_accelerating_twice_is_once():
    model = tiny("qwen3_moe")
    first = accelerate(model, parts=PARTS, quiet=True)
    classes = [type(m) for m in model.modules()]
    assert accelerate(model, parts=PARTS, quiet=True) == first
    assert [type(m) for m in model.modules()] == classes
    report = accelerate(model, parts=("norm",), quiet=True)
    assert [c.part for c in report.changed] == ["norm"]
    restore(model)
    assert model.config._attn_implementation == model.config._experts_implementation == "eager"
    restore(model)


def test_copies_and_checkpoints(tmp_path):
    """deepcopy and pickle stay accelerated; a checkpoint is transformers' own."""
    from transformers import AutoModelForCausalLM

    model = tiny("qwen3_moe")
    saved = model.state_dict()
    accelerate(model, parts=PARTS, quiet=True)
    expected = gradients(model, *batch())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = gradients(copied, *batch())
        assert all(torch.equal(expected[n], found[n]) for n in expected)
        assert type(copied) is type(model) and type(copied.model.norm) is type(model.model.norm)
        restore(copied)
        assert copied.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.architectures == ["Qwen3MoeForCausalLM"]
    assert loaded.config._attn_implementation == "sdpa"
    assert all(torch.equal(saved[n], t) for n, t in loaded.state_dict().items())
    model.load_state_dict(loaded.state_dict())


def test_the_report_is_printed_and_says_why(capsys):
    model = tiny("llama", attention_dropout=0.5)
    extra = torch.nn.Parameter(torch.ones(1))
    model.model.layers[0].input_layernorm.register_parameter("extra", extra)
    model.model.layers[1].mlp.act_fn = torch.nn.Hardtanh()
    model.model.norm.forward = model.model.norm.forward
    model.lm_head.register_forward_hook(lambda *a: None)
    report = accelerate(model, parts=PARTS)
    assert capsys.readouterr().out == f"{report}\n"
    assert report.left == {
        "norm": "1 x LlamaRMSNorm has no weight [D] of its own, or further parameters; "
        "1 x LlamaRMSNorm has a forward of its own instance",
        "mlp": "1 x LlamaMLP does not compute down_proj(silu(gate) * up), nor with GELU",
        "linear_attention": "the model has none",
        "experts": "the model has none",
        "loss": "1 x LlamaForCausalLM has hooks on its lm_head",
    }
    assert "changed  rope              2 LlamaAttention: rope[" in str(report)
    assert ", or eager for what it does not compute" in str(report)
    accelerate(model, quiet=True)
    assert not capsys.readouterr().out
    gradients(model, *batch())  # the others still compute


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_has_the_shape_that_its_count_gives_it(shape):
    """Trainers gather the count over processes, and do not reduce its shape."""
    ours, theirs = pair(parts=("loss",))
    ids, _ = batch()
    count = torch.full(shape, 37, device=DEVICE)
    found, wanted = (m(ids, labels=ids, num_items_in_batch=count).loss for m in (ours, theirs))
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "what, reason",
    [
        ("weights", "output_attentions"),
        ("mask of four dimensions", "a mask of shape"),
        ("mask that the model writes into", "a mask that the model has written into"),
        ("padding on the right of a cache", "padding on the left of cached keys only"),
    ],
)
def test_attention_that_is_not_computed_here_is_the_models_own(what, reason, own, monkeypatch):
    """One warning, the numbers of before, and the other calls are this library's."""
    monkeypatch.setattr(integration.errors, "WARNED", set())
    ours, theirs = (m.eval() for m in pair(parts=("attention",), attention=own))
    ids, _ = batch()
    B, S = ids.shape

    def call(model):
        given = {"attention_mask": None}
        if what == "weights":
            given["output_attentions"] = True
        elif what == "mask of four dimensions":
            seen = torch.ones(B, 1, S, S, dtype=torch.bool).tril()
            seen[..., 5:, 1] = False
            lowest = torch.finfo(torch.float32).min
            given["attention_mask"] = torch.zeros(B, 1, S, S).masked_fill(~seen, lowest)
        elif what.startswith("mask that"):
            own_forward = type(model.model.layers[0]).forward

            def forward(self, hidden_states, attention_mask, **options):
                if attention_mask is not None:
                    attention_mask[..., 5:, 1] = False if own == "sdpa" else -1e9
                return own_forward(self, hidden_states, attention_mask=attention_mask, **options)

            layer = model.model.layers[0]
            layer.forward = types.MethodType(forward, layer)
            given["attention_mask"] = torch.ones(B, S).index_fill(1, torch.tensor([0]), 0)
        elif what.startswith("padding"):
            given["attention_mask"] = torch.ones(B, S)
        out = model(ids, **given)
        found = [out.logits, *(out.attentions or ())]
        if what.startswith("padding"):
            more = torch.ones(B, S + 3).index_fill(1, torch.tensor([S + 2]), 0)
            rest = model(ids[:, :3], attention_mask=more, past_key_values=out.past_key_values)
            found = [rest.logits[:, :2]]
        return [t for t in found if t is not None]

    with pytest.warns(UserWarning, match=f"{reason}.*{own!r} computes it, as before") as caught:
        found, again = call(ours), call(ours)
    assert sum("as before accelerate" in str(w.message) for w in caught) == 1
    for a, b, c in zip(found, again, call(theirs), strict=True):
        torch.testing.assert_close(a, b)
        if what.startswith("mask that"):  # the padded first token attends to nothing
            a, c = a[:, 1:], c[:, 1:]
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)
    if what.startswith("mask that"):
        return
    # What ops.attention computes is still its own.
    own = integration.attention
    with mock.patch.object(own, "attention", wraps=own.attention) as calls:
        ours.eval()(ids, attention_mask=None)
    assert calls.call_count == 2


def test_what_a_module_is_given_later_is_used():
    """Another epsilon, another activation, and hooks on the activation."""
    ids, _ = batch()
    for change in (
        lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Hardtanh()),
        lambda model: model.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, x, y: 2 * y),
    ):
        theirs = tiny("llama").eval()
        ours = copy.deepcopy(theirs)
        accelerate(ours, quiet=True)
        before = ours(ids).logits
        change(theirs), change(ours)
        expected = theirs(ids).logits
        assert (expected - before).abs().max() > 1e-3
        copies = [ours, copy.deepcopy(ours)]
        if "register_forward_hook" not in change.__code__.co_names:  # with a lambda
            copies.append(pickle.loads(pickle.dumps(ours)))
        for model in copies:
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        restore(ours)
        assert not any("_tilewright" in key for m in ours.modules() for key in m.__dict__)


def test_a_gates_projections_may_be_replaced():
    model = tiny("llama").eval()
    accelerate(model, parts=("mlp",), quiet=True)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = copy.deepcopy(mlp.up_proj)
    with mock.patch.object(ops, "silu_mul", wraps=ops.silu_mul) as calls:
        model(batch()[0])
    assert calls.call_count == 2


def test_restore_reaches_copies_that_peft_makes():
    """`modules_to_save` copies modules, whose configuration is then a copy, too."""
    from peft import LoraConfig, get_peft_model

    model = tiny("qwen3_moe").eval()
    ids, _ = batch()
    expected = model(ids).logits
    accelerate(model, parts=PARTS, quiet=True)
    lora = LoraConfig(target_modules=["lm_head"], modules_to_save=["experts", "self_attn"])
    peft = get_peft_model(model, lora).eval()
    restore(peft)
    configs = [c for m in peft.modules() if (c := m.__dict__.get("config")) is not None]
    assert {c._attn_implementation for c in configs} == {"eager"}
    assert {c._experts_implementation for c in configs} == {"eager"}
    assert torch.equal(peft(ids).logits, expected)


@pytest.mark.parametrize("order", ["before", "after", "compiled"])
def test_cpt_of_peft_has_its_logits(order):
    """accelerate before PEFT, or after it."""
    from peft import CPTConfig, get_peft_model

    tokens = {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}
    config = CPTConfig(task_type="CAUSAL_LM", **tokens)
    base = tiny("llama", tie_word_embeddings=False, num_hidden_layers=1)
    theirs = get_peft_model(copy.deepcopy(base), config)
    if order == "after":
        ours = get_peft_model(base, config)
        assert "CPT" in accelerate(ours, quiet=True).left["loss"]
    else:
        report = accelerate(base, quiet=True)
        assert "loss" in {change.part for change in report.changed}
        ours = get_peft_model(base, config)
    if order == "compiled":
        torch._dynamo.reset()
        ours.base_model.compile(backend="eager")
    ids, mask = batch()

    def step(model):
        given = {"input_ids": ids, "labels": ids, "input_type_mask": torch.full_like(ids, 4)}
        loss = model(**given, attention_mask=mask).loss
        learned = [p for p in model.parameters() if p.requires_grad]
        assert learned
        return loss, *torch.autograd.grad(loss, learned)

    for found, expected in zip(step(ours), step(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_report_names_the_modules_of_each_part():
    report = accelerate(tiny("qwen3_moe"), parts=PARTS, quiet=True)
    modules = {change.part: change.modules for change in report.changed}
    assert modules["attention"] == {"Qwen3MoeAttention": 2}
    assert modules["experts"] == {"Qwen3MoeExperts": 1} and modules["mlp"] == {"Qwen3MoeMLP": 1}


def test_refusals():
    model = tiny()
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        accelerate("llama")
    with pytest.raises(TypeError, match="parts must be a collection of names, got 'norm'"):
        accelerate(model, parts="norm")
    with pytest.raises(ValueError, match=r"parts must be among .*, got 'norms'"):
        accelerate(model, parts=("norms",))
    with pytest.raises(ValueError, match=r"logits must be one of \['eval', 'never', 'always'\]"):
        accelerate(model, logits="no")
    with pytest.raises(ValueError, match="parts must be among"), accelerated(parts=("norms",)):
        pass
    accelerate(model, parts=PARTS, quiet=True)
    norm = model.model.norm
    norm.__class__ = type("FSDPNorm", (type(norm),), {})
    with pytest.raises(RuntimeError, match="FSDPNorm was given a class of its own after"):
        restore(model)
    assert integration.acceleration.BEFORE in model.__dict__, "half undone"


# ---- the loss


def test_the_loss_follows_its_arguments():
    ours, theirs = pair("gemma2", parts=("loss",))  # with a softcap
    ids, _ = batch()
    labels = ids.clone()
    labels[0, :4] = 7
    for options in (
        {},
        {"num_items_in_batch": 5},
        {"ignore_index": 7},
        {"shift_labels": labels.roll(3, 1)},
        {"logits_to_keep": 4, "labels": labels[:, -4:]},
        {"logits_to_keep": torch.tensor([2, 5]), "labels": labels[:, :2]},
    ):
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            loss = model(**{"input_ids": ids, "labels": labels, **options}).loss
            loss.backward()
            grads = {n: p.grad for n, p in model.named_parameters()}
            found.append({"loss": loss.detach(), **grads})
        assert max(errors(*found).values()) < 1e-5, options
    nothing = torch.full_like(ids, -100)
    assert theirs(ids, labels=nothing).loss.isnan() and ours(ids, labels=nothing).loss == 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_tuple_is_that_of_transformers_in_training_too(kind):
    ours, theirs = pair(kind, parts=("loss",))
    ids, _ = batch()
    for training in (True, False):
        options = {"labels": ids, "return_dict": False, "output_hidden_states": True}
        found, wanted = (m.train(training)(ids, **options) for m in (ours, theirs))
        assert [*map(type, found)] == [*map(type, wanted)]
        for f, w in zip(found[:2], wanted[:2], strict=True):
            torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-5)
    head = ours.get_output_embeddings().weight
    logits = ours.train()(ids, labels=ids, return_dict=False)[1]
    assert torch.autograd.grad(logits.sum(), head)[0].any(), "the logits have no graph"


def test_a_tuple_without_logits_keeps_their_place():
    model = tiny()
    accelerate(model, parts=("loss",), logits="never", quiet=True)
    ids, _ = batch()
    for training in (True, False):
        loss, logits, cache = model.train(training)(ids, labels=ids, return_dict=False)
        assert loss.dim() == 0 and logits is None and not isinstance(cache, torch.Tensor)


@pytest.mark.parametrize(
    "logits, expected",
    [("eval", (False, True)), ("never", (False, False)), ("always", (True, True))],
)
def test_logits_are_there_where_they_are_wanted(logits, expected):
    """In training and in evaluation; always without labels and with a loss of the model's own."""
    model = tiny()
    ids, _ = batch()
    accelerate(model, parts=PARTS, logits=logits, quiet=True)
    for training, there in zip((True, False), expected, strict=True):
        assert (model.train(training)(ids, labels=ids).logits is not None) == there
    assert model(ids).logits is not None
    model.loss_function = lambda logits, labels, vocab_size, **k: logits.mean()
    out = model(ids, labels=ids)
    assert torch.equal(out.loss, out.logits.mean())


def test_a_head_whose_weight_is_read():
    """Mamba casts its hidden states to the head's dtype."""
    theirs = tiny("mamba", state_size=4)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, parts=PARTS, quiet=True)
    assert [change.part for change in report.changed] == ["norm", "loss"]
    ids, _ = batch()
    out, expected = (m(ids, labels=ids) for m in (ours, theirs))
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected.loss)


def test_auxiliary_losses_and_hidden_states_stay():
    ours, theirs = pair(
        "qwen3_moe", parts=("loss",), output_router_logits=True, router_aux_loss_coef=0.5
    )
    ids, _ = batch()
    a, b = (m(ids, labels=ids, output_hidden_states=True) for m in (ours, theirs))
    torch.testing.assert_close(a.loss, b.loss)
    assert torch.equal(a.aux_loss, b.aux_loss) and len(a.hidden_states) == 3
    assert a.logits is None and len(a.router_logits) == 1


def _without_gradients(logits):
    """As a metric in a forward, which must not leave the loss without gradients."""
    with torch.no_grad():
        return logits.argmax(-1)


def _with_data(z):
    z.data = z.data * 2
    return z


def _without_record(z):
    with torch.no_grad():
        z.mul_(2)
    return z


def _under_no_grad(self, h):
    with torch.no_grad():
        return self.lm_head(h)


def _with_hook(z):
    half = z / 2
    z.register_hook(lambda g: g * 0)
    return half


def _in_float32(self, h):
    with torch.autocast("cpu", enabled=False):
        return self.lm_head(h.float())


def _written(write):
    """A forward that writes into its logits, whatever the write returns."""

    def change(self, h):
        z = self.lm_head(h)
        write(z)
        return z

    return change


@pytest.mark.parametrize(
    "change, fused",
    [
        (lambda z: z * 0.25, True),
        (lambda z: 0.25 * z / 2, True),
        (lambda z: torch.tanh(z / 3) * 3, True),
        (lambda z: torch.tanh(z / 3) * 2, True),
        (lambda z: (z / 3).tanh() * 3, True),
        (lambda z: z.float().contiguous(), True),
        (lambda z: z.mul_(0.25), True),
        (lambda z: z.div_(3).tanh_() * 3, True),
        (lambda z: torch.div(torch.mul(z, 2), 3), True),
        (lambda z: operator.imul(z, 2), True),
        (lambda z: (z.mul_(2), z * 3)[1], True),
        (lambda z: (z * 3, z)[1], True),
        (lambda z: z.to(z.device).to(torch.float32), True),
        (lambda z: torch.tanh(torch.tanh(z)), False),
        (lambda z: z + 1, False),
        (lambda z: z.clamp(max=0.5), False),
        (lambda z: z * torch.arange(48), False),
        (lambda z: torch.where(z > 0, z, -z), False),
        (lambda z: z[..., :] * 2, False),
        (lambda z: torch.cat((z, z), 1)[:, 5:].clone(), False),
        (lambda z: z.clamp_(max=0.5), False),
        (lambda z: torch.clamp_(z, max=0.5), False),
        (lambda z: torch.nn.functional.relu(z, inplace=True), False),
        (lambda z: operator.iadd(z, 1), False),
        (lambda z: (z.clamp_(max=0.5), z * 2)[1], False),
        (lambda z: (z[..., :9].zero_(), z)[1], False),
        (lambda z: (z[..., :9].mul_(2), z.mul_(2), z)[2], False),
        (lambda z: (z.view(-1, 48).fill_(1), z)[1], False),
        (lambda z: (operator.setitem(z, (..., slice(3, 9)), -1.0), z)[1], False),
        (lambda z: (torch.mul(z, 2, out=z) if not z.requires_grad else z.mul_(2), z)[1], False),
        (lambda z: (z.masked_fill_(z > 0.5, 0.5), z)[1], False),
        (lambda z: (z.detach().argmax(-1), z * 2)[1], False),
        (lambda z: (_without_gradients(z), z * 2)[1], False),
        (lambda z: (str(z.shape), z.dtype, z.size(0), z)[3], False),
    ],
)
def test_whatever_a_forward_does_with_its_logits(change, fused):
    """The loss and its gradients are those of the tensor, also where it is written into."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    g = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 48, bias=False)
    x = torch.randn(2, 5, 16, generator=g).requires_grad_()
    labels = torch.randint(48, (2, 5), generator=g)

    def of(logits):
        loss = None
        if isinstance(logits, integration.causal_lm.Logits):
            loss = logits.loss(labels)
            logits = logits.tensor("a test") if loss is None else None
        return (loss is not None), ForCausalLMLoss(logits, labels, 48) if loss is None else loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        was_fused, ours = of(change(integration.causal_lm.SeenLogits("Model", head, x)))
    theirs = of(change(head(x)))[1]
    assert was_fused == fused
    # float32, whose roundings come in another order in the fused loss.
    close = {"rtol": 1e-5, "atol": 1e-6} if fused else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours, theirs, **close)
    wrt = (x, head.weight)
    for a, b in zip(torch.autograd.grad(ours, wrt), torch.autograd.grad(theirs, wrt), strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize(
    "change",
    [
        _written(lambda z: z.mul_(3.0)),
        _written(lambda z: z.clamp_(max=0.02)),
        _written(lambda z: z.div_(3.0)),
        _written(lambda z: operator.setitem(z, (..., slice(4, 9)), -1.0)),
        _written(lambda z: z[..., :20].mul_(3.0)),
        _written(lambda z: torch.nn.functional.relu(z, inplace=True)),
        lambda self, h: operator.imul(self.lm_head(h), 3.0),
        lambda self, h: _with_data(self.lm_head(h)),
        lambda self, h: _without_record(self.lm_head(h)),
        lambda self, h: _under_no_grad(self, h),
        lambda self, h: _under_no_grad(self, h) * 2,
        lambda self, h: _with_hook(self.lm_head(h)),
        lambda self, h: self.lm_head(h) * (3 if torch.is_tensor(self.lm_head(h)) else 1),
        lambda self, h: self.lm_head(h) * (3 if isinstance(self, torch.nn.Module) else 1),
        _in_float32,
    ],
)
def test_what_a_forward_asks_of_its_logits_is_the_tensors_answer(change):
    """Writes into them, data that is assigned, modes of gradients and autocast, hooks,
    isinstance.
    """
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Own(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **options):
            logits = change(self, self.model(input_ids).last_hidden_state)
            self.lm_head  # noqa: B018 - accelerate looks for the name here
            return CausalLMOutputWithPast(
                loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits
            )

    torch.manual_seed(0)
    theirs = Own(config_of("llama", initializer_range=0.2)).train()
    ours = copy.deepcopy(theirs)
    assert "loss" not in accelerate(ours, parts=("loss",), quiet=True).left
    ids, _ = batch()
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*computes with its logits before its loss")
        for model in (ours, theirs):
            with torch.autocast("cpu", torch.bfloat16, enabled=change is _in_float32):
                loss = model(ids, labels=ids).loss
            grads = []
            if loss.requires_grad:
                loss.backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append((loss.detach(), *grads))
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_hidden_states_that_change_behind_the_head_are_an_error(scaled):
    head, x = torch.nn.Linear(16, 48, bias=False), torch.randn(2, 5, 16)
    logits = integration.causal_lm.Logits("Model", head, x)
    x.mul_(2)
    if scaled:  # after the change
        logits = logits / 3
    with pytest.raises(RuntimeError, match=r'Model writes into the hidden states.*logits="always"'):
        logits.loss(torch.zeros(2, 5, dtype=torch.long))


def test_a_biased_head_is_not_scaled_with_its_bias_left_alone():
    head, x = torch.nn.Linear(16, 48), torch.randn(2, 5, 16)
    logits = integration.causal_lm.Logits("Model", head, x)
    labels = torch.zeros(2, 5, dtype=torch.long)
    assert logits.loss(labels) is not None and (logits * 3).loss(labels) is None


def test_values_wider_than_keys():
    """Multi-head latent attention whose values are wider than its queries and keys."""
    ours, theirs = (m.eval() for m in pair("deepseek_v3", parts=("attention",), v_head_dim=32))
    ids, _ = batch()
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_a_layer_that_reads_the_mask_is_recomputed_as_it_was_computed(own):
    """Non-reentrant checkpoints compare what a layer saves each time."""
    ours, theirs = pair(attention=own)
    ids, mask = batch("left")
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*as before accelerate")
        for model in (ours, theirs):
            last = model.model.layers[1]
            forward = type(last).forward

            def reading(self, x, attention_mask=None, f=forward, **options):
                return f(self, x, attention_mask=attention_mask.clone(), **options)

            last.forward = types.MethodType(reading, last)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            labels = ids.clone()
            labels[:, :4] = -100  # padding, and what its last token would predict
            model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
            found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_an_unpickled_model_runs_in_a_process_that_knows_nothing(tmp_path):
    """Its configuration names this library's attention, whatever parts were changed."""
    import subprocess
    import sys

    model = tiny("llama").eval()
    accelerate(model, parts=("attention",), quiet=True)
    ids, _ = batch()
    torch.save((model, ids, model(ids).logits), tmp_path / "model")
    code = (
        "import sys, torch; model, ids, logits = torch.load(sys.argv[1], weights_only=False); "
        "assert torch.allclose(model(ids).logits, logits)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model"], check=True)


def test_a_static_cache_moves_on_before_its_mask_is_built():
    """The cache counts in the tensor that the mask's offset is."""
    ours, theirs = (m.eval() for m in pair(parts=("attention",)))
    ids, _ = batch()
    options = {"cache_implementation": "static", "output_attentions": True, "max_new_tokens": 3}
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*as before accelerate")
        for model in (ours, theirs):
            out = model.generate(
                ids, pad_token_id=0, output_logits=True, return_dict_in_generate=True, **options
            )
            found.append(out.logits)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_a_vocabulary_of_logits_is_never_there():
    """Peak memory of forward and backward through the head, whose logits would take 128 MiB: they
    and their gradient would be 256.
    """
    peak = pytest.importorskip("bench.host_memory").peak_mib
    ours, theirs = pair(
        parts=("loss",), vocab_size=32768, num_hidden_layers=1, tie_word_embeddings=True
    )
    ids = torch.randint(3, 32768, (1, 1024))
    found = []
    for model in (ours, theirs):
        gc.collect()
        found.append(peak(lambda model=model: model(ids, labels=ids, use_cache=False).loss.backward()))  # fmt: skip
        model.zero_grad()
    if None in found:
        pytest.skip("the kernel reports no peak memory")
    # One chunk of 64 MiB, the attention's 8 and what the processor's matrix products keep, against
    # logits two to three times over.
    assert found[0] < 192 < 256 < found[1], found


# ---- as it is used


def test_autocast():
    """float32 weights under autocast, as in Trainer with bf16=True."""
    ours, theirs = pair("qwen3")
    exact = gradients(theirs, *batch("left"))
    exact = {n: t.clone() for n, t in exact.items()}
    with torch.autocast(DEVICE, torch.bfloat16):
        found = [gradients(m, *batch("left")) for m in (ours, theirs)]
    assert_within([(*found, exact)], 2**-9)
    assert found[0]["lm_head.weight"].dtype == found[0]["loss"].dtype == torch.float32


def test_trainer_peft_and_checkpointing(tmp_path):
    """Losses of three steps of Trainer with gradient accumulation, checkpointing and LoRA."""
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in batch(rows=12)[0].cpu()]
    steps = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_steps": 3}
    steps |= {"per_device_train_batch_size": 2, "learning_rate": 0.05, "logging_steps": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(tmp_path, **steps, **quiet, use_cpu=DEVICE == "cpu")
    calls, losses, adapters = [], [], []
    for first in ("accelerate", "peft", None):
        model = tiny()
        if first == "accelerate":
            accelerate(model, parts=PARTS, quiet=True)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(0)
        model = peft.get_peft_model(model, lora)
        if first == "peft":
            report = accelerate(model, parts=PARTS, quiet=True)
            assert {c.part for c in report.changed} == set(PARTS) - {"experts", "linear_attention"}
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        calls.append(model.base_model.model(**{k: v[None].to(DEVICE) for k, v in data[0].items()}))
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
        adapters.append(peft.get_peft_model_state_dict(model))
    assert [out.logits is None for out in calls] == [True, True, False]
    assert abs(losses[2][0] - losses[2][2]) > 0.1, "the model does not change"
    for mine in losses[:2]:
        assert mine == pytest.approx(losses[2], rel=1e-4)
    for mine in adapters[:2]:
        assert mine.keys() == adapters[2].keys()
    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == tiny().state_dict().keys()


def test_adapters_of_the_head_are_not_passed_over():
    """LoRA on lm_head, added after accelerate: the loss is computed with it."""
    peft = pytest.importorskip("peft")
    model = tiny()
    accelerate(model, parts=PARTS, quiet=True)
    lora = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora)
    found = gradients(model, *batch())
    assert found["base_model.model.lm_head.lora_B.default.weight"].norm() > 0
    restore(model)
    expected = gradients(model, *batch())
    torch.testing.assert_close(found["loss"], expected["loss"])


def test_quantized_layers():
    """QLoRA: linear layers of bitsandbytes in 4 bits, adapters, and a float32 head."""
    bnb = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    theirs = tiny("phi3", hidden_size=64, head_dim=16)
    for layer in theirs.model.layers:
        mlp = [(layer.mlp, name) for name in ("gate_up_proj", "down_proj")]
        for block, name in ((layer.self_attn, "qkv_proj"), *mlp):
            dense = getattr(block, name)
            n, m = dense.in_features, dense.out_features
            quantized = bnb.nn.Linear4bit(n, m, bias=False, quant_type="nf4")
            quantized.weight = bnb.nn.Params4bit(dense.weight.data, False, quant_type="nf4")
            setattr(block, name, quantized.to(DEVICE))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, parts=PARTS, quiet=True)
    assert {c.part for c in report.changed} == set(PARTS) - {"experts", "linear_attention"}
    lora = peft.LoraConfig(r=4, target_modules=["qkv_proj", "gate_up_proj"], init_lora_weights=False)  # fmt: skip
    found = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        grads = gradients(peft.get_peft_model(model, lora), *batch("right"))
        found.append({n: t for n, t in grads.items() if t is not None})
    assert len(found[0]) == 9 and max(errors(*found).values()) < 1e-5


def test_compiled_models_are_one_graph():
    model = tiny("gemma2", sliding_window=64, num_hidden_layers=1)
    accelerate(model, parts=PARTS, quiet=True)
    expected = gradients(model, *batch())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids, _ = batch()
    model.zero_grad()
    out = compiled(ids, labels=ids, num_items_in_batch=torch.tensor(37), use_cache=False)
    out.loss.backward()
    assert out.logits is None
    found = {"loss": out.loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}
    assert max(errors(found, expected).values()) < 1e-5
    restore(model)
    assert compiled(ids, labels=ids, use_cache=False).logits is not None, "compiled code is stale"
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "kind, count, graphs", [("llama", int, 2), ("gemma2", int, 2), ("llama", torch.tensor, 1)]
)
def test_a_count_that_changes_makes_no_more_graphs_than_in_transformers(kind, count, graphs):
    """With the first count as a constant and with any; one where it is a tensor."""
    ours, theirs = pair(kind, parts=("loss",), num_hidden_layers=1)
    ids, _ = batch()
    torch._dynamo.reset()
    seen = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, fullgraph=True, backend=seen)
    for n in range(50, 55):
        options = {"num_items_in_batch": count(n), "use_cache": False}
        loss = compiled(ids, labels=ids, **options).loss
        torch.testing.assert_close(loss, theirs(ids, labels=ids, **options).loss)
    assert seen.frame_count <= graphs
    torch._dynamo.reset()


def test_dropout_of_attention_is_computed_here(monkeypatch):
    monkeypatch.setattr(integration.errors, "WARNED", set())
    model = tiny("llama", attention_dropout=0.5).train()
    accelerate(model, parts=("attention",), quiet=True)
    ids, _ = batch()
    own, found = integration.attention, []
    with mock.patch.object(own, "attention", wraps=own.attention) as calls:
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            found.append(model(ids).logits)
    assert {call.kwargs["dropout_p"] for call in calls.call_args_list} == {0.5}
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-3)
    assert not integration.errors.WARNED


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_attention_of_the_model_is_in_the_graph_too(own):
    """Dropout, under fullgraph: a warning or a table's look-up would break the graph."""
    ours, theirs = pair(attention=own, attention_dropout=0.3, num_hidden_layers=1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids, mask = batch("left")
    labels = ids.masked_fill(mask == 0, -100)
    losses = []
    for model in (compiled, theirs):
        torch.manual_seed(0)
        losses.append(model(ids, attention_mask=mask, labels=labels, use_cache=False).loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


# ---- models that other code builds


def test_accelerated_finds_models_however_they_are_built(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

    own = PreTrainedModel.post_init
    tiny().save_pretrained(tmp_path)
    with accelerated(parts=("norm", "loss")) as reports:
        built = [
            LlamaForCausalLM(config_of("llama")),
            AutoModelForCausalLM.from_config(config_of("qwen3")),
            AutoModelForCausalLM.from_pretrained(tmp_path),
        ]
    names = [f"{kind}ForCausalLM" for kind in ("Llama", "Qwen3", "Llama")]
    assert [r.model for r in reports] == names
    assert capsys.readouterr().out == "".join(f"{r}\n" for r in reports)
    ids, _ = batch()
    for model in built:
        assert model.train()(ids, labels=ids).logits is None
    assert PreTrainedModel.post_init is own
    after = LlamaForCausalLM(config_of("llama"))
    assert after(ids, labels=ids).logits is not None
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).train()(ids, labels=ids).loss
    torch.testing.assert_close(built[2](ids, labels=ids).loss, expected)
    with pytest.raises(RuntimeError, match="inside"), accelerated():
        raise RuntimeError("inside")
    assert PreTrainedModel.post_init is own


def test_trl_builds_an_accelerated_model(tmp_path):
    pytest.importorskip("trl", reason="needs trl, of the extra trl")
    import trl_rows

    logged = {"logging_strategy": "steps", "logging_steps": 1, "ours": False}
    trl_rows.tiny().save_pretrained(tmp_path)
    losses = []
    for parts in (PARTS, ()):
        with trl_rows.fresh(), accelerated(parts=parts, quiet=True) as reports:
            trainer = trl_rows.build("sft", str(tmp_path), tmp_path / "out", **logged)
            trainer.train()
        assert len(reports) == 1
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 2


def test_ops_follow_use():
    """A pin of `tilewright.use` holds inside a model, too."""
    from tilewright import use

    model = tiny()
    with use("eager"):
        report = accelerate(model, parts=("norm",), quiet=True)
    assert report.changed[0].by == "rmsnorm[eager]"
    assert ops.rmsnorm is integration.layers.ops.rmsnorm


class GatedRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x, gate=None):
        return ops.rmsnorm(x if gate is None else x * gate, self.weight, self.eps)


class MLPWithDropout(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.gate_proj, self.up_proj = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        self.down_proj, self.dropout = torch.nn.Linear(6, 4), torch.nn.Identity()
        if how == "module":
            self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        y = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return torch.dropout(y, 0.5, self.training) if self.how == "call" else self.dropout(y)


@pytest.mark.parametrize("how", ["module", "call"])
def test_what_a_norm_or_mlp_computes_besides_is_not_lost(how):
    gated, mlp = GatedRMSNorm(), MLPWithDropout(how).eval()
    drawn = torch.get_rng_state()
    with instance.on_plain_numbers():
        assert layers.norm_options(gated) == "takes more than the rows to normalize"
        assert isinstance(layers.mlp_options(mlp), str)
        assert isinstance(layers.mlp_options(MLPWithDropout("no").eval()), tuple)
    assert torch.equal(torch.get_rng_state(), drawn)
