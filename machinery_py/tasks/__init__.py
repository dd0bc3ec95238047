"""One call of a task: its signature, workflow and state, and its context while it runs."""
