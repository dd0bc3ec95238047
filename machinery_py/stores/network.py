"""Modules that every client of a server loads when it first connects, loaded with its family, while nobody forks."""

from __future__ import annotations

import codecs

codecs.lookup("idna")  # for names of hosts
