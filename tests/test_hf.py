"""Hugging Face models need no wrapper: they stack, their labels are understood, and they end in save_pretrained."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import fedlalr as fl
from closeness import difference

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("the extra hf is not installed", allow_module_level=True)

import transformers

import hugging_face as hf
from fedlalr import config
from fedlalr.config.build import build_problem
from fedlalr.hf import are_next_tokens, needs_labels
from fedlalr.training.stacked.trial import CannotStack

SIZES = (7, 3, 6)  # with batches of four: all of them padded at some step
TOLERANCE = 1e-10


def clients(labels="of texts", sizes=SIZES, make=hf.texts):
    return [make(size, labels, seed) for seed, size in enumerate(sizes)]


def train(model, data, engine="reference", algorithm=None, **options):
    options = {"rounds": 2, "batch_size": 4, "local": fl.Steps(2), "seed": 1, **options}
    return fl.run(model, data, algorithm or fl.FedLALR(lr=1e-2), engine=engine, **options)


def weights(result):
    return torch.cat([tensor.flatten() for tensor in result.state["x"].values()])


KINDS = {
    "bert": (partial(hf.bert, attn_implementation="eager"), clients, {}),
    "bert, own loss": (hf.bert, clients, {"loss": "model"}),
    "tokens": (hf.bert_tokens, partial(clients, "of words"), {}),
    "distilbert": (hf.distilbert, clients, {"algorithm": fl.FedAvg(lr=0.1)}),
    "gpt2": (hf.gpt2, partial(clients, "words"), {}),
    "bert with lora": (lambda: hf.with_lora(hf.bert(), "SEQ_CLS"), clients, {}),
    "gpt2 with lora": (
        lambda: hf.with_lora(hf.gpt2(attn_implementation="eager"), "CAUSAL_LM"),
        partial(clients, "words"),
        {},
    ),
    "t5, own loss": (hf.t5, partial(clients, "words"), {"loss": "model", "algorithm": fl.FedAvg(lr=0.1)}),
    "vit": (hf.vit, partial(clients, make=hf.images), {}),
}


ALIKE = ("bert, own loss", "tokens", "distilbert")
"""Their layers are those of another kind."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ALIKE)) for kind in KINDS])
def test_the_stack_gives_what_the_reference_gives(kind):
    make, data, options = KINDS[kind]
    right, mine = (train(hf.made(make), data(), engine, **options) for engine in ("reference", "stacked"))
    assert difference(weights(mine), weights(right)) <= TOLERANCE
    before = torch.cat([p.detach().flatten() for p in hf.made(make).parameters() if p.requires_grad])
    assert difference(weights(mine), before) > 1e-4  # it trains


def test_rotary_positions_and_rms_norms_stack():
    """Llama computes both in float32, whatever the model's dtype: some 1e-7 per step, which SGD does not blow up."""
    right, mine = (
        train(hf.made(hf.llama), clients("words"), engine, fl.FedAvg(lr=0.1)) for engine in ("reference", "stacked")
    )
    assert difference(weights(mine), weights(right)) <= 1e-5


def test_the_loss_of_a_causal_model_is_its_own():
    """The labels are moved by one place; the model's own loss, which moves them too, is computed in float32."""
    model, data = hf.made(hf.gpt2), hf.texts(9, "words")
    with torch.no_grad():
        out = model.eval()(**data)
    hits = (out.logits[:, :-1].argmax(-1) == data["labels"][:, 1:])[data["labels"][:, 1:] != -100]
    for options in ({}, {"loss": "model"}):
        record = train(model, [data], rounds=1, local=fl.Steps(1), test=data, algorithm=fl.FedAvg(lr=1e-12), **options)
        assert record.history[0].loss == pytest.approx(float(out.loss), rel=1e-6)
        assert record.history[0].accuracy == pytest.approx(float(hits.double().mean()), abs=1e-12)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_the_loss_of_a_model_in_bfloat16_is_not_rounded(engine):
    """Its weights and logits are; the loss is computed from them in float32, as Hugging Face does."""
    model, data = hf.made(hf.gpt2).to(torch.bfloat16), hf.texts(9, "words")
    with torch.no_grad():
        right = float(model.eval()(**data).loss)
    options = {"rounds": 1, "batch_size": 9, "local": fl.Steps(1), "test": data, "algorithm": fl.FedAvg(lr=1e-12)}
    record = train(model, [data, data], engine, **options).history[0]
    assert record.loss == pytest.approx(right, rel=1e-6)
    assert record.train_loss == pytest.approx(right, rel=1e-3 if engine == "stacked" else 1e-6)  # other products


