"""What Celery and Go Machinery do, and what answers it here.

docs/explanation/celery.md is drawn from it, and of go-differences.md the rows of Go. The numbers
are those of the checklist of what other task queues do. Each is answered by tests, or otherwise
with the reason; `test_checklist.py` asks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One mechanism.

    Attributes:
        numbers: of the checklist.
        celery: what Celery does.
        here: what is done here.
        tests: that hold it.
        is_otherwise: the answer is another one than Celery's; `here` says why.
    """

    numbers: str
    celery: str
    here: str
    tests: str = ""
    is_otherwise: bool = False


CLOCK = (
    Row(
        "L01 L02",
        "events are ordered by cause, since wall clocks differ",
        "the same; `at` is for people, `clock` for the order",
        "test_cause_comes_before_effect_whatever_the_clocks_of_hosts_say "
        "test_cause_has_a_smaller_clock_than_its_effect",
    ),
    Row(
        "L03 L07",
        "local event and send: +1; receipt: max(own, received) + 1",
        "`forward()` and `adjust(other)`",
        "test_receipt_is_later_than_both_clocks",
    ),
    Row(
        "L04 L10",
        "the clock starts at 0; small public class",
        "`LamportClock`; that of a process starts with the microseconds since 1970, later than "
        "those before it",
        "test_clock_starts_at_zero_or_at_a_value_and_counts_events "
        "test_new_process_has_a_later_clock_than_those_before",
    ),
    Row(
        "L05",
        "`inspect clock`",
        "each `Pong` of `ping()` has it",
        "test_order_and_answer_carry_the_clocks_of_their_processes",
    ),
    Row(
        "L06",
        "a message carries the clock",
        "header `machinery_clock`, while events are on",
        "test_message_has_the_clock_of_its_sending_while_events_are_on",
    ),
    Row(
        "L08",
        "the converse need not hold",
        "the same, over random graphs of messages",
        "test_cause_has_a_smaller_clock_than_its_effect",
    ),
    Row(
        "L09",
        "equal clocks: the node's name decides",
        "`event.stamp` is (clock, worker)",
        "test_stamps_have_one_order_by_clock_then_worker "
        "test_events_that_come_together_are_in_the_order_of_their_stamps",
    ),
    Row("L11", "safe from any thread", "the same", "test_threads_lose_no_count"),
    Row(
        "L16",
        "one clock for control and events of an app",
        "one for each `Server`",
        "test_order_and_answer_carry_the_clocks_of_their_processes "
        "test_cause_comes_before_effect_whatever_the_clocks_of_hosts_say",
    ),
    Row(
        "L17",
        "each event is stamped",
        "the same",
        "test_stream_tells_what_happens_in_other_processes",
    ),
    Row(
        "L18",
        "blind events have no clock",
        "there are none: without a clock an event has no place in the order. What nobody wants is "
        "not made, and counts nothing",
        "test_nothing_is_made_while_events_are_off",
        is_otherwise=True,
    ),
    Row(
        "L19",
        "an event has type, host, process, UTC offset",
        "kind, host, pid, worker, clock; its time is in UTC, so there is no offset",
        "test_stream_tells_what_happens_in_other_processes",
    ),
    Row(
        "L20",
        "routing keys, to subscribe to `task.*`",
        "a stream names classes, or a base for all below it. All are on one topic: that keeps one "
        "order, and a batch is one call",
        "test_stream_of_some_kinds_leaves_the_others_out",
        is_otherwise=True,
    ),
    Row(
        "L21",
        "a lock around each publish",
        "emitters put events into a queue, one thread sends them",
        "test_events_of_many_threads_keep_their_form_and_have_a_clock_each",
    ),
)

