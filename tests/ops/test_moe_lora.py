"""moe_lora beyond the numerics contract (tests/ops/test_contract.py); LoRAExperts, and PEFT's
files.
"""

import re

import pytest
import torch
from helpers import DEVICE, join_group, skip_unless_usable, two_processes
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.weights import merged_experts
from tilewright.ops import moe_lora, moe_mlp
from tilewright.ops.moe import experts as _experts
from tilewright.ops.moe import moe_lora_fused
from tilewright.ops.moe.moe_lora import ADAPTERS, MODES, MOE_LORA, saved_bytes
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_fp8 import quantize_block_fp8
from tilewright.ops.quant.nf4 import quantize_nf4
from tilewright.ops.quant.nvfp4 import quantize_nvfp4
from tilewright.ops.quant.quantized_linear import dequantize

NAMES = [i.name for i in MOE_LORA.implementations]
FUSED = [n for n in NAMES if n != "eager"]
# All fused ones are the same composition of products, which take seconds in Triton's interpreter.
QUICK = [n for n in NAMES if n != "triton" or DEVICE != "cpu"]
T, K, E, H, I, SCALE = 11, 2, 4, 20, 16, 0.75
RANKS = (3, 5, 2)  # of gate, up, down
FORMATS = {
    "nf4": lambda w: quantize_nf4(w, block_size=32, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": lambda w: quantize_block_fp8(w, block=(16, 16)),
}


def inputs(mode="per_expert", dtype=torch.float32, away=True, ranks=RANKS):
    """Arguments by name. away: some slots have no expert on this rank, and the second expert has no
    slot.
    """
    g = torch.Generator(device=DEVICE).manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, device=DEVICE, generator=g) * scale).to(dtype).requires_grad_()

    first, second, down_A, down_B = (n or E for n in MODES[mode])
    gate, up, down = ranks
    scores = torch.rand(T, E, device=DEVICE, generator=g)
    if away:
        scores[:, 1] = -1
    index = scores.topk(K, -1).indices
    if away:
        index[torch.rand(T, K, device=DEVICE, generator=g) < 0.3] = E
    return {
        "x": draw(T, H),
        "gate_up_proj": draw(E, 2 * I, H, scale=H**-0.5).detach(),
        "down_proj": draw(E, H, I, scale=I**-0.5).detach(),
        "expert_index": index,
        "expert_weight": torch.rand(T, K, device=DEVICE, generator=g).requires_grad_(),
        "gate_A": draw(first, gate, H, scale=H**-0.5),
        "gate_B": draw(second, I, gate),
        "up_A": draw(first, up, H, scale=H**-0.5),
        "up_B": draw(second, I, up),
        "down_A": draw(down_A, down, I, scale=I**-0.5),
        "down_B": draw(down_B, H, down),
    }


def grads(y, arguments, dy):
    wanted = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))


def merged(a, scale=SCALE):
    """The two dense weights after merging the adapters into the base."""
    gate, up, down = (
        (scale * (a[f"{n}_B"] @ a[f"{n}_A"])).expand(E, -1, -1) for n in ("gate", "up", "down")
    )
    return a["gate_up_proj"] + torch.cat((gate, up), 1), a["down_proj"] + down


def plain(a, scale=SCALE):
    """A straightforward reference: a loop over slots, each expert's weight with its
    adapters added.
    """
    gate_up, down = merged(a, scale)
    rows = []
    for t in range(a["x"].shape[0]):
        y = torch.zeros_like(a["x"][t])
        for k in range(a["expert_index"].shape[1]):
            e = int(a["expert_index"][t, k])
            if e < E:
                gate, up = (gate_up[e] @ a["x"][t]).chunk(2)
                y = y + a["expert_weight"][t, k] * (down[e] @ (gate / (1 + torch.exp(-gate)) * up))
        rows.append(y)
    return torch.stack(rows)


