"""tilewright.integrations: transformers' models compute the same with tilewright's attention and
experts as with their own.
"""

import contextlib
import copy
import inspect
import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from helpers import (
    DEVICE,
    join_group,
    keep_tables,
    skip_if_refused,
    skip_unless_usable,
    two_processes,
)

from tilewright import ImplementationUnavailable, ops
from tilewright.integrations import transformers as integration
from tilewright.ops.attention.attention import ATTENTION
from tilewright.ops.moe.moe import MOE_MLP
from tilewright.trainer.models.model import Ops

pytestmark = pytest.mark.packages

NAMES = [i.name for i in MOE_MLP.implementations]
COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "head_dim": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 8, "head_dim": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_mtp_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
}


@pytest.fixture
def hf(monkeypatch):
    """transformers with tilewright's names registered; its tables are restored after the test."""
    transformers = pytest.importorskip(
        "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
    )
    keep_tables(monkeypatch)
    integration.register()
    return transformers


@pytest.fixture
def calls(monkeypatch):
    """Records the implementations that moe_mlp is called with: an ignored experts_implementation
    would change nothing.
    """
    seen, compute = [], integration.experts.moe_mlp

    def counted(*arguments, implementation, **options):
        seen.append(implementation)
        return compute(*arguments, implementation=implementation, **options)

    monkeypatch.setattr(integration.experts, "moe_mlp", counted)
    return seen


def tiny(hf, kind, layers=2, dtype=torch.float32, experts="eager", **changes):
    """A random model whose experts matter: transformers initializes weights too small to matter."""
    settings = {**COMMON, **MODELS.get(kind, {}), "num_hidden_layers": layers, **changes}
    config = hf.AutoConfig.for_model(kind, **settings)
    model = hf.AutoModelForCausalLM.from_config(config, experts_implementation=experts).to(DEVICE)
    g = torch.Generator(device=DEVICE).manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, device=DEVICE, generator=g) * p.shape[-1] ** -0.5)
    return model.to(dtype).train()


def drawn(*shape):
    """Tokens."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    return torch.randint(1, 50, shape, device=DEVICE, generator=generator)


def step(model, experts=None):
    """The loss, and the gradient of every parameter that has one."""
    if experts:
        model.set_experts_implementation(experts)
    model.zero_grad()
    tokens = drawn(2, 19)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def experts_of(hf, kind="mixtral", name="tilewright"):
    """A layer's."""
    return tiny(hf, kind, layers=1, experts=name).model.layers[0].mlp.experts


def routed(tokens):
    """Experts' inputs, indices and weights."""
    x, weight = (torch.rand(tokens, n, device=DEVICE, requires_grad=True) for n in (32, 3))
    return x, torch.rand(tokens, 8, device=DEVICE).topk(3, -1).indices, weight


