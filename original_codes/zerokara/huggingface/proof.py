"""Proof that an exported folder computes what the trained model computes, without which it does not get its name.

Stock transformers, with the folder read back from disk, and our model, with the weights of the checkpoint rounded as
the export rounds them, compute the logits of the same samples in fp32, one after the other. transformers also continue
prompts greedily with their cache; our model reads each prompt with its continuation in one forward pass, where each
token must be the arg max. Two logits closer to each other than twice the allowed difference between the models are a
*tie*: either may win, which is counted and is no fault. A router, too, may choose either of two experts whose
probabilities are equal up to rounding: positions that depend on such a choice are counted, and not compared.

A model of any size is proved: the exported one stays in the precision and in the mapped files in which it was saved,
ours stays in the checkpoint, and a layer of either has fp32 weights only while it computes (`layer_by_layer`).

Shape suffixes: B batch, S sequence, V real vocabulary.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zerokara.base.errors import RunError
from zerokara.base.progress import Progress
from zerokara.huggingface import families, generation
from zerokara.huggingface.tokenizer_proof import Proof
from zerokara.model import builder, parallel
from zerokara.model.experts import MixtureOfExperts
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Objective, Prompt

TOLERANCE, LEAST_LOGIT = 1e-5, 10.0
"""Allowed difference of a logit, as a share of the largest logit, which counts as `LEAST_LOGIT` where it is smaller.
Rounding of fp32 alone gives about 1e-7 to 3e-6 of it (fp32 has 7 digits, and some thousand terms are added in another
order): two attentions of transformers differ as much. Any wrong rule gives 0.1 and more."""
SPREAD = 0.5
"""Standard deviation of the logits below which equality means little: flat logits agree whatever the rules."""
MIN_POSITIONS, MAX_POSITIONS = 128, 2048
"""Tokens compared: a wrong rule shows at every one of them."""
ROUTER_TIE = 1e-5
"""Relative difference between the probabilities of the last chosen expert and of the next one, below which rounding
decides."""
FLOPS_BUDGET = 0.3e12
"""FLOPs of one forward pass over all of them: three seconds on two cores."""
LOGITS_BUDGET = 32_000_000
"""Logits held in memory at once, 128 MB of fp32: with a large vocabulary fewer tokens are compared."""
BF16_SHARE = 4
"""bf16 is only reported, and slow on processors without instructions for it: one position in four is computed."""
MIN_NEW_TOKENS, MAX_NEW_TOKENS = 20, 60
WEIGHTS_BUDGET = 24e9
"""Weights that a continuation may read: 24 tokens of a model of a billion take ten seconds on two cores."""
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
_LAYER = re.compile(r"(.+\.)?(layers|h|block)\.\d+")
"""Names of the layers, in our models and in those of transformers."""


def as_json(proofs: Mapping[str, Proof], samples: Sequence[Any], examples: bool = False) -> dict[str, Any]:
    """Facts for the manifest; `examples` adds differing lines of the corpus, which are not for everyone."""
    holds, found = not any(each.faults for each in proofs.values()), dict[str, Any]()
    for name, each in proofs.items():
        found[name] = {"holds": not each.faults, **each.facts, "faults": each.faults}
        found[name] |= {"examples": each.examples} if examples else {}
    return {"proof": {"holds": holds, **found}, "samples": samples}


def windows(documents: Iterable[Sequence[int]], shape: ModelShape, training: Objective) -> list[Prompt]:
    """Samples as in training, from the beginning of the text, as many as the budgets of time and memory allow."""
    affordable = int(FLOPS_BUDGET / (2 * shape.num_parameters()))
    budget = min(MAX_POSITIONS, max(2, LOGITS_BUDGET // shape.padded_vocab_size), max(MIN_POSITIONS, affordable))
    length = training.lengths.raw + training.lengths.overlap
    num_tokens = max(1, budget // training.lengths.target) * length
    stream = np.fromiter(islice(chain.from_iterable(documents), num_tokens), dtype=np.int64)
    if len(stream) < 2:
        raise RunError("the proof has no text: check_corpus gave no document of at least two tokens")
    keys = np.arange(-(-len(stream) // length))
    batch = training(np.resize(stream, (len(keys), length)), keys)  # a last sample that is cut short restarts
    if batch.decoder_inputs is None:
        return first_positions([Prompt([], ids) for ids in batch.inputs.tolist()], budget)
    pairs = zip(batch.inputs.tolist(), batch.decoder_inputs.tolist(), strict=True)
    return first_positions([Prompt(*pair) for pair in pairs], budget)


def first_positions(texts: Sequence[Prompt], positions: int) -> list[Prompt]:
    """First positions of each text, or of the decoder's input: the models are causal."""
    return [Prompt(text.encoder_ids, text.decoder_ids[:positions]) for text in texts]