# ---- the op


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_a_plain_loop(name, mode):
    skip_unless_usable(MOE_LORA, name, torch.float32)
    a = inputs(mode)
    exact = {
        n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for n, t in a.items()
    }
    found, expected = moe_lora(**a, scale=SCALE, implementation=name), plain(exact)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
    dy = torch.randn_like(found)
    ours, theirs = grads(found, a, dy), grads(expected, exact, dy.double())
    assert set(ours) == {"x", "expert_weight", *ADAPTERS}
    for n in ours:
        torch.testing.assert_close(
            ours[n].double(), theirs[n].double(), rtol=5e-6, atol=5e-6, msg=lambda m, n=n: n + m
        )
        assert ours[n].shape == a[n].shape and ours[n].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [n for n in NAMES if n != "triton"]
)  # its moe_mlp has products of its own
def test_a_B_of_zeros_changes_no_bit(name, mode):
    for dtype in (torch.float32, torch.bfloat16):
        skip_unless_usable(MOE_LORA, name, dtype)
        a = inputs(mode, dtype)
        for n in ("gate_B", "up_B", "down_B"):
            a[n] = torch.zeros_like(a[n])
        base = [a[n] for n in ("x", "gate_up_proj", "down_proj", "expert_index", "expert_weight")]
        found = moe_lora(**a, scale=SCALE, implementation=name)
        assert torch.equal(found, moe_mlp(*base, implementation=name))


def kept(fn):
    """Bytes of each storage that autograd saves, by address."""
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn()
    assert y.requires_grad
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name, format",
    # What a format adds is the same for all.
    [(name, format) for name in FUSED for format in (None, *(FORMATS if name in QUICK else ()))],
    ids=str,
)
def test_what_is_kept_is_what_the_formula_says(name, mode, format):
    """x, gate and up, A's results and the routing are kept, beside the base and the adapters.
    Nothing more is kept of a quantized base.
    """
    shared = {"shared_A": MODES[mode][0] == 1, "shared_B": MODES[mode][3] == 1}
    for dtype in (torch.float32, torch.bfloat16) if name in QUICK else (torch.float32,):
        skip_unless_usable(MOE_LORA, name, dtype)
        a = inputs(mode, dtype)
        if format:
            a |= {n: FORMATS[format](a[n]) for n in ("gate_up_proj", "down_proj")}
        seen = kept(lambda a=a: moe_lora(**a, scale=SCALE, implementation=name))
        held = [a[n] for n in ADAPTERS]
        for n in ("gate_up_proj", "down_proj"):
            held += a[n].tensors() if format else [a[n]]
        for t in held:
            del seen[t.untyped_storage().data_ptr()]
        expected = saved_bytes(T, K, E, H, I, RANKS, dtype.itemsize, **shared)
        assert sum(seen.values()) == expected


@pytest.mark.parametrize("name", [n for n in QUICK if n != "eager"])
def test_each_base_weight_is_multiplied_once_and_no_factor_is_expanded(name):
    """Per pass: two grouped products of the base, none for its gradient; shared factors are never
    expanded to all experts.
    """
    skip_unless_usable(MOE_LORA, name, torch.float32)
    launches = moe_lora_fused.Composed(name)
    a = {n: t.detach() for n, t in inputs("shared").items()}
    x, gate_up, down, index, weight, *adapters = a.values()
    base = _experts.Projections.of(gate_up, down)
    adapters = moe_lora_fused.Adapters(*adapters)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.made += [
                t.shape
                for t in (out if isinstance(out, tuple) else (out,))
                if isinstance(t, torch.Tensor)
            ]
            if "grouped_gemm" in str(func):
                self.products.append(args[1].data_ptr())
            return out

    def watched(fn, first, *arguments):
        with Seen() as seen:
            seen.made, seen.products = [], []
            found = fn(first, base, *arguments)
        assert sorted(seen.products) == sorted((gate_up.data_ptr(), down.data_ptr()))
        assert seen.made and not [shape for shape in seen.made if len(shape) == 3 and shape[0] == E]
        return found

    y, *saved = watched(launches.forward, x, index, weight, adapters, SCALE, True)
    dy = torch.ones_like(y)
    of, needs = moe_lora_fused.Saved(*saved), moe_lora_fused.Needs(*[True] * 8)
    found = watched(launches.backward, dy, x, weight, adapters, SCALE, of, needs)
    expected = moe_lora(**inputs("shared"), scale=SCALE, implementation=name)
    assert torch.equal(y, expected) and [g.shape for g in found] == [
        t.shape for t in (x, weight, *adapters)
    ]


@pytest.mark.parametrize("name", FUSED)
def test_without_gradients_nothing_is_kept(name):
    skip_unless_usable(MOE_LORA, name, torch.float32)
    a = inputs("hybrid_shared")
    expected = moe_lora(**a, scale=SCALE, implementation=name)
    with torch.no_grad():
        assert torch.equal(moe_lora(**a, scale=SCALE, implementation=name), expected)
    frozen = {n: t.detach() for n, t in a.items()}
    with pytest.raises(AssertionError):
        kept(lambda: moe_lora(**frozen, scale=SCALE, implementation=name))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", QUICK)
