"""The export for Hugging Face `kernels`: its layout, its independence from this package, and its
layers in transformers' models, put there by `kernelize`.
"""

import ast
import copy
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

from tilewright.integrations import hub

pytestmark = pytest.mark.packages

kernels = pytest.importorskip("kernels")
models = pytest.importorskip("transformers.models")
# The loader takes the build for what torch was built for, also where there is no GPU. That for CUDA
# computes CPU tensors too.
BUILD = "cpu" if torch.version.cuda is None else "cuda"
LOADED = f"_tilewright_{BUILD}_"  # how the name begins that the loader gives it


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "tilewright"
    assert hub.main(["export", str(folder), "--version", "3"]) == 0
    return folder


def kernelize(monkeypatch, repository, model, classes):
    """Kernelizes a model, with layers for classes; returns the number of modules changed."""
    for cls, layer in classes.items():
        # As `use_kernel_forward_from_hub` does where transformers takes this version of kernels.
        monkeypatch.setattr(cls, "kernel_layer_name", layer, raising=False)
        monkeypatch.setattr(cls, "kernel_condition", staticmethod(lambda _: True), raising=False)
    mapping = {
        layer: {"cpu": kernels.LocalLayerRepository(repository, layer_name=layer)}
        for layer in classes.values()
    }
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    # kernelize gives every module that has a layer's name a forward, if only its own.
    forwards = [vars(m)["forward"].__func__ for m in model.modules() if "forward" in vars(m)]
    return sum(forward.__module__.startswith(LOADED) for forward in forwards)


WITHOUT_PACKAGE = """
import pathlib, sys
sys.modules["tilewright"] = None   # import tilewright now raises ImportError
import kernels, torch
kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
x = torch.randn(3, 8, requires_grad=True)
for y in (kernel.ops.rmsnorm(x, torch.ones(8)), kernel.ops.silu_mul(x)):
    y.sum().backward()
index, weight = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
kernel.ops.moe_mlp(x, torch.ones(2, 6, 8), torch.ones(2, 8, 3), index, weight)
print(kernel.__name__, *kernel.layers.__all__)
"""


def test_the_repository_needs_no_installed_package(repository):
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(repository)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, *layers = done.stdout.splitlines()[0].split()
    assert name.startswith(LOADED) and tuple(layers) == hub.LAYERS


def test_no_module_of_the_repository_imports_what_its_layers_do_not_need(repository):
    allowed = {"torch", "triton"} | {"cuda", "cutlass", "deep_ep", "quack"}  # of implementations
    found = {}
    for file in repository.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            found |= {name.partition(".")[0]: file for name in names}
    assert "torch" in found
    assert not found.keys() - sys.stdlib_module_names - allowed, found


@pytest.mark.parametrize("backend", hub.BACKENDS)
def test_the_metadata_name_the_build_and_every_file_by_its_digest(repository, backend):
    rust = pytest.importorskip("kernels._rust")
    variant = repository / "build" / f"torch-{backend}"
    found = rust.Metadata.read_from_file(variant / "metadata.json")
    assert (str(found.name), found.version, found.license) == ("tilewright", 3, "Apache-2.0")
    assert str(found.backend.backend_type).lower() == backend and not found.python_depends
    found.digest.validate(rust.Digest.hash_variant(found.digest.algorithm, variant))
    ids = {json.loads(path.read_text())["id"] for path in repository.glob("build/*/metadata.json")}
    assert len(ids) == len(hub.BACKENDS)
    assert str(found.kernels_minver) == hub.OLDEST
    assert Version(kernels.__version__) >= Version(hub.OLDEST)


