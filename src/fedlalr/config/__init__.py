"""Configurations: presets, files and overrides, and the runs they describe."""

from fedlalr.config.build import build_algorithm, build_model, build_population, execute
from fedlalr.config.errors import ConfigError
from fedlalr.config.loading import dump, load, presets, with_method
from fedlalr.config.run_dir import RunDirectory
from fedlalr.config.schema import Config

__all__ = ["Config", "ConfigError", "RunDirectory", "build_algorithm", "build_model", "build_population"]
__all__ += ["dump", "execute", "load", "presets", "with_method"]
