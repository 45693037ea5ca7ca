"""What holds an algorithm's quantities: named, immutable, and particular about a slot table."""

import pickle

import pytest
import torch

from fedlalr.algorithms.slots import Reduction, Slots, SlotTable


def test_slots_are_read_by_name_and_never_changed() -> None:
    slots = Slots(x=torch.ones(3), m=torch.zeros(3))
    assert slots.x is slots["x"]
    assert list(slots) == ["x", "m"]
    assert len(slots) == 2
    assert repr(slots) == "Slots(x=(3,), m=(3,))"
    with pytest.raises(AttributeError, match="slots are immutable"):
        slots.x = torch.zeros(3)
    with pytest.raises(AttributeError, match="there is no slot 'v' here, only x, m"):
        _ = slots.v
    with pytest.raises(AttributeError, match="only none"):
        _ = Slots().x


def test_slots_survive_pickling() -> None:
    again = pickle.loads(pickle.dumps(Slots(x=torch.arange(3.0))))
    assert isinstance(again, Slots)
    assert torch.equal(again.x, torch.arange(3.0))


def test_a_client_keeps_one_number_of_a_count_and_one_per_coordinate_of_other_slots() -> None:
    table = SlotTable(down=("x",), up={"x": "mean"}, kept=("m", "n"), counts=("n",))
    assert {name: value.shape for name, value in table.nothing_kept(torch.ones(5)).items()} == {"m": (5,), "n": (1,)}
    stack = table.nothing_kept(torch.ones(3, 5))
    assert {name: value.shape for name, value in stack.items()} == {"m": (3, 5), "n": (3, 1)}
    assert not any(value.any() for value in stack.values())


def test_a_table_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="must broadcast 'x'"):
        SlotTable(down=("m",), up={"m": "mean"})
    with pytest.raises(ValueError, match="slot 'x' has reduction 'median'; allowed are 'mean' and 'max'"):
        SlotTable(down=("x",), up={"x": "median"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="slot 'v_hat' is listed in grows but is not in both down and up"):
        SlotTable(down=("x",), up={"x": "mean", "v_hat": "max"}, grows=("v_hat",))
    with pytest.raises(ValueError, match="slot 'n' is listed in counts but is not in kept"):
        SlotTable(down=("x",), up={"x": "mean"}, kept=("m",), counts=("n",))
    up: dict[str, Reduction] = {"x": "mean", "delta": "mean"}
    assert SlotTable(down=("x",), up=up, kept=("c_i", "n"), counts=("n",), follows=("c_i", "delta"))
    for follows in (("m", "delta"), ("c_i", "other"), ("c_i", "x"), ("n", "delta"), ("c_i",), "c_i"):
        with pytest.raises(ValueError, match="follows must name a slot in kept that is not in counts, and one that is"):
            SlotTable(down=("x",), up=up, kept=("c_i", "n"), counts=("n",), follows=follows)  # type: ignore[arg-type]
    for blocks in (("x",), ("v",)):
        with pytest.raises(ValueError, match=f"slot '{blocks[0]}' is listed in blocks, which must name slots in down"):
            SlotTable(down=("x",), up={"x": "mean"}, blocks=blocks)
    with pytest.raises(ValueError, match="blocks must name slots, each once"):
        SlotTable(down=("x", "v"), up={"x": "mean"}, blocks="v")  # type: ignore[arg-type]
