"""Measurements of machinery_py's speed: `python -m benchmarks --help`, from the repository's root.

    __main__    the command: picks what is measured, shows progress, prints the table
    figures     what can be measured, and its target
    children    runs one measurement in a fresh process, on a chosen tree of the library
    measure     the measurements themselves; runs in the child
    large       more of them: what comes in hundreds of thousands
    limits      one more: limited tasks of many keys
    workload    what they share: the application, filling its queue, checking the results
    workers     the workers that they measure
    application the application whose worker `starting` starts
    raw_sqlite  the same rows and commits without a library above: what the disk and SQLite allow
    ceiling     the library beside a prototype: `python -m benchmarks ceiling`
    growth      what a task costs as a fleet grows: `python -m benchmarks growth`
    bloat       how the tables of a PostgreSQL grow: `python -m benchmarks bloat`
    against     this tree beside another revision, in turns
    profile     where a task's time goes in a worker: `python -m benchmarks.profile`

Every measurement ends with a check that all tasks are SUCCESS and nothing is left in the queues.
"""