CONTROL = (
    Row(
        "L12 L13",
        "replies carry ticket and clock; the asker's clock follows",
        "the id of an order names the topic of its answers; order and answer carry the clock",
        "test_order_and_answer_carry_the_clocks_of_their_processes",
    ),
    Row(
        "L14",
        "collect: limit, timeout (1 s), callback, accepted types",
        "a call ends when all known workers have answered, after 2 s at most, and returns a dict: "
        "nobody has to know a limit. Answers are JSON only",
        "test_workers_of_another_process_answer test_worker_that_does_not_answer_is_named_in_time",
        is_otherwise=True,
    ),
    Row(
        "L15",
        "the publish of a reply is retried",
        "an answer is sent once: its caller may be gone. Who has not answered is in `missing`, and "
        "every order may be repeated. After an outage workers hear orders again",
        "test_worker_that_does_not_answer_is_named_in_time "
        "test_worker_starts_when_it_cannot_subscribe_to_orders "
        "test_subscription_goes_on_when_its_connection_is_lost "
        "test_exchange_that_was_deleted_is_declared_again",
        is_otherwise=True,
    ),
    Row(
        "L28",
        "destination, pattern, limit, timeout, callback; one destination: the bare answer",
        "names, `*` in them, timeout; always a dict by worker, so that code has one case",
        "test_star_in_a_name_stands_for_any_text test_workers_of_one_name_are_told_apart "
        "test_workers_of_another_process_answer",
        is_otherwise=True,
    ),
    Row(
        "L22 L23 L24 L26 L27",
        "mingle: at each start a worker asks its neighbours, for 1 s; on AMQP and Redis; needs "
        "the events step; without neighbours it says so",
        "no [mingle](#why-there-is-no-mingle): a worker asks its store, on every store, also after "
        "an outage, and with events off. It starts without a wait",
        "test_revoked_task_is_never_started",
        is_otherwise=True,
    ),
    Row(
        "L25 L29",
        "mingle: both sides merge their revocations, and take over the clock",
        "a revocation is in the store, where all workers see it, those that run and those that "
        "start later; the clock starts with the time",
        "test_revoked_task_is_remembered test_revoked_task_is_never_started "
        "test_one_of_revoking_and_beginning_wins "
        "test_new_process_has_a_later_clock_than_those_before",
        is_otherwise=True,
    ),
    Row(
        "L30",
        "a worker keeps 50,000 revocations, each for 3 h",
        "the store keeps each until three days after its message came, and for a year after its "
        "ETA if it never comes. Nothing pushes one out: its task would run",
        "test_revocation_is_forgotten_days_after_its_message_came "
        "test_revoked_task_due_days_later_does_not_run "
        "test_a_revoked_task_is_not_run_after_weeks_in_a_paused_queue",
        is_otherwise=True,
    ),
    Row(
        "L31",
        "a revoked or expired task is dropped and acked; state REVOKED",
        "the same; the state is FAILURE with the type `Revoked` or `Expired`, since Go has six "
        "states. Error callbacks are sent, and chords end",
        "test_revoked_task_that_only_its_worker_can_end_is_told_by_it "
        "test_expired_task_is_not_started test_revoked_member_fails_its_chord_at_once",
    ),
    Row(
        "L32",
        "a restarting worker must not run what others did, or what was revoked",
        "the same: a redelivery of a finished run is not called; revocations survive when all "
        "workers are stopped",
        "test_a_revoked_task_is_never_started test_killed_worker_loses_and_doubles_nothing "
        "test_a_revocation_that_was_cut_off_is_finished_by_the_worker",
    ),
)