def test_a_quantized_base_is_its_dequantized_one(name, format):
    skip_unless_usable(MOE_LORA, name, torch.float32)
    a = inputs()
    quantized = {n: FORMATS[format](a[n]) for n in ("gate_up_proj", "down_proj")}
    dy = torch.randn(T, H, device=DEVICE)
    for noise in (None, AQN(0.0, 3), AQN(0.5, 3, 1, 7)):
        dense = {
            n: dequantize(
                q,
                noise=noise and AQN(noise.alpha, 3, noise.step, noise.layer + i),
                implementation=name if name in ("eager", "triton") else "auto",
            )
            for i, (n, q) in enumerate(quantized.items())
        }
        expected = moe_lora(**{**a, **dense}, scale=SCALE, implementation=name)
        found = moe_lora(**{**a, **quantized}, scale=SCALE, noise=noise, implementation=name)
        assert torch.equal(found, expected)
        theirs = grads(expected, a, dy)
        assert all(torch.equal(g, theirs[n]) for n, g in grads(found, a, dy).items())


@pytest.mark.parametrize(
    "which, make, message",
    [
        ("gate_up_proj", lambda t: t.requires_grad_(), "gate_up_proj must not require a gradient"),
        ("gate_A", lambda t: t[:2], "[A, gate_rank, H] with A in (1, E), where E = 4, got [2,"),
        ("gate_A", lambda t: t[:, :0], "[A, gate_rank, H] with gate_rank >= 1, got [4, 0, 20]"),
        ("gate_A", lambda t: t[:1], "up_A must have shape [A, up_rank, H], where A = 1, H = 20, "),
        ("up_B", lambda t: t[:1], "where B = 4, I = 16, up_rank = 5, got [1,"),
        ("down_B", lambda t: t[:2], "[E, H, down_rank] or [1, H, down_rank], where E = 4, H = 20,"),
        ("noise", lambda t: AQN(1.0, 0), "noise is for quantized weights, got it with tensors"),
        ("noise", lambda t: 3, "noise must be an AQN or None, got int"),
    ],
)
def test_bad_input_is_named(which, make, message):
    a = {**inputs(), "scale": SCALE, "noise": None}
    a[which] = make(a[which])
    with pytest.raises(TypeError if "got int" in message else ValueError, match=re.escape(message)):
        moe_lora(**a)


# ---- the module


def experts(mode="per_expert", quantized=None, **options):
    """With trained-like adapters rather than initial ones."""
    a = inputs(mode, away=False)
    base = [a["gate_up_proj"], a["down_proj"]]
    if quantized:
        base = [FORMATS[quantized](w) for w in base]
    module = LoRAExperts(*base, 4, 6.0, mode=mode, **options)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.adapters().values():
            p.copy_(torch.randn(p.shape, generator=g) / 4)
    return module, (a["x"].detach(), a["expert_index"], a["expert_weight"].detach())


@pytest.mark.parametrize("mode", MODES)
def test_the_module_begins_as_its_base(mode):
    a = inputs()
    base = torch.nn.Parameter(a["gate_up_proj"])
    module = LoRAExperts(base, a["down_proj"], 4, 8, rslora=True, mode=mode)
    assert module.scale == 4 and module.gate_up_proj is base and not base.requires_grad
    routing = a["x"], a["expert_index"], a["expert_weight"]
    expected = moe_lora(a["x"], base, a["down_proj"], *routing[1:], **module.adapters(), scale=1.0)
    assert torch.equal(module(*routing), expected)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert trained == {f"lora_{n}" for n in ADAPTERS}
    of_all = {"shared": ("gate_A", "up_A", "down_A"), "hybrid_shared": ("gate_A", "up_A")}
    for name, p in module.adapters().items():
        if name.endswith("A"):
            assert 0.7 < p.abs().max() * p.shape[2] ** 0.5 <= 1
            assert p.shape[0] == (1 if name in of_all.get(mode, ()) else E)
        else:
            assert not p.any()


@pytest.mark.parametrize("mode", MODES)
def test_merged_is_the_same(mode):
    module, routing = experts(mode)
    expected = module(*routing)
    weights = [w.data_ptr() for w in (module.gate_up_proj, module.down_proj)]
    module.merge_(torch.Generator().manual_seed(5))
    assert not any(p.any() for n, p in module.adapters().items() if n.endswith("B"))
    assert weights == [w.data_ptr() for w in (module.gate_up_proj, module.down_proj)]
    plain = moe_mlp(routing[0], module.gate_up_proj, module.down_proj, *routing[1:])
    for found in (module(*routing), plain):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    first = module.lora_down_A.clone()
    module.reset_parameters(torch.Generator().manual_seed(6))
    assert not torch.equal(module.lora_down_A, first)


