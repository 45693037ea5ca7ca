"""How long a round takes: jobs, a plain loop as the baseline, and fair timing of several contestants."""

from fedlalr.benchmark.jobs import GPU_JOBS, JOBS, BenchmarkJob
from fedlalr.benchmark.racing import Contestant, RaceResult, ours, plain_loop, race

__all__ = ["GPU_JOBS", "JOBS", "BenchmarkJob", "Contestant", "RaceResult", "ours", "plain_loop", "race"]
