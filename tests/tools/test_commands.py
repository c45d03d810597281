"""Commands report a missing package, file, address or name in one sentence, without a traceback."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

import tilewright
from bench import __main__ as root
from tilewright import __main__ as cli
from tilewright.bench import __main__ as bench
from tilewright.core import platform
from tilewright.ops import OPS

pytestmark = pytest.mark.packages

ROOT = pathlib.Path(__file__).parents[2]


# ---- packages

OPTIONAL = sorted(
    {*platform.INSTALL, *(name for names in platform.EXTRAS.values() for name in names)}
)
# Runs commands, one after the other, in a process without these packages.
WITHOUT = """
import contextlib, io, json, runpy, sys

hidden, commands = json.loads(sys.argv[1])
for name in hidden:
    sys.modules[name.replace("-", "_")] = None   # cannot be imported, and has no spec
found = []
for module, *arguments in commands:
    sys.argv = ["-m", *arguments]  # as `python -m` has it while it finds the module
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
TRAINER = (
    "error: the packages 'datasets', 'pydantic', 'tqdm', 'transformers', 'xxhash', 'yaml' are not "
    "installed (pip install 'tilewright[trainer]')"
)


EXPLAINED = {
    "flash_attention_4": "pip install --pre flash-attn-4",
    "quack": "pip install quack-kernels",
    "cute": "pip install 'tilewright[cute]'",
    "triton": "pip install triton",
}
PEERS = {
    "transformers-grouped": "'transformers' is not installed (pip install 'tilewright[transformers]')",
    "liger": "'liger_kernel' is not installed (pip install liger-kernel)",
    "bitsandbytes": "'bitsandbytes' is not installed (pip install bitsandbytes)",
    "torchao": "'torchao' is not installed (pip install torchao)",
    "flash-attn": "none of the packages flash-attn-4, flash-attn-3, flash-attn is installed "
    "(pip install --pre flash-attn-4)",
}


def test_commands_without_their_packages_name_what_installs_them():
    listed = "list --device cpu --op attention,moe_mlp,quantize_nf4,quantize_nvfp4"
    commands = [
        ["tilewright.trainer.train", "config.yaml"],
        ["tilewright.trainer.config", "check", "config.yaml"],
        ["tilewright", "explain", "--all"],
        ["tilewright", "gate", "--registry", "--require", "triton"],
        ["tilewright.bench", *listed.split()],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps([OPTIONAL, commands])],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    train, config, explain, gate, peers = json.loads(done.stdout.splitlines()[-1])
    assert train[0] == config[0] == TRAINER
    missing = (
        "tilewright gate --registry: the package 'triton' is not installed (pip install triton)"
    )
    assert gate[0] == 2 and gate[2] == f"{missing}\n"
    assert explain[0] == peers[0] == 0
    for name, how in EXPLAINED.items():
        rows = [line for line in explain[1].splitlines() if f"   {name} " in line]
        assert rows and all(line.endswith(f" is not installed ({how})") for line in rows), rows
    for name, said in PEERS.items():
        rows = [line for line in peers[1].splitlines() if line.startswith(f"  {name} ")]
        assert any(row.endswith(said) for row in rows), rows


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def packages(extra):
        for requirement in extras[extra]:
            name, inner = re.match(r"([\w-]+)(?:\[(\w+)\])?", requirement).groups()
            yield from packages(inner) if name == "tilewright" else [name]

    for extra, modules in platform.EXTRAS.items():
        assert {"pyyaml" if m == "yaml" else m for m in modules} <= {*packages(extra)}, extra
    named = {"datasets", "pydantic", "pyyaml", "tqdm", "transformers", "xxhash"}
    assert {*packages("trainer")} == named
    bounds = {r for names in extras.values() for r in names if r.startswith("transformers")}
    assert len(bounds) == 1, "extras that are installed together disagree"


# ---- a checkout without its extension

# Runs commands, each as the first of its process, and prints the first line that each shows.
FIRST_LINES = """
import contextlib, io, json, runpy, sys
from tilewright.core import platform

for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments]
    platform._warn_of_missing_kernels.cache_clear()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        with contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    print(shown.getvalue().partition("\\n")[0])
"""


def first_lines(folder, *commands, **variables):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINES, json.dumps(commands)],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_commands_in_a_checkout_without_the_extension_say_so_first(tmp_path):
    """As after `pip install .`, which builds into the installed package alone: a program that runs
    in the checkout imports the checkout.
    """
    root = tmp_path / "a checkout"
    left = shutil.ignore_patterns("*.so", "__pycache__", "_no_extension.txt")
    shutil.copytree(ROOT / "tilewright", root / "tilewright", ignore=left)
    commands = [
        ["tilewright", "explain", "rope"],
        ["tilewright", "gate", "--help"],
        ["tilewright.bench", "list", "--op", "rope"],
        ["tilewright.trainer.train", "nowhere.yaml"],
    ]
    package = first_lines(root, *commands[:1])
    assert "(`pip install -v --no-deps --force-reinstall .` where" in package[0], package
    (root / "setup.py").touch()
    how = f"`pip install -v --no-deps -e '{root}'`"
    lines = first_lines(root, *commands)
    assert len(lines) == len(commands)
    for line in lines:
        assert line.startswith("without C++ kernels, CPU tensors take slower ones: "), line
        assert f"not built in the checkout {root}, which" in line and how in line, line
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert "C++" not in first_lines(root, *commands[:1], RANK="1", **ranks)[0], "rank 0 alone"