@torch.no_grad()
def test_adapters_of_16_bits_are_merged_in_float32_and_rounded_once():
    module, _ = experts()
    module.to(torch.bfloat16)
    for w in (module.gate_up_proj, module.down_proj):
        w.zero_()
    base = {n: getattr(module, n).float() for n in ("gate_up_proj", "down_proj")}
    factors = {n: p.float() for n, p in module.adapters().items()}
    expected = merged({**base, **factors}, module.scale)
    module.merge_()
    for name, want in zip(base, expected, strict=True):
        # All but the few products that are next to the middle of two bfloat16 numbers.
        assert (getattr(module, name) != want.bfloat16()).float().mean() < 0.01


@torch.no_grad()
def test_a_sum_with_a_base_of_16_bits_is_in_float32():
    module, _ = experts()
    module.gate_up_proj.data = module.gate_up_proj.bfloat16()
    base = {n: getattr(module, n).detach().float() for n in ("gate_up_proj", "down_proj")}
    expected = merged({**base, **module.adapters()}, module.scale)
    for name, want in zip(base, expected, strict=True):
        found = merged_experts(module, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, want, rtol=2e-6, atol=2e-6)
    assert module.gate_up_proj.dtype == torch.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_base_is_merged_and_quantized_again(format):
    module, routing = experts("hybrid_shared", format)
    a = {n: p.detach() for n, p in module.adapters().items()}
    q = module.gate_up_proj.weight(), module.down_proj.weight()
    dense = {"gate_up_proj": dequantize(q[0]), "down_proj": dequantize(q[1])}
    expected = merged({**dense, **a}, module.scale)
    module.to(torch.bfloat16).float()  # its tensors keep their dtypes
    rounded = {n: t.bfloat16().float() for n, t in a.items()}
    found = moe_lora(routing[0], *q, *routing[1:], **rounded, scale=module.scale)
    assert torch.equal(module(*routing), found)
    with torch.no_grad():
        for n, p in module.adapters().items():
            p.copy_(a[n])
    module.merge_()
    for w, e, old in zip((module.gate_up_proj, module.down_proj), expected, q, strict=True):
        new = w.weight()
        assert type(new) is type(old) and new.dtype == old.dtype
        for t, u in zip(new.tensors(), FORMATS[format](e).tensors(), strict=True):
            # Codes, and scales of one byte, are equal.
            exact = t.itemsize == 1
            torch.testing.assert_close(t.float(), u.float(), rtol=0 if exact else 2e-6, atol=0)
    again = LoRAExperts(*q, 4, 6.0, mode="hybrid_shared")
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(*routing), module(*routing))


def test_noise_is_for_training():
    module, routing = experts("per_expert", "nvfp4")
    quiet = module.eval()(*routing)
    module.set_noise(AQN(1.0, 3))
    assert torch.equal(module(*routing), quiet)
    assert not torch.equal(module.train()(*routing), quiet)
    dense, routing = experts()
    dense.set_noise(AQN(1.0, 3))
    dense(*routing)


def test_recomputed_and_under_autocast():
    module, (x, *routing) = experts("hybrid_shared")
    x = x.requires_grad_()
    names = list(module.adapters())
    leaves = [x, *module.adapters().values()]
    expected = torch.autograd.grad(module(x, *routing).square().sum(), leaves)
    module.recompute = True
    y = module(x, *routing)
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), leaves), expected))
    with torch.autocast(DEVICE, torch.bfloat16):
        low = module(x, *routing)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), y, rtol=0.05, atol=0.05 * float(y.abs().max()))
    found = torch.autograd.grad(low.float().square().sum(), leaves)
    assert all(g.dtype == torch.float32 for g in found), names


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 0}, "rank must be an int >= 1, got 0"),
        ({"alpha": 0.0}, "alpha must be a finite number > 0, got 0.0"),
        ({"mode": "all"}, "mode must be one of ['per_expert', 'shared', 'hybrid_shared'], got"),
        ({"implementation": "fast"}, "moe_lora: unknown implementation 'fast'"),
        ({"down_proj": torch.zeros(E, H, I + 1)}, "down_proj must have shape [4, 20, 16]"),
    ],
)
def test_bad_options_are_named(change, message):
    base = {n: inputs()[n] for n in ("gate_up_proj", "down_proj")}
    with pytest.raises(ValueError, match=re.escape(message)):
        LoRAExperts(**{**base, "rank": 2, "alpha": 4.0, **change})


