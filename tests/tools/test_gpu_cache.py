"""Triton's cache, filled without a GPU: the same keys again and in another folder, different ones
for another constant.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
COMPUTE_CAPABILITY = 90


def measured(folder):
    """Results of `fill` in its own process, where Triton compiles: for a call; for it again; with
    another constant; as for another Triton; from its packed cache in another folder, whose lists
    `bench/gpu.sh` fixes.
    """
    from triton import knobs

    from bench import gate_variants, gpu_cache, variants
    from bench.gpu_cache import Call
    from tilewright.bench import launches
    from tilewright.kernels.norm.rmsnorm_triton import FORWARD
    from tilewright.ops import OPS
    from tilewright_lab import pretend
    from tilewright_lab.gate import compilers as gate_compilers

    key, launch = gpu_cache.key_of_build(None), (100, 2, False)
    config = FORWARD.heuristic(*launch)
    first = Call("rmsnorm", "triton", "ragged", "contract", "bfloat16")
    other = gpu_cache._with(first, FORWARD, launch, {**config, "num_warps": 8})

    def fill(call, key=key):  # in a process that has compiled nothing
        found, said = gpu_cache.fill([call], COMPUTE_CAPABILITY, key, 1)
        assert not said, said
        return found

    knobs.cache.dir = str(folder / "cache")
    found = {"first": fill(first), "again": fill(first), "other": fill(other)}
    found["another Triton"] = fill(first, key + "x")
    gpu_cache.pack(folder / "cache", found["first"], folder / "results/triton-cache.tar.gz")
    carried = str(folder / "carried")
    variables = {"PYTHON": "true", "TRITON_CACHE_DIR": carried, "UNPACK_CACHE": "1"}
    said = subprocess.run(
        ["bash", ROOT / "bench/gpu.sh", folder / "results", "1", "report"],
        env={**os.environ, **variables},
        text=True,
        capture_output=True,
    )
    assert said.returncode == 0, said.stderr
    (folder / "cache").rename(folder / "gone")
    knobs.cache.dir = carried
    found["carried"], found["other, carried"] = fill(first), fill(other)

    shape = {"D": 128, "itemsize": 2, "add": False}
    spec = FORWARD.specs(shape, config | {"BLOCK_D": 128})[0]
    facts, cubin = gate_compilers.compile_triton(spec, COMPUTE_CAPABILITY)
    with pretend.gpu(COMPUTE_CAPABILITY, compiles=False):
        plan = {what: gpu_cache.calls([what], OPS.values()) for what in gpu_cache.WHAT}
        asked = {}
        for v in variants.asked(COMPUTE_CAPABILITY):
            op = OPS[v.op]
            case = next(c for c in op.cases if c.name == v.case)
            if "cuda" in case.tags and v.launch:
                kwargs = case.make("cuda", torch.bfloat16, 0)
                by = "gluon" if v.launch.endswith("_gluon") else "triton"
                keys = launches.requested_keys(op, op.implementation(by), kwargs)
                t, named = next((t, t.named(k)) for t, k in keys if t.name == v.launch)
                usual = t.choice(COMPUTE_CAPABILITY, **named)
                asked[v.name] = {way: {**usual, **v.ways[way]} for way in v.ways}
                asked[v.name]["space"] = t.candidates(**named)
        x = torch.randn(3, 8, device="cuda")
        about = [str(x.device), x.is_cuda, x[1:].data_ptr() - x.data_ptr()]
        about.append(torch.cuda.get_device_capability())
    return {
        **found,
        "registers": [facts.registers, pretend.registers(cubin)],
        "variants": asked,
        "gate": list(gate_variants.collect(OPS.values())),
        "about": about,
        "after": [torch.ones(1).is_cuda, str(torch.ones(1).device), torch.cuda.is_available()],
        "ops": {what: sorted({c.op for c in calls}) for what, calls in plan.items()},
        "parity": [[c.op, c.implementation, c.case, c.layout] for c in plan["parity"]],
        "search": [[c.launch, len(c.config)] for c in plan["search"]],
    }


@pytest.fixture(scope="module")
def ran(compiling, tmp_path_factory):
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"}
    folder = tmp_path_factory.mktemp("gpu_cache")
    done = subprocess.run(
        [compiling, __file__, folder], env=variables, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / "results/triton-cache.tar.gz") as packed:
        names = packed.getnames()
    return {**json.loads(done.stdout.splitlines()[-1]), "names": names}


def test_what_was_compiled_is_found_again(ran):
    first, again = ran["first"], ran["again"]
    assert len(first) >= 3 and not any(first.values()), (
        "forward, backward and the sum of its shares"
    )
    assert set(again) == set(first) and all(again.values()), "nothing is compiled twice"
    assert {n.rpartition(".")[2] for n in ran["names"]} == {"cubin", "json"}


def test_another_constant_and_another_triton_are_compiled(ran):
    new = {name for name, there in ran["other"].items() if not there}
    assert len(new) == 1 and not new & set(ran["first"]), "the forward, with its other constant"
    of_another = ran["another Triton"]
    assert not set(of_another) & set(ran["first"]) and not any(of_another.values())


def test_a_cache_that_was_carried_elsewhere_is_found(ran):
    assert set(ran["carried"]) == set(ran["first"]) and all(ran["carried"].values())
    assert not all(ran["other, carried"].values()), "what was not packed is compiled"


def test_a_gpu_that_is_not_there_says_that_it_is(ran):
    assert ran["about"] == ["cuda:0", True, 32, [9, 0]] and ran["after"] == [False, "cpu", False]
    from_ptxas, from_cubin = ran["registers"]
    assert from_ptxas == from_cubin > 0


def test_the_plan_is_all_that_a_first_call_launches(ran):
    from tilewright.bench import contract
    from tilewright.ops import OPS

    assert set(ran["ops"]["goals"]) == {op.name for op in OPS.values() if op.goals}
    assert set(ran["ops"]["smoke"]) == set(OPS), "each by name"
    expected = {
        (op.name, name, case.name, layout)
        for op in OPS.values()
        for name in {"gluon", "triton"} & {*op.names()}
        if torch.bfloat16 in op.implementation(name).dtypes
        for case in op.cases
        if "contract" in case.tags
        for layout in contract.LAYOUTS
    }
    parity = {tuple(each) for each in ran["parity"]}
    assert len(parity) == len(ran["parity"]) and parity == expected
    search = collections.Counter(launch for launch, _ in ran["search"])
    assert all(constants for _, constants in ran["search"])
    products = {"moe_mlp/up_swiglu_gluon", "grouped_gemm/backward_weight_gluon"}
    assert products | {"rmsnorm/backward", "rope/rotate"} <= set(search)
    assert min(search.values()) > 1 and "linear_cross_entropy/chunk" not in search


def test_every_variant_changes_the_launch_that_its_case_makes(ran):
    from bench.variants import asked

    cuda = [v for v in asked(COMPUTE_CAPABILITY) if v.launch and "CPU" not in v.name]
    assert set(ran["variants"]) == {v.name for v in cuda}
    for v in cuda:
        found = ran["variants"][v.name]
        assert found["other"] != found["now"], v.name
        known = {n: value for n, value in found["other"].items() if n in found["now"]}
        # A question about an alternative is none of a search's.
        assert v.now or known in found["space"], f"{v.name}: what the gate does not compile"


def test_the_gate_compiles_the_alternatives_of_launches(ran):
    """Only launches of kernels: linear_cross_entropy's chunks are none."""
    from bench.variants import asked
    from tilewright_lab.gate.verdict import budgeted

    for name, found in ran["variants"].items():
        constants = "; " + " ".join(f"{n}={value}" for n, value in found["other"].items()) + "]"
        mine = [g for g in ran["gate"] if f"[{name}: " in g and g.endswith(constants)]
        assert bool(mine) != name.startswith("linear_cross_entropy"), (name, constants)
    # Those of a later GPU, too.
    later = [v for v in asked(100) if v not in asked(COMPUTE_CAPABILITY)]
    assert later and all(any(f"[{v.name}: " in g for g in ran["gate"]) for v in later)
    assert not any(map(budgeted, ran["gate"]))


def test_a_build_of_another_triton_is_refused(tmp_path):
    from bench import gpu_cache

    with pytest.raises(ValueError, match="is another Triton than"):
        gpu_cache.key_of_build(tmp_path)


if __name__ == "__main__":
    print(json.dumps(measured(pathlib.Path(sys.argv[1]))))
