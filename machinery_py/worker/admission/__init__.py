"""Admission of messages and tasks: intake, guards, batches, and runs that must not be repeated."""