# ---- over processes


def _one_rank(rank, world, folder):
    torch.set_num_threads(1)
    group = join_group(rank, world, folder)
    whole, (x, index, weight) = experts()
    x, index, weight = (t.cpu() for t in (x, index, weight))
    own = slice(rank * E // world, (rank + 1) * E // world)
    mesh = init_device_mesh("cpu", (world,))
    local, _ = experts()
    for name, p in list(local.named_parameters()):
        part = DTensor.from_local(p.detach()[own].clone(), mesh, [Shard(0)], run_check=False)
        local.register_parameter(name, torch.nn.Parameter(part, p.requires_grad))
    local.spread(group)
    mine = slice(5) if rank == 0 else slice(5, T)  # tokens
    y = whole(x, index, weight)
    for recompute in (False, True):
        local.recompute = recompute
        found = local(x[mine].clone().requires_grad_(), index[mine], weight[mine])
        torch.testing.assert_close(found, y[mine], rtol=1e-5, atol=1e-5)
        local.zero_grad()
        found.square().sum().backward()
    y.square().sum().backward()
    for name, p in local.adapters().items():
        torch.testing.assert_close(
            p.grad.to_local(), whole.adapters()[name].grad[own], rtol=1e-4, atol=1e-4
        )
    tensors, config = local.to_peft("experts")
    expected, _ = whole.to_peft("experts")
    assert all(torch.equal(t, expected[key]) for key, t in tensors.items())
    for p in local.adapters().values():
        p.data.zero_()
    local.load_peft_(tensors, config, "experts")
    assert all(
        torch.equal(p.to_local(), whole.adapters()[n][own]) for n, p in local.adapters().items()
    )
    for module in (local, whole):
        module.merge_(torch.Generator().manual_seed(2))
    for name, p in local.named_parameters():
        torch.testing.assert_close(
            p.to_local(), whole.get_parameter(name)[own], rtol=1e-6, atol=1e-6
        )
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="processes of a CPU")
def test_experts_and_their_adapters_spread_over_processes(tmp_path):
    two_processes(_one_rank, str(tmp_path))


def test_what_cannot_be_spread_is_refused():
    module, _ = experts("shared")
    with pytest.raises(ValueError, match="mode = 'shared' is unsupported for experts sharded"):
        module.spread(None)
    module, _ = experts()
    with pytest.raises(ValueError, match=r"dispatch must be 'alltoall' .*, got 'deepep'"):
        module.spread(None, "deepep")


# ---- PEFT

PATH = "model.layers.0.mlp.experts"


def qwen(layers=1):
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K}
    sizes = {"vocab_size": 32, "hidden_size": H, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 32, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():  # transformers initializes experts close to 0
        for p in model.get_submodule(PATH).parameters():
            p.normal_(0, 0.2)
    return model


def with_experts(module):
    """The model with these experts instead of its own."""
    model = qwen()
    model.model.layers[0].mlp.experts = module
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(24).view(2, 12)).logits


@pytest.mark.packages
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match"
)  # PEFT matches modules
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_peft_reads_what_was_trained_here(mode, rslora):
    peft = pytest.importorskip("peft")
    base = qwen().get_submodule(PATH)
    weights = [w.detach().clone() for w in (base.gate_up_proj, base.down_proj)]
    module = LoRAExperts(*weights, 3, 6.0, rslora=rslora, mode=mode)
    with torch.no_grad():
        for p in module.adapters().values():
            p.normal_(0, 0.3)
    tensors, entries = module.to_peft(PATH)
    theirs = peft.get_peft_model(qwen(), peft.LoraConfig(target_modules=[], **entries)).eval()
    result = peft.set_peft_model_state_dict(theirs, tensors)
    assert not result.unexpected_keys and not [key for key in result.missing_keys if "lora" in key]
    found, expected = logits(theirs), logits(with_experts(module))
    assert (expected - logits(qwen())).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)

    entries = {**entries, "peft_type": "LORA"}
    again = LoRAExperts.from_peft(*weights, tensors, entries, PATH, mode=mode)
    assert (again.rank, again.alpha, again.rslora) == (3, 6.0, rslora)
    for n, p in module.adapters().items():
        assert torch.equal(p, again.adapters()[n]), n


