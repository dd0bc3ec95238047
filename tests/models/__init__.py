"""What the scripts for Redis do, in plain Python, and machines that compare the two.

    redis.py       a small Redis of typed keys
    messages.py    queues: what the scripts of the broker share         brokers/redis_lua.py
    broker.py      a function for each script of brokers/redis_scripts.py
    looking.py     of brokers/redis_looking.py
    states.py      states and groups: what the scripts of the backend share   backends/redis_lua.py
    backend.py     of backends/redis_scripts.py
    settlement.py  of settlement/redis_scripts.py
    amend.py       of backends/redis_amend.py and settlement/redis_amend.py
    locks.py       of locks/redis.py
    cluster.py     of backends/redis_cluster_scripts.py, brokers/redis_cluster.py, locks/redis_cluster.py
    beside.py      runs script and model with the same arguments, and compares all that can be seen
    slots.py       the same in a cluster, where a step stays in one slot

A function takes the Redis and the arguments of its script, and returns its reply. It says what is true afterwards, not in how
many commands. Texts are bytes seen as Latin-1.
"""
