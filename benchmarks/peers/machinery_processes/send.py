"""Sends as the other worker's sender does."""

import benchmarks.peers.machinery.send  # noqa: F401
