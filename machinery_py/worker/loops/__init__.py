"""The threads of a worker that go round: they claim, commit, tend and call what is due."""
