"""Results: what a sender has in hand, and how threads and coroutines wait."""