# ---- pipes and names


def unread(main, *arguments):
    """The exit code of a command whose output goes into a closed pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, contextlib.redirect_stdout(out):
        return main([*arguments])


def test_commands_whose_output_nobody_reads_end_quietly(tmp_path):
    for arguments in (["explain"], ["explain", "rope"], [], ["--version"]):
        assert unread(cli.main, *arguments) == 141
    for arguments in (["list", "--device", "cpu", "--op", "rope"], []):
        assert unread(bench.main, *arguments) == 141
    config = pytest.importorskip("tilewright.trainer.config.config")
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {config_path: x}\ndata: {datasets: [{path: dummy}]}\ntrain: {output_dir: o}\n"
    )
    for arguments in (["check", str(path)], ["check", "--help"]):
        assert unread(config.main, *arguments) == 141


def test_another_pipe_that_breaks_is_an_error():
    @platform.command
    def main():
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError, match="a worker's"):
        main()


def test_bare_commands_print_their_help(capsys):
    for main, word in ((cli.main, "explain"), (bench.main, "tune"), (root.main, "suite")):
        assert main([]) == 2
        assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    "main, name, installed",
    [
        *((bench.main, name, True) for name in ("run", "tune")),
        *((root.main, name, True) for name in root.COMMANDS),
        *((cli.main, name, installed) for name in cli.LAB for installed in (True, False)),
    ],
)
def test_a_command_of_another_module_is_found(main, name, installed, monkeypatch, capsys):
    """The laboratory's also in a checkout that nobody installed."""
    if not installed:
        monkeypatch.setattr(cli.metadata, "entry_points", lambda **_: [])
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert re.match(rf"usage: .*\b{name} ", capsys.readouterr().out)


def test_a_command_that_moved_says_where_it_is(capsys):
    for name, now in bench.ELSEWHERE.items():
        assert bench.main([name, "--minutes", "1"]) == 2
        assert f"{name} is `{now}` now" in capsys.readouterr().err
        program, *words = shlex.split(now.removeprefix("python -m "))
        assert words[0] in (root.COMMANDS if program == "bench" else cli.LAB)


@pytest.fixture
def without_laboratory(monkeypatch):
    monkeypatch.setattr(cli.metadata, "entry_points", lambda **_: [])
    monkeypatch.setitem(sys.modules, "tilewright_lab", None)
    for name in [n for n in sys.modules if n.startswith(("tilewright_lab.", "bench."))]:
        if name != "bench.__main__":
            monkeypatch.delitem(sys.modules, name)


def test_without_the_laboratory_its_commands_name_what_installs_it(without_laboratory, capsys):
    missing = "of tilewright-lab, which is not installed"
    assert cli.main(["verify", "model"]) == 2
    said = f"tilewright verify is {missing}: pip install ./lab in a checkout\n"
    assert capsys.readouterr().err == said
    assert not hasattr(tilewright, "verify")
    with pytest.raises(AttributeError, match=r"tilewright\.verify is of tilewright-lab"):
        tilewright.verify  # noqa: B018  the attribute is looked up
    assert root.main(["gate-variants"]) == 2
    said = f"python -m bench gate-variants: a part of it is {missing}"
    assert capsys.readouterr().err.startswith(said)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and re.fullmatch(
        r"tilewright \d+\.\d+\.\d+\n", capsys.readouterr().out
    )


def test_misspelt_ops_and_cases_name_the_nearest(capsys):
    assert cli.main(["explain", "rmsnrom"]) == 2
    said = "unknown op 'rmsnrom'; did you mean 'rmsnorm'? have ['rmsnorm', "
    assert said in capsys.readouterr().err
    for arguments, sentence in (
        (["--op", "rop"], "argument --op: unknown 'rop'; did you mean 'rope'? have ["),
        (["--dtype", "bf16"], "argument --dtype: unknown 'bf16'; "),
        (["--op", "rope", "--provider", "trition"], "; did you mean 'triton'? have ["),
    ):
        with pytest.raises(SystemExit) as ended:
            bench.main(["run", "--device", "cpu", *arguments])
        assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.skipif(not platform.no_cuda(), reason="a CUDA device is present")
