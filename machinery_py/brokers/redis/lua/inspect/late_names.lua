-- In: now, start, size. Out: as `late_names`.
--! include connections/redis/lua/prelude.lua
--! include brokers/redis/lua/inspect/late_count.lua

return late_names(unpacked[2], unpacked[3], now_of(unpacked[1]))
