"""Programs of the sixth set: the decoder of the fifth with other parts, and models of Transformers; what is written in `form` of a setting
chooses among layouts, losses and optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.libraries.language import SIZES, WORDS, LibraryProgram
from reported_bugs.models import LENGTH
from reported_bugs.training import Batch
from reported_bugs.unseen.fifth.decoder import Mlp, Parts, Whole
from reported_bugs.unseen.fifth.program import SEQUENCE, DecoderProgram
from reported_bugs.unseen.sixth.optimizers import InBlocks, WithoutSchedule
from reported_bugs.unseen.sixth.parts import Eight, Experts, InForward, Recurrent
from torch import Tensor, nn
from torch.nn import functional as F

TEMPERATURE = 0.7


class Mixed(nn.Module):
    """Experts beside one that all tokens pass."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = Experts(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.shared(x)


class HybridProgram(DecoderProgram):
    """A mixer with a state in the first layer, attention and experts in the second."""

    z_weight, bias_rate = 1e-4, 0.02
    temperature_of_policy = TEMPERATURE

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        model = Whole(Parts(**{"sinks": False, "next": False, "multiplier": 1.0, "one_call": True, **changes}))
        first, second = model.decoder.layers.values()
        first.attention, second.mlp = Recurrent(), Mixed()
        second.mlp.experts.counts = self.has("balanced")
        if self.has("eighths"):
            for module in [m for m in model.modules() if isinstance(m, Mlp)]:
                for name in ("gate", "up", "down"):
                    own = getattr(module, name)
                    made = Eight(own.in_features, own.out_features, bias=False)
                    made.weight = own.weight
                    setattr(module, name, made)
        if self.has("tied"):
            model.decoder.head.weight = model.decoder.embedding.weight
        if self.has("fused"):
            norm = model.decoder.norm
            model.decoder.__dict__["logits"] = lambda x: norm(x)  # the loss multiplies by the head
        return model.decoder if self.has("pipeline") else model

    def experts(self) -> Experts:
        return next(module for module in self.model.modules() if isinstance(module, Experts))

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(60 + step)
        if self.has("weighted"):
            found["weights"] = torch.rand((self.setting.rows, SEQUENCE), generator=draw) + 0.5
        return found

    def main_loss(self, out: Tensor, batch: Batch) -> Tensor:
        if self.has("grpo"):
            return self.policy(out / self.temperature_of_policy, batch)
        if not self.has("weighted"):
            return super().main_loss(out, batch)
        labels = batch["labels"].flatten()
        if self.has("fused"):
            each: Tensor = InForward.apply(out.flatten(0, 1), self.decoder.head.weight, labels)
        else:
            each = F.cross_entropy(out.flatten(0, 1).float(), labels, ignore_index=-100, reduction="none")
        return (each * batch["weights"].flatten()).sum()

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.has("scheduleless"):
            return WithoutSchedule(self.groups(), self.setting.lr)
        return InBlocks(self.groups(), self.setting.lr) if self.has("blocks") else super().make_optimizer()

    def update(self) -> None:
        super().update()
        if self.has("balanced"):
            experts = self.experts()
            experts.bias += self.bias_rate * (experts.load.mean() - experts.load).sign()
            experts.load = torch.zeros_like(experts.load)

    # ---- layouts ------------------------------------------------------------------------------------------------------------

    def policy_arguments(self) -> dict[str, Any]:
        found = super().policy_arguments()
        return {**found, "ignored_params": {self.experts().router.weight}} if self.has("apart") else found

    def wrap(self) -> None:
        if self.setting.wrap == "fsdp" and self.has("own"):
            from torch.distributed import fsdp

            fsdp.fully_shard(self.experts(), **self.policy_arguments())
        if self.has("apart"):  # the policy does not cast what is not FSDP's
            self.experts().router.weight.data = self.experts().router.weight.data.bfloat16().float()
        super().wrap()
        if self.setting.ranks > 1 and self.has("apart"):
            self.reduce_apart(self.experts().router.weight)

    def reduce_apart(self, weight: Tensor) -> None:
        """The router's weight is whole on each rank, and not FSDP's."""

        def mean(p: Tensor) -> None:
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

        weight.register_post_accumulate_grad_hook(mean)

    def clip_over_stages(self) -> None:
        if not self.has("tied"):
            super().clip_over_stages()
            return
        copy = self.decoder.embedding.weight if self.rank == 0 else self.decoder.head.weight
        self.sum_of_copies(copy)
        own = [p.grad for p in self.model.parameters() if p.grad is not None and (self.rank == 0 or p is not copy)]
        squares = nn.utils.get_total_norm(own).float().square()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.setting.clip, squares.sqrt())

    def sum_of_copies(self, copy: Tensor) -> None:
        assert copy.grad is not None
        whole = copy.grad.float()
        dist.all_reduce(whole)
        copy.grad.copy_(whole)


class Latent(LibraryProgram):
    """DeepSeek V3: keys and values from a latent, positions stretched by YaRN, experts in groups."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": LENGTH, "mscale": 1.0}
        rope |= {"mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
        own = {"rope_parameters": rope, "max_position_embeddings": 8 * LENGTH, "use_cache": False, "initializer_range": 0.08}
        own |= {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        own |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        own |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4}
        return self.transformers("DeepseekV3Config", "DeepseekV3ForCausalLM", changes, **WORDS, **SIZES, **own)


class Clamped(LibraryProgram):
    """GPT-OSS: gates and values of experts in turn, held within a limit; sinks, windows."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        own = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8}
        own |= {"max_position_embeddings": 4 * LENGTH, "use_cache": False, "initializer_range": 0.08, "attn_implementation": "eager"}
        return self.transformers("GptOssConfig", "GptOssForCausalLM", changes, **WORDS, **{**SIZES, "intermediate_size": 64}, **own)


class Seeing(LibraryProgram):
    """LLaVA: pictures in the place of words."""

    picture, places = 3, 4

    def ddp_arguments(self) -> dict[str, Any]:
        return {"find_unused_parameters": True}  # the last layer of the eyes is not looked at

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        import transformers

        sizes: dict[str, Any] = {**SIZES, "initializer_range": 0.08}
        eyes = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8, num_channels=3)
        words: dict[str, Any] = {**WORDS, **sizes, "num_key_value_heads": 2, "max_position_embeddings": 4 * LENGTH, "use_cache": False}
        text = transformers.LlamaConfig(**words)
        own = {"vision_feature_layer": -2, "image_token_index": self.picture, "tie_word_embeddings": False, **changes}
        made: nn.Module = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(vision_config=eyes, text_config=text, attn_implementation=self.setting.attention, **own)
        )
        return made

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(300 + step)
        tokens, labels = found["tokens"].clone(), found["labels"].clone()
        tokens[tokens == self.picture] = self.picture + 1
        labels[labels == self.picture] = self.picture + 1
        tokens[:, 2 : 2 + self.places], labels[:, 1 : 2 + self.places] = self.picture, -100
        pictures = torch.randn((len(tokens), 3, 16, 16), generator=draw) + torch.randn((len(tokens), 3, 1, 1), generator=draw)
        return {**found, "tokens": tokens, "labels": labels, "pictures": pictures}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {**super().inputs(batch), "pixel_values": self.floats(batch["pictures"])}
