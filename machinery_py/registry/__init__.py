"""Registered tasks: their options, how they are called, and what a call may end in."""
