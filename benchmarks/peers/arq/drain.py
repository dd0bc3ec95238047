# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""A worker that looks often and takes many. Two processes are two of these."""

from __future__ import annotations

import asyncio

import uvloop
from arq.worker import Worker

from benchmarks.peers.arq.app import noop, settings
from benchmarks.peers.driving import gate

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
asyncio.set_event_loop(asyncio.new_event_loop())
gate()
Worker([noop], redis_settings=settings, max_jobs=100, poll_delay=0.001, log_results=False).run()
