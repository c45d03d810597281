"""What earlier versions wrote is read: tests/written/<version>, which make.py there writes."""

import json
import pathlib
import shutil

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from safetensors.torch import load_file
from training import run
from written import make

pytestmark = pytest.mark.packages

VERSIONS = sorted(p.parent for p in pathlib.Path(make.__file__).parent.glob("*/written.json"))
BITS = 2e-2  # of logits in bfloat16, whose products round otherwise on other processors


@pytest.fixture(params=VERSIONS, ids=lambda p: p.name)
def written(request, tmp_path):
    """A copy: a run writes into its folder."""
    return shutil.copytree(request.param, tmp_path / "written")


def test_there_is_what_the_last_version_wrote():
    assert VERSIONS
    for version in VERSIONS:
        files = [p for p in version.rglob("*") if p.is_file()]
        assert sum(p.stat().st_size for p in files) < 2e6
        assert {p.name for p in (version / "runs").iterdir()} == set(make.RUNS)


@pytest.mark.parametrize("kind", make.RUNS)
def test_a_run_goes_on_as_it_would_have_then(kind, written, monkeypatch):
    folder, ranks = written / "runs" / kind, make.RUNS[kind][1]
    then = json.loads((folder / "losses.json").read_text())
    assert list(then) == ["1", "2", "3", "4"]
    auto = "--train.load_checkpoint_path=auto"
    if ranks > 1:
        make.train(folder, ranks, auto)
    else:
        monkeypatch.chdir(folder)
        run("config.yaml", auto)
    now = make.losses(folder)
    assert now == pytest.approx({s: then[s] for s in ("3", "4")}, rel=1e-5)
    assert (folder / "out/checkpoints/global_step_4").is_dir()


@pytest.mark.parametrize("format", make.FORMATS)
def test_a_quantized_folder_is_the_same_model(format, written):
    from transformers import AutoModelForCausalLM

    from tilewright.integrations.transformers import quantized_config

    folder = written / "quantized" / format
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=quantized_config(folder), dtype=torch.bfloat16
    )
    then = load_file(folder / "expected.safetensors")["logits"]
    torch.testing.assert_close(make.logits(model), then, rtol=0, atol=BITS * then.abs().max())


def test_an_adapter_is_the_same(written):
    from transformers import AutoModelForCausalLM

    from tilewright.nn import add_lora, load_adapter

    model = AutoModelForCausalLM.from_pretrained(written / "base")
    base = make.logits(model)
    add_lora(model, rank=4, alpha=8)
    load_adapter(model, written / "adapter")
    then = load_file(written / "adapter/expected.safetensors")["logits"]
    atol = BITS * then.abs().max()
    assert (base - then).abs().max() > 2 * atol, "the adapter does too little to be seen"
    torch.testing.assert_close(make.logits(model), then, rtol=0, atol=atol)