WORKER = (
    Row(
        "T01 T02 T03",
        "bootsteps: parts in the order of their dependencies, and the user's own",
        "`server.worker_part(after=…)`, `worker.add_part`; the worker's own are parts like them, "
        "see `machinery worker --parts`",
        "test_parts_come_behind_what_they_come_after test_impossible_order_is_refused "
        "test_parts_start_before_the_first_task_and_stop_after_the_last "
        "test_command_line_draws_the_parts",
    ),
    Row(
        "T04",
        "`--statedb`: revocations in a file of the worker",
        "in the store, for all workers",
        "test_a_revoked_task_is_never_started",
    ),
    Row(
        "T05",
        "`--autoscale 10,2`",
        "`--autoscale 2,10`: doubled when a task has waited for 0.5 s, down after 30 s",
        "test_worker_grows_to_the_need_at_once_when_tasks_wait "
        "test_it_shrinks_to_the_most_that_was_held_within_thirty_seconds",
    ),
    Row(
        "T06",
        "`-B`: beat inside of one worker",
        "each worker has a scheduler, and each tick is sent once",
        "test_worker_sends_schedules_and_keeps_pauses_over_a_restart "
        "test_ten_schedulers_send_each_tick_once",
    ),
    Row(
        "T07 T08 T14",
        "a timer of the event loop, or of the pool; its class is a setting",
        "one class for all, of one thread; coroutine functions run on the worker's loop",
        "test_functions_are_called_beside_the_tasks",
        is_otherwise=True,
    ),
    Row(
        "T09",
        "connection, channel and transport are separate",
        "the worker knows no store by name; each store passes the same suites",
        "test_imports_go_down_only test_no_store_imports_another_store",
    ),
    Row(
        "T10",
        "Redis and AMQP work without threads, in the event loop",
        "a worker has one thread for each job that waits (claims, commits, beats, orders, ticks). "
        "An idle one sleeps in a call to its store. The worker has no loop of its own that a task "
        "or a callback could hold up",
        is_otherwise=True,
    ),
    Row(
        "T11",
        "rate limits of each worker, on its timer",
        "limits of the whole fleet, held in the store: of each worker it would be ten times the "
        "rate with ten of them",
        "test_fifty_calls_at_five_a_second_take_ten_seconds",
        is_otherwise=True,
    ),
    Row(
        "T12",
        "Redis: restore each 10 s, health checks of connections",
        "each call to a store has a timeout (`publish_timeout`, 5 s); RabbitMQ: two heartbeats "
        "(10 s). Tasks of lost workers are looked for each quarter of a lease (2.5 s) at least",
        "test_a_fault_loses_nothing_and_doubles_nothing "
        "test_the_tasks_of_a_killed_worker_run_again_at_once",
    ),
    Row(
        "T13",
        "timers of gevent and eventlet",
        "no pool of greenlets: `async def` tasks share one loop, and threads wait side by side, "
        "without patched modules",
        "test_functions_and_coroutines_run_in_one_worker",
        is_otherwise=True,
    ),
    Row(
        "T15",
        "the schedule says how long to wait, or what is due; its caller waits",
        "`Timer.fire()` calls what is due, and returns the seconds until the next",
        "test_earlier_ones_come_first_then_those_made_first",
    ),
    Row(
        "T16",
        "heap by time, then by priority",
        "by time, then in the order of making: one order less to know",
        "test_earlier_ones_come_first_then_those_made_first",
        is_otherwise=True,
    ),
    Row(
        "T17 T32",
        "waits are capped, so that a new entry is seen in time",
        "no cap: a new entry that is the next one wakes the thread",
        "test_entry_that_comes_later_wakes_the_thread",
        is_otherwise=True,
    ),
    Row(
        "T18",
        "cancelled entries are skipped",
        "the same, and removed when there are many",
        "test_cancelled_entry_is_not_called test_cancelled_entries_are_removed",
    ),
    Row(
        "T19",
        "an entry that comes during a look at the heap is not lost",
        "one lock around the heap; functions are called outside of it",
        "test_function_may_cancel_its_own_entry_and_enter_others",
    ),
    Row(
        "T20",
        "`call_repeatedly`, for users",
        "`worker.every`, `worker.after`",
        "test_functions_are_called_beside_the_tasks",
    ),
    Row(
        "T21",
        "the next call counts from the last one",
        "from the planned moment, so that nothing drifts; missed ones are left out",
        "test_beat_does_not_drift_and_is_never_faster test_missed_beats_are_left_out",
        is_otherwise=True,
    ),
    Row(
        "T22 T23",
        "a function that raises is told, and called again",
        "the same: `on_error` gets the exception",
        "test_timer_goes_on_after_an_exception",
    ),
    Row(
        "T24",
        "an entry can be cancelled, and knows its last run",
        "`TimerEntry`: `cancel()`, `is_cancelled`, `called_at`",
        "test_cancelled_entry_is_not_called "
        "test_entries_count_from_the_start_and_stay_for_the_next",
    ),
    Row(
        "T25",
        "a jump of the wall clock does no harm",
        "the same",
        "test_wall_clock_that_jumps_does_no_harm",
    ),
    Row(
        "T26 T27 T29",
        "hub: one event loop that user code can add sockets to; `run_once`, `run_forever`",
        "no hub. A source of its own is a thread of the program, or a coroutine; an embedded "
        "worker has `start`, `stop`, `launch` and `burst`, and tests `drain`",
        "test_quit_ends_a_started_worker_after_its_tasks "
        "test_a_burst_that_was_started_ends_by_itself test_nothing_runs_by_itself",
        is_otherwise=True,
    ),
    Row(
        "T30",
        "a line each 3 s while a message is sent, received and acked",
        "`worker.every`, [with an example](../how-to/hooks.md#beside-the-tasks)",
        "test_the_programs_of_a_page_run test_functions_are_called_beside_the_tasks",
    ),
    Row(
        "T28",
        "a busy timer cannot hold up sockets",
        "timers have threads of their own: the user's, that of maintenance, that of time limits",
        "test_functions_are_called_beside_the_tasks",
    ),
    Row(
        "T31",
        "a daemon thread around the same schedule",
        "the same, from the first entry on",
        "test_timer_has_a_thread_only_from_its_first_entry_on",
    ),
    Row(
        "T33",
        "stop ends it within a second",
        "at once, whatever is pending",
        "test_timer_with_an_entry_in_an_hour_ends_at_once",
    ),
    Row(
        "T34",
        "an unexpected error of the timer itself kills the process",
        "it is logged, and the worker ends in order",
        "test_failure_of_the_timer_itself_is_known test_worker_whose_timer_breaks_ends_in_order",
        is_otherwise=True,
    ),
    Row(
        "T35",
        "safe while the interpreter ends",
        "the same",
        "test_process_ends_quietly_with_a_timer_that_runs",
    ),
    Row(
        "T36",
        "`--without-heartbeat`, `--heartbeat-interval`",
        "events are off unless `-E`, the setting or an order switches them on. The beat itself is "
        "the lease's and cannot be off: each `lease` / 4",
        "test_events_of_a_worker_are_printed_as_text_and_as_json "
        "test_nothing_is_made_while_events_are_off",
        is_otherwise=True,
    ),
    Row(
        "T37",
        "it is not AMQP's heartbeat",
        "settings `lease`, and `heartbeat` of the URL",
        "test_the_defaults_need_no_server test_an_amqp_url_is_gos "
        "test_f63_heartbeats_do_not_wait_for_users_of_the_broker",
    ),
    Row(
        "T38",
        "a heartbeat each 2 s",
        "each 2.5 s, a quarter of the lease; `WorkerHeartbeat.interval` says it",
        "test_worker_tells_its_end_once_and_beats_until_then",
        is_otherwise=True,
    ),
    Row(
        "T39",
        "`worker-online` at the start",
        "`WorkerOnline`, before the first claim",
        "test_stream_tells_what_happens_in_other_processes test_the_life_of_a_worker_is_told",
    ),
    Row(
        "T40 T41 T45",
        "`worker-heartbeat`, then `worker-offline` once; stopping twice is harmless",
        "`WorkerHeartbeat`, `WorkerOffline`: the same",
        "test_worker_tells_its_end_once_and_beats_until_then",
    ),
    Row(
        "T42",
        "nothing is sent while events are off",
        "nothing is made either: no record, no thread, no header",
        "test_nothing_is_made_while_events_are_off",
    ),
    Row(
        "T43",
        "active, processed, load, version, system",
        "the same, and the events that were lost",
        "test_worker_tells_its_end_once_and_beats_until_then "
        "test_stream_tells_what_happens_in_other_processes",
    ),
    Row(
        "T44",
        "signal `heartbeat_sent`",
        "`server.events.subscribe(WorkerHeartbeat, hook)`",
        "test_worker_tells_its_end_once_and_beats_until_then",
    ),
    Row(
        "T46",
        "missed heartbeats: the worker is offline",
        "the same after three intervals, and its tasks run elsewhere when its lease is over",
        "test_worker_is_alive_until_three_heartbeats_are_missed "
        "test_top_shows_stalled_and_lost_workers_and_a_broker_that_is_away "
        "test_the_tasks_of_a_killed_worker_run_again_at_once",
    ),
    Row(
        "T47",
        "heartbeats go on while the pool is busy, and while the worker stops",
        "the same. A task that holds the interpreter stops the events of its process; its keeper "
        "beats in the store, so it loses no task and is shown as stalled. RabbitMQ sees the "
        'connection alone: `pool="process"`',
        "test_worker_tells_its_end_once_and_beats_until_then "
        "test_task_that_holds_the_interpreter_runs_once",
    ),
)

