-- Give back what workers without a heartbeat hold. KEYS: queue, workers
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if redis.call('EXISTS', 'ceiling:beat:' .. worker) == 0 then
    for _, held in ipairs(redis.call('HVALS', 'ceiling:held:' .. worker)) do
      redis.call('LPUSH', KEYS[1], held)
    end
    for _, arrived in ipairs(redis.call('LRANGE', 'ceiling:arrivals:' .. worker, 0, -1)) do
      redis.call('LPUSH', KEYS[1], arrived)
    end
    redis.call('DEL', 'ceiling:held:' .. worker, 'ceiling:arrivals:' .. worker)
    redis.call('SREM', KEYS[2], worker)
  end
end
