"""How long a round takes: jobs, the plain loop to compare with, and fair timing of several contestants."""

from fedlalr.benchmark.jobs import GPU_JOBS, JOBS, BenchmarkJob
from fedlalr.benchmark.racing import Contestant, RaceResult, ours, plain_loop, race

__all__ = ["GPU_JOBS", "JOBS", "BenchmarkJob", "Contestant", "RaceResult", "ours", "plain_loop", "race"]