def test_without_a_device_nothing_is_usable_on_it(capsys):
    assert cli.main(["explain", "--all", "--device", "cuda", "--dtype", "bfloat16"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines()[4:] if line]
    assert len(rows) == sum(len(op.implementations) for op in OPS.values())
    assert not [row for row in rows if row.endswith("usable") or "*" in row]


# ---- data and tokenizers of a run


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """Runs the trainer on a tiny model; returns its exit code and its standard error."""
    pytest.importorskip("pydantic")
    pytest.importorskip("datasets")
    from training import write_config

    from tilewright.trainer import train as module
    from tilewright.trainer.checkpoint import hf
    from tilewright.trainer.data import prepared as data

    path = write_config(tmp_path, train__max_steps=2, train__log_format="structured")

    def first_step(*arguments):
        raise AssertionError("the first step is reached")

    monkeypatch.setattr("tilewright.trainer.engine.Engine.forward_backward", first_step)

    def run(*arguments):
        code = module.main([path, *arguments])
        return code, capsys.readouterr().err

    run.data, run.hf = data, hf
    return run


def refuse(train, monkeypatch, *arguments):
    """The trainer's error, raised before it reads model files or uses the network."""
    import datasets

    def asked(*arguments, **options):
        raise AssertionError(f"asked for {arguments}")

    monkeypatch.setattr(datasets, "load_dataset", asked)
    monkeypatch.setattr(train.hf, "local_folder", asked)
    code, said = train(*arguments)
    assert code == 1 and said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    "address, package, extra",
    [
        ("s3://bucket/x.jsonl", "s3fs", "s3"),
        ("gs://bucket/x.jsonl", "gcsfs", "gs"),
        ("https://localhost:9/x.jsonl", "aiohttp", "http"),
        ("simplecache::s3://bucket/x.jsonl", "s3fs", "s3"),
    ],
)
def test_an_address_without_the_package_that_reads_it(
    train, monkeypatch, tmp_path, address, package, extra
):
    monkeypatch.setitem(sys.modules, package, None)
    how = f"pip install 'tilewright[{extra}]'"
    sentence = f"{address}: the package '{package}' is not installed ({how})"
    for key in ("--data.datasets.0.path=", '--data.test_datasets=[{"path": "'):
        assert refuse(train, monkeypatch, f"{key}{address}" + '"}]' * key.endswith('"')) == sentence
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "prepared").mkdir()  # the set may exist: reported once it is searched for
    assert train(f"--data.datasets.0.path={address}")[1] == f"error: {sentence}\n"


@pytest.mark.parametrize(
    "name", ["nope.jsonl", "data/nope.parquet", "nope.json.gz", "a/b/c", "./nope", "nope/"]
)
def test_a_misspelt_file_is_not_looked_for_on_the_hub(train, monkeypatch, name):
    said = refuse(train, monkeypatch, "--data.datasets.0.path", name)
    assert said == f"{name}: no such file or folder"


def test_what_is_prepared_needs_no_package(train, monkeypatch):
    import datasets

    from tilewright.trainer.data.rows import Rows
    from tilewright.trainer.data.typed_file import SetFile

    address = "--data.datasets.0.path=s3://bucket/x.jsonl"
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 30})
    rows = Rows.of([SetFile(rows, "a set")])
    with monkeypatch.context() as once, pytest.raises(AssertionError, match="the first step"):
        once.setattr(train.data, "read_raw", lambda entry, data: rows)
        once.setattr(platform, "no_module", lambda name: None)
        train(address)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(AssertionError, match="the first step"):
        train(address)


NO_NETWORK = "(there is no network)"


@pytest.fixture
def asked(monkeypatch):
    """What the Hub was asked for."""
    import huggingface_hub

    found = []

    def download(path, revision, **options):
        found.append((path, revision))
        raise OSError("there is no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return found


def test_what_the_hub_is_asked_for(train, asked, monkeypatch, tmp_path):
    """An id, at its revision. A path in a folder that is here is a mistake, and asks nobody."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/best", "./best", "runs/best/hf", "/best", str(tmp_path / "best")):
        said = train(f"--model.config_path={path}")
        assert said == (1, f"error: {path}: no such file or folder\n")
    assert not asked
    arguments = ["--model.config_path=some/model", "--model.revision=v1"]
    hub = "no such file or folder, and the Hub does not give its revision v1"
    said = train(*arguments, f"--model.tokenizer_path={tmp_path}")
    assert said == (1, f"error: some/model: {hub} {NO_NETWORK}\n")
    assert asked == [("some/model", "v1")]


def test_a_tokenizer_that_is_not_there_is_found_before_the_first_step(train, asked):
    hub = "no such file or folder, and the Hub does not give it"
    said = train("--model.tokenizer_path=nobody/nothing")
    assert said == (1, f"error: nobody/nothing: {hub} {NO_NETWORK}\n")
    with pytest.raises(AssertionError, match="the first step"):  # not needed
        train("--model.tokenizer_path=nobody/nothing", "--train.save_hf_weights=false")
