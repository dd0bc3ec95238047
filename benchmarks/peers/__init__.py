"""machinery_py beside other task queues, on the same servers.

Run `python -m benchmarks.peers --help` from the root of the tree.

    __main__        the command: measures in rounds, prints the table
    systems         what is measured: each system, its settings, how its queue is looked at
    probes          looks at queues from outside
    hosts           the servers: where they are, what they have used, emptying them
    environments    an environment of its own for each of them, made when it is needed
    processes       its processes: started, timed from outside, ended
    rounds          one round of one system
    calls           what each script of a system costs Redis
    report          the table: figures, and how many times better machinery_py is, by rounds
    driving         what the scripts have in common; runs in the other environments too
    NAME/           app, send and drain of each system; `machinery`, `raw` (redis-py alone),
                    `raw_amqp` (with pika) and the prototype `ceiling` run in our environment

Every round checks that each task was done, gave its result and left its queue.
"""
