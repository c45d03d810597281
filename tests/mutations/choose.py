"""Which tests ought to see a fault of a file. The one rule:

1. The test files that are the source file's own, by its name or in `OWN`. All their tests.
2. Other test files that name the module: their tests that name the function, the module, or what
   it has for others.

A test that is known to see the fault is run first, then those that name the function, then rule 1
before rule 2.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re

from .faults import ROOT, Fault

# Tests of whole commands, tutorials and the tools themselves see a fault late; and these read the
# source of every file, or the list of faults.
NOT_RUN = re.compile(
    r"test_(style|docs|docstrings|readme|packaging|contributing|mutations|performance|suite|bench"
    r"|plants|tutorials|end_to_end\w*|real_input|triton_ptx|cute|gpu_\w+|peers|families|open_table)$"
)
OF_OPS = re.compile(r"^tilewright/(ops|kernels)/|^csrc/")
# Kernels that no interpreter runs: compiled, and emulated from their PTX.
EMULATED = {"_gluon.py": "tests/ptx/test_triton_ptx.py", "_cute.py": "tests/ptx/test_cute.py"}
# Those of a file of kernels, by their names.
RUNS_OF = {
    "newton_schulz_gluon": "newton_schulz",
    "attention_gluon": "attention/forward",
    "attention_backward_gluon": "attention/backward_kv",
    "grouped_gemm_gluon": r"(grouped_gemm|moe_mlp)/\w+ ROLES",
    "fp8_gluon": "(fp8_linear|low_precision_grouped_gemm/rows)",
    "fp8_dweight_gluon": "(by_rows|low_precision_grouped_gemm/weights)",
    "block_scaled_gluon": "scaled",
    "rmsnorm_cute": "",
    "softmax_stats_cute": "",
}
ENDS = re.compile(r"^_|_(triton|fused|eager|operators|options|checks|format|chunks|plan)$")
# Names of functions that say nothing.
VAGUE = {"forward", "backward", "build", "own", "check", "loss", "report", "table", "make", "Train"}
# By the end of a source file's path: its own test files, in order, where their names differ.
OWN = {
    "kernels/loss/softmax_stats_triton.py": "ops/test_logprob_entropy ops/test_cross_entropy",
    "cpu/softmax_stats.cpp": "ops/test_logprob_entropy ops/test_cross_entropy",
    "cpu/product.cpp": "ops/test_products",
    "cpu/portable.cpp": "ops/test_numerics",
    "kernels/launch.py": "ops/test_launching",
    "kernels/tuning.py": "ops/test_launching",
    "ops/loss/softmax_stats.py": "ops/test_logprob_entropy ops/test_cross_entropy",
    "ops/loss/cross_entropy.py": "ops/test_cross_entropy ops/test_linear_cross_entropy",
    "ops/loss/head.py": "ops/test_linear_cross_entropy ops/test_cross_entropy",
    "ops/loss/rows.py": "ops/test_logprob_entropy ops/test_cross_entropy",
    "ops/loss/vocabulary.py": "ops/test_cross_entropy ops/test_linear_cross_entropy",
    "ops/attention/ring.py": "ops/test_context_parallel",
    "ops/attention/ring_plan.py": "ops/test_context_parallel",
    "ops/rope/tables.py": "ops/test_rope_tables",
    "kernels/quant/low_precision_triton.py": "ops/test_low_precision_linear",
    "kernels/quant/low_precision_grouped_triton.py": "ops/test_low_precision_grouped_gemm",
    "ops/loss/logprob.py": "ops/test_logprob_entropy ops/test_linear_cross_entropy "
    "ops/test_cross_entropy",
    "ops/quant/mxfp8.py": "ops/test_quantize ops/test_scales",
    "ops/quant/nvfp4.py": "ops/test_quantize ops/test_scales",
    "ops/quant/nf4.py": "ops/test_quantize ops/test_scales",
    "ops/quant/block_fp8.py": "ops/test_quantize ops/test_scales",
    "ops/quant/fp8.py": "ops/test_quantize ops/test_scales",
    "kernels/quant/nf4_tables.py": "ops/test_quantize ops/test_scales",
    "kernels/quant/operators.py": "ops/test_quantize ops/test_scales",
    "ops/quant/fp8_linear.py": "ops/test_quantized_linear",
    "ops/optim/newton_schulz.py": "ops/test_newton_schulz ops/test_numerics",
    "selection.py": "ops/test_registry",
    "nn/modules.py": "nn/test_nn",
    "nn/weights.py": "ops/test_moe_lora nn/test_lora nn/test_quantizer",
    "nn/row_blocks.py": "ops/test_batch_invariant nn/test_nn",
    "nn/lora_experts.py": "ops/test_moe_lora nn/test_lora",
    "nn/routed_experts.py": "trainer/test_replay",
    "nn/stored_names.py": "nn/test_quantizer",
    "nn/save_pretrained.py": "nn/test_quantizer nn/test_lora",
    "nn/quantized_layers.py": "nn/test_lora nn/test_quantizer",
    "nn/quantize.py": "nn/test_quantizer nn/test_lora",
    "nn/": "nn/test_lora",
    "integrations/rl.py": "nn/test_rl",
    "integrations/hub.py": "nn/test_hub",
    "integrations/trl/": "nn/test_trl",
    "integrations/peft/": "nn/test_quantizer",
    "integrations/transformers/quantizer.py": "nn/test_quantizer",
    "integrations/transformers/attention.py": "nn/test_accelerate nn/test_integrations",
    "integrations/transformers/masks.py": "nn/test_integrations nn/test_accelerate",
    "integrations/transformers/layers.py": "nn/test_accelerate nn/test_transformers_families",
    "integrations/transformers/": "nn/test_accelerate nn/test_integrations",
    "trainer/parallel/tensor_parallel.py": "trainer/test_tensor_parallel trainer/test_architectures",
    "trainer/optim/matrices.py": "trainer/test_muon trainer/test_pipeline",
    "trainer/parallel/fields.py": "trainer/test_config trainer/test_trainer_fields",
    "trainer/losses/fields.py": "trainer/test_config trainer/test_trainer_fields",
    "trainer/data/fields.py": "trainer/test_config trainer/test_trainer_fields",
    "trainer/parallel/mesh.py": "trainer/test_memory trainer/test_config trainer/test_engine",
    "trainer/data/batches.py": "trainer/test_data",
    "trainer/models/moe.py": "trainer/test_model trainer/test_architectures",
    "trainer/engine.py": "trainer/test_engine trainer/test_trainer",
    "trainer/bank.py": "trainer/test_served",
    "trainer/memory_plan.py": "trainer/test_memory",
    "trainer/models/families/": "trainer/test_architectures",
    "trainer/checkpoint/": "trainer/test_checkpoint trainer/test_interrupts",
    "trainer/parallel/": "trainer/test_trainer_cp trainer/test_trainer",
    "trainer/models/": "trainer/test_model",
    "trainer/config/": "trainer/test_config trainer/test_trainer_fields",
    "trainer/optim/": "trainer/test_muon trainer/test_engine trainer/test_trainer_fields",
    "trainer/data/": "trainer/test_data",
    "trainer/": "trainer/test_trainer",
    "core/takes.py": "ops/test_takes",
    "core/formula.py": "ops/test_schema ops/test_kind ops/test_operators",
    "core/layout.py": "ops/test_strides ops/test_rope",
    "core/files.py": "nn/test_quantizer trainer/test_checkpoint",
    "core/registry.py": "ops/test_registry",
    "core/": "ops/test_schema ops/test_operators",
    "bench/peers_attention.py": "tools/test_peers",
    "bench/tensors.py": "tools/test_pieces ops/test_contract",
    "bench/grid.py": "ops/test_contract ops/test_numerics",
    "bench/": "tools/test_bench tools/test_suite",
}


@functools.cache
def _texts() -> dict[str, str]:
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return {
        p.relative_to(ROOT).as_posix(): p.read_text() for p in found if not NOT_RUN.search(p.stem)
    }


def words(fault: Fault) -> tuple[str, list[str]]:
    """The name that a test of the function has in its text, and those of the module and of what it
    has for others.
    """
    parts = [p for p in fault.function.split(".") if not p.startswith("__")]
    public = [p for p in parts if not p.startswith("_") and p not in VAGUE]
    stem = pathlib.PurePosixPath(fault.file).stem
    python = fault.file.endswith(".py")
    body = ast.parse((ROOT / fault.file).read_text()).body if python else []
    names = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    known = {n for n in names if not n.startswith("_") and n not in VAGUE and len(n) > 5}
    return (public or parts or [stem])[-1], sorted({stem, base(stem), *known})


def base(stem: str) -> str:
    """The name of the op or the thought that a module is a part of."""
    return ENDS.sub("", ENDS.sub("", stem))


def own_files(file: str) -> list[str]:
    """Rule 1."""
    for end, test in EMULATED.items():
        if file.endswith(end):
            return [test]
    stem = pathlib.PurePosixPath(file).stem
    folder = "ops" if OF_OPS.search(file) else file.split("/")[1]
    names = (f"tests/{folder}/test_{stem}.py", f"tests/{folder}/test_{base(stem)}.py")
    found = [name for name in names if name in _texts()]
    ends = [end for end in OWN if f"/{end}" in f"/{file}"]
    if ends and (not found or file.endswith(max(ends, key=len))):
        found += [f"tests/{name}.py" for name in OWN[max(ends, key=len)].split()]
    return list(dict.fromkeys(found))


def files(fault: Fault) -> tuple[list[str], list[str]]:
    """The test files of rule 1, and those of rule 2, the ones that say it most often first."""
    own, (name, modules) = own_files(fault.file), words(fault)
    if {*own} & {*EMULATED.values()}:
        return own, []
    any_of = "|".join(map(re.escape, modules))
    ways = [
        rf"tilewright[\w.]*\.({any_of})\b",
        rf"from tilewright[\w.]* import (\([^)]*|[^(\n]*)\b({any_of})\b",
    ]
    if name not in VAGUE and len(name) > 5:
        ways.append(rf"\b{re.escape(name)}\b")
    if OF_OPS.search(fault.file):
        ways.append(rf"\bops\.({any_of})\b")
    wanted = re.compile("|".join(ways))
    said = {t: len(wanted.findall(text)) for t, text in _texts().items() if t not in own}
    others = sorted((t for t, n in said.items() if n), key=lambda t: (-said[t], t))
    if OF_OPS.search(fault.file):
        others = ["tests/ops/test_contract.py", "tests/ops/test_operators.py", *others]
    if fault.seen_by:
        own = list(dict.fromkeys([fault.seen_by.partition("::")[0], *own]))
    return own, [name for name in dict.fromkeys(others) if name not in own][:4]
