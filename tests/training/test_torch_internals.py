"""The private APIs of torch that fedlalr uses: they exist, they take what we pass, and one module alone uses them."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedlalr
from fedlalr.training import torch_internals
from fedlalr.training.stacked.masked_norm import MASKED
from fedlalr.training.torch_internals import add_to_each, has_hooks, storage_address

CHECKED_WITH = "2.13.0"
"""The torch version with which the table below was written and the module was checked."""

SIGNATURES = {
    "torch.ops.aten._fused_adam_.default": (
        "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 weight_decay eps amsgrad maximize"
    ),
    "torch.ops.aten._foreach_add.Scalar": "self scalar",
    "torch.ops.aten.threshold_backward.default": "grad_output self threshold",
    "torch.ops.aten.tanh_backward.default": "grad_output output",
    "torch.ops.aten.sigmoid_backward.default": "grad_output output",
    "torch.ops.aten.convolution_backward.default": (
        "grad_output input weight bias_sizes stride padding dilation transposed output_padding groups output_mask"
    ),
    "torch.nn.modules.batchnorm._BatchNorm": "num_features eps momentum affine track_running_stats",
    "torch.nn.modules.batchnorm._BatchNorm._check_input_dim": "self input",
    "torch.utils._python_dispatch.TorchDispatchMode.__torch_dispatch__": "self func types args kwargs",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "",
    "torch.utils._pytree.tree_flatten": "tree",
    "torch.utils._pytree.tree_leaves": "tree",
    "torch.utils._pytree.tree_map": "func tree",
    "torch.utils._pytree.tree_unflatten": "leaves treespec",
}
"""What we use → the parameters that come first. Classes of which we only ask `isinstance` are listed in short."""
ONLY_ISINSTANCE = ("_BatchNorm",)
ATTRIBUTES = {
    nn.Module(): ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_non_persistent_buffers_set"),
    torch.zeros(1).untyped_storage(): ("_cdata",),
    torch.zeros(1): ("_version",),
    torch._C._functorch: ("_set_vmap_fallback_warning_enabled",),
}


def changed(name: str, problem: str) -> str:
    return (
        f"{name} {problem} in torch {torch.__version__}; fedlalr was checked with torch {CHECKED_WITH}. "
        "Adapt src/fedlalr/training/torch_internals.py, then this table"
    )


def find(path: str) -> Any:
    found: Any = torch
    for part in path.split(".")[1:]:
        if not hasattr(found, part):
            pytest.fail(changed(path, f"is missing (no {part!r})"))
        found = getattr(found, part)
    return found


def parameters(function: Any) -> list[tuple[str, bool]]:
    """Each parameter's name and whether a call may leave it out."""
    if isinstance(function, torch._ops.OpOverload):
        return [(argument.name, argument.has_default_value()) for argument in function._schema.arguments]
    given = inspect.signature(function).parameters.values()
    return [(p.name, p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)) for p in given]


@pytest.mark.parametrize("path", SIGNATURES)
def test_every_private_api_takes_what_we_pass(path: str) -> None:
    if path.endswith("_should_skip_dynamo") and torch.__version__ < (2, 11):
        pytest.skip("older versions do not call it")
    given, wanted = parameters(find(path)), SIGNATURES[path].split()
    names = [name for name, _ in given]
    assert names[: len(wanted)] == wanted, changed(path, f"takes {', '.join(names)}")
    if not path.endswith(ONLY_ISINSTANCE):
        new = [name for name, optional in given[len(wanted) :] if not optional]
        assert not new, changed(path, f"also requires {', '.join(new)}")


def test_every_private_attribute_exists() -> None:
    for owner, names in ATTRIBUTES.items():
        for name in names:
            assert hasattr(owner, name), changed(f"{type(owner).__name__}.{name}", "is missing")


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_hook_of_any_layer_is_seen(register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    assert not has_hooks(model)
    handle = getattr(model[1][0], register)(lambda *_: None)
    assert has_hooks(model)
    handle.remove()
    assert not has_hooks(model)


def test_tensors_that_share_a_storage_have_its_address() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    assert storage_address(one.untyped_storage()) == storage_address(one[2:].untyped_storage())
    assert storage_address(one.untyped_storage()) != storage_address(other.untyped_storage())


def test_a_number_is_added_to_each_tensor() -> None:
    counts = [torch.tensor([1, 2]), torch.tensor(5)]
    assert [tensor.tolist() for tensor in add_to_each(counts, 1)] == [[2, 3], 6]
    assert [tensor.tolist() for tensor in counts] == [[1, 2], 5]
    assert list(add_to_each([], 1)) == []


def private_uses(source: str) -> set[str]:
    """Private APIs of torch in a module's source: imported, read from torch, or members of torch's objects."""
    owners = (nn.Module(), nn.BatchNorm1d(1), torch.zeros(1), torch.zeros(1).untyped_storage(), torch.Generator())
    members = {name for owner in owners for name in dir(owner) if re.match("_[a-z]", name)}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "functorch"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if re.match(r"(torch|nn|F)\.", path):
                found.add(path)
            elif node.attr in members and ast.unparse(node.value) not in ("self", "cls", "super()"):
                found.add(f"?.{node.attr}")
    return {path for path in found if re.search(r"(\.|^)(_[A-Za-z]|ops\.|functorch\b)", path)}


def test_no_other_module_uses_a_private_api() -> None:
    root = Path(fedlalr.__file__).parent
    uses = {
        file.relative_to(root).as_posix(): private_uses(file.read_text(encoding="utf-8"))
        for file in root.rglob("*.py")
        if file != Path(torch_internals.__file__)
    }
    assert {file: found for file, found in uses.items() if found} == {}


def test_private_uses_are_recognised() -> None:
    source = (
        "import torch\nfrom torch.utils._pytree import tree_map\nfrom torch.nn.modules.conv import _ConvNd\n"
        "torch._foreach_add([], 1)\nlayer._modules\ntorch.ops.aten.relu\nself._parameters\ntorch.zeros(1)\n"
    )
    assert private_uses(source) == {
        "torch.utils._pytree.tree_map",
        "torch.nn.modules.conv._ConvNd",
        "torch._foreach_add",
        "?._modules",
        "torch.ops.aten.relu",
        "torch.ops.aten",
    }
    assert private_uses(Path(torch_internals.__file__).read_text(encoding="utf-8"))


def test_the_stand_in_of_a_batch_norm_checks_inputs_as_the_layer_does() -> None:
    stand_in = nn.BatchNorm2d(3)
    stand_in.__class__ = MASKED[nn.BatchNorm2d]
    with pytest.raises(ValueError, match="expected 4D input"):
        stand_in(torch.zeros(2, 3))
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(stand_in(images), nn.BatchNorm2d(3)(images))
