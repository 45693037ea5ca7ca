"""Windows are views: they return what a copy would contain, without copying."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.data.windows import Windows


@settings(deadline=None, max_examples=50)
@given(length=st.integers(1, 12), extra=st.integers(1, 40), data=st.data())
def test_windows_equal_the_copies_that_unfold_makes(length: int, extra: int, data: st.DataObject) -> None:
    text = torch.randint(0, 80, (length + extra,), dtype=torch.uint8)
    copies = text.long().unfold(0, length, 1)[:-1]
    windows = Windows(text, torch.arange(extra), length)
    index = torch.tensor(data.draw(st.lists(st.integers(0, extra - 1), min_size=1, max_size=9)))
    assert torch.equal(windows[index], copies[index])
    assert torch.equal(windows[2:], copies[2:])
    assert torch.equal(windows[0], copies[0])
    assert torch.equal(windows.following(), text[length:].long())


def test_memory_is_linear_in_the_text() -> None:
    n = 100_000
    windows = Windows(torch.zeros(n + 80, dtype=torch.uint8), torch.arange(n), 80)
    assert windows.nbytes == (n + 80) + 8 * n
    assert windows.to("cpu").characters.data_ptr() == windows.characters.data_ptr()


def test_a_batch_is_int64_for_an_embedding() -> None:
    windows = Windows(torch.arange(100, dtype=torch.uint8), torch.arange(10))
    assert windows[torch.tensor([3])].dtype == torch.int64
    assert windows.shape == (10, 80)
