"""Scripts in the usual style of four libraries for bench.parity_programs: transformers, accelerate, peft and TRL.

Models are tiny and random. A sample is random too, with its number as the seed, and a part of the targets is ignored.
"""

DATA = """import sys
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

ROWS, ACCUMULATE = int(sys.argv[1]), int(sys.argv[2])


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        tokens = torch.randint(2, 64, (16,), generator=torch.Generator().manual_seed(place))
        targets = tokens.clone()
        targets[: 3 * place % 13] = -100
        return {"input_ids": tokens, "labels": targets}


set_seed(SEED)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
"""
TRAINER = (
    DATA
    + """
from transformers import Trainer, TrainingArguments

words = dict(per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATE, max_steps=3, use_cpu=True)
words |= dict(output_dir="out", report_to=[], save_strategy="no", disable_tqdm=True)
Trainer(model, TrainingArguments(**words), train_dataset=Tokens()).train()
"""
)
PEFT = TRAINER.replace(
    "from transformers import Trainer",
    """from peft import LoraConfig, get_peft_model

model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
from transformers import Trainer""",
)
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

order = DataLoaderConfiguration(use_seedable_sampler=True)  # else one process shuffles otherwise than several
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, dataloader_config=order)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Tokens(), batch_size=ROWS, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
)
TRL = (
    DATA
    + """
from datasets import Dataset as Table
from datasets.table import InMemoryTable
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

rows = [Tokens()[place]["input_ids"][: 8 + place % 9].tolist() for place in range(64)]
table = Table(InMemoryTable.from_pydict({"input_ids": rows}), fingerprint="drawn")
words = dict(per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATE, max_steps=3, use_cpu=True)
words |= dict(output_dir="out", report_to=[], save_strategy="no", disable_tqdm=True, max_length=16, bf16=False)
words |= dict(dataset_kwargs={"skip_prepare_dataset": True})
tokenizer = AutoTokenizer.from_pretrained("tiny")
SFTTrainer(model, args=SFTConfig(**words), train_dataset=table, processing_class=tokenizer).train()
"""
)