def test_a_model_has_the_same_logits_and_gradients(repository, monkeypatch):
    """Norms, QK norms, MLP, experts and rotary embedding of a Qwen3-MoE with a dense layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"mlp_only_layers": [0], "experts_implementation": "eager"}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    # As `use_kernel_forward_from_hub` and `use_kernelized_func` do.
    own = modeling.apply_rotary_pos_emb
    if isinstance(own, torch.nn.Module):
        rotate = copy.copy(own)
    else:
        rotate = kernels.use_kernel_forward_from_hub("RotaryPosEmb")(own)
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotate)
    classes = {
        modeling.Qwen3MoeRMSNorm: "RMSNorm",
        modeling.Qwen3MoeMLP: "SwiGLUMLP",
        modeling.Qwen3MoeExperts: "MoEExperts",
        type(rotate): "RotaryPosEmb",
    }
    for layer in model.model.layers:
        layer.self_attn._kernel_funcs = {"apply_rotary_pos_emb": rotate}
    ids = torch.randint(0, 64, (2, 7))
    expected = model(ids)
    expected.logits.square().mean().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    n = kernelize(monkeypatch, repository, model, classes)
    assert n == 2 * 2 + 2 * 2 + 1 + 1 + 1, "norms, QK norms, the last norm, MLP, experts"
    assert rotate.forward.__func__.__qualname__ == "RotaryPosEmb.forward"
    found = model(ids)
    found.logits.square().mean().backward()
    # A few roundings in float32, in sums of up to 48 products.
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    assert {name for name, _ in model.named_parameters()} == theirs.keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name], rtol=1e-4, atol=1e-7, msg=name)


def of(family, cls):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, cls)


def configured(**fields):
    return type("Config", (), {"hidden_size": 16, "intermediate_size": 24, **fields})()


LAYERS = {
    "RMSNorm": lambda: of("llama", "LlamaRMSNorm")(16),
    "RMSNormRoundedOnce": lambda: of("gpt_oss", "GptOssRMSNorm")(16),
    "RMSNormZeroCentered": lambda: of("gemma2", "Gemma2RMSNorm")(16),
    "SwiGLUMLP": lambda: of("mistral", "MistralMLP")(configured(hidden_act="silu")),
    "GeGLUMLP": lambda: of("gemma2", "Gemma2MLP")(
        configured(hidden_activation="gelu_pytorch_tanh")
    ),
    "MergedSwiGLUMLP": lambda: of("phi3", "Phi3MLP")(configured(hidden_act="silu")),
    "SiluAndMul": lambda: type("Act", (torch.nn.Module,), {"forward": silu_and_mul})(),
}


def silu_and_mul(self, x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_computes_what_the_module_does(repository, monkeypatch, layer, dtype):
    torch.manual_seed(0)
    own = LAYERS[layer]()
    for p in own.parameters():
        p.data.normal_()
    own.to(dtype)
    x = torch.randn(2, 3, 16).to(dtype)
    found, expected = [], []
    for results in (expected, found):
        if results is found:
            assert kernelize(monkeypatch, repository, own, {type(own): layer}) == 1
            own.zero_grad()
        leaf = x.clone().requires_grad_()
        y = own(leaf)
        y.sum().backward()
        results += [y, leaf.grad, *(p.grad for p in own.parameters())]
    eps = torch.finfo(dtype).eps  # a result is rounded once more or less than theirs
    assert found[0].dtype == expected[0].dtype
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps * b.detach().abs().max().item())


def test_every_layer_is_tested():
    assert set(hub.LAYERS) == {*LAYERS, "RotaryPosEmb", "MoEExperts"}


def test_rotary_tables_of_another_width_are_refused(repository):
    layer = kernels.get_local_kernel(repository).layers.RotaryPosEmb()
    q, cos = torch.randn(1, 2, 3, 8), torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match=r"takes q and k .*got q \[1, 2, 3, 8\], cos \[1, 3, 4\]"):
        layer(q, q, cos, cos)
    full = torch.randn(1, 3, 8)
    transposed = layer(q.transpose(1, 2), q.transpose(1, 2), full, full, 2)[0]
    torch.testing.assert_close(transposed.transpose(1, 2), layer(q, q, full, full)[0])


def test_files_of_others_are_not_overwritten(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        hub.main(["export", str(tmp_path)])
