"""Compiled kernels on disk: made once, loaded after that, made again where a file is damaged or
anything that they are made from differs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (the extra fa4)")
from vitrail.attention.backends import kept as module  # noqa: E402
from vitrail.attention.backends.kept import kept  # noqa: E402

SCRIPT = Path(__file__).with_name("kept_kernel.py")


def run(folder: Path, device: str = "cpu") -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), device], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_kernel_is_made_once_and_is_the_same_from_disk(tmp_path: Path):
    folder = tmp_path / "new"
    assert run(folder) == ["made", "expected device_type=cuda"]
    assert run(folder) == ["expected device_type=cuda"]
    (file,) = folder.glob("*.o")
    file.write_bytes(file.read_bytes()[:100])
    assert run(folder)[0] == "made", "damaged"
    assert file.stat().st_size > 1000
    assert list(folder.glob("*.o")) == [file]


@pytest.mark.suite("kernels", minutes=1, owner="attention")
@pytest.mark.nightly
def test_of_processes_that_want_one_kernel_at_once_one_makes_it(tmp_path: Path):
    """And every one of them computes with what that one made."""
    command = [sys.executable, str(SCRIPT), str(tmp_path), "cpu"]
    three = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0].splitlines() for process in three]
    assert sorted(map(len, said)) == [1, 1, 2]
    assert {lines[-1] for lines in said} == {"expected device_type=cuda"}
    assert [file.suffix for file in tmp_path.iterdir() if file.suffix != ".lock"] == [".o"]


class Fake:
    """A compiled kernel, exported as some bytes."""

    def __init__(self, fails: bool = False):
        self.fails = fails

    def __call__(self) -> None:
        pass

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        if self.fails:
            raise OSError("no space left on device")
        Path(object_file_path).write_text(function_name)


def test_parts_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_load", lambda files: None)
    both = [Fake(), Fake()]
    assert kept("a", ("forward", "combine"), lambda: both, tmp_path, "gpu") == tuple(both)
    names = sorted(file.name.split(".")[1] for file in tmp_path.glob("*.o"))
    assert names == ["combine", "forward"]
    kept("b", ("forward",), lambda: [Fake()], tmp_path, "gpu")
    monkeypatch.setattr(module, "_made_from", lambda: "another release")
    kept("b", ("forward",), lambda: [Fake()], tmp_path, "gpu")
    assert len(list(tmp_path.glob("*.forward.o"))) == 3


def test_what_cannot_be_kept_is_used_all_the_same(tmp_path: Path):
    full = Fake(fails=True)
    assert kept("a", ("one",), lambda: [full], tmp_path, "gpu") == (full,)
    assert not list(tmp_path.glob("*.o"))
    (tmp_path / "file").touch()
    one = Fake()
    assert kept("a", ("one",), lambda: [one], tmp_path / "file" / "x", "gpu") == (one,)


def test_a_compilers_error_is_raised_and_nothing_is_kept(tmp_path: Path):
    def broken() -> list[object]:
        raise ValueError("size in shape")

    with pytest.raises(ValueError, match="size in shape"):
        kept("a", ("one",), broken, tmp_path, "gpu")
    assert not list(tmp_path.glob("*.o"))


def test_its_key_covers_our_sources():
    text = module._made_from()
    assert "nvidia-cutlass-dsl" in text
    for source in module.SOURCES:
        assert (Path(module.__file__).parents[1] / source).is_file(), source
