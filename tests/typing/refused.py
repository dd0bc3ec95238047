"""Exactly the lines marked `# refused` must fail a type checker.

See test_typing.py; never run.
"""

from __future__ import annotations

import datetime as dt

from machinery_py import (
    AsyncResult,
    Context,
    Server,
    Signature,
    TaskSet,
    chord,
    current_task,
    group,
)

server = Server()


@server.task
def add(a: int, b: int, *more: int) -> int:
    return a + b + sum(more)


@server.task(retries=3)
def send_welcome(email: str, *, lang: str = "en") -> None: ...


@server.task
async def fetch(url: str) -> str:
    return url


@server.task
def crunch(ctx: Context, rows: int) -> float:
    return 1.0


add.send(1, 2)
add.send(1, "2")  # refused
add.send(1)  # refused
add.send(1, 2, c=3)  # refused
add(1, "2")  # refused
add.signature(1, "2")  # refused
add.signature()  # refused
add.options(delay=5).send(1, "2")  # refused
add.options(delay=5).signature("1", 2)  # refused

add.options(dealy=5)  # refused
add.options(delay="5")  # refused
add.options(eta="tomorrow")  # refused
add.options(queue=5)  # refused
add.options(headers={"tenant": 1})  # refused
add.options(delay=dt.timedelta(hours=2))

send_welcome.send("ada@example.com", lang="fr")
send_welcome.send("ada@example.com", "fr")  # refused
send_welcome.send("ada@example.com", lang=1)  # refused
send_welcome.send(mail="ada@example.com")  # refused

fetch.send("x")
fetch.send(5)  # refused
crunch.send(5)
crunch.send("x")  # refused
crunch.send(Context, 5)  # refused

wrong: AsyncResult[str] = add.send(1, 2)  # refused
right: AsyncResult[int] = add.send(1, 2)
text: str = add.send(1, 2).get()  # refused
text2: str = (add.signature(1, 2) | add.partial()).send().get()  # refused
numbers: list[str] = group(add.signature(1, 2)).send().get()  # refused
sum_: str = chord(group(add.signature(1, 2)), add.partial()).send().get()  # refused
add.send(1, 2).get(5, 6)  # refused
add.send(1, 2).get(timeout="5")  # refused

Server(brokr="redis://localhost")  # refused
Server(5)  # refused
server.send_task(add)  # refused
server.send_chain(add.signature(1, 2))  # refused
send_welcome.map([1])  # refused
add.starmap([(1, "2")])  # refused
add.chunks([("1", 2)], 10)  # refused
chord(group(add.signature(1, 2)), add.partial(), on_failure="stop")  # refused
server.send_group(add.signature(1, 2))  # refused
server.send_chord(group(add.signature(1, 2)))  # refused
add.signature(1, 2).then(add)  # refused
Signature(nme="add")  # refused
Signature(name=5)  # refused
server.new_worker(concurency=5)  # refused
server.task(retrys=3)  # refused
server.task(backoff=5)  # refused
server.task(retry_on="ConnectionError")  # refused
server.task(unique=5)  # refused
server.task(ack="soon")  # refused
server.task(on_failure="retry")  # refused
add.options(ack="early")  # refused
server.task(unique_until="end")  # refused
server.task(exclusive="maybe")  # refused
add.options(unique="k", on_duplicate="drop")  # refused
add.options(exclusive="maybe")  # refused
add.options(exclusive="wait", exclusive_key=str)  # refused
server.periodic("@daily", tx="UTC")  # refused
server.periodic("@daily", overlap="maybe")  # refused
server.periodic(5)  # refused
server.register_periodic_task("@daily", "name", add)  # refused
server.register_periodic_task("@daily", add.signature(1, 2))  # refused
server.schedules.change("name", catch_up="some")  # refused
server.lock("name", timeout="5")  # refused


async def handler() -> str:
    return await fetch.send("x")


async def wrong_handler() -> str:
    return await add.send(1, 2)  # refused


async def wrong_twins() -> str:
    await add.send(1, 2).get_state_async(5)  # refused
    await server.inspect.tasks_async(limt=5)  # refused
    await server.schedules.change_async("name", catch_up="some")  # refused
    await server.send_task_async(add)  # refused
    return await add.send(1, 2).touch_async()  # refused


tasks = TaskSet(queue="mail")
TaskSet(queu="mail")  # refused
TaskSet(queue=5)  # refused
TaskSet("mail")  # refused


@tasks.task(retries=3)
def send_mail(to: str, copies: int = 1) -> int:
    return copies


send_mail.send("ada")
send_mail.send(5)  # refused
send_mail.send("ada", "2")  # refused
send_mail("ada", copies="2")  # refused
tasks.task(retrys=3)  # refused
server.include(tasks, queue="post")
server.include(send_mail)  # refused
server.include(tasks, "mail.")  # refused
server.include(tasks, prefx="mail.")  # refused
server.include(tasks, retries="3")  # refused


@server.task(batch=10)
def store(rows: list[int]) -> list[int]:
    return rows


store.send(1)
store.send([1])  # refused
store.send("a")  # refused
store([1])
store("a")  # refused


@server.task(batch=10)  # refused
def no_list(row: int) -> None: ...


@server.task(batch_within=2)  # refused
def no_batch(rows: list[int]) -> None: ...


def _mail(user_id: int, *, kind: str) -> list[str]:
    return [kind] * user_id


current_task().step("mail", _mail, "7", kind="welcome")  # refused
current_task().step("mail", _mail, 7)  # refused
current_task().step("mail", _mail, 7, kind=1)  # refused
current_task().step("mail", 7)  # refused
current_task().step("mail")  # refused
current_task().step("mail", transaction=1)  # refused
current_task().step("mail", retry=1)  # refused
current_task().step("mail", transaction=True)(_mail, "7", kind="welcome")  # refused
current_task().step_async("mail", _mail, 7, kind="welcome")  # refused
number: int = current_task().step("mail", _mail, 7, kind="welcome")  # refused
