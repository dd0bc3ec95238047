"""SMTP server that stores its mails, and fails on command.

Each accepted mail is a line of JSON in `mailbox.jsonl`, written before the 250 is sent. Nothing is
sorted out: a mail that comes twice is there twice, with the same Message-ID. Each address can have
a list of answers, which are used up in order; after them, mails are accepted:

    451, 550, …    that code, instead of accepting the recipient
    drop           the mail is accepted and kept; the connection breaks before the client is told
    fine           accepted
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterable, Mapping
from email.parser import BytesHeaderParser
from email.policy import default as modern
from pathlib import Path

from aiosmtpd.smtp import SMTP, Envelope, Session

DROP = "drop"
FINE = "fine"
START_TIMEOUT = 10.0  # seconds


class Mailbox:
    """An SMTP server in a thread of its own. May be stopped and started again on the same port.

    Args:
        folder: where mailbox.jsonl is written; an old one is gone on with.
        answers: for each address what it is answered, mail for mail.
    """

    def __init__(
        self, folder: Path, *, port: int = 0, answers: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        self.path = folder / "mailbox.jsonl"
        self.port = port  # the real one, once it has been started
        self.accepted = 0  # mails since it was made
        self._answers = {address: list(given) for address, given in (answers or {}).items()}
        self._drop: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._clients: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        """Listen. Returns when clients can connect."""
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="mailbox", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), loop).result(START_TIMEOUT)

    def stop(self) -> None:
        """Break all connections and take no more. May be called twice."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._hang_up(), loop).result(START_TIMEOUT)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def __enter__(self) -> Mailbox:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def mails(self) -> list[dict[str, str]]:
        """All that was accepted: message_id, to, subject, and time (unix seconds, as text)."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    # In the loop's thread

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self, loop), "127.0.0.1", self.port
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.abort()
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def came(self, client: asyncio.Transport) -> None:
        self._clients.add(client)

    def went(self, client: asyncio.Transport) -> None:
        self._clients.discard(client)

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """aiosmtpd's hook for each recipient."""
        given = self._answers.get(address)
        answer = given.pop(0) if given else FINE
        if answer == DROP:
            self._drop.add(address)
        elif answer != FINE:
            return (
                f"{answer} {'mailbox unavailable' if answer.startswith('5') else 'try again later'}"
            )
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        """aiosmtpd's hook for a complete mail."""
        message = BytesHeaderParser(policy=modern).parsebytes(envelope.original_content or b"")
        with self.path.open("a", encoding="utf-8") as file:
            for address in envelope.rcpt_tos:
                line = {
                    "message_id": message["Message-ID"],
                    "to": address,
                    "subject": message["Subject"],
                    "time": f"{time.time():.3f}",
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.accepted += 1
        if self._drop.intersection(envelope.rcpt_tos):
            self._drop.difference_update(envelope.rcpt_tos)
            if isinstance(server.transport, asyncio.Transport):
                server.transport.abort()
        return "250 accepted"


class _Connection(SMTP):
    """One client; the mailbox can break the connection."""

    def __init__(self, mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(mailbox, hostname="localhost", enable_SMTPUTF8=True, loop=loop)
        self._mailbox = mailbox
        self._client: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.Transport):
            self._client = transport
            self._mailbox.came(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._client is not None:
            self._mailbox.went(self._client)
        super().connection_lost(error)


def main() -> None:
    parser = argparse.ArgumentParser(description="An SMTP server for trying things out.")
    parser.add_argument("--port", type=int, default=1025)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="ADDRESS=CODE[,CODE…]",
        help="what the first mails for an address are answered: 451, 550, drop, fine",
    )
    options = parser.parse_args()
    answers = {
        address: codes.split(",")
        for address, _, codes in (one.rpartition("=") for one in options.answer)
    }
    with Mailbox(options.folder, port=options.port, answers=answers) as mailbox:
        print(f"smtp://127.0.0.1:{mailbox.port}, keeping mails in {mailbox.path}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
