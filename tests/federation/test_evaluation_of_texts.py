"""The accuracy, the loss and the metrics of causal language models of Hugging Face, however their labels are given."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.nn import functional as F

import fedlalr as fl

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("the extra hf is not installed", allow_module_level=True)

import hugging_face as hf


def evaluated(model, data, loss=F.cross_entropy, **options):
    """The record of a model that hardly trains, evaluated on its training data in batches."""
    options |= {"rounds": 1, "local": fl.Steps(1), "batch_size": 4, "engine": "reference", "seed": 1}
    return fl.run(model, [data], fl.FedAvg(lr=1e-12), loss=loss, test=data, **options).history[0]


def plain(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_accuracy_with_a_loss_of_your_own_pairs_each_output_with_the_token_after_it():
    """Whether the labels are the tokens, which the loss shifts, or the next tokens already, in dicts and in pairs."""

    def shifting(logits, labels):
        return plain(logits[:, :-1], labels[:, 1:])

    def share(logits, labels):
        return (logits.argmax(-1) == labels)[labels != -100].double().mean()

    test = hf.texts(40, "words", seed=9)
    moved = test | {"labels": fl.hf.next_tokens(test["labels"])}
    right = evaluated(hf.made(hf.gpt2), test, metrics={"share": share})
    assert right.accuracy > 0
    for loss, data in ((shifting, test), (plain, moved)):
        for form in (data, *hf.as_pairs([data])):
            mine = evaluated(hf.made(hf.gpt2), form, loss, metrics={"share": share})
            assert (mine.accuracy, mine.metrics["share"]) == (right.accuracy, right.accuracy)
            assert mine.loss == pytest.approx(right.loss, rel=1e-9)


def test_the_targets_of_a_pair_may_end_with_a_token_that_the_model_does_not_read():
    texts = torch.randint(1, hf.WORDS, (40, 7), generator=torch.Generator().manual_seed(1))
    right = evaluated(hf.made(hf.gpt2), {"input_ids": texts, "labels": texts})
    mine = evaluated(hf.made(hf.gpt2), ({"input_ids": texts[:, :-1]}, texts[:, 1:]), plain)
    assert mine.accuracy == right.accuracy > 0


def test_a_loss_of_your_own_may_have_one_label_per_text():
    data = hf.texts(9, "words") | {"labels": torch.arange(9)}
    record = evaluated(
        hf.made(hf.gpt2),
        data,
        loss=lambda logits, labels: F.cross_entropy(logits[:, -1], labels),
        metrics={"first": lambda _, labels: labels[0]},
    )
    assert record.metrics["first"] == 0


def test_a_causal_model_may_return_its_loss_alone():
    class Lossy(type(hf.gpt2())):
        def forward(self, **inputs):
            return {"loss": super().forward(**inputs).loss}

    data, config = hf.texts(9, "words"), hf.gpt2().config
    right, mine = (evaluated(hf.made(make), data, "model") for make in (hf.gpt2, lambda: Lossy(config)))
    assert (mine.loss, mine.accuracy) == (right.loss, None)


@pytest.mark.parametrize("kind", ["PromptEncoderConfig", "PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_before_a_text_leave_all_its_labels_to_predict(kind):
    """P-tuning and prompt tuning predict the first one, too; prefix tuning does not."""
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(hf.made(hf.gpt2), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2))
    test = hf.texts(9, "words")
    with torch.no_grad():
        out = model.double().eval()(**test)
    record = evaluated(model, test, "model")
    assert record.loss == pytest.approx(float(out.loss), rel=1e-6)
    labels = test["labels"] if out.logits.shape[1] > hf.LENGTH else test["labels"][:, 1:]
    guesses = out.logits[:, -labels.shape[1] - 1 : -1].argmax(-1)
    assert record.accuracy == pytest.approx(float((guesses == labels)[labels != -100].double().mean()), abs=1e-12)
