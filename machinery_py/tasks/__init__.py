"""One call of a task and what is known of it: signatures, workflows, states, the context while it runs."""
