"""pgqueuer, driven: runs in an environment of its own (requirements.txt), never in ours."""