def close(found, expected, tolerance):
    """Compares the norm of each tensor's difference with the norm of the expected tensor."""
    (loss, grads), (expected_loss, expected_grads) = found, expected
    assert abs(loss - expected_loss) <= tolerance * expected_loss
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        assert gradient.norm() > 0, f"{name} tests nothing"
        assert grads[name].dtype == gradient.dtype
        error = (grads[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: {error:.2e}"


# ---- without transformers


# One Python for both: the second goes on where the first has only imported.
WITHOUT = """
import sys, types, tilewright, tilewright.ops, tilewright.integrations.transformers
print(tilewright.integrations.transformers.__name__, 'transformers' in sys.modules)
old = types.ModuleType('transformers'); old.__version__ = '5.16.2'
old.__spec__ = types.SimpleNamespace(); sys.modules['transformers'] = old
try: tilewright.integrations.transformers.register()
except RuntimeError as error: print(error)
"""


@pytest.fixture(scope="module")
def without_transformers():
    """What a Python says that has not imported transformers."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_importing_everything_here_imports_no_transformers(without_transformers):
    assert without_transformers[0] == "tilewright.integrations.transformers False"


def test_a_missing_or_old_transformers_is_named(monkeypatch, without_transformers):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImplementationUnavailable, match=r"pip install 'tilewright\[transformers"):
        integration.register()
    assert without_transformers[1:] == [
        "transformers 5.16.2 is too old: 5.17 or later is supported"
    ]


# ---- whole models


@pytest.mark.parametrize(
    "kind, name", [*(("qwen3_moe", name) for name in NAMES), *((kind, "auto") for kind in MODELS)]
)
def test_loss_and_every_gradient_are_those_of_transformers(hf, calls, kind, name):
    """By every implementation; test_transformers_families.py has the experts of every family."""
    if name != "auto":
        skip_unless_usable(MOE_MLP, name, torch.float32)
    model = tiny(hf, kind)
    expected = step(model)
    assert not calls
    # 1e-5: about a hundred float32 roundings, in another order.
    close(step(model, "tilewright" if name == "auto" else f"tilewright:{name}"), expected, 1e-5)
    assert calls == [name] * (1 if kind == "deepseek_v3" else 2)  # DeepSeek's first layer is dense
    router = [n for n in expected[1] if n.endswith(("mlp.gate.weight", "router.weight"))]
    assert len(router) == len(calls)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_experts_are_no_further_from_truth_than_transformers(hf, kind, name):
    skip_unless_usable(MOE_MLP, name, torch.bfloat16)
    experts = experts_of(hf, kind).bfloat16()
    torch.manual_seed(2)
    x, index, weight = routed(40)
    x, dy = x.detach().bfloat16(), torch.randn(40, 32, device=DEVICE).bfloat16()

    def results(experts, implementation, dtype):
        experts.config._experts_implementation = implementation
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        y = experts(leaves[0], index, leaves[1])
        return y, *torch.autograd.grad(y, (*leaves, *experts.parameters()), dy.to(dtype))

    def errors(found):
        return [((f - t).norm() / t.norm()).item() for f, t in zip(found, truth, strict=True)]

    truth = results(copy.deepcopy(experts).double(), "eager", torch.float64)
    theirs = errors(results(experts, "eager", torch.bfloat16))
    ours = errors(results(experts, f"tilewright:{name}", torch.bfloat16))
    factor = 1.1 if kind == "qwen3_moe" else 2  # as by the contract, for gpt-oss's own gate
    assert all(o <= factor * t + 1e-4 for o, t in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_lie_transposed(hf, calls, name):
    """Aria's experts are [E, in, out]."""
    skip_unless_usable(MOE_MLP, name, torch.float32)
    from transformers.models.aria.modeling_aria import AriaExperts, AriaTextConfig

    config = AriaTextConfig(moe_num_experts=8, moe_topk=3, hidden_size=32, intermediate_size=24)
    experts = AriaExperts(config).to(DEVICE)
    if not getattr(experts, "is_transposed", False):
        pytest.skip(f"Aria's experts are not in the table of transformers {hf.__version__}")
    torch.manual_seed(0)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x, index, weight = routed(11)
    leaves, found = (x, weight, *experts.parameters()), []
    for implementation in ("eager", f"tilewright:{name}"):
        config._experts_implementation = implementation
        y = experts(x, index, weight)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert calls == [name]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_autocast_computes_in_its_dtype(hf, monkeypatch):
    """float32 weights under autocast, as in transformers' Trainer with bf16=True."""
    seen, results, compute = [], [], integration.experts.moe_mlp
    monkeypatch.setattr(
        integration.experts,
        "moe_mlp",
        lambda x, *a, **k: (seen.append(x.dtype), compute(x, *a, **k))[1],
    )
    model = tiny(hf, "mixtral", layers=1)
    model.model.layers[0].mlp.experts.register_forward_hook(
        lambda _, arguments, y: results.append((arguments[0].dtype, y.dtype))
    )
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = step(model, "eager")
        found = step(model, "tilewright")
    assert seen == [torch.bfloat16] and results == [(torch.float32, torch.float32)] * 2
    close(found, expected, 12 * 2**-9)  # as bfloat16 above
    assert found[1]["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32


# Skipped where transformers' own rotary embedding breaks the graph too (it checks a device for
# autocast).
WHOLE_GRAPHS = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason=f"torch {torch.__version__} breaks the graphs of "
    "experts: its Dynamo takes no module as an argument of a constant function",
)


# ---- expert parallelism


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_of_expert_parallelism_add_up(hf, name):
    """As under transformers' AllReduceEP: each rank has half of the experts, and num_experts
    denotes one of the other half. Also larger indices, which its functions accept, and nonzero
    weights, which are 0 there.
    """
    skip_unless_usable(MOE_MLP, name, torch.float32)
    whole = experts_of(hf, name="eager")
    x, index, weight = routed(23)
    expected = whole(x, index, weight)
    dy = torch.randn_like(expected)
    leaves = (x, weight, whole.gate_up_proj, whole.down_proj)
    expected_grads = torch.autograd.grad(expected, leaves, dy)
    parts = []
    for rank in range(2):
        half = copy.deepcopy(whole)
        half.num_experts, half._is_expert_parallel = 4, True
        half.config._experts_implementation = f"tilewright:{name}"
        for p in ("gate_up_proj", "down_proj"):
            own = getattr(whole, p).detach()[4 * rank : 4 * rank + 4]
            setattr(half, p, torch.nn.Parameter(own))
        away = index // 4 != rank
        y = half(x, torch.where(away, 4 + index, index % 4), weight)
        leaves = (x, weight, half.gate_up_proj, half.down_proj)
        parts.append((y, *torch.autograd.grad(y, leaves, dy)))
    (y0, *g0), (y1, *g1) = parts
    torch.testing.assert_close(y0 + y1, expected, rtol=1e-5, atol=1e-5)
    found = [g0[0] + g1[0], g0[1] + g1[1], *map(torch.cat, zip(g0[2:], g1[2:], strict=True))]
    torch.testing.assert_close(found, list(expected_grads), rtol=1e-4, atol=1e-5)


def expert_parallel_rank(rank, world, folder):
    """One rank of the model in `folder`, with each of transformers' expert dispatchers."""
    import transformers as hf
    from transformers.distributed import DistributedConfig

    join_group(rank, world, folder)
    torch.set_num_threads(1)
    integration.register()
    expected = step(tiny(hf, "qwen3_moe"))
    for way in ("all_reduce", "all_to_all"):
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder,
            experts_implementation="tilewright",
            distributed_config=DistributedConfig(tp_size=2, ep_size=2, ep_implementation=way),
        ).train()
        assert model.model.layers[0].mlp.experts.num_experts == 4
        loss, grads = step(model)
        whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
        close((loss, whole), expected, 1e-5)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="two processes with gloo")
def test_a_model_under_expert_parallelism(hf, tmp_path):
    from transformers.distributed import DistributedConfig

    if "ep_implementation" not in inspect.signature(DistributedConfig).parameters:
        pytest.skip(f"transformers {hf.__version__} has another way to distribute experts")
    tiny(hf, "qwen3_moe").save_pretrained(tmp_path)
    two_processes(expert_parallel_rank, str(tmp_path))


@pytest.mark.skipif(DEVICE != "cpu", reason="a look at values would wait for the device")
def test_an_index_outside_is_an_error_without_expert_parallelism(hf):
    with pytest.raises(IndexError, match="expert_index"):
        experts_of(hf)(torch.rand(1, 32), torch.tensor([[9]]), torch.ones(1, 1))


# ---- names


