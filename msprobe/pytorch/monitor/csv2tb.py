"""Converter of monitor files under the name of the existing tool. Re-exports only."""

from msprobe_engine.formats.monitor.convert.csv2tb import csv2tensorboard_by_step

__all__ = ["csv2tensorboard_by_step"]
