"""Exchanges and queues on RabbitMQ.

A row with "(quorum)" has another name where queues are quorum queues: `machinery.queues.quorum`.
"""

from __future__ import annotations

from machinery_py.connections.stored_items import StoredItem

CONTROL = "machinery.control"
DUE = "machinery.delay.due"
PAUSED = "machinery.paused"
PAUSED_SINK = "machinery.paused.sink"
TOPICS = "machinery.topics"
LOOKING = "machinery.lock.looking"
RESULTS = "machinery.results."
TRIGGERED = "_chord_triggered"

_STATE = "`results_expire_in`"
_GROUP = "a week after its last use"

# fmt: off
BROKER = (
    StoredItem("machinery_exchange", "exchange",
               "messages on their way to their queues (`amqp.exchange`, `amqp.exchange_type`)",
               "for ever", "broker", shared=True),
    StoredItem("<queue>", "queue",
               "waiting messages; `amqp.queue_declare_args`; bound by its name, the default "
               "queue by `amqp.binding_key` too", "for ever", "broker", shared=True),
    StoredItem("machinery.delay.<level>", "exchange",
               "entry of a delay level (quorum); number 33 says that all levels are declared",
               "for ever", "broker"),
    StoredItem("machinery.delay.<level>", "queue",
               "messages that stay 50 ms · 2^level here (quorum)", "for ever", "broker"),
    StoredItem("machinery.delay.due", "exchange", "leads from the levels to the queues", "for ever",
               "broker"),
    StoredItem("machinery.dead.<queue>", "queue", "dead letters of the queue",
               "until replayed or purged", "broker"),
    StoredItem("machinery.held.<session>.<n>", "queue",
               "copies of long and redelivered deliveries that this consumer holds",
               "ten minutes after its consumer", "consumer"),
    StoredItem("machinery.queues", "queue",
               "one message per queue that was ever used, with its name (quorum)", "for ever",
               "broker"),
    StoredItem("machinery.workers", "queue",
               "nothing: its subscribers are the living consumers (quorum)", "for ever",
               "consumer"),
    StoredItem("machinery.control", "exchange", "questions to all consumers", "for ever",
               "broker, consumer"),
    StoredItem("machinery.paused", "exchange",
               "its bindings are the [paused queues](#paused-queues)", "for ever", "broker"),
    StoredItem("machinery.paused.sink", "exchange", "target of these bindings", "for ever",
               "broker"),
    StoredItem("machinery.paused", "queue", "the last question for a paused queue (quorum)",
               "for ever", "broker"),
    StoredItem("machinery.lock.looking", "queue",
               "nothing: its exclusive owner takes messages to look at them",
               "until its connection ends", "broker"),
    StoredItem("machinery.topics", "exchange", "records of topics, by the name of the topic",
               "for ever", "broker"),
    StoredItem("amq.gen-<name>", "queue",
               "questions and news for one process, or records for one subscription; exclusive",
               "until its connection ends", "consumer"),
)

RESULT_BACKEND = (
    StoredItem("<task UUID>", "queue", "one message: the last state", _STATE, "backend",
               shared=True),
    StoredItem("<group UUID>", "queue", "one message per member that has ended", _STATE, "backend",
               shared=True),
    StoredItem("<group UUID>_chord_triggered", "queue",
               "nothing: it is there once the callback was sent", _STATE, "backend", shared=True),
    StoredItem("machinery.sha256.<digest>", "queue",
               "state or group whose UUID RabbitMQ refuses as a name", _STATE, "backend"),
    StoredItem("machinery.results.group.<group UUID>", "queue",
               "members in order, callback, whether it is ready and sent", _GROUP, "backend"),
    StoredItem("machinery.results.members.<group UUID>", "queue",
               "one message per member that has ended, with its last state", _GROUP, "backend"),
    StoredItem("machinery.results.outbox", "queue", "open outboxes", "until published", "backend"),
    StoredItem("machinery.results.ready", "queue",
               "chords that are complete and whose callback is not sent", "until sent", "backend"),
    StoredItem("machinery.results.lock.<name>", "queue",
               "a token: whoever is handed it has the lock", "for ever", "backend"),
)
# fmt: on