def num_new_tokens(shape: ModelShape) -> int:
    """Length of the continuations: as the budget allows, and so that some of a prompt fits before it."""
    affordable = int(WEIGHTS_BUDGET / shape.num_parameters())
    return min(max(MIN_NEW_TOKENS, min(MAX_NEW_TOKENS, affordable)), shape.seq_len - 1)


def prove(
    folder: Path,
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    dtype: str,
    texts: Sequence[Prompt],
    prompts: Sequence[Prompt],
) -> tuple[Proof, list[list[int]], list[list[int]]]:
    """Compare the exported `folder`, saved in `dtype`, with the trained `weights`, on `texts` of one length.

    Return, too, the ids that follow each prompt greedily, and those that follow it by sampling.
    """
    faults, exported_BSV, bf16_BSV, greedy, sampled = _exported(folder, shape, dtype, texts, prompts)
    pairs = zip(prompts, greedy, strict=True)
    after = [Prompt(prompt.encoder_ids, [*prompt.decoder_ids, *tokens[:-1]]) for prompt, tokens in pairs]
    found = trained_logits(weights, shape, [texts, after], families.TORCH_DTYPES[dtype])
    (expected_BSV, tied_BS), (after_BSV, after_tied_BS) = found
    fp32_BSV = expected_BSV[:, : bf16_BSV.shape[1]]
    if not tied_BS.all() and exported_BSV.shape == expected_BSV.shape:
        exported_BSV = expected_BSV.where(tied_BS[..., None], exported_BSV)
    difference, worst = _largest_difference(exported_BSV, expected_BSV)
    allowed = TOLERANCE * max(LEAST_LOGIT, float(expected_BSV.abs().max()))
    if not difference < allowed:
        faults.append(f"logits differ by {difference:.3g}, at most {allowed:.2g} is allowed; {worst}")
    greedy_ties, greedy_faults = compare_greedy(prompts, greedy, after_BSV, after_tied_BS, 2 * allowed)
    std = float(expected_BSV.std())
    flat = f"the logits' standard deviation is {std:.2f}: equality means little for logits this flat"
    tied = f"{int(tied_BS.sum()):,} positions depend on a router's choice between equal experts, and are not compared"
    bf16_equal_BS = bf16_BSV.argmax(-1) == fp32_BSV.argmax(-1)
    facts = {
        "positions": sum(len(text.decoder_ids) for text in texts),
        "positions_after_router_ties": int(tied_BS.sum()),
        "tolerance": allowed,
        "max_difference": difference,
        "logit_std": std,
        # Where no logit differs by more than the tolerance, two that change their order are a tie.
        "argmax_ties": int((exported_BSV.argmax(-1) != expected_BSV.argmax(-1)).sum()),
        "greedy_prompts": len(greedy),
        "greedy_tokens": sum(map(len, greedy)),
        "greedy_ties": greedy_ties,
        # Stock transformers computing in bf16 against the trained weights, as they are saved, in fp32.
        "bf16_max_difference": _largest_difference(bf16_BSV, fp32_BSV)[0],
        "bf16_argmax_equal": float(bf16_equal_BS.float().mean()),
        "notes": [*([flat] if std < SPREAD else []), *([tied] if tied_BS.any() else [])],
    }
    return Proof(facts, faults + greedy_faults), greedy, sampled


