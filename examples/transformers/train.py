"""A small GPT-2, made here, under Hugging Face's Trainer. Nothing in this file knows of the probe."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards: easy to learn."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict:
        tokens = (torch.arange(32) + 7 * i) % 64
        return {"input_ids": tokens, "labels": tokens.clone()}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "checkpoints",
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()


if __name__ == "__main__":
    main()
