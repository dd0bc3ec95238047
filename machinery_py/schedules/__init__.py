"""Periodic tasks: cron specs, when each is due, and the scheduler that sends them."""
