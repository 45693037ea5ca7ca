"""How long a round takes: jobs, the plain loop to compare with, and fair timing of several contestants."""

from fedlalr.benchmark.jobs import GPU_JOBS, JOBS, Job
from fedlalr.benchmark.racing import Contestant, Outcome, ours, plain_loop, race

__all__ = ["GPU_JOBS", "JOBS", "Contestant", "Job", "Outcome", "ours", "plain_loop", "race"]
