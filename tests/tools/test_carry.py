"""Files in parts, and what is packed of Triton's cache."""

import importlib.util
import json
import os
import pathlib
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MIB = 2**20


@pytest.fixture(scope="module")
def carry():
    spec = importlib.util.spec_from_file_location("carry", ROOT / "bench/carry.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder, **sizes):
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
    return [folder / name for name in sizes]


def parts_of(out):
    return sorted(out.glob("part-*"))


def test_parts_are_under_the_limit_and_joined_again(carry, tmp_path, capsys):
    files = written(tmp_path, model=2 * MIB + 7, one=MIB // 2, two=MIB // 3, empty=0)
    arguments = ["parts", *map(str, files), "--out", str(tmp_path / "out"), "--limit-mib", "1.2"]
    assert carry.main(arguments) == 0
    folders = parts_of(tmp_path / "out")
    assert len(folders) == 3, "two halves of the model, and the rest"
    for folder in folders:
        held = sum(p.stat().st_size for p in folder.iterdir() if p.name != carry.MANIFEST)
        assert 0 < held <= 1.2 * MIB
    there = tmp_path / "there"
    assert carry.main(["join", *map(str, folders), "--to", str(there)]) == 0
    assert {p.name: p.read_bytes() for p in there.iterdir()} == {
        p.name: p.read_bytes() for p in files
    }
    capsys.readouterr()
    assert carry.main(["join", str(folders[0]), "--to", str(tmp_path / "half")]) == 3
    assert "model: not here: model.piece-" in capsys.readouterr().out
    assert not (tmp_path / "half/model").exists()
    damaged = next(folders[0].glob("model.piece*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert carry.main(["join", *map(str, folders), "--to", str(there)]) == 1
    assert "model: damaged" in capsys.readouterr().out and not (there / "model").exists()


def test_parts_of_an_earlier_call_do_not_stay(carry, tmp_path):
    (first,) = written(tmp_path, first=3 * MIB)
    (second,) = written(tmp_path, second=MIB // 2)
    out, there = tmp_path / "out", tmp_path / "there"
    for file in (first, second):
        assert carry.main(["parts", str(file), "--out", str(out), "--limit-mib", "1.2"]) == 0
    assert carry.main(["join", *map(str, parts_of(out)), "--to", str(there)]) == 0
    assert [p.name for p in there.iterdir()] == ["second"]


def test_wheels_are_asked_of_the_index_for_the_machine(carry, tmp_path, monkeypatch):
    def run(command):
        folder = pathlib.Path(command[command.index("-d") + 1])
        assert command[-2:] == ["liger-kernel", "bitsandbytes==0.50.2"] and "--no-deps" in command
        assert command[command.index("--python-version") + 1] == "3.12"
        written(folder, liger=10, bitsandbytes=MIB)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(carry.subprocess, "run", run)
    names = ["liger-kernel", "bitsandbytes==0.50.2"]
    assert carry.main(["wheels", *names, "--out", str(tmp_path)]) == 0
    (part,) = parts_of(tmp_path)
    assert set(json.loads((part / carry.MANIFEST).read_text())) == {"liger", "bitsandbytes"}
    failed = type("Failed", (), {"returncode": 1})
    monkeypatch.setattr(carry.subprocess, "run", lambda command: failed)
    assert carry.main(["wheels", *names, "--out", str(tmp_path)]) == 1


def cached(cache, folder, *files, size=10):
    (cache / folder).mkdir(parents=True)
    written(cache / folder, **dict.fromkeys(files, size))


def test_only_our_kernels_are_packed(carry, tmp_path):
    source, out = tmp_path / "cache", tmp_path / "out"
    out.mkdir()
    ours = ("_gemm.cubin", "_gemm.json", "__grp___gemm.json")
    cached(source, "OURS", *ours, "_gemm.ttir", "_gemm.ptx", "_gemm.source")
    cached(source, "INDUCTOR", "triton_poi_fused_0.cubin", "triton_poi_fused_0.json")
    cached(source, "PEER", "_rms_norm_forward_kernel.cubin", "_rms_norm_forward_kernel.json")
    cached(source, "LAUNCHER", "__triton_launcher.cpython-312-x86_64-linux-gnu.so")
    assert carry.main(["cache", str(source), str(out)]) == 0
    with tarfile.open(out / "triton-cache.tar.gz") as archive:
        names = set(archive.getnames())
    launcher = "LAUNCHER/__triton_launcher.cpython-312-x86_64-linux-gnu.so"
    assert names == {f"OURS/{name}" for name in ours} | {launcher}


def test_a_cache_over_the_limit_is_split_and_what_cannot_come_back_is_said(carry, tmp_path, capsys):
    source, out, again = tmp_path / "cache", tmp_path / "out", tmp_path / "again"
    out.mkdir()
    cached(source, "OURS", "_gemm.cubin", "_gemm.json", size=MIB)
    (out / "triton-cache.tar.gz").write_text("of an earlier stage")
    assert carry.main(["cache", str(source), str(out), "--limit-mib", "0.75"]) == 0
    pieces = sorted(out.iterdir())
    assert [p.name for p in pieces] == [f"triton-cache.tar.gz.0{i}of03" for i in (1, 2, 3)]
    assert all(p.stat().st_size <= 0.75 * MIB for p in pieces)
    whole = tmp_path / "whole.tar.gz"
    whole.write_bytes(b"".join(p.read_bytes() for p in pieces))
    with tarfile.open(whole) as archive:
        safely: dict = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.4
        archive.extractall(again, **safely)
    assert (again / "OURS/_gemm.cubin").read_bytes() == (source / "OURS/_gemm.cubin").read_bytes()
    assert "OVER THE LIMIT" not in capsys.readouterr().out
    written(out, **{"results.jsonl": MIB}, **{f"file{i}": 1 for i in range(5)})
    carry.main(["cache", str(source), str(out), "--limit-mib", "0.75"])
    said = capsys.readouterr().out
    assert "results.jsonl has 1.0 MiB" in said and "9 files" in said


def test_a_copy_without_git_knows_its_commit(tmp_path, monkeypatch):
    """As long as it is a copy of these sources."""
    from tilewright.bench import run, sources

    record = tmp_path / "commit.json"
    monkeypatch.setattr(run, "_git", lambda *args: "abc" if args[0] == "rev-parse" else "")
    run.record_commit(record)
    monkeypatch.setattr(run, "_git", lambda *args: None)

    def meta(commit):
        found = run.metadata("cpu", run.Settings(), [], commit=commit)
        return found["commit"], found["dirty"]

    assert meta(str(record)) == ("abc", False) and meta("def") == ("def", None)
    assert meta(None) == meta(str(tmp_path / "none.json")) == (None, None)
    monkeypatch.setattr(sources, "everything", lambda: "edited")
    assert meta(str(record)) == (None, None)
