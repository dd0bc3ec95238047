"""The command line: `machinery`, or `python -m machinery_py`.

main            from the words on the command line to an exit code
commands        the commands with their words, options and examples; options: the values of options
apps            import of the user's Server
worker          machinery worker: the banner, one worker, its end
processes       child processes, and the pipe that tells them to stop
supervisor      the worker processes, started again when they die
reload          --reload: the worker starts again when a file changes
watchdog        ends a worker whose descriptors a task has closed
orphans         ends the processes that tasks have started
health          heartbeat files, machinery health, --health-port
logs            log records on stderr
tasks, queues, dead_letters, periodic, doctor     the other commands
output          tables, JSON and questions of all commands
"""
