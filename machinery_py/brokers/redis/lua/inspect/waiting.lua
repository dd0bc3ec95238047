-- In: queue. Out: how many messages wait in it.
--! include brokers/redis/lua/room.lua

return waiting_in(unpacked[1])
