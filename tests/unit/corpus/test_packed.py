"""The unpacked bytes of .gz and .zst: several members, long windows, bombs, and all there is before damage."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from random import Random
from types import ModuleType

import pytest

from zerokara.corpus.packed import PackedReader, Packing, zstd_module

zstd: ModuleType = zstd_module()
PACK = {"gzip": gzip.compress, "zstd": zstd.compress}
PACKINGS: list[Packing] = ["gzip", "zstd"]
SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def _unpack(packed: bytes, packing: Packing) -> tuple[bytes, str]:
    reader = PackedReader(io.BytesIO(packed), packing)
    return io.BufferedReader(reader, 1 << 16).read(), reader.damage


@pytest.fixture(scope="module")
def text() -> bytes:
    """Text that does not pack away to nothing, of more than one block of zstd."""
    random = Random(1)
    return b"".join(b"line %d %d\n" % (i, random.getrandbits(64)) for i in range(30_000))


@pytest.mark.parametrize("packing", PACKINGS)
def test_several_members_and_empty_ones_read_as_one(packing: Packing, text: bytes) -> None:
    pack = PACK[packing]
    packed = b"".join([pack(text[:1000]), pack(b""), pack(text[1000:400_000]), pack(text[400_000:])])
    assert _unpack(packed, packing) == (text, "")
    assert _unpack(b"", packing) == (b"", "")
    assert _unpack(pack(b""), packing) == (b"", "")


def test_many_small_members_as_bgzip_writes_them(text: bytes) -> None:
    packed = b"".join(gzip.compress(text[i : i + 500]) for i in range(0, len(text), 500))
    assert _unpack(packed, "gzip") == (text, "")


def test_zero_bytes_after_a_gzip_member_are_padding_and_a_file_of_zeros_is_damaged(text: bytes) -> None:
    packed = gzip.compress(text) + b"\0" * 100_000 + gzip.compress(b"more") + b"\0" * 500
    assert _unpack(packed, "gzip") == (text + b"more", "")
    assert _unpack(b"\0" * 100, "gzip")[1] and _unpack(b"\0" * 100, "zstd")[1]


def test_skippable_frames_of_zstd_hold_no_data(text: bytes) -> None:
    packed = SKIPPABLE_FRAME + zstd.compress(text) + SKIPPABLE_FRAME + zstd.compress(b"more") + SKIPPABLE_FRAME
    assert _unpack(packed, "zstd") == (text + b"more", "")


def test_frames_with_a_long_window_and_a_checksum(text: bytes) -> None:
    parameter = zstd.CompressionParameter
    options = {parameter.window_log: 28, parameter.checksum_flag: 1, parameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    packed = compressor.compress(text) + compressor.flush()  # size unknown, so that the window is not made smaller
    with pytest.raises(zstd.ZstdError, match="memory"):
        zstd.decompress(packed)  # what an unpacker does unasked
    assert _unpack(packed, "zstd") == (text, "")
    spoilt = packed[:-1] + bytes([packed[-1] ^ 1])
    unpacked, damage = _unpack(spoilt, "zstd")
    assert unpacked == text[: len(unpacked)] and len(unpacked) >= len(text) - (1 << 17) and "checksum" in damage


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_bomb_is_unpacked_in_little_memory(packing: Packing) -> None:
    packed = PACK[packing](bytes(60_000_000))
    reader, buffer = PackedReader(io.BytesIO(packed), packing), bytearray(1 << 20)
    tracemalloc.start()
    count = 0
    while size := reader.readinto(buffer):
        count += size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 60_000_000 and peak < 8_000_000


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("share", [0.0001, 0.3, 0.9999])
def test_a_file_cut_off_gives_all_that_is_there(packing: Packing, share: float, text: bytes) -> None:
    packed = PACK[packing](text)
    unpacked, damage = _unpack(packed[: max(1, int(len(packed) * share))], packing)
    assert damage == "the file ends in the middle"
    assert text.startswith(unpacked) and len(unpacked) >= len(text) * share - (1 << 18)


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_stands_before_damage_comes_out_to_the_byte(packing: Packing, text: bytes) -> None:
    """Members before the damage are whole; of the damaged one, all that feeding it byte by byte gives."""
    pack = PACK[packing]
    members = [pack(text[i : i + 20_000]) for i in range(0, 200_000, 20_000)]
    for spoilt in (0, 3, 9):
        broken = [*members[:spoilt], b"\xff\xff\xff\xff" + members[spoilt][4:], *members[spoilt + 1 :]]
        unpacked, damage = _unpack(b"".join(broken), packing)
        assert unpacked == text[: spoilt * 20_000] and damage


@pytest.mark.parametrize("packing", PACKINGS)
def test_damage_inside_a_member_loses_no_block_before_it(packing: Packing, text: bytes) -> None:
    # Without a checksum zstd does not see every change.
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    packed = gzip.compress(text) if packing == "gzip" else zstd.compress(text, options=checked)
    for place in range(len(packed) // 10, len(packed), len(packed) // 3):
        spoilt = packed[:place] + b"\xff" * 64 + packed[place + 64 :]
        unpacked, damage = _unpack(spoilt, packing)
        reference = _fed_byte_by_byte(spoilt, packing)
        assert damage and unpacked == reference and len(unpacked) >= len(text) * place / len(packed) - (1 << 18), place


def _fed_byte_by_byte(packed: bytes, packing: Packing) -> bytes:
    import zlib

    if packing == "gzip":
        inflate = zlib.decompressobj(wbits=31)
        step, error = (lambda piece: inflate.decompress(piece)), zlib.error
    else:
        frame = zstd.ZstdDecompressor()
        step, error = (lambda piece: frame.decompress(piece)), zstd.ZstdError
    unpacked = []
    for i in range(len(packed)):
        try:
            unpacked.append(step(packed[i : i + 1]))
        except error:
            break
    return b"".join(unpacked)


@pytest.mark.parametrize("packing", PACKINGS)
def test_garbage_after_the_last_member_is_told_and_costs_nothing(packing: Packing, text: bytes) -> None:
    unpacked, damage = _unpack(PACK[packing](text) + b"garbage that is no member", packing)
    assert unpacked == text and damage


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_bytes_reach_the_size_of_the_file(packing: Packing, text: bytes) -> None:
    packed = PACK[packing](text)
    reader = PackedReader(io.BytesIO(packed), packing)
    assert reader.packed_bytes == 0
    io.BufferedReader(reader).read()
    assert reader.packed_bytes == len(packed)