def test_saved_loaded_and_switched(hf, calls, tmp_path):
    tiny(hf, "qwen3_moe", experts="tilewright").save_pretrained(tmp_path)
    assert "tilewright" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    model = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="tilewright"
    ).to(DEVICE)
    tokens = torch.arange(1, 9, device=DEVICE)[None]
    with torch.no_grad():
        ours = model(tokens).logits
        assert calls == ["auto"] * 2
        model.set_experts_implementation("eager")
        torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-4, atol=1e-5)
        assert len(calls) == 2
        model.set_experts_implementation("tilewright:eager")
        model(tokens)
        assert calls[2:] == ["eager"] * 2
        with pytest.raises(ValueError, match="tilewright:nothing"):
            model.set_experts_implementation("tilewright:nothing")


def test_what_the_name_stands_for(hf, calls):
    assert integration.register() == ("tilewright", *(f"tilewright:{name}" for name in NAMES))
    experts, arguments = experts_of(hf), routed(2)
    experts(*arguments)
    integration.register("eager")
    experts(*arguments)
    assert calls == ["auto", "eager"]
    message = r"moe_mlp: unknown implementation 'fast'; have \['auto', 'gluon'"
    with pytest.raises(ValueError, match=message):
        integration.register("fast")


@pytest.mark.parametrize(
    "name, alias",
    [("sdpa", "torch"), *((f"flash_attention_{n}", f"fa{n}") for n in (2, 3, 4))],
)
def test_an_implementation_of_attention_has_its_names_everywhere(hf, attentions, name, alias):
    q = torch.randn(1, 2, 5, 16, device=DEVICE)
    layer, table = dense(hf, "llama").model.layers[0].self_attn, hf.AttentionInterface()

    def registered(name):
        integration.register(attn_implementation=name)
        return table["tilewright"](layer, q, q, q, None)

    said = []
    for given in (name, alias):
        for ask in (
            lambda name: ops.attention(q, q, q, implementation=name),
            registered,
            lambda name: Ops.resolve(name, device_type=DEVICE),
        ):
            try:
                ask(given)
            except ImplementationUnavailable as error:
                said.append(str(error))
    # Either all compute, or all give the reason.
    assert len(said) in (0, 6), said
    assert all(sentence.startswith(f"attention[{name}]: ") for sentence in said), said
    assert (f"tilewright:{name}" in table) == ("flash" not in name)
    assert f"tilewright:{alias}" in table
    assert name in ATTENTION.names() and alias not in ATTENTION.names()
    if name == "sdpa":
        assert Ops.resolve(alias, device_type=DEVICE).attention == name


def test_the_pages_python_runs_as_it_stands(hf, attentions, calls, tmp_path, monkeypatch):
    """Runs the blocks with a small local model instead of the hub's, and a trainer that only builds
    its model: those that name a model by themselves, the others after the last of them.
    """
    monkeypatch.chdir(tmp_path)

    class Trainer:
        def __init__(self, name, train_dataset):
            self.model = hf.AutoModelForCausalLM.from_pretrained(name)

        def train(self):
            tokens = torch.arange(1, 6)[None]
            assert self.model.train()(tokens, labels=tokens).logits is None

    tiny(hf, "qwen3_moe", layers=1).save_pretrained(tmp_path)
    pages = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("integrations*.md"))
    text = "".join(page.read_text() for page in pages)
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    *blocks, kernelized = blocks
    assert "kernelize" in kernelized  # run in test_hub.py
    found, ran = {}, []
    for block in blocks:
        code, hubs = re.subn(r'"(Qwen|HuggingFaceTB)/[\w.-]+"', repr(str(tmp_path)), block)
        if hubs:
            found = {"SFTTrainer": Trainer, "dataset": None}
        if "quantize_(" in code:
            found["model"] = tiny(hf, "qwen3_moe", layers=1)
        if "peft" in code:
            pytest.importorskip("peft")
            from tilewright.integrations.peft import register

            register()
        exec(code, found)
        asked = re.search(r'(attn|experts)_implementation="', code)
        if asked is None:
            attentions.clear(), calls.clear()
        else:
            found["model"](torch.arange(1, 6)[None])
            name = f"_{asked[1]}_implementation"
            assert getattr(found["model"].config, name) == "tilewright"
            ran.append((len(attentions), len(calls)))
            attentions.clear(), calls.clear()
        if "get_peft_model" in code:
            assert "QuantizedLoraLinear" in repr(found["model"])
    assert len(blocks) == 8 and ran == [(1, 0), (0, 1)]


# ---- refusals


@pytest.mark.parametrize(
    "flag, value, reason",
    [
        ("has_gate", False, "have no gate"),
        ("has_post_expert_norm", True, "normalize what each of them gives"),
        ("act_fn", torch.nn.ReLU(), "are activated by ReLU"),
        ("act_fn", torch.nn.functional.mish, "are activated by mish"),
        ("act_fn", torch.nn.functional.gelu, None),
        ("act_fn", torch.nn.GELU("tanh"), None),
        ("act_fn", torch.nn.SiLU(), None),
        ("act_fn", torch.nn.functional.silu, None),
    ],
)
def test_each_reason(hf, flag, value, reason):
    experts = experts_of(hf)
    assert integration.why_not(experts) is None
    experts.__dict__.pop(flag, None)
    experts._modules.pop(flag, None)
    setattr(experts, flag, value)
    assert integration.why_not(experts) == reason


@pytest.mark.parametrize(
    "gate, reason",
    [
        (lambda self, pre: torch.sin(pre.chunk(2, -1)[0]) * pre.chunk(2, -1)[1], "$"),
        (lambda self, pre: pre[..., :24].sigmoid() * pre[..., 24:], ", which fails for float32 on"),
    ],
)
def test_a_gate_of_its_own(hf, gate, reason):
    experts = experts_of(hf)
    experts.__class__ = type("Own", (type(experts),), {"_apply_gate": gate})
    found = integration.why_not(experts)
    assert re.match(r"apply their gate in a way of their own \(_apply_gate\)" + reason, found)