@pytest.mark.parametrize("make", [hf.t5, hf.bart, lambda: hf.with_lora(hf.bart(), "SEQ_2_SEQ_LM")])
def test_a_model_whose_decoder_starts_from_the_labels_must_get_them(make):
    """BART would run without them, on a decoder that reads the text of the encoder."""
    with pytest.raises(ValueError, match=r"decoder from the labels.*0's inputs have no decoder_input_ids; use l"):
        train(hf.made(make), clients("words"))


def test_a_decoder_that_gets_its_inputs_trains_like_one_that_gets_the_labels():
    data = clients("words")
    shifted = [fl.hf.next_tokens(texts["labels"].flip(1), ignored=0).flip(1).clamp(min=0) for texts in data]
    given = [texts | {"decoder_input_ids": tokens} for texts, tokens in zip(data, shifted, strict=True)]
    right, mine = (train(hf.made(hf.bart), each, **loss) for each, loss in ((data, {"loss": "model"}), (given, {})))
    assert difference(weights(mine), weights(right)) <= TOLERANCE


def test_a_classifier_with_a_decoder_needs_no_labels():
    assert needs_labels(hf.bart(), {"input_ids": None})
    assert not needs_labels(transformers.BartForSequenceClassification(hf.bart().config), {"input_ids": None})


def test_an_input_that_the_model_does_not_name_gets_a_hint():
    """Hugging Face's models take any name; the column of images in their data sets is called image."""
    data = [{"image": images["pixel_values"], "labels": images["labels"]} for images in clients(make=hf.images)]
    with pytest.raises(ValueError, match=r"ViTForImageClassification.forward has no argument image: rename the key"):
        train(hf.made(hf.vit), data)


@pytest.mark.parametrize("make", [hf.bert, lambda: hf.with_lora(hf.bert(), "SEQ_CLS")])
def test_a_misspelt_input_gets_a_warning_and_other_columns_get_none(make):
    """Hugging Face's models take any name; tokenizers and data sets have columns that no model reads."""
    misspelt, more = clients(), clients()
    for texts, others in zip(misspelt, more, strict=True):
        texts["atention_mask"] = texts.pop("attention_mask")
        others |= dict.fromkeys(("special_tokens_mask", "attention_masks"), others["attention_mask"])
        others |= dict.fromkeys(("label", "length"), others["labels"])
    with pytest.warns(
        UserWarning, match=r"'atention_mask', which .*\.forward does not name.* 'attention_mask', ren"
    ) as seen:
        train(hf.made(make), misspelt)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(hf.made(make), more)


def test_a_model_that_adds_to_the_logits_gets_a_hint():
    import peft

    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=r"if the model's own loss pairs them, .* use loss='model'"):
        train(peft.get_peft_model(hf.gpt2(), prompt), clients("words"))


def test_a_model_that_needs_the_labels_trains_on_the_engine_that_auto_chooses():
    settings = {"loss": "model", "algorithm": fl.FedAvg(lr=0.1)}
    chosen, right = (train(hf.made(hf.t5), clients("words"), engine, **settings) for engine in ("auto", "reference"))
    assert torch.equal(weights(chosen), weights(right))


