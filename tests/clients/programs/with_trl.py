"""TRL and PEFT go on from an export: five steps of LoRA on conversations, merged, saved, and loaded again.

    python with_trl.py EXPORT PLACE

Prints a JSON object. Imports nothing of zerokara.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
import trl
from datasets import Dataset


def main(export: Path, place: Path) -> dict:
    """The losses, and how far the merged model that was saved is from the one in memory, and from the export."""
    torch.manual_seed(1)
    text = "the model reads a corpus and writes text"
    conversations = [
        [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "reads a corpus\nand writes"}],
        [{"role": "user", "content": "one </s>"}, {"role": "assistant", "content": "token"}] * 2,
    ] * 4
    trainer = trl.SFTTrainer(
        model=str(export),
        train_dataset=Dataset.from_dict({"messages": conversations}),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
        args=trl.SFTConfig(
            output_dir=str(place / "run"), max_steps=5, per_device_train_batch_size=4, learning_rate=3e-3,
            logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no", max_length=64,
            assistant_only_loss=True,
            model_init_kwargs={"dtype": "float32"},
        ),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    examples = [
        {"ids": ids[mask.bool()].tolist(), "learned": labels[mask.bool()].tolist()}
        for ids, labels, mask in zip(*(batch[key] for key in ("input_ids", "labels", "attention_mask")), strict=True)
    ]
    trainer.train()
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(place / "merged")
    trainer.processing_class.save_pretrained(place / "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "merged")
    asked = tokenizer(text, return_tensors="pt")

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**asked).logits

    loads = transformers.AutoModelForCausalLM.from_pretrained
    saved, before = (loads(folder, dtype=torch.float32) for folder in (place / "merged", export))
    return {
        "versions": {"trl": trl.__version__, "peft": peft.__version__, "transformers": transformers.__version__},
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "saved_from_memory": (logits(saved) - logits(merged)).abs().max().item(),
        "saved_from_export": (logits(saved) - logits(before)).abs().max().item(),
        "conversations": conversations[:2],
        "examples": examples,
        "ids": asked["input_ids"][0].tolist(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