def _exported(
    folder: Path, shape: ModelShape, dtype: str, texts: Sequence[Prompt], prompts: Sequence[Prompt]
) -> tuple[list[str], Tensor, Tensor, list[list[int]], list[list[int]]]:
    """Let stock transformers load the folder and compute; the model leaves memory afterwards.

    Returned are the faults (keys that loading reports as missing, unexpected, or of another shape, and differences from
    our shape), the logits, those of the first positions in bf16 throughout, and the greedy and sampled continuations.
    """
    family = families.FAMILIES[shape.architecture]
    model, loading_faults = families.load_model(folder, families.TORCH_DTYPES[dtype], family.auto_class)
    model = model.to(device()).eval()
    faults = [f"loading reports {fault}" for fault in loading_faults]
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    said_tied = family.config_is_tied(model.config)
    for name, value in (("tied output matrix", is_tied), ("tie_word_embeddings in config.json", said_tied)):
        if value != shape.tie_word_embeddings:
            faults.append(f"{name} is {value}, must be {shape.tie_word_embeddings}")
    new_tokens = num_new_tokens(shape)
    pad_id = model.generation_config.pad_token_id or 0
    continued = partial(generation.generate, model, max_new_tokens=new_tokens, end_ids=(), pad_id=pad_id)
    rows = [prompt.encoder_ids or prompt.decoder_ids for prompt in prompts]
    passes = 1 + 2 * new_tokens
    with layer_by_layer(model, lambda _, parameter: parameter.detach(), "proof, exported model", passes):
        logits_BSV = _stock_logits(model, texts)
        greedy = continued(rows)
        # Nothing can be drawn by logits that are no numbers; that these fail is said by the comparison.
        sampled = continued(rows, sampling=SAMPLING if logits_BSV.isfinite().all() else None)
    bf16_BSV = _stock_logits(
        model.to(torch.bfloat16), first_positions(texts, max(1, logits_BSV.shape[1] // BF16_SHARE))
    )
    return faults, logits_BSV, bf16_BSV, [each.ids for each in greedy], [each.ids for each in sampled]


def _stock_logits(model: Any, texts: Sequence[Prompt]) -> Tensor:
    ids, named = generation.arguments(texts, device(), "attention_mask", "decoder_input_ids")
    with torch.inference_mode():
        return model(ids, **named).logits.float().cpu()


def trained_logits(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    batches: Sequence[Sequence[Prompt]],
    rounded_to: torch.dtype = torch.float32,
) -> list[tuple[Tensor, Tensor]]:
    """Logits [B, S, V] in fp32 of our model, without the rows that pad the vocabulary; of its weights, rounded.

    With the logits of each batch comes a mask, [B, S]: True where they depend on a router's tie.
    """
    parallel.start_alone()
    with torch.device("meta"):
        model = builder.build(shape).eval()
    found, ties = [], list[tuple[bool, Tensor]]()
    for name, part in model.named_modules():
        if isinstance(part, MixtureOfExperts) and part.top_k < part.num_experts:
            is_encoder = name.startswith("encoder.")
            part.register_forward_hook(
                lambda layer, read, _, of=is_encoder: ties.append((of, _router_ties(layer, *read)))
            )
    with (
        layer_by_layer(model, lambda name, _: weights[name].to(rounded_to), "proof, trained model", len(batches)),
        torch.inference_mode(),
    ):
        for texts in batches:
            ids, named = generation.arguments(texts, device(), "encoder_attention_mask_BS", "decoder_input_ids_BT")
            logits_BSV = model(ids, **named)[..., : shape.vocab_size].float().cpu()
            tied_BS = torch.zeros(logits_BSV.shape[:2], dtype=torch.bool)
            for of_encoder, tie_BS in ties:  # a decoder reads all that its encoder has read, and all before a token
                tied_BS |= tie_BS.any(dim=1, keepdim=True) if of_encoder else tie_BS.cummax(dim=1).values
            ties.clear()
            found.append((logits_BSV, tied_BS))
    return found


def _router_ties(layer: MixtureOfExperts, hidden_SBD: Tensor, *_: Any) -> Tensor:
    """Where a router chooses between two experts by rounding, [B, S]."""
    scores_SBX = torch.nn.functional.linear(hidden_SBD.float(), layer.router.weight.float()).softmax(dim=-1)
    last_SB, next_SB = scores_SBX.topk(layer.top_k + 1).values[..., -2:].unbind(-1)
    return (last_SB - next_SB < ROUTER_TIE * last_SB).transpose(0, 1).cpu()


def _largest_difference(found_BSV: Tensor, expected_BSV: Tensor) -> tuple[float, str]:
    """Largest difference and its place; infinite if the shapes or a number are wrong."""
    if found_BSV.shape != expected_BSV.shape:
        return float("inf"), f"logits have shape {list(found_BSV.shape)}, must have {list(expected_BSV.shape)}"
    difference_BSV = (found_BSV - expected_BSV).abs().nan_to_num(nan=float("inf"))
    at = tuple(int(index) for index in torch.unravel_index(difference_BSV.argmax(), difference_BSV.shape))
    return float(difference_BSV[at]), (
        f"worst at sample {at[0]}, position {at[1]}, logit of token {at[2]}: {float(found_BSV[at]):.6g} exported, "
        f"{float(expected_BSV[at]):.6g} trained"
    )


def compare_greedy(
    prompts: Sequence[Prompt], greedy: Sequence[list[int]], after_BSV: Tensor, tied_BS: Tensor, tie: float
) -> tuple[int, list[str]]:
    """Compare each token that transformers chose with the arg max of our model there; returns ties and faults.

    `after_BSV`: the logits of each prompt with what was generated after it; `tied_BS`: where a router's tie ends the
    comparison.
    """
    ties, faults = 0, []
    for prompt, tokens, logits_SV, tied_S in zip(prompts, greedy, after_BSV, tied_BS, strict=True):
        start = len(prompt.decoder_ids) - 1
        for at, (token, row_V) in enumerate(zip(tokens, logits_SV[start : start + len(tokens)], strict=True)):
            if tied_S[start + at]:
                break
            best = int(row_V.argmax())
            if token < len(row_V) and float(row_V[best] - row_V[token]) <= tie:
                ties += token != best
                continue
            faults.append(
                f"greedy continuation of {prompt.encoder_ids or prompt.decoder_ids} differs at token {at}: "
                f"{token} exported, {best} trained"
            )
            break  # after a wrong token the two read different text
    return ties, faults


def device() -> torch.device:
    """Device of the proof: a GPU if there is one, also for megatron-core, which asks for it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def layer_by_layer(
    model: Module, content: Callable[[str, Parameter], Tensor], label: str, num_passes: int
) -> Iterator[None]:
    """Let a model compute in fp32 without an fp32 copy of its weights: each layer has them only while it computes.

    `content` gives a parameter's values by its name; what is outside the layers has them all the time. A parameter may
    be narrower than its content, lie in a mapped file, or be empty (torch's device ``meta``). Each pass converts all
    weights, so all tokens should go through in few; `label` and `num_passes` are for the progress bar.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def fill(modules: Iterable[Module]) -> list[tuple[Module, str, Parameter]]:
        """Fill the modules; return their own parameters."""
        had = [(module, key, own) for module in modules for key, own in module._parameters.items() if own is not None]
        with torch.inference_mode(False), torch.no_grad():
            # Shared parameters stay one. megatron-core chooses its linear function by `requires_grad`, as in training.
            full = {
                id(own): Parameter(content(names[id(own)], own).float().to(device()), own.requires_grad)
                for *_, own in had
            }
        for module, key, own in had:
            module._parameters[key] = full[id(own)]
        return had

    def restore(had: list[tuple[Module, str, Parameter]]) -> None:
        for module, key, own in had:
            module._parameters[key] = own
        had.clear()

    layers = [module for name, module in model.named_modules() if _LAYER.fullmatch(name)]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = fill(module for module in model.modules() if id(module) not in inside)
    computing: list[tuple[Module, str, Parameter]] = []
    with Progress(label, len(layers) * num_passes, unit="layer") as progress, ExitStack() as stack:

        def after(*_: Any) -> None:
            restore(computing)
            progress.advance()

        stack.callback(restore, outside)
        stack.callback(restore, computing)  # that of a layer whose pass was interrupted
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(lambda own, _: computing.extend(fill(own.modules()))))
            stack.enter_context(layer.register_forward_hook(after))
        yield