def test_the_last_token_gets_the_label_that_the_loss_ignores():
    other = [texts | {"labels": texts["labels"].where(texts["labels"] >= 0, 0)} for texts in clients("words")]
    right = train(hf.made(hf.gpt2), clients("words"))
    mine = train(hf.made(hf.gpt2), other, loss=torch.nn.CrossEntropyLoss(ignore_index=0))
    assert torch.equal(weights(mine), weights(right))


def test_a_loss_of_your_own_gets_what_the_model_returns_and_the_labels_as_they_are():
    def shifted(logits, labels):
        assert logits.shape == (*labels.shape, hf.WORDS)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def accuracy(logits, labels):
        return (logits.argmax(-1) == labels)[labels != -100].double().mean()

    data, options = clients("words"), {"test": hf.texts(5, "words"), "metrics": {"share": accuracy}}
    mine = train(hf.made(hf.gpt2), data, "stacked", loss=shifted, **options)
    right = train(hf.made(hf.gpt2), data, **options)
    assert difference(weights(mine), weights(right)) <= TOLERANCE
    for record in (mine.history[-1], right.history[-1]):
        assert record.metrics["share"] == pytest.approx(record.accuracy, abs=1e-12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"labels": None}, r"dicts of 'input_ids', 'attention_mask', without labels\..*are the input_ids, with -100"),
        ({"labels": 1}, "a label for each token, but here a sample has a single label"),
    ],
)
def test_wrong_labels_of_a_causal_model_get_a_message(data, message):
    samples = [{name: values[0] for name, values in hf.texts(1).items()} | data] * 4
    samples = [{name: value for name, value in sample.items() if value is not None} for sample in samples]
    with pytest.raises(ValueError, match=message):
        train(hf.gpt2(), [samples])


def test_pairs_are_taken_as_they_are():
    """A pair has its targets where the outputs are, for every model."""
    dicts = [hf.texts(size, "words", seed) for seed, size in enumerate(SIZES)]
    pairs = [(inputs, fl.hf.next_tokens(labels)) for inputs, labels in hf.as_pairs(dicts)]
    right, mine = (train(hf.made(hf.gpt2), data) for data in (dicts, pairs))
    assert torch.equal(weights(mine), weights(right))


def test_labels_are_the_next_tokens_only_if_some_show_it():
    ids = torch.tensor([[5, 6, 7], [8, 9, 9]])
    last = ids.where(torch.tensor([False, False, True]), -100)  # as of prompts with an answer of one token
    inputs = {"attention_mask": torch.ones_like(ids), "input_ids": ids}
    for labels, wanted in ((ids, False), (fl.hf.next_tokens(ids), True), (last, False), (ids[:, :2], False)):
        assert are_next_tokens(labels, inputs) is wanted


def clients_and_test():
    return clients("words"), hf.texts(9, "words")


@pytest.mark.parametrize("share", [0, 0.3])
def test_a_configuration_moves_the_labels_too(share):
    """Of clients, and of samples that are held out from them."""
    own = ["model=hugging_face:gpt2", "data=test_hf:clients_and_test", f"data.validation={share}"]
    _, population, test = build_problem(config.load(None, own), F.cross_entropy)
    right = torch.cat([fl.hf.next_tokens(texts["labels"]) for texts in clients("words")])
    assert torch.equal(population.targets, right)
    if share:
        assert torch.equal(test.targets, right)
    else:
        assert test.keys() == {"input_ids", "attention_mask", "labels"}  # `fl.run` moves them


def test_tied_weights_are_one_set_of_coordinates(tmp_path):
    result = train(hf.made(hf.gpt2), clients("words"), "stacked")
    assert "lm_head.weight" not in result.state["x"]
    assert result.model.lm_head.weight is result.model.transformer.wte.weight
    result.model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    texts = hf.texts(4, "words")
    with torch.no_grad():
        assert torch.equal(loaded(**texts).logits, result.model.eval()(**texts).logits)