FAULTS = (
    Row(
        "F13",
        "an overall time limit for connecting",
        "of a client: `publish_timeout`, over all attempts and servers. A worker has a number of "
        "attempts (`broker_connection_max_retries`), and whoever started it decides how long they "
        "may take: a worker that ends is only started again",
        "test_no_server_is_told_in_time test_when_all_are_dead_their_urls_are_told_in_time "
        "test_worker_gives_up_after_its_number_of_attempts",
        is_otherwise=True,
    ),
    Row(
        "F21",
        "several broker URLs: `a;b;c`, or a list",
        "one text, and `multiple_broker_separator` (Go's setting) says by what it is split: a "
        "password may hold any mark. A list, or a text without the setting, is refused with the "
        "way to write it",
        "test_several_brokers_are_split_by_the_separator "
        "test_several_urls_in_one_text_are_refused_with_the_way_to_write_them "
        "test_list_of_brokers_is_refused_with_the_way_to_write_them",
        is_otherwise=True,
    ),
    Row(
        "F39",
        "`MaxRetriesExceededError` names task, id, args and kwargs",
        "`TaskFailed` with `name`, `uuid`, `error_type` (`machinery_py.errors.Retry`) and "
        "`traceback`. Arguments may be secrets, and errors go into logs: they are with the failed "
        "task (`machinery show`), behind the dashboard's mask",
        "test_each_ending_under_each_setting",
        is_otherwise=True,
    ),
    Row(
        "F72",
        "events: success with result and runtime, retry with error and traceback, failure",
        "`TaskSucceeded`, `TaskRetried`, `TaskFailed`: the same",
        "test_how_tasks_end_is_told",
    ),
    Row(
        "F74",
        "the fields of a message",
        "each has its place, or a reason: [the envelope](#the-envelope-of-a-message)",
        "test_fields_of_celerys_envelope_are_answered_by_ours",
    ),
    Row(
        "F76",
        "a consumer without acks parks no messages",
        "every message is held until its end, and nothing of it is left then. Fire and forget "
        "without results: the `null` backend, where an early task's message is gone before its "
        "call",
        "test_early_task_without_results_leaves_no_key_of_it "
        "test_early_tasks_without_a_backend_are_ended_before_their_call",
        is_otherwise=True,
    ),
    Row(
        "F90",
        "a message is restored to each queue that is bound to its exchange; old and new clients",
        "a message has one queue, and comes back to it: there is no fan-out of tasks. A binding "
        "that was deleted is made anew. Client versions: [platforms](../reference/platforms.md)",
        "test_f66_a_binding_that_was_deleted_is_made_anew "
        "test_closing_returns_deliveries_at_once_without_a_strike",
        is_otherwise=True,
    ),
    Row(
        "F91",
        "`Reject` and `Ignore`",
        "the same names; the state is FAILURE (`Rejected`, `Ignored`), or RETRY while it is back "
        "in its queue, and chords end",
        "test_rejected_message_goes_back_to_its_queue test_rejected_message_becomes_a_dead_letter "
        "test_ignored_task_ends_without_a_result test_chord_with_a_member_that_gives_up_ends",
    ),
    Row(
        "O02",
        "the next call waits until the running one is done",
        '`exclusive="wait"`: back to back, in the order of sending',
        "test_waiting_exclusive_calls_run_in_the_order_of_their_sending "
        "test_fifty_calls_on_three_workers_run_one_at_a_time",
    ),
    Row(
        "O08 O20 O21",
        "the caller steers by options of the call; the function does not see them",
        "`task.options(exclusive=…, exclusive_key=…, exclusive_timeout=…)`, "
        "[with an example](../how-to/unique.md#one-call-decides-for-itself)",
        "test_each_call_says_whether_it_waits_or_is_skipped test_call_waits_no_longer_than_it_says "
        "test_members_and_retries_of_exclusive_calls_are_exclusive",
    ),
)

