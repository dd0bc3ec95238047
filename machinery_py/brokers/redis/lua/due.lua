-- In: now, limit. Out: bodies that are due in Go's set, the first due first.
--! include brokers/redis/lua/messages.lua

key_type(DELAYED, 'zset')
return call('ZRANGEBYSCORE', DELAYED, '-inf', int(now_of(unpacked[1])) .. '000', 'LIMIT', 0, unpacked[2])
