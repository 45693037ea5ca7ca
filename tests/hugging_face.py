"""Tiny Hugging Face models with random weights, and clients of dicts for them."""

from __future__ import annotations

import torch
import transformers  # of its models each is imported when it is first made
from torch import nn

WORDS, LENGTH, CLASSES = 20, 6, 3
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**options: object) -> transformers.PreTrainedModel:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**TEXT, **{**NO_DROPOUT, "num_labels": CLASSES, **options})
    )


def bert_tokens() -> transformers.PreTrainedModel:
    """As many classes as a text has words, so that the layout of the logits cannot be guessed from their shape."""
    return transformers.BertForTokenClassification(transformers.BertConfig(**TEXT, **NO_DROPOUT, num_labels=LENGTH))


def distilbert() -> transformers.PreTrainedModel:
    sizes = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 16}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(vocab_size=WORDS, num_labels=CLASSES, **sizes, **none)
    )


def gpt2(dropout: float = 0.0, **options: object) -> transformers.PreTrainedModel:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, **options)
    )


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1))


def t5() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def bart() -> transformers.PreTrainedModel:
    sides = ("encoder", "decoder")
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    each = {f"{side}_{name}": size for side in sides for name, size in sizes.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=WORDS, d_model=8, max_position_embeddings=16, dropout=0.0, **each, **tokens)
    )


def vit() -> transformers.PreTrainedModel:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, **NO_DROPOUT, image_size=8, patch_size=4, num_labels=CLASSES)
    )


def with_lora(model: transformers.PreTrainedModel, task: str) -> nn.Module:
    import peft

    layers = {"CAUSAL_LM": ["c_attn"], "SEQ_CLS": ["query", "value"], "SEQ_2_SEQ_LM": ["q_proj"]}[task]
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2, target_modules=layers))


def made(make: object) -> nn.Module:
    """A model in float64, with the same weights every time."""
    torch.manual_seed(5)
    return make().double()  # type: ignore[operator]


def texts(count: int, labels: str = "of texts", seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts of different lengths with their masks, and labels: of texts, of words, or the words themselves."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (count, LENGTH), generator=draw)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (count, 1), generator=draw)).long()
    found = {
        "of texts": ids[:, 0] % CLASSES,
        "of words": (ids % LENGTH).where(mask == 1, -100),
        "words": ids.where(mask == 1, -100),
    }
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": found[labels]}


def as_pairs(data: list[dict[str, torch.Tensor]]) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Inputs and labels of texts apart."""
    return [({name: texts[name] for name in ("input_ids", "attention_mask")}, texts["labels"]) for texts in data]


def images(count: int, labels: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 3, 8, 8, generator=draw, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (count,), generator=draw)}
