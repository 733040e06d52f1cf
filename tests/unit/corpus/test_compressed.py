"""The unpacked bytes of .gz and .zst: several members, long windows, and all there is before damage."""

import gzip
import io
from itertools import pairwise
from random import Random
from types import ModuleType

import pytest

from zerokara.corpus.compressed import CUT, CompressedReader, Compression, zstd_module

zstd: ModuleType = zstd_module()
PACK = {"gzip": gzip.compress, "zstd": zstd.compress}
COMPRESSIONS: list[Compression] = ["gzip", "zstd"]
SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def _unpack(packed: bytes, compression: Compression) -> tuple[bytes, str]:
    reader = CompressedReader(io.BytesIO(packed), compression, "a file")
    return io.BufferedReader(reader, 1 << 16).read(), reader.damage


@pytest.fixture(scope="module")
def text() -> bytes:
    """Text that does not pack away to nothing, of more than one block of zstd."""
    random = Random(1)
    return b"".join(b"line %d %d\n" % (i, random.getrandbits(64)) for i in range(20_000))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_several_members_and_empty_ones_read_as_one(compression: Compression, text: bytes) -> None:
    pack, places = PACK[compression], [0, 0, *range(0, 50_000, 500), len(text)]
    packed = b"".join(pack(text[start:end]) for start, end in pairwise(places))
    assert _unpack(packed, compression) == (text, "")
    assert _unpack(pack(b""), compression) == (b"", "")
    assert _unpack(b"", compression) == (b"", "the file is empty")


def test_zero_bytes_after_a_gzip_member_are_padding_and_a_file_of_zeros_is_damaged(text: bytes) -> None:
    packed = gzip.compress(text) + b"\0" * 100_000 + gzip.compress(b"more") + b"\0" * 500
    assert _unpack(packed, "gzip") == (text + b"more", "")
    assert _unpack(b"\0" * 100, "gzip")[1] and _unpack(b"\0" * 100, "zstd")[1]


def test_skippable_frames_of_zstd_hold_no_data(text: bytes) -> None:
    packed = SKIPPABLE_FRAME + zstd.compress(text) + SKIPPABLE_FRAME + zstd.compress(b"more") + SKIPPABLE_FRAME
    assert _unpack(packed, "zstd") == (text + b"more", "")


def _with_window(text: bytes, window_log: int) -> bytes:
    parameter = zstd.CompressionParameter
    options = {parameter.window_log: window_log, parameter.checksum_flag: 1, parameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    return bytes(compressor.compress(text) + compressor.flush())  # size unknown, so that the window is not made smaller


def test_the_longest_window_that_zstd_takes_unasked_and_a_checksum(text: bytes) -> None:
    packed = _with_window(text, 27)
    assert _unpack(packed, "zstd") == (text, "")
    spoilt = packed[:-1] + bytes([packed[-1] ^ 1])
    unpacked, damage = _unpack(spoilt, "zstd")
    assert unpacked == text[: len(unpacked)] and len(unpacked) >= len(text) - (1 << 17) and "checksum" in damage


@pytest.mark.parametrize("before", [b"", b"a whole frame"])
@pytest.mark.parametrize("needs", ["a window of gigabytes", "a dictionary"])
def test_a_frame_that_needs_more_is_a_damage_that_tells_the_remedy(text: bytes, before: bytes, needs: str) -> None:
    packed = _with_window(text, 31)
    if needs == "a dictionary":
        dictionary = zstd.train_dict([b"a line of text, number %d" % number for number in range(2000)], 2000)
        packed = zstd.compress(text, zstd_dict=dictionary)
    unpacked, damage = _unpack((zstd.compress(before) if before else b"") + packed, "zstd")
    assert unpacked == before and "zstd -dc --long=31 a file | zstd --long=27" in damage and "dictionary (-D)" in damage


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("share", [0.0001, 0.1, 0.75, 0.9999])
def test_what_is_there_before_a_cut_or_damage_arrives(compression: Compression, share: float, text: bytes) -> None:
    # Without a checksum zstd does not see every change.
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    packed = gzip.compress(text) if compression == "gzip" else zstd.compress(text, options=checked)
    place = max(1, int(len(packed) * share))
    unpacked, damage = _unpack(packed[:place], compression)
    assert damage == CUT and text.startswith(unpacked) and len(unpacked) >= len(text) * share - (1 << 17)
    unpacked, damage = _unpack(packed[:place] + b"\xff" * 64 + packed[place + 64 :], compression)
    assert damage not in ("", CUT) and len(unpacked) >= len(text) * share - (1 << 18)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("garbage", [b"garbage that is no member", b"\n", b"\xff" * 100_000])
def test_bytes_after_the_last_member_cost_nothing(compression: Compression, garbage: bytes, text: bytes) -> None:
    packed = PACK[compression](text)
    reader = CompressedReader(io.BytesIO(packed + garbage), compression, "a file")
    assert io.BufferedReader(reader).read() == text and "follows its last member" in reader.damage
    assert reader.verified_bytes == len(packed)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_verified_of_a_damaged_file(compression: Compression, text: bytes) -> None:
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    first, last = (
        gzip.compress(part) if compression == "gzip" else zstd.compress(part, options=checked)
        for part in (text[:300_000], text[300_000:])
    )

    def verified_bytes(packed: bytes) -> int:
        reader = CompressedReader(io.BytesIO(packed), compression, "a file")
        io.BufferedReader(reader).read()
        assert reader.damage
        return reader.verified_bytes

    assert verified_bytes((first + last)[:-1]) == 0, "cut off: how much is missing is unknown"
    assert verified_bytes((first + last)[: len(first) + 3]) == 0
    assert verified_bytes(first + b"\xff" + last[1:]) == len(first), "a header"
    assert verified_bytes(first + last[:-2] + bytes([last[-2] ^ 1]) + last[-1:]) == len(first), "a checksum"
    middle = len(first) + len(last) // 2
    assert verified_bytes((first + last)[:middle] + b"\xff" * 300 + (first + last)[middle + 300 :]) == len(first)