#: Of Go Machinery's documents.
GO = (
    Row(
        "M01",
        "four questions: how is it built, is it available, is load balanced, what is promised",
        "[architecture](architecture.md), [scaling](scaling.md), [queues](../how-to/queues.md), "
        "[delivery guarantees](delivery-guarantees.md)",
        "test_links_lead_somewhere",
    ),
    Row(
        "M08",
        "the server is light, and lives in the service that sends",
        "a Server connects at its first use, and sends without a thread of its own; RabbitMQ's "
        "connection has one, and pymongo has some",
        "test_the_import_loads_no_client_library_and_starts_no_thread "
        "test_sending_starts_no_thread",
    ),
    Row(
        "M16",
        "`GetConfig`",
        "`server.config`",
        "test_config_of_a_server_is_one_object",
    ),
    Row(
        "M17",
        "`SetRegisteredTaskNames` of the broker",
        "a broker holds messages of any name; the worker knows its tasks "
        "(`server.get_registered_task_names()`), and puts back what it does not know",
        "test_unregistered_task_waits_for_a_worker_that_knows_it",
        is_otherwise=True,
    ),
    Row(
        "M25",
        "`TaskProcessor.Process`, called by the broker",
        "the worker calls the broker, not the other way round: `Consumer.receive` gives messages "
        "and `dispose` ends them. Around a run: `before_task`, `around_task`, `after_task`",
        "test_parts_start_before_the_first_task_and_stop_after_the_last",
        is_otherwise=True,
    ),
    Row(
        "M58",
        "`Headers` become headers of the AMQP message",
        "they stay in the body, where Go reads them; headers of the AMQP message are those of the "
        "delivery, and those of a Go sender are kept",
        "test_headers_arrive test_headers_of_go_are_kept_when_a_message_goes_back",
        is_otherwise=True,
    ),
    Row(
        "M66",
        "`BrokerMessageGroupId`: strict order in a group",
        "of brokers that can (`BrokerFeatures.message_groups`, as "
        "[SQS](../../examples/store-sqs/README.md)); others refuse to send it",
        "test_message_group_is_refused_where_no_order_is_kept",
    ),
)

ROWS = (*CLOCK, *CONTROL, *WORKER, *FAULTS, *GO)
_FAULTS = "F13 F21 F39 F72 F74 F76 F90 F91 O02 O08 O20 O21"
_GO = "M01 M08 M16 M17 M25 M58 M66"
CHECKLIST = {
    *(f"L{n:02}" for n in range(1, 33)),
    *(f"T{n:02}" for n in range(1, 48)),
    *f"{_FAULTS} {_GO}".split(" "),
}


def table(rows: tuple[Row, ...], whose: str = "Celery") -> str:
    """Return rows as a table of the page."""
    lines = [f"| | {whose} | here | tests |", "|---|---|---|---|"]
    for row in rows:
        here = f"**Otherwise:** {row.here}" if row.is_otherwise else row.here
        tests = ", ".join(f"`{name}`" for name in row.tests.split()) or "–"
        lines.append(f"| {row.numbers.replace(' ', ', ')} | {row.celery} | {here} | {tests} |")
    return "\n".join(lines)
