"""The command line: `machinery`, or `python -m machinery_py`.

main          from the words on the line to an exit code
commands      which commands there are, with their options and examples
apps          the user's Server, found and imported
work          machinery worker: the banner, one worker, its end
processes     a process and the pipe that it is told through when to stop
supervisor    -p: several worker processes, started again when they die
reload        --reload: started again when a file changes
health        heartbeat files, machinery health, --health-port
logs          what the worker writes to stderr
look, doctor  commands that look
act           commands that change something
schedules     machinery periodic …
tables        how all that is shown
"""
