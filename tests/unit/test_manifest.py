"""Manifests: an unchanged step is recognised wherever its files are, and every difference is a fault of its own."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest
from configs import fault_of, refused

from zerokara.base import manifest, progress
from zerokara.base.errors import RunError
from zerokara.base.manifest import StepSpec


@pytest.fixture
def done(tmp_path: Path) -> tuple[Path, StepSpec]:
    """The manifest of a step that read one file and wrote another, and the step."""
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("in", encoding="utf-8")
    output.write_text("out", encoding="utf-8")
    spec = StepSpec("step", {"size": 3, "list": ("a",)}, {"source": source})
    manifest.write(tmp_path / "manifest.json", spec, {"result": output}, {"tokens": 7}, 1.0)
    return tmp_path / "manifest.json", spec


def test_an_unchanged_step_is_done_wherever_its_input_is(done: tuple[Path, StepSpec]) -> None:
    path, spec = done
    found = manifest.already_done(path, spec)
    assert found is not None and found.facts == {"tokens": 7}
    moved = path.with_name("elsewhere.txt")
    path.with_name("in.txt").rename(moved)
    assert manifest.already_done(path, StepSpec(spec.step, spec.settings, {"source": moved}))


def test_every_difference_is_a_fault_with_key_and_value(done: tuple[Path, StepSpec]) -> None:
    path, spec = done
    path.with_name("in.txt").write_text("changed", encoding="utf-8")
    other = StepSpec("step", {**spec.settings, "size": 4}, spec.inputs)
    size, source = refused(manifest.already_done, path, other)
    assert (size.where, size.key, size.value) == (str(path), "size", 4) and "3" in size.rule
    assert source.key == "source" and "7 bytes" in str(source.value) and "2 bytes" in source.rule
    assert "--redo" in size.remedy and "--redo" in source.remedy
    assert manifest.already_done(path, other, redo=True) is None
    other = StepSpec("step", {**spec.settings, "size": ""}, spec.inputs)
    assert refused(manifest.already_done, path, other)[0].value == "''"
    assert fault_of(manifest.already_done, path, StepSpec("another", spec.settings, spec.inputs))


def test_a_missing_or_changed_output_has_to_be_made_again(done: tuple[Path, StepSpec]) -> None:
    path, spec = done
    path.with_name("out.txt").write_text("tuo", encoding="utf-8")
    assert manifest.already_done(path, spec) is None
    path.with_name("out.txt").unlink()
    assert manifest.already_done(path, spec) is None


def test_what_changed_before_it_was_recorded_is_not_recorded(done: tuple[Path, StepSpec]) -> None:
    path, spec = done
    path.unlink()

    def changed() -> None:
        raise RunError("changed")

    with pytest.raises(RunError, match="changed"):
        manifest.write(path, spec, {}, {}, 1.0, check=changed)
    assert not path.exists()


def test_a_remote_file_of_another_size_is_another_though_its_server_knows_no_content_id(tmp_path: Path) -> None:
    def spec(size: int) -> StepSpec:
        return StepSpec("step", {}, {"source": [manifest.FileRecord("ftp://host/a.jsonl", size, "", 0)]})

    manifest.write(tmp_path / "manifest.json", spec(100), {}, {}, 1.0)
    assert manifest.already_done(tmp_path / "manifest.json", spec(100))
    assert "100 bytes" in fault_of(manifest.already_done, tmp_path / "manifest.json", spec(200)).rule


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    files: list[Path] = []
    hash_files: Callable[[Sequence[Path]], dict[manifest.FileKey, str]] = manifest.hash_files

    def watched(some: Sequence[Path]) -> dict[manifest.FileKey, str]:
        files.extend(some)
        return hash_files(some)

    monkeypatch.setattr(manifest, "hash_files", watched)
    return files


def test_files_are_hashed_once_and_unchanged_ones_never_again(tmp_path: Path, hashed: list[Path]) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number * (number * 10_000))
    spec = StepSpec("step", {}, {"corpus": [*paths, paths[3]]})
    made = manifest.write(tmp_path / "manifest.json", spec, {}, {}, 1.0)
    assert [record.sha256 for record in made.inputs["corpus"][:40]] == [manifest.sha256_of(path) for path in paths]
    assert made.inputs["corpus"][40] == made.inputs["corpus"][3] and len(hashed) == 40
    paths[7].write_bytes(b"other")
    fault = fault_of(manifest.already_done, tmp_path / "manifest.json", spec)
    assert fault.key == "corpus" and hashed[40:] == [paths[7]]


def test_known_hashes_are_taken_while_the_file_is_the_same(tmp_path: Path, hashed: list[Path]) -> None:
    for name in ("kept", "changed"):
        (tmp_path / name).write_bytes(b"one")
    spec = StepSpec("x", {}, {"input": [tmp_path / "kept", tmp_path / "changed"]})
    known = {manifest.file_key(path): "known" for path in tmp_path.iterdir()}
    (tmp_path / "changed").write_bytes(b"three")
    made = manifest.write(tmp_path / "m.json", spec, {}, {}, 0.0, known)
    assert [record.sha256 for record in made.inputs["input"]] == ["known", manifest.sha256_of(tmp_path / "changed")]
    assert hashed == [tmp_path / "changed"]


def test_a_file_on_the_hub_is_known_by_its_content_id(tmp_path: Path) -> None:
    def spec(content: str, name: str = "hf://datasets/o/n@c/f.jsonl") -> StepSpec:
        return StepSpec("step", {}, {"corpus": [manifest.FileRecord(name, 7, content, 0)]})

    path = tmp_path / "manifest.json"
    made = manifest.write(path, spec("git:abc"), {}, {}, 1.0)
    assert made.inputs["corpus"] == [manifest.FileRecord("hf://datasets/o/n@c/f.jsonl", 7, "git:abc", 0)]
    assert manifest.already_done(path, spec("git:abc", "hf://datasets/o/n@d/g.jsonl")) is not None
    assert fault_of(manifest.already_done, path, spec("git:abd")).key == "corpus"


@pytest.mark.parametrize("content", [None, b"{}", b"[]", b"not JSON"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    assert fault_of(manifest.read, path).where == str(path)


def test_a_newer_format_is_refused_as_such_and_a_further_field_is_not(done: tuple[Path, StepSpec]) -> None:
    path, _ = done
    content = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**content, "signature": "x"}))
    assert manifest.read(path).facts == {"tokens": 7}
    path.write_bytes(orjson.dumps({**content, "format": manifest.FORMAT + 1}))
    with pytest.raises(manifest.NewerFormatError):
        manifest.read(path)


def test_hashing_shows_progress_and_a_file_that_cannot_be_read_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 64 * 2**20)
    manifest.hash_files([tmp_path / "file"])
    assert "100% 67.1M/67.1M [" in capsys.readouterr().err
    for path, message in ((Path("/proc/self/mem"), "Input/output error"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=message):
            manifest.hash_files([tmp_path / "file", path])


def test_a_copy_that_broke_off_is_seen_by_its_sample(tmp_path: Path) -> None:
    path, content = tmp_path / "train.bin", bytes(range(256)) * 100_000
    path.write_bytes(content)
    whole, half = manifest.sampled_sha256([path]), len(content) // 2
    path.write_bytes(content[:half] + bytes(half))
    assert manifest.sampled_sha256([path]) != whole


def test_what_a_server_says_of_a_file_is_told_whole() -> None:
    record = manifest.FileRecord("s3://bucket/a.jsonl", 7, "mtime:1796061234.5", 0)
    assert manifest._brief([record]).endswith(", mtime:1796061234.5")
