"""transformers.js reads an export whose tokenizer is BPE as training did; of unigram it does not know the bytes."""

from clients.client_exports import Exports, ask


def differing_lines(exports: Exports, name: str) -> int:
    found = ask("with_transformers_js.mjs", "transformers.js", exports[name], exports.questions)
    encoder, lines = exports.encoder(name), exports.questions["lines"]
    assert found["version"] == "0.2.0" and len(found["ids"]) == len(lines) >= 200
    # It has no way to read the name of a control token as text, which `</s>` in these lines is: those are left out.
    pairs = zip(lines, found["ids"], strict=True)
    return sum(ids != encoder.encode(line).tolist() for line, ids in pairs if not names_control_token(exports, line))


def names_control_token(exports: Exports, line: str) -> bool:
    encoder = exports.encoder("llama-bpe")
    return any(encoder.pieces[token] in line for token in (*encoder.control_ids, encoder.unk_id))


def test_ids_of_bpe_are_those_of_training(exports: Exports) -> None:
    plain = [line for line in exports.questions["lines"] if not names_control_token(exports, line)]
    assert len(plain) > 100
    assert differing_lines(exports, "llama-bpe") == 0


def test_ids_of_unigram_are_others_as_readme_says(exports: Exports) -> None:
    """It gives <unk> for what has no piece, instead of bytes. Where this fails README can promise more."""
    assert differing_lines(exports, "llama") > 0
