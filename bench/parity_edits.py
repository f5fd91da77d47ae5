"""Mistakes that bench.parity_programs plants in training programs of others: substitutions in their scripts.

Each kind says once where its mistakes show first, and what a right cause says; each program has those that apply to it.
"""

from dataclasses import dataclass

Substitution = tuple[str, str, str]
"""A file, a text in it, and the text that replaces it everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A mistake in a layout of a program: substitutions, where it shows first, and words of right causes.

    `place` is a pattern of the step, the phase, the module and the name of the first place. A cause is right if it has
    one of the words.
    """

    name: str
    layout: str
    substitutions: tuple[Substitution, ...]
    place: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of mistake. `place` and `causes` apply to edits that have none of their own."""

    name: str
    place: str
    causes: tuple[str, ...]

    def planted(
        self,
        layout: str,
        *substitutions: Substitution,
        of: str = "",
        place: str = "",
        causes: tuple[str, ...] | None = None,
    ) -> Edit:
        """A mistake of this kind in a layout; `of` distinguishes several of one kind."""
        return Edit(
            name=f"{self.name}{of and ' of '}{of}",
            layout=layout,
            substitutions=substitutions,
            place=place or self.place,
            causes=self.causes if causes is None else causes,
        )


_DATA, _LOSS = "0 data .* sample/0", "0 loss .* loss/0"
SAMPLES = Kind(name="samples by rank", place=_DATA, causes=("row ",))
SAME = Kind(name="same batch", place=_DATA, causes=("read the same batch",))
AVERAGE = Kind(name="missing average", place="0 grad_sync .* grad/.*", causes=("never averaged over dp",))
SUM = Kind(name="missing sum", place="0 forward .* loss/0", causes=("add up to the", "partial sum"))
COUNT = Kind(name="loss over a wrong count", place=_LOSS, causes=("1 / the size of dp",))
NORM = Kind(name="a norm without one parameter", place="0 grad_sync .* grad_norm/0", causes=("leaves out", "left out"))
SLICE = Kind(name="wrong slice", place="0 forward .* loss/0", causes=("wrong parts", "shifted", "another order"))
LAYER = Kind(name="wrong layer", place="0 forward .* (init/.*|loss/0)", causes=())
CLIP = Kind(
    name="clip before the reduction",
    place="0 grad_sync .* (grad/.*|grad_norm/0)",
    causes=("never averaged over dp", "before they are summed"),
)
STALE = Kind(name="stale gradient", place="1 (backward|grad_sync) .* grad/.*", causes=("gradients of step 0 too",))
FRESH = Kind(name="gradients of one step alone", place="1 (backward|grad_sync) .* grad/.*", causes=("hold",))
FACTOR = Kind(
    name="a replicated factor not summed", place="0 (backward|grad_sync) .* grad/.*", causes=("never averaged over dp",)
)
_OWN = ("never averaged", "each rank holds its own", "each rank holds a partial sum")

FSDP_EDITS = (
    SAMPLES.planted(
        "tp2",
        ("fsdp_tp_example.py", "torch.manual_seed(i + dp_rank)", "torch.manual_seed(i + _rank)"),
        causes=("row 0 of micro-batch 0",),
    ),
    COUNT.planted(
        "tp2",
        ("fsdp_tp_example.py", "output.sum().backward()", "(output.sum() / tp_size).backward()"),
        causes=("1 / the size of tp",),
    ),
    SLICE.planted(
        "tp2",
        (
            "llama2_model.py",
            "xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)",
            "xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim).roll(1, 2)",
        ),
        place=r"0 forward layers\.0\.attention.* loss/0",
    ),
    FRESH.planted("tp2", ("fsdp_tp_example.py", "optimizer.step()", "optimizer.step(); optimizer.zero_grad()")),
    FACTOR.planted(
        "tp2",
        ("fsdp_tp_example.py", '        "ffn_norm": SequenceParallel(),\n', ""),
        place=r"0 (backward|grad_sync) layers\.[01]\.ffn_norm grad/layers\.[01]\.ffn_norm\.weight",
        causes=_OWN,
    ),
)
_MINGPT_CLIP = (
    "torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)\n"
    "                self.optimizer"
)
_MINGPT_CALL = ("trainer.py", "_, loss = self.model(source, targets)", "_, loss = self.model.module(source, targets)")
MINGPT_EDITS = (
    SAMPLES.planted(
        "ddp2", ("trainer.py", "DistributedSampler(dataset)", "DistributedSampler(dataset, seed=self.global_rank)")
    ),
    AVERAGE.planted("ddp2", _MINGPT_CALL),
    COUNT.planted(
        "ddp2",
        (
            "trainer.py",
            "                loss.backward()",
            "                (loss / torch.distributed.get_world_size()).backward()",
        ),
    ),
    NORM.planted(
        "ddp2",
        (
            "trainer.py",
            _MINGPT_CLIP,
            _MINGPT_CLIP.replace("self.model.parameters()", "[*self.model.parameters()][:-1]"),
        ),
    ),
    CLIP.planted(
        "ddp2",
        _MINGPT_CALL,
        (
            "trainer.py",
            _MINGPT_CLIP,
            _MINGPT_CLIP.replace(
                "self.optimizer",
                "[torch.distributed.all_reduce(p.grad.div_(torch.distributed.get_world_size()))\n"
                "                 for p in self.model.parameters()]\n                self.optimizer",
            ),
        ),
    ),
    STALE.planted("ddp2", ("trainer.py", "self.optimizer.zero_grad(set_to_none=True)", "pass")),
    FACTOR.planted(
        "ddp2",
        (
            "trainer.py",
            "self.model = DDP(self.model)",
            "DDP._set_params_and_buffers_to_ignore_for_model(self.model, ['emb_stem.pos_emb']); "
            "self.model = DDP(self.model)",
        ),
        place=r"0 grad_sync .* grad/emb_stem\.pos_emb",
    ),
)
_NANOGPT_SYNC = (
    "train_gpt2.py",
    "model.require_backward_grad_sync = (micro_step == grad_accum_steps - 1)",
    "model.require_backward_grad_sync = False",
)
_NANOGPT_CLIP = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
NANOGPT_EDITS = (
    SAMPLES.planted(
        "ddp2",
        (
            "train_gpt2.py",
            "self.current_position = self.B * self.T * self.process_rank",
            "self.current_position = (self.B * self.T + 7) * self.process_rank",
        ),
    ),
    AVERAGE.planted("ddp2", _NANOGPT_SYNC),
    COUNT.planted(
        "ddp2", ("train_gpt2.py", "loss = loss / grad_accum_steps", "loss = loss / grad_accum_steps / ddp_world_size")
    ),
    NORM.planted(
        "ddp2",
        ("train_gpt2.py", _NANOGPT_CLIP, _NANOGPT_CLIP.replace("model.parameters()", "[*model.parameters()][:-1]")),
    ),
    CLIP.planted(
        "ddp2",
        _NANOGPT_SYNC,
        (
            "train_gpt2.py",
            _NANOGPT_CLIP,
            _NANOGPT_CLIP + "; [dist.all_reduce(p.grad.div_(ddp_world_size)) for p in model.parameters()]",
        ),
    ),
    STALE.planted("ddp2", ("train_gpt2.py", "    optimizer.zero_grad()", "    pass")),
    FACTOR.planted(
        "ddp2",
        (
            "train_gpt2.py",
            "    model = DDP(model)",
            "    DDP._set_params_and_buffers_to_ignore_for_model(model, ['transformer.wpe.weight'])\n"
            "    model = DDP(model)",
        ),
        place=r"0 grad_sync .* grad/transformer\.wpe\.weight",
    ),
)
_PGM = "pgm.process_group_manager"
_MEAN = "F.cross_entropy(outputs, target_ids, reduction='mean') / dataloader.grad_acc_steps"
PICOTRON_TP_EDITS = (
    SAMPLES.planted(
        "tp2",
        ("dataloader.py", f"num_replicas={_PGM}.dp_world_size", f"num_replicas={_PGM}.tp_world_size"),
        ("dataloader.py", f"rank={_PGM}.dp_rank", f"rank={_PGM}.tp_rank"),
    ),
    SUM.planted(
        "tp2",
        (
            "tensor_parallel.py",
            "output = Reduce.apply(output_parallel)\n        return output if",
            "output = output_parallel\n        return output if",
        ),
        place=r"0 forward decoder_layers\.0\.attention\.out_proj loss/0",
    ),
    COUNT.planted("tp2", ("train.py", _MEAN, f"{_MEAN} / {_PGM}.tp_world_size"), causes=("1 / the size of tp",)),
    SLICE.planted(
        "tp2",
        ("tensor_parallel.py", "torch.cat(tensor_list, dim=last_dim)", "torch.cat(tensor_list[::-1], dim=last_dim)"),
        of="the logits",
        place="0 forward final_proj loss/0",
    ),
    SLICE.planted(
        "tp2",
        (
            "model.py",
            "k = k.view(batch_size, seq_length, self.num_local_kv_heads, self.head_dim)",
            "k = k.view(batch_size, seq_length, self.num_local_kv_heads, self.head_dim).roll(1, 2)",
        ),
        place=r"0 forward decoder_layers\.0\.attention.* loss/0",
    ),
    STALE.planted("tp2", ("train.py", "optimizer.zero_grad()", "pass")),
    FACTOR.planted(
        "tp2",
        (
            "tensor_parallel.py",
            "input_parallel = Copy.apply(input)",
            "input_parallel = input if self.gather_output else Copy.apply(input)",
        ),
        place=r"0 backward final_(proj|norm) grad/.*",
        causes=("add up to the", "partial sum"),
    ),
)
PICOTRON_DP_EDITS = (
    SAME.planted("dp2", ("dataloader.py", f"rank={_PGM}.dp_rank", "rank=0")),
    AVERAGE.planted("dp2", ("data_parallel.py", "self.grad_data /= self.process_group_size", "pass"), causes=("dp=2",)),
    COUNT.planted("dp2", ("train.py", _MEAN, f"{_MEAN} / {_PGM}.dp_world_size")),
    STALE.planted("dp2", ("data_parallel.py", "self.grad_data.zero_()", "pass")),
    FACTOR.planted(
        "dp2",
        ("data_parallel.py", "dist.all_reduce(self.grad_data, group", "dist.all_reduce(self.grad_data[:2048], group"),
        place=r"0 grad_sync .* grad/.*",
        causes=("never averaged over dp", "never reduced"),
    ),
)
PICOTRON_PP_EDITS = (
    COUNT.planted(
        "1f1b",
        ("pipeline_parallel.py", "reduction='mean')", f"reduction='mean') / {_PGM}.pp_world_size"),
        causes=("1 / pp=2",),
    ),
    LAYER.planted(
        "1f1b",
        ("pipeline_parallel.py", "model.decoder_layers[i] for i", f"model.decoder_layers[i - {_PGM}.pp_rank] for i"),
        place=r"0 forward decoder_layers\.1.* (init/decoder_layers\.1.*|loss/0)",
    ),
    STALE.planted("1f1b", ("train.py", "optimizer.zero_grad()", "pass")),
)
