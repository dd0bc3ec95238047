"""Tools of this project's own tests and benchmarks; no part of the package.

servers         private real servers: Redis, RabbitMQ, memcached, MongoDB
private         the life of one of their processes
private_redis   Redis: one, with sentinels, as a cluster
private_mongo   MongoDB: mongod, or a stand-in
proxy           a TCP proxy that misbehaves on command
fixtures        one server of each kind for a whole run of pytest, and proxies
forking         work in a forked child
freezing        stopping a worker process as a suspended machine would
"""
