"""What the scripts for Redis do, in plain Python, and machines that compare the two.

    redis.py       a small Redis of typed keys
    messages.py    queues, shared by the broker's scripts
                   (putting.lua and messages.lua of brokers/redis/lua/)
    broker.py      a function for each script of brokers/redis/scripts.py
    states.py      states and groups, shared by the backend's scripts
                   (backends/redis/lua/changes.lua)
    backend.py     of backends/redis/scripts.py
    settlement.py  of stores/redis.py
    beside.py      runs script and model with the same arguments, and compares all that can be seen

The models hold what a crash or a race must not break: delivery, settlement, changes of states. The
conformance suites hold listings, locks, schedules and claims.

A function takes the Redis and its script's arguments, and returns its reply. It says what is true
afterwards, not in how many commands. Texts are bytes seen as Latin-1.
"""
