"""Faults as text, and secrets that no message may show."""

import unicodedata
from pathlib import Path

import pytest
from configs import fault_of
from quiet_core import seconds_of

from zerokara.base.errors import Fault, RunError, UserError, check_hub_token, nearest, redacted
from zerokara.corpus import remote
from zerokara.publishing import hub


def test_fault_reads_as_one_line() -> None:
    fault = Fault(where="config.yaml:14", key="lr", value=-1, rule="must be greater than 0", remedy="try 3e-4")
    assert str(fault) == "config.yaml:14: lr = -1: must be greater than 0; try 3e-4"
    assert str(Fault(where="a.bin", rule="is cut off")) == "a.bin: is cut off"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at https://s3.eu/b/o?X-Amz-Signature=ab12&x=1: gone", "at https://s3.eu/b/o?…: gone"),
        ("(https://s3.eu/b/o?X-Amz-Signature=ab12); again", "(https://s3.eu/b/o?…); again"),
        ("'https://cdn.hub/f#token' and \"hf://a/b?c\"", "'https://cdn.hub/f?…' and \"hf://a/b?…\""),
        ("with url: /b/o?Signature=ab%2F12&Key-Pair-Id=k (Caused", "with url: /b/o?… (Caused"),
        ("X-Amz-Credential=AKIA%2F1&amp;X-Amz-Signature=ab12\nhost", "…\nhost"),
        ("<b>x</b><SignatureProvided>a\nb</SignatureProvided>", "<b>x</b><SignatureProvided>…</SignatureProvided>"),
        ("ProxyError: http://ada:p@ss@proxy:8080/", "ProxyError: http://…@proxy:8080/"),
        ("socks5://ada:secret@proxy", "socks5://…@proxy"),
        ("token hf_abcdefghijABCDEFGHIJ0123456789wxyz.", "token hf_…."),
        ("hf_oauth_abcdefghijABCDEFGHIJ0123456789", "hf_…"),
        ("headers {'authorization': 'Bearer abc.def', 'host': 'x'}", "headers {'authorization': '…', 'host': 'x'}"),
        ("Authorization: Basic YWRhOnNlY3JldA==\nHost: x", "Authorization: …\nHost: x"),
        ("sent Bearer abcdefgh1234", "sent Bearer …"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "jwt …"),
        ("key wandb_v1_" + "a" * 40, "key wandb_v1_…"),
    ],
)  # fmt: skip
def test_what_opens_doors_is_cut_out(text: str, expected: str) -> None:
    assert redacted(text) == expected
    assert redacted(expected) == expected
    assert str(RunError(text)) == str(UserError(Fault("", text))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "config.yaml:3: input_jsonl = data/[a-z]?*.jsonl: names no file; is it right? see https://hub.co/a/b/settings",
        "hf://datasets/ada/poems@main/data/*.jsonl: hf_raise_for_status, commit 0123456789abcdef0123456789abcdef",
        "lr = -1: must be greater than 0; try 3e-4, or set lr: 1e-3 & min_lr: 0 (a basic understanding helps)",
    ],
)
def test_what_opens_none_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part", ["a+", "?a=).", "<CanonicalRequest>", "a://", "x-amz-", "eyJa-", "&", "http://a@", "cookie ", "hf_", ":"]
)
def test_no_text_keeps_the_expressions_busy(part: str) -> None:
    assert seconds_of(lambda: redacted(part * (200_000 // len(part)) + "x")) < 1


def test_secrets_of_the_environment_are_known_by_the_names_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("MIRROR_PASSWORD", "correct horse")
    monkeypatch.setenv("SOME_TOKEN", "1")
    assert redacted(f"key {'0123456789' * 4}, correct horse, 1") == "key …, …, 1"


@pytest.mark.parametrize("value", ["“hf_abcdefghijklmnop”", "hf_abcdefgh ijklmnop", "hf_é"])
def test_a_token_that_cannot_be_one_is_named_and_not_shown(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, value)
        fault = fault_of(check_hub_token)
        assert fault.where == name and value.strip('“”"') not in str(fault)
        assert fault_of(remote.find, "hf://datasets/a/b", "here") == fault
        assert fault_of(hub.upload, Path(), [], "a/b", private=True) == fault
    for good in ("hf_abcdefghijklmnop", " hf_abcdefghijklmnop\n", "hf_oauth_a.b-c_d~e+f/g=="):
        monkeypatch.setenv("HF_TOKEN", good)
        check_hub_token()


def test_the_nearest_name_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/books").mkdir(parents=True)
    (tmp_path / "data/books/Moby.jsonl").touch()
    (tmp_path / ".cache").mkdir()
    for missing, name in {
        "data/books/moby.json": "data/books/Moby.jsonl", "dta/books/Moby.jsonl": "data/books/Moby.jsonl",
        "DATA/other/x.jsonl": "data", "data/books/Moby.jsonl/x": "data/books/Moby.jsonl", "../dat/x": "",
        f"{tmp_path}/date": f"{tmp_path}/data", "book": "",
    }.items():  # fmt: skip
        found = nearest(missing, "look there")
        assert found.endswith("; or look there") and (f"the nearest name is {name}; " in found) is bool(name), found
    assert nearest("book") == f"{tmp_path} holds data, .cache"
    assert nearest("data/*.txt") == f"{tmp_path}/data holds books"
    assert nearest("a" * 5000, "look there") == "look there"
    (tmp_path / "cafe\u0301.txt").touch()
    assert nearest("caf\u00e9.txt").endswith(r"which looks alike and has other characters: 'cafe\u0301.txt'")
    (tmp_path / "\ud55c\uae00.txt").touch()
    assert "looks alike" in nearest(unicodedata.normalize("NFD", "\ud55c\uae00.txt"))