@WHOLE_GRAPHS
def test_compiled_layers_that_share_code_keep_limits_of_their_own(hf):
    """In one graph each, forward and backward."""
    if DEVICE == "cpu" and "cpp" not in MOE_MLP.usable("cpu", torch.float32):
        pytest.skip("eager reads sizes on the host")
    layers = [experts_of(hf, "gpt_oss") for _ in range(2)]
    for experts, limit in zip(layers, (0.5, 1.25), strict=True):
        experts.limit = limit
    x, index, weight = routed(11)

    def results(call):
        found = []
        for layer in layers:
            y = call(layer)
            found.append((y, *torch.autograd.grad(y.sum(), (x, weight, *layer.parameters()))))
        return found

    def call(layer):
        return layer(4 * x, index, 4 * weight)

    expected = results(call)
    assert not torch.allclose(expected[0][0], expected[1][0], rtol=1e-2, atol=1e-2)
    found = results(torch.compile(call, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


# ---- attention

DENSE = {
    "llama": {"head_dim": 16, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "sliding_window": 4,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": None,
    },
    "gpt_oss": {**MODELS["gpt_oss"], "num_key_value_heads": 1, "sliding_window": 4},
    "deepseek_v3": MODELS["deepseek_v3"],
    "persimmon": {},  # its layers get no position ids
}
ATTENTIONS = [i.name for i in ATTENTION.implementations]


@pytest.fixture
def attentions(hf, monkeypatch):
    """Records the cu_seqlens that attention is called with."""
    seen, compute = [], integration.attention.attention

    def counted(*arguments, **options):
        seen.append(options.get("cu_seqlens"))
        return compute(*arguments, **options)

    monkeypatch.setattr(integration.attention, "attention", counted)
    integration.register()
    return seen


def dense(hf, kind, layers=2):
    settings = {
        **COMMON,
        "num_hidden_layers": layers,
        **DENSE[kind],
        "attn_implementation": "eager",
    }
    if kind == "gpt_oss":
        settings["layer_types"] = ["sliding_attention", "full_attention"]
    config = hf.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
            elif p.shape == (2,):  # sinks
                p.normal_()
    return model.train()


def attention_of(hf):
    """A layer of attention, and what computes it."""
    layer = dense(hf, "llama", layers=1).model.layers[0].self_attn
    return layer, hf.AttentionInterface()["tilewright"]


def entry(name):
    if name == "auto":
        return "tilewright"
    return f"tilewright:{next(iter(ATTENTION.implementation(name).aliases), name)}"


def attend(model, name, forward=None, **inputs):
    model.set_attn_implementation(name)
    model.zero_grad()
    logits = (forward or model)(**inputs, use_cache=False).logits
    mask = inputs.get("attention_mask")
    kept = logits if mask is None else logits[mask.bool()]
    (kept.float() ** 2).sum().backward()
    return kept.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_attention(found, expected, tolerance=2e-5):
    (logits, grads), (expected_logits, expected_grads) = found, expected
    assert (logits - expected_logits).norm() <= tolerance * expected_logits.norm()
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        assert (grads[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


EVERY_ATTENTION = [("llama", name) for name in ATTENTIONS]


@pytest.mark.parametrize("kind, name", [*EVERY_ATTENTION, *((kind, "auto") for kind in DENSE)])
def test_attention_on_a_left_padded_batch_is_eagers(hf, attentions, kind, name):
    """By every implementation; test_transformers_families.py has the logits of every family."""
    if name != "auto":
        skip_unless_usable(ATTENTION, name, torch.float32)
    model = dense(hf, kind)
    tokens = drawn(3, 11)
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[2, :1] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    expected = attend(model, "eager", **inputs)
    assert not attentions
    with skip_if_refused():
        found = attend(model, entry(name), **inputs)
    assert [cu.tolist() for cu in attentions] == [[0, 6, 17, 27]] * 2
    same_attention(found, expected)


@pytest.mark.parametrize(
    "kind, name", [*EVERY_ATTENTION, *((kind, "auto") for kind in ("gemma2", "persimmon"))]
)
@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens"])
def test_attention_on_packed_input_is_eagers(hf, attentions, kind, name, told):
    """Two documents per row; perturbing the first does not change a bit of the second's logits."""
    if name != "auto":
        skip_unless_usable(ATTENTION, name, torch.float32)
    model = dense(hf, kind)
    tokens = drawn(1, 13)
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None].to(DEVICE)
    ends = torch.tensor([0, 5, 13], dtype=torch.int32, device=DEVICE)
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    boundaries |= {"max_length_q": 8, "max_length_k": 8}
    boundaries = boundaries if told == "cu_seq_lens" else {}
    expected = attend(model, "eager", input_ids=tokens, position_ids=positions)
    with skip_if_refused():
        found = attend(model, entry(name), input_ids=tokens, position_ids=positions, **boundaries)
    assert [cu.tolist() for cu in attentions] == [[0, 5, 13]] * 2
    same_attention(found, expected)
    other = tokens.clone()
    other[0, :5] = tokens[0, :5] % 49 + 1
    changed, _ = attend(model, entry(name), input_ids=other, position_ids=positions, **boundaries)
    assert torch.equal(changed[:, 5:], found[0][:, 5:])
    assert not torch.equal(changed[:, :5], found[0][:, :5])


def test_boundaries_are_of_all_rows_of_a_batch(hf, attentions):
    """cu_seqlens is enough, since rotary embeddings are relative."""
    model = dense(hf, "llama").eval()
    tokens = drawn(2, 13)
    rows = [[*range(n), *range(13 - n)] for n in (5, 9)]
    positions = torch.tensor(rows, device=DEVICE)
    expected = model(tokens, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("tilewright")
    ends = torch.tensor([0, 5, 13, 22, 26], dtype=torch.int32, device=DEVICE)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    found = model(tokens, use_cache=False, **told).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [cu.tolist() for cu in attentions] == [ends.tolist()] * 2


def test_generation_with_a_cache_and_padding_gives_eagers_tokens(hf, attentions):
    model = dense(hf, "llama").eval()
    tokens = drawn(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("tilewright")
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, expected) and len(attentions) > 2 * 6
    # Padding that is not to the left of the cached keys.
    out = model(tokens, use_cache=True)
    late = torch.tensor([[1] * 7 + [0], [1] * 8], device=DEVICE)
    with pytest.raises(ImplementationUnavailable, match="on the left of cached keys only"):
        model(tokens[:, :1], past_key_values=out.past_key_values, attention_mask=late)


def test_attention_without_padding_is_one_plain_call(hf, attentions):
    model = dense(hf, "llama")
    tokens = drawn(2, 9)
    expected = attend(model, "eager", input_ids=tokens)
    same_attention(attend(model, "tilewright", input_ids=tokens), expected)
    assert attentions == [None, None]


@pytest.mark.parametrize("takes", [True, False])
def test_values_of_latent_attention_are_padded_where_an_implementation_needs_it(
    hf, attentions, takes, monkeypatch
):
    model = tiny(hf, "deepseek_v3", v_head_dim=12)
    tokens = drawn(2, 9)
    expected = attend(model, "eager", input_ids=tokens)
    own, config = integration.attention, model.config
    monkeypatch.setattr(own, "takes_values", lambda name, D, Dv: takes)
    with mock.patch.object(own, "attention", wraps=own.attention) as calls:
        same_attention(attend(model, "tilewright:eager", input_ids=tokens), expected)
    widths = {(call.args[1].shape[3], call.args[2].shape[3]) for call in calls.call_args_list}
    D = config.qk_nope_head_dim + config.qk_rope_head_dim
    assert widths == {(D, config.v_head_dim if takes else D)}


@pytest.mark.parametrize("name", ["tilewright", "tilewright:triton", "tilewright:cpp"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_of_attention_is_drawn_for_each_call_and_again_when_recomputed(
    hf, attentions, name, reentrant
):
    """Its mask follows from torch's default generator, as checkpointing restores it."""
    if name != "tilewright":
        skip_unless_usable(ATTENTION, name.partition(":")[2], torch.float32)
    model = dense(hf, "llama")
    tokens = drawn(2, 9)
    plain = attend(model, name, input_ids=tokens)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(attend(model.train(), name, input_ids=tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.allclose(found[0][0], found[2][0], atol=1e-3)
    assert not torch.allclose(found[0][0], plain[0], atol=1e-3)
    own = integration.attention
    with mock.patch.object(own, "attention", wraps=own.attention) as calls:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        again = attend(model, name, input_ids=tokens)
    seeds = [call.kwargs["seed"] for call in calls.call_args_list]
    assert len(seeds) == 4 and len(set(seeds)) == 2, "of two layers, each recomputed"
    same_attention(again, found[0])
    same_attention(attend(model.eval(), name, input_ids=tokens), plain)


def test_what_attention_cannot_be_is_refused(hf, attentions):
    model = dense(hf, "llama")
    tokens = drawn(2, 9)
    model.set_attn_implementation("tilewright:torch")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    message = r'LlamaAttention: .*="tilewright:torch" does not compute dropout = 0.1 \(others: "sdp'
    with pytest.raises(ImplementationUnavailable, match=message):
        model(input_ids=tokens)
    model.set_attn_implementation("tilewright")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    with pytest.raises(ImplementationUnavailable, match=re.escape("a mask of shape [2, 1, 9, 9]")):
        model(input_ids=tokens, attention_mask=torch.zeros(2, 1, 9, 9, device=DEVICE))
    message = "unknown implementation 'flash_attention_5'; .*_3', 'native', .*'triton'"
    with pytest.raises(ValueError, match=message):
        integration.register(attn_implementation="flash_attention_5")


def test_options_of_a_layer_are_passed_on(hf, attentions):
    q = torch.randn(1, 2, 5, 16, device=DEVICE)
    layer, call = attention_of(hf)
    plain = call(layer, q, q, q, None)[0]
    for options in (
        {"sliding_window": 2},
        {"softcap": 0.5},
        {"s_aux": torch.zeros(2, device=DEVICE)},
        {"scaling": 2.0},
        {"is_causal": False},
    ):
        assert not torch.allclose(call(layer, q, q, q, None, **options)[0], plain), options


@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_shows_what_it_holds_alone(hf, attentions, padded):
    """The cache is longer than its contents: unwritten keys are masked, with a mask and without."""
    model = dense(hf, "llama").eval()
    tokens = drawn(2, 7)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :2] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    options["attention_mask"] = mask
    expected = model.generate(tokens, **options)
    model.set_attn_implementation("tilewright")
    with torch.inference_mode():
        assert torch.equal(model.generate(tokens, **options), expected)
    assert attentions


def test_documents_stay_apart_with_a_mask_and_with_a_cache(hf, attentions):
    """With padding before, between and after them, whether position ids count it or not."""
    model = dense(hf, "llama").eval()
    model.set_attn_implementation("tilewright")
    first, second = drawn(1, 13).split((5, 8), 1)
    expected = [model(t).logits[0] for t in (first, second)]
    attentions.clear()
    tokens = torch.cat((first, second), 1)
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None].to(DEVICE)
    found = [
        model(tokens, position_ids=positions, **options).logits[0]
        for options in (
            {"use_cache": False},
            {"use_cache": True},
            {"attention_mask": torch.ones_like(tokens)},
        )
    ]
    assert [cu.tolist() for cu in attentions] == [[0, 5, 13]] * 6
    assert all(torch.equal(f, found[0]) for f in found)
    torch.testing.assert_close(found[0], torch.cat(expected), rtol=1e-4, atol=1e-4)

    pad = torch.zeros(1, 2, dtype=torch.long, device=DEVICE)
    tokens = torch.cat((pad, first, pad, second, pad), 1)
    for between in ([5, 6], [0, 0]):
        positions = torch.tensor([[0, 0, *range(5), *between, *range(8), 0, 0]], device=DEVICE)
        found = model(tokens, position_ids=positions, attention_mask=(tokens > 0).long()).logits[0]
        torch.testing.assert_close(found[2:7], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[9:17], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", ["none", "counted", "padding is not counted"])
def test_a_hole_is_left_out_and_no_boundary_between_documents(hf, attentions, positions):
    model = dense(hf, "llama").eval()
    tokens = drawn(2, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1]], device=DEVICE)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if positions == "counted":
        inputs["position_ids"] = torch.arange(8, device=DEVICE).expand(2, -1)
    elif positions != "none":
        inputs["position_ids"] = (mask.cumsum(1) - 1) * mask
    same_attention(attend(model, "tilewright", **inputs), attend(model, "eager", **inputs))
    assert [cu.tolist() for cu in attentions] == [[0, 6, 12]] * 2


def test_a_window_takes_no_hole_in_a_document(hf, attentions):
    """With the padding removed, the window would reach further than the layer's."""
    model = dense(hf, "gemma2").eval()
    tokens = drawn(1, 8)
    hole = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]], device=DEVICE)
    model.set_attn_implementation("tilewright")
    refusal = pytest.raises(
        ImplementationUnavailable, match="takes no mask with holes in a document where there is a"
    )
    with refusal:
        model(tokens, attention_mask=hole)
    # Padding between documents is no hole.
    apart = torch.tensor([[0, 1, 2, 0, 0, 0, 1, 2]], device=DEVICE)
    model(tokens, attention_mask=hole, position_ids=apart)
    for cached, mask, refused in (
        (6, [1, 1, 1, 1, 1, 0, 1, 1], True),
        (6, [0, 1, 1, 1, 1, 1, 1, 1], False),
        (7, [1, 1, 1, 1, 1, 0, 1, 1], False),
    ):  # no more keys than the window holds
        found = []
        for name in ("eager", "tilewright"):
            model.set_attn_implementation(name)
            cache = model(tokens[:, :cached], use_cache=True).past_key_values
            given = {"attention_mask": torch.tensor([mask], device=DEVICE)}
            with refusal if refused and name == "tilewright" else contextlib.nullcontext():
                found.append(model(tokens[:, cached:], **given, past_key_values=cache).logits)
        if not refused:
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_tensor_of_inference_is_read_in_each_call(hf, attentions):
    """Inference tensors have no version counter."""
    model = dense(hf, "llama").eval()
    model.set_attn_implementation("tilewright")
    with torch.inference_mode():
        tokens = drawn(1, 13)
        positions = torch.arange(13, device=DEVICE)[None].clone()
        model(tokens, position_ids=positions, use_cache=False)
        positions[0, 5:] -= 5
        attentions.clear()
        model(tokens, position_ids=positions, use_cache=False)
    assert [cu.tolist() for cu in attentions] == [[0, 5, 13]] * 2


@pytest.mark.skipif(DEVICE != "cpu", reason="numpy shares the memory of a CPU's tensors")
def test_position_ids_that_change_behind_torchs_back_are_seen(hf, attentions):
    """gpt-oss passes the caller's tensor to its layers."""
    model = dense(hf, "gpt_oss").eval()
    model.set_attn_implementation("tilewright")
    tokens, positions = torch.randint(1, 50, (1, 13)), torch.arange(13)[None].clone()
    for change, ends in (
        (lambda: None, None),
        (lambda: positions.numpy()[0, 5:].__isub__(5), [0, 5, 13]),
        (lambda: positions.data[0, 8:].sub_(3), [0, 5, 8, 13]),
        (lambda: None, [0, 5, 8, 13]),
    ):
        change()
        attentions.clear()
        with torch.no_grad():
            model(tokens, position_ids=positions, use_cache=False)
        assert [cu if cu is None else cu.tolist() for cu in attentions] == [ends] * 2


def compiled(model, fullgraph, **inputs):
    """The result of `attend`."""
    torch._dynamo.reset()
    # Only tracing is tested.
    forward = torch.compile(model.forward, fullgraph=fullgraph, backend="eager")
    try:
        return attend(model, "tilewright", forward, **inputs)
    finally:
        torch._dynamo.reset()


@WHOLE_GRAPHS
@pytest.mark.parametrize(
    "kind, told", [("llama", "padding"), ("persimmon", "documents"), ("gpt_oss", "documents")]
)
def test_a_compiled_model_is_one_graph(hf, attentions, kind, told):
    model = dense(hf, kind, layers=2 if kind == "gpt_oss" else 1)
    tokens = drawn(2, 9)
    name, rows = "attention_mask", [[0, 0, 1, 1, 1, 0, 1, 1, 1], [1] * 9]  # and a hole
    if told == "documents":
        name, rows = "position_ids", [[*range(4), *range(5)], [0, *range(6), 0, 1]]
    inputs = {name: torch.tensor(rows, device=DEVICE)}
    expected = attend(model, "tilewright", input_ids=tokens, **inputs)
    same_attention(compiled(model, True, input_ids=tokens, **inputs), expected)


def test_what_a_graph_cannot_hold_is_computed_beside_it_or_refused(hf, attentions):
    """Whether a document has a hole depends on the mask's values."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    layer = dense(hf, "llama", layers=1).model.layers[0].self_attn
    kept = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    kept[0, :2] = False

    def attends(q):
        window = {"mask_function": sliding_window_causal_mask_function(4), "local_size": 4}
        make_mask = hf.AttentionMaskInterface()["tilewright"]
        mask = make_mask(2, 9, 9, attention_mask=kept, device=q.device, **window)
        return hf.AttentionInterface()["tilewright"](layer, q, q, q, mask)[0]

    q = torch.randn(2, 2, 9, 16, device=DEVICE)
    with pytest.raises(
        Exception, match=r"fullgraph=True\) takes no padding where there is a window"
    ):
        torch.compile(attends, fullgraph=True, backend="eager")(q)
    torch._dynamo.reset()
    found = torch.compile(attends, backend="eager")(q)
    torch.testing.assert_close(found, attends(q), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_the_layout_of_one_call_is_not_anothers(hf, attentions):
    """The same position ids, with padding and then without."""
    model = dense(hf, "llama").eval()
    tokens = drawn(2, 9)
    positions, mask = torch.arange(9, device=DEVICE)[None].expand(2, -1), torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = model(tokens, position_ids=positions).logits
    model.set_attn_implementation("tilewright")
    model(tokens, position_ids=positions, attention_mask=mask)
    del mask
    found = model(tokens, position_ids=positions).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_encoders_and_cross_attention_are_eagers(hf, attentions):
    """An encoder's padding does not apply to the decoder that reads it, however long either is."""
    sizes = {"vocab_size": 50, "d_model": 32, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    config = hf.AutoConfig.for_model("bart", **sizes, attn_implementation="eager")
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config, attn_implementation="eager").to(DEVICE).eval()
    tokens = torch.randint(3, 50, (2, 6), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    for length in (5, 6, 7):
        inputs = {
            "input_ids": tokens,
            "attention_mask": mask,
            "decoder_input_ids": torch.randint(3, 50, (2, length), device=DEVICE),
        }
        model.set_attn_implementation("eager")
        expected = model(**inputs, use_cache=False).last_hidden_state
        model.set_attn_implementation("tilewright")
        found = model(**inputs, use_cache=False).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert attentions


def test_masks_and_arguments_that_would_be_lost_are_refused(hf, attentions):
    q = torch.randn(1, 2, 5, 16, device=DEVICE)
    layer, call = attention_of(hf)
    for options, words in (
        ({"sliding_window": 2, "is_causal": False}, "a window that is not causal"),
        ({"position_bias": q}, "position_bias"),
        ({"indices": q}, "indices"),
        ({"block_indices": q}, "block_indices"),
        ({"sinks": q}, "sinks"),
        ({"cache": q}, "a paged cache"),
        ({"read_index": q}, "a paged cache"),
        ({"block_table": q}, "a paged cache"),
    ):
        with pytest.raises(ImplementationUnavailable, match=f"does not compute {words}"):
            call(layer, q, q, q, None, **options)


@pytest.fixture
def dtypes(hf, monkeypatch):
    """Records the dtypes of q, k and v in each call of attention."""
    seen, compute = [], integration.attention.attention
    monkeypatch.setattr(
        integration.attention,
        "attention",
        lambda *qkv, **options: (seen.append({t.dtype for t in qkv}), compute(*qkv, **options))[1],
    )
    return seen


UNDER_AUTOCAST = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", UNDER_AUTOCAST)
def test_autocast_is_attentions_dtype(hf, dtypes, kind, use_cache):
    """float32 weights: rotations and norms leave queries and keys in float32, with values in
    bfloat16.
    """
    model = tiny(hf, kind, **DENSE.get(kind, {}))
    tokens = drawn(2, 9)
    found = {}
    for name in ("sdpa" if kind != "gemma2" else "eager", "tilewright"):  # sdpa has no softcap
        model.set_attn_implementation(name)
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(tokens, labels=tokens, use_cache=use_cache)
        out.loss.backward()
        found[name] = out.loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad
    (loss, grad), (expected, expected_grad) = found.pop("tilewright"), *found.values()
    assert dtypes == [{torch.bfloat16}] * 2
    # A loss is a mean over 18 tokens after a dozen roundings of 2^-9; a gradient of the first layer
    # accumulates more.
    assert abs(loss - expected) <= 2**-9 * expected
    assert grad.dtype == torch.float32
    assert (grad - expected_grad).norm() <= 24 * 2**-9 * expected_grad.norm()


def test_queries_that_a_norm_left_in_float32_are_cast_to_the_values_dtype(hf, dtypes):
    layer, call = attention_of(hf)
    q, k, v = (torch.randn(1, 2, 5, 16, device=DEVICE) for _ in range(3))
    assert call(layer, q, k, v.bfloat16(), None)[0].dtype == torch.bfloat16
    assert call(layer, q, k, v, None)[0].dtype == torch.float32
    assert dtypes == [{torch.bfloat16}, {torch.float32}]


def functions(masks):
    """Mask functions of transformers for 9 keys, with the reason for rejection, or None."""
    causal, full = masks.causal_mask_function, masks.bidirectional_mask_function
    positions = torch.tensor(
        [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]], device=DEVICE
    )
    documents = masks.find_packed_sequence_indices(positions)
    block = masks.blockwise_overlay(torch.zeros(2, 9, dtype=torch.long, device=DEVICE))
    left = torch.zeros(2, dtype=torch.long, device=DEVICE)

    def packed(function):
        # Before transformers 5.23, positions are those of the row.
        remap = getattr(masks, "remap_positions_for_packed_sequence", lambda function, _: function)
        return masks.and_masks(
            remap(function, positions), masks.packed_sequence_mask_function(documents)
        )

    window, both_ways = (
        masks.sliding_window_causal_mask_function,
        masks.sliding_window_bidirectional_mask_function,
    )
    not_causal = "a window that is not causal"
    of_blocks = "the mask function transformers.masking_utils.or_masks.<locals>"
    of_a_user = masks.and_masks(causal, lambda b, h, q, k: k % 2 == 0)
    return {
        "causal": (causal, None),
        "full": (full, None),
        "window": (window(3), None),
        "wide window": (window(9), None),
        "packed": (packed(causal), None),
        "packed window": (packed(window(3)), None),
        "one chunk": (masks.chunked_causal_mask_function(9, left), None),
        "chunks": (masks.chunked_causal_mask_function(4, left), "chunked attention"),
        "window on both sides": (both_ways(3), not_causal),
        "wide window on both sides": (both_ways(8), None),
        "window of the past": (masks.and_masks(full, masks.sliding_window_overlay(3)), not_causal),
        "blocks": (masks.or_masks(causal, block), of_blocks),
        "of a user": (of_a_user, "functions.<locals>.<lambda>"),
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [9, 4, 1])  # the other keys are cached
def test_a_mask_alone_says_who_sees_whom(hf, attentions, queries, padded):
    """The layer's own attributes do not matter."""
    from transformers import masking_utils as masks

    layer, call = attention_of(hf)
    q, k, v = (torch.randn(2, h, n, 16, device=DEVICE) for h, n in ((2, queries), (1, 9), (1, 9)))
    kept = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    if padded:
        kept[0, :2] = False
    for kind, (function, refused) in functions(masks).items():
        if kind.startswith("packed") and queries < 9:
            continue  # transformers packs without a cache alone
        said = {
            "batch_size": 2,
            "q_length": queries,
            "kv_length": 9,
            "q_offset": 9 - queries,
            "device": q.device,
            "mask_function": function,
            "attention_mask": kept if padded else None,
        }
        mask = hf.AttentionMaskInterface()["tilewright"](**said)
        for lie in ({"is_causal": kind == "full"}, {"sliding_window": 2}):
            if refused:
                with pytest.raises(ImplementationUnavailable, match=re.escape(refused)):
                    call(layer, q, k, v, mask, **lie)
                continue
            found, _ = call(layer, q, k, v, mask, **lie)
            assert found.is_contiguous()
            seen = masks.sdpa_mask(**said, allow_is_causal_skip=False)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, enable_gqa=True
            )
            there = kept[:, 9 - queries :]
            torch.testing.assert_close(
                found[there], expected.transpose(1, 2)[there], msg=lambda m, k=kind: f"{k}: {m}"
            )


def test_a_mask_is_handed_on_and_nothing_else(hf):
    """As in transformers and accelerate: moved between devices, with fully masked last keys cut
    off.
    """
    from transformers import masking_utils as masks

    mask = integration.masks.make_mask(
        2, 3, 12, 4, mask_function=masks.causal_mask_function, device=DEVICE
    )
    assert (mask.shape, mask.size(-1), mask.ndim, mask.filled) == ((2, 1, 3, 12), 12, 4, 7)
    moved = mask.to(DEVICE), mask.to(torch.float32)
    for same in (*moved, mask.contiguous(), mask[:, :, :, :], mask[..., :12]):
        assert (same.shape, same.filled, same.causal) == (mask.shape, 7, True)
    assert mask[:, :, :, :9].shape == (2, 1, 3, 9) and mask.to("meta").device.type == "meta"
    assert integration.masks.make_mask(2, 3, 12, attention_mask=mask) is mask
    for compute in (
        lambda: mask[:, :, -1],
        lambda: mask[..., :6],
        lambda: mask + 1,
        lambda: 1 - mask,
        lambda: torch.ones(3, 12) + mask,
        lambda: torch.where(mask, 0, 1),
        lambda: mask == 0,
        lambda: ~mask,
        lambda: mask.expand(2, 4, 3, 12),
        lambda: torch.nn.functional.pad(mask, (0, 1)),
        lambda: bool(mask),
        lambda: torch.cat([mask, mask]),
        lambda: mask.dtype and mask.float(),
    ):
        with pytest.raises(ImplementationUnavailable, match="this model computes with its mask"):
            compute()
    assert not hasattr(mask, "nothing")


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "opt", "stablelm", "nemotron", "persimmon", "gpt_bigcode"]
)
def test_attention_weights_are_refused(hf, kind):
    """Also for models that do not pass the option to their layers."""
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "ffn_dim": 32, "word_embed_proj_dim": 32}
    config = hf.AutoConfig.for_model(kind, **{**COMMON, **sizes, "num_hidden_layers": 1})
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="tilewright")
    model = model.to(DEVICE).eval()
    tokens = torch.arange(3, 9, device=DEVICE)[None]
    with pytest.raises(ImplementationUnavailable, match="does not compute output_attentions"):
        model(tokens, output_attentions=True)
    assert model(tokens, output_hidden_states=True).hidden_states


def test_lengths_that_a_mask_is_not_of_are_refused(hf):
    """Keys beyond the mask are not a cache: DeepSeek-V4 adds its own."""
    from transformers import masking_utils as masks

    layer, call = attention_of(hf)
    q, k = torch.randn(1, 2, 5, 16, device=DEVICE), torch.randn(1, 2, 7, 16, device=DEVICE)
    options = {"mask_function": masks.causal_mask_function, "device": q.device}
    mask = integration.masks.make_mask(1, 5, 5, **options)
    for given, words in (
        (mask, "5 queries and 7 keys with a mask for 5 and 5"),
        (None, "5 queries of 7 keys without a mask"),
    ):
        with pytest.raises(ImplementationUnavailable, match=f"LlamaAttention: .* compute {words}"):
            call(layer, q, k, k, given)
