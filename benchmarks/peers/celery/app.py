# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Celery: acknowledges after the run, keeps results in another database, turns costly extras off.

On RabbitMQ a message is confirmed before `delay` returns, as ours is.
"""

from __future__ import annotations

from celery import Celery

from benchmarks.peers.driving import AMQP, URL

app = Celery("peers", broker=AMQP or f"{URL}/0", backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=64,
    worker_disable_rate_limits=True,
    task_send_sent_event=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_enable_remote_control=False,
    broker_pool_limit=1,
)
if AMQP:
    app.conf.broker_transport_options = {"confirm_publish": True}


@app.task
def noop(number):
    return number