def test_lora_sends_the_adapters_alone_and_saves_them(tmp_path):
    import peft

    base = hf.made(hf.bert)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = hf.with_lora(base, "SEQ_CLS")
    result = train(model, clients(), "stacked", clients_per_round=2)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    lora, head = 2 * 2 * (2 * 8 + 8 * 2), 8 * hf.CLASSES + hf.CLASSES
    assert sum(trained) == lora + head
    assert result.history[-1].bytes_up == 2 * 3 * 8 * (lora + head)  # clients, slots, bytes of a float64
    assert all("lora_" in name or "classifier" in name for name in result.state["x"])
    for name, tensor in before.items():
        kept = name.replace("query.", "query.base_layer.").replace("value.", "value.base_layer.")
        if not name.startswith("classifier"):
            assert torch.equal(result.model.base_model.model.state_dict()[kept], tensor)
    result.model.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(5)
    loaded = peft.PeftModel.from_pretrained(hf.bert().double(), tmp_path / "adapter").double().eval()
    texts = hf.texts(4)
    with torch.no_grad():
        assert difference(loaded(**texts).logits, result.model.eval()(**texts).logits) <= TOLERANCE


def test_buffers_that_are_not_saved_are_not_sent():
    result = train(hf.made(hf.bert), clients())
    parameters = sum(p.numel() for p in result.model.parameters())
    assert result.history[-1].bytes_up == len(SIZES) * 3 * 8 * parameters


def test_a_checkpointed_stack_computes_its_layers_twice_and_gets_the_same():
    """Also with dropout, which is drawn the same in the second run."""
    plain, checkpointed = hf.made(partial(hf.gpt2, dropout=0.3)), hf.made(partial(hf.gpt2, dropout=0.3))
    checkpointed.gradient_checkpointing_enable()
    assert checkpointed.transformer.h[0].gradient_checkpointing
    results, calls = [], []
    for model in (plain, checkpointed):
        model.transformer.h[0].ln_1.register_forward_hook(lambda *_: calls.append(1))
        results += [weights(train(model, clients("words"), "stacked")), len(calls)]
    right, once, mine, both = results
    assert difference(mine, right) <= TOLERANCE
    assert both - once >= once + 4  # two rounds of two steps


def test_dropout_is_repeatable():
    first, second = (train(hf.made(partial(hf.gpt2, dropout=0.3)), clients("words"), "stacked") for _ in range(2))
    assert torch.equal(weights(first), weights(second))


def test_what_cannot_be_stacked_names_the_layer_the_line_and_what_to_do():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=hf.WORDS, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(CannotStack) as error:
        train(model, clients("words"), "stacked")
    message = str(error.value)
    assert "in layer 'transformer" in message
    assert "modeling_bloom.py, line " in message
    assert train(model, clients("words"), "auto").history  # trains all the same


def test_causal_models_are_known_also_as_subclasses_with_adapters_and_compiled():
    class Mine(type(hf.gpt2())):
        pass

    assert all(map(fl.hf.is_causal, (hf.gpt2(), hf.llama(), Mine(hf.gpt2().config))))
    assert fl.hf.is_causal(hf.with_lora(hf.gpt2(), "CAUSAL_LM"))
    assert fl.hf.is_causal(torch.compile(hf.with_lora(hf.gpt2(), "CAUSAL_LM")))
    assert not fl.hf.is_causal(torch.compile(hf.bert()))
    assert not any(map(fl.hf.is_causal, (hf.bert(), hf.t5(), hf.vit(), hf.with_lora(hf.bert(), "SEQ_CLS"))))
    assert not fl.hf.is_causal(torch.nn.Linear(2, 2))


