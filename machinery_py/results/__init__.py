"""Results, and how threads and coroutines wait for them."""
