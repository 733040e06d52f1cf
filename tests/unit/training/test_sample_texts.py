"""Sample texts: which tokens are chosen, and samples.md."""

import re
from pathlib import Path

import pytest
import torch
from configs import config_of

from zerokara.config.data import causal
from zerokara.model import parallel
from zerokara.samples.objective import Causal
from zerokara.tokenizer.encoder import Encoder
from zerokara.training import sample_texts
from zerokara.training.sample_texts import Sample, Sampler


class Table(torch.nn.Module):
    """A model whose next token depends on the last one only: row i of `logits_VV` follows token i."""

    def __init__(self, logits_VV: torch.Tensor):
        super().__init__()
        self.logits_VV, self.shapes = logits_VV, list[tuple[int, ...]]()
        self.first_inputs: list[list[int]] = []

    def forward(self, tokens_BS: torch.Tensor, at_B: torch.Tensor) -> torch.Tensor:
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN would prepare each new length anew"
        self.shapes.append(tuple(tokens_BS.shape))
        if not self.first_inputs:
            self.first_inputs = [row[: last + 1].tolist() for row, last in zip(tokens_BS, at_B.tolist(), strict=True)]
        last_B = tokens_BS[torch.arange(len(at_B)), at_B]
        return self.logits_VV[last_B][:, None]


@pytest.fixture
def encoder(tiny_data: dict[str, str]) -> Encoder:
    parallel.start_alone()
    return Encoder(tiny_data["input_tokenizer_file"])


def sampler(encoder: Encoder, *prompts: str, num_tokens: int = 6, seq_len: int = 32) -> Sampler:
    config = config_of(sample_prompts=prompts, sample_tokens=num_tokens, seed=1)
    return Sampler(encoder, Causal(causal(seq_len)), config, torch.device("cpu"))


def test_greedy_takes_the_arg_max_and_ends_with_the_document(encoder: Encoder) -> None:
    size = encoder.vocab_size
    pieces = [token for token in range(size) if encoder.prompt_ids(encoder.decode([token])) == [token]]
    chain = pieces[:4]
    logits_VV = torch.zeros(size, 512)
    for one, after in zip(chain, [*chain[1:], encoder.eos_id], strict=True):
        logits_VV[one, after] = 50
    # Tokens that must never be chosen have the largest logit everywhere.
    logits_VV[:, [encoder.unk_id, encoder.bos_id, encoder.pad_id, size, 511]] = 90
    model = Table(logits_VV)
    prompt = encoder.decode(chain[:1])
    made = sampler(encoder, prompt, num_tokens=20)
    assert made(model) == [Sample(prompt, encoder.decode(chain[1:]), encoder.decode(chain[1:]))]
    assert len(model.shapes) == 4, "it continued beyond the end of the document"
    assert model.training


def test_texts_fit_into_the_context_length_and_are_the_same_each_time(encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(3)
    model = Table(torch.randn(encoder.vocab_size, 512, generator=generator))
    model.logits_VV[:, encoder.eos_id] = -100
    words = " ".join(["abc def"] * 30)
    made = sampler(encoder, "", words, num_tokens=10, seq_len=16)
    before = torch.random.get_rng_state()
    first, again = made(model), made(model)
    assert torch.equal(torch.random.get_rng_state(), before), "training's random numbers were used"
    assert first == again and first[0].greedy != first[0].sampled
    assert max(length for _, length in model.shapes) == 15  # and predicts the 16th
    # The empty prompt starts from an end of document, the long one from the last of its ids that leave room.
    assert model.first_inputs[0] == [encoder.eos_id] and model.first_inputs[2] == encoder.prompt_ids(words)[-6:]


def test_top_p_samples_from_the_smallest_set_that_reaches_it() -> None:
    logits_BV = (torch.tensor([0.5, 0.3, 0.16, 0.03, 0.01]) ** sample_texts.TEMPERATURE).log().repeat(20_000, 1)
    counts = sample_texts.sample_top_p(logits_BV, torch.Generator().manual_seed(0)).bincount(minlength=5)
    assert (counts / 20_000).tolist() == pytest.approx([0.5 / 0.96, 0.3 / 0.96, 0.16 / 0.96, 0, 0], abs=0.02)
    certain_BV = torch.tensor([[-torch.inf, 3.0, -torch.inf]])
    assert sample_texts.sample_top_p(certain_BV, torch.Generator()).tolist() == [1]


def test_each_step_has_one_section_whatever_the_model_writes(tmp_path: Path) -> None:
    def steps() -> list[int]:
        text = (tmp_path / "samples.md").read_text(encoding="utf-8")
        return [int(number) for number in re.findall(r"(?m)^## step (\d+)$", text)]

    nasty = Sample("a\n## step 7", "one\n## step 8\x85## step 9\u2028## step 1\r## step 2", "")
    for step in (0, 10, 20, 30):
        sample_texts.add(tmp_path, step, [nasty, Sample("", "two", "three")])
    assert steps() == [0, 10, 20, 30]
    sample_texts.add(tmp_path, 10, [Sample("x", "again", "")])
    sample_texts.add(tmp_path, 20, [nasty])
    assert steps() == [0, 10, 20]
    text = (tmp_path / "samples.md").read_text(encoding="utf-8")
    assert text.startswith(
        "# What the model wrote\n\n## step 0\n\n**prompt:**\n\n    a\n    ## step 7\n\ngreedy:\n\n    one\n"
    )
    assert "**prompt:**\n\n    (the start of a document)\n\ngreedy:\n\n    two\n\nsampled:\n\n    three\n" in text
    assert text.count("again") == 1
    assert sample_texts.excerpt("a\n b" + "c" * 200, 10) == "a bcccccc…"