def from_peft(mode="per_expert", rank_pattern=None, change=lambda tensors: None, **options):
    """PEFT's model with random adapters, and a module loaded with what PEFT would save."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=[],
        rank_pattern=rank_pattern or {},
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    theirs = peft.get_peft_model(qwen(), config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            if "lora_" in n:
                p.normal_(0, 0.3)
    tensors = {n: t.clone() for n, t in peft.get_peft_model_state_dict(theirs).items()}
    change(tensors)
    base = qwen().get_submodule(PATH)
    weights = base.gate_up_proj.detach(), base.down_proj.detach()
    settings = {**config.to_dict(), **options}
    return theirs, tensors, LoRAExperts.from_peft(*weights, tensors, settings, PATH, mode=mode)


@pytest.mark.packages
def test_what_peft_trained_is_read_here():
    theirs, tensors, module = from_peft()
    found = logits(with_experts(module))
    torch.testing.assert_close(found, logits(theirs), rtol=1e-6, atol=1e-6)
    again, entries = module.to_peft(PATH)
    assert not entries["rank_pattern"] and set(again) == set(tensors)
    assert all(torch.equal(t, tensors[key]) for key, t in again.items())


def of_gate_up(rank, **alpha):
    """Another rank for gate and up than for down."""
    name = "experts.gate_up_proj"
    return {"rank_pattern": {name: rank}, **{f"{n}_pattern": {name: a} for n, a in alpha.items()}}


UNREADABLE = [
    (of_gate_up(6), "the adapter's scale is 1 (lora_alpha 6, r 6), this module's 2"),
    (of_gate_up(6, alpha=12), "has rank 6 for gate and up together, which rank 3 for each cannot"),
    (of_gate_up(5, alpha=10), "the adapter's rank is 5; for this module's 3 it must be 3, or 6 "),
    (
        {"change": lambda t: t.pop(DOWN_A)},
        "lora_A.weight is missing; LoRAExperts has adapters on gate_up_proj and down_proj",
    ),
    (
        {"change": lambda t: t.update({f"base_model.model.{PATH}.lora_magnitude": t[DOWN_A]})},
        "lora_magnitude cannot be represented in LoRAExperts",
    ),
    (
        {"change": lambda t: t.update({GATE_UP_B: t[GATE_UP_B][:, 1:]})},
        "lora_B.weight must have shape [32, 12] for 4 experts of rank 3, got [32, 11]",
    ),
    (
        {"change": lambda t: t.update({DOWN_A: t[DOWN_A].to(torch.int8)})},
        "lora_A.weight must be one of float32, bfloat16, float16, float64, got int8",
    ),
    ({"use_dora": True}, "use_dora = True cannot be represented in LoRAExperts"),
    ({"use_rslora": "false"}, f'{PATH}: use_rslora must be true or false, got "false"'),
    ({"r": 3.0}, f"{PATH}: r must be an int >= 1, got 3.0"),
    ({"peft_type": "LOHA"}, "peft_type must be LORA, got 'LOHA'"),
    ({"mode": "shared"}, "gate_A of expert 1 differs from expert 0's; mode = 'shared' has one for"),
]


GATE_UP_A, GATE_UP_B, DOWN_A, DOWN_B = (
    f"base_model.model.{PATH}.{n}.weight"
    for n in ("base_layer.lora_A", "base_layer.lora_B", "lora_A", "lora_B")
)


@pytest.mark.packages
@pytest.mark.parametrize("options, message", UNREADABLE)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
def test_what_cannot_be_read_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_peft(**options)


@pytest.mark.packages
def test_a_hybrid_takes_what_has_one_where_it_has_one():
    def share(tensors):
        tensors[GATE_UP_A] = tensors[GATE_UP_A][:3].repeat(E, 1)
        tensors[DOWN_B] = tensors[DOWN_B][:, ::E].repeat_interleave(E, 1)

    theirs, tensors, module = from_peft("hybrid_shared", change=share)
    import peft

    peft.set_peft_model_state_dict(theirs, tensors)
    found = logits(with_experts(module))
    torch.testing.assert_close(found, logits(theirs), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"gate_B of expert 1 differs .* mode = 'shared'"):
        from_peft("shared", change=share)
    with pytest.raises(ValueError, match=r"gate_A of expert 1 .* mode = 'hybrid_shared'"):
        from_peft("hybrid_shared")