class Own(torch.nn.Module):
    """A module of the caller's that returns what the model in it returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


def test_labels_that_are_the_tokens_and_are_not_shifted_get_a_warning():
    """In a module of the caller's, and in pairs."""
    data = clients("words")
    right, moved = train(hf.made(hf.gpt2), data), [t | {"labels": fl.hf.next_tokens(t["labels"])} for t in data]
    same = {"input_ids": torch.ones(3, 4).long(), "attention_mask": torch.ones(3, 4).long()}
    for wrapped, form in ((Own, list), (lambda model: model, hf.as_pairs)):
        with pytest.warns(UserWarning, match=r"GPT2LMHeadModel predicts the next token, but the labels.*next_tokens"):
            train(wrapped(hf.made(hf.gpt2)), form(data))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert torch.equal(weights(train(wrapped(hf.made(hf.gpt2)), form(moved))), weights(right))
            train(wrapped(hf.gpt2()), form([same | {"labels": fl.hf.next_tokens(same["input_ids"])}]))
            train(wrapped(hf.made(hf.bert_tokens)), form(clients("of words")))


def test_a_module_that_passes_the_labels_on_to_a_causal_model_has_its_accuracy():
    right, mine = (
        train(model, clients("words"), loss="model", test=hf.texts(9, "words"), rounds=5).history[-1]
        for model in (hf.made(hf.gpt2), Own(hf.made(hf.gpt2)))
    )
    assert (mine.loss, mine.accuracy) == (right.loss, right.accuracy)


def test_a_model_of_texts_and_images_is_causal_unless_it_has_an_encoder():
    class MineForConditionalGeneration(type(hf.bert())):
        pass

    assert fl.hf.is_causal(MineForConditionalGeneration(hf.bert().config))


def test_clients_that_are_several_data_sets_are_told_to_be_one():
    from datasets import Dataset, DatasetDict

    both = DatasetDict({"train": Dataset.from_dict({"input_ids": [[1]], "labels": [0]})})
    with pytest.raises(TypeError, match=r"client 0 is a DatasetDict of data sets; pass one of them, .*data\['train'\]"):
        train(hf.bert(), [both])


def test_a_classifier_on_a_data_set_of_ten_clients_needs_no_glue(tmp_path):
    """Model and data are built as for any Hugging Face trainer; the rest is one call."""
    from datasets import Dataset

    data = Dataset.from_dict({name: values.tolist() for name, values in hf.texts(40).items()})
    shards = [data.shard(10, i) for i in range(10)]
    result = fl.run(hf.bert(), shards, fl.FedLALR(lr=1e-2), rounds=1, test=data)
    assert result.history[-1].accuracy is not None
    result.model.save_pretrained(tmp_path)
    transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_dynamic_padding_with_a_collator_of_transformers():
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(hf.WORDS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), pad_token="w0")
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = [
        [{"input_ids": row[row > 0].tolist()} for row in hf.texts(size, seed=seed)["input_ids"]]
        for seed, size in enumerate(SIZES)
    ]
    right, mine = (train(hf.made(hf.gpt2), data, engine, collate_fn=collate) for engine in ("reference", "stacked"))
    assert difference(weights(mine), weights(right)) <= TOLERANCE


def test_nodes_of_flower_move_the_labels_too(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from fedlalr.flower import FederatedStrategy, client_app
    from flower.in_process import InProcessGrid, Node

    data, method = clients("words"), fl.FedLALR(lr=1e-2)
    settings = {"rounds": 1, "batch_size": 4, "device": "cpu"}
    app = client_app(
        lambda context: hf.made(hf.gpt2), lambda context: data[context.node_config["partition-id"]], method, settings
    )
    grid = InProcessGrid({i: Node(app, {"partition-id": i, "state-dir": str(tmp_path)}) for i in range(len(data))})
    server = FederatedStrategy(hf.made(hf.gpt2), method, settings, population=len(data), poll=0.001)
    server.start(grid)
    assert torch.equal(
        weights(server.result), weights(fl.run(hf.made(hf.gpt2), data, method, engine="reference", **settings))
    )
