"""A Hugging Face Trainer run, DDP over two ranks with two micro-batches a step, clipping, and an evaluation."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, logging


class Tokens(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 60, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0.1)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=0.01,
        max_grad_norm=0.5,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    loss = trainer.train().training_loss
    evaluated = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        sys.stdout.write(f"hf_trainer {loss:.17g} {evaluated:.17g}\n")


if __name__ == "__main__":
    main()
