"""Holds with a file that their process has locked (connections/session_files.py)."""

from __future__ import annotations

import os
from abc import abstractmethod

from machinery_py.connections.session_files import ALL, SessionFile
from machinery_py.rows.messages import ClaimReceipt, Hold


class FileHold(Hold):
    """A hold whose file says that its process lives, and which messages run in it."""

    id: str = ""

    def __init__(self, file: SessionFile) -> None:
        self._pid = os.getpid()
        self._file = file
        self.id = file.key

    @abstractmethod
    def _give_back(self) -> None:
        """End the hold in the store: all its messages go back, without a strike."""

    def end_run(self, receipt: ClaimReceipt) -> None:
        self._file.ends((receipt.id, ALL))

    def end(self) -> None:
        if self._pid != os.getpid():
            return  # it is the parent's
        try:
            self._give_back()
        except BaseException:
            self.abandon()  # then others find us dead
            raise
        self._file.end()

    def abandon(self) -> None:
        """Release only the lock that proves its life, as a dying process does."""
        self._file.abandon()

    def __del__(self) -> None:
        # Nobody can end it any more: others must find it dead, and not alive for as long as this
        # process.
        if self.id:
            self.abandon()
