"""scripts/prepare_wheels.py: parts of wheels, in any order, at different times. Tiny wheels, no
network.
"""

import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import zipfile

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "prepare_wheels.py"


@pytest.fixture(scope="module")
def wheels():
    spec = importlib.util.spec_from_file_location("prepare_wheels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_wheels"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prepare_wheels"]


def make(folder, name, version="1.0", *, size=0, needs=(), files=()):
    """A wheel that pip installs; size: bytes of noise, which does not compress."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content = {
        f"{name.replace('-', '_')}/__init__.py": f"version = {version!r}\n".encode(),
        f"{name.replace('-', '_')}/noise.bin": random.Random(name).randbytes(size),
        f"{info}/METADATA": (metadata + "".join(f"Requires-Dist: {n}\n" for n in needs)).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **dict(files),
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in content.items()
    )
    wheel = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {
            **content,
            f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode(),
        }.items():
            archive.writestr(path, data)
    return wheel


@pytest.fixture
def three(tmp_path):
    return [
        make(tmp_path / "made", n, size=s)
        for n, s in (("large", 30_000), ("middle", 6_000), ("small", 100))
    ]


LIMIT = 14_000


def size(part):
    return sum(p.stat().st_size for p in part.iterdir())


def packed(wheels, three, tmp_path):
    (tmp_path / "out").mkdir()
    parts = wheels.pack(three, tmp_path / "out", LIMIT)
    pieces = sorted(p for part in parts for p in part.glob("*.piece-*"))
    return (
        parts,
        pieces,
        ["install", *map(str, parts), "--into", str(tmp_path / "into"), "--no-install"],
    )


# ---- parts


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_parts_in_any_order_and_one_at_a_time_give_the_same_wheels(
    order, wheels, three, tmp_path, capsys
):
    parts, *_ = packed(wheels, three, tmp_path)
    assert [p.name for p in parts] == ["part-01", "part-02", "part-03", "part-04"]
    assert any("piece-2-of-3" in f.name for p in parts for f in p.iterdir())
    into = tmp_path / "into"
    for n, i in enumerate(order):
        code = wheels.main(["install", str(parts[i]), "--into", str(into), "--no-install"])
        said = capsys.readouterr().out
        assert code == (0 if n == 3 else wheels.INCOMPLETE)
        for j in order[n + 1 :]:
            assert f" of part-{j + 1:02}" in said
    assert "missing" not in said
    assert sorted(p.name for p in into.iterdir()) == sorted(
        ["manifest.json", *(w.name for w in three)]
    )
    for wheel in three:
        assert (into / wheel.name).read_bytes() == wheel.read_bytes()


def test_all_parts_at_once_and_again(wheels, three, tmp_path):
    *_, argv = packed(wheels, three, tmp_path)
    assert wheels.main(argv) == 0
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "into").iterdir()}
    assert wheels.main(argv) == 0
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "into").iterdir()} == before


def test_no_part_is_beyond_the_limit_and_none_is_given_away(wheels, three, tmp_path):
    (tmp_path / "out").mkdir()
    for limit in (9_000, 10_001, LIMIT, 100_000):
        parts = wheels.pack(three, tmp_path / "out", limit)
        assert sorted((tmp_path / "out").iterdir()) == parts  # of an earlier limit, none is left
        sizes = [size(p) for p in parts]
        assert max(sizes) <= limit
        if len(parts) > 1:
            assert (
                limit - max(sizes) < 10
            )  # but for digits in the manifests' numbers, a whole piece fills a part
        listed = json.loads((parts[0] / "manifest.json").read_text())["files"]
        found = {f.name: f for p in parts for f in p.iterdir() if f.name != "manifest.json"}
        assert {f["file"] for f in listed} == set(found)
        for f in listed:
            data = found[f["file"]].read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (f["size"], f["sha256"])
            assert found[f["file"]].parent.name == f["part"] and 1 <= f["piece"] <= f["pieces"]
    assert len(parts) == 1 and all(f["pieces"] == 1 for f in listed)


@pytest.mark.parametrize("room", [1, 7, 10, 11, 30])
def test_a_plan_has_every_byte_once_and_fills_to_the_byte(room, wheels):
    lengths = {"a": 30, "b": 11, "c": 0}
    parts = wheels.plan(list(lengths.items()), room)
    assert all(sum(length for *_, length in pieces) <= room for pieces in parts)
    assert any(sum(length for *_, length in pieces) == room for pieces in parts)
    for name, length in lengths.items():
        pieces = sorted(p for part in parts for p in part if p[0] == name)
        assert [p[1] for p in pieces] == list(range(1, pieces[0][2] + 1))
        assert [p[3] for p in pieces] == [room * i for i in range(len(pieces))]
        assert sum(p[4] for p in pieces) == length


def test_a_limit_that_is_too_small_is_an_error_and_keeps_the_old_parts(wheels, three, tmp_path):
    (tmp_path / "out").mkdir()
    wheels.pack(three, tmp_path / "out", LIMIT)
    before = sorted((tmp_path / "out").rglob("*"))
    with pytest.raises(wheels.Problem, match="parts of 700 bytes are too small"):
        wheels.pack(three, tmp_path / "out", 700)
    assert sorted((tmp_path / "out").rglob("*")) == before


# ---- faults


@pytest.mark.parametrize("which", ["piece", "whole"])
def test_a_corrupt_file_is_named_with_both_hashes_and_not_kept(
    which, wheels, three, tmp_path, capsys
):
    parts, pieces, argv = packed(wheels, three, tmp_path)
    bad = pieces[1] if which == "piece" else next(f for p in parts for f in p.glob("small*.whl"))
    good = bad.read_bytes()
    bad.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert wheels.main(argv) == 1
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and str(bad) in said and "Traceback" not in said
    assert f"expected sha256 {hashlib.sha256(good).hexdigest()}" in said
    assert f"actual {hashlib.sha256(bad.read_bytes()).hexdigest()}" in said
    assert not (tmp_path / "into" / bad.name).exists()
    assert not list((tmp_path / "into").glob(".*"))
    bad.write_bytes(good)
    assert wheels.main(argv) == 0


def test_a_missing_file_is_named_with_its_part_and_is_no_error(wheels, three, tmp_path, capsys):
    _, pieces, argv = packed(wheels, three, tmp_path)
    good = pieces[0].read_bytes()
    pieces[0].unlink()
    assert wheels.main(argv) == 3
    said = capsys.readouterr()
    assert f"missing: {pieces[0].name} of {pieces[0].parent.name}\n" in said.out and not said.err
    assert said.out.count("missing: ") == 1
    pieces[0].write_bytes(good)
    assert wheels.main(argv) == 0


def test_what_an_interrupt_left_is_made_good(wheels, three, tmp_path):
    """A piece cut short under its final name, as a power cut can leave it, and one that was
    fetched already.
    """
    _, pieces, argv = packed(wheels, three, tmp_path)
    assert (
        wheels.main(
            ["install", str(pieces[0].parent), "--into", str(tmp_path / "into"), "--no-install"]
        )
        == 3
    )
    arrived = tmp_path / "into" / pieces[0].name
    assert arrived.exists()
    arrived.write_bytes(arrived.read_bytes()[:100])
    (tmp_path / "into" / three[2].name).write_bytes(b"half")
    assert wheels.main(argv) == 0
    for wheel in three:
        assert (tmp_path / "into" / wheel.name).read_bytes() == wheel.read_bytes()


def test_parts_of_two_downloads_are_not_mixed(wheels, three, tmp_path, capsys):
    _, _, argv = packed(wheels, three, tmp_path)
    assert wheels.main(argv) == 0
    (tmp_path / "other").mkdir()
    (other,) = wheels.pack([make(tmp_path / "made", "other")], tmp_path / "other", LIMIT)
    assert (
        wheels.main(["install", str(other), "--into", str(tmp_path / "into"), "--no-install"]) == 1
    )
    assert f"{other} belongs to another set of wheels" in capsys.readouterr().err
    assert (
        wheels.main(["install", str(tmp_path), "--into", str(tmp_path / "into"), "--no-install"])
        == 1
    )
    assert "manifest.json: not readable" in capsys.readouterr().err


# ---- install


def test_what_is_installed_can_be_imported(wheels, tmp_path, monkeypatch):
    """pip, offline, for real: a package from pieces, and one that a .pth file puts on the path."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    hook = "import sys, os, pathed; sys.path.insert(0, os.path.join(pathed.__path__[0], 'inner'))"
    made = [
        make(tmp_path / "made", "large", size=30_000),
        make(
            tmp_path / "made",
            "pathed",
            files={"pathed/inner/deep.py": b"x = 5\n", "pathed.pth": hook.encode()},
        ),
    ]
    (tmp_path / "out").mkdir()
    parts = wheels.pack(made, tmp_path / "out", LIMIT)
    argv = ["--into", str(tmp_path / "into"), "--target", str(tmp_path / "a target")]
    assert wheels.main(["install", str(parts[0]), *argv]) == 3
    assert not (tmp_path / "a target").exists()
    assert wheels.main(["install", *map(str, parts[1:]), *argv]) == 0
    script = (
        f". '{tmp_path}/a target/env.sh' && "
        f"'{sys.executable}' -c 'import large, deep; print(large.version, deep.x, large.__file__)'"
    )

    def run():
        return subprocess.run(
            ["sh", "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": ""},
        ).stdout

    packages = tmp_path / "a target" / "site-packages"  # a peer reads the folder's name
    assert run() == f"1.0 5 {packages}/large/__init__.py\n"
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{packages}/pathed/inner")  # as after env.sh
    assert wheels.main(["install", str(parts[0]), *argv]) == 0  # over itself
    assert run() == f"1.0 5 {packages}/large/__init__.py\n"


def test_a_wheel_that_pip_refuses_is_an_error(wheels, tmp_path, capsys):
    made = make(tmp_path / "made", "old").rename(tmp_path / "made" / "old-1.0-cp27-cp27m-win32.whl")
    (tmp_path / "out").mkdir()
    (part,) = wheels.pack([made], tmp_path / "out", LIMIT)
    assert (
        wheels.main(
            ["install", str(part), "--into", str(tmp_path / "i"), "--target", str(tmp_path / "t")]
        )
        == 1
    )
    assert "error: pip exited with 1" in capsys.readouterr().err
    assert not (tmp_path / "t" / "env.sh").exists()


# ---- download


def test_download_takes_what_the_target_lacks_and_no_more(wheels, tmp_path, monkeypatch, capsys):
    """Extras, markers, a range that a second package narrows, pre-releases: with pip, from a
    folder.
    """
    index = tmp_path / "index"
    make(
        index,
        "peer",
        needs=[
            "torch>=2",
            "helper (<2,>=1.1)",
            "old-only; python_version < '3.9'",
            "base[gpu]",
            "tests ; extra == 'dev'",
        ],
    )
    make(index, "second", needs=["nvidia-cutlass-dsl-libs-cu12==4"])
    make(
        index,
        "base",
        needs=["gpu-libs==3; extra == \"gpu\" and (sys_platform == 'linux' or os_name == 'nt')"],
    )
    for v in ("1.0", "1.2", "1.7", "2.0"):
        make(index, "helper", v)
    for v in ("3", "4"):
        make(index, "gpu-libs", v, needs=["helper<1.5"])
    make(index, "flash-attn-4", "4.0.0b1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    out = tmp_path / "out"
    argv = ["download", "--out", str(out), "--python", "3.12", "--limit-mib", "0.01"]
    assert wheels.main([*argv, "peer==1.0", "second", "flash-attn-4"]) == 0
    files = json.loads((out / "part-01" / "manifest.json").read_text())["files"]
    assert [f["wheel"].split("-py3")[0] for f in files] == [
        "base-1.0",
        "flash_attn_4-4.0.0b1",
        "gpu_libs-3",
        "helper-1.2",
        "peer-1.0",
        "second-1.0",
    ]
    assert "of 10485 bytes" in capsys.readouterr().out
    assert wheels.main([*argv, "absent==1.0"]) == 1
    assert "pip found no wheel of absent==1.0 for Python 3.12" in capsys.readouterr().err
    assert (out / "part-01").exists() and not list(out.glob(".*"))


@pytest.mark.parametrize(
    "marker, holds",
    [
        ("", True),
        ("python_version >= '3.10'", True),
        ("python_version < '3.9' or platform_machine == 'x86_64'", True),
        ("python_version < '3.9' and platform_machine == 'x86_64'", False),
        ("(sys_platform == 'win32' or extra == 'cu13') and implementation_name == 'cpython'", True),
        ("extra == 'cu12'", False),
        ("'linux' in sys_platform", None),
        ("sys_platform in 'linux darwin'", True),
        ("platform_release > '5'", None),
        ("python_version ~= '3.10'", None),
    ],
)
def test_markers_are_read_or_refused(marker, holds, wheels):
    if holds is None:
        with pytest.raises(wheels.Problem, match="cannot read the marker"):
            wheels.applies(marker, "3.12", ("cu13",))
    else:
        assert wheels.applies(marker, "3.12", ("cu13",)) is holds


@pytest.mark.parametrize(
    "argv, message",
    [
        (["install", "p", "--into", "i"], "install needs --target, or --no-install"),
        (["download", "--out", "o", "--limit-mib", "0"], "must be more than 0, got '0'"),
        (["download", "--out", "o", "--python", "2.7"], "must be like 3.12, got '2.7'"),
    ],
)
def test_bad_arguments_are_named(argv, message, wheels, capsys):
    with pytest.raises(SystemExit) as caught:
        wheels.main(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err
