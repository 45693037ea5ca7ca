"""Every registered method with its defaults, and with the options that change what it computes or sends."""

from __future__ import annotations

import fedlalr as fl
from fedlalr.algorithms import ALGORITHMS, Algorithm

VARIANTS: dict[str, Algorithm] = {name: make() for name, make in ALGORITHMS.items()} | {
    "fedlalr restart": fl.FedLALR(momentum="restart"),
    "fedlalr max": fl.FedLALR(second_moment="max"),
    "fedlalr restart max": fl.FedLALR(momentum="restart", second_moment="max"),
    "fedlalr bias correction": fl.FedLALR(bias_correction=True),
    "alignedlalr unaligned": fl.AlignedLALR(align=0.0),
    "alignedlalr unaligned mean": fl.AlignedLALR(align=0.0, second_moment="mean"),
    "alignedlalr keep": fl.AlignedLALR(keep=0.8, bias_correction=True),
    "alignedlalr keep mean": fl.AlignedLALR(keep=0.9, second_moment="mean"),
    "localadam restart": fl.LocalAdam(moments="restart"),
    "localadam average": fl.LocalAdam(moments="average"),
    "fedadamw unaligned": fl.FedAdamW(align=0.0),
    "fedadamw whole": fl.FedAdamW(blocks=False),
    "fedadamw whole unaligned": fl.FedAdamW(blocks=False, align=0.0),
    "lafedopt local": fl.LAFedOpt(correction="local"),
    "lafedopt joint": fl.LAFedOpt(correction="joint"),
    "lafedopt joint adam": fl.LAFedOpt(correction="joint", server="adam"),
    "lafedopt adam": fl.LAFedOpt(server="adam"),
    "mimelite adam": fl.MimeLite(base="adam"),
}
