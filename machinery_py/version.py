"""The version, where setup.cfg can read it without importing anything else."""

__version__ = "1.0.0"
